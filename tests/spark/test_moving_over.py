"""A stream that Spark's own source has read goes on with this one, from the same checkpoint, and
back.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import uuid
from contextlib import contextmanager
from pathlib import Path

import pytest
from both_formats import OURS, SPARKS_OWN, Format, send
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient
from kafka_fixtures import values as values_of
from pyspark.errors import StreamingQueryException

from kafka2pc.proof.child_process import until
from kafka2pc.proof.demo.job import fetch_connector
from kafka2pc.spark.source.lag import read_last_offsets
from kafka2pc.spark.source.offsets import to_json

pytestmark = [pytest.mark.full, pytest.mark.spark, pytest.mark.kafka]
CHECKPOINTS = sorted((Path(__file__).parents[1] / "fixtures").glob("checkpoint-spark-*"))


@pytest.fixture
def own(both_formats, kafka):
    return Format(SPARKS_OWN, both_formats, kafka)


@pytest.fixture
def ours(both_formats, kafka):
    return Format(OURS, both_formats, kafka)


@pytest.fixture
def topic(kafka):
    name = f"over-{uuid.uuid4().hex[:8]}"
    kafka.create_topic(name, partitions=2)
    return name


def read(format, checkpoint, topic):
    """All that the stream reads until it has what exists now."""
    batches = format.stream_values(checkpoint, topic, startingOffsets="earliest")
    return sorted(value for batch in batches for value in batch)


def not_committed(checkpoint, batch_id):
    """As a driver leaves it that dies in this batch."""
    (checkpoint / f"commits/{batch_id}").unlink()
    (checkpoint / f"commits/.{batch_id}.crc").unlink(missing_ok=True)


@pytest.mark.never_unsteady
def test_it_goes_on_where_sparks_own_source_was(own, ours, kafka, topic, tmp_path):
    send(kafka, topic, "ab")
    assert read(own, tmp_path, topic) == ["a", "b"]
    send(kafka, topic, "c", partition=1)
    assert read(ours, tmp_path, topic) == ["c"]
    assert read(ours, tmp_path, topic) == []


@pytest.mark.never_unsteady
def test_a_batch_that_spark_did_not_commit_is_read_again_as_it_was(
    own, ours, kafka, topic, tmp_path
):
    for value in "abc":
        send(kafka, topic, value)
        read(own, tmp_path, topic)
    not_committed(tmp_path, 2)
    send(kafka, topic, "d")
    assert ours.stream_values(tmp_path, topic)[:1] == [["c"]]
    assert read(ours, tmp_path, topic) == []


@pytest.mark.never_unsteady
def test_a_first_batch_that_spark_did_not_commit_is_refused(own, ours, kafka, topic, tmp_path):
    """Only Spark's own source knows where it began."""
    send(kafka, topic, "ab")
    read(own, tmp_path, topic)
    not_committed(tmp_path, 0)
    with pytest.raises(
        StreamingQueryException, match="does not say where it begins(?s:.)*once more"
    ):
        read(ours, tmp_path, topic)
    assert read(own, tmp_path, topic) == ["a", "b"]
    assert read(ours, tmp_path, topic) == []


@pytest.mark.never_unsteady
def test_from_then_on_a_topic_that_is_created_again_is_noticed(own, ours, kafka, topic, tmp_path):
    send(kafka, topic, "ab")
    read(own, tmp_path, topic)
    assert read(ours, tmp_path, topic) == []
    admin = AdminClient(kafka.client_conf)
    admin.delete_topics([topic])[topic].result()
    until(lambda: topic not in admin.list_topics(timeout=10).topics, "it is gone")
    kafka.create_topic(topic, partitions=2)
    send(kafka, topic, "xyz")
    with pytest.raises(StreamingQueryException, match="TopicRecreated"):
        read(ours, tmp_path, topic)


@pytest.mark.never_unsteady
def test_the_way_back_is_a_new_checkpoint_from_the_last_offsets(own, ours, kafka, topic, tmp_path):
    send(kafka, topic, "ab")
    assert read(ours, tmp_path / "ours", topic) == ["a", "b"]
    offsets = to_json(read_last_offsets(str(tmp_path / "ours")))["offsets"]
    send(kafka, topic, "c", partition=1)
    start = {"startingOffsets": json.dumps(offsets)}
    assert own.stream_values(tmp_path / "own", topic, **start) == [["c"]]


@pytest.fixture(scope="module")
def recorded(kafka):
    """The topic of the recorded checkpoints: the rows 0 to 9, and 10 to 15; two more rows."""
    kafka.create_topic("moved", partitions=2)
    send(kafka, "moved", range(10))
    send(kafka, "moved", range(10, 16), partition=1)
    send(kafka, "moved", ["new 0"])
    send(kafka, "moved", ["new 1"], partition=1)
    return kafka


@pytest.mark.never_unsteady
@pytest.mark.parametrize(
    "checkpoint",
    [
        pytest.param(path, id=path.name[17:], marks=[pytest.mark.nightly] * between)
        for path in CHECKPOINTS
        for between in [path not in (CHECKPOINTS[0], CHECKPOINTS[-1])]
    ],
)
@pytest.mark.parametrize("committed", [True, False], ids=["committed", "not committed"])
def test_checkpoints_of_older_sparks(both_formats, recorded, checkpoint, committed, tmp_path):
    """Two batches: to the offsets 5 and 3, then to 10 and 6."""
    place = shutil.copytree(checkpoint, tmp_path / "checkpoint")
    if not committed:
        not_committed(place, 1)
    again = [] if committed else [str(n) for n in (*range(5, 10), *range(13, 16))]
    ours = Format(OURS, both_formats, recorded)
    assert read(ours, place, "moved") == sorted([*again, "new 0", "new 1"])


def test_there_are_recorded_checkpoints():
    assert len(CHECKPOINTS) == 4


JOB = """
import json, sys
from pyspark.sql import SparkSession
import kafka2pc
from kafka2pc.proof.demo.job import fetch_connector

source, options, topic, place = json.loads(sys.argv[1])
spark = SparkSession.builder.master("local[2]").config("spark.jars", fetch_connector())
spark = spark.config("spark.ui.enabled", False).getOrCreate()
kafka2pc.register(spark)
rows = spark.readStream.format(source).options(**options).load().select("value")
servers = {"kafka.bootstrap.servers": options["kafka.bootstrap.servers"], "topic": topic}
writer = rows.writeStream.format("kafka2pc").options(**servers)
writer.option("checkpointLocation", place).start().awaitTermination()
"""


def options_of(kafka, topic):
    """Of the source."""
    return {
        "kafka.bootstrap.servers": kafka.bootstrap_servers,
        "subscribe": topic,
        "startingOffsets": "earliest",
        "maxOffsetsPerTrigger": "200",
    }


class Job:
    """The query in a process of its own, from topic to topic."""

    def __init__(self, kafka, source, topics, place):
        words = json.dumps([source, options_of(kafka, topics[0]), topics[1], str(place)])
        self.process = subprocess.Popen(
            [sys.executable, "-c", JOB, words],
            start_new_session=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    def kill(self):
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def batches(place, kind):
    """How many batches Spark has written into `offsets` or `commits`."""
    return len(list((place / kind).glob("[0-9]*")))


@pytest.mark.never_unsteady
@pytest.mark.parametrize(
    "kills", [1, pytest.param(2, marks=pytest.mark.nightly)], ids=["one kill", "two kills"]
)
def test_moved_under_load_with_a_kill_on_each_side_every_row_is_there_once(
    both_formats, kafka, tmp_path, kills
):
    topics = [f"over-{side}-{uuid.uuid4().hex[:6]}" for side in ("in", "out")]
    for topic in topics:
        kafka.create_topic(topic, partitions=3)
    fetch_connector()
    place = tmp_path / "checkpoint"
    with load(kafka, topics[0]) as sent:
        for source in [SPARKS_OWN] * kills + [OURS] * kills:
            kill_in_a_batch(Job(kafka, source, topics, place), place)
    finish(both_formats, kafka, topics, place)
    wanted = [str(n) for n in sent]
    assert sorted(values_of(kafka, topics[1]), key=int) == wanted


def finish(spark, kafka, topics, place):
    """The same query once more, until it has all that exists."""
    rows = spark.readStream.format(OURS).options(**options_of(kafka, topics[0])).load()
    writer = rows.select("value").writeStream.format("kafka2pc").trigger(availableNow=True)
    writer = writer.option("kafka.bootstrap.servers", kafka.bootstrap_servers)
    query = writer.options(topic=topics[1], checkpointLocation=str(place)).start()
    try:
        assert query.awaitTermination(300), "it did not end"
    finally:
        query.stop()


@contextmanager
def load(kafka, topic):
    """A producer writes all the time. The list of what it has sent is complete at the end."""
    producer, stop, sent = Producer(kafka.client_conf), threading.Event(), []

    def send_on():
        while not stop.wait(0.05):
            producer.produce(topic, str(len(sent)).encode())
            producer.poll(0)
            sent.append(len(sent))

    thread = threading.Thread(target=send_on)
    thread.start()
    try:
        yield sent
    finally:
        stop.set()
        thread.join()
    assert producer.flush(30) == 0


def kill_in_a_batch(job, place):
    """Kill the job in the middle of a batch, after another one was done."""
    before = batches(place, "commits")
    in_a_batch = lambda: batches(place, "offsets") > batches(place, "commits") > before
    try:
        until(in_a_batch, "a batch is under way", 300)
    finally:
        job.kill()
