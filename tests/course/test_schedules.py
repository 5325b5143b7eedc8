"""The judge of the challenge: the drivers of the course pass the levels of their lessons, each
broken one falls where it should, and mistakes of the learner are explained.
"""

import random
import threading
import time
import uuid
from xml.etree import ElementTree

import pytest

from kafka2pc.course.explorer import small_world as small
from kafka2pc.course.explorer.ladder import LEVELS, climb, drawn_lines, judge, picture_of
from kafka2pc.course.explorer.replay import calm
from kafka2pc.course.explorer.schedules import Search, explore
from kafka2pc.course.explorer.small_world import CALLS, FAULTS, Setup, StepStore, World
from kafka2pc.course.explorer.wording import tell
from kafka2pc.course.real_kafka import AsksAgain, PatientDriver
from kafka2pc.course.spark import TidyDriver
from kafka2pc.course.two_drivers import FencedDriver
from kafka2pc.course.two_phase_commit import (
    QUERY,
    CommitFirst,
    Driver,
    Eager,
    Forgetful,
    Rewriting,
    Unchecked,
)
from kafka2pc.protocol.errors import LostTransaction, Refused, Superseded, TwoPhaseError
from kafka2pc.protocol.memory import MemoryParticipant
from kafka2pc.protocol.messages import Plan
from kafka2pc.protocol.names import new_token
from kafka2pc.protocol.participant import Outcome

pytestmark = pytest.mark.never_unsteady
ONE, BOTH = ((("a",),),), ((("a",),), (("b",),))


class KeepsNewest(TidyDriver):
    keep_batches = 0


class KeepsNothing(TidyDriver):
    keep_batches = -1


class SweepsAll(FencedDriver):
    def sweep(self, token):
        self.abort_open()


class SweepsFirst(FencedDriver):
    def restore(self, batch_id):
        self.abort_open()
        return super().restore(batch_id)


class LooksThenSweeps(FencedDriver):
    """Sweeps before its claim, if it has found no COMMIT."""

    def restore(self, batch_id):
        if not self.commit_of(batch_id):
            self.abort_open()
        return super().restore(batch_id)


class NeverSweeps(FencedDriver):
    def sweep(self, token):
        pass


class NeverAborts(Driver):
    def abort_open(self):
        pass


class NeverLooks(PatientDriver):
    def is_past(self, batch_id):
        return False


class TakesItAsDone(AsksAgain):
    def check_committed(self, decision, outcomes):
        pass


class CriesWolf(PatientDriver):
    """Takes no answer for a loss."""

    def send(self, verb, c):
        outcome = super(AsksAgain, self).send(verb, c)
        if outcome is Outcome.UNKNOWN:
            raise LostTransaction(c.transactional_id)
        return outcome


class MeetsAndStops(Driver):
    def drain(self, decided):
        raise Superseded("the batch is decided")


class AsksTheLogOnce(PatientDriver):
    """An unclear answer of the log counts as a yes."""

    def create(self, wanted):
        return self.log.create(wanted) or wanted


FALLS = [
    (Driver, 3, "lost"),
    (CommitFirst, 1, "twice"),
    (Rewriting, 1, "twice"),
    (Forgetful, 1, "lost"),
    (MeetsAndStops, 1, "stuck"),
    (NeverAborts, 1, "open"),
    (KeepsNothing, 1, "twice"),
    (Eager, 2, "lost"),
    (Unchecked, 2, "lost"),
    (TakesItAsDone, 2, "lost"),
    (SweepsFirst, 1, "lost"),
    (NeverSweeps, 1, "open"),
    (LooksThenSweeps, 3, "lost"),
    (SweepsAll, 3, "lost"),
    (FencedDriver, 4, "hidden"),
    (CriesWolf, 4, "false alarm"),
    (AsksTheLogOnce, 4, "twice"),
    (NeverLooks, 5, "twice"),
]


@pytest.mark.parametrize(("kind", "level", "wrong"), FALLS)
def test_a_driver_falls_at_the_level_of_its_lesson(kind, level, wrong):
    failure = judge(kind).failure
    assert (failure.level.number, failure.found.wrong.kind) == (level, wrong), failure.steps()


RIGHT = [
    *((PatientDriver, level.number) for level in LEVELS[:6]),
    *((KeepsNewest, level.number) for level in LEVELS[:7]),
    *(pytest.param(kind, 7, marks=pytest.mark.full) for kind in (FencedDriver, PatientDriver)),
    pytest.param(KeepsNewest, 7, marks=pytest.mark.full),
    pytest.param(PatientDriver, 6, marks=pytest.mark.full),
]


@pytest.mark.parametrize(("kind", "level"), RIGHT)
def test_a_right_driver_passes(kind, level):
    line, found = climb(kind, LEVELS[level])
    assert found is None and "passed" in line, line


def test_a_search_that_is_cut_off_is_not_passed(monkeypatch):
    monkeypatch.setattr("kafka2pc.course.explorer.ladder.STATES_MAX", 20)
    line, found = climb(FencedDriver, LEVELS[3])
    assert found is None and "not all states were visited" in line


@pytest.mark.parametrize("kind", [Driver, SweepsAll, LooksThenSweeps])
def test_no_other_schedule_is_shorter(kind):
    """Compared with all wrong states that there are."""
    found = explore(kind, Setup(ONE, together=True))
    with calm():
        search = Search(kind, Setup(ONE, together=True))
        lengths = [f.length for f in every_wrong(search) if f.wrong.kind != "open"]
    assert len(lengths) > 1 and found.length == min(lengths)


def every_wrong(search):
    """What is found in each state, in the order of their distance."""
    while search.queue:
        _, state = search.queue.popleft()
        lone = search.lone_runs.of(state[0])
        if lone.wrong:
            yield search.found(state, lone)
        for step, after in search.explorer.successors(state):
            if after not in search.came:
                search.came[after] = state, step
                search.queue.append((0, after))


def test_a_decided_transaction_may_time_out_under_a_live_driver():
    found = explore(TakesItAsDone, LEVELS[2].worlds[1])
    assert (found.wrong.kind, {step.run for step in found.path}) == ("lost", {0, 1})
    assert not found.then  # the first wrong state is earlier, but its schedule is longer


def test_the_schedule_is_that_of_lesson_3_but_shorter():
    found = explore(Driver, Setup(ONE, together=True))
    assert [step.request[0] for step in found.path] == [
        *("start", "slots", "in_doubt", "pre-commit", "describe"),
        *("start", "slots", "create", "in_doubt", "abort"),
    ]
    assert [step.run for step in found.path] == [1, 1, 1, 1, 1, 2, 2, 1, 2, 2]
    assert found.killed == (1, 2) and found.then[-1].answer is Outcome.REFUSED


# -- the small world --


def in_state(end):
    """A transaction that is open, committed or aborted: in memory, and in a small world."""
    plan = Plan(query_id=QUERY, batch_id=0, attempt=0, token=new_token(0, 0))
    store = MemoryParticipant("store")
    with store.begin(plan) as txn:
        txn.write(["a"])
        txn.flush()
        c = txn.precommit()
    _, world = CALLS["pre-commit"](World(), c, ("a",))
    if end:
        getattr(store, end)(c)
        _, world = CALLS[end](world, c)
    return store, c, world


@pytest.mark.parametrize("end", ["", "commit", "abort"])
@pytest.mark.parametrize("verb", ["commit", "abort"])
def test_its_store_answers_as_the_one_in_memory(end, verb):
    store, c, world = in_state(end)
    answer, after = CALLS[verb](world, c)
    assert answer == getattr(store, verb)(c)
    assert CALLS["describe"](after, (c,))[0] == (store.describe([c])[0].state,)
    assert list(CALLS["in_doubt"](after, QUERY)[0]) == store.in_doubt(QUERY)
    assert after.visible() == store.read()


@pytest.mark.parametrize("verb", FAULTS)
def test_a_fault_happens_once_whether_the_request_arrives_or_not(verb):
    _, c, world = in_state("")
    record = Driver(QUERY, None, {}).record(
        Plan(query_id=QUERY, batch_id=0, attempt=0, token=new_token(0, 0)), [], commit=True
    )
    args = {"create": (record,), "pre-commit": (c, ()), "describe": ((c,),), "in_doubt": (QUERY,)}
    every = frozenset(fault for faults in FAULTS.values() for fault in faults)
    found = list(small.answers(world._replace(left=every), verb, *args.get(verb, (c,))))
    changed = [after._replace(left=every) != found[0][1] for _, after, _ in found[1:]]
    assert len(found) == 1 + len(FAULTS[verb]) * (2 if verb in small.CHANGES else 1)
    assert any(changed) == (verb in small.CHANGES)
    assert all(len(after.left) == len(every) - 1 for _, after, _ in found[1:])


def test_a_timeout_spares_what_a_live_driver_has_seen_open():
    """Otherwise the check before the decision would be worth nothing."""
    timeout = Setup(ONE, faults=frozenset({small.TIMEOUT}))
    assert explore(Driver, timeout).wrong is None
    assert explore(Unchecked, timeout).wrong.kind == "lost"


def test_spark_stops_a_run_that_was_overtaken():
    assert CALLS["commits"](World(done=1), 0) == (small.Raises(small.Overtaken), World(done=1))
    assert CALLS["commits"](World(batches=2), 0) == (1, World(batches=2, done=1))


def test_only_this_thread_neither_waits_nor_draws():
    names, waited = [], []

    def other_thread():
        names.append(new_token(0, 0).random)
        began = time.monotonic()
        time.sleep(0.05)
        waited.append(time.monotonic() - began)

    with calm():
        thread = threading.Thread(target=other_thread)
        thread.start()
        thread.join()
        time.sleep(1_000)
        mine = [int(new_token(0, 0).random, 16) for _ in range(2)]
    assert waited[0] >= 0.05
    assert mine[1] == mine[0] + 1 != int(names[0], 16)
    assert new_token(0, 0) != new_token(0, 0) and uuid.uuid4() != uuid.uuid4()


# -- mistakes of a learner --


class Writes:
    """Right on a good day only."""

    def __init__(self, query_id, log, participants):
        self.query_id = query_id
        self.log = log
        self.store = participants["store"]

    def restore(self, batch_id):
        token = new_token(batch_id, 0)
        return Plan(query_id=self.query_id, batch_id=batch_id, attempt=0, token=token)

    def commit(self, messages, batch_id):
        for message in messages:
            for c in message.committables:
                self.store.commit(c)

    def abort(self, messages, batch_id):
        pass


class NoPlan(Writes):
    def restore(self, batch_id):
        pass


class NoInit:
    restore = commit = abort = None


class Typo(Writes):
    def restore(self, batch_id):
        return self.plann(batch_id)


class NoneInAbort(Driver):
    def abort(self, messages, batch_id):
        for message in messages:
            for c in message.committables:
                self.send("abort", c)


class Coin(Driver):
    def commit(self, messages, batch_id):
        if random.random() < 0.5:
            self.log.slots()
        super().commit(messages, batch_id)


class Waits(Writes):
    def restore(self, batch_id):
        while self.store.in_doubt(self.query_id):
            time.sleep(1)
        return super().restore(batch_id)


class CatchesAll(Driver):
    def restore(self, batch_id):
        try:
            return super().restore(batch_id)
        except:
            raise Refused("something was wrong") from None


class OwnError(Writes):
    def restore(self, batch_id):
        raise RuntimeError("not today")


class EmptySlot(Writes):
    def restore(self, batch_id):
        return self.log.load((batch_id, 0))


class NoDecision(Writes):
    def commit(self, messages, batch_id):
        self.log.create("COMMIT")


MISTAKES = [
    (NoPlan, "restore() returns the Plan of the batch; yours returned None."),
    (NoInit, "takes no arguments"),
    (Typo, "in restore(), line "),
    (Typo, "return self.plann(batch_id)"),
    (NoneInAbort, "for c in message.committables:"),
    (Coin, "With the same answers your driver has made another call"),
    (Waits, "does not come to an end"),
    (Waits, "B asks what is open (txn 1), again and again."),
    (CatchesAll, "Catch TwoPhaseError"),
    (OwnError, "raise one of the errors of kafka2pc.protocol.errors"),
    (EmptySlot, "slot 0.0 is empty"),
    (NoDecision, "create() takes a Decision, not 'COMMIT'"),
]


@pytest.mark.parametrize(("kind", "words"), MISTAKES)
def test_a_mistake_is_explained(kind, words):
    verdict = judge(kind)
    assert verdict.failure.found.wrong.kind == "mistake", verdict
    assert words in str(verdict)
    assert ElementTree.fromstring(verdict.draw()).tag.endswith("svg")


def test_the_judge_takes_a_class_with_three_methods():
    with pytest.raises(TypeError, match="takes the class of your driver"):
        judge(Writes("", None, {"store": None}))
    with pytest.raises(TypeError, match="int has no restore and no commit and no abort"):
        judge(int)


def test_a_level_may_be_run_alone():
    assert judge(Driver, level=2)
    assert not judge(Driver, level=3)


def test_the_picture_has_all_steps_that_change_something():
    failure = judge(NeverLooks, level=5).failure
    lines = tell(failure.found)
    numbers = [n for n, _ in drawn_lines(lines)]
    told = [line for n, line in enumerate(lines, 1) if n not in numbers]
    assert told and all(line.reads for line in told)
    picture = picture_of(failure.found)
    assert picture.steps[-1] == "at the end" and len(picture.steps) == len(numbers) + 1
    assert {len(cells) for cells in picture.lanes.values()} == {len(picture.steps)}
    assert picture.lanes["reader"][-1].text == "1 twice"


def test_an_error_of_the_store_is_no_mistake_of_the_driver():
    assert issubclass(small.Overtaken, TwoPhaseError)
    failing = Setup(BOTH, faults=frozenset({small.STORE_FAILS}))
    assert explore(Driver, failing).wrong is None


def test_names_of_a_run_are_never_used_twice():
    store, plan = StepStore(None, 1), Plan(query_id=QUERY, batch_id=0, attempt=0, token=None)
    assert store.committable(plan, ()) != store.committable(plan, ())


def test_a_driver_that_removes_records_is_sent_to_the_lesson_about_the_log():
    assert "Lesson 5 is about it" in str(judge(KeepsNothing))
    assert "Lesson 2 is about it" in str(judge(Forgetful))
