"""A query whose checkpoint and decisions are in S3, and nowhere else: killed at named points,
started again, every row once.

Spark reads and writes its checkpoint by hadoop-aws, the sink by s3fs.
"""

import pytest
from marks import first_of
from store_fixtures import s3a

from kafka2pc.proof.crash_points import CrashPoint
from kafka2pc.proof.drills.one_store import kill_driver, kill_process, survive_all
from kafka2pc.proof.drills.setups import Setup
from kafka2pc.proof.drills.spark_query import NotExactlyOnce, SparkQuery

pytestmark = [
    pytest.mark.full,
    pytest.mark.kafka,
    pytest.mark.spark,
    pytest.mark.never_unsteady,
]
# Elsewhere a crash touches the decisions and the checkpoint as on a disk: see test_drills.
POINTS = [
    pytest.param(kill_process, [CrashPoint.AFTER_DECISION], id="after the decision"),
    pytest.param(
        kill_process,
        [CrashPoint.BEFORE_DECISION, CrashPoint.AFTER_COMMIT_LOG],
        id="before the decision, after Spark's commit log",
    ),
    pytest.param(
        kill_process,
        [CrashPoint.BEFORE_BEGIN, CrashPoint.AFTER_LAST_COMMIT, CrashPoint.BEFORE_COMMIT_LOG],
        id="elsewhere",
        marks=pytest.mark.nightly,
    ),
    pytest.param(
        kill_driver, [CrashPoint.AFTER_DECISION], id="the driver", marks=pytest.mark.nightly
    ),
]


class QueryInS3(SparkQuery):
    """In a bucket of its own. Spark's own name of the checkpoint begins with s3a."""

    def __init__(self, *given, server):
        super().__init__(*given)
        self.server = server
        self.bucket = server.fresh()

    def options(self, **more):
        own = {
            "checkpointLocation": f"{self.bucket}/checkpoint".replace("s3://", "s3a://"),
            "decisionLog": f"{self.bucket}/decisions",
        }
        return super().options(**own | more)

    def check(self):
        """Also: all of it was kept in S3, and nothing on the disk."""
        super().check()
        found = self.server.driver().find(self.bucket.removeprefix("s3://"))
        kept = [f"/commits/{self.files - 1}", "/decisions/"]
        missing = [part for part in kept if not any(part in path for path in found)]
        if missing or self.checkpoint.exists():
            raise NotExactlyOnce(f"not in S3: {missing}; found {found}")


@pytest.fixture(scope="module")
def setup(tmp_path_factory):
    with Setup(tmp_path_factory.mktemp("s3"), progress=None) as made:
        yield made


@pytest.fixture(scope="module")
def session(s3):
    return {"name": "s3", "conf": s3a(s3)}


@pytest.fixture
def query(setup, session, s3):
    return setup.fresh(session, QueryInS3, server=s3).watch()


@pytest.fixture(scope="module")
def make(s3):
    return lambda setup, job: QueryInS3(job, setup.kafka, setup.folder, server=s3)


@pytest.mark.parametrize(("inject", "points"), POINTS)
def test_every_row_is_there_once_when_it_dies(inject, points, setup, session, make):
    setup.end_query()  # of the test before, which may have failed
    before = setup.crashes
    rounds = [[(point, None)] for point in points]
    survive_all(setup, rounds, inject, make=make, session=session)
    assert setup.crashes - before == len(points)


@pytest.mark.parametrize("when", first_of(["after", "before"], rest="nightly"))
def test_every_row_is_there_once_if_the_answers_of_s3_are_lost(when, query, s3):
    """The answer to the first request that writes each decision."""
    lost = set()

    def fault(request):
        if not request.writes or "/decisions/" not in request.path or request.path in lost:
            return None
        lost.add(request.path)
        return when

    query.feed(2)
    with s3.proxy.faults(fault):
        query.run()
    assert len(lost) >= 2
    query.run()
    query.check()


def test_a_micro_batch_asks_s3_eight_times(query, s3):
    """Each request costs some ten milliseconds there, and they follow each other. The eighth is
    for `decisionLog`: is there none in the checkpoint? After `keep_batches` one more removes the
    oldest COMMIT.
    """
    query.feed()
    query.run()
    query.feed(4)
    with s3.proxy.counted() as requests:
        query.run()
    asked = [(r.method, r.path) for r in requests if "aiobotocore" in r.agent]
    assert len(asked) <= 4 * 8, asked
    query.check()
