"""The decision log of a query or a job with a name: added later, copied out of the checkpoint,
without one of its participants.
"""

import copy
import json
import shutil
from dataclasses import replace

import pytest
from driver_steps import Sleepy, decide_only, orders_driver, prepare, sleeps_before_its_claim, write

from kafka2pc.protocol.errors import MovedLog, OutcomeUnknown, Superseded, UnfinishedBatch
from kafka2pc.protocol.kept import Kept
from kafka2pc.protocol.log.decisions import Identity
from kafka2pc.protocol.log.questions import newest_record
from kafka2pc.protocol.log.slots import MemoryLog
from kafka2pc.protocol.memory import MemoryParticipant
from kafka2pc.protocol.messages import Mode
from kafka2pc.protocol.operators.adopt import adopt
from kafka2pc.protocol.participant import Outcome, StoreIdentity
from kafka2pc.protocol.phases.claim import claim
from kafka2pc.protocol.phases.restore import restore
from kafka2pc.protocol.phases.sweep import former_drivers
from kafka2pc.spark.checkpoint import Checkpoint
from kafka2pc.spark.foreach_batch import exactly_once, open_driver
from kafka2pc.spark.sink import opening as driver_side
from kafka2pc.spark.sink import stream_writer
from kafka2pc.spark.sink.options import parse_sink_options


@pytest.fixture
def store():
    return MemoryParticipant()


@pytest.fixture
def driver(tmp_path, store):
    return orders_driver(tmp_path, store)


# -- the option decisionLog, added to a query that ran without it --


@pytest.fixture
def orders(driver, store, tmp_path, monkeypatch):
    """The driver of the sink for the query of `driver`, as another process opens it: a function of
    the option decisionLog.
    """
    (tmp_path / "orders").mkdir()
    (tmp_path / "orders" / "metadata").write_text(json.dumps({"id": driver.query_id}))
    looked, look = [], Checkpoint.decided_slots
    monkeypatch.setattr(
        Checkpoint, "decided_slots", lambda checkpoint: looked.append(1) or look(checkpoint)
    )

    def open_with(decision_log=None, new_process=True, options_only=False):
        if new_process:
            for opens in (driver_side._open_inside, driver_side.log_of_query):
                monkeypatch.setattr(opens, "kept", Kept())
            monkeypatch.setattr(driver_side, "_BESIDE", {})
        options = {
            "kafka.bootstrap.servers": "nowhere:1",
            "topic": "orders",
            "checkpointLocation": str(tmp_path / "orders"),
            "decisionLog": decision_log,
        }
        given = parse_sink_options({k: v for k, v in options.items() if v})
        if options_only:
            return given
        return driver_side.stream_driver(given, Checkpoint(given.query.checkpoint), None, [store])

    open_with.looked = looked
    return open_with


@pytest.fixture(params=["log", "orders/log", "orders/kafka2pc"])
def beside(request, tmp_path):
    """A place beside the decisions in the checkpoint."""
    return tmp_path / request.param


def files(folder):
    return sorted(str(path) for path in folder.rglob("*"))


def test_another_log_is_refused_while_the_checkpoint_holds_decisions(orders, beside, tmp_path):
    write(orders(), 0)
    decide_only(orders(), 1)
    before = files(tmp_path)
    for _ in range(2):
        with pytest.raises(MovedLog, match="up to batch 1, are in .*/orders/kafka2pc") as e:
            orders(str(beside), new_process=False)
    assert "Leave out decisionLog" in e.value.action and files(tmp_path) == before
    assert restore(orders(), 1).mode is Mode.DRAIN


def test_a_log_in_the_checkpoint_is_as_good_as_one_outside(orders, beside):
    for batch_id in range(3):
        write(orders(str(beside)), batch_id)
    assert orders(str(beside)).log.batches() == [0, 1, 2]


def test_a_log_that_was_copied_out_of_the_checkpoint_is_adopted(orders, driver, store, tmp_path):
    write(orders(), 0)
    decide_only(orders(), 1)
    shutil.copytree(tmp_path / "orders" / "kafka2pc", tmp_path / "log" / driver.query_id)
    with pytest.raises(MovedLog, match="kafka2pc adopt"):
        restore(orders(str(tmp_path / "log")), 1)
    adopt(orders(str(tmp_path / "log")))
    assert restore(orders(str(tmp_path / "log")), 1).mode is Mode.DRAIN
    write(orders(str(tmp_path / "log")), 2)
    assert store.read() == ["row"] * 3


def test_a_process_looks_into_the_checkpoint_once(orders, tmp_path):
    for batch_id in range(3):
        write(orders(str(tmp_path / "log"), new_process=False), batch_id)
    assert len(orders.looked) == 1


def test_a_planner_that_lives_on_looks_before_each_batch(orders, store, tmp_path, monkeypatch):
    """Another process may have run the query without the log in between."""
    monkeypatch.setattr(stream_writer, "open_participant", lambda options, patient: store)
    planned = tmp_path / "orders" / "offsets"
    planned.mkdir()
    (planned / "0").write_text("v1\n{}\n0")
    options = orders(str(tmp_path / "log"), options_only=True)
    stream_writer.plan_stream(options)
    (tmp_path / "orders" / "kafka2pc").mkdir()
    (tmp_path / "orders" / "kafka2pc" / "1.0.json").touch()
    (planned / "1").write_text("v1\n{}\n1")
    with pytest.raises(MovedLog, match="up to batch 1, are in"):
        stream_writer.plan_stream(options)


# -- foreachBatch: no checkpoint is known --


def test_a_job_gives_a_participant_up_by_its_own_method():
    log, kept, gone = MemoryLog(), MemoryParticipant("kept"), MemoryParticipant("gone")
    options = {"decisionLog": log}
    job = exactly_once(options, participants=[kept, gone], name="job")
    prepare(open_driver(job.given), 0)
    rest = exactly_once(options, participants=[kept], name="job")
    with pytest.raises(UnfinishedBatch):
        restore(open_driver(rest.given), 0)
    assert dict(job.adopt(without=["gone"]).stores) == {"kept": "kept-store"}
    assert (
        gone.in_doubt(open_driver(job.given).query_id)
        == kept.in_doubt(open_driver(job.given).query_id)
        == []
    )
    write(open_driver(rest.given), 0)
    assert (kept.read(), gone.read()) == (["row"], [])


def test_a_participant_is_not_given_up_while_its_abort_gets_no_clear_answer(monkeypatch):
    """No later run would look into it."""
    log, kept, gone = MemoryLog(), MemoryParticipant("kept"), MemoryParticipant("gone")
    options = {"decisionLog": log, "maxCommitRetries": "1"}
    job = exactly_once(options, participants=[kept, gone], name="job")
    _, in_gone = prepare(open_driver(job.given), 0).committables
    with monkeypatch.context() as m, pytest.raises(OutcomeUnknown) as e:
        m.setattr(gone, "abort", lambda c: Outcome.UNKNOWN)
        job.adopt(without=["gone"])
    assert in_gone.transactional_id in e.value.what and not newest_record(log).adopts
    assert (
        job.adopt(without=["gone"]).adopts and gone.in_doubt(open_driver(job.given).query_id) == []
    )


class Prefixed(MemoryParticipant):
    """A store whose transactional ids have a prefix."""

    def __init__(self, prefix):
        super().__init__()
        self.prefix = prefix

    def identity(self):
        return StoreIdentity(prefix=self.prefix)

    def under(self, prefix):
        twin = copy.copy(self)
        twin.prefix = prefix
        return twin


@pytest.mark.parametrize("prefixes", [["bills", "orders"], ["bills,paid", "orders"], ["a,b"]])
def test_participants_of_a_job_are_swept_under_each_former_prefix(prefixes):
    """A record joins the prefixes of several stores by commas, and each may have commas itself."""
    stores = [Prefixed(prefix) for prefix in prefixes]
    for n, store in enumerate(stores):
        store.name = f"store{n}"
    driver = open_driver(
        exactly_once({"decisionLog": MemoryLog()}, participants=stores, name="job").given
    )
    claimed = claim(driver, 0)
    renamed = replace(driver, about=Identity(prefix="new"))
    found = former_drivers(renamed, claimed, driver.log.listing())
    swept = {p.prefix for each in found for p in each.participants.values()}
    assert swept >= set(prefixes) if len(stores) > 1 else swept == set(prefixes)
    assert former_drivers(driver, claimed, driver.log.listing()) == []


def test_a_job_that_met_a_commit_which_does_not_count_does_not_call_itself_written(monkeypatch):
    monkeypatch.setattr("kafka2pc.spark.sink.opening.back_off", lambda attempt: False)
    log, store = Sleepy(), MemoryParticipant()
    options = {"decisionLog": log}
    job = exactly_once(options, participants=[store], name="job")
    sleeps_before_its_claim(open_driver(job.given))
    with pytest.raises(Superseded):
        job.write(None)
    assert store.read() == [] and log.batches() == [0], "the name is not closed"
