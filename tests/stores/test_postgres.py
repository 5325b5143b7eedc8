"""PostgreSQL as a participant: all checks of the suite, rows of every kind, upserts, and a server
that dies, is full, or refuses.
"""

import threading
import uuid
from dataclasses import replace
from decimal import Decimal
from functools import partial

import psutil
import psycopg
import pyarrow as pa
import pytest
from database_fixtures import shown
from driver_steps import decide_only, write
from lines_suite import (
    RECORD_CHECKS,
    a_prepare_whose_answer_is_lost_is_looked_up,
    a_store_of_an_older_version_goes_on,
    database_of,
    what_an_operator_rolled_back_is_reported_as_lost,
)
from marks import first_of
from participant_suite import (
    DONE,
    DURABLE,
    REFUSED,
    REQUIRED,
    SMOKE,
    UNKNOWN,
    At,
    a_plan,
    precommit_rows,
    rows,
)

from kafka2pc.decision_logs.table import TableLog
from kafka2pc.local.databases import LocalPostgres
from kafka2pc.protocol.driver import Driver
from kafka2pc.protocol.errors import (
    BadOption,
    BadRow,
    BrokerUnreachable,
    NotAuthorized,
    PrecommitFailed,
    StoreUnreachable,
    WrongCluster,
)
from kafka2pc.protocol.log.slots import MemoryLog
from kafka2pc.protocol.messages import Mode
from kafka2pc.protocol.phases.restore import restore
from kafka2pc.protocol.states import TxnState
from kafka2pc.stores.postgres import PostgresParticipant, connect
from kafka2pc.stores.staged import StagedParticipant


def table(postgres, kind=PostgresParticipant):
    """A table of this test's own."""
    name = f"t{uuid.uuid4().hex[:8]}"
    postgres.execute(f"create table {name} (value text)")
    by_hand = lambda c: postgres.execute(f"commit prepared '{c.transactional_id}.{c.state.epoch}'")
    prepares = kind is PostgresParticipant
    return At(
        kind(postgres.url, name),
        lambda: [value for (value,) in postgres.execute(f"select value from {name}")],
        rows,
        another=(lambda: kind(postgres.url, name, record="other_record")) if prepares else None,
        half_commit=by_hand if prepares else None,
    )


@pytest.fixture
def at(postgres):
    return table(postgres)


@pytest.mark.parametrize("check", REQUIRED + DURABLE, ids=lambda check: check.__name__)
@pytest.mark.never_unsteady
def test_postgres_keeps(check, at):
    check(at)


# the whole: in the lesson stores/08_staged
@pytest.mark.parametrize("check", SMOKE, ids=lambda check: check.__name__)
@pytest.mark.never_unsteady
def test_staged_rows_in_postgres_keep(check, postgres):
    check(table(postgres, StagedParticipant))


@pytest.fixture
def database(postgres, at):
    """A table of this test's own, for the checks of a database with a table of transactions."""

    def prepare_by_hand(tid, epoch, *statements):
        with psycopg.connect(postgres.url, autocommit=True) as db:
            for statement in ("begin", *statements, f"prepare transaction '{tid}.{epoch}'"):
                db.execute(statement)

    kill = lambda txn: f"select pg_terminate_backend({txn.db.info.backend_pid})"
    return database_of(at, postgres, prepare_by_hand, kill)


@pytest.mark.parametrize("check", RECORD_CHECKS, ids=lambda check: check.__name__)
@pytest.mark.never_unsteady
def test_postgres_keeps_for_its_record(check, database):
    check(database)


@pytest.mark.never_unsteady
def test_staged_rows_whose_table_an_operator_dropped_are_lost(postgres, database):
    kind = lambda url, table, **more: StagedParticipant(url, table, name="db")
    staged = replace(database, make=partial(kind, postgres.url, database.make().table))
    what_an_operator_rolled_back_is_reported_as_lost(staged)


@pytest.mark.parametrize("arrived", [True, False], ids=["arrived", "lost"])
@pytest.mark.never_unsteady
def test_a_prepare_whose_answer_is_lost_is_looked_up(database, arrived):
    a_prepare_whose_answer_is_lost_is_looked_up(database, arrived)


FORMER_RECORD = """
    create table former_record (
        transactional_id text, epoch bigint, query_id text not null,
        outcome text not null default 'open', began timestamptz not null default now(),
        primary key (transactional_id, epoch)
    )"""


def test_a_store_of_an_older_version_goes_on(postgres, database):
    """Its decisions name the server and the database only."""
    [(server,)] = postgres.execute("select system_identifier::text from pg_control_system()")
    [(name,)] = postgres.execute("select current_database()")
    lines = "insert into former_record values ('{}', 0, '{}')"
    a_store_of_an_older_version_goes_on(database, FORMER_RECORD, lines, f"{server}/{name}")


def written(store, *batches, plan=None):
    with store.begin(plan or a_plan()) as txn:
        for batch in batches:
            txn.write(batch)
        txn.flush()
        c = txn.precommit()
    assert store.commit(c) is DONE
    return c


def test_every_kind_of_column_arrives(postgres):
    postgres.execute(
        "create table kinds (i bigint, f double precision, t text, b bytea, j jsonb, n numeric,"
        ' w timestamptz, d date, ok boolean, "Ünd" text)'
    )
    one = {
        "i": 1,
        "f": 1.5,
        "t": 'sp"ä,te\n',
        "b": b"\x00\xff",
        "j": {"a": [1]},
        "n": Decimal("1.20"),
        "ok": True,
        "Ünd": "x",
    }
    rows = pa.RecordBatch.from_pylist([one, dict.fromkeys(one), one | {"t": ""}])
    batch = pa.RecordBatch.from_pydict(
        dict(zip(rows.schema.names, rows.columns))
        | {
            "w": pa.array([0, None, 1], pa.timestamp("us", "UTC")),
            "d": pa.array([0, None, 1], pa.date32()),
        }
    )
    written(PostgresParticipant(postgres.url, "public.kinds"), batch, batch)
    found = postgres.execute(
        """select i, f, t, b, j, n, ok, "Ünd", w is null, d::text from kinds order by i, t"""
    )
    same = (1, 1.5, b"\x00\xff", {"a": [1]}, Decimal("1.20"), True, "x")
    assert [f[:2] + f[3:8] for f in found[:4]] == [same] * 4 and [f[2] for f in found[:4]] == [
        "",
        "",
        'sp"ä,te\n',
        'sp"ä,te\n',
    ]
    assert found[4] == (None,) * 8 + (True, None) and found[2][9] == "1970-01-01"


def test_words_that_are_dictionaries_and_views_arrive(postgres, at):
    # pyarrow below 16 has no views
    views = [pa.string_view()] if hasattr(pa, "string_view") else [pa.large_string()]
    for kind in (pa.large_string(), *views, pa.dictionary(pa.int32(), pa.string())):
        written(at.store, pa.RecordBatch.from_pydict({"value": pa.array(["a", None], kind)}))
    assert postgres.execute(
        f"select value, count(*)::int from {at.store.table} group by value order by value"
    ) == [("a", 3), (None, 3)]


@pytest.mark.never_unsteady
def test_of_two_rows_with_one_key_the_later_stays_in_a_task_and_between_batches(postgres):
    postgres.execute(
        "create table words (id int, lang text, value text, seen int default 7, primary key (lang,"
        " id))"
    )
    store = PostgresParticipant(postgres.url, "words", key=("id", "lang"))
    batch = lambda ids, values: pa.RecordBatch.from_pydict(
        {"id": ids, "lang": ["de"] * len(ids), "value": values}
    )
    written(store, batch([1, 2, 1], ["a", "b", "c"]), batch([2, 3], ["d", "e"]))
    assert postgres.execute("select id, value, seen from words order by id") == [
        (1, "c", 7),
        (2, "d", 7),
        (3, "e", 7),
    ]
    written(store, batch([3, 4], ["f", "g"]))
    assert postgres.execute("select id, value from words order by id") == [
        (1, "c"),
        (2, "d"),
        (3, "f"),
        (4, "g"),
    ]
    # nothing but the key: it is there, or it comes
    written(store, pa.RecordBatch.from_pydict({"id": [4, 5], "lang": ["de", "de"]}))
    assert postgres.execute("select count(*) from words") == [(5,)]
    assert postgres.execute(
        "select count(*) from pg_tables where tablename ~ '^kafka2pc_[0-9]+$'"
    ) == [(0,)]


@pytest.fixture(scope="module")
def mortal():
    """A server that tests kill and start again; each has its own table."""
    with LocalPostgres() as server:
        yield server


@pytest.mark.never_unsteady
def test_a_precommitted_transaction_survives_the_death_of_the_server(mortal):
    mortal.execute("create table prepared (value text)")
    store = PostgresParticipant(mortal.url, "prepared")
    c = precommit_rows(At(store, list, rows), a_plan(), "a")
    # on a busy machine it would notice late that its server is dead
    psutil.Process(mortal.server.get_pid()).children()[0].suspend()
    mortal.kill()
    assert store.commit(c) is UNKNOWN
    with pytest.raises(StoreUnreachable, match="PostgreSQL"):
        store.describe([c])
    mortal.start()
    assert (store.commit(c), mortal.execute("select value from prepared")) == (DONE, [("a",)])


def test_a_server_that_cannot_precommit_is_found_before_anything_is_written():
    with LocalPostgres(prepared=0) as server:
        check_too_few_prepared(server)


def check_too_few_prepared(server):
    server.execute("create table t (value text)")
    with pytest.raises(
        BadOption,
        match="max_prepared_transactions = 0(.|\n)*Nothing was written(.|\n)*Restart PostgreSQL",
    ):
        PostgresParticipant(server.url, "t").begin(a_plan())
    with pytest.raises(BadOption, match="ALTER SYSTEM SET max_prepared_transactions"):
        PostgresParticipant(server.url, "t").check_columns(["value"])
    server.execute("alter system set max_prepared_transactions = 1")
    server.restart()
    at = At(PostgresParticipant(server.url, "t"), list, rows)
    dead, plan = a_plan(), a_plan()
    c = precommit_rows(at, dead, "a")
    with pytest.raises(PrecommitFailed, match="maximum number of prepared transactions") as full:
        precommit_rows(at, plan, "b")
    assert "1 belong to query " + dead.query_id in full.value.why
    assert "Set max_prepared_transactions to at least twice" in full.value.action
    assert f"ROLLBACK PREPARED '{c.transactional_id}.0'" in full.value.action
    assert at.store.commit(c) is DONE
    c = precommit_rows(at, plan, "b")
    with pytest.raises(PrecommitFailed) as full:
        precommit_rows(at, plan, "c")
    assert "This query has 1 of them." in full.value.why
    assert "ROLLBACK" not in full.value.action and at.store.commit(c) is DONE


def server_says(postgres, name, value):
    """`name` as a connection sees it on a server where `value` is the default."""
    postgres.execute(f"alter role postgres set {name} = {value}")
    try:
        with connect(StagedParticipant(postgres.url, "t")) as db:
            return db.execute(f"show {name}").fetchone()[0]
    finally:
        postgres.execute(f"alter role postgres reset {name}")


def test_a_commit_is_on_the_disk_whatever_the_user_has_set(postgres):
    assert [
        server_says(postgres, "synchronous_commit", value)
        for value in ("off", "on", "remote_apply")
    ] == ["on", "on", "remote_apply"]


def test_a_server_that_vanishes_is_noticed(postgres):
    store, log = PostgresParticipant(postgres.url, "t"), TableLog(postgres.url, "a")
    for opened in (connect(store), log.connect()):
        with opened as db:
            found = db.info.get_parameters()
        assert (
            int(found["keepalives_idle"])
            + int(found["keepalives_interval"]) * int(found["keepalives_count"])
            <= 30
        )
        assert found["tcp_user_timeout"] == "30000"


@pytest.mark.parametrize(
    "unlogged", first_of([False, True], ids={False: "logged", True: "unlogged"}.get)
)
@pytest.mark.never_unsteady
def test_rows_that_wait_survive_the_death_of_the_server_unless_they_need_not(mortal, unlogged):
    table = "unlogged" if unlogged else "logged"
    mortal.execute(f"create table rows_{table} (value text)")
    store = StagedParticipant(mortal.url, f"rows_{table}", unlogged=unlogged)
    c = precommit_rows(At(store, list, rows), a_plan(), "a", "b")
    mortal.kill()
    mortal.start()
    assert store.describe([c])[0].state is (TxnState.ABORTED if unlogged else TxnState.PRECOMMITTED)
    assert store.commit(c) is (REFUSED if unlogged else DONE)
    found = mortal.execute(f"select value from rows_{table}")
    assert found == ([] if unlogged else [("a",), ("b",)])


@pytest.mark.never_unsteady
def test_two_tasks_with_one_key_do_not_wait_for_ever(postgres):
    postgres.execute("create table keyed (id int primary key)")
    store = PostgresParticipant(postgres.url, "keyed", key=("id",), lock_ms=200)
    plan, batch = a_plan(), pa.RecordBatch.from_pydict({"id": [1]})
    with store.begin(plan) as first:
        first.write(batch)
        c = first.precommit()
    with (
        pytest.raises(PrecommitFailed, match="Repartition by the key") as locked,
        store.begin(plan) as second,
    ):
        second.write(batch)
        second.precommit()
    assert f"transactions of this query hold the table: {c.transactional_id}" in locked.value.why
    assert "ROLLBACK" not in locked.value.action
    assert (store.commit(c), store.in_doubt(plan.query_id)) == (DONE, [])


def test_what_a_dead_query_holds_is_named_with_the_statement_that_ends_it(postgres):
    """Of its own prefix, in this table; an error about a lock names the same."""
    postgres.execute("create table of_both (id int primary key); create table of_one (id int)")
    store = PostgresParticipant(postgres.url, "of_both", key=("id",), lock_ms=200)
    elsewhere = PostgresParticipant(postgres.url, "of_one")
    foreign = PostgresParticipant(postgres.url, "of_both", prefix="kafka2pc-more")
    by_hand = "kafka2pc-nightly-load"  # of another program
    postgres.execute(f"begin; insert into of_both values (9); prepare transaction '{by_hand}'")
    dead, new, batch = a_plan(), a_plan(), pa.RecordBatch.from_pydict({"id": [1]})
    left = []
    for each, ids in ((store, [1]), (elsewhere, [1]), (foreign, [2])):
        with each.begin(dead) as txn:
            txn.write(pa.RecordBatch.from_pydict({"id": ids}))
            left.append(txn.precommit())
    [found] = store.open_beside(new.query_id)
    assert (found.transactional_id, found.places) == (left[0].transactional_id, ("public.of_both",))
    assert 0 <= found.age_ms < 60_000 and store.open_beside(dead.query_id) == []
    with pytest.raises(PrecommitFailed) as locked, store.begin(new) as second:
        second.write(batch)
        second.precommit()
    assert dead.query_id in locked.value.why and found.abort_with in locked.value.action
    postgres.execute(found.abort_with)
    assert store.open_beside(new.query_id) == []
    postgres.execute(f"rollback prepared '{by_hand}'")
    assert [each.abort(c) for each, c in ((elsewhere, left[1]), (foreign, left[2]))] == [DONE] * 2


def refused_by_table(at, c, kind, match):
    """The error of a commit of decided rows. It says that only the table can be changed."""
    with pytest.raises(kind, match=match) as refused:
        at.store.commit(c)
    assert "only the table can be changed" in refused.value.action
    assert "decided" in refused.value.risk
    return refused.value


@pytest.mark.never_unsteady
def test_decided_rows_that_the_table_refuses_need_another_table(postgres):
    at = table(postgres, StagedParticipant)
    c = precommit_rows(at, a_plan(), "too long")
    postgres.execute(f"alter table {at.store.table} add constraint short check (value < 'b')")
    refused = refused_by_table(at, c, BadRow, "violates check constraint")
    assert "filter it out" not in str(refused)
    postgres.execute(f"alter table {at.store.table} drop constraint short")
    assert (at.store.commit(c), at.seen()) == (DONE, ["too long"])


@pytest.mark.never_unsteady
def test_decided_rows_that_wait_go_into_the_table_for_which_they_were_written(postgres):
    at, other = table(postgres, StagedParticipant), table(postgres, StagedParticipant)
    c = precommit_rows(at, a_plan(), "a")
    assert (other.store.commit(c), at.seen(), other.seen()) == (DONE, ["a"], [])


def in_schema(postgres, schema):
    """The URL of a connection whose search_path is this schema."""
    postgres.execute(f"create schema if not exists {schema}")
    sign = "&" if "?" in postgres.url else "?"
    return f"{postgres.url}{sign}options=-csearch_path%3D{schema},public"


def test_a_search_path_that_shows_another_table_is_refused(postgres):
    """Also with one record for both. A participant that has found its tables keeps them."""
    name = f"t{uuid.uuid4().hex[:8]}"
    urls = [in_schema(postgres, schema) for schema in ("one", "two")]
    for schema in ("one", "two"):
        postgres.execute(f"create table {schema}.{name} (value text)")

    def driver(url, table, log, query_id, **more):
        store = PostgresParticipant(url, table, record="public.kafka2pc_transactions", **more)
        return Driver(query_id=query_id, log=log, participants={store.name: store})

    about = MemoryLog(), a_plan().query_id
    first = driver(urls[0], name, *about)
    decide_only(first, 0, rows(["a"]))
    for changed in (driver(urls[1], name, *about), driver(urls[0], f"two.{name}", *about)):
        with pytest.raises(WrongCluster):
            restore(changed, 0)
    same = driver(urls[1], f"one.{name}", *about)
    assert restore(same, 0).mode is Mode.DRAIN
    first.participants["postgres"].url = urls[1]
    write(first, 1, rows(["b"]))
    found = postgres.execute(f"select value from one.{name} order by 1")
    assert (found, postgres.execute(f"select * from two.{name}")) == ([("a",), ("b",)], [])


def test_of_a_staged_query_the_waiting_tables_are_listed(postgres):
    at, dead, new = table(postgres, StagedParticipant), a_plan(), a_plan()
    c = precommit_rows(at, dead, "a")
    [found] = [t for t in at.store.open_beside(new.query_id) if t.query_id == dead.query_id]
    assert at.store.waiting(c).as_string() in found.places[0]
    postgres.execute(found.abort_with)
    left = {t.query_id for t in at.store.open_beside(new.query_id)}
    assert at.store.commit(c) is REFUSED and dead.query_id not in left


@pytest.mark.never_unsteady
@pytest.mark.parametrize(
    ("table", "batch", "says"),
    [
        ("t", {"value": ["a"], "no": [1]}, 'postgres: table public.t: column "no"'),
        ("absent", {"value": ["a"]}, '"absent" does not exist'),
        ("t", {"value": [None]}, "null value"),
        ("t", {"value": ["a\x00"]}, "invalid byte sequence"),
        ("t", {"value": ["a", "a"]}, "deferred"),
    ],
    ids=["column", "table", "null", "zero", "at the end"],
)
def test_a_bad_row_is_reported_and_leaves_nothing(postgres, table, batch, says):
    """An error about a column advises no change of rows."""
    postgres.execute(
        "create table if not exists t (value text not null, constraint deferred unique (value)"
        " deferrable initially deferred)"
    )
    store, plan = PostgresParticipant(postgres.url, table), a_plan()
    with pytest.raises((BadOption, BadRow), match=says) as bad, store.begin(plan) as txn:
        txn.write(pa.RecordBatch.from_pydict(batch))
        txn.precommit()
    of_column = table == "absent" or "no" in batch
    assert (bad.type is BadOption) == of_column == ("ilter" not in bad.value.action)
    assert "Nothing of this attempt becomes visible" in bad.value.risk
    assert store.in_doubt(plan.query_id) == [] and postgres.execute("select * from t") == []


@pytest.mark.never_unsteady
def test_the_table_is_asked_for_its_columns_before_a_task_begins(postgres):
    """Once in a process, and the error names the choice that fits."""
    postgres.execute("create table chosen (id int, item text, note text)")
    names = ["key", "value", "id", "item"]
    store = PostgresParticipant(postgres.url, "chosen")
    with pytest.raises(BadOption, match="postgres: table public.chosen has no column key") as bad:
        store.check_columns(names)
    assert 'columns=("id", "item") of the participant postgres' in bad.value.action
    assert bad.value.risk == "No. Nothing was written."
    with pytest.raises(BadOption, match="there is no table no_such"):
        PostgresParticipant(postgres.url, "no_such").check_columns(names)
    with pytest.raises(BadOption, match="columns= names ID, and the rows"):
        PostgresParticipant(postgres.url, "chosen", columns=["ID"]).check_columns(names)
    store = PostgresParticipant(postgres.url, "chosen", columns=("id", "item"))
    store.check_columns(names)
    store.url = "postgresql://localhost:1/no"
    store.check_columns(names)


@pytest.mark.never_unsteady
def test_of_the_columns_of_the_rows_the_table_takes_those_that_are_named(postgres):
    postgres.execute("create table taken (id int primary key, item text)")
    store = PostgresParticipant(postgres.url, "taken", columns=("id", "item"), key=("id",))
    batch = {"key": ["1", "2"], "id": [1, 2], "item": ["a", "b"]}
    written(store, pa.RecordBatch.from_pydict(batch))
    assert postgres.execute("select * from taken order by id") == [(1, "a"), (2, "b")]
    staged = StagedParticipant(postgres.url, "taken", columns=("id", "item"))
    written(staged, pa.RecordBatch.from_pydict(batch | {"id": [3, 4]}))
    assert postgres.execute("select count(*) from taken") == [(4,)]
    no_key = PostgresParticipant(postgres.url, "taken", columns=("id", "item"), key=("item",))
    with pytest.raises(BadOption, match="no unique .* constraint") as bad:
        written(no_key, pa.RecordBatch.from_pydict(batch))
    assert "correct key=" in bad.value.action
    with pytest.raises(BadOption, match="Write a tuple: key="):
        PostgresParticipant(postgres.url, "taken", key="id")


@pytest.mark.never_unsteady
def test_decided_rows_whose_column_is_gone_need_the_column(postgres):
    at = table(postgres, StagedParticipant)
    c = precommit_rows(at, a_plan(), "a")
    postgres.execute(f"alter table {at.store.table} rename value to other")
    refused_by_table(at, c, BadOption, 'column "value"')
    postgres.execute(f"alter table {at.store.table} rename other to value")
    assert (at.store.commit(c), at.seen()) == (DONE, ["a"])


@pytest.mark.never_unsteady
def test_rights_are_asked_for_by_name_and_only_where_rows_are_written(postgres, at):
    at.store.store_id()  # the table of transactions is there
    postgres.execute("create role alice login")
    as_alice = PostgresParticipant(postgres.url.replace("postgres:@", "alice:@"), at.store.table)
    with pytest.raises(NotAuthorized, match="permission denied"):
        as_alice.begin(a_plan())
    postgres.execute("grant all on kafka2pc_transactions to alice")
    with pytest.raises(NotAuthorized, match=at.store.table):
        precommit_rows(At(as_alice, list, rows), a_plan(), "a")
    c = precommit_rows(at, a_plan(), "a")
    with pytest.raises(
        NotAuthorized, match="Only the role that prepared(.|\n)*Connect as postgres"
    ):
        as_alice.commit(c)
    assert at.store.commit(c) is DONE
    postgres.execute(f"grant all on {at.store.table} to alice")
    log = MemoryLog()
    driver = Driver(query_id=str(uuid.uuid4()), log=log, participants={"postgres": as_alice})
    decide_only(driver, 0, rows(["decided"]))
    postgres.execute(f"revoke all on {at.store.table} from alice")
    assert restore(driver, 0).mode is Mode.DRAIN and at.seen() == ["a", "decided"]
    with pytest.raises(NotAuthorized, match=at.store.table):
        write(driver, 1, rows(["b"]))


def asked(url):
    """Each call that connects to the server at `url`, the decision log's too."""
    for store in (PostgresParticipant(url, "t"), StagedParticipant(url, "t")):
        c = store.names.committable("id", 0)
        assert "hun" not in repr(store) + repr(c)
        yield from (
            store.store_id,
            lambda store=store: store.begin(a_plan()),
            lambda store=store: store.in_doubt("q"),
            lambda store=store: store.traces("q"),
            lambda store=store, c=c: store.describe([c]),
        )
    yield lambda: TableLog(url, "a")


@pytest.mark.parametrize(
    "url",
    ["postgresql://bob:hunter2@127.0.0.1:1/db", "host=127.0.0.1 port=1 user=bob password=hunter2"],
)
def test_a_server_that_is_not_there_is_reported_without_the_password(url):
    for verb in asked(url):
        error, text = shown(verb)
        assert type(error) is StoreUnreachable and isinstance(error, BrokerUnreachable), text
        assert "PostgreSQL" in error.what and "network" in error.action and "hun" not in text


UNREADABLE = {
    "bracket": "postgresql://bob:hunter2@[bad",
    "no host": "postgresql://bob:hunter2",
    "at sign": "postgresql://bob:hun@ter2@127.0.0.1:1/db",
    "slash": "postgresql://bob:hun/ter2@127.0.0.1:1/db",
    "digits and slash": "postgresql://bob:1/hunter2@127.0.0.1:1/db",
    "percent": "postgresql://bob:hunter2%@127.0.0.1:1/db",
    "option": "postgresql://bob:hunter2@127.0.0.1:1/db?nosuch=hunter2",
    "port": "postgresql://bob:hunter2@127.0.0.1:hunter2/db",
    "blank": "host=127.0.0.1 port=1 password=hun ter2 user=bob",
    "quote": "host=127.0.0.1 port=1 password='hunter2",
    "zero": "postgresql://bob:hunter2\x00@127.0.0.1:1/db",
}


@pytest.mark.parametrize("url", UNREADABLE.values(), ids=UNREADABLE)
def test_a_url_that_cannot_be_read_is_reported_without_the_password(url):
    for verb in (
        *asked(url),
        lambda: PostgresParticipant(url, "t").commit(
            PostgresParticipant(url, "t").names.committable("id", 0)
        ),
    ):
        error, text = shown(verb)
        assert type(error) is BadOption and "URL" in error.what and "percent" in error.action, text
        assert "hun" not in text and "ter2" not in text


def test_a_url_with_any_password_that_is_encoded_is_read(postgres):
    postgres.execute("create role carol login password 'a/b@c:d?e#f%%'")
    for password in ("a%2Fb%40c%3Ad%3Fe%23f%25", "a%2Fb%40c:d?e%23f%25"):
        url = postgres.url.replace("postgres:@", f"carol:{password}@")
        assert connect(PostgresParticipant(url, "t")).info.user == "carol"


@pytest.mark.never_unsteady
def test_many_that_begin_at_once_make_one_table_of_records(postgres, at):
    store = PostgresParticipant(postgres.url, at.store.table, record="public.fresh_records")
    plan, begun = a_plan(), []

    def begin():
        begun.append(store.begin(plan))

    threads = [threading.Thread(target=begin) for _ in range(10)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert (
        len({txn.c.transactional_id for txn in begun}) == len(store.in_doubt(plan.query_id)) == 10
    )
    for txn in begun:
        txn.db.close()


def test_lines_of_a_week_ago_are_forgotten_and_only_those_of_this_query(postgres, at):
    plan, other = a_plan(), a_plan()
    old, open_, foreign = (
        precommit_rows(at, plan, "a"),
        precommit_rows(at, plan, "b"),
        precommit_rows(at, other, "c"),
    )
    assert at.store.commit(old) is DONE and at.store.commit(foreign) is DONE
    postgres.execute(
        "update kafka2pc_transactions set began = now() - interval '8 days' where outcome ="
        " 'committed'"
    )
    at.store.begin(replace(plan, batch_id=1)).db.close()
    assert [s.state for s in at.store.describe([old, open_, foreign])] == [
        None,
        TxnState.PRECOMMITTED,
        TxnState.COMMITTED,
    ]
    assert at.store.commit(open_) is DONE
