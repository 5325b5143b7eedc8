"""No command without --force loses a decided row or shows a row twice."""

import json
import re
import uuid
from dataclasses import replace
from unittest.mock import patch

import pyarrow as pa
import pytest
from dead_query_fixtures import ROWS, DeadQuery, find_open, finding_of, newest_file
from pyiceberg.utils.config import Config
from shell import run, typed
from table_stores import TABLES

from kafka2pc.decision_logs.files import FileLog
from kafka2pc.kafka.participant import KafkaParticipant
from kafka2pc.operations import repair
from kafka2pc.operations.access import Access
from kafka2pc.operations.doctor.doctor import doctor
from kafka2pc.operations.query import open_query
from kafka2pc.operations.repair import driver_of, operate, plan_restore, restore
from kafka2pc.operations.survey import Survey, find_prefix, find_prefixes, find_transactions
from kafka2pc.proof.child_process import Failed, until
from kafka2pc.proof.crash_points import CrashPoint
from kafka2pc.proof.dead_query import run_tasks
from kafka2pc.proof.drills.spark_query import order_crash
from kafka2pc.protocol.driver import Driver
from kafka2pc.protocol.errors import (
    BadOption,
    BrokerUnreachable,
    OutcomeUnknown,
    StaleCheckpoint,
    Superseded,
)
from kafka2pc.protocol.kept import Kept
from kafka2pc.protocol.log.decisions import Decision, Identity, Slot
from kafka2pc.protocol.log.format import dump_decision, load_decision
from kafka2pc.protocol.log.questions import newest_commit
from kafka2pc.protocol.log.slots import MemoryLog
from kafka2pc.protocol.memory import MemoryParticipant
from kafka2pc.protocol.messages import Mode, Plan
from kafka2pc.protocol.names import new_token
from kafka2pc.protocol.operators import fence as fence_module
from kafka2pc.protocol.operators.fence import fence
from kafka2pc.protocol.participant import Outcome
from kafka2pc.protocol.phases.commit import commit
from kafka2pc.protocol.phases.decide import decide
from kafka2pc.protocol.phases.passed_over import leave_note
from kafka2pc.protocol.phases.precommit import precommit
from kafka2pc.protocol.phases.restore import restore as restore_batch
from kafka2pc.spark.sink import opening
from kafka2pc.spark.sink.opening import plan_batch
from kafka2pc.stores.postgres import PostgresParticipant

pytestmark = [pytest.mark.kafka, pytest.mark.never_unsteady]


def by_hand(dead, commit, force=False, known=True):
    first = dead.open()[0].transactional_id
    words = [
        "commit" if commit else "abort",
        first,
        *(["--checkpoint", str(dead.place)] if known else []),
        *(["--force"] if force else []),
    ]
    return typed(dead.access.command(*words))


@pytest.mark.parametrize(
    ("decided", "commit", "known", "says"),
    [
        (True, False, True, "it is decided"),
        (False, True, True, "it is not decided"),
        (True, True, False, "no checkpoint was named"),
        (False, False, False, "gone for good, no run ever ends it"),
    ],
)
def test_what_would_lose_or_double_rows_is_refused(decided, commit, known, says, dead):
    dead.leave(decided)
    said, status = by_hand(dead, commit, known=known)
    assert status == 1 and says in said and "--force" in said and "Nothing was touched" in said
    assert len(dead.open()) == 2


@pytest.mark.parametrize(
    ("decided", "says", "rows"),
    [
        (True, "; a restart writes it again", []),
        (False, "there twice after the replay", ["0a", "0b"]),
    ],
)
def test_force_does_it_and_names_the_loss(decided, says, rows, dead):
    dead.leave(decided)
    first = dead.open()[0].transactional_id
    said, status = by_hand(dead, commit=not decided, force=True)
    assert status == 0 and says in said and len(dead.open()) == 1
    assert said.splitlines()[0] == first, "an id is a line"
    until(lambda: dead.seen(still_open=True) == rows, "the marker of the other one is written")
    if decided:
        finding_of(dead.doctor(), "decided-and-aborted", "2 records")
    line = dead.access.command("restore", str(dead.place))
    assert typed(line)[1] == 0 and dead.seen() == (ROWS if decided else rows)


def test_force_without_a_checkpoint_says_what_it_could_mean(dead):
    dead.leave(decided=True)
    said = by_hand(dead, commit=False, force=True, known=False)[0]
    assert "lost, if it was decided and its checkpoint is gone: at most 4 records in" in said
    assert f"{dead.topic}-0 at offsets 0 to 3" in said


def test_a_query_begun_anew_names_what_the_dead_one_left_and_the_line_that_drops_it(
    kafka, dead, tmp_path, caplog
):
    """After a crash the checkpoint was deleted. The new query reads the same rows again."""
    dead.leave(decided=True)
    new = DeadQuery(kafka, tmp_path / "new", topic=dead.topic, prefix=dead.prefix)
    driver = new.run()
    plan = plan_batch(driver, 0, "")
    [warning] = [r.getMessage() for r in caplog.records if "begins anew" in r.getMessage()]
    assert f"query {dead.id} has open transactions in {dead.topic}: 2, " in warning
    lines = re.findall("kafka2pc abort [^;]* --force", warning)
    shell = [f"{line} --bootstrap-servers {kafka.bootstrap_servers}" for line in lines]
    rows = pa.RecordBatch.from_pydict({"value": ["again"]})
    commit(driver, [precommit(driver.participants.values(), plan, [rows])], 0)
    assert new.seen(still_open=True) == [], "the dead query hides the rows of the new one"
    assert [typed(line)[1] for line in shell] == [0, 0] and new.seen() == ["again"]


# -- what the protocol checks instead of assuming it --


def test_a_start_that_only_drains_leaves_nothing_open(dead):
    """Each task ran twice; the driver decided, and died before its sweep. No more input comes."""
    driver = dead.run()
    messages = dead.write(driver)
    again = [replace(m.plan, task=1) for m in messages]
    for plan in again:
        rows = pa.RecordBatch.from_pydict({"value": ["copy"]})
        precommit(driver.participants.values(), plan, [rows])
    decide(driver, messages[0].plan, messages)
    assert len(dead.open()) == 4
    assert restore_batch(dead.run(), 0).mode is Mode.DRAIN
    assert dead.open() == [] and dead.seen() == ROWS


@pytest.mark.parametrize("who", ["another process", "the same planner"])
def test_a_batch_that_an_operator_marked_done_is_finished(dead, who, monkeypatch):
    """It was decided, and not finished, when commits/0 was written by hand."""
    driver = dead.run()
    (dead.place / "offsets" / "0").write_text("v1")
    plan = plan_batch(driver, 0, "")
    rows = pa.RecordBatch.from_pydict({"value": ["0a", "0b"]})
    decide(driver, plan, [precommit(driver.participants.values(), plan, [rows])])
    (dead.place / "commits" / "0").touch()
    if who == "another process":
        monkeypatch.setattr(opening, "_RUNS", Kept())
    following = plan_batch(driver, 1, "")
    assert following.attempt == (1 if who == "another process" else 0)
    assert dead.seen() == ["0a", "0b"] and dead.open() == []


def test_restore_names_the_batch_of_what_it_aborts_and_says_afterwards_what_it_did(dead):
    """One run wrote batches 0 to 2, as foreachBatch does: all ids name the batch where it began."""
    driver = dead.run()
    messages = dead.write(driver)
    run = messages[0].plan.token
    for batch_id in (1, 2):
        commit(driver, messages, batch_id - 1)
        messages = dead.write(driver, batch_id, run)
    line = dead.access.command("restore", str(dead.place))
    planned, done = typed(f"{line} --dry-run")[0], typed(line)[0]
    assert "To abort, batch 2: 2 transactions; the first times out in " in planned
    assert planned.index("To abort") < planned.index("Committed before, batch 1: 2 transactions, 4")
    ids = [c.transactional_id for m in messages for c in m.committables]
    assert [planned.splitlines().count(each) for each in ids] == [1, 1]
    assert "Aborted, batch 2: 2 transactions\n" in done and "times out" not in done
    assert done.endswith("2 aborted, 2 committed before; nothing is open any more.\n")


@pytest.mark.parametrize(
    "says", ["2 committed; nothing is open", "2 committed, 1 aborted; nothing is open"]
)
def test_restore_commits_what_is_decided_also_behind_a_later_claim(dead, says):
    driver = dead.leave(decided=True).run()
    claimed = new_token(1, 1)
    record = Decision(
        query_id=dead.id,
        slot=Slot(1, 0),
        commit=False,
        token=claimed,
        identity=Identity(log=dead.log.place, prefix=dead.prefix),
    )
    dead.log.create(record)
    if "aborted" in says:
        plan = Plan(query_id=dead.id, batch_id=1, attempt=1, token=claimed)
        precommit(
            driver.participants.values(), plan, [pa.RecordBatch.from_pydict({"value": ["1"]})]
        )
    said, status = typed(dead.access.command("restore", str(dead.place)))
    assert status == 0 and says in said
    assert dead.seen() == ROWS


def test_restore_names_a_batch_that_spark_passed_over_until_it_is_accepted(dead):
    dead.leave(decided=False)
    leave_note(driver_of(dead.query), 0)
    line = dead.access.command("restore", str(dead.place))
    accept = f"kafka2pc accept {dead.place} --batch 0"
    said, status = typed(accept)
    assert status == 1 and "is not one that Spark passed over" in said
    (dead.place / "commits" / "0").touch()
    said, status = typed(line)
    assert status == 4 and "its rows may be missing" in said and accept in said
    assert "FAILED" in typed(f"kafka2pc decisions list {dead.place}")[0]
    assert json.loads(run(f"{accept} --json").stdout) == {"place": str(dead.place), "accepted": 0}
    said, status = typed(line)
    assert status == 0 and "missing" not in said


@pytest.mark.parametrize("decided", [True, False])
def test_what_was_decided_is_done(decided, dead):
    dead.leave(decided)
    assert [by_hand(dead, commit=decided)[1] for _ in range(2)] == [0, 0] and dead.open() == []
    assert dead.seen() == (ROWS if decided else [])


@pytest.mark.parametrize(("word", "decided"), [("commit", True), ("abort", False)])
def test_what_was_ended_by_hand_is_printed_as_json(word, decided, dead):
    dead.leave(decided)
    first = dead.open()[0].transactional_id
    said, status = typed(
        dead.access.command(word, first, "--checkpoint", str(dead.place), "--json")
    )
    assert status == 0 and json.loads(said) == {
        "transactional_id": first,
        "do": word,
        "said": f"{first}: {word}{'t' * decided}ed",
    }


def test_what_is_not_open_cannot_be_ended(dead):
    dead.leave(decided=True)
    first = dead.open()[0].transactional_id
    assert by_hand(dead, commit=True)[1] == 0
    said, status = typed(dead.access.command("abort", first, "--checkpoint", str(dead.place)))
    assert status == 1 and ("is CompleteCommit" in said or "is PrepareCommit" in said)
    assert "unknown to its coordinator" in typed(dead.access.command("abort", "unused"))[0]


@pytest.mark.parametrize("how", ["abort", "restore"])
def test_a_living_run_is_fenced_before_anything_of_it_is_aborted(how, dead):
    """Otherwise it could decide between our look and our abort, and lose rows."""
    living = dead.run()
    messages = dead.write(living)
    if how == "abort":
        by_hand(dead, commit=False)
    else:
        with operate(dead.conf, dead.query) as driver:
            assert [s.do for s in restore(driver)] == ["abort", "abort"]
    with pytest.raises(Superseded):
        decide(living, messages[0].plan, messages)
    again = dead.run()
    commit(again, dead.write(again), 0)
    assert dead.seen() == ROWS


@pytest.mark.parametrize(("when", "batch_id"), [("claim", 0), ("claim", 1), ("complete", 1)])
def test_a_run_that_decides_while_we_look_is_left_alone_and_loses_nothing(
    when, batch_id, dead, monkeypatch
):
    """A slot won after an unfinished decision would hide that decision for ever."""
    living, token = dead.run(), None
    if batch_id:
        first = dead.write(living)
        commit(living, first, 0)
        token = first[0].plan.token
    messages = dead.write(living, batch_id, token)
    with operate(dead.conf, dead.query) as driver:
        step, decided = getattr(fence_module, when), []

        def late(*args):
            if not decided:
                decided.append(decide(living, messages[0].plan, messages))
            return step(*args)

        monkeypatch.setattr(fence_module, when, late)
        with pytest.raises(Superseded, match="is running"):
            restore(driver)
    again = dead.run()
    assert restore_batch(again, batch_id).mode is Mode.DRAIN
    assert dead.seen() == [f"{n}{v}" for n in range(batch_id + 1) for v in "abcd"]


def test_restore_fails_and_names_what_is_still_open(dead, monkeypatch):
    dead.leave(decided=False)
    line = dead.access.command("restore", str(dead.place))
    with monkeypatch.context() as m:
        m.setattr(repair, "retry_unknown", lambda: lambda ask: ask())
        m.setattr(KafkaParticipant, "end_all", lambda self, verb, cs: [Outcome.UNKNOWN] * len(cs))
        said, status = typed(line)
    assert status == 1 and "OUTCOME_UNKNOWN" in said and "aborted" not in said
    assert len(dead.open()) == 2 and all(f.transactional_id in said for f in dead.open())
    said, status = typed(line)
    assert status == 0 and "2 aborted; nothing is open any more" in said and not dead.open()


def test_restore_reports_no_commit_that_was_not_sent(dead, monkeypatch):
    dead.leave(decided=True)
    monkeypatch.setattr(repair, "complete_newest", lambda driver: None)  # another run goes on
    with operate(dead.conf, dead.query) as driver:
        with pytest.raises(OutcomeUnknown, match="still open") as e:
            restore(driver)
    assert all(f.transactional_id in e.value.what for f in dead.open())
    assert dead.seen(still_open=True) == []


def test_restore_reports_what_a_living_run_has_decided_before_its_claim(dead, monkeypatch):
    living = dead.run()
    messages = dead.write(living)

    def late(driver):
        decide(living, messages[0].plan, messages)
        return fence(driver)

    monkeypatch.setattr(repair, "fence", late)
    with operate(dead.conf, dead.query) as driver:
        assert [s.do for s in plan_restore(driver)] == ["abort", "abort"]
        assert [s.do for s in restore(driver)] == ["commit", "commit"]
    assert dead.seen() == ROWS


class TimesOut(MemoryParticipant):
    """What is open when it is first asked for leftovers has timed out right after that."""

    asked = False

    def in_doubt(self, query_id):
        found = super().in_doubt(query_id)
        if not self.asked:
            self.asked = True
            self.expire()
        return found


@pytest.mark.parametrize("rows", ["there", "gone"])
def test_restore_reports_what_timed_out_after_its_plan_as_it_was_repaired(rows):
    store = TimesOut(name="memory")
    driver = Driver(query_id=str(uuid.uuid4()), log=MemoryLog(), participants={"memory": store})
    plan = restore_batch(driver, 0, offsets_hash="read again")
    message = precommit([store], plan, [["a"], ["b"]])
    decide(driver, plan, [message])
    store.asked = False
    if rows == "gone":
        store.records.pop()
    done = [(s.do, s.records) for s in restore(driver)]
    assert done == ([("salvage", 2), ("commit", 2)] if rows == "there" else [("reopen", 2)])
    assert store.read() == (["a", "b"] if rows == "there" else [])


def test_an_undecided_leftover_is_not_aborted_before_the_decision_is_finished(dead):
    """The slot that fences would hide the decision."""
    dead.leave(decided=True)
    run = dead.run()
    token = newest_commit(run.log).token
    lone = run.participants["kafka"].begin(
        Plan(query_id=dead.id, batch_id=0, attempt=1, token=token)
    )
    lone.write(pa.RecordBatch.from_pydict({"value": ["of a second attempt of a task"]}))
    lone.flush()
    left = next(f for f in dead.open() if not f.decided).transactional_id
    assert typed(dead.access.command("abort", left, "--checkpoint", str(dead.place)))[1] == 0
    assert dead.open() == [] and dead.seen() == ROWS


def test_after_restore_the_query_goes_on_without_loss_or_double(dead):
    first = dead.run()
    commit(first, dead.write(first), 0)
    messages = dead.write(first, 1)
    decide(first, messages[0].plan, messages)
    second = dead.run()
    assert restore_batch(second, 1).mode is Mode.DRAIN
    dead.write(second, 2)
    with operate(dead.conf, dead.query) as driver:
        assert sorted(s.do for s in plan_restore(driver)) == [
            "abort",
            "abort",
            "nothing",
            "nothing",
        ]
        assert sorted(s.do for s in restore(driver)) == ["abort", "abort", "nothing", "nothing"]
    again = dead.run()
    commit(again, dead.write(again, 2), 2)
    assert dead.seen() == [f"{n}{v}" for n in range(3) for v in "abcd"]


def test_a_batch_write_is_restored_by_the_folder_of_its_log(kafka, tmp_path):
    dead = DeadQuery(kafka, tmp_path)
    log = FileLog(tmp_path / "log" / dead.id)
    driver = replace(dead.run(), log=log)
    messages = dead.write(driver)
    decide(driver, messages[0].plan, messages)
    line = dead.access.command("restore", str(tmp_path / "log" / dead.id))
    said, status = typed(f"{line} --dry-run")
    assert status == 3 and "Dry run, nothing was sent: 2 to commit" in said
    said, status = typed(line)
    assert status == 0 and "2 committed; nothing is open any more" in said
    assert dead.seen() == ROWS
    with pytest.raises(BadOption):
        open_query(str(tmp_path / "log"))


@pytest.mark.full
@pytest.mark.spark
def test_a_spark_query_that_died_after_its_decision_is_restored_from_the_shell_and_then_goes_on(
    spark_query,
):
    if not spark_query.job.alive:
        spark_query.job.start()
    spark_query.feed(2)
    order_crash(spark_query, CrashPoint.AFTER_DECISION, batch_id=1, pid=spark_query.job.jvm)
    with pytest.raises(Failed):
        spark_query.run()
    line = Access(spark_query.kafka.bootstrap_servers).command(
        "restore", str(spark_query.checkpoint), "--json"
    )
    planned, status = typed(f"{line} --dry-run")
    assert ({step["do"] for step in json.loads(planned)}, status) == (
        {"commit"},
        3,
    ) and spark_query.open()
    assert (
        typed(line)[1] == 0
        and spark_query.open() == []
        and len(spark_query.rows()) == 2 * spark_query.size
    )
    with operate(spark_query.kafka.client_conf, open_query(str(spark_query.checkpoint))) as driver:
        # also what aborts do: Spark has not recorded that batch 1 is done, and a slot of batch 2 is
        # taken
        fence(driver)
    spark_query.feed()
    spark_query.run()
    spark_query.check()


@pytest.mark.parametrize("decided", [True, False])
def test_a_query_with_a_database_is_examined_listed_and_restored_if_its_url_is_named(
    decided, dead, postgres
):
    table = f"orders_{dead.id[:8]}"
    postgres.execute(f"create table {table} (value text)")
    kafka_only = dead.run()
    store = PostgresParticipant(postgres.url, table, name="shop")
    both = replace(kafka_only, participants={**kafka_only.participants, "shop": store})
    messages = dead.write(both)
    if decided:
        decide(both, messages[0].plan, messages)
    place, shop = str(dead.place), ["--store", f"shop={postgres.url}"]
    restore = lambda *more: typed(dead.access.command("restore", place, *more))
    said, status = restore()
    assert status == 1 and "also about shop" in said and "--store shop=URL" in said
    urgent = "decided-and-open" if decided else "leftovers"
    found = dead.doctor()
    [line, _] = finding_of(found, urgent).commands
    assert finding_of(found, "store-not-asked").level == "note" and "--store shop=URL" in line
    assert not any(f.name == "bad-option" for f in found.findings)
    asked = replace(dead.access, stores=(shop[1],))
    found = doctor(asked, checkpoint=place, older_ms=0, prefix=dead.prefix).findings
    whats = "\n".join(f.what for f in found if f.name == urgent)
    assert (
        f"4 of its transactions are open: 4 records in {dead.topic}, 4 records in public.{table}"
        if decided
        else f"2 open transactions of query {dead.id} in shop, the oldest for "
    ) in whats
    of_others = doctor(asked, older_ms=0, prefix=dead.prefix).findings
    lines = [line for f in of_others for line in f.commands]
    assert lines and not any("--store" in line for line in lines), "it is of this query only"
    words = ["transactions", "list", "--checkpoint", place, *shop]
    alone = typed(dead.access.command("transactions", "list", *shop))
    assert alone[1] == 1 and "--store without --checkpoint" in alone[0]
    listed = typed(dead.access.command(*words))[0]
    assert f"Query {dead.id}, store shop: 2 open" in listed and listed.count("; open for ") == 4
    at, word = (
        (f"public.{table}", "yes") if decided else ("shop", "no")
    )  # only the decision has the table
    assert listed.count(f"  {at}; ") == 2 and listed.count(f"decided: {word}") == 4
    planned, done = restore(*shop, "--dry-run"), restore(*shop)
    assert (planned[1], done[1]) == (3, 0) and f"records in {at}; never times out" in planned[0]
    if decided:  # and committed: the wrong record does not know it
        wrong = f"shop={postgres.url}#elsewhere"
        assert "its decisions are about shop" in restore("--store", wrong)[0]
        file = newest_file(dead)  # version 0.1.0 did not record which table it was
        record = load_decision(file.read_bytes(), "here")
        stores = tuple((name, where.partition("/public#")[0]) for name, where in record.stores)
        file.write_bytes(dump_decision(replace(record, stores=stores)))
        said, status = restore("--store", wrong)
        assert status == 1 and "its table of transactions has no line of batch 0" in said
    rows = sorted(postgres.execute(f"select value from {table}"))
    assert dead.seen() == [value for (value,) in rows] == (ROWS if decided else [])
    prepared = "select gid from pg_prepared_xacts where strpos(gid, %s) > 0"
    assert postgres.execute(prepared, dead.id) == []
    assert {f.name for f in dead.doctor().findings} == {"one-copy", "store-not-asked"}


@pytest.mark.parametrize("decided", [True, False])
@pytest.mark.parametrize("kind", TABLES)
def test_a_query_with_a_table_of_files_is_listed_and_restored_if_it_is_named(
    kind, decided, dead, tmp_path, monkeypatch
):
    (tmp_path / "lake").mkdir()
    one = TABLES[kind](tmp_path / "lake")
    if kind == "iceberg":
        for name, value in one.catalog.items():  # what is in .pyiceberg.yaml for a user
            monkeypatch.setenv(f"PYICEBERG_CATALOG__DEFAULT__{name.upper()}", value)
        monkeypatch.setattr("pyiceberg.catalog._ENV_CONFIG", Config())  # read once, at the import
    kafka_only = dead.run()
    both = replace(kafka_only, participants={**kafka_only.participants, kind: one.store()})
    messages = dead.write(both)
    if decided:
        decide(both, messages[0].plan, messages)
    place, url = str(dead.place), {"delta": f"{one.folder}/table", "iceberg": "db.t"}[kind]
    table = ["--store", f"{kind}={kind}:{url}"]
    restore = lambda *more: typed(dead.access.command("restore", place, *more))
    said, status = restore()
    assert status == 1 and f"also about {kind}" in said
    listed = typed(dead.access.command("transactions", "list", "--checkpoint", place, *table))[0]
    assert f"Query {dead.id}, store {kind}: 2 open" in listed
    assert (restore(*table, "--dry-run")[1], restore(*table)[1]) == (3, 0)
    assert dead.seen() == sorted(one.texts()) == (ROWS if decided else [])
    assert one.store().in_doubt(dead.id) == []


def test_a_missing_checkpoint_is_an_error(dead, tmp_path):
    assert typed(dead.access.command("restore", str(tmp_path / "nowhere")))[1] == 1


def test_an_empty_log_never_counts_as_nothing_decided(dead, tmp_path):
    driver = dead.leave(decided=True).run()
    place, (first, *_) = str(dead.place), dead.open()
    elsewhere = tmp_path / "elsewhere" / dead.id
    elsewhere.parent.mkdir()
    (dead.place / "kafka2pc").rename(elsewhere)
    for line in (
        ["abort", first.transactional_id, "--checkpoint", place],
        ["restore", place],
        ["restore", place, "--dry-run"],
    ):
        said, status = typed(
            dead.access.command(*line, *(["--prefix", dead.prefix] if line[0] == "restore" else []))
        )
        assert (
            status == 1 and "this decision log is empty" in said and "is data at risk: Yes" in said
        )
    with pytest.raises(StaleCheckpoint, match="this decision log is empty"):
        plan_batch(driver, 0, "")
    findings = dead.doctor().findings
    assert any("this decision log is empty" in f.what for f in findings)
    assert not any("restore" in line for f in findings for line in f.commands), (
        "it would throw away what is decided"
    )
    there = ["--decision-log", str(elsewhere.parent)]
    said, status = typed(dead.access.command("restore", place, *there, "--prefix", dead.prefix))
    assert status == 1 and "MOVED_LOG" in said and dead.seen(still_open=True) == []
    said, status = typed(f"kafka2pc adopt {place} {there[0]} {there[1]}")
    assert status == 0 and "adopted in slot 0.2" in said
    said, status = typed(dead.access.command("restore", place, *there, "--prefix", dead.prefix))
    assert status == 0, said
    assert dead.seen() == ROWS
    said, status = typed(f"kafka2pc adopt {place} {there[0]} {there[1]}")
    assert status == 0 and "nothing has changed" in said


def test_a_restore_closes_no_connection_of_the_process(dead):
    shared = KafkaParticipant(dead.conf).cluster
    with operate(dead.conf, dead.query):
        pass
    assert shared.nodes()


def renamed(dead, prefix):
    """The driver of a run under this prefix, which its records name."""
    dead.prefix = prefix
    return replace(dead.run(), about=Identity(prefix=prefix))


@pytest.mark.parametrize("rows", [True, False])
def test_a_query_that_has_changed_its_prefix_is_found_under_both(rows, dead):
    """It did so between two batches; the first run of the new prefix died before its decision, and
    tasks of the old one began after its sweep.
    """
    former, new = f"{dead.prefix}-a,b", f"{dead.prefix}-c,d"
    old = renamed(dead, former)
    messages = dead.write(old) if rows else [nothing(dead, old)]
    commit(old, messages, 0)
    planned = restore_batch(old, 1, mine=messages[0].plan.token)
    late = dead.write(renamed(dead, new), 1)
    straggler = run_tasks(old, planned)
    ids = {m.committables[0].transactional_id for m in (*straggler, *late)}
    with Survey(dead.conf) as survey:
        assert find_prefix(survey, dead.query) == new
        listed = find_transactions(survey, find_prefixes(survey, dead.query), dead.query)
        assert {f.transactional_id for f in listed} == ids
    found = finding_of(
        dead.doctor(prefix=None), "leftovers", f"4 open transactions of query {dead.id}"
    )
    assert f"--prefix {new}" in found.commands[0]
    with operate(dead.conf, dead.query) as driver:
        steps = plan_restore(driver)
        assert {s.transactional_id for s in steps if s.do == "abort"} == ids
        assert {s.do for s in steps} == ({"nothing", "abort"} if rows else {"abort"})
        restore(driver)
    for prefix in (former, new):
        assert not find_open(dead.kafka, prefix)
    assert dead.seen() == (ROWS if rows else [])


def nothing(dead, driver):
    """The message of a batch without rows."""
    (dead.place / "offsets" / "0").write_text("v1")
    return precommit(list(driver.participants.values()), restore_batch(driver, 0), [])


def test_what_is_decided_is_committed_although_not_all_brokers_list_the_rest(dead):
    dead.leave(decided=True)
    silent = BrokerUnreachable("no leader for partition 3")
    with (
        operate(dead.conf, dead.query) as driver,
        patch.object(KafkaParticipant, "in_doubt", side_effect=silent),
        pytest.raises(BrokerUnreachable, match="no leader"),
    ):
        restore(driver)
    assert dead.seen() == ROWS
