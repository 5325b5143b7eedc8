"""A query over numbered files into a topic of its own, by a function for `foreachBatch`."""

import os
import sys
import uuid

import pytest
from kafka_fixtures import values

import kafka2pc
from kafka2pc.spark.checkpoint import Checkpoint
from kafka2pc.spark.sink import opening


@pytest.fixture(scope="module")
def spark(tmp_path_factory):
    from pyspark.sql import SparkSession

    os.environ |= {"PYSPARK_PYTHON": sys.executable, "SPARK_LOCAL_IP": "127.0.0.1"}
    session = (
        SparkSession.builder.master("local[2]")
        .config("spark.ui.enabled", False)
        .config("spark.sql.shuffle.partitions", 2)
        .config("spark.sql.warehouse.dir", str(tmp_path_factory.mktemp("warehouse")))
        .getOrCreate()
    )
    kafka2pc.register(session)
    yield session
    session.stop()


class Query:
    """A query over numbered files, one a batch, into a topic of its own."""

    def __init__(self, spark, kafka, folder):
        self.spark, self.kafka, self.folder = spark, kafka, folder
        self.topic = f"once-{uuid.uuid4().hex[:8]}"
        kafka.create_topic(self.topic, partitions=2)
        (folder / "source").mkdir()
        self.files = 0

    @property
    def checkpoint(self):
        return str(self.folder / "checkpoint")

    def options(self, **more):
        conf = {f"kafka.{k}": v for k, v in self.kafka.client_conf.items()}
        return conf | {"topic": self.topic, "transactionalIdPrefix": self.topic} | more

    def feed(self, *batches):
        """A file for each batch: a list of words."""
        for words in batches:
            path = self.folder / "source" / f"{self.files:03d}.txt"
            path.write_text("".join(f"{word}\n" for word in words))
            os.utime(path, (1_700_000_000 + self.files,) * 2)  # files are read in this order
            self.files += 1

    def words(self):
        source = self.spark.readStream.option("maxFilesPerTrigger", 1)
        return source.text(str(self.folder / "source"))

    def start(self, function, frame=None, mode="append"):
        writer = (self.words() if frame is None else frame).writeStream.outputMode(mode)
        writer = writer.foreachBatch(function).option("checkpointLocation", self.checkpoint)
        return writer.trigger(availableNow=True).start()

    def run(self, function, frame=None, mode="append"):
        """Run until all files are done. The error that stopped it, as text; empty if none did."""
        query = self.start(function, frame, mode)
        try:
            query.awaitTermination(120)
        except Exception as e:
            return str(e)
        return ""

    def seen(self, **how):
        return sorted(values(self.kafka, self.topic, **how))

    def open(self):
        store = opening.open_participant(kafka2pc.exactly_once(self.options()).given.options.target)
        return store.in_doubt(Checkpoint(self.checkpoint).query_id())


@pytest.fixture
def query(spark, kafka, tmp_path):
    return Query(spark, kafka, tmp_path)
