"""The model runs on the small implementation of the course: what its lessons promise, and the
anomaly that comes back when one of its rules is taken out.

The model plays `restore`, `precommit`, `commit` and `abort` of the package; here the drivers of the
course send the requests. They claim every batch, so they need neither Spark's offsets nor the token
of the batch before. The worlds that are left out need rules that the course does not
teach: copied checkpoints, a changed prefix, participants that are left out, a deadline for the
decision, claims that are removed, batches that overlap, offsets that are written anew, errors that
are caught, and a run that ends with the batch that it repeats.
"""

import pytest

from kafka2pc.course.real_kafka import PatientDriver
from kafka2pc.course.spark import TidyDriver
from kafka2pc.course.two_drivers import FencedDriver
from kafka2pc.course.two_phase_commit import Driver, precommit
from kafka2pc.proof.model import replay
from kafka2pc.proof.model.explorer import SMALL, explore
from kafka2pc.proof.model.replay import StepStore, StepTxn, make_driver, messages_of
from kafka2pc.proof.model.world import ANOMALIES, QUERY, Config

ONE = "one run"
CALM = [  # no answer is unclear
    ONE,
    "two runs",
    "two runs, two tasks",
    "a run dies, a timeout strikes",
    "a second try of a task",
    "commit() breaks off",
    "the planner forgets",
    "the planner outlives its query",
    "PrepareCommit shows",
    "commits/N is deleted",
    "fewer tasks after the restart",
    "a batch without rows",
    "a batch without partitions",
]
UNCLEAR = [
    "a late EndTxn",
    "a late EndTxn, two batches later",
    "a late InitProducerId",
    "a late create",
    "EndTxn v4, late",
]
PURGED = ["only the newest batch is kept"]


def driver_of(kind, setting, transcript, number):
    """A driver of the course in the place of the package's."""
    theirs = make_driver(setting, transcript, number)
    driver = kind(QUERY, theirs.log, theirs.participants)
    driver.new_token = theirs.new_token
    driver.margin_ms = setting.config.margin_ms
    driver.keep_batches = setting.config.keep_batches
    driver.retry = theirs.policy.retry()
    return driver


def calls_of(kind):
    """`replay.CALLS` with the course's phases."""

    def plan(calls, transcript, number, batch, version, mine, began):
        return driver_of(kind, calls.setting, transcript, number).restore(batch)

    def write(calls, transcript, worker, attempt, plan, rows, retired):
        store = StepStore(calls.setting, transcript, worker, attempt, retired)
        return precommit([store], plan, [rows])

    def commit(calls, transcript, number, tasks, batch, version):
        driver = driver_of(kind, calls.setting, transcript, number)
        return driver.commit(messages_of(calls, tasks), batch)

    def abort(calls, transcript, number, tasks, batch):
        driver = driver_of(kind, calls.setting, transcript, number)
        return driver.abort(messages_of(calls, tasks), batch)

    return {"plan": plan, "write": write, "commit": commit, "abort": abort}


@pytest.fixture
def explored(monkeypatch):
    """Explores a world with drivers of this kind."""

    def run(kind, world, **limits):
        monkeypatch.setattr(replay, "CALLS", calls_of(kind))
        config = SMALL[world] if isinstance(world, str) else world
        return explore(config, ends=False, **limits)

    return run


def steps_of(found):
    return "\n".join(" | ".join(map(str, line[:3])) for line in found.path)


@pytest.mark.parametrize(
    ("kind", "world"),
    [
        *((FencedDriver, world) for world in CALM),
        *((PatientDriver, world) for world in UNCLEAR),
        *((TidyDriver, world) for world in CALM + UNCLEAR + PURGED),
    ],
)
def test_no_state_shows_an_anomaly(explored, kind, world):
    found = explored(kind, world)
    assert (found.anomaly, found.complete) == ("", True), steps_of(found)
    assert found.states > 30


# It has no claims, so every abort is of a transaction that no claim of its run is above.
WITHOUT_CLAIMS = [anomaly for anomaly in ANOMALIES if anomaly != "DISTURBED-BY-OLDER"]


def test_the_driver_of_lesson_2_is_right_alone_and_wrong_beside_another(explored):
    alone = explored(Driver, ONE, hunt=WITHOUT_CLAIMS)
    assert (alone.anomaly, alone.complete) == ("", True), steps_of(alone)
    dies = explored(Driver, Config(drivers=1, crash=1, broken=1, timeout=1), hunt=WITHOUT_CLAIMS)
    assert (dies.anomaly, dies.complete) == ("", True), steps_of(dies)
    assert explored(Driver, "two runs", hunt=WITHOUT_CLAIMS).anomaly == "LOST-WITHOUT-TIMEOUT"


# -- each rule taken out --


class Rule2(TidyDriver):
    """Commits first, then decides."""

    def commit(self, messages, batch_id):
        plan = messages[0].plan
        if plan.mode.value == "write":
            self.finish(self.record(plan, messages, commit=True))
        super().commit(messages, batch_id)


class Rule3(TidyDriver):
    """Aborts without a look at the decision."""

    def abort(self, messages, batch_id):
        self.abort_all(messages)


class Rule4(TidyDriver):
    """Decides without a look at the transactions."""

    def check_open(self, committables):
        pass


class Rule5(TidyDriver):
    """Writes a decided batch again."""

    def drain(self, decided):
        batch_id, attempt = decided.slot
        self.finish(decided)
        return self.plan(batch_id, attempt + 1, self.new_token(batch_id, attempt + 2))


class Rule6(TidyDriver):
    """Leaves open what it finds."""

    def sweep(self, token):
        pass


class Rule6Below(TidyDriver):
    """Aborts what newer runs have open, too."""

    def sweep(self, token):
        self.abort_open()


class Rule7(TidyDriver):
    """Takes a refused commit for a commit."""

    def check_committed(self, decision, outcomes):
        pass


class Rule8(TidyDriver):
    """Aborts before it has won a slot."""

    def restore(self, batch_id):
        if not self.commit_of(batch_id):
            self.abort_open()
        return super().restore(batch_id)


class Rule9(TidyDriver):
    """Does not look for a later batch."""

    def is_past(self, batch_id):
        return False


class Rule11(TidyDriver):
    """Removes the newest COMMIT."""

    def commit(self, messages, batch_id):
        super().commit(messages, batch_id)
        self.log.remove([slot for slot in self.log.slots() if slot.batch_id <= batch_id])


@pytest.mark.parametrize(
    ("kind", "world", "anomaly"),
    [
        (Rule2, ONE, "VISIBLE-WITHOUT-DECISION"),
        (Rule3, "commit() breaks off", "LOST-WITHOUT-TIMEOUT"),
        (Rule4, "a run dies, a timeout strikes", "DECIDED-A-DEAD-TXN"),
        (Rule5, ONE, "DUPLICATE"),
        (Rule6, ONE, "HANGING"),
        (Rule6Below, "two runs", "DISTURBED-BY-OLDER"),
        (Rule7, "a run dies, a timeout strikes", "LOST-SILENTLY"),
        (Rule8, "two runs", "LOST-WITHOUT-TIMEOUT"),
        (Rule9, PURGED[0], "DUPLICATE"),
        (Rule11, ONE, "DUPLICATE"),
    ],
)
def test_without_this_rule_there_is_an_anomaly(explored, kind, world, anomaly):
    assert explored(kind, world, hunt=[anomaly]).anomaly == anomaly


def test_without_the_flush_no_row_is_there(explored, monkeypatch):
    """Rule 1. A transaction without rows is not open, so the driver refuses the batch for ever."""
    monkeypatch.setattr(StepTxn, "flush", lambda txn: None)
    assert explored(TidyDriver, ONE).anomaly == "STUCK"


def test_with_one_name_for_all_attempts_there_is_an_anomaly(explored, monkeypatch):
    """Rule 10."""
    name_of_attempt = replay.worker_name

    def one_name(plan, worker, attempt, counter):
        return name_of_attempt(plan, worker._replace(life=0), attempt, counter)

    monkeypatch.setattr(replay, "worker_name", one_name)
    assert explored(TidyDriver, "a second try of a task").anomaly == "LOST-WITHOUT-TIMEOUT"
