"""Starts that fail again and again: what a start costs does not grow with their number, rows are
written once, and supervisors that duel back off.
"""

import random
import uuid
from collections import Counter
from dataclasses import replace

import pytest
from driver_steps import Sleepy, sleeps_before_its_claim

from kafka2pc.decision_logs.files import FileLog
from kafka2pc.protocol.clock import Moment
from kafka2pc.protocol.driver import Driver, Policy
from kafka2pc.protocol.errors import StaleCheckpoint, Superseded
from kafka2pc.protocol.log.decisions import Identity, Slot
from kafka2pc.protocol.log.questions import commit_of
from kafka2pc.protocol.log.slots import MemoryLog
from kafka2pc.protocol.memory import MemoryParticipant
from kafka2pc.protocol.messages import CommitMessage, Mode
from kafka2pc.protocol.operators.adopt import adopt
from kafka2pc.protocol.operators.fence import fence
from kafka2pc.protocol.phases.claim import back_off
from kafka2pc.protocol.phases.commit import commit
from kafka2pc.protocol.phases.decide import abort, decide
from kafka2pc.protocol.phases.precommit import precommit
from kafka2pc.protocol.phases.restore import restore


class Counting(MemoryLog):
    """Counts what a start asks of its log, and how many slots its lists had."""

    def __init__(self):
        super().__init__()
        self.asked = Counter()

    def create(self, decision, *late):
        self.asked["create"] += 1
        return super().create(decision, *late)

    def slots(self):
        found = super().slots()
        self.asked += Counter(slots=1, listed=len(found))
        return found

    def load(self, slot):
        self.asked["load"] += 1
        return super().load(slot)

    def remove(self, slots):
        self.asked["remove"] += len(slots)
        super().remove(slots)


def driver_of(log, **more):
    store = MemoryParticipant()
    return Driver(
        query_id=str(uuid.uuid4()),
        log=log,
        participants={store.name: store},
        about=Identity(prefix="kafka2pc"),
        **more,
    )


def prepared(driver, planned, rows=("row",)):
    return [precommit(driver.participants.values(), planned, iter([rows]))]


def rows_of(driver):
    return driver.participants["memory"].read()


def what_a_start_costs(driver, batch_id=0):
    driver.log.asked.clear()
    restore(driver, batch_id)
    return dict(driver.log.asked)


def test_the_thousandth_start_costs_what_the_twentieth_did():
    driver = driver_of(Counting())
    costs = [what_a_start_costs(driver) for _ in range(1000)]
    assert costs[999] == costs[19]
    assert (
        costs[999]["create"] == 1 and costs[999]["slots"] == 2 and sum(costs[999].values()) < 50
    ), costs[999]
    commit(driver, prepared(driver, restore(driver, 0)), 0)
    assert rows_of(driver) == ["row"]


def test_a_long_chain_of_an_older_version_gets_shorter_with_each_start():
    """It was claimed from slot 0 on, and nothing was removed."""
    driver = driver_of(Counting(), policy=Policy(keep_claims=10**6))
    for _ in range(300):
        restore(driver, 0)
    assert len(driver.log.slots()) == 300
    now = driver.within(keep_claims=8)
    for _ in range(12):
        cost = what_a_start_costs(now)
        assert cost["create"] == 1 and cost["remove"] <= 32
    assert len(driver.log.slots()) == 9


@pytest.mark.parametrize("sleeps", ["before it writes", "before it decides", "after its COMMIT"])
def test_a_run_that_slept_while_its_slot_was_removed_writes_nothing(tmp_path, sleeps):
    driver = driver_of(FileLog(tmp_path / "log"))
    first = restore(driver, 0)
    messages = prepared(driver, first) if sleeps != "before it writes" else []
    for _ in range(20):
        last = restore(driver, 0)
    assert Slot(0, first.attempt) not in driver.log.slots()
    messages = messages or prepared(driver, first)  # in time for no sweep
    if sleeps == "after its COMMIT":
        decide(driver, first, messages)  # the slot was free
    with pytest.raises(Exception) as e:
        commit(driver, messages, 0)
    assert "attempt" in str(e.value) or "later" in str(e.value) or "aborted" in str(e.value)
    assert commit_of(driver.log, 0) is None and rows_of(driver) == []
    assert restore(driver, 0).mode is Mode.WRITE, "a COMMIT with a later claim is not drained"
    commit(driver, prepared(driver, restore(driver, 0)), 0)
    assert rows_of(driver) == ["row"] and last.attempt < 30


def test_a_claim_that_meets_a_commit_which_does_not_count_is_not_drained():
    driver = driver_of(Sleepy())
    sleeps_before_its_claim(driver)
    with pytest.raises(Superseded):
        restore(driver, 0)
    commit(driver, prepared(driver, restore(driver, 0)), 0)
    assert rows_of(driver) == ["row"]


class SlowToLoad(MemoryLog):
    """A reader that sleeps once, between a listing and the load after it, the `nth` one.
    `meanwhile`: what other runs do.
    """

    meanwhile, nth = None, 2  # the first one asks whose log it is

    def load(self, slot):
        self.nth -= self.meanwhile is not None
        if self.meanwhile and not self.nth:
            others, self.meanwhile = self.meanwhile, None
            others()
        return super().load(slot)


def test_the_shell_claims_no_batch_behind_a_commit_that_does_not_count():
    """It lists the claim that closed slot 1. Before it loads that, the slot was removed, and won by
    the run whose slot it had been.
    """
    driver = driver_of(SlowToLoad())
    first = restore(driver, 0)
    messages = prepared(driver, first)
    restore(driver, 0)

    def others():
        for _ in range(20):
            restore(driver, 0)
        decide(driver, first, messages)

    driver.log.meanwhile = others
    with pytest.raises(Superseded):
        fence(driver)
    assert driver.log.batches() == [0], "a later batch in the log says that batch 0 is finished"
    commit(driver, prepared(driver, restore(driver, 0)), 0)
    assert rows_of(driver) == ["row"]


def test_the_shell_fences_no_run_with_a_claim_that_came_too_late():
    """It won a slot that was removed after its listing. The run that works now has claimed a later
    one, and is not fenced.
    """
    driver = driver_of(Sleepy())
    restore(driver, 0)
    driver.log.meanwhile = lambda: [restore(driver, 0) for _ in range(20)]
    with pytest.raises(Superseded):
        fence(driver)


def test_a_fence_closes_what_is_planned_and_a_run_between_two_batches_claims_again():
    driver = driver_of(MemoryLog())
    planned = restore(driver, 0)
    messages = prepared(driver, planned)
    fence(driver)
    with pytest.raises(Superseded):
        decide(driver, planned, messages)
    planned = restore(driver, 0)
    commit(driver, prepared(driver, planned), 0)
    fence(driver)
    assert restore(driver, 1, mine=planned.token).attempt == 2


def test_starts_at_an_older_batch_leave_nothing_in_the_log():
    """A supervisor starts a query again and again whose checkpoint was turned back."""
    driver = driver_of(MemoryLog(), policy=Policy(keep_batches=1))
    for batch_id in range(4):
        commit(driver, prepared(driver, restore(driver, batch_id)), batch_id)
    before = driver.log.slots()
    for _ in range(20):
        with pytest.raises(StaleCheckpoint, match="about to write batch 0, but its log holds"):
            restore(driver, 0)
    assert driver.log.slots() == before


def test_the_wait_before_a_claim_is_not_part_of_the_age_of_a_plan():
    """Before Kafka 3.8 the age of the plan alone says whether a transaction has time left: a wait
    would use it up.
    """
    clock = [0]

    def wait(attempt):
        clock[0] += 100_000

    driver = driver_of(
        MemoryLog(), policy=Policy(pause_before_claim=wait), now=lambda: Moment("boot", clock[0])
    )
    assert restore(driver, 0).planned == Moment("boot", 100_000)


def test_a_commit_with_an_adopted_log_behind_it_counts():
    driver = driver_of(MemoryLog())
    planned = restore(driver, 0)
    decide(driver, planned, prepared(driver, planned))
    moved = replace(driver, about=replace(driver.about, checkpoint="file:///moved"))
    adopt(moved)
    assert commit_of(moved.log, 0).slot == Slot(0, 1)
    assert restore(moved, 0).mode is Mode.DRAIN and rows_of(moved) == ["row"]


def test_claims_under_a_former_prefix_are_kept_because_a_sweep_needs_them():
    driver = driver_of(MemoryLog())
    restore(driver, 0)
    asked = []
    renamed = replace(
        driver, about=Identity(prefix="new"), former=lambda prefix: asked.append(prefix) or ()
    )
    adopt(renamed)
    for _ in range(30):
        restore(renamed, 0)
    assert asked == ["kafka2pc"] * 30
    assert {d.identity.prefix for d in driver.log.chain(0)} == {"kafka2pc", "new"} and len(
        driver.log.slots()
    ) <= 11


def test_many_claims_under_a_former_prefix_get_fewer_and_one_is_kept():
    driver = driver_of(Counting(), policy=Policy(keep_claims=10**6))
    for _ in range(100):
        restore(driver, 0)
    asked = []
    renamed = replace(
        driver.within(keep_claims=8),
        about=Identity(prefix="new"),
        former=lambda prefix: asked.append(prefix) or (),
    )
    adopt(renamed)
    for _ in range(20):
        restore(renamed, 0)
    assert asked == ["kafka2pc"] * 20
    assert [d.identity.prefix for d in driver.log.chain(0)] == ["kafka2pc"] + ["new"] * 9


# -- two supervisors --


def duel(patience, batch_s=20, restart_s=1, seed=7, limit_s=3600):
    """Two supervisors restart the same query. A run takes `batch_s` from its plan to its commit,
    and fails if another one has claimed meanwhile. In simulated time: how many seconds until one of
    them has committed; `limit_s` if none has.
    """
    dice, log = random.Random(seed), MemoryLog()
    driver = driver_of(log)
    runs, now = {"A": (0.0, None), "B": (batch_s / 2, None)}, 0.0
    while now < limit_s:
        name = min(runs, key=lambda n: runs[n][0])
        now, planned = runs[name]
        if planned is None:
            waited = []
            planned = restore(
                driver.within(
                    pause_before_claim=lambda attempt: waited.append(patience(attempt, dice))
                ),
                0,
            )
            runs[name] = now + sum(waited) + batch_s, planned
            continue
        try:
            commit(driver, prepared(driver, planned), 0)
            return now
        except (Superseded, StaleCheckpoint):
            runs[name] = now + restart_s, None
    return limit_s


def by_back_off(attempt, dice):
    seconds = []
    state = random.getstate()
    random.seed(dice.random())
    back_off(attempt, sleep=seconds.append)
    random.setstate(state)
    return sum(seconds)


def test_only_starts_that_could_not_give_up_are_counted():
    """A query that fails in each batch closes its slot each time; a killed one cannot."""
    driver, asked = driver_of(MemoryLog()), []
    counting = driver.within(pause_before_claim=lambda claims: asked.append(claims) or False)
    for ends in (True, True, False, False, True, False):
        planned = restore(counting, 0)
        if ends:
            abort(driver, [CommitMessage(plan=planned)], 0)
    assert asked == [0, 0, 0, 1, 2, 0]
    planned = restore(driver, 0)
    commit(driver, prepared(driver, planned), 0)
    # in slot 0, which the COMMIT before has claimed
    abort(driver, [CommitMessage(plan=restore(driver, 1, mine=planned.token))], 1)
    restore(counting, 1)
    assert asked[6:] == [0]


def test_a_run_that_has_waited_looks_at_the_log_again():
    """Meanwhile another run has decided the batch: it is drained, and not claimed."""
    driver = driver_of(MemoryLog())
    others = restore(driver, 0)

    def wait(attempt):
        if commit_of(driver.log, 0) is None:
            commit(driver, prepared(driver, others), 0)
        return True

    assert restore(driver.within(pause_before_claim=wait), 0).mode is Mode.DRAIN
    assert len(driver.log.slots()) == 2 and rows_of(driver) == ["row"]


def test_a_record_that_is_gone_when_it_is_read_stops_the_start():
    """It was listed. If it were passed over, an older record would speak for the batch."""
    driver = driver_of(Counting())
    for _ in range(3):
        restore(driver, 0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Counting, "load", lambda log, slot: None)
        with pytest.raises(Superseded, match="removed while it was read"):
            restore(driver, 0)


def test_two_supervisors_that_duel_come_to_an_end_because_they_back_off():
    assert duel(lambda attempt, dice: 0) == 3600, (
        "without it, each takes the batch from the other for ever"
    )
    assert max(duel(by_back_off, seed=n) for n in range(20)) < 1200
