"""A batch of a streaming query that fails or is stopped, without Spark: what its committer does if
no task has answered, if the batch is decided, and if the brokers are away.
"""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest

from kafka2pc.kafka.participant import KafkaParticipant
from kafka2pc.local.nodes import free_ports
from kafka2pc.protocol.log.decisions import LOST
from kafka2pc.protocol.log.questions import commit_of
from kafka2pc.protocol.memory import MemoryParticipant
from kafka2pc.protocol.phases.decide import decide
from kafka2pc.protocol.phases.precommit import precommit
from kafka2pc.protocol.phases.reopen import repair_record
from kafka2pc.protocol.phases.verify import judge
from kafka2pc.protocol.states import TxnState
from kafka2pc.spark.checkpoint import Checkpoint
from kafka2pc.spark.sink import giving_up, opening, stream_writer
from kafka2pc.spark.sink.options import parse_sink_options
from kafka2pc.spark.sink.stream_writer import SparkMessage, StreamWriter, plan_stream


class Store(MemoryParticipant):
    """A store that the planner leaves a note about."""

    batch_bytes, two_phase, end_txn_version, cluster_id = None, True, 5, "memory"
    timeout_ms = 60_000

    def states(self):
        return [txn.state for txn in self.txns.values()]


class Batch:
    """A planned batch 0, in a checkpoint as Spark leaves it."""

    def __init__(self, folder, store):
        place = folder / "checkpoint"
        (place / "offsets").mkdir(parents=True)
        (place / "metadata").write_text(json.dumps({"id": "8520176f-505a-4ae1-b629-769c04fa1bc3"}))
        (place / "offsets/0").write_text("v1\n{}\n-")
        servers = f"127.0.0.1:{free_ports(1)[0]}"
        self.options = parse_sink_options(
            {
                "kafka.bootstrap.servers": servers,
                "topic": "t",
                "checkpointLocation": str(place),
                "maxCommitRetries": "1",
            }
        )
        self.store = store
        self.writer = plan_stream(self.options)

    def task(self, *rows):
        return SparkMessage(precommit([self.store], self.writer.plan, iter([[*rows]]), measure=len))

    def driver(self):
        checkpoint = Checkpoint(self.options.query.checkpoint)
        return opening.stream_driver(self.options, checkpoint, None, [self.store])

    def decide(self, *messages):
        decide(self.driver(), self.writer.plan, [m.content for m in messages])

    def abort(self, *messages):
        """Spark makes another writer in the committer."""
        StreamWriter(self.options, None, None).abort([*messages], 0)


@pytest.fixture
def batch(tmp_path, monkeypatch):
    store = Store("kafka")
    monkeypatch.setattr(stream_writer, "open_participant", lambda options, patient=False: store)
    monkeypatch.setattr(giving_up, "KILLED_S", 0)
    monkeypatch.setenv("SPARK_LOCAL_DIRS", str(tmp_path))
    return Batch(tmp_path, store)


@pytest.fixture
def in_memory(monkeypatch, batch):
    """The committer reaches the store of the planner."""
    monkeypatch.setattr(giving_up.LeftPlan, "participant", lambda left, options: batch.store)


def test_what_tasks_without_a_message_have_begun_is_aborted(in_memory, batch, monkeypatch):
    """One of them goes on after the first sweep."""
    batch.task("a")
    late = SimpleNamespace(sleep=lambda seconds: batch.task("late"))
    monkeypatch.setattr(giving_up, "CLOCK", late)
    batch.abort(None, None)
    assert batch.store.states() == [TxnState.ABORTED] * 2


def test_a_batch_that_is_decided_is_finished(in_memory, batch):
    batch.decide(batch.task("a"))
    batch.abort(None)
    assert batch.store.read() == ["a"]


@pytest.mark.parametrize("lost", ["repair", "fail", "skip"])
def test_a_stop_promises_that_lost_rows_are_written_again_only_if_they_may_be(
    lost, in_memory, batch, caplog
):
    target = batch.options.query
    batch.options = replace(batch.options, query=replace(target, lost_transactions=lost))
    batch.decide(batch.task("a"))
    batch.store.expire()
    batch.abort(None)
    assert ("may stay open" in caplog.text) == (lost == "repair")
    assert batch.store.read() == []


def test_a_replay_that_fails_logs_that_its_rows_are_committed(in_memory, batch, caplog):
    """Spark's own error is about the source: its rows may be gone."""
    batch.decide(batch.task("a"))
    plan_stream(batch.options)
    batch.abort(None)
    assert "batch 0: it is committed, and only its replay failed" in caplog.text
    assert "Runbook" in caplog.text


def test_a_replay_of_what_another_run_has_reopened_is_not_called_committed(
    in_memory, batch, caplog
):
    batch.decide(batch.task("a"))
    plan_stream(batch.options)
    driver = batch.driver()
    judged = judge(driver, commit_of(driver.log, 0))
    driver.log.create(repair_record(driver, judged, LOST, judged.slot, judged.token))
    batch.abort(None)
    assert "it is committed" not in caplog.text


def test_without_a_plan_nothing_is_touched_and_the_log_says_how_to_end_it(
    in_memory, batch, monkeypatch, caplog
):
    monkeypatch.delenv("SPARK_LOCAL_DIRS")
    batch.task("a")
    batch.abort(None)
    assert batch.store.states() == [TxnState.PRECOMMITTED]
    assert f"kafka2pc restore {batch.options.query.checkpoint}" in caplog.text


def test_with_brokers_away_a_stop_gives_up_soon_and_raises_nothing(batch, monkeypatch, caplog):
    monkeypatch.setattr(giving_up, "_LIMIT_MS", 100)
    batch.abort(None)
    assert "no usable answer within 100 ms" in caplog.text
    assert f"kafka2pc restore {batch.options.query.checkpoint}" in caplog.text


def test_a_note_holds_no_settings_of_the_client(batch, tmp_path):
    (note,) = tmp_path.glob("kafka2pc-*")
    assert dict(batch.options.target.conf)["bootstrap.servers"].encode() not in note.read_bytes()
    kafka = giving_up.find_plan(batch.options.query.checkpoint, 0).participant(batch.options.target)
    assert isinstance(kafka, KafkaParticipant) and kafka.cluster_id == "memory"
