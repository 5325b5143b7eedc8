"""MariaDB as a participant: all checks of the suite, rows of every kind, upserts, writers that stay
connected, and servers that die or cannot pre-commit.
"""

import itertools
import uuid
from dataclasses import replace
from decimal import Decimal
from types import SimpleNamespace

import pyarrow as pa
import pymysql
import pytest
from database_fixtures import shown
from lines_suite import (
    RECORD_CHECKS,
    a_prepare_whose_answer_is_lost_is_looked_up,
    database_of,
)
from participant_suite import (
    DONE,
    REFUSED,
    SMOKE,
    UNKNOWN,
    At,
    a_plan,
    another_store_at_the_same_place_is_refused_before_anything_is_written,
    another_store_at_the_same_place_reports_no_loss,
    ask,
    precommit_rows,
    rows,
)

from kafka2pc.protocol.errors import (
    BadOption,
    BadRow,
    BrokerUnreachable,
    NotAuthorized,
    PrecommitFailed,
    StoreUnreachable,
)
from kafka2pc.protocol.states import TxnState
from kafka2pc.stores.mysql import MysqlParticipant, xid

pytestmark = [pytest.mark.mysql, pytest.mark.never_unsteady]


@pytest.fixture
def at(mariadb):
    """A table of this test's own."""
    table = f"t{uuid.uuid4().hex[:8]}"
    mariadb.execute(f"create table {table} (value text) engine=innodb")
    return At(
        MysqlParticipant(mariadb.url, table),
        lambda: [value for (value,) in mariadb.execute(f"select value from {table}")],
        rows,
        another=lambda: MysqlParticipant(mariadb.url, table, record="other_record"),
    )


OF_ANOTHER_STORE = (
    another_store_at_the_same_place_is_refused_before_anything_is_written,
    another_store_at_the_same_place_reports_no_loss,
)


# the whole: in the lesson stores/06_mysql
@pytest.mark.parametrize("check", [*SMOKE, *OF_ANOTHER_STORE], ids=lambda check: check.__name__)
def test_mariadb_keeps(check, at):
    check(at)


@pytest.fixture
def database(mariadb, at):
    """A table of this test's own, for the checks of a database with a table of transactions."""

    def prepare_by_hand(tid, epoch, *statements):
        c = at.store.names.committable(tid, epoch)
        with pymysql.connect(unix_socket=mariadb.socket, user="root", database="kafka2pc") as db:
            with db.cursor() as cursor:
                cursor.execute("xa start %s, %s", xid(c))
                for statement in statements:
                    cursor.execute(statement)
                cursor.execute("xa end %s, %s", xid(c))
                cursor.execute("xa prepare %s, %s", xid(c))

    return database_of(at, mariadb, prepare_by_hand, lambda txn: f"kill {txn.db.thread_id()}")


@pytest.mark.parametrize("check", RECORD_CHECKS, ids=lambda check: check.__name__)
def test_mariadb_keeps_for_its_record(check, database):
    check(database)


@pytest.mark.parametrize("arrived", [True, False], ids=["arrived", "lost"])
def test_a_prepare_whose_answer_is_lost_is_looked_up(database, arrived):
    a_prepare_whose_answer_is_lost_is_looked_up(database, arrived)


def written(store, *batches, plan=None):
    with store.begin(plan or a_plan()) as txn:
        for batch in batches:
            txn.write(batch)
        txn.flush()
        c = txn.precommit()
    assert ask(store.commit, c) is DONE
    return c


def test_every_kind_of_column_arrives(mariadb):
    mariadb.execute(
        "create table kinds (i bigint, f double, t text, b blob, j json, n decimal(10, 2), w"
        " datetime(6), d date, ok boolean, `Ünd %s``` text) default charset utf8mb4"
    )
    one = {
        "i": 1,
        "f": 1.5,
        "t": "sp'ä,te\n\\",
        "b": b"\x00\xff",
        "j": {"a": [1]},
        "n": Decimal("1.20"),
        "ok": True,
        "Ünd %s`": "x",
    }
    rows = pa.RecordBatch.from_pylist([one, dict.fromkeys(one), one | {"t": ""}])
    batch = pa.RecordBatch.from_pydict(
        dict(zip(rows.schema.names, rows.columns))
        | {
            "w": pa.array([0, None, 1_000], pa.timestamp("ns", "Europe/Paris")),
            "d": pa.array([0, None, 1], pa.date32()),
        }
    )
    written(MysqlParticipant(mariadb.url, "kinds"), batch)
    found = mariadb.execute(
        "select i, f, t, b, j, n, ok, `Ünd %s```, cast(w as char), cast(d as char) from kinds where"
        " 1 = %s order by t".replace("Ünd %s", "Ünd %%s"),
        1,
    )
    assert found[0] == (None,) * 10
    assert found[1:] == [
        (1, 1.5, t, b"\x00\xff", '{"a": [1]}', Decimal("1.20"), 1, "x", w, d)
        for t, w, d in (
            ("", "1970-01-01 00:00:00.000001", "1970-01-02"),
            ("sp'ä,te\n\\", "1970-01-01 00:00:00.000000", "1970-01-01"),
        )
    ]


def test_of_two_rows_with_one_key_the_later_stays_in_a_task_and_between_batches(mariadb):
    mariadb.execute(
        "create table words (id int, lang varchar(2), value text, seen int default 7, primary key"
        " (lang, id)) engine=innodb"
    )
    store = MysqlParticipant(mariadb.url, "words", key=("id", "lang"))
    batch = lambda ids, values: pa.RecordBatch.from_pydict(
        {"id": ids, "lang": ["de"] * len(ids), "value": values}
    )
    written(store, batch([1, 2, 1], ["a", "b", "c"]), batch([2, 3], ["d", "e"]))
    assert mariadb.execute("select id, value, seen from words order by id") == [
        (1, "c", 7),
        (2, "d", 7),
        (3, "e", 7),
    ]
    written(store, batch([3, 4], ["f", "g"]))
    # nothing but the key: it is there, or it comes
    written(store, pa.RecordBatch.from_pydict({"id": [4, 5], "lang": ["de", "de"]}))
    assert mariadb.execute("select id, value from words order by id") == [
        (1, "c"),
        (2, "d"),
        (3, "f"),
        (4, "g"),
        (5, None),
    ]


def test_an_instant_is_the_same_in_every_time_zone(mariadb):
    mariadb.execute("create table instants (at timestamp(6) null) engine=innodb")
    [(zone,)] = mariadb.execute("select @@global.time_zone")
    try:
        mariadb.execute("set global time_zone = '+05:00'")
        written(
            MysqlParticipant(mariadb.url, "instants"),
            pa.RecordBatch.from_pydict(
                {"at": pa.array([1_750_000_000_123_456], pa.timestamp("us", "UTC"))}
            ),
        )
        assert mariadb.execute("select unix_timestamp(at), cast(at as char) from instants") == [
            (Decimal("1750000000.123456"), "2025-06-15 20:06:40.123456")
        ]
    finally:
        mariadb.execute("set global time_zone = %s", zone)


def test_while_its_owner_is_connected_a_commit_is_unknown_and_then_done(at, monkeypatch):
    with monkeypatch.context() as careless:
        careless.setattr(pymysql.Connection, "close", lambda connection: None)
        txn = at.store.begin(a_plan())
        at.write(txn, "a")
        c = txn.precommit()
    assert (at.store.commit(c), at.store.abort(c), at.store.describe([c])[0].state) == (
        UNKNOWN,
        UNKNOWN,
        TxnState.PRECOMMITTED,
    )
    txn.db.close()
    assert (ask(at.store.commit, c), at.store.commit(c), at.store.abort(c), at.seen()) == (
        DONE,
        DONE,
        REFUSED,
        ["a"],
    )


def test_a_precommitted_transaction_survives_the_death_of_the_server(mariadb, at):
    c = precommit_rows(at, a_plan(), "a")
    mariadb.kill()
    assert at.store.commit(c) is UNKNOWN
    with pytest.raises(StoreUnreachable, match="MariaDB"):
        at.store.describe([c])
    mariadb.start()
    assert (ask(at.store.commit, c), at.seen()) == (DONE, ["a"])


def test_two_tasks_with_one_key_do_not_wait_for_ever(mariadb):
    mariadb.execute("create table keyed (id int primary key) engine=innodb")
    store = MysqlParticipant(mariadb.url, "keyed", key=("id",), lock_s=1)
    plan, batch = a_plan(), pa.RecordBatch.from_pydict({"id": [1]})
    with store.begin(plan) as first:
        first.write(batch)
        c = first.precommit()
    with (
        pytest.raises(PrecommitFailed, match="Repartition by the key") as locked,
        store.begin(plan) as second,
    ):
        second.write(batch)
    assert f"transactions of this query hold the table: {c.transactional_id}" in locked.value.why
    assert "XA ROLLBACK" not in locked.value.action
    assert (ask(store.commit, c), store.in_doubt(plan.query_id)) == (DONE, [])


def test_what_a_dead_query_holds_is_named_with_the_statement_that_ends_it(mariadb):
    """An error about a lock names the same. An open transaction that is not prepared ends by
    itself.
    """
    mariadb.execute("create table of_both (id int primary key) engine=innodb")
    store = MysqlParticipant(mariadb.url, "of_both", key=("id",), lock_s=1)
    dead, new, batch = a_plan(), a_plan(), pa.RecordBatch.from_pydict({"id": [1]})
    with store.begin(dead) as unprepared, store.begin(dead) as first:
        first.write(batch)
        c = first.precommit()
        [found] = [t for t in store.open_beside(new.query_id) if t.query_id == dead.query_id]
    assert (found.transactional_id, found.places) == (c.transactional_id, ("of_both",))
    assert 0 <= found.age_ms < 60_000 and unprepared.label != c.transactional_id
    with pytest.raises(PrecommitFailed) as locked, store.begin(new) as second:
        second.write(batch)
    assert dead.query_id in locked.value.why and found.abort_with in locked.value.action
    ask(lambda _: DONE if _ended(mariadb, found.abort_with) else UNKNOWN, c)
    assert dead.query_id not in {t.query_id for t in store.open_beside(new.query_id)}


def _ended(mariadb, statement):
    """False while the server still takes the connection of the writer for open."""
    try:
        mariadb.execute(statement)
    except pymysql.MySQLError:
        return False
    return True


@pytest.mark.parametrize("engine", ["myisam", "aria", "memory"])
def test_a_table_that_cannot_vote_is_found_before_anything_is_written(mariadb, engine):
    mariadb.execute(
        f"create table {engine}_t (value text) engine={engine}"
        if engine != "memory"
        else "create table memory_t (value char(9)) engine=memory"
    )
    with pytest.raises(
        BadOption, match=f"(?i)engine {engine}(.|\n)*Nothing was written(.|\n)*InnoDB"
    ):
        MysqlParticipant(mariadb.url, f"{engine}_t").begin(a_plan())


@pytest.mark.parametrize(
    ("version", "comment", "good"),
    [
        ("10.4.34-MariaDB", "mariadb.org", False),
        ("10.5.0-MariaDB-log", "", True),
        ("11.4.2-MariaDB", "", True),
        ("5.7.44", "MySQL", False),
        ("8.0.36", "MySQL", True),
    ],
)
def test_a_server_that_is_too_old_is_refused(mariadb, at, version, comment, good):
    answers = itertools.chain([[(version, version + comment)]], itertools.repeat([]))
    try:
        at.store.check_server(lambda *_: SimpleNamespace(fetchall=lambda: next(answers)))
    except BadOption as e:
        assert not good and version in str(e)
    else:
        assert good


@pytest.mark.parametrize(
    ("table", "batch", "says"),
    [
        ("t", {"value": ["a"], "no": [1]}, "mysql: table t: unknown column 'no'"),
        ("two", {"value": ["a"]}, "'other' doesn't have a default"),
        ("absent", {"value": ["a"]}, "absent"),
        ("t", {"value": [None]}, "cannot be null"),
        ("t", {"value": ["a" * 10]}, "too long"),
        ("t", {"value": [float("nan")]}, "nan"),
    ],
    ids=["column", "no column", "table", "null", "long", "nan"],
)
def test_a_bad_row_is_reported_and_leaves_nothing(mariadb, table, batch, says):
    """An error about a column advises no change of rows."""
    for name, more in (("t", ""), ("two", ", other int not null")):
        mariadb.execute(
            f"create table if not exists {name} (value varchar(5) not null{more}) engine=innodb"
        )
    store, plan = MysqlParticipant(mariadb.url, table), a_plan()
    with (
        pytest.raises((BadOption, BadRow), match=f"(?i){says}") as bad,
        store.begin(plan) as txn,
    ):
        txn.write(pa.RecordBatch.from_pydict(batch))
        txn.precommit()
    of_column = table != "t" or "no" in batch
    assert (bad.type is BadOption) == of_column == ("filter" not in bad.value.action)
    assert store.in_doubt(plan.query_id) == [] and mariadb.execute("select * from t") == []


def test_the_table_is_asked_for_its_columns_before_a_task_begins(mariadb):
    """Names of columns have no case here."""
    mariadb.execute("create table chosen (id int primary key, Item varchar(9)) engine=innodb")
    names = ["key", "value", "id", "item"]
    with pytest.raises(BadOption, match="mysql: table chosen has no column key, value") as bad:
        MysqlParticipant(mariadb.url, "chosen").check_columns(names)
    assert 'columns=("id", "item") of the participant mysql' in bad.value.action
    with pytest.raises(BadOption, match="there is no table no_such"):
        MysqlParticipant(mariadb.url, "no_such").check_columns(names)
    store = MysqlParticipant(mariadb.url, "chosen", columns=("id", "item"), key=("id",))
    store.check_columns(names)
    with store.begin(a_plan()) as txn:
        txn.write(pa.RecordBatch.from_pydict({"key": ["1"], "id": [1], "item": ["a"]}))
        c = txn.precommit()
    assert ask(store.commit, c) is DONE
    assert mariadb.execute("select id, item from chosen") == [(1, "a")]
    with pytest.raises(BadOption, match="table chosen has no unique key on item"):
        MysqlParticipant(mariadb.url, "chosen", columns=["item"], key=["item"]).check_columns(names)


def test_rights_are_asked_for_by_name(mariadb, at):
    mariadb.execute("create user alice@localhost")
    mariadb.execute("grant select on kafka2pc.* to alice@localhost")
    at.store.store_id()  # makes the table of transactions
    as_alice = MysqlParticipant(mariadb.url.replace("root@", "alice@"), at.store.table)
    with pytest.raises(NotAuthorized, match="kafka2pc_transactions"):
        as_alice.begin(a_plan())
    mariadb.execute("grant all on kafka2pc.kafka2pc_transactions to alice@localhost")
    with pytest.raises(NotAuthorized, match=at.store.table):
        precommit_rows(At(as_alice, list, rows), a_plan(), "a")
    mariadb.execute("create table keyed_items (id int primary key, item int) engine=innodb")
    mariadb.execute("grant insert, update on kafka2pc.keyed_items to alice@localhost")
    mariadb.execute("revoke select on kafka2pc.* from alice@localhost")
    keyed = MysqlParticipant(as_alice.url, "keyed_items", key=("id",))
    with pytest.raises(NotAuthorized, match="SELECT command denied"), keyed.begin(a_plan()) as txn:
        txn.write(pa.RecordBatch.from_pydict({"id": [1], "item": [1]}))
    with pytest.raises(NotAuthorized, match="user or password") as caught:
        MysqlParticipant(mariadb.url.replace("root@", "mallory:hunter2@"), "t").store_id()
    assert "hunter2" not in str(caught.value)


def asked(url):
    """Each call that connects to the server at `url`."""
    store = MysqlParticipant(url, "t")
    c = store.names.committable("id", 0)
    assert "hun" not in repr(store) + repr(c)
    return (
        store.store_id,
        lambda: store.begin(a_plan()),
        lambda: store.in_doubt("q"),
        lambda: store.traces("q"),
        lambda: store.describe([c]),
    )


@pytest.mark.parametrize(
    "url", ["mysql://bob:hunter2@127.0.0.1:1/db", "mysql://bob:hun@ter2@127.0.0.1:1/db"]
)
def test_a_server_that_is_not_there_is_reported_without_the_password(url):
    for verb in asked(url):
        error, text = shown(verb)
        assert type(error) is StoreUnreachable and isinstance(error, BrokerUnreachable), text
        assert (
            "MariaDB" in error.what
            and "network" in error.action
            and "hun" not in text
            and "ter2" not in text
        )


UNREADABLE = {
    "bracket": "mysql://bob:hunter2@[bad",
    "no host": "mysql://bob:hunter2",
    "slash": "mysql://bob:hun/ter2@127.0.0.1:1/db",
    "digits and slash": "mysql://bob:1/hunter2@127.0.0.1:1/db",
    "question mark": "mysql://bob:hun?ter2@127.0.0.1:1/db",
    "hash": "mysql://bob:hun#ter2@127.0.0.1:1/db",
    "digits and hash": "mysql://bob:1#hunter2@127.0.0.1:1/db",
    "option": "mysql://bob:1?hunter2=2@127.0.0.1/db",
    "sign": "mysql://bob:hunter2\u2100@127.0.0.1/db",
    "port": "mysql://bob:hunter2@127.0.0.1:hunter2/db",
}


@pytest.mark.parametrize("url", UNREADABLE.values(), ids=UNREADABLE)
def test_a_url_that_cannot_be_read_is_reported_without_the_password(url):
    for verb in (
        *asked(url),
        lambda: MysqlParticipant(url, "t").commit(
            MysqlParticipant(url, "t").names.committable("id", 0)
        ),
    ):
        error, text = shown(verb)
        assert type(error) is BadOption and "URL" in error.what and "percent" in error.action, text
        assert "hun" not in text and "ter2" not in text


def test_a_long_prefix_is_refused_and_the_longest_fits(mariadb, at):
    with pytest.raises(BadOption, match="at most 27 bytes"):
        MysqlParticipant(mariadb.url, "t", prefix="x" * 28)
    store = MysqlParticipant(mariadb.url, at.store.table, prefix="x" * 27)
    c = precommit_rows(At(store, list, rows), a_plan(10**9), "a")
    assert ask(store.commit, c) is DONE


def test_lines_of_a_week_ago_are_forgotten_and_only_those_of_this_query(mariadb, at):
    plan, other = a_plan(), a_plan()
    old, left, foreign = (
        precommit_rows(at, plan, "a"),
        precommit_rows(at, plan, "b"),
        precommit_rows(at, other, "c"),
    )
    assert ask(at.store.commit, old) is DONE and ask(at.store.commit, foreign) is DONE
    for c in (old, foreign):
        mariadb.execute(
            "update kafka2pc_transactions set began = now() - interval 8 day where transactional_id"
            " = %s",
            c.transactional_id,
        )
    at.store.begin(replace(plan, batch_id=1)).db.close()
    assert [s.state for s in at.store.describe([old, left, foreign])] == [
        None,
        TxnState.PRECOMMITTED,
        TxnState.COMMITTED,
    ]
    assert ask(at.store.commit, left) is DONE
