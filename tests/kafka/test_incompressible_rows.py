"""Any row that fits the topic can be written and read, however badly a part of it compresses."""

import hashlib
import time
import uuid

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kafka_fixtures import records
from kafka_tools import java_clients

from kafka2pc.kafka.records import encoder
from kafka2pc.kafka.records.decoder import decode, split
from kafka2pc.kafka.records.encoder import CODECS, record_batch, sections
from kafka2pc.kafka.records.rows import rows_of
from kafka2pc.kafka.wire.cluster import Cluster
from kafka2pc.kafka.wire.descriptions import describe_transactions
from kafka2pc.kafka.wire.transactions import end_txn
from kafka2pc.kafka.write.column_producer import ColumnTransaction
from kafka2pc.local.tools import java_settings
from kafka2pc.protocol.messages import PreparedTxnState

pytestmark = pytest.mark.never_unsteady

MAX_BYTES = 32 << 20  # of a record, and of a batch
WINDOW = 4 << 20  # of an LZ4 frame, as the engine writes it
# the same frame with the smallest window that the format has: 64 KiB
SMALL_WINDOW = 64 << 10
SMALL_FRAME = bytes.fromhex("04224d18604082")


def noise(size, seed=1):
    return np.random.default_rng(seed).bytes(size)


def text(size):
    return (b"flight " * (size // 7 + 1))[:size]


PIECES = {"noise": noise, "text": text, "zeros": bytes}


def value_of(pieces):
    return b"".join(PIECES[kind](size) for kind, size in pieces)


def read_back(values, codec):
    """The values, and the size of the batch, after one pass through the engine and the decoder."""
    (section,) = sections(
        rows_of(pa.RecordBatch.from_pydict({"value": pa.array(values, pa.binary())})),
        np.zeros(len(values), int),
        "t",
        1 << 30,
    )
    batch = record_batch(section, PreparedTxnState(1, 0), 0, codec=codec)
    return [v for c in decode(split(batch), 0, 1 << 40) for v in c.values.to_pylist()], len(batch)


NEAR = st.one_of(
    st.integers(0, 40),
    st.integers(-40, 40).map(lambda n: SMALL_WINDOW + n),
    st.integers(-40, 40).map(lambda n: 2 * SMALL_WINDOW + n),
)


@given(
    st.lists(
        st.lists(st.tuples(st.sampled_from(sorted(PIECES)), NEAR), max_size=4).map(value_of),
        min_size=1,
        max_size=3,
    ),
    st.sampled_from(sorted(CODECS)),
)
@settings(max_examples=150, deadline=None)
def test_windows_of_noise_and_text_are_read_back_in_every_codec(values, codec):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(encoder, "_LZ4_BLOCK", SMALL_WINDOW)
        patch.setattr(encoder, "_LZ4_FRAME", SMALL_FRAME)
        assert read_back(values, codec)[0] == values


EXAMPLES = {
    "small": [("text", 100)],
    "noise first": [("noise", WINDOW), ("zeros", WINDOW)],
    "noise in the middle": [("text", WINDOW), ("noise", WINDOW + 1000), ("text", WINDOW)],
    "noise last": [("zeros", WINDOW), ("noise", WINDOW)],
    "noise in the last byte": [("zeros", WINDOW), ("noise", 1)],
    "only noise": [("noise", WINDOW + 1)],
    "no noise": [("text", 2 * WINDOW)],
}


@pytest.mark.parametrize("codec", CODECS)
def test_one_window_of_noise_does_not_cost_the_others_their_compression(codec):
    value = value_of(EXAMPLES["noise in the middle"])
    found, size = read_back([value], codec)
    assert found == [value]
    assert codec == "none" or size < WINDOW * 1.3


# -- a real broker, and two clients that are not ours --


def write(cluster, conf, topic, rows):
    """Each row in a committed transaction, in batches as large as the topic takes."""
    name = f"noise-{uuid.uuid4().hex}"
    with ColumnTransaction(cluster, conf, name, 60_000, topic=topic).begin() as txn:
        for key, value in rows:
            txn.write(pa.RecordBatch.from_pydict({"key": [key], "value": [value]}))
        txn.flush()
        c = txn.precommit()
    end_txn(cluster, name, c.state, commit=True, version=c.end_txn_version)
    while describe_transactions(cluster, [name])[name].state != "CompleteCommit":
        time.sleep(0.02)


def read_by_java(kafka, topic, count):
    """{key: SHA-256 of the value}, of `count` records that Kafka's Java consumer finds."""
    with java_clients() as jvm:
        conf = jvm.java.util.HashMap()
        package = "org.apache.kafka.common.serialization"
        for name, value in {
            "bootstrap.servers": kafka.bootstrap_servers,
            "key.deserializer": f"{package}.StringDeserializer",
            # a buffer stays in the JVM
            "value.deserializer": f"{package}.ByteBufferDeserializer",
            "isolation.level": "read_committed",
            **java_settings(kafka),
        }.items():
            conf[name] = value
        consumer = jvm.org.apache.kafka.clients.consumer.KafkaConsumer(conf)
        partition = jvm.org.apache.kafka.common.TopicPartition(topic, 0)
        partitions = jvm.java.util.List.of(partition)
        consumer.assign(partitions)
        consumer.seekToBeginning(partitions)
        sha = jvm.java.security.MessageDigest.getInstance("SHA-256")
        found, end = {}, time.monotonic() + 60
        while len(found) < count and time.monotonic() < end:
            for r in consumer.poll(jvm.java.time.Duration.ofSeconds(1)).records(partition):
                sha.update(r.value())
                found[r.key()] = bytes(sha.digest()).hex()
        consumer.close()
    return found


@pytest.mark.kafka
def test_rows_with_windows_of_noise_are_read_by_confluent_and_by_java(kafka):
    topic = kafka.create_topic(
        f"noise-{uuid.uuid4().hex[:8]}", config={"max.message.bytes": str(MAX_BYTES)}
    )
    sizes = {"message.max.bytes": MAX_BYTES, "batch.size": MAX_BYTES}
    values = {name: value_of(pieces) for name, pieces in EXAMPLES.items()}
    wanted = {}
    with Cluster(kafka.client_conf) as cluster:
        for codec in CODECS:
            rows = [(f"{codec}: {name}", value) for name, value in values.items()]
            write(cluster, kafka.client_conf | sizes | {"compression.type": codec}, topic, rows)
            wanted |= {key: hashlib.sha256(value).hexdigest() for key, value in rows}
    by_confluent = {
        m.key().decode(): hashlib.sha256(m.value()).hexdigest() for m in records(kafka, topic)
    }
    assert by_confluent == wanted
    assert read_by_java(kafka, topic, len(wanted)) == wanted
