"""Batch writes: the decision survives its committer, a failure never undoes what is decided, and
keys cost no more than they must.
"""

import copy
import os
import pickle
import platform
import re
import sys
import time
import uuid
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pytest
from kafka_fixtures import values
from marks import first_of
from typer.testing import CliRunner

from kafka2pc.decision_logs.files import FileLog
from kafka2pc.kafka.cluster_check import ClusterFacts
from kafka2pc.kafka.participant import KafkaParticipant
from kafka2pc.operations.cli.app import app
from kafka2pc.operations.repair import restore
from kafka2pc.proof.child_process import Failed
from kafka2pc.protocol.driver import Driver
from kafka2pc.protocol.errors import (
    BadOption,
    NotAuthorized,
    OutcomeUnknown,
    Refused,
    ReplayDiffers,
    StaleCheckpoint,
)
from kafka2pc.protocol.kept import Kept
from kafka2pc.protocol.log.decisions import Identity
from kafka2pc.protocol.log.questions import commit_of, newest_record
from kafka2pc.protocol.log.slots import MemoryLog
from kafka2pc.protocol.memory import MemoryParticipant
from kafka2pc.protocol.messages import Mode, Plan
from kafka2pc.protocol.names import new_token
from kafka2pc.protocol.operators.adopt import adopt
from kafka2pc.protocol.participant import Outcome
from kafka2pc.protocol.phases import commit as commit_phase
from kafka2pc.protocol.phases.claim import claim
from kafka2pc.protocol.phases.precommit import precommit
from kafka2pc.protocol.phases.sweep import sweep
from kafka2pc.protocol.states import TxnState
from kafka2pc.spark.foreach_batch import PrecommitTask, exactly_once, open_driver
from kafka2pc.spark.sink import batch_writer as batch_sink
from kafka2pc.spark.sink import giving_up, keys
from kafka2pc.spark.sink import opening as driver_side
from kafka2pc.spark.sink.batch_writer import (
    CompleteWrite,
    DecisionPlace,
    close_key,
    plan_write,
    purge_keys,
    remove_folders,
)
from kafka2pc.spark.sink.options import parse_sink_options
from kafka2pc.spark.sink.stream_writer import SparkMessage
from kafka2pc.stores.shaped import Shaped

pytestmark = pytest.mark.never_unsteady

DAY_S = 24 * 3600
DAY_MS = DAY_S * 1000


class Moody(MemoryParticipant):
    """A store whose commits get no answer for the transactions that `silent` names by the order in
    which they began (commits run in parallel); they are not carried out.
    """

    def __init__(self):
        super().__init__("kafka")
        self.silent = set()

    def commit(self, c):
        nth = list(self.txns).index((c.transactional_id, c.state.epoch))
        return Outcome.UNKNOWN if nth in self.silent else super().commit(c)

    def states(self):
        return [t.state for t in self.txns.values()]


@pytest.fixture
def store(monkeypatch, tmp_path):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    store = Moody()
    monkeypatch.setattr(batch_sink, "open_participant", lambda target: store)
    monkeypatch.setattr(driver_side._log_of_writes, "kept", Kept())
    monkeypatch.setattr(batch_sink, "_PURGED", {})
    monkeypatch.setattr(giving_up, "KILLED_S", 0)
    return store


def options(**more):
    return parse_sink_options(
        {"kafka.bootstrap.servers": "nowhere:1", "topic": "kafka", "maxCommitRetries": "1", **more}
    )


def rows_written(writer, rows="abc"):
    """What the tasks answer; each row has a task of its own."""
    return [
        SparkMessage(precommit([writer.participant], writer.plan, iter([[row]]), measure=len))
        for row in rows
    ]


def another_process(writer):
    """Spark hands a fresh copy of the writer to the process that commits, and another one to the
    process that aborts.
    """
    return copy.copy(writer)


# -- a write without a key --


def test_a_write_whose_commit_gives_no_clear_answer_is_finished_not_aborted(store):
    writer = plan_write(options())
    messages = rows_written(writer)
    store.silent = {2}
    with pytest.raises(OutcomeUnknown, match="no clear answer") as e:
        another_process(writer).commit(messages)
    assert "kafka2pc restore" in e.value.action and writer.plan.query_id in e.value.action
    assert store.read() == ["a", "b"]
    store.silent = set()
    with pytest.raises(CompleteWrite, match="3 rows is complete"):
        another_process(writer).abort(messages)  # Spark calls it after a failed commit
    assert store.read() == ["a", "b", "c"]


def test_a_committer_that_dies_after_the_decision_is_followed_by_one_that_finishes(
    store, monkeypatch
):
    writer = plan_write(options())
    messages = rows_written(writer)

    def die(driver, decision, seen, **how):
        raise KeyboardInterrupt

    with monkeypatch.context() as m, pytest.raises(KeyboardInterrupt):
        m.setattr("kafka2pc.protocol.phases.commit.finish", die)
        another_process(writer).commit(messages)
    assert store.read() == []
    with pytest.raises(CompleteWrite):
        another_process(writer).abort([None, None, None])
    assert store.read() == ["a", "b", "c"]


@pytest.fixture(params=["no log", "log", "key"])
def place(request, tmp_path):
    """The options that say where the decision of a write is kept."""
    log = {} if request.param == "no log" else {"decisionLog": str(tmp_path / "log")}
    return log | ({"idempotenceKey": "today"} if request.param == "key" else {})


def test_after_a_committer_that_dies_before_it_answers_spark_the_next_one_answers(
    store, place, caplog
):
    writer = plan_write(options(**place))
    messages = rows_written(writer)
    another_process(writer).commit(messages)  # its answer never reaches Spark
    for _ in range(2):
        with pytest.raises(CompleteWrite, match="Do not repeat it"):
            another_process(writer).abort(messages)
    assert store.read() == ["a", "b", "c"] and caplog.text.count("Do not repeat it") == 2


def test_a_write_that_is_aborted_leaves_nothing(store, place, tmp_path):
    writer = plan_write(options(**place))
    messages = rows_written(writer)
    another_process(writer).abort(messages)
    assert store.read() == []
    left = [path.name for path in tmp_path.rglob("*.json")]
    assert left == [] or "idempotenceKey" in place


def test_what_still_gives_no_answer_stays_decided_and_says_how_to_finish_it(store):
    writer = plan_write(options())
    messages = rows_written(writer)
    store.silent = {0, 1, 2}
    for end in (another_process(writer).commit, another_process(writer).abort):
        with pytest.raises(OutcomeUnknown, match="no clear answer"):
            end(messages)
    assert set(store.states()) == {TxnState.PRECOMMITTED}
    assert commit_of(FileLog(writer.folder), 0) is not None


def test_a_write_that_fails_before_its_decision_is_aborted_and_leaves_nothing(store):
    writer = plan_write(options())
    rows_written(writer)
    another_process(writer).abort([None, None, None])
    assert set(store.states()) == {TxnState.ABORTED} and store.read() == []
    assert not os.path.exists(os.path.dirname(writer.folder))


def test_what_the_python_of_a_killed_task_begins_after_the_abort_is_aborted_too(store, monkeypatch):
    writer = plan_write(options())
    messages = rows_written(writer, "ab")
    killed = SimpleNamespace(sleep=lambda seconds: rows_written(writer, "c"))
    monkeypatch.setattr(giving_up, "CLOCK", killed)
    another_process(writer).abort([*messages, None])
    assert store.states() == [TxnState.ABORTED] * 3


def test_an_abort_that_gets_no_clear_answer_says_how_to_end_what_is_open(
    store, place, monkeypatch, caplog
):
    writer = plan_write(options(**place))
    messages = rows_written(writer)
    with monkeypatch.context() as m, pytest.raises(OutcomeUnknown, match="still open") as e:
        m.setattr(store, "abort", lambda c: Outcome.UNKNOWN)
        another_process(writer).abort([*messages[1:], None])
    assert all(tid in e.value.what for tid, _ in store.txns) and e.value.what in caplog.text
    how = "again" if "idempotenceKey" in place else f"kafka2pc restore .*{writer.plan.query_id}"
    assert re.search(how, e.value.action) and "not decided" in e.value.risk
    another_process(writer).abort(messages)  # the place of its decision is still there
    assert set(store.states()) == {TxnState.ABORTED}


def test_a_finished_write_leaves_the_disk_after_a_day(store, tmp_path):
    writer = plan_write(options())
    another_process(writer).commit(rows_written(writer))
    decided, unfinished = Path(writer.folder).parent, Path(plan_write(options()).folder).parent
    assert set(tmp_path.iterdir()) == {decided, unfinished}
    grow_old(decided, DAY_S + store.timeout_ms / 1000 - 60)
    plan_write(options())
    assert decided.exists(), "not before its transactions have ended, too"
    grow_old(decided, 120)
    plan_write(options())
    assert not decided.exists() and unfinished.exists()


def test_a_write_that_goes_on_for_longer_than_a_day_is_decided_all_the_same(store):
    writer = plan_write(options())
    messages = rows_written(writer)
    grow_old(Path(writer.folder).parent, 3 * DAY_S)
    plan_write(options())
    assert not os.path.exists(writer.folder)
    another_process(writer).commit(messages)
    with pytest.raises(CompleteWrite):
        another_process(writer).abort(messages)
    assert store.read() == ["a", "b", "c"]


def test_only_folders_of_this_user_are_removed_and_no_link_is_followed(
    store, tmp_path, monkeypatch
):
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "file").touch()
    mine, link = tmp_path / "kafka2pc-batch-mine", tmp_path / "kafka2pc-batch-link"
    mine.mkdir()
    (mine / "link").symlink_to(precious)
    link.symlink_to(precious)
    (tmp_path / "kafka2pc-batch-file").touch()
    user = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: user + 1)
    remove_folders(time.time() + 60)
    assert mine.exists()
    monkeypatch.undo()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    remove_folders(time.time() + 60)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "kafka2pc-batch-file",
        "kafka2pc-batch-link",
        "precious",
    ]
    assert (precious / "file").exists()


def grow_old(folder, seconds):
    """Make a folder, and all in it, older by so many seconds."""
    for path in (folder, *folder.rglob("*")):
        changed = path.stat().st_mtime - seconds
        os.utime(path, (changed, changed))


def test_a_write_that_is_refused_before_its_tasks_begin_leaves_nothing_on_the_disk(
    store, monkeypatch, tmp_path
):
    def fails(query_id):
        raise NotAuthorized("ListTransactions")

    monkeypatch.setattr(store, "in_doubt", fails)
    with pytest.raises(NotAuthorized):
        plan_write(options())
    assert not os.listdir(tmp_path)


def test_transactions_without_a_timeout_need_a_key(store, monkeypatch, tmp_path):
    asked = []
    monkeypatch.setattr(
        batch_sink, "open_participant", lambda target: asked.append(target.two_phase) or store
    )
    plan_write(options())
    plan_write(options(idempotenceKey="k", decisionLog=str(tmp_path / "log")))
    assert asked == ["off", "auto"]
    with pytest.raises(BadOption, match="twoPhaseCommit=required without idempotenceKey"):
        plan_write(options(twoPhaseCommit="required"))


# -- keys --


def keyed(tmp_path, key, **more):
    return options(idempotenceKey=key, decisionLog=str(tmp_path / "log"), **more)


def written(store, wanted, rows="a"):
    writer = plan_write(wanted)
    another_process(writer).commit(rows_written(writer, rows))
    return writer.plan.mode


def test_a_key_that_is_written_again_ends_what_the_first_run_left(store, tmp_path):
    """A copy of a task was open when its driver died after the decision."""
    writer = plan_write(keyed(tmp_path, "one"))
    rows_written(writer, "b")
    with pytest.MonkeyPatch.context() as dies:
        dies.setattr(commit_phase, "sweep", lambda *args: None)
        dies.setattr(batch_sink, "close_key", lambda *args: None)
        another_process(writer).commit(rows_written(writer, "a"))
    assert len(store.in_doubt(writer.plan.query_id)) == 1
    assert written(store, keyed(tmp_path, "one")) is Mode.DRAIN
    assert store.in_doubt(writer.plan.query_id) == [] and store.read() == ["a"]


def test_a_key_writes_once(store, tmp_path):
    assert [written(store, keyed(tmp_path, key)) for key in ("one", "one", "two")] == [
        Mode.WRITE,
        Mode.DRAIN,
        Mode.WRITE,
    ]
    assert store.read() == ["a", "a"]


def test_fifty_keys_share_one_log_and_look_for_old_keys_once(store, tmp_path, monkeypatch):
    opened, looked = [], []
    open_log, purge = driver_side.open_log, batch_sink.purge_keys
    monkeypatch.setattr(
        driver_side, "open_log", lambda place, *more: opened.append(place) or open_log(place, *more)
    )
    monkeypatch.setattr(batch_sink, "purge_keys", lambda *what: looked.append(1) or purge(*what))
    for n in range(50):
        written(store, keyed(tmp_path, f"batch {n}"))
    assert (len(opened), len(looked)) == (1, 1)
    assert store.read() == ["a"] * 50


def test_kafka_is_checked_once_for_all_keys(monkeypatch, tmp_path):
    calls = []
    monkeypatch.setattr(driver_side.open_participant, "kept", Kept())
    monkeypatch.setattr(
        driver_side,
        "check",
        lambda *_, **__: (
            calls.append(1) or ClusterFacts(cluster_id="c", end_txn_version=5, timeout_ms=60_000)
        ),
    )
    one, two = (keyed(tmp_path, key).target for key in ("one", "two"))
    first, second = driver_side.open_participant(one), driver_side.open_participant(two)
    assert first is second and calls == [1]
    assert driver_side.open_participant(replace(one, topic="other")) is not first


# -- one key, two machines: each has a log of its own --


def machine(tmp_path, name, **more):
    return options(idempotenceKey="one", decisionLog=str(tmp_path / name), **more)


def decisions(tmp_path, name):
    return [d.kind for d in log_of_key(tmp_path, name).chain(0)]


def log_of_key(tmp_path, name):
    return FileLog(str(tmp_path / name / str(uuid.uuid5(uuid.NAMESPACE_OID, "one"))))


def test_two_logs_that_write_at_once_decide_nothing_and_the_next_run_writes(store, tmp_path):
    writers = [plan_write(machine(tmp_path, name)) for name in "ab"]
    messages = [rows_written(writer) for writer in writers]
    with pytest.raises(StaleCheckpoint, match="idempotenceKey=one") as refused:
        another_process(writers[0]).commit(messages[0])
    assert "every machine" in refused.value.action and "Nothing was decided" in refused.value.risk
    assert decisions(tmp_path, "a") == ["ABORT", "ABORT"]
    another_process(writers[1]).commit(messages[1])
    assert store.read() == ["a", "b", "c"], "the transactions of the first are aborted by now"
    with pytest.raises(StaleCheckpoint, match="idempotenceKey=one"):
        plan_write(machine(tmp_path, "a"))
    assert plan_write(machine(tmp_path, "b")).plan.mode is Mode.DRAIN


@pytest.mark.parametrize("committed", [False, True])
def test_a_log_that_asked_first_wins(store, tmp_path, committed, monkeypatch):
    """The second run planned before the first wrote."""
    first, second = (plan_write(machine(tmp_path, name)) for name in "ab")
    messages = rows_written(first)
    with monkeypatch.context() as m:
        if not committed:
            m.setattr(commit_phase, "finish", lambda *args, **how: True)
            m.setattr(batch_sink, "close_key", lambda *args: None)
        another_process(first).commit(messages)
    late = rows_written(second, "abc")
    with pytest.raises(StaleCheckpoint, match="knows 3 "):
        another_process(second).commit(late)
    assert written(store, machine(tmp_path, "a"), "abc") is Mode.DRAIN
    assert store.read() == ["a", "b", "c"]
    assert store.states() == [TxnState.COMMITTED] * 3 + [TxnState.ABORTED] * 3


def test_what_earlier_runs_and_copies_of_tasks_left_is_no_other_log(store, tmp_path):
    """Also if their claims were removed since."""
    wanted = machine(tmp_path, "a")
    for _ in range(3):
        rows_written(plan_write(wanted), "x")
    writer = plan_write(wanted)
    late = plan_write(wanted)
    rows_written(writer, "z")
    messages = rows_written(late, "ab")
    rows_written(late, "b")
    log = log_of_key(tmp_path, "a")
    log.remove(log.slots()[:4])
    another_process(late).commit(messages)
    assert store.read() == ["a", "b"]


def test_a_run_aborts_only_what_its_own_log_names(store, tmp_path):
    """The other one may have decided what is open."""
    ours, theirs = (plan_write(machine(tmp_path, name)) for name in "ab")
    rows_written(theirs, "b")
    rows_written(ours, "a")
    log, stores = log_of_key(tmp_path, "a"), {store.name: store}
    driver = Driver(query_id=ours.plan.query_id, log=log, participants=stores)
    sweep(keys.under_key(driver, "one"), new_token(0, 5))
    assert store.states() == [TxnState.PRECOMMITTED, TxnState.ABORTED]


def test_another_run_with_the_same_log_is_no_other_log(store, tmp_path):
    """It has committed, and the run before wakes up."""
    asleep = plan_write(machine(tmp_path, "a"))
    messages = rows_written(asleep)
    written(store, machine(tmp_path, "a"))
    with pytest.raises(Refused, match="before the decision"):
        another_process(asleep).commit(messages)
    assert store.read() == ["a"]


def test_a_folder_for_keys_that_other_machines_may_not_see_is_warned_of_once(
    store, tmp_path, caplog
):
    def write(place, host):
        writer = plan_write(options(idempotenceKey=f"{place} {host}", decisionLog=place))
        messages = [replace(m, host=host) for m in rows_written(writer)]
        another_process(writer).commit(messages)

    here = f"file://{tmp_path}/log"
    write(here, "")
    write(here, platform.node())
    write("memory://keys", "executor-1")
    assert "every machine" not in caplog.text
    write(here, "executor-1")
    write(here, "executor-2")
    (warning,) = [r.getMessage() for r in caplog.records if "every machine" in r.getMessage()]
    assert all(fact in warning for fact in ("why: ", "is data at risk: ", "what to do: ", here))


def test_a_key_whose_log_is_gone_is_refused_in_the_words_of_keys(store, tmp_path):
    written(store, machine(tmp_path, "a"))
    with pytest.raises(StaleCheckpoint, match="idempotenceKey=one") as e:
        plan_write(machine(tmp_path, "b"))
    assert "checkpoint" not in f"{e.value.why}{e.value.risk}{e.value.action}".lower()


def test_a_replay_under_a_key_that_differs_closes_the_key_all_the_same(store, tmp_path):
    written(store, keyed(tmp_path, "one"))
    for _ in range(2):
        with pytest.raises(ReplayDiffers, match="replayCheck=warn"):
            written(store, keyed(tmp_path, "one"), "ab")
    assert written(store, keyed(tmp_path, "one", replayCheck="warn"), "ab") is Mode.DRAIN
    assert store.read() == ["a"]


def test_a_write_without_a_key_leaves_its_decision_log_after_a_day(store, tmp_path):
    for _ in range(3):
        writer = plan_write(options(decisionLog=str(tmp_path / "log")))
        another_process(writer).commit(rows_written(writer))
    log = FileLog(str(tmp_path / "log" / writer.plan.query_id))
    assert len(store.read()) == 9 and len(log.siblings()) == 3
    assert len(driver_side._log_of_writes.kept) == 1
    assert purge_keys(log, (time.time() + DAY_S - 60) * 1000) == []
    assert len(purge_keys(log, (time.time() + DAY_S + 60) * 1000)) == 3 and log.siblings() == []


def test_the_place_to_restore_shows_no_password(store, tmp_path):
    writer = plan_write(options(decisionLog=str(tmp_path / "log")))
    elsewhere = replace(writer.options.query, decision_log="postgresql://me:hunter2@host/db")
    writer.options = replace(writer.options, query=elsewhere)
    place = DecisionPlace(writer.options, writer.plan.query_id)
    said = batch_sink._say_how_to_finish(place, OutcomeUnknown("x"))
    assert "hunter2" not in str(said) and "postgresql://me:***@host/db/" in said.action


def test_a_key_is_remembered_for_longer_than_kafka_remembers_its_ids():
    with pytest.raises(BadOption, match="at least 8"):
        options(idempotenceKeyDays="7")


@pytest.mark.parametrize("answer, days", [(7, 8), (14, 15), (None, 8)])
def test_a_key_is_kept_for_longer_than_these_brokers_keep_its_ids(
    answer, days, monkeypatch, caplog
):
    """Brokers that do not say it prove nothing: that is logged once."""
    monkeypatch.setattr(keys._expiry_ms, "kept", Kept())
    setting = None if answer is None else str(answer * DAY_MS)
    monkeypatch.setattr(keys, "broker_setting", lambda cluster, key: setting)
    caplog.set_level("INFO", logger="kafka2pc")
    participant = KafkaParticipant({}, cluster_id="c")
    participant.brief = "a connection"
    for _ in range(2):
        keys.check_key_days(days, participant)
    assert caplog.text.count("transactional.id.expiration.ms") == (answer is None)
    if days > 8:
        with pytest.raises(BadOption, match=f"={answer}: .* {answer} days") as e:
            keys.check_key_days(answer, participant)
        assert f"idempotenceKeyDays={days}" in e.value.action


def test_the_driver_of_a_sink_knows_what_its_decisions_are_about():
    store = KafkaParticipant({}, prefix="mine", topic="kafka")
    wanted = options(replayCheck="warn", transactionalIdPrefix="mine")
    checkpoint = type("Checkpoint", (), {"normal_location": "file:///orders", "committed": None})
    log = MemoryLog("file:///log")
    driver = driver_side.make_driver(wanted.query, "q", log, [store], checkpoint)
    assert driver.identity() == Identity(
        log="file:///log", checkpoint="file:///orders", topics=("kafka",), prefix="mine"
    )
    [former] = driver.former("old")
    assert (driver.policy.replay_check, former["kafka"].prefix) == ("warn", "old")


def test_exactly_once_hands_its_options_to_the_driver_and_its_tasks_count():
    store = MemoryParticipant()
    options = {"decisionLog": MemoryLog(), "replayCheck": "warn"}
    job = exactly_once(options, participants=[store], name="job", in_order=True)
    limits = open_driver(job.given).policy
    assert (limits.in_order, limits.replay_check) == (True, "warn")
    shaped = Shaped(store, lambda batch: batch["value"].to_pylist())
    query_id = open_driver(job.given).query_id
    planned = Plan(query_id=query_id, batch_id=0, attempt=1, token=new_token(0, 1))
    task = PrecommitTask((shaped,), planned)
    (row,) = task.as_rows(iter([pa.record_batch({"value": ["ab", "c"]})]))
    message = pickle.loads(row["message"][0].as_py())
    assert (message.rows, message.bytes) == (2, 3)


def driver_at(log, store):
    return Driver(query_id=str(uuid.uuid4()), log=log, participants={store.name: store})


def test_keys_are_forgotten_when_their_time_is_over_and_nothing_else_is(store, tmp_path):
    written(store, keyed(tmp_path, "old", idempotenceKeyDays="8"))
    written(store, keyed(tmp_path, "young"))
    unfinished = plan_write(keyed(tmp_path, "unfinished"))
    stream = FileLog(str(tmp_path / "log" / str(uuid.uuid4())))
    claim(driver_at(stream, store), 0)
    log = stream.sibling(unfinished.plan.query_id)
    assert len(log.siblings()) == 4
    now_ms = newest_record(log).expires_ms or time.time() * 1000
    assert purge_keys(log, now_ms) == []
    gone = purge_keys(log, now_ms + 9 * DAY_MS)
    assert len(gone) == 1 and len(log.siblings()) == 3
    assert len(purge_keys(log, now_ms + 31 * DAY_MS)) == 1
    assert sorted(log.siblings()) == sorted(
        [unfinished.plan.query_id, stream.folder.rpartition("/")[2]]
    )


@pytest.mark.parametrize("closed_first", [True, False])
def test_a_key_is_forgotten_in_time_although_an_operator_came_between(
    closed_first, store, tmp_path, monkeypatch
):
    """`restore` claims the batch after a decided write, to end a copy of a task; `adopt` says that
    the log was moved.
    """
    wanted = keyed(tmp_path, "one")
    with monkeypatch.context() as m:
        if not closed_first:
            m.setattr(batch_sink, "close_key", lambda *args: None)
        written(store, wanted)
    query_id = plan_write(wanted).plan.query_id
    log = FileLog(str(tmp_path / "log" / query_id))
    driver = Driver(query_id=query_id, log=log, participants={store.name: store})
    token = commit_of(log, 0).token
    planned = Plan(query_id=query_id, batch_id=0, attempt=1, token=token)
    precommit([store], planned, iter([["of a copy"]]))
    restore(driver)
    assert store.in_doubt(query_id) == [], "the claim was needed"
    adopt(replace(driver, about=replace(newest_record(log).identity, topics=("new",))))
    if not closed_first:
        assert written(store, wanted) is Mode.DRAIN
    now_ms = time.time() * 1000
    assert purge_keys(log, now_ms + 29 * DAY_MS) == []
    assert purge_keys(log, now_ms + 31 * DAY_MS) == [query_id]


def test_a_purge_that_fails_does_not_fail_the_write(store, caplog):
    class Full(MemoryLog):
        def siblings(self):
            raise OSError("no space left")

    driver = driver_at(Full(), store)
    close_key(driver, 30)
    assert newest_record(driver.log).expires_ms and "no space left" in caplog.text


# -- on a broker --


@pytest.mark.kafka
def test_the_shell_finishes_a_write_whose_driver_is_gone(kafka, monkeypatch):
    """The command is the one that the error prints."""
    topic = kafka.create_topic(f"batch-{uuid.uuid4().hex[:8]}", partitions=1)
    writer = plan_write(
        parse_sink_options(
            {
                "kafka.bootstrap.servers": kafka.bootstrap_servers,
                "topic": topic,
                "maxCommitRetries": "1",
            }
        )
    )
    messages = [writer.write(iter([pa.record_batch({"value": [row]})])) for row in "abc"]
    with monkeypatch.context() as m, pytest.raises(OutcomeUnknown) as e:
        m.setattr(KafkaParticipant, "end_all", lambda self, verb, cs: [Outcome.UNKNOWN] * len(cs))
        another_process(writer).commit(messages)
    assert values(kafka, topic, still_open=True) == []
    command = re.search(r"kafka2pc (restore \S+)\.", e.value.action)[1].split()
    said = CliRunner().invoke(app, [*command, "--bootstrap-servers", kafka.bootstrap_servers])
    assert said.exit_code == 0, said.output
    assert sorted(values(kafka, topic)) == ["a", "b", "c"]


@pytest.mark.kafka
def test_on_brokers_two_logs_see_each_other(kafka, tmp_path, monkeypatch):
    """Both runs have pre-committed before one of them decides."""
    topic = kafka.create_topic(f"two-{uuid.uuid4().hex[:8]}", partitions=1)
    wanted = {"kafka.bootstrap.servers": kafka.bootstrap_servers, "topic": topic}
    wanted |= {"transactionalIdPrefix": topic, "idempotenceKey": "one", "idempotenceKeyDays": "9"}

    def machine(name):
        return plan_write(parse_sink_options(wanted | {"decisionLog": str(tmp_path / name)}))

    def write(writer):
        return [writer.write(iter([pa.record_batch({"value": [row]})])) for row in "ab"]

    writers = [machine(name) for name in "ab"]
    first, second = (write(writer) for writer in writers)
    assert first[0].host == platform.node()
    with pytest.raises(StaleCheckpoint, match="idempotenceKey=one .* knows 2 transactions"):
        another_process(writers[0]).commit(first)
    another_process(writers[1]).commit(second)
    assert sorted(values(kafka, topic)) == ["a", "b"]
    with pytest.raises(StaleCheckpoint, match="knows 2 transactions"):
        machine("a")
    assert machine("b").plan.mode is Mode.DRAIN
    store = writers[0].participant
    assert store.in_doubt(writers[0].plan.query_id) == []
    monkeypatch.setattr(keys._expiry_ms, "kept", Kept())
    monkeypatch.setattr(keys, "broker_setting", lambda cluster, key: str(14 * DAY_MS))
    with pytest.raises(BadOption, match="=9: the brokers keep transactional ids for 14 days"):
        machine("b")


@pytest.fixture(scope="module")
def dying(jobs, tmp_path_factory):
    """A driver that finds `dying_committer`, and so do its workers."""
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("TMPDIR", str(tmp_path_factory.mktemp("dying")))
        environment.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
        job = jobs("dying")
        job.start()
        yield job
        job.stop()


@pytest.mark.kafka
@pytest.mark.spark
@pytest.mark.parametrize("place", first_of(["no log", "log", "key"], rest="nightly"), indirect=True)
def test_who_runs_the_job_reads_in_sparks_error_that_all_is_written(dying, kafka, place):
    topic = kafka.create_topic(f"dying-{uuid.uuid4().hex[:8]}", partitions=2)
    security = {f"kafka.{name}": value for name, value in kafka.client_conf.items()}
    with pytest.raises(Failed, match="the write of 100 rows is complete(.|\n)*Do not repeat it"):
        dying.ask("dying_committer.write", rows=100, options=security | {"topic": topic} | place)
    assert sorted(values(kafka, topic), key=int) == [str(n) for n in range(100)]
