"""A query whose checkpoint and decisions are in S3, and nowhere else: killed at every named point,
started again, every row once.

Spark reads and writes its checkpoint by hadoop-aws, the sink by s3fs.
"""

import os

import pytest
from kafka_fixtures import values
from marks import first_of
from store_fixtures import s3a

from kafka2pc.proof.child_process import Failed, until
from kafka2pc.proof.crash_points import CrashPoint
from kafka2pc.proof.drills.scenario import Scenario
from kafka2pc.proof.drills.spark_job import running

pytestmark = [pytest.mark.kafka, pytest.mark.spark]
# Elsewhere a crash touches the decisions and the checkpoint as on a disk: see test_crashes.
POINTS = [
    CrashPoint.AFTER_DECISION,
    CrashPoint.BEFORE_BEGIN,
    CrashPoint.BEFORE_DECISION,
    CrashPoint.AFTER_LAST_COMMIT,
    CrashPoint.BEFORE_COMMIT_LOG,
    CrashPoint.AFTER_COMMIT_LOG,
]


class StoryInS3(Scenario):
    """`url`: the bucket, as Python names it. Spark's own name of the checkpoint begins with s3a."""

    url = ""

    def options(self, **more):
        place = f"{self.url}/{self.name}"
        return super().options(
            **{
                "checkpointLocation": f"{place}/checkpoint".replace("s3://", "s3a://"),
                "decisionLog": f"{place}/decisions",
            }
            | more
        )


@pytest.fixture(scope="module")
def tale(jobs, kafka, s3, tmp_path_factory):
    """One query that goes on through all tests of this file; after a failure the next test begins a
    new one.
    """
    job, told = jobs("s3", conf=s3a(s3)), []

    def go_on():
        if not told or not told[-1].whole:
            told.append(StoryInS3(job, kafka, tmp_path_factory.mktemp("s3")).watch())
            told[-1].url = s3.fresh()
        told[-1].whole = False
        return told[-1]

    yield go_on
    for story in told:
        story.close()


def crash(story, point, pid=0):
    """One more batch; in it, the process that gets to `point` dies (or the process `pid`)."""
    story.feed()
    story.arm(point, batch_id=story.files - 1, pid=pid)
    with pytest.raises(Failed):
        story.run()
    assert story.job.done.exists(), f"{point.name} was never reached:\n{story.told()}"


def decisions(server, story):
    """The objects below the place of the decisions, and below that of the checkpoint."""
    fs, root = server.driver(), f"{story.url}/{story.name}".removeprefix("s3://")
    return [
        [p for p in fs.find(f"{root}/{kind}") if not p.endswith("/")]
        for kind in ("decisions", "checkpoint")
    ]


def restart(server, story):
    """Nothing is lost, doubled, read early or left open; and all of it was kept in S3."""
    story.run()
    story.check()
    assert sorted(map(int, values(story.kafka, story.name))) == list(
        range(story.files * story.size)
    )
    decided, checkpoint = decisions(server, story)
    assert decided and any(p.endswith(f"/commits/{story.files - 1}") for p in checkpoint)
    assert not os.path.exists(story.checkpoint)
    story.whole = True


@pytest.mark.parametrize("point", first_of(POINTS, ids=lambda point: point.name.lower()))
def test_exactly_once_after_the_process_dies_at(point, tale, s3):
    story = tale()
    crash(story, point)
    restart(s3, story)


@pytest.mark.full
def test_exactly_once_after_the_driver_dies(tale, s3):
    story = tale()
    if not story.job.alive:
        story.job.start()
    crash(story, CrashPoint.AFTER_DECISION, pid=story.job.jvm)
    until(lambda: not running(story.job.jvm), "the JVM dies")
    restart(s3, story)


@pytest.mark.parametrize("when", first_of(["after", "before"]))
def test_exactly_once_if_the_answers_of_s3_are_lost(when, tale, s3):
    """The answer to the first request that writes each decision."""
    story, lost = tale(), set()

    def fault(request):
        if not request.writes or "/decisions/" not in request.path or request.path in lost:
            return None
        lost.add(request.path)
        return when

    story.feed(2)
    with s3.proxy.faults(fault):
        story.run()
    assert len(lost) >= 2
    restart(s3, story)


def test_a_micro_batch_asks_s3_eight_times(tale, s3):
    """Each request costs some ten milliseconds there, and they follow each other. The eighth is
    for `decisionLog`: is there none in the checkpoint? After `keep_batches` one more removes the
    oldest COMMIT.
    """
    story = tale()
    story.feed()
    story.run()
    story.feed(4)
    with s3.proxy.counted() as requests:
        story.run()
    assert len([r for r in requests if "aiobotocore" in r.agent]) <= 4 * 8, [
        (r.method, r.path) for r in requests
    ]
    restart(s3, story)
