"""The jobs and queries that the tests share (proof.drills.spark_job, proof.drills.spark_query)."""

import pytest


@pytest.fixture(scope="session")
def jobs(tmp_path_factory):
    """Creates jobs, and ends them with everything that they started."""
    from kafka2pc.proof.drills.spark_job import Job

    started = []

    def make(name, **session):
        started.append(Job(tmp_path_factory.mktemp(name) / "job", **session))
        return started[-1]

    yield make
    for job in started:
        job.stop()


@pytest.fixture(scope="session")
def job(jobs):
    """One driver and its JVM for all tests that need no other."""
    return jobs("shared")


@pytest.fixture
def spark_query(job, kafka, tmp_path):
    from kafka2pc.proof.drills.spark_query import SparkQuery

    with SparkQuery(job, kafka, tmp_path) as query:
        yield query


def check_untouched(spark_query):
    """Nothing was written, nothing was even begun."""
    from kafka2pc.proof.drills.spark_query import last_events

    assert (
        spark_query.seen("read_uncommitted") == []
        and spark_query.open() == []
        and spark_query.events("begin") == []
    ), last_events(spark_query.events())
