"""Drills on real processes: each victim at each crash point, hard cases, decisions elsewhere, two
stores, a pipeline, random steps; and drills that must be red.

`make test` kills the process that gets there at every point and the broker after the decision, and
runs the cases that take seconds. `make test-all` kills the driver's JVM around the decision.
`make test-nightly` has its other points, the other victims and the other cases.
"""

from collections import defaultdict
from contextlib import ExitStack
from dataclasses import replace
from datetime import date
from functools import cache, partial
from itertools import islice
from types import SimpleNamespace

import pytest
from confluent_kafka import Consumer, Producer
from gated_query import Reader

from kafka2pc.local.databases import LocalPostgres
from kafka2pc.local.nodes import BrokerFailed
from kafka2pc.proof.checker import anomalies
from kafka2pc.proof.child_process import until
from kafka2pc.proof.crash_points import CrashPoint
from kafka2pc.proof.drills.end_to_end import (
    ANY_PROCESS,
    DAYS,
    Failure,
    pipeline_drills,
    survive_failures,
)
from kafka2pc.proof.drills.hard_cases import CASES
from kafka2pc.proof.drills.one_store import (
    POINTS,
    VICTIMS,
    Drill,
    driver_drills,
    forget_the_decision,
    kill_process,
    point_drills,
    run_drill,
    run_drills,
    summary,
    survive,
    survive_all,
    together,
)
from kafka2pc.proof.drills.random_steps import FAILURES, run_step, steps
from kafka2pc.proof.drills.setups import Setup
from kafka2pc.proof.drills.spark_query import (
    NotExactlyOnce,
    SparkQuery,
    Watcher,
    batch_of_rows,
    last_events,
    refuse,
    refuse_open,
)
from kafka2pc.proof.drills.tables import DELTA, ICEBERG
from kafka2pc.proof.drills.two_stores import KAFKA, POSTGRES, dual_drills, make_dual_query
from kafka2pc.protocol.history import read_history

pytestmark = [pytest.mark.kafka, pytest.mark.spark, pytest.mark.never_unsteady]


@pytest.fixture(scope="module")
def setups(tmp_path_factory):
    """The setup with so many nodes, which all drills of this file share."""
    with ExitStack() as started:

        @cache
        def of(nodes):
            folder = tmp_path_factory.mktemp(f"nodes-{nodes}")
            return started.enter_context(Setup(folder, nodes, progress=None))

        yield of


@pytest.fixture(scope="module")
def setup(setups):
    return setups(1)


def drill_of(how, kind="point", **fields):
    """A drill without a text."""
    texts = dict.fromkeys(("title", "given", "crash_at", "restore", "expect"), "")
    return Drill(kind=kind, run=how, **texts | fields)


# -- each victim at each point --

PROCESS, JVM, PYTHON, BROKER = (
    "the process that gets there",
    "the driver's JVM",
    "the driver's Python",
    "the broker",
)
# What `make test` runs, and `make test-all` of the JVM. A Python process starts again in a second,
# a JVM and a broker do not.
FIRST = {
    PROCESS: POINTS,
    JVM: [CrashPoint.BEFORE_DECISION, CrashPoint.AFTER_DECISION],
    BROKER: [CrashPoint.AFTER_DECISION],
}


def turns():
    """(victim, points) as parameters; together they are every victim at every point."""
    for victim in VICTIMS:
        first = FIRST.get(victim, [])
        rest = [point for point in POINTS if point not in first]
        if first:
            yield pytest.param(victim, first, id=victim, marks=[pytest.mark.full] * (victim == JVM))
        if rest:
            elsewhere = ", elsewhere" if first else ""
            yield pytest.param(victim, rest, id=f"{victim}{elsewhere}", marks=pytest.mark.nightly)


def drill_at(victim, points):
    """One drill: each point is a batch of one query."""
    of_victim = [
        d
        for d in point_drills()
        if d.run.keywords["inject"] is VICTIMS[victim] and d.run.keywords["places"][0][0] in points
    ]
    [merged] = together(of_victim, most=len(POINTS))
    return merged


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("victim", "points"), list(turns()))
def test_every_row_is_there_once_when_it_dies_at(victim, points, setups, tmp_path):
    drill = drill_at(victim, points)
    setup = setups(drill.nodes)
    job = setup.jobs.get()
    if not job.alive:
        job.start()
    jvm = job.jvm
    result = run_drill(drill, setup, tmp_path)
    assert (result.found, result.crashes) == ("", len(points))
    assert (job.jvm != jvm) == (victim in (JVM, PYTHON)), "who died, and who did not"
    assert result.restore_s > 0


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    "victim",
    [
        pytest.param(PYTHON, marks=pytest.mark.full),
        pytest.param(JVM, marks=pytest.mark.nightly),
        pytest.param(BROKER, marks=pytest.mark.nightly),
    ],
)
def test_every_row_is_there_once_where_the_driver_writes_and_it_dies(victim, setup, tmp_path):
    drills = [d for d in driver_drills() if d.run.keywords["inject"] is VICTIMS[victim]]
    [merged] = together(drills, most=len(POINTS))
    result = run_drill(merged, setup, tmp_path)
    assert (result.found, result.crashes) == ("", len(POINTS))


def test_every_victim_meets_every_point_once():
    met = [(p.values[0], point) for p in turns() for point in p.values[1]]
    assert sorted(map(str, met)) == sorted(str((v, p)) for v in VICTIMS for p in POINTS)


# -- hard cases --

# `make test-nightly` runs the others.
SECONDS = ("Two drivers", "full disk", "was purged", "when Spark's last commit entry")
MINUTES = (
    "two batches later",
    "two batches late ",
    "late is refused",
    "oversleeps",
    "written again from the topic",
)


def as_parameter(drill):
    chosen = {words: drill.title for words in SECONDS + MINUTES if words in drill.title}
    marks = [] if chosen else [pytest.mark.nightly]
    if any(words in MINUTES for words in chosen):
        marks = [pytest.mark.full]
    return pytest.param(drill, id=drill.title, marks=marks)


@pytest.mark.parametrize("drill", [as_parameter(drill) for drill in CASES])
def test_case(drill, setups, tmp_path):
    assert run_drill(drill, setups(drill.nodes), tmp_path).found == ""


def test_the_short_lists_name_a_case_each():
    for words in SECONDS + MINUTES:
        assert sum(words in drill.title for drill in CASES) == 1, words


# -- decisions that are elsewhere --


class Elsewhere(SparkQuery):
    """A query whose decisions are at `place`, and nowhere else."""

    place = ""

    def options(self, **more):
        return super().options(**{"decisionLog": self.place} | more)

    def check(self):
        super().check()
        if (self.checkpoint / "kafka2pc").exists():
            raise NotExactlyOnce("a decision is in the checkpoint")


def in_a_topic(setup, job):
    query = Elsewhere(job, setup.kafka, setup.folder)
    query.place = f"kafka:{query.name}-decisions"
    return query


def in_a_table(setup, job):
    query = Elsewhere(job, setup.kafka, setup.folder)
    query.place = setup.opened(LocalPostgres).url
    return query


@pytest.mark.full
@pytest.mark.parametrize("make", [in_a_topic, in_a_table])
def test_a_query_with_its_decisions_elsewhere_is_killed_around_them(make, setup):
    around = (
        CrashPoint.AFTER_PRECOMMIT,
        CrashPoint.AFTER_DECISION,
        CrashPoint.AFTER_FIRST_COMMIT,
    )
    before = setup.crashes
    survive_all(setup, [[(point, None)] for point in around], kill_process, make=make)
    assert setup.crashes - before == len(around)


# -- visibility=batch --


class Gated(SparkQuery):
    """A query whose micro-batches become visible as a whole, and a reader who looks all the
    time.
    """

    def __init__(self, *args, **more):
        super().__init__(*args, **more)
        self.reader = Reader(self.kafka, [self.name], self.name)
        self.reader.start()

    def options(self, **more):
        return super().options(**{"visibility": "batch"} | more)

    def seen(self, *args, **more):
        """Without the records of gates, which have no value."""
        return [r for r in super().seen(*args, **more) if r.value is not None]

    def check(self):
        refuse_open(self)
        committed, uncommitted = (
            [replace(row, key=None) for row in self.rows(level)]
            for level in ("read_committed", "read_uncommitted")
        )
        events = read_history(self.job.history)
        batch_of = batch_of_rows(self.files, self.size)
        refuse(anomalies(batch_of, committed, uncommitted, events), self.events())
        self.reader.look()
        by_batch = defaultdict(list)
        for row in committed:
            by_batch[row.row // self.size].append(((row.topic, row.partition), row.offset))
        torn = [n for n, rows in by_batch.items() if self.reader.parts(rows)]
        if torn:
            raise NotExactlyOnce(f"a part was seen of batches {torn}\n{last_events(self.events())}")

    def close(self):
        self.reader.stop()
        super().close()


def gated(setup, job):
    return Gated(job, setup.kafka, setup.folder)


# before the end of a gate, its process asks for an abort in every batch
AROUND = [CrashPoint.AFTER_FIRST_COMMIT, CrashPoint.IN_SWEEP]


@pytest.mark.parametrize(
    "points",
    [
        pytest.param(AROUND, id="around its end", marks=pytest.mark.full),
        pytest.param(
            [p for p in POINTS if p not in AROUND], id="elsewhere", marks=pytest.mark.nightly
        ),
    ],
)
def test_a_reader_sees_no_part_of_a_batch_with_a_gate_when_a_process_dies(points, setup):
    before = setup.crashes
    survive_all(setup, [[(point, None)] for point in points], kill_process, make=gated)
    assert setup.crashes - before == len(points)


# -- two stores --

BESIDE = {second.name: second for second in (POSTGRES, DELTA, ICEBERG)}
SAMPLE = (
    "a worker dies after {}'s pre-commit",
    "the driver's JVM dies after Kafka's first commit",
    "the driver's Python dies after its restart commits in Kafka",
)


# The notebooks proof/drills/07_two_stores and 11_tables kill a driver between the two commits.
@pytest.mark.nightly
@pytest.mark.parametrize("words", SAMPLE)
@pytest.mark.parametrize("second", BESIDE)
def test_both_stores_or_none_when(second, words, setup, tmp_path):
    words = words.format(BESIDE[second].called)
    [drill] = [d for d in dual_drills(BESIDE[second]) if d.title.endswith(words)]
    result = run_drill(drill, setup, tmp_path)
    assert (result.found, result.records) == ("", 80) and result.crashes > 0


def test_there_are_fifty_dual_drills_of_each_store_and_each_has_its_own_title():
    titles = {d.title for second in BESIDE.values() for d in dual_drills(second)}
    assert len(titles) == 150


# -- pipelines and random steps; the notebook proof/drills/09_end_to_end runs a short pipeline --


@pytest.mark.nightly
def test_a_pipeline_fails_three_times_and_equals_its_oracle(setup, tmp_path):
    failures = (
        Failure(victim="an executor's Python", point=CrashPoint.BEFORE_FLUSH),
        Failure(victim=ANY_PROCESS, seconds=1.5),
        Failure(victim=JVM, point=CrashPoint.AFTER_FIRST_COMMIT),
    )
    # with the latest flight of the year
    how = partial(survive_failures, first=date(2013, 1, 8), failures=failures, days=(2, 1, 0))
    result = run_drill(drill_of(how, "pipeline"), setup, tmp_path)
    assert (result.found, result.crashes) == ("", 3)


@pytest.mark.nightly
def test_random_steps(setups):
    three = setups(3)
    before = three.crashes
    for step in islice(steps(seed=4), 4):
        run_step(three, step)
    assert three.crashes - before >= 3


# -- drills that must be red --


def send_a_row_again(setup, query, event):
    """No crash: another producer writes a row that the topic has already."""
    producer = Producer(setup.kafka.client_conf)
    producer.produce(query.name, b"0")
    producer.flush()
    return True


def test_a_drill_after_which_a_row_is_there_twice_is_red_and_its_history_is_kept(setup, tmp_path):
    places = [(CrashPoint.BEFORE_DECISION, None)]
    how = partial(survive, places=places, inject=send_a_row_again)
    red = run_drill(drill_of(how), setup, tmp_path / "output")
    assert "[KAFKA2PC.NOT_EXACTLY_ONCE] duplicate, 1 times: {0: 2}" in red.found, red.found
    assert red.counts["duplicate"] == 1
    assert setup.kept.read_text() and setup.kept.parent == tmp_path / "output"


FORGET = "the driver, and its decision"
FORGOTTEN = {
    "dual": partial(
        survive,
        places=[(CrashPoint.AFTER_FIRST_COMMIT, KAFKA)],
        inject=forget_the_decision,
        make=make_dual_query,
    ),
    "pipeline": partial(
        survive_failures,
        first=date(2013, 1, 1),
        failures=(Failure(victim=FORGET, point=CrashPoint.AFTER_FIRST_COMMIT),),
        days=(2,),
    ),
}


# The notebook proof/drills/04_one_store shows the same with one store.
@pytest.mark.nightly
@pytest.mark.parametrize("kind", FORGOTTEN)
def test_without_its_decision_the_next_start_is_refused(kind, setup, tmp_path, monkeypatch):
    monkeypatch.setitem(VICTIMS, FORGET, forget_the_decision)
    red = run_drill(drill_of(FORGOTTEN[kind], kind), setup, tmp_path)
    assert "StaleCheckpoint" in red.found, red.found


# -- how drills are made, merged and counted --


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

    monkeypatch.setattr("kafka2pc.proof.drills.spark_query.Consumer", OfLateBroker)
    conf = {"bootstrap.servers": "127.0.0.1:1"}
    watcher = Watcher(conf, "new", tmp_path / "history", size=1)
    until(lambda: assigned or not answers, "it asked", 10)
    watcher.stop()
    assert assigned == [[0, 1]]


def test_a_query_of_one_drill_is_not_the_query_of_the_next(setup):
    shared = setup.query()
    assert (
        setup.query() is shared
        and setup.fresh() is not shared
        and setup.query() not in (shared, setup.fresh())
    )


def test_every_point_meets_every_victim():
    drills = point_drills()
    assert len(drills) == len(POINTS) * len(VICTIMS) == len({d.title for d in drills}) == 78


def test_drills_of_one_victim_become_batches_of_one_query():
    merged = together([*point_drills(), *CASES])
    plain = [d for d in merged if d.kind == "point"]
    assert [d.count for d in plain] == [7, 6] * len(VICTIMS)
    places = [(d.nodes, d.run.keywords["inject"], *d.run.keywords["rounds"]) for d in plain]
    assert len({str(p) for p in places}) == len(plain)
    assert sum(len(d.run.keywords["rounds"]) for d in plain) == 78
    title = "Exactly once when the process that gets there dies before begin, after"
    assert plain[0].title.startswith(title)
    assert [d for d in merged if d.kind == "case"] == list(CASES)


def test_an_error_of_a_setup_is_raised_and_nothing_goes_on(monkeypatch, tmp_path):
    def no_broker(*_):
        raise BrokerFailed("no broker here")

    monkeypatch.setattr(Setup, "__enter__", no_broker)
    with pytest.raises(BrokerFailed, match="no broker here"):
        run_drills(point_drills(), tmp_path)


def test_the_same_seed_is_the_same_steps_and_dice_leave_nothing_out():
    first, again = (list(islice(steps(7), 200)) for _ in range(2))
    assert first == again != list(islice(steps(8), 200))
    assert {what for step in first for what, _ in step.failures} == set(FAILURES)
    assert {point for step in first for _, point in step.failures} == set(POINTS)


def test_the_dice_of_the_pipelines_leave_out_no_victim():
    drills = list(pipeline_drills(seed=1, count=40))
    failures = [failure for drill in drills for failure in drill.run.keywords["failures"]]
    assert {failure.victim for failure in failures} == {ANY_PROCESS, *VICTIMS} - {
        "the node that coordinates the transaction"
    }
    assert {failure.point for failure in failures} == {None, *POINTS} and len(failures) == 40 * len(
        DAYS
    )
    assert len({d.given for d in drills}) > 30 and len({d.title for d in drills}) == 40
    assert (
        [d.crash_at for d in pipeline_drills(1, 40)]
        == [d.crash_at for d in drills]
        != [d.crash_at for d in pipeline_drills(2, 40)]
    )


def test_the_table_counts_by_kind(setup, tmp_path):
    drill = drill_of(lambda setup: None, "case")
    table = summary([run_drill(drill, setup, tmp_path)] * 2)
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
