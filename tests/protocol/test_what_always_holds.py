"""What always holds is checked where a violation would lose or double rows: each check can fail."""

from dataclasses import replace
from types import SimpleNamespace

import pyarrow as pa
import pytest
from fake_topic_log import FakeBroker, FakeTopicLog

from kafka2pc.decision_logs.topic.bookmark import save_bookmark
from kafka2pc.kafka.records.encoder import Section
from kafka2pc.kafka.write.lanes import Lane, replace_batch
from kafka2pc.kafka.write.sender import Sender, take_answer
from kafka2pc.protocol.clock import CLOCK
from kafka2pc.protocol.driver import Driver
from kafka2pc.protocol.log.decisions import FAILED, Slot
from kafka2pc.protocol.log.slots import MemoryLog, win
from kafka2pc.protocol.messages import Mode, Plan, PreparedTxnState
from kafka2pc.protocol.names import Token
from kafka2pc.protocol.phases import restore as restore_phase
from kafka2pc.protocol.phases.decide import decide
from kafka2pc.protocol.phases.finish import finish
from kafka2pc.protocol.phases.requests import send_each
from kafka2pc.protocol.states import IllegalStep

QUERY = "11111111-2222-3333-4444-555555555555"
PLAN = Plan(query_id=QUERY, batch_id=3, attempt=1, token=Token(3, 1, "5f3a09c1"))
STATE = PreparedTxnState(1, 0)


class BadLog(MemoryLog):
    """A log with a mistake: what it lists, and how it answers a create."""

    listed, answer = (), None

    def slots(self):
        return list(self.listed)

    def create(self, decision, late=None):
        return replace(decision, slot=self.answer or decision.slot)


def a_driver(listed=(), answer=None):
    log = BadLog()
    log.listed, log.answer = listed, answer
    return Driver(query_id=QUERY, log=log, participants={})


def a_section(count):
    return Section("t", 0, count, 0, 0, pa.py_buffer(b""))


def a_lane():
    """A lane with two batches of three records; the first one is sent."""
    lane = Lane("t", 0)
    first, _ = [lane.append(a_section(3), STATE, "none") for _ in range(2)]
    lane.send(first)
    return lane, first


def a_sender():
    """A sender with a lane of one batch, which is sent and answered."""
    sender = Sender(SimpleNamespace(clock=CLOCK), "orders-0", STATE)
    lane = sender.lanes["t", 0] = Lane("t", 0)
    batch = lane.append(a_section(1), STATE, "none")
    lane.send(batch)
    return sender, lane, batch


def an_answer(lane):
    part = SimpleNamespace(index=lane.partition, error_code=0, base_offset=0)
    topic = SimpleNamespace(name=lane.topic, partition_responses=[part])
    return SimpleNamespace(exception=None, value=SimpleNamespace(responses=[topic]))


def list_out_of_order():
    a_driver([Slot(1, 0), Slot(0, 0)]).log.listing()


def commit_in_a_note():
    win(MemoryLog(), a_driver().decision(replace(PLAN, attempt=FAILED), commit=True))


def answer_about_another_slot():
    driver = a_driver(answer=Slot(3, 0))
    win(driver.log, driver.decision(PLAN, commit=True))


def decide_what_is_drained():
    decide(a_driver(), replace(PLAN, mode=Mode.DRAIN), [])


def finish_an_abort():
    driver = a_driver()
    finish(driver, driver.decision(PLAN, commit=False))


def plan_with_a_later_token():
    restore_phase._plan(a_driver(), Slot(2, 0), PLAN.token, "")


def send_what_ends_nothing():
    send_each(a_driver(), "comit", [], None, None)


def leave_the_order():
    lane, _ = a_lane()
    lane.sequence -= 1
    lane.append(a_section(1), STATE, "none")


def cut_a_record_away():
    lane, first = a_lane()
    lane.answered(first)
    replace_batch(lane, first, [a_section(1), a_section(1)], STATE, "none")


def send_twice():
    lane, first = a_lane()
    lane.send(first)


def take_an_answer_twice():
    lane, first = a_lane()
    lane.answered(first)
    lane.answered(first)


def count_twice():
    lane, first = a_lane()
    lane.acknowledge(first, 0)
    lane.acknowledge(first, 0)


def hold_less_than_nothing():
    sender, lane, batch = a_sender()
    sender.requests.flying[0] = 1
    take_answer(sender, 0, [(lane, batch)], an_answer(lane))


def answer_what_was_not_asked():
    sender, lane, batch = a_sender()
    take_answer(sender, 0, [(lane, batch)], an_answer(lane))


def flush_and_leave_a_batch():
    sender, _, _ = a_sender()
    sender.flush()


def hide_records_behind_a_bookmark():
    log = FakeTopicLog(FakeBroker(), QUERY, "kafka2pc")
    log.reader.bookmark = SimpleNamespace(at=0)
    log.reader.tail.found = {"key": {b"value": 7}}
    save_bookmark(log.reader, set())


@pytest.mark.parametrize(
    ("violate", "what"),
    [
        (list_out_of_order, "a log lists its slots out of order: memory"),
        (commit_in_a_note, "a note commits: 3.failed"),
        (answer_about_another_slot, "a log answers about another slot: 3.1, 3.0"),
        (decide_what_is_drained, f"a batch is decided twice: {QUERY}, 3"),
        (finish_an_abort, f"what is no COMMIT is finished: {QUERY}, 3.1"),
        (
            plan_with_a_later_token,
            "a batch is planned with the claim of a later one: 2.0, 3.1.5f3a09c1",
        ),
        (send_what_ends_nothing, "this ends no transaction: comit"),
        (leave_the_order, "a batch is out of order: t, 0, 5"),
        (cut_a_record_away, "a batch that is cut loses or doubles records: t, 0, 0"),
        (send_twice, "a batch is sent twice: t, 0, 0"),
        (take_an_answer_twice, "an answer is taken twice: t, 0, 0"),
        (count_twice, "a batch is counted twice: t, 0, 0"),
        (hold_less_than_nothing, "more is sent than was held: orders-0"),
        (answer_what_was_not_asked, "more answers than requests: orders-0, 0"),
        (flush_and_leave_a_batch, r"a flush leaves batches behind: orders-0, \('t', 0\)"),
        (hide_records_behind_a_bookmark, "a bookmark hides records: d, 7, 0"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_always_holds_is_checked(violate, what):
    with pytest.raises(IllegalStep, match=f"^a bug in kafka2pc: {what}\n") as caught:
        violate()
    assert "is data at risk: No, not by this step." in str(caught.value)


def test_a_lane_goes_on_when_what_was_sent_last_has_arrived_first():
    lane, _ = a_lane()
    lane.acknowledge(lane.batches[-1], 3)
    assert lane.append(a_section(1), STATE, "none").sequence == 6
