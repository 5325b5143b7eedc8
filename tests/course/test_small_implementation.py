"""The model runs on the small implementation of the course: what its lessons promise. The lessons
show what goes wrong before they add a rule; proof/test_explorer.py leaves out each rule.

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
from kafka2pc.proof.model.replay import StepStore, make_driver, messages_of
from kafka2pc.proof.model.world import ANOMALIES, QUERY, Config

pytestmark = pytest.mark.never_unsteady
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


def driver_of(kind, bounds, transcript, number):
    """A driver of the course in the place of the package's."""
    theirs = make_driver(bounds, transcript, number)
    driver = kind(QUERY, theirs.log, theirs.participants)
    driver.new_token = theirs.new_token
    driver.margin_ms = bounds.config.margin_ms
    driver.keep_batches = bounds.config.keep_batches
    driver.retry = theirs.policy.retry()
    return driver


def calls_of(kind):
    """`replay.CALLS` with the course's phases."""

    def plan(calls, transcript, number, batch, version, mine, began):
        return driver_of(kind, calls.bounds, transcript, number).restore(batch)

    def write(calls, transcript, worker, attempt, plan, rows, retired):
        store = StepStore(calls.bounds, transcript, worker, attempt, retired)
        return precommit([store], plan, [rows])

    def commit(calls, transcript, number, tasks, batch, version):
        driver = driver_of(kind, calls.bounds, transcript, number)
        return driver.commit(messages_of(calls, tasks), batch)

    def abort(calls, transcript, number, tasks, batch):
        driver = driver_of(kind, calls.bounds, transcript, number)
        return driver.abort(messages_of(calls, tasks), batch)

    return {"plan": plan, "write": write, "commit": commit, "abort": abort}


@pytest.fixture
def explored(monkeypatch):
    """Explores a world with drivers of this kind."""

    def run(kind, world, **limits):
        monkeypatch.setattr(replay, "CALLS", calls_of(kind))
        config = SMALL[world] if isinstance(world, str) else world
        # a driver of the course reports a loss, and writes nothing again
        limits.setdefault("hunt", set(ANOMALIES) - {"NOT-REPAIRED"})
        return explore(config, ends=False, **limits)

    return run


def steps_of(found):
    return "\n".join(" | ".join(map(str, line[:3])) for line in found.path)


DRIVERS = [
    *(pytest.param(FencedDriver, world, marks=pytest.mark.full) for world in CALM),
    *(pytest.param(PatientDriver, world, marks=pytest.mark.full) for world in UNCLEAR),
    *((TidyDriver, world) for world in CALM + UNCLEAR + PURGED),
]


@pytest.mark.parametrize(("kind", "world"), DRIVERS)
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
