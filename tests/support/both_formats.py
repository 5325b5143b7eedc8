"""The same case on `format("kafka2pc")` and on Spark's own `format("kafka")`, which is the oracle.

A test that asks for the fixture `either_format` runs twice, once for each format. Mark it `full`,
`kafka` and `spark`: the first one fetches Spark's connector from Maven Central, once.

conftest.py imports the fixtures before every test, so each function imports what it needs.
"""

from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest

OURS, SPARKS_OWN = "kafka2pc", "kafka"
# Spark gives a Python worker ten seconds to start, which a busy machine may not do
LATE_WORKER = "Python worker failed to connect back"


@dataclass(frozen=True)
class Format:
    """One of the two formats, in a session that knows both, beside the shared broker. Both read
    only what is committed, unless the options say otherwise.
    """

    name: str
    spark: Any
    kafka: Any

    def options(self, topic, **more):
        """The options of a source: `subscribe`, unless `more` names topics in another way."""
        named = {name.lower() for name in more} & {"assign", "subscribepattern"}
        return (
            {"kafka.bootstrap.servers": self.kafka.bootstrap_servers}
            | {"kafka.isolation.level": "read_committed"}
            | ({} if named else {"subscribe": topic})
            | more
        )

    def load(self, topic, **more):
        """The frame of a batch read."""
        return self.spark.read.format(self.name).options(**self.options(topic, **more)).load()

    def load_stream(self, topic, **more):
        """The frame of a stream."""
        reader = self.spark.readStream.format(self.name)
        return reader.options(**self.options(topic, **more)).load()

    def values(self, topic, **more):
        """The values of a batch read as text, sorted."""
        return values(self.load(topic, **more))

    @contextmanager
    def refuses(self, said):
        """The block raises an error with a text that fits `said`; kafka2pc raises `BadOption`."""
        with pytest.raises(Exception, match=said) as e:
            yield
        assert self.name != OURS or "BadOption" in str(e.value), e.value

    def stream_values(self, checkpoint, topic, **more):
        """What a stream reads until it has all that exists now: the values as text, one list for
        each micro-batch, each sorted.
        """
        batches = []
        run(
            self.load_stream(topic, **more),
            checkpoint,
            lambda rows, _: batches.append(values(rows)),
        )
        return batches


def run(frame, checkpoint, each, mode="append"):
    """Run a stream until it has read all that exists now. `each` is called with the rows and the
    number of each micro-batch. Returns the query. If a Python worker was late, the stream goes on
    from its checkpoint, once.
    """
    from pyspark.errors import StreamingQueryException

    try:
        return _run_once(frame, checkpoint, each, mode)
    except StreamingQueryException as e:
        if LATE_WORKER not in str(e):
            raise
    return _run_once(frame, checkpoint, each, mode)


def _run_once(frame, checkpoint, each, mode):
    writer = frame.writeStream.foreachBatch(each).outputMode(mode)
    writer = writer.option("checkpointLocation", str(checkpoint)).trigger(availableNow=True)
    query = writer.start()
    try:
        assert query.awaitTermination(300), "the stream did not end"
    finally:
        query.stop()
    return query


def values(rows):
    """The column `value` as text, sorted."""
    return sorted(r.v for r in rows.selectExpr("cast(value as string) v").collect())


def send(kafka, topic, values, partition=0, timestamp_ms=None):
    """Write values without a transaction. `timestamp_ms`: of all of them; None: now."""
    from confluent_kafka import Producer

    producer = Producer(kafka.client_conf)
    when = {} if timestamp_ms is None else {"timestamp": timestamp_ms}
    for value in values:
        producer.produce(topic, str(value).encode(), partition=partition, **when)
    assert producer.flush(30) == 0


def _stop_jvm():
    """Stop this process's JVM. Spark looks at `spark.jars` when it starts one, and an earlier test
    may have started one without.
    """
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

    session = SparkSession.getActiveSession()
    if session is not None:
        session.stop()
    if SparkContext._gateway is not None:
        SparkContext._gateway.shutdown()
        SparkContext._gateway = SparkContext._jvm = None


@pytest.fixture(scope="module")
def both_formats(tmp_path_factory):
    """A Spark session with both formats."""
    from pyspark.sql import SparkSession

    import kafka2pc
    from kafka2pc.proof.demo.job import fetch_connector

    jars = fetch_connector()
    _stop_jvm()
    settings = {
        "spark.ui.enabled": False,
        "spark.jars": jars,
        "spark.sql.shuffle.partitions": 2,
        "spark.sql.warehouse.dir": str(tmp_path_factory.mktemp("warehouse")),
    }
    session = SparkSession.builder.master("local[2]").config(map=settings).getOrCreate()
    kafka2pc.register(session)
    yield session
    session.stop()
    _stop_jvm()


@pytest.fixture(params=[OURS, SPARKS_OWN])
def either_format(request, both_formats, kafka):
    """A `Format`: the test runs once with each."""
    return Format(request.param, both_formats, kafka)
