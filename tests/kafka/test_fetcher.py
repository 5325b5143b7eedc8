"""Ranges of partitions: the same records as another consumer reads, from every client; each failure
is asked again, or raised with its offset.
"""

import random
import struct
import time
import uuid
from functools import partial
from pathlib import Path
from types import SimpleNamespace as Answer

import numpy as np
import pyarrow as pa
import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, AlterConfigOpType, ConfigEntry, ConfigResource
from hypothesis import given, settings
from hypothesis import strategies as st
from kafka.future import Future
from kafka_fixtures import records
from py4j.java_gateway import GatewayParameters, JavaGateway, launch_gateway

from kafka2pc.kafka.read import fetcher
from kafka2pc.kafka.read.fetcher import FetchSettings, NotFetched, fetch, fetch_settings
from kafka2pc.kafka.records.encoder import record_batch, sections
from kafka2pc.kafka.records.rows import rows_of
from kafka2pc.kafka.wire.cluster import Cluster
from kafka2pc.kafka.wire.connection import NoAnswer, NotSent
from kafka2pc.kafka.wire.topics import find_leaders
from kafka2pc.local.broker import LocalKafka
from kafka2pc.local.jars import fetch_kafka
from kafka2pc.protocol.errors import BrokerUnreachable, NotAuthorized, RecordsBroken, UnknownFormat
from kafka2pc.protocol.messages import PreparedTxnState

pytestmark = pytest.mark.timeout(240)

# -- a broker made of dice --


def batches(dice, end):
    """Record batches with the values 0, 1, ... of their offsets, and gaps between them."""
    made, offset = [], 0
    while offset < end:
        count = min(dice.randrange(1, 20), end - offset)
        rows = rows_of(
            pa.RecordBatch.from_pydict({"value": [str(offset + n) for n in range(count)]}), now_ms=0
        )
        (section,) = sections(rows, np.zeros(count, int), "t", 10_000)
        made.append(
            (
                offset,
                offset + count,
                struct.pack(">q", offset) + record_batch(section, PreparedTxnState(1, 0), 0)[8:],
            )
        )
        offset += count + dice.choice([0, 0, 3])
    return made


# over a quota: not a word of any topic
THROTTLED = Answer(error_code=0, responses=[], throttle_time_ms=1)


@pytest.fixture(scope="module", autouse=True)
def dice_answer():
    """A broker of this file answers itself."""

    def leaders(cluster, *question, **more):
        ask = getattr(cluster, "leaders", partial(find_leaders, cluster))
        return ask(*question, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fetcher, "find_leaders", leaders)
        yield


class Dice:
    """Serves batches from where it is asked, cut off somewhere; loses requests, sends nothing,
    moves away.
    """

    def __init__(self, seed, end):
        self.dice, self.leader = random.Random(seed), 0
        self.log = batches(self.dice, end)

    def leaders(self, names, right):
        fate = self.dice.random()
        if fate < 0.1:
            raise BrokerUnreachable("dice")
        return (
            {} if fate < 0.2 else {(name, 0): -1 if fate < 0.3 else self.leader for name in names}
        )

    def send(self, request, node, within_ms):
        offset, future = request.topics[0].partitions[0].fetch_offset, Future()
        fate = self.dice.choice(["good"] * 6 + ["not sent", "lost", "empty", "moved", "throttled"])
        if fate == "throttled":
            return future.success(THROTTLED)
        if fate in ("not sent", "lost"):
            return future.failure(NotSent("dice") if fate == "not sent" else NoAnswer("dice"))
        if fate == "moved":
            self.leader = 1 - self.leader
        whole = b"".join([b for _, behind, b in self.log if behind > offset][:4])
        first = next((len(b) for _, behind, b in self.log if behind > offset), 0)
        content = (
            whole[: self.dice.randint(first, len(whole))]
            if fate == "good" and node == self.leader
            else b""
        )
        part = Answer(
            error_code=0 if node == self.leader else 6,
            records=content,
            preferred_read_replica=-1,
            aborted_transactions=None,
        )
        return future.success(Answer(error_code=0, responses=[Answer(partitions=[part])]))


@given(st.integers(0, 10**6), st.integers(1, 200), st.data())
@settings(max_examples=60, deadline=None)
def test_whatever_is_lost_or_moved_every_record_comes_once_and_in_order(seed, size, data):
    broker = Dice(seed, size)
    top = broker.log[-1][1]
    begin = data.draw(st.integers(0, top))
    end = data.draw(st.integers(begin, top))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kafka2pc.kafka.read.fetcher._PAUSE_S", 0)
        found = [
            (o, int(v))
            for c in fetch(broker, "t", 0, begin, end, FetchSettings())
            for o, v in zip(c.offsets.tolist(), c.values.to_pylist(), strict=True)
        ]
    assert found == [
        (o, o) for first, behind, _ in broker.log for o in range(first, behind) if begin <= o < end
    ]


class Always:
    """One answer. `code` is the partition's, `content` its records; or `future` is the answer."""

    def __init__(self, code=0, content=b"", future=None):
        self.code, self.content, self.future = code, content, future

    def leaders(self, names, right):
        return {(name, 0): 0 for name in names}

    def send(self, request, node, within_ms):
        part = Answer(
            error_code=self.code,
            records=self.content,
            preferred_read_replica=-1,
            aborted_transactions=None,
        )
        return self.future or Future().success(
            Answer(error_code=0, responses=[Answer(partitions=[part])])
        )


one = batches(random.Random(1), 1)[0][2]


@pytest.mark.parametrize(
    ("broker", "error", "said"),
    [
        (Always(6), NotFetched, "nothing came within 200 ms at offset 5 .*NOT_LEADER_OR_FOLLOWER"),
        (Always(), NotFetched, "nothing came .*no records"),
        (Always(future=Future().success(THROTTLED)), NotFetched, "nothing came .*no records"),
        (Always(future=Future()), NotFetched, "nothing came within 200 ms"),
        (Always(1), NotFetched, "offset 5: 1 OFFSET_OUT_OF_RANGE"),
        (
            Always(29),
            NotAuthorized,
            (
                "topic t: 29 TOPIC_AUTHORIZATION_FAILED(.|\n)*Grant READ and DESCRIBE on the"
                " resource Topic t"
            ),
        ),
        (Always(content=one[:-1]), RecordsBroken, r"t-0, offset 5: \d+ bytes without it"),
        (Always(content=one), RecordsBroken, r"t-0, offset 5: \d+ bytes without it"),
        (Always(content=one[:-1] + b"x"), RecordsBroken, "t-0, offset 0: the checksum"),
        (
            Always(content=one[:16] + b"\1" + one[17:]),
            UnknownFormat,
            "t-0, offset 0: records of format 1(.|\n)*the copy has format 2",
        ),
        (Always(future=Future().failure(NotAuthorized("mallory"))), NotAuthorized, "mallory"),
    ],
)
def test_missing_records_raise_within_a_limit_of_time(broker, error, said):
    with pytest.raises(error, match=said):
        list(fetch(broker, "t", 0, 5, 9, FetchSettings(patience_ms=200, wait_ms=50)))


def test_a_range_is_asked_for_as_its_settings_say():
    conf = {
        "fetch.wait.max.ms": "7",
        "fetch.min.bytes": "8",
        "max.partition.fetch.bytes": "900",
        "fetch.max.bytes": "100",
        "client.rack": "a",
    }
    assert fetch_settings(conf, 5) == FetchSettings(
        wait_ms=7, min_bytes=8, most_bytes=100, rack="a", patience_ms=5
    )
    assert fetch_settings({"isolation.level": "read_uncommitted"}) == FetchSettings(
        committed_only=False
    )


# -- real ones --


@pytest.fixture
def topic(kafka):
    name = f"fetch-{uuid.uuid4().hex[:8]}"
    kafka.create_topic(name)
    return name


@pytest.fixture(scope="module")
def cluster(kafka):
    with Cluster(kafka.client_conf) as made:
        yield made


def ours(cluster, topic, begin, end, **how):
    found = []
    for c in fetch(cluster, topic, 0, begin, end, FetchSettings(**how), headers=True):
        headers = [[(h["key"], h["value"]) for h in hs or ()] for hs in c.headers.to_pylist()]
        stamps = zip((c.kinds + 1).tolist(), c.timestamps_ms.tolist(), strict=True)
        found += zip(
            c.offsets.tolist(),
            c.keys.to_pylist(),
            c.values.to_pylist(),
            headers,
            stamps,
            strict=True,
        )
    return found


def theirs(kafka, topic, isolation="read_committed"):
    """The same, as librdkafka's consumer reads it."""
    return [
        (m.offset(), m.key(), m.value(), m.headers() or [], m.timestamp())
        for m in records(kafka, topic, isolation)
    ]


def end_of(kafka, topic):
    from kafka2pc.spark.source.cluster import Questions

    return Questions(kafka.client_conf, committed_only=False).bounds([(topic, 0)])[topic, 0].end


def same(kafka, cluster, topic, **how):
    """Both readers read the same; how many records that are."""
    found = ours(cluster, topic, 0, end_of(kafka, topic), **how)
    assert found == theirs(
        kafka, topic, "read_committed" if how.get("committed_only", True) else "read_uncommitted"
    )
    return len(found)


def rows(count, seed=0):
    """(key, value, headers): nulls, nothing, a few bytes, and kilobytes that compress."""
    dice = random.Random(seed)
    text = lambda: dice.choice(
        [None, b"", dice.randbytes(dice.randrange(40)), dice.randbytes(30) * dice.randrange(200)]
    )
    return [
        (text(), text(), [(f"h{n}", text()) for n in range(dice.choice([0, 0, 1, 3]))])
        for _ in range(count)
    ]


@pytest.mark.kafka
@pytest.mark.parametrize("codec", ["none", "gzip", "snappy", "lz4", "zstd"])
def test_what_librdkafka_writes(kafka, cluster, topic, codec):
    producer = Producer(
        kafka.client_conf | {"compression.type": codec, "linger.ms": 200, "batch.size": 500_000}
    )
    for key, value, headers in rows(3000):
        producer.produce(topic, value, key=key, headers=headers, partition=0)
    producer.flush(30)
    assert same(kafka, cluster, topic) == 3000 == same(kafka, cluster, topic, most_bytes=1000)


@pytest.fixture(scope="module")
def java():
    """Kafka's own Java client, called from here."""
    import pyspark

    jars = [
        *Path(pyspark.__path__[0]).glob("jars/py4j-*.jar"),
        *fetch_kafka(progress=None).glob("*.jar"),
    ]
    port = launch_gateway(
        jarpath=str(jars[0]), classpath=":".join(map(str, jars)), die_on_exit=True
    )
    gateway = JavaGateway(gateway_parameters=GatewayParameters(port=port))
    yield gateway.jvm
    gateway.shutdown()


@pytest.mark.kafka
@pytest.mark.parametrize("codec", ["none", "gzip", "snappy", "lz4", "zstd"])
def test_what_java_writes(kafka, cluster, topic, java, codec):
    properties, clients = java.java.util.Properties(), java.org.apache.kafka
    for name, value in {
        "bootstrap.servers": kafka.bootstrap_servers,
        "compression.type": codec,
        "linger.ms": "300",
        "batch.size": "800000",
    }.items():
        properties.setProperty(name, value)
    serializer = clients.common.serialization.ByteArraySerializer
    producer = clients.clients.producer.KafkaProducer(properties, serializer(), serializer())
    held = lambda text: None if text is None else bytearray(text)
    for key, value, headers in rows(300):
        made = clients.clients.producer.ProducerRecord(topic, 0, held(key), held(value))
        for name, text in headers:
            made.headers().add(name, held(text))
        producer.send(made)
    producer.close()
    assert same(kafka, cluster, topic) == 300


@pytest.mark.kafka
def test_transactions_of_several_producers_in_one_partition(kafka, cluster, topic):
    """Some commit, some abort, some write without one; any range, any size of an answer, both
    isolation levels.
    """
    dice, plain = random.Random(5), Producer(kafka.client_conf)
    producers = [
        Producer(kafka.client_conf | {"transactional.id": f"{topic}-{n}"}) for n in range(3)
    ]
    for producer in producers:
        producer.init_transactions(30)
    for step in range(25):
        busy = dice.sample(producers, dice.randrange(1, 4))
        for producer in busy:
            producer.begin_transaction()
        for n in range(dice.randrange(1, 12)):
            writer = dice.choice([*busy, plain])
            writer.produce(topic, f"{step}-{n}".encode() * dice.randrange(1, 40), partition=0)
            writer.flush(30)
        for producer in busy:
            (
                producer.commit_transaction(30)
                if dice.random() < 0.5
                else producer.abort_transaction(30)
            )
    from kafka2pc.spark.source.cluster import Questions

    stable, end = Questions(kafka.client_conf), end_of(kafka, topic)
    while stable.bounds([(topic, 0)])[topic, 0].end < end:
        time.sleep(0.02)
    whole = theirs(kafka, topic)
    assert (
        same(kafka, cluster, topic)
        == len(whole)
        < same(kafka, cluster, topic, committed_only=False)
    )
    for n in range(60):
        begin, behind = sorted(dice.sample(range(end + 1), 2))
        found = ours(cluster, topic, begin, behind, most_bytes=dice.choice([100, 2000, 10**6]))
        assert found == [r for r in whole if begin <= r[0] < behind], (n, begin, behind)


@pytest.mark.kafka
def test_the_time_of_appending(kafka, cluster, topic):
    change = ConfigEntry(
        "message.timestamp.type", "LogAppendTime", incremental_operation=AlterConfigOpType.SET
    )
    resource = ConfigResource(ConfigResource.Type.TOPIC, topic, incremental_configs=[change])
    admin = AdminClient(kafka.client_conf)
    admin.incremental_alter_configs([resource])[resource].result()
    producer = Producer(kafka.client_conf)
    for n in range(50):
        producer.produce(
            topic, str(n).encode(), key=f"k{n % 7}".encode(), partition=0, timestamp=1000
        )
    producer.flush(30)
    assert same(kafka, cluster, topic) == 50 and {
        kind for *_, (kind, _) in ours(cluster, topic, 0, 50)
    } == {2}


@pytest.mark.kafka
@pytest.mark.full
def test_a_leader_that_dies_costs_time_only():
    with LocalKafka(3, progress=None) as kafka, Cluster(kafka.client_conf) as cluster:
        kafka.create_topic("moves")
        producer = Producer(kafka.client_conf | {"batch.size": 20_000})
        for n in range(20_000):
            producer.produce("moves", str(n).encode() * 5, partition=0)
        producer.flush(30)
        found, killed = [], None
        for c in fetch(cluster, "moves", 0, 0, 20_000, FetchSettings(most_bytes=50_000)):
            found += c.values.to_pylist()
            if killed is None and len(found) > 3000:
                killed = find_leaders(cluster, ["moves"])["moves", 0]
                kafka.kill(killed)
        assert killed is not None and found == [str(n).encode() * 5 for n in range(20_000)]
