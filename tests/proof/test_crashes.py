"""Every named crash point, three victims: the Python process that gets there, the driver's JVM, the
broker. SIGKILL, restart: exactly once.

One story for each victim: after every restart the same query goes on into the next crash, each time
with another number of partitions and the other engine.
"""

from concurrent.futures import ThreadPoolExecutor
from itertools import cycle

import pytest
from marks import with_victim

from kafka2pc.local.broker import LocalKafka
from kafka2pc.proof.child_process import Failed, until
from kafka2pc.proof.crash_points import CrashPoint
from kafka2pc.proof.drills.scenario import Scenario
from kafka2pc.proof.drills.spark_job import running

pytestmark = [pytest.mark.kafka, pytest.mark.spark]
BEFORE_COMMITS = (
    CrashPoint.AFTER_PRECOMMIT,
    CrashPoint.BEFORE_DECISION,
    CrashPoint.AFTER_DECISION,
    CrashPoint.BEFORE_FIRST_COMMIT,
)
# The victims of each point. `make test` kills one of them, `make test-all` each.
POINTS = {
    point: ["process", "driver", "broker"] if point in BEFORE_COMMITS else ["process", "driver"]
    for point in CrashPoint
    if point is not CrashPoint.IN_SWEEP
}
PARALLELISM, ENGINES = cycle([4, 2, 5]), cycle(["columnar", "confluent"])


def life():
    """Another number of tasks and the other engine."""
    return dict(partitions=next(PARALLELISM), options={"engine": next(ENGINES)})


@pytest.fixture(scope="class")
def tale(job, kafka, tmp_path_factory):
    """The story that the tests of a class tell together. After a failure the next test begins a new
    one.
    """
    told = []

    def go_on():
        if not told or not told[-1].whole:
            told.append(Scenario(job, kafka, tmp_path_factory.mktemp("tale")).watch())
        told[-1].whole = False
        return told[-1]

    yield go_on
    for story in told:
        story.close()


def crash(story, point, pid=0):
    """Two more batches; the second one, attempt 0 of a run that goes on, crashes here. Returns the
    processes that came as far and no further.
    """
    story.feed(2)
    batch_id = story.files - 1
    story.arm(point, batch_id=batch_id, pid=pid)
    with pytest.raises(Failed):
        story.run(**life())
    assert story.job.done.exists(), f"{point.name} was never reached:\n{story.told()}"
    last = {e.process: e for e in story.events()}
    ended = [
        e.process
        for e in last.values()
        if (e.kind, e.op, e.ids.get("batch_id")) == (*point.value, batch_id)
    ]
    assert ended, f"{point.name} is the last event of no process:\n{story.told()}"
    return ended


def restart(story):
    story.run(**life())
    story.check()
    story.whole = True


def forget_last_commit(story):
    """Delete the last entry of Spark's own commit log by hand."""
    last = max(int(p.name) for p in (story.checkpoint / "commits").iterdir() if p.name.isdigit())
    for file in (story.checkpoint / "commits").glob(f"*{last}*"):
        if file.name in (f"{last}", f".{last}.crc"):
            file.unlink()
    return last


class TestPythonProcess:
    """The worker, the committer or the planner dies; Spark sees it and fails the query."""

    @pytest.mark.parametrize("point", with_victim("process", POINTS))
    def test_exactly_once_after_the_process_dies_at(self, point, tale):
        story = tale()
        # a task beside it may have come as far, before Spark stopped it
        ended = crash(story, point)
        until(lambda: not all(map(running, ended)), "the process dies")
        assert story.job.alive
        restart(story)

    def test_exactly_once_after_the_last_commit_is_deleted_by_hand(self, tale):
        story = tale()
        story.feed(2)
        story.run()
        last = forget_last_commit(story)
        story.feed()
        story.run(partitions=5)
        assert [e.ids["batch_id"] for e in story.events("drain") if e.kind == "ok"][-1] == last
        story.check()


class TestDriver:
    """The JVM dies, and with it all its Python processes, so none can clean up."""

    @pytest.mark.parametrize("point", with_victim("driver", POINTS))
    def test_exactly_once_after_the_driver_dies_at(self, point, tale):
        story = tale()
        lose_the_driver(story, point)
        restart(story)

    @pytest.mark.full
    def test_exactly_once_after_the_driver_dies_and_the_last_commit_is_deleted_by_hand(self, tale):
        story = tale()
        lose_the_driver(story, CrashPoint.BEFORE_DECISION)
        forget_last_commit(story)
        restart(story)


def lose_the_driver(story, point):
    if not story.job.alive:
        story.job.start()
    crash(story, point, pid=story.job.jvm)
    until(lambda: not running(story.job.jvm), "the JVM dies")
    try:
        until(lambda: not left_behind(story), "the Python processes follow their JVM", 120)
    except Failed:
        pytest.fail(f"these Python processes do not follow their JVM: {left_behind(story)}")


def left_behind(story):
    """The pids in the history that still run. A pid that was used again belongs to no process of
    the job.
    """
    pids = {e.process for e in story.events()}
    return [p.pid for p in story.job.processes if p.pid in pids and running(p.pid)]


class TestBroker:
    """The broker dies around the decision, and comes back. The driver sends commit or abort again;
    the query does not fail.
    """

    @pytest.mark.parametrize("point", with_victim("broker", POINTS))
    def test_exactly_once_after_the_only_broker_dies_at(self, point, tale, kafka):
        story = tale()
        lose_a_broker(story, kafka, point)
        restart(story)

    @pytest.mark.full
    def test_exactly_once_after_one_of_three_brokers_dies_between_two_commits(self, job, tmp_path):
        """Three, because the only broker of a cluster may forget a commit that it has acknowledged:
        killed before it told the partitions, it starts with an empty map, takes the topic for
        deleted, and calls the transaction complete (Kafka 4.3.1, TransactionMarkerChannelManager).
        """
        with LocalKafka(3) as kafka:
            story = Scenario(job, kafka, tmp_path).watch()
            lose_a_broker(story, kafka, CrashPoint.AFTER_FIRST_COMMIT)
            restart(story)
            story.close()


def lose_a_broker(story, kafka, point, node=0):
    """Two more batches; the node is killed in the second one, and started again."""
    story.feed(2)
    story.arm(point, batch_id=story.files - 1, pid=kafka.pids[node], wait=False)
    with ThreadPoolExecutor(1) as helper:
        back = helper.submit(bring_back, story, kafka, node)
        story.run(**life())
        back.result()
    assert story.job.done.exists(), story.told()


def bring_back(story, kafka, node):
    until(story.job.done.exists, "the order to kill the broker is obeyed", 60)
    until(lambda: kafka.pids[node] is None, "the broker dies")
    kafka.restart(node)
