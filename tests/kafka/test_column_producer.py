"""The columnar engine among failures: against a simulated broker with dice, and real ones."""

import random
import time
import uuid
from dataclasses import asdict, replace
from types import SimpleNamespace as Answer

import numpy as np
import pyarrow as pa
import pytest
from hurried import Hurried
from kafka.future import Future
from kafka_tools import java_clients
from metadata_rows import metadata_rows

from kafka2pc.kafka.cluster_check import check
from kafka2pc.kafka.participant import KafkaParticipant
from kafka2pc.kafka.read.whole_topic import read_ended
from kafka2pc.kafka.records.encoder import CODECS, Section, sections
from kafka2pc.kafka.records.partitioner import Dealer
from kafka2pc.kafka.records.rows import rows_of
from kafka2pc.kafka.wire.cluster import Cluster
from kafka2pc.kafka.wire.connection import NoAnswer
from kafka2pc.kafka.wire.descriptions import describe_transactions
from kafka2pc.kafka.wire.topics import topic_rows
from kafka2pc.kafka.wire.transactions import end_txn
from kafka2pc.kafka.write import column_producer
from kafka2pc.kafka.write import leaders as leaders_module
from kafka2pc.kafka.write import sender as sender_module
from kafka2pc.kafka.write.column_producer import ColumnTransaction
from kafka2pc.kafka.write.lanes import Lane, Pace, Stored, replace_batch
from kafka2pc.kafka.write.sender import Sender
from kafka2pc.kafka.write.settings import without_use
from kafka2pc.local.broker import LocalKafka
from kafka2pc.proof.child_process import until
from kafka2pc.protocol.clock import CLOCK
from kafka2pc.protocol.errors import BadRow, NotAuthorized, PrecommitFailed
from kafka2pc.protocol.messages import Plan, PreparedTxnState
from kafka2pc.protocol.names import new_token

pytestmark = pytest.mark.never_unsteady

# -- a broker of ten lines --


@pytest.fixture(scope="module", autouse=True)
def dice_answer():
    """A broker of this file answers itself."""

    def rows(cluster, topics):
        made_up = getattr(cluster, "leaders", None)
        if not callable(made_up):  # a real cluster
            return topic_rows(cluster, topics)
        return metadata_rows(made_up(topics))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(leaders_module, "topic_rows", rows)
        yield


class Dice:
    """Keeps batches by their sequence, as brokers do; dice decide whether an answer comes."""

    start = 1000  # the offset of the first record
    clock = CLOCK

    def __init__(self, seed, partitions, most=1 << 20):
        self.most, self.batch_bytes = most, {}
        self.dice, self.partitions, self.waiting = random.Random(seed), partitions, []
        self.logs, self.seen = (
            {p: [] for p in range(partitions)},
            {p: [] for p in range(partitions)},
        )

    def leaders(self, topics):
        return {("t", p): 0 for p in range(self.partitions)}

    def highest(self, request):
        return 12

    def metadata(self):
        """The answer to a question that does not wait; sometimes there is none."""
        if self.dice.random() < 0.2:
            return Future().failure(NoAnswer("dice"))
        rows = [Answer(partition_index=p, leader_id=0) for p in range(self.partitions)]
        topic = Answer(name="t", error_code=0, partitions=rows)
        return Future().success(Answer(topics=[topic]))

    def append(self, part):
        """Error code and base offset. A known batch is acknowledged with or without its offset."""
        first = int.from_bytes(part.records[53:57], "big")
        code = self.appended(part, first) if len(part.records) <= self.most else 10
        return code, self.start + first if code == 0 else -1

    def appended(self, part, first):
        count, seen = int.from_bytes(part.records[57:61], "big"), self.seen[part.index]
        if (first, count) in seen[-5:]:
            return 0
        # also for what it has got, but no longer remembers
        if seen and first != sum(c for _, c in seen):
            return 45
        # without a past, any first sequence is taken: as brokers before 4.0 did
        seen.append((first, count))
        self.logs[part.index] += range(first, first + count)
        return 0

    def send(self, request, node, within_ms):
        if node is None:
            return self.metadata()
        future, parts = Future(), request.topic_data[0].partition_data
        fate = self.dice.choice(["good"] * 5 + ["lost before", "lost after", "moved"])
        codes = {
            p.index: (
                (6, -1) if fate == "moved" else self.append(p) if fate != "lost before" else (0, -1)
            )
            for p in parts
        }
        rows = [
            Answer(index=p, error_code=code, base_offset=offset)
            for p, (code, offset) in codes.items()
        ]
        self.waiting.append(
            (
                future,
                (
                    NoAnswer("dice")
                    if "lost" in fate
                    else Answer(responses=[Answer(name="t", partition_responses=rows)])
                ),
            )
        )
        while self.waiting and self.dice.random() < 0.6:
            done, said = self.waiting.pop(0)
            done.failure(said) if isinstance(said, Exception) else done.success(said)
        return future


def answer_all(broker):
    """Every answer that the broker has not given yet."""
    for future, said in broker.waiting:
        future.failure(said) if isinstance(said, Exception) else future.success(said)
    broker.waiting = []


def no_pauses(sender):
    """What was to wait may go now."""
    for lane in sender.lanes.values():
        lane.pace.not_before = 0
    sender.queues.paused = [(0, number, lane) for _, number, lane in sender.queues.paused]
    sender.leaders._not_before = 0


def a_lane(*counts):
    lane = Lane("t", 0, pace=Pace(sure=True))
    for count in counts:
        lane.append(Section("t", 0, count, 0, 0, pa.py_buffer(b"")), PreparedTxnState(1, 0), "none")
    return lane, list(lane.batches)


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        ([(0, 0), (1, 100), (2, 200)], (0, 299)),
        ([(1, 100), (2, 200), (0, 0)], (0, 299)),  # the answer to the first batch was lost
        ([(2, 200), (0, 0), (1, 100)], (0, 299)),
        ([(1, 100), (2, 200), (0, -1)], (-1, -1)),  # DUPLICATE_SEQUENCE_NUMBER has no offset
        ([(0, 0), (1, -1), (2, 200)], (-1, -1)),
        ([(0, -1), (1, 100), (2, 200)], (-1, -1)),
    ],
    ids=str,
)
def test_the_offsets_of_a_partition_are_right_or_unknown(answers, expected):
    lane, batches = a_lane(100, 100, 100)
    for n, offset in answers:
        lane.acknowledge(batches[n], offset)
    assert lane.stored == Stored(300, *expected)


def test_what_is_missing_goes_alone_whatever_arrives_behind_it():
    """A broker remembers five batches: after more of them it would forget this one."""
    lane = Lane("t", 0, pace=Pace(sure=True))
    for _ in range(3):
        lane.append(Section("t", 0, 1, 0, 0, pa.py_buffer(b"")), PreparedTxnState(1, 0), "none")
    missing, second, _ = lane.batches
    lane.send_again(0, 13)
    lane.acknowledge(second, 1)
    now = 1
    assert lane.next_batch(now) is missing
    lane.send(missing)
    assert lane.next_batch(now) is None
    lane.answered(missing)
    lane.acknowledge(missing, 0)
    assert lane.next_batch(now) is not None


def test_the_pauses_of_a_lane_grow_until_a_batch_arrives():
    """A thousand logs that the broker has not opened yet were asked for 70,000 times."""
    lane, now, pauses = Lane("t", 0), 100.0, []
    lane.append(Section("t", 0, 1, 0, 0, pa.py_buffer(b"")), PreparedTxnState(1, 0), "none")
    for _ in range(7):
        for _ in range(3):  # the answers to batches that were flying together
            lane.send_again(now, 6)
        pauses.append(round(lane.pace.not_before - now, 2))
        now = lane.pace.not_before
    lane.acknowledge(lane.batches[0], 0)
    lane.send_again(now, 6)
    assert pauses == [0.05, 0.1, 0.2, 0.4, 0.8, 1.0, 1.0]
    assert lane.pace.not_before == pytest.approx(now + 0.05)


def test_a_batch_that_was_replaced_keeps_no_bytes():
    """It waits, done, until all older batches of its sender are."""
    lane, (batch,) = a_lane(100)
    assert batch.content
    parts = [Section("t", 0, n, 0, 0, pa.py_buffer(b"")) for n in (60, 40)]
    replace_batch(lane, batch, parts, PreparedTxnState(1, 0), "none")
    assert batch.done and not batch.content and all(b.content for b in lane.batches)


def test_a_row_that_is_too_large_for_its_topic_is_named():
    broker = Dice(0, 1, most=250)
    broker.dice.choice = lambda fates: "good"
    sender = Sender(broker, "narrow", PreparedTxnState(1, 0), delivery_ms=60_000)
    sender.leaders.learn(["t"])
    rows = rows_of(pa.RecordBatch.from_pydict({"value": ["a", "x" * 300, "b"]}))
    for section in sections(rows, np.zeros(3, int), "t", 1 << 20):
        sender.put(section)
    with pytest.raises(BadRow, match="topic t refused a record of 300 bytes"):
        for _ in range(100):
            no_pauses(sender)
            answer_all(broker)
            sender.step()


def test_without_an_answer_the_promise_is_not_given_and_the_records_are_named():
    broker = Dice(0, 1)
    broker.send = lambda *_: Future()
    sender = Sender(broker, "silent", PreparedTxnState(1, 0), delivery_ms=200)
    sender.leaders.learn(["t"])
    sender.put(Section("t", 0, 7, 0, 0, pa.py_buffer(b"")))
    with pytest.raises(PrecommitFailed, match="7 of t-0.*200 ms"):
        sender.flush()


def test_time_in_which_the_next_rows_were_not_there_is_no_time_that_the_broker_took():
    broker = Dice(0, 1)
    broker.clock = Hurried()
    broker.dice.choice = lambda fates: "good"
    sender = Sender(broker, "slow rows", PreparedTxnState(1, 0), delivery_ms=1000)
    sender.leaders.learn(["t"])
    for _ in range(4):
        sender.put(Section("t", 0, 5, 0, 0, pa.py_buffer(b"")))
    broker.clock.sleep(300)  # more than a minute of computations outside the engine
    for _ in range(20):
        answer_all(broker)
        sender.step()
    assert broker.logs[0] == list(range(20)) and sender.held == 0


@pytest.mark.parametrize(
    ("codes", "error", "said"),
    [({0: 55, 1: 3}, None, ""), ({0: 55, 1: 29}, NotAuthorized, "topic t: ")],
)
def test_a_partition_that_was_not_tried_is_not_the_cause(monkeypatch, codes, error, said):
    broker = Dice(0, 2)
    answers = [{("t", p): codes[p] for p in range(2)}, {}]
    monkeypatch.setattr(sender_module, "add_partitions", lambda *_: answers[0])
    sender = Sender(broker, "protocol 1", PreparedTxnState(1, 0), implicit_add=False)
    sender.leaders.learn(["t"])
    for p in range(2):
        sender.lanes["t", p] = Lane("t", p, added=False)
    for p in range(2):
        sender.put(Section("t", p, 1, 0, 0, pa.py_buffer(b"")))
    if error:
        with pytest.raises(error, match=said):
            sender.step()
        return
    sender.step()
    answers.pop(0)
    no_pauses(sender)
    sender.step()
    assert all(lane.added for lane in sender.lanes.values())


def test_what_the_engine_has_no_use_for_is_known():
    assert without_use(
        {
            "linger.ms": "5",
            "sasl.password": "x",
            "ssl.ca.location": "y",
            "compression.type": "lz4",
            "retries": "1",
        }
    ) == ["linger.ms", "retries"]


# -- a real one --


@pytest.fixture
def topic(kafka):
    name = f"produce-{uuid.uuid4().hex[:8]}"
    kafka.create_topic(name, partitions=3)
    return name


@pytest.fixture(scope="module")
def cluster(kafka):
    with Cluster(kafka.client_conf) as made:
        yield made


def committed(cluster, conf, topic, *batches, **options):
    name = f"produce-{uuid.uuid4().hex}"
    with ColumnTransaction(cluster, conf, name, 60_000, topic=topic, **options).begin() as txn:
        for batch in batches:
            txn.write(batch)
        txn.flush()
        c = txn.precommit()
    end_txn(cluster, name, c.state, commit=True, version=c.end_txn_version)
    while describe_transactions(cluster, [name])[name].state != "CompleteCommit":
        time.sleep(0.02)
    return c


@pytest.mark.kafka
@pytest.mark.parametrize("codec", CODECS)
def test_broker_and_librdkafka_read_every_compression(kafka, cluster, topic, codec):
    values = [f"{n} {'flight ' * 20}" for n in range(60_000)]
    committed(
        cluster,
        kafka.client_conf | {"compression.type": codec},
        topic,
        pa.RecordBatch.from_pydict({"value": values}),
    )
    assert sorted(r.value.decode() for r in read_ended(kafka.client_conf, topic)) == sorted(values)


@pytest.mark.kafka
def test_both_engines_write_the_same_records(kafka):
    headers = pa.array(
        [[("a", b"1"), ("b", None)], [], None] * 40,
        pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())])),
    )
    batch = pa.RecordBatch.from_pydict(
        {
            "key": pa.array([f"k{n % 17}".encode() if n % 9 else b"" for n in range(120)]),
            "headers": headers,
            "value": pa.array([None if n % 13 == 0 else b"v" * n for n in range(120)], pa.binary()),
            "partition": pa.array([n % 3 if n % 5 == 0 else None for n in range(120)], pa.int32()),
            "timestamp": pa.array(
                [1_700_000_000_123_456 + n for n in range(120)], pa.timestamp("us", "Europe/Paris")
            ),
        }
    )
    found = {}
    for engine in ("columnar", "rows"):
        name = f"engine-{uuid.uuid4().hex[:8]}"
        kafka.create_topic(name, partitions=3)
        store = KafkaParticipant(kafka.client_conf, topic=name, engine=engine)
        with store.begin(
            Plan(query_id=str(uuid.uuid4()), batch_id=0, attempt=0, token=new_token(0, 0))
        ) as txn:
            txn.write(batch)
            txn.flush()
            c = txn.precommit()
        store.commit(c)
        records = read_ended(kafka.client_conf, name)
        found[engine] = (
            [(r.partition, r.offset, r.key, r.value, r.headers, r.timestamp_ms) for r in records],
            [(p.partition, p.records, p.first_offset, p.last_offset) for p in c.partitions],
        )
    assert found["columnar"] == found["rows"] and len(found["rows"][0]) == 120


@pytest.fixture(scope="module")
def javas_partitioner():
    """The partitioner of Kafka's own Java client, called from here."""
    with java_clients() as jvm:
        yield jvm.org.apache.kafka.clients.producer.internals.BuiltInPartitioner.partitionForKey


@pytest.mark.kafka
def test_keys_go_where_javas_own_producer_sends_them(javas_partitioner):
    keys = [bytes(random.Random(n).randbytes(n % 70)) for n in range(300)]
    for partitions in (1, 7, 200):
        ours = Dealer(partitions).deal(pa.array(keys, pa.large_binary()), len(keys))
        assert ours.tolist() == [javas_partitioner(bytearray(k), partitions) for k in keys]


@pytest.mark.kafka
def test_an_answer_that_is_lost_costs_nothing(kafka, cluster, topic, monkeypatch):
    """Every third answer is thrown away after the broker has done its work."""
    sent, real = [], cluster.send

    def send(request, node, within_ms):
        future = real(request, node, within_ms)
        sent.append(future)
        if len(sent) % 3:
            return future
        lost = Future()
        future.add_both(lambda _: lost.failure(NoAnswer("thrown away")))
        return lost

    monkeypatch.setattr(cluster, "send", send)
    monkeypatch.setattr(column_producer, "GATHER_BYTES", 3_000)  # a request for each batch
    rows = [
        pa.RecordBatch.from_pydict({"value": [str(n) for n in range(start, start + 1000)]})
        for start in range(0, 30_000, 1000)
    ]
    c = committed(cluster, kafka.client_conf, topic, *rows)
    assert len(sent) > 10 and c.records == 30_000
    found = read_ended(kafka.client_conf, topic)
    assert sorted(int(r.value) for r in found) == list(range(30_000))
    offsets = {
        p.partition: [r.offset for r in found if r.partition == p.partition] for p in c.partitions
    }
    assert {p.partition: (p.first_offset, p.last_offset) for p in c.partitions} == {
        p: (min(o), max(o)) for p, o in offsets.items()
    }


@pytest.mark.kafka
def test_a_topic_of_many_partitions_and_rows_of_many_topics(kafka, cluster):
    names = [f"many-{uuid.uuid4().hex[:8]}" for _ in range(3)]
    for name in names:
        kafka.create_topic(name, partitions=20)
    batch = pa.RecordBatch.from_pydict(
        {"topic": [names[n % 3] for n in range(3000)], "value": [str(n) for n in range(3000)]}
    )
    c = committed(cluster, kafka.client_conf, None, batch)
    assert {p.topic for p in c.partitions} == set(names) and c.records == 3000
    for n, name in enumerate(names):
        assert sorted(int(r.value) for r in read_ended(kafka.client_conf, name)) == list(
            range(n, 3000, 3)
        )


@pytest.mark.kafka
def test_a_row_may_bring_its_own_time(kafka, cluster, topic):
    committed(
        cluster,
        kafka.client_conf,
        topic,
        pa.RecordBatch.from_pydict(
            {
                "value": ["a"],
                "timestamp": pa.array([1_700_000_000_123_456], pa.timestamp("us", "UTC")),
            }
        ),
    )
    assert [r.timestamp_ms for r in read_ended(kafka.client_conf, topic)] == [1_700_000_000_123]


# as long as its markers are on the way, the coordinator gives no clear answer
RUNNING = ("Ongoing", "PrepareEpochFence", "PrepareAbort")


@pytest.mark.kafka
@pytest.mark.full
def test_a_transaction_without_a_timeout_outlives_one_with_it(kafka, cluster, topic):
    """KIP-939: both ask for a second of timeout. The one without it is the older one."""
    held = {}
    for two_phase in (True, False):
        name = f"timeless-{two_phase}-{uuid.uuid4().hex[:8]}"
        with ColumnTransaction(
            cluster, kafka.client_conf, name, 1000, topic=topic, two_phase=two_phase
        ).begin() as txn:
            txn.write(pa.RecordBatch.from_pydict({"value": [str(two_phase)]}))
            txn.flush()
            held[two_phase] = txn.precommit()
    timed = held[False].transactional_id
    state = lambda: describe_transactions(cluster, [timed])[timed].state
    until(lambda: state() not in RUNNING, "the broker has ended the one with a timeout", 60)
    end = lambda c: end_txn(cluster, c.transactional_id, c.state, commit=True, version=5).value
    assert {kind: (end(c), c.timeout_ms) for kind, c in held.items()} == {
        False: ("refused", 1000),
        True: ("done", None),
    }


@pytest.mark.kafka
def test_what_the_broker_offers_is_found_out_and_said(kafka):
    assert check(kafka.client_conf, two_phase="auto").two_phase is True
    assert check(kafka.client_conf, two_phase="off").two_phase is False
    assert check(kafka.client_conf, two_phase="auto", timeout_ms=60_000).two_phase is False


@pytest.mark.kafka
@pytest.mark.parametrize(
    ("version", "protocol", "two_phase"),
    [
        pytest.param("3.6.2", 3, False, marks=pytest.mark.full),
        pytest.param("3.9.1", 4, False, marks=pytest.mark.nightly),
        pytest.param("4.0.1", 5, False, marks=pytest.mark.nightly),
        pytest.param("4.1.1", 5, True, marks=pytest.mark.nightly),
        pytest.param("4.4.0", 5, True, marks=pytest.mark.nightly),
    ],
)
def test_older_and_newer_brokers(version, protocol, two_phase):
    """Before 4.0 each partition is added to the transaction first; KIP-939 comes with 4.1."""
    with LocalKafka(version=version, progress=None) as kafka:
        kafka.create_topic("t", partitions=3)
        store = KafkaParticipant(
            kafka.client_conf,
            topic="t",
            **asdict(check(kafka.client_conf, topics=["t"], two_phase="auto")),
        )
        assert (store.end_txn_version, store.two_phase) == (protocol, two_phase)
        plan = Plan(query_id=str(uuid.uuid4()), batch_id=0, attempt=0, token=new_token(0, 0))

        def written(word):
            with store.begin(plan) as txn:
                values = [f"{word} {n}" for n in range(3000)]
                txn.write(pa.RecordBatch.from_pydict({"value": values}))
                txn.flush()
                return txn.precommit()

        def end(c, verb):
            assert getattr(store, verb)(c).value == "done"
            name = c.transactional_id
            found = lambda: describe_transactions(store.cluster, [name])[name].state
            until(lambda: found().startswith("Complete"), "the markers")
            return found(), replace(c, transactional_id="forgotten")

        lost = written("lost")
        committed, aborted = end(written("kept"), "commit"), end(lost, "abort")
        again = end(store.write_again([lost], plan), "commit")
        ends = [state for state, _ in (committed, aborted, again)]
        assert ends == ["CompleteCommit", "CompleteAbort", "CompleteCommit"]
        found = store.final([c for _, c in (committed, aborted, again)])
        assert [s.value for s in found.values()] == ["committed", "aborted", "committed"]
        assert sorted(r.value.decode() for r in read_ended(kafka.client_conf, "t")) == sorted(
            f"{word} {n}" for n in range(3000) for word in ("kept", "lost")
        )
        store.close()


def test_what_a_batch_costs_does_not_depend_on_the_number_of_partitions(monkeypatch):
    """Each put looked at all lanes four times: 12 million looks for these batches."""
    looks, original = [], Lane.next_batch

    def look(lane, now):
        looks.append(lane)
        return original(lane, now)

    monkeypatch.setattr(Lane, "next_batch", look)
    broker = Dice(0, 1000)
    broker.dice.choice = lambda fates: "good"
    sizes, send = [], broker.send
    broker.send = lambda request, node, within_ms: (
        sizes.append(len(request.topic_data[0].partition_data)) or send(request, node, within_ms)
    )
    sender = Sender(broker, "wide", PreparedTxnState(1, 0), delivery_ms=60_000)
    sender.leaders.learn(["t"])
    for _ in range(3):
        for p in range(1000):
            sender.put(Section("t", p, 1, 0, 0, pa.py_buffer(b"")))
        sender.step()
    while sender.held:
        answer_all(broker)
        sender.step()
    assert broker.logs == {p: [0, 1, 2] for p in range(1000)}
    assert len(looks) < 5 * 3000
    # a broker opens a new log for each batch, and must answer in time
    assert max(sizes) == sender_module.REQUEST_LANES and sum(sizes) == 3000
