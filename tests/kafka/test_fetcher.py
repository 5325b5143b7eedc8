"""Ranges of partitions: the same records as another consumer reads, from every client; each failure
is asked again, or raised with its offset.
"""

import random
import re
import struct
import time
import uuid
from collections import Counter
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
from kafka.net.transport import KafkaTCPTransport
from kafka.protocol.consumer.fetch import FetchRequest
from kafka_fixtures import records
from py4j.java_gateway import GatewayParameters, JavaGateway, launch_gateway

from kafka2pc.kafka.read.fetcher import NotFetched, RangesFetch, Wanted, fetch
from kafka2pc.kafka.read.settings import FetchSettings, fetch_settings
from kafka2pc.kafka.records.encoder import HEADER_BYTES, record_batch, sections
from kafka2pc.kafka.records.rows import rows_of
from kafka2pc.kafka.wire import error_codes as codes
from kafka2pc.kafka.wire.cluster import Cluster
from kafka2pc.kafka.wire.connection import NoAnswer, NotSent
from kafka2pc.kafka.wire.topics import topic_rows
from kafka2pc.local.jars import fetch_kafka
from kafka2pc.proof.child_process import until
from kafka2pc.protocol.clock import CLOCK
from kafka2pc.protocol.errors import BrokerUnreachable, NotAuthorized, RecordsBroken, UnknownFormat
from kafka2pc.protocol.messages import PreparedTxnState

pytestmark = pytest.mark.never_unsteady

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


def metadata(name, leaders):
    """The answer of a broker of this file: who leads each partition of the topic."""
    rows = [Answer(partition_index=p, leader_id=node) for p, node in enumerate(leaders)]
    row = Answer(error_code=0, name=name, topic_id=None, partitions=rows)
    return Answer(topics=[row])


def answered(parts):
    """The answer to a Fetch request for the topic t."""
    return Answer(error_code=0, responses=[Answer(topic="t", topic_id=None, partitions=parts)])


def part_of(code, content, partition=0):
    return Answer(
        partition_index=partition,
        error_code=code,
        records=content,
        preferred_read_replica=-1,
        aborted_transactions=None,
    )


class Asked:
    """A broker of this file also says who leads."""

    clock = CLOCK

    def highest(self, request):
        return 0

    def persist(self, once):
        return once()

    def ask(self, request):
        return metadata("t", self.leaders())


class Dice(Asked):
    """Serves the batches of some partitions from where it is asked, in the order of the request and
    up to the limits of it, cut off there as a broker does; loses requests, sends nothing, moves
    partitions away.
    """

    def __init__(self, seed, ends):
        self.dice = random.Random(seed)
        self.logs = [batches(self.dice, end) for end in ends]
        self.nodes = [self.dice.randrange(2) for _ in ends]

    def leaders(self):
        if self.dice.random() < 0.1:
            raise BrokerUnreachable("dice")
        return [-1 if self.dice.random() < 0.2 else node for node in self.nodes]

    def send(self, request, node, within_ms):
        future = Future()
        fate = self.dice.choice(["good"] * 6 + ["not sent", "lost", "empty", "moved", "throttled"])
        if fate == "throttled":
            return future.success(THROTTLED)
        if fate in ("not sent", "lost"):
            return future.failure(NotSent("dice") if fate == "not sent" else NoAnswer("dice"))
        if fate == "moved":
            moves = self.dice.randrange(len(self.nodes))
            self.nodes[moves] = 1 - self.nodes[moves]
        parts, left = [], request.max_bytes if fate == "good" else 0
        for wanted in request.topics[0].partitions:
            here = self.nodes[wanted.partition] == node
            content = self.content(wanted, left, not any(p.records for p in parts)) if here else b""
            left = max(0, left - len(content))
            parts.append(part_of(0 if here else 6, content, wanted.partition))
        return future.success(answered(parts))

    def content(self, wanted, left, first):
        """KIP-74: at least one whole batch for the first partition that has any, otherwise nothing
        if its first batch is larger than the limit.
        """
        log = [b for _, behind, b in self.logs[wanted.partition] if behind > wanted.fetch_offset]
        limit = min(left, wanted.partition_max_bytes)
        if not log or not left or (limit < len(log[0]) and not first):
            return b""
        return b"".join(log)[: max(limit, len(log[0]))]


@given(st.integers(0, 10**6), st.lists(st.integers(1, 200), min_size=1, max_size=5), st.data())
@settings(max_examples=100, deadline=None)
def test_whatever_is_lost_or_moved_every_record_comes_once_and_in_order(seed, ends, data):
    broker = Dice(seed, ends)
    wanted = []
    for partition, log in enumerate(broker.logs):
        begin = data.draw(st.integers(0, log[-1][1]))
        wanted.append(Wanted("t", partition, begin, data.draw(st.integers(begin, log[-1][1]))))
    limits = {"most_bytes": data.draw(st.sampled_from([1, 300, 2_000, 4 << 20]))}
    found = {partition: [] for partition in range(len(ends))}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kafka2pc.kafka.read.fetcher._PAUSE_S", 0)
        for n, c in fetch(broker, wanted, FetchSettings(**limits)):
            found[n] += zip(c.offsets.tolist(), map(int, c.values.to_pylist()), strict=True)
    for w in wanted:
        assert found[w.partition] == [
            (o, o)
            for first, behind, _ in broker.logs[w.partition]
            for o in range(first, behind)
            if w.begin <= o < w.end
        ]


class Always(Asked):
    """One answer. `code` is the partition's, `content` its records; or `future` is the answer."""

    def __init__(self, code=0, content=b"", future=None):
        self.code, self.content, self.future = code, content, future

    def leaders(self):
        return [0]

    def send(self, request, node, within_ms):
        return self.future or Future().success(answered([part_of(self.code, self.content)]))


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
    found = fetch(broker, [Wanted("t", 0, 5, 9)], FetchSettings(patience_ms=200, wait_ms=50))
    if error is NotFetched:
        ((number, wrong),) = found
        assert number == 0 and isinstance(wrong, NotFetched) and re.search(said, str(wrong))
        return
    with pytest.raises(error, match=said):
        list(found)


class Disagreeing(Asked):
    """Two partitions, each at a node of its own. Node 1 does not know the topic's id at first, and
    the second look at the metadata names an older topic.
    """

    def __init__(self):
        self.looks, self.refused = 0, False

    def ask(self, request):
        self.looks += 1
        answer = metadata("t", [0, 1])
        answer.topics[0].topic_id = OLDER if self.looks == 2 else NEWER
        return answer

    def send(self, request, node, within_ms):
        (wanted,) = request.topics[0].partitions
        at = wanted.fetch_offset
        if node == 1 and not self.refused:
            self.refused = True
            return Future().success(answered([part_of(codes.UNKNOWN_TOPIC_ID, b"", 1)]))
        content = struct.pack(">q", at) + one[8:]
        return Future().success(answered([part_of(0, content, wanted.partition)]))


OLDER, NEWER = uuid.UUID(int=1), uuid.UUID(int=2)


def test_a_range_that_was_given_up_is_not_asked_for_again(monkeypatch):
    monkeypatch.setattr("kafka2pc.kafka.read.fetcher._PAUSE_S", 0)
    found = list(
        fetch(
            Disagreeing(),
            [Wanted("t", 0, 0, 6, NEWER), Wanted("t", 1, 0, 4, NEWER)],
            FetchSettings(),
        )
    )
    (given_up,) = [outcome for number, outcome in found if number == 1]
    assert given_up.code == codes.UNKNOWN_TOPIC_ID
    assert [o for number, c in found if number == 0 for o in c.offsets] == list(range(6))


def test_a_range_is_asked_for_as_its_settings_say():
    conf = {
        "fetch.wait.max.ms": "7",
        "fetch.min.bytes": "8",
        "max.partition.fetch.bytes": "900",
        "fetch.max.bytes": "100",
        "client.rack": "a",
    }
    assert fetch_settings(conf, 5) == FetchSettings(
        wait_ms=7, min_bytes=8, most_bytes=100, partition_bytes=100, rack="a", patience_ms=5
    )
    assert fetch_settings({"max.partition.fetch.bytes": "900"}) == FetchSettings(
        partition_bytes=900
    )
    assert fetch_settings({"max.partition.fetch.bytes": "9000000"}) == FetchSettings(
        partition_bytes=9_000_000, most_bytes=9_000_000
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
    wanted = [Wanted(topic, 0, begin, end)]
    for _, c in fetch(cluster, wanted, FetchSettings(**how), headers=True):
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

    with Questions(kafka.client_conf) as ask:
        return ask.ends([(topic, 0)], committed=False)[topic, 0]


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

    end = end_of(kafka, topic)
    with Questions(kafka.client_conf) as ask:
        until(lambda: ask.ends([(topic, 0)])[topic, 0] == end, "the markers are written", 60)
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


# -- topics that are created again --


def topic_id(cluster, topic):
    (row,) = topic_rows(cluster, [topic])
    return row.topic_id


def create_again(kafka, cluster, topic):
    admin = AdminClient(kafka.client_conf)
    admin.delete_topics([topic])[topic].result()
    while topic_rows(cluster, [topic])[0].partitions:
        time.sleep(0.05)
    kafka.create_topic(topic)


def send(kafka, topic, count, size=10, partition=0, **conf):
    """Send rows in batches that are full, however slow this process is."""
    producer = Producer({**kafka.client_conf, "linger.ms": 10_000, **conf})
    for n in range(count):
        producer.produce(topic, str(n).encode().rjust(size), partition=partition)
    producer.flush(30)


@pytest.mark.kafka
def test_a_topic_that_is_created_again_while_it_is_read_gives_no_rows(kafka, cluster, topic):
    """The leader is known when it happens, so only the id in the Fetch request tells."""
    send(kafka, topic, 2_000, **{"batch.size": 2_000})
    wanted = [Wanted(topic, 0, 0, 2_000, topic_id(cluster, topic))]
    asking = RangesFetch(cluster, wanted, FetchSettings(most_bytes=2_000))
    asking.ask()
    asking.take()
    create_again(kafka, cluster, topic)
    send(kafka, topic, 2_000)
    outcomes = []
    while asking.parts:
        asking.ask()
        outcomes += asking.take()
    ((_, wrong),) = outcomes
    assert isinstance(wrong, NotFetched)
    assert wrong.code == codes.UNKNOWN_TOPIC_ID and 0 < wrong.offset < 2_000


@pytest.mark.kafka
def test_a_topic_that_was_created_again_before_it_is_read_gives_no_rows(kafka, cluster, topic):
    send(kafka, topic, 5)
    old = topic_id(cluster, topic)
    create_again(kafka, cluster, topic)
    send(kafka, topic, 50)
    ((_, wrong),) = fetch(cluster, [Wanted(topic, 0, 0, 5, old)], FetchSettings())
    assert isinstance(wrong, NotFetched) and wrong.code == codes.UNKNOWN_TOPIC_ID
    ((_, rows),) = fetch(cluster, [Wanted(topic, 0, 0, 5)], FetchSettings())
    assert len(rows) == 5


@pytest.mark.kafka
@pytest.mark.parametrize("highest", [12, 13])
def test_a_broker_that_knows_no_topic_ids_in_fetch_is_asked_by_name(kafka, topic, highest):
    send(kafka, topic, 5)
    with Cluster(kafka.client_conf) as cluster:
        cluster.wire.manager.broker_version_data.api_versions[FetchRequest.API_KEY] = (4, highest)
        wanted = [Wanted(topic, 0, 0, 5, topic_id(cluster, topic))]
        with pytest.MonkeyPatch.context() as patch:
            versions = []
            encode = FetchRequest.encode
            patch.setattr(
                FetchRequest,
                "encode",
                lambda self, *a, **k: versions.append(self.version) or encode(self, *a, **k),
            )
            ((_, rows),) = fetch(cluster, wanted, FetchSettings())
        assert len(rows) == 5 and set(versions) == {highest}


# -- how much is sent --


@pytest.fixture
def received(cluster, monkeypatch):
    """How many bytes came over the connections of `cluster`: call it with a function."""
    sizes, receive = [], KafkaTCPTransport._sock_recv

    def counted(self):
        content, error = receive(self)
        if self._net is cluster.wire.net:
            sizes.append(len(content))
        return content, error

    monkeypatch.setattr(KafkaTCPTransport, "_sock_recv", counted)

    def count(call):
        sizes.clear()
        return call(), sum(sizes)

    return count


def wire_bytes(cluster, wanted):
    """The bytes of the batches of a range, and of the largest one."""
    asking = RangesFetch(cluster, [wanted], FetchSettings())
    sizes = []
    while asking.parts:
        asking.ask()
        for _, piece in asking.take():
            sizes += [HEADER_BYTES + b.content.size for b in piece.batches if b.offset < wanted.end]
    return sum(sizes), max(sizes)


@pytest.mark.kafka
@pytest.mark.parametrize("size", [10, 100, 3_000])
def test_little_more_is_sent_than_the_ranges_hold(kafka, cluster, received, size):
    """At most half as much again, and a batch for each partition. Far more is behind each range."""
    topic = f"fetch-{uuid.uuid4().hex[:8]}"
    kafka.create_topic(topic, partitions=4)
    for partition in range(4):
        send(kafka, topic, 3_000, size, partition, **{"batch.size": 10_000})
    for begin, end in (0, 100), (50, 60), (0, 1_000), (2_000, 2_001):
        ranges = [Wanted(topic, p, begin, end) for p in range(4)]
        list(fetch(cluster, [Wanted(topic, 0, 0, 1)], FetchSettings()))  # open the connection
        read = lambda: sum(len(c) for _, c in fetch(cluster, ranges, FetchSettings()))  # noqa: B023
        rows, sent = received(read)
        assert rows == 4 * (end - begin)
        needed = [wire_bytes(cluster, w) for w in ranges]
        least = sum(whole for whole, _ in needed)
        most = sum(1.5 * whole + largest for whole, largest in needed)
        metadata = 2_000
        assert least <= sent <= most + metadata, (begin, end)


@pytest.mark.kafka
def test_many_partitions_are_read_by_few_requests(kafka, cluster):
    """Also where a range is in two batches, as after a pause of the producer."""
    topic = f"fetch-{uuid.uuid4().hex[:8]}"
    kafka.create_topic(topic, partitions=40)
    for partition in range(40):
        send(kafka, topic, 20, partition=partition, **{"batch.num.messages": 15})
    ranges = [Wanted(topic, p, 0, 20) for p in range(40)]
    with pytest.MonkeyPatch.context() as patch:
        sent, send_one = [], cluster.send
        patch.setattr(cluster, "send", lambda *a: sent.append(a) or send_one(*a))
        found = list(fetch(cluster, ranges, FetchSettings()))
    rows = Counter()
    for n, columns in found:
        rows[n] += len(columns)
    assert rows == dict.fromkeys(range(40), 20)
    assert len(sent) <= 4
