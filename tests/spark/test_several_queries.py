"""Several queries in one session: their tasks and their planners take turns in the same Python
workers, and one query stops and starts again while the others go on.
"""

from collections import Counter

import pytest
from marks import first_of

from kafka2pc.kafka.read.whole_topic import read_ended
from kafka2pc.proof.child_process import until

pytestmark = pytest.mark.never_unsteady

TASKS = {"many": 12, "one": 1, "two": 2}  # so that the short batches come in between


@pytest.fixture
def start(kafka, tmp_path):
    """Start a query of that name, with a pool of its own. Queries are stopped at the end."""
    from pyspark.sql import SparkSession

    import kafka2pc

    builder = SparkSession.builder.master("local[2]").config("spark.ui.enabled", False)
    session = builder.config("spark.scheduler.mode", "FAIR").getOrCreate()
    kafka2pc.register(session)

    def start(name):
        session.sparkContext.setLocalProperty("spark.scheduler.pool", name)
        rows = session.readStream.format("rate-micro-batch").options(
            rowsPerBatch=120, numPartitions=TASKS[name]
        )
        writer = rows.load().selectExpr("cast(value as string) value").writeStream
        return (
            writer.format("kafka2pc")
            .option("kafka.bootstrap.servers", kafka.bootstrap_servers)
            .option("topic", name)
            .option("checkpointLocation", str(tmp_path / name))
            .start()
        )

    yield start
    session.stop()


def goes_on(query):
    """Has it written a batch since it was started? Raises its error."""
    if query.exception():
        raise query.exception()
    return query.lastProgress and query.lastProgress["numInputRows"]


@pytest.mark.full
@pytest.mark.spark
@pytest.mark.kafka
@pytest.mark.parametrize("starts", first_of([3, 6], rest="nightly"))
def test_they_take_turns_in_the_same_workers(start, kafka, starts):
    for name in TASKS:
        kafka.create_topic(name, partitions=3)
    queries = {name: start(name) for name in TASKS}
    for _ in range(starts):
        for query in queries.values():
            until(lambda query=query: goes_on(query), "the queries go on", 60)
        queries["many"].stop()
        queries["many"] = start("many")
    for query in queries.values():
        until(lambda query=query: goes_on(query), "the queries go on", 60)
        query.stop()
    for name in TASKS:
        rows = Counter(int(r.value) for r in read_ended(kafka.client_conf, name))
        assert rows == Counter(range(len(rows))) and len(rows) > 120
