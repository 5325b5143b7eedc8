"""A short version of `make drill`: hard cases, a pipeline, a few steps of a walk, and a drill that
must be red. `make test` plays the cases that take seconds.
"""

from datetime import date
from functools import partial
from itertools import islice
from types import SimpleNamespace

import pytest
from confluent_kafka import Consumer

from kafka2pc.local.nodes import BrokerFailed
from kafka2pc.proof.child_process import until
from kafka2pc.proof.crash_points import CrashPoint
from kafka2pc.proof.drills.end_to_end import ANYBODY, DAYS, Blow, pipeline_drills, through_blows
from kafka2pc.proof.drills.hard_cases import CASES
from kafka2pc.proof.drills.one_store import (
    POINTS,
    VICTIMS,
    Drill,
    play,
    play_all,
    point_drills,
    summary,
    together,
)
from kafka2pc.proof.drills.scenario import Watcher
from kafka2pc.proof.drills.stage import Stage
from kafka2pc.proof.drills.walks import BLOWS, steps, take

pytestmark = [pytest.mark.kafka, pytest.mark.spark]
# The lesson proof/drills/06_hard_cases plays two more: a late decision, and a purged slot.
SECONDS = ("Two drivers", "full disk")
MINUTES = (
    "two batches later",
    "two batches late ",
    "list and abort",
    "timed out before",
    "oversleeps",
    "two hosts",
    "the broker gave up",
    "away for longer",
)
HERE = [drill for drill in CASES if any(words in drill.title for words in SECONDS + MINUTES)]


def as_parameter(drill):
    slow = any(words in drill.title for words in MINUTES)
    return pytest.param(drill, id=drill.title, marks=[pytest.mark.full] * slow)


@pytest.fixture(scope="module")
def stage(tmp_path_factory):
    with Stage(tmp_path_factory.mktemp("one"), progress=None) as made:
        yield made


@pytest.fixture(scope="module")
def three(tmp_path_factory):
    with Stage(tmp_path_factory.mktemp("three"), 3, progress=None) as made:
        yield made


@pytest.mark.parametrize("drill", [as_parameter(drill) for drill in HERE])
def test_case(drill, stage, tmp_path):
    assert play(drill, stage, tmp_path).found == ""


@pytest.mark.full
def test_a_node_that_coordinates_dies_between_decision_and_commit(three, tmp_path):
    drill = next(d for d in point_drills() if d.nodes == 3 and "after decision" in d.title)
    played = play(drill, three, tmp_path)
    assert (played.found, played.crashes, played.records) == ("", 1, 80)
    assert played.restore_s > 0


def test_the_watcher_asks_again_for_a_topic_that_its_broker_does_not_know_yet(
    tmp_path, monkeypatch
):
    answers, assigned = [{}, {0: None, 1: None}], []

    class OfLateBroker(Consumer):
        def list_topics(self, topic, timeout):
            return SimpleNamespace(topics={topic: SimpleNamespace(partitions=answers.pop(0))})

        def assign(self, places):
            assigned.append([place.partition for place in places])

        def consume(self, count, timeout):
            return []

    monkeypatch.setattr("kafka2pc.proof.drills.scenario.Consumer", OfLateBroker)
    conf = {"bootstrap.servers": "127.0.0.1:1"}
    watcher = Watcher(conf, "new", tmp_path / "history", lambda message: 0)
    until(lambda: assigned or not answers, "it asked", 10)
    watcher.stop()
    assert assigned == [[0, 1]]


def test_a_scenario_of_one_drill_is_not_the_scenario_of_the_next(stage):
    shared = stage.scenario()
    assert (
        stage.scenario() is shared
        and stage.fresh() is not shared
        and stage.scenario() not in (shared, stage.fresh())
    )


def test_the_short_list_names_cases():
    assert len(HERE) == len(SECONDS + MINUTES)


@pytest.mark.full
def test_a_pipeline_is_struck_three_times_and_equals_its_oracle(stage, tmp_path):
    struck = (
        Blow(victim="an executor's Python", point=CrashPoint.BEFORE_FLUSH),
        Blow(victim=ANYBODY, seconds=1.5),
        Blow(victim="the driver's JVM", point=CrashPoint.AFTER_FIRST_COMMIT),
    )
    # with the latest flight of the year
    drill = Drill(
        kind="pipeline",
        title="",
        given="",
        crash_at="",
        restore="",
        expect="",
        play=partial(through_blows, first=date(2013, 1, 8), struck=struck, days=(2, 1, 0)),
    )
    played = play(drill, stage, tmp_path)
    assert (played.found, played.crashes) == ("", 3)


@pytest.mark.full
def test_a_leader_falls_silent(three, tmp_path):
    assert play(CASES[-1], three, tmp_path).found == ""


@pytest.mark.full
def test_a_walk(three, tmp_path):
    for step in islice(steps(seed=4), 4):
        take(three, step)
    assert three.crashes >= 3


def test_every_point_meets_every_victim():
    drills = point_drills()
    assert len(drills) == len(POINTS) * len(VICTIMS) == len({d.title for d in drills}) == 65


def test_drills_of_one_victim_become_batches_of_one_query():
    merged = together([*point_drills(), *CASES])
    plain = [d for d in merged if d.kind == "point"]
    assert [d.count for d in plain] == [7, 6] * len(VICTIMS)
    places = [(d.nodes, d.play.keywords["strike"], *d.play.keywords["rounds"]) for d in plain]
    assert len({str(p) for p in places}) == len(plain)
    assert sum(len(d.play.keywords["rounds"]) for d in plain) == 65
    assert plain[0].title.startswith("Exactly once when the driver's JVM dies before begin, after")
    assert [d for d in merged if d.kind == "case"] == list(CASES)


def test_an_error_of_a_stage_is_raised_and_nothing_goes_on(monkeypatch, tmp_path):
    def no_broker(*_):
        raise BrokerFailed("no broker here")

    monkeypatch.setattr(Stage, "__enter__", no_broker)
    with pytest.raises(BrokerFailed, match="no broker here"):
        play_all(point_drills(), tmp_path)


def test_the_same_seed_is_the_same_walk_and_dice_leave_nothing_out():
    first, again = (list(islice(steps(7), 200)) for _ in range(2))
    assert first == again != list(islice(steps(8), 200))
    assert {what for step in first for what, _ in step.blows} == set(BLOWS)
    assert {point for step in first for _, point in step.blows} == set(POINTS)


def test_the_dice_of_the_pipelines_leave_out_no_victim():
    drills = list(pipeline_drills(seed=1, count=40))
    struck = [blow for drill in drills for blow in drill.play.keywords["struck"]]
    assert {blow.victim for blow in struck} == {ANYBODY, *VICTIMS} - {
        "the node that coordinates the transaction"
    }
    assert {blow.point for blow in struck} == {None, *POINTS} and len(struck) == 40 * len(DAYS)
    assert len({d.given for d in drills}) > 30 and len({d.title for d in drills}) == 40
    assert (
        [d.crash_at for d in pipeline_drills(1, 40)]
        == [d.crash_at for d in drills]
        != [d.crash_at for d in pipeline_drills(2, 40)]
    )


def test_the_table_counts_by_kind(stage, tmp_path):
    drill = Drill(
        kind="case",
        title="t",
        given="",
        crash_at="",
        restore="",
        expect="",
        play=lambda stage: None,
    )
    table = summary([play(drill, stage, tmp_path)] * 2)
    assert [list(column.cells) for column in table.columns] == [
        ["cases"],
        ["2"],
        ["0"],
        ["0"],
        ["0"],
        ["0"],
        ["0"],
        ["0"],
        ["0.0 s"],
    ]
