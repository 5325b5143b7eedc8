"""The jobs and scenarios that the tests share (proof.spark_job, proof.scenario)."""

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
def story(job, kafka, tmp_path):
    from kafka2pc.proof.drills.scenario import Scenario

    with Scenario(job, kafka, tmp_path) as scenario:
        yield scenario


def check_untouched(story):
    """Nothing was written, nothing was even begun."""
    assert (
        story.seen("read_uncommitted") == [] and story.open() == [] and story.events("begin") == []
    ), story.told()
