"""Runs that meet at the edges: a decision that would come too late, a record of another query's
place, a participant that is missing, a batch without partitions, a copy that is adopted.
"""

import uuid
from dataclasses import replace

import pytest

from kafka2pc.protocol.clock import Moment
from kafka2pc.protocol.driver import Driver, Policy
from kafka2pc.protocol.errors import (
    LogUnwritable,
    MovedLog,
    OutcomeUnknown,
    Refused,
    StaleCheckpoint,
    UnfinishedBatch,
)
from kafka2pc.protocol.log.decisions import Identity, Slot
from kafka2pc.protocol.log.questions import commit_of, newest_record
from kafka2pc.protocol.log.slots import MemoryLog
from kafka2pc.protocol.memory import MemoryParticipant
from kafka2pc.protocol.messages import Mode
from kafka2pc.protocol.operators.adopt import adopt
from kafka2pc.protocol.operators.fence import end_all
from kafka2pc.protocol.participant import Outcome
from kafka2pc.protocol.phases.claim import claim
from kafka2pc.protocol.phases.commit import commit
from kafka2pc.protocol.phases.decide import decide
from kafka2pc.protocol.phases.precommit import precommit
from kafka2pc.protocol.phases.restore import restore
from kafka2pc.protocol.policies import retry_unknown
from kafka2pc.protocol.states import TxnState

QUERY = str(uuid.uuid4())


def driver_of(log, *stores, **more):
    return Driver(query_id=QUERY, log=log, participants={s.name: s for s in stores}, **more)


def written(driver, plan, rows=("row",)):
    return precommit(driver.participants.values(), plan, iter([rows]))


def write(driver, batch_id, rows=("row",), mine=None):
    plan = restore(driver, batch_id, mine=mine)
    commit(driver, [written(driver, plan, rows)], batch_id)
    return plan.token


def open_in(store):
    return [t.state for t in store.txns.values()].count(TxnState.PRECOMMITTED)


# -- a decision has a deadline --


class Clock:
    """The time of the driver and of its store, in ms."""

    def __init__(self):
        self.ms = 0

    def __call__(self):
        return Moment("boot", self.ms)


class SlowLog(MemoryLog):
    """Each COMMIT takes `takes_ms`, and the first `mute` of them give no answer. `arrives`: such a
    request is written all the same.
    """

    def __init__(self, clock, takes_ms, mute, arrives=False):
        super().__init__()
        self.clock, self.takes_ms, self.mute, self.arrives = clock, takes_ms, mute, arrives
        self.sent_ms = []

    def create(self, decision, late):
        if not decision.commit:
            return super().create(decision, late)
        if late():
            return super().create(decision, late)
        self.sent_ms.append(self.clock.ms)
        self.clock.ms += self.takes_ms
        if len(self.sent_ms) > self.mute:
            return super().create(decision)
        if self.arrives:
            super().create(decision)


def slow(takes_ms, mute, arrives=False):
    clock = Clock()
    store = MemoryParticipant(timeout_ms=60_000, clock=lambda: clock.ms)
    log = SlowLog(clock, takes_ms, mute, arrives)
    return driver_of(log, store, policy=Policy(margin_ms=10_000), now=clock), log, store, clock


def test_no_create_is_sent_once_less_than_the_margin_is_left():
    driver, log, store, clock = slow(takes_ms=51_000, mute=1)
    plan = restore(driver, 0)
    message = written(driver, plan)
    with pytest.raises(OutcomeUnknown, match="less than 10000 ms left") as e:
        commit(driver, [message], 0)
    assert "may still arrive" in e.value.risk and log.sent_ms == [0]
    clock.ms += 10_000
    store.expire()
    assert commit_of(log, 0) is None, "a COMMIT would be about transactions that are gone"
    write(driver, 0, ("again",))
    assert store.read() == ["again"]


def test_a_create_is_repeated_while_there_is_time():
    driver, log, store, _ = slow(takes_ms=15_000, mute=2)
    write(driver, 0)
    assert log.sent_ms == [0, 15_000, 30_000] and store.read() == ["row"]


def test_a_decision_that_was_not_sent_in_time_is_certainly_not_written():
    driver, log, store, clock = slow(takes_ms=0, mute=0)
    plan = restore(driver, 0)
    message = written(driver, plan)
    describe = store.describe

    def answers_late(cs, **limits):
        found = describe(cs, **limits)
        clock.ms += 49_000
        return found

    store.describe = answers_late
    create = log.create
    log.create = lambda decision, late: (setattr(clock, "ms", 50_001), create(decision, late))[1]
    with pytest.raises(LogUnwritable, match="too little time") as e:
        commit(driver, [message], 0)
    assert log.sent_ms == [] and "Nothing of this attempt" in e.value.risk


def test_a_decision_that_arrived_without_an_answer_is_found_by_the_next_run():
    driver, log, store, _ = slow(takes_ms=51_000, mute=1, arrives=True)
    with pytest.raises(OutcomeUnknown):
        write(driver, 0)
    assert restore(driver, 0).mode is Mode.DRAIN and store.read() == ["row"]


def test_transactions_without_a_timeout_have_no_deadline():
    driver, log, store, _ = slow(takes_ms=500_000, mute=2)
    precommitted = MemoryParticipant.receipt
    store.receipt = lambda *name: replace(precommitted(store, *name), timeout_ms=None)
    store.clock = lambda: 0
    write(driver, 0)
    assert len(log.sent_ms) == 3


# -- records that a claim meets --


class Shared(MemoryLog):
    """A log that calls `before_create` once, before the next create."""

    before_create = None

    def create(self, decision, *late):
        happens, self.before_create = self.before_create, None
        if happens:
            happens()
        return super().create(decision, *late)


@pytest.mark.parametrize("decides", [True, False])
def test_a_copy_whose_claim_meets_a_record_of_the_original_stops(decides):
    """Both began before the first record: the listing of the copy was empty."""
    log, store, topic = Shared("kafka:d"), MemoryParticipant(), MemoryParticipant()
    at = lambda place: Identity(checkpoint=place, topics=("t",), prefix="p")
    original = driver_of(log, store, about=at("/a"))
    copy = driver_of(log, topic, about=at("/copy"))
    log.before_create = lambda: write(original, 0) if decides else claim(original, 0)
    before = None
    with pytest.raises(MovedLog, match="checkpoint is /a, and this run uses /copy"):
        before = restore(copy, 0)
    assert before is None and topic.read() == []
    assert write(original, 1) and len(store.read()) == 1 + decides


def test_another_prefix_of_the_log_is_refused_until_it_is_adopted():
    class Log(MemoryLog):
        fence = "p1"

    log, store = Log("kafka:d"), MemoryParticipant()
    write(driver_of(log, store), 0)
    log.fence = "p2"
    with pytest.raises(MovedLog, match="transactionalIdPrefix is p1, and this run uses p2"):
        restore(driver_of(log, store), 1)
    assert adopt(driver_of(log, store)).identity.fence == "p2"
    write(driver_of(log, store), 1)
    log.fence = "p1"
    with pytest.raises(MovedLog):
        restore(driver_of(log, store), 2)


# -- a participant is missing --


def two_stores():
    return MemoryLog(), MemoryParticipant("a"), MemoryParticipant("b")


def test_a_participant_may_not_be_left_out_while_a_batch_without_a_claim_may_be_open_there():
    log, a, b = two_stores()
    both = driver_of(log, a, b)
    token = write(both, 0)
    written(both, restore(both, 1, mine=token))  # in line, without a claim; then the run dies
    with pytest.raises(UnfinishedBatch, match="batch 0 was written to b too"):
        restore(driver_of(log, a), 1)
    assert open_in(b) == 1 and log.batches() == [0]
    write(both, 1)
    assert open_in(b) == 0 and b.read() == ["row", "row"]


def test_a_participant_goes_when_all_is_ended_and_the_rest_is_adopted():
    log, a, b = two_stores()
    both, rest = driver_of(log, a, b), driver_of(log, a)
    token = write(both, 0)
    plan = restore(both, 1, mine=token)
    message = written(both, plan)
    decide(both, plan, [message])  # decided for both, and the run dies
    with pytest.raises(UnfinishedBatch, match="decided for b"):
        adopt(rest)
    end_all(both)
    assert a.read() == b.read() == ["row", "row"]
    adopt(rest)
    for batch_id in (2, 3):
        write(rest, batch_id)
    assert len(a.read()) == 4 and len(b.read()) == 2 and open_in(b) == 0


def test_a_run_that_still_writes_is_fenced_before_a_participant_goes():
    log, a, b = two_stores()
    both = driver_of(log, a, b)
    token = write(both, 0)
    plan = restore(both, 1, mine=token)
    message = written(both, plan)
    end_all(both)
    with pytest.raises(Exception, match="before the decision"):
        commit(both, [message], 1)
    assert open_in(a) == open_in(b) == 0


def test_an_abort_whose_answer_was_lost_and_that_comes_late_is_no_alarm():
    class Late(MemoryParticipant):
        """An abort gets no answer, and is carried out after the first look that follows it."""

        aborted = False

        def abort(self, c):
            self.aborted = True
            return Outcome.UNKNOWN

        def in_doubt(self, query_id):
            found = super().in_doubt(query_id)
            if self.aborted:
                self.expire()
            return found

    log, store = MemoryLog(), Late()
    patient = Policy(retry=lambda: retry_unknown(2, first_ms=0))
    driver = driver_of(log, store, policy=patient)
    written(driver, restore(driver, 0))
    assert open_in(store) == 1
    end_all(driver)
    assert open_in(store) == 0


# -- a batch without partitions --


@pytest.mark.parametrize("check", ["fail", "warn"])
def test_a_batch_without_partitions_finishes_what_another_run_has_decided(check):
    log, store = MemoryLog(), MemoryParticipant()
    driver = driver_of(log, store, policy=Policy(replay_check=check))
    restore(driver, 0)
    other = restore(driver, 0)
    decide(driver, other, [written(driver, other)])  # decides, and dies before the first commit
    if check == "fail":
        with pytest.raises(Exception, match="the replay has 0 rows"):
            commit(driver, [], 0)
    else:
        commit(driver, [], 0)
    assert store.read() == ["row"]


# -- the log that an adoption leaves --


def copied(log, place):
    twin = MemoryLog(place)
    twin.records = dict(log.records)
    return twin


def test_an_adoption_marks_the_log_that_it_leaves():
    old, store = MemoryLog("old"), MemoryParticipant()
    token = write(driver_of(old, store), 0)
    moved = driver_of(copied(old, "new"), store)
    adopt(moved, left=old)
    with pytest.raises(MovedLog, match="log is new, and this run uses old"):
        restore(driver_of(old, store), 1, mine=token)
    write(moved, 1)
    assert store.read() == ["row", "row"]
    assert newest_record(old).slot == Slot(0, 2), "marked once"


def test_a_log_that_has_gone_on_is_not_left_for_its_older_copy():
    old, store = MemoryLog("old"), MemoryParticipant()
    write(driver_of(old, store), 0)
    moved = driver_of(copied(old, "new"), store)
    write(driver_of(old, store), 1)
    with pytest.raises(StaleCheckpoint, match="old holds COMMIT 1.1, and its copy new ends with"):
        adopt(moved, left=old)
    assert newest_record(old).kind == "COMMIT" and newest_record(moved.log).kind == "COMMIT"


def test_an_adoption_looks_again_if_a_run_decides_before_it_writes():
    """Else the next run has no store for a part of what is decided."""

    class Overtaken(MemoryLog):
        def create(self, decision, *late):
            if decision.adopts:
                decide(both, plan, [message])
            return super().create(decision, *late)

    stores = MemoryParticipant("kafka"), MemoryParticipant("second")
    both = driver_of(Overtaken(), *stores)
    plan = restore(both, 0)
    message = written(both, plan)
    with pytest.raises(UnfinishedBatch, match="decided for second"):
        adopt(replace(both, participants={"kafka": stores[0]}))
    assert [d.kind for d in both.log.chain(0)] == ["ABORT", "COMMIT"]


def test_an_adoption_that_was_cut_off_is_made_again():
    old, store = MemoryLog("old"), MemoryParticipant()
    write(driver_of(old, store), 0)
    new = copied(old, "new")
    moved = driver_of(new, store)

    def full(decision, late):
        raise LogUnwritable("disk full")

    new.create = full
    with pytest.raises(LogUnwritable):
        adopt(moved, left=old)
    del new.create
    assert adopt(moved, left=old).slot == Slot(0, 2)


# -- one name, one transaction --


def test_two_tasks_that_report_one_transaction_are_refused_before_the_decision():
    """Their workers have drawn the same name; the clocks of the tasks differ."""
    store = MemoryParticipant()
    driver = driver_of(MemoryLog(), store)
    message = written(driver, restore(driver, 0))
    [c] = message.committables
    twin = replace(message, committables=(replace(c, started_ms=c.started_ms + 1),))
    with pytest.raises(Refused, match="two tasks report the same transaction") as e:
        commit(driver, [message, twin], 0)
    assert c.transactional_id in e.value.what
    assert commit_of(driver.log, 0) is None and open_in(store) == 0
    write(driver, 0)
    assert store.read() == ["row"]
