"""Continuous processing is refused before a row is read or written: for a sink in Python, Spark
would run the query and pass on no rows.
"""

import uuid

import pytest
from both_formats import send
from kafka_fixtures import values
from marks import first_of

from kafka2pc.protocol.errors import BadOption
from kafka2pc.spark.sink.options import parse_sink_options
from kafka2pc.spark.sink.stream_writer import StreamWriter

pytestmark = [pytest.mark.spark, pytest.mark.kafka, pytest.mark.never_unsteady]
REFUSED = "Spark has planned no micro-batch"
CONTINUOUS = {"continuous": "1 second"}


@pytest.fixture
def topic(kafka):
    name = f"continuous-{uuid.uuid4().hex[:8]}"
    kafka.create_topic(name)
    kafka.create_topic(f"{name}-in")
    return name


def start(spark, kafka, topic, checkpoint, trigger, **more):
    """A query that copies a topic. Spark's own source can do so in both ways."""
    servers = {"kafka.bootstrap.servers": kafka.bootstrap_servers}
    source = {"subscribe": f"{topic}-in", "startingOffsets": "earliest"}
    rows = spark.readStream.format("kafka").options(**servers | source).load()
    writer = rows.select("value").writeStream.format("kafka2pc")
    writer = writer.options(topic=topic, **servers | more)
    return writer.option("checkpointLocation", str(checkpoint)).trigger(**trigger).start()


def write_some(spark, kafka, topic, checkpoint, **more):
    """Write one row, in a micro-batch."""
    send(kafka, f"{topic}-in", ["row"])
    query = start(spark, kafka, topic, checkpoint, {"availableNow": True}, **more)
    assert query.awaitTermination(120)


def refuse(spark, kafka, topic, checkpoint, **more):
    query = start(spark, kafka, topic, checkpoint, CONTINUOUS, **more)
    try:
        with pytest.raises(Exception, match=REFUSED):
            assert not query.awaitTermination(60), "the query has ended without an error"
    finally:
        query.stop()


@pytest.mark.full
@pytest.mark.parametrize("guarantee", first_of(["exactly_once", "at_least_once"], rest="nightly"))
def test_a_sink_refuses_it_in_a_new_checkpoint_and_in_one_of_micro_batches(
    both_formats, kafka, topic, tmp_path, guarantee
):
    """Also between two runs of micro-batches, where the planner's process is the same. Nothing is
    lost.
    """
    query = both_formats, kafka, topic, tmp_path / "cp"
    more = {"deliveryGuarantee": guarantee}
    refuse(*query, **more)
    write_some(*query, **more)
    refuse(*query, **more)
    write_some(*query, **more)
    assert values(kafka, topic) == ["row", "row"]


@pytest.mark.full
@pytest.mark.parametrize("sink", first_of(["console", "memory"], rest="nightly"))
def test_spark_refuses_it_for_the_source(both_formats, kafka, topic, sink):
    options = {"kafka.bootstrap.servers": kafka.bootstrap_servers, "subscribe": topic}
    rows = both_formats.readStream.format("kafka2pc").options(**options).load()
    writer = rows.writeStream.format(sink).queryName("continuous").trigger(**CONTINUOUS)
    with pytest.raises(Exception, match="does not support continuous processing"):
        writer.start()


def test_a_commit_without_messages_of_tasks_is_refused():
    """Of a query whose checkpoint the planner does not know: Spark logs this error."""
    servers = {"kafka.bootstrap.servers": "localhost:1", "deliveryGuarantee": "at_least_once"}
    writer = StreamWriter(parse_sink_options(servers), None, None)
    writer.commit([], 0)
    with pytest.raises(BadOption, match=REFUSED):
        writer.commit([None, None], 0)
