"""Kafka as a participant: the same guarantees as the store in memory; rows, rights, lost answers
and silent brokers, each with its own error and a limit of time.
"""

import copy
import logging
import os
import pickle
import re
import socket
import time
import uuid
from dataclasses import asdict, replace
from datetime import datetime, timezone
from types import SimpleNamespace
from unittest.mock import patch

import psutil
import pyarrow as pa
import pytest
from confluent_kafka.admin import (
    AclBinding,
    AclOperation,
    AclPermissionType,
    AdminClient,
    ResourcePatternType,
    ResourceType,
)
from forked import ended_after
from kafka_fixtures import back_at_work, records, values
from marks import first_of
from participant_suite import (
    DONE,
    DURABLE,
    REQUIRED,
    At,
    a_plan,
    ask,
    few_of,
    precommit_rows,
)

from kafka2pc.kafka import client as client_module
from kafka2pc.kafka import participant as participant_module
from kafka2pc.kafka import transaction_states
from kafka2pc.kafka.cluster_check import check
from kafka2pc.kafka.participant import KafkaParticipant
from kafka2pc.kafka.read.whole_topic import read_ended, read_topic
from kafka2pc.kafka.wire import transactions as requests
from kafka2pc.kafka.wire.cluster import Cluster
from kafka2pc.kafka.wire.connection import TooOld
from kafka2pc.kafka.wire.descriptions import (
    DescribedTransaction,
    ListedTransaction,
    list_transactions,
)
from kafka2pc.kafka.wire.topics import describe_topics
from kafka2pc.kafka.wire.transactions import NameWornOut, init_producer_id
from kafka2pc.kafka.write import row_producer
from kafka2pc.kafka.write import sender as sender_module
from kafka2pc.kafka.write.column_producer import ColumnTransaction
from kafka2pc.kafka.write.deliveries import Reports
from kafka2pc.kafka.write.row_producer import RowTransaction, RowWriter
from kafka2pc.kafka.write.sender import Sender
from kafka2pc.kafka.write.settings import DELIVERY_MS
from kafka2pc.local import broker as broker_module
from kafka2pc.local.broker import LocalKafka
from kafka2pc.proof.both_levels import read_both
from kafka2pc.proof.checker import inconsistent_offsets
from kafka2pc.proof.child_process import until
from kafka2pc.proof.slow_network import INIT_PRODUCER_ID, SlowNetwork
from kafka2pc.protocol.clock import Clock
from kafka2pc.protocol.driver import Driver, Policy
from kafka2pc.protocol.errors import (
    BadOption,
    BadRow,
    BrokerUnreachable,
    NotAuthorized,
    PrecommitFailed,
    Refused,
    StaleCheckpoint,
    UnclearAnswer,
)
from kafka2pc.protocol.history import History
from kafka2pc.protocol.log.slots import MemoryLog
from kafka2pc.protocol.messages import Committable, PreparedTxnState
from kafka2pc.protocol.participant import Description, Outcome
from kafka2pc.protocol.phases import restore
from kafka2pc.protocol.phases.commit import commit
from kafka2pc.protocol.phases.precommit import precommit
from kafka2pc.protocol.policies import parallel, retry_unknown
from kafka2pc.protocol.states import TxnState

pytestmark = pytest.mark.never_unsteady

QUIET = {"logger": logging.Logger("librdkafka", logging.CRITICAL + 1)}


def rows(*texts):
    return pa.RecordBatch.from_pydict({"value": pa.array(texts, pa.string())})


@pytest.fixture
def topic(kafka, request):
    """A topic of this test's own, two partitions."""
    name = f"participant-{uuid.uuid4().hex[:8]}"
    kafka.create_topic(name, partitions=2)
    return name


ENGINES = ("columnar", "rows")


def opened(kafka, topic, engine, gated=()):
    return KafkaParticipant(
        kafka.client_conf | QUIET,
        topic=topic,
        engine=engine,
        gated=gated,
        **asdict(check(kafka.client_conf, topics=[topic])),
    )


@pytest.fixture(params=ENGINES)
def store(request, kafka, topic):
    participant = opened(kafka, topic, request.param)
    yield participant
    participant.close()


def settled(store):
    """Readers see an end some milliseconds after the answer."""
    while list_transactions(store.cluster, states=("PrepareCommit", "PrepareAbort")):
        time.sleep(0.02)


# -- the promises of every participant --


@pytest.mark.kafka
@pytest.mark.parametrize("promise", REQUIRED + DURABLE, ids=lambda promise: promise.__name__)
def test_kafka_keeps(promise, kafka, topic):
    check_kafka(promise, "columnar", kafka, topic)


# The engines differ in how rows are written.
@pytest.mark.kafka
@pytest.mark.parametrize("promise", few_of(REQUIRED + DURABLE))
def test_kafka_keeps_by_the_row_engine(promise, kafka, topic):
    check_kafka(promise, "rows", kafka, topic)


def check_kafka(promise, engine, kafka, topic):
    def seen():
        # a promise looks while it holds something open
        settled(store)
        return values(kafka, topic, still_open=True)

    store = opened(kafka, topic, engine, gated=(topic,))
    promise(At(store, seen, lambda texts: rows(*texts)))
    store.close()


@pytest.mark.parametrize(
    ("offsets", "expected"),
    [
        ([5, 6, 7], (5, 7)),
        ([6, 7, 5], (5, 7)),
        ([5, None, 7], (-1, -1)),
        ([None, 6], (-1, -1)),
        ([5, 6, None], (-1, -1)),
    ],
)
def test_the_row_engine_counts_offsets_that_are_right_or_unknown(offsets, expected):
    """librdkafka has no offset for a record that the broker reports as a duplicate."""
    reports = Reports()
    for offset in offsets:
        reports.on_delivery(
            None,
            SimpleNamespace(
                topic=lambda: "t", partition=lambda: 0, offset=lambda offset=offset: offset
            ),
        )
    [p] = reports.partitions()
    assert (p.records, p.first_offset, p.last_offset) == (len(offsets), *expected)


# -- other processes --


@pytest.mark.kafka
def test_a_foreign_name_is_not_in_doubt_even_if_it_begins_like_ours(store):
    plan = a_plan()
    with RowTransaction(
        store.conf, f"kafka2pc-{plan.query_id}-by-hand", 60_000, topic=store.topic
    ).begin() as txn:
        txn.write(rows("a"))
        txn.flush()
        c = txn.precommit()
    assert len(list_transactions(store.cluster, f"kafka2pc-{plan.query_id}-")) == 1
    assert store.in_doubt(plan.query_id) == store.open_beside(a_plan().query_id) == []
    assert store.abort(c) is DONE


@pytest.mark.kafka
def test_what_other_queries_of_the_prefix_have_open_in_the_topic_is_listed(kafka, topic):
    """With the time that is left. Without a topic: in all topics."""
    store, dead, new = opened(kafka, topic, "columnar"), a_plan(), a_plan()
    other = f"{topic}-other"
    kafka.create_topic(other)
    left = [
        precommit_rows(At(each, list, lambda texts: rows(*texts)), dead, "a")
        for each in (store, in_topic(store, other), in_topic(store.under("kafka2pc-more"), topic))
    ]
    [found] = store.open_beside(new.query_id)
    assert (found.transactional_id, found.query_id, found.places) == (
        left[0].transactional_id,
        dead.query_id,
        (topic,),
    )
    assert 0 <= found.age_ms < 60_000 and found.left_ms < store.timeout_ms
    assert {t.places for t in in_topic(store, None).open_beside(new.query_id)} >= {
        (topic,),
        (other,),
    }
    assert store.open_beside(dead.query_id) == []
    assert [store.abort(c) for c in left] == [DONE] * 3
    store.close()


def in_topic(store, topic):
    twin = copy.copy(store)
    twin.topic = topic
    return twin


@pytest.mark.kafka
def test_pickled_it_carries_settings_and_no_connection(kafka, topic):
    store = KafkaParticipant(kafka.client_conf, topic=topic, history=History())
    assert store.store_id()  # opens a connection
    copy = pickle.loads(pickle.dumps(store))
    assert (copy.conf, copy.topic, copy.store_id()) == (store.conf, topic, store.store_id())
    for participant in (store, copy):
        participant.close()


@pytest.mark.full
@pytest.mark.kafka
def test_a_cluster_that_was_replaced_at_its_address_is_noticed(monkeypatch):
    first = LocalKafka().start()
    store = KafkaParticipant(first.client_conf, **asdict(check(first.client_conf)))
    first.stop()
    ports = [port for pair in first.ports for port in pair]
    monkeypatch.setattr(broker_module, "free_ports", lambda count: ports[:count])
    with LocalKafka() as second:
        assert second.bootstrap_servers == first.bootstrap_servers
        assert store.store_id() == first.cluster_id
        opened = store.cluster
        store.look_again()
        assert store.store_id() == second.cluster_id
        assert store.cluster is not opened, "it knows the versions of the first cluster"
        store.close()


@pytest.mark.kafka
def test_after_a_fork_the_child_opens_its_own_connections(store):
    store.cluster  # noqa: B018  (opens the parent's)
    plan = a_plan()
    with store.begin(plan) as txn:
        txn.write(rows("a"))
        txn.flush()
        c = txn.precommit()
    child = os.fork()
    if not child:
        with ended_after(20):  # the parent's connections would wait for ever
            assert store.commit(c) is DONE
    assert os.waitpid(child, 0)[1] == 0
    assert store.describe([c])[0].state is TxnState.COMMITTED


@pytest.mark.kafka
def test_thirty_threads_open_one_connection(kafka, topic, monkeypatch):
    opened, real = [], client_module.Cluster
    monkeypatch.setattr(
        client_module,
        "Cluster",
        lambda conf, **limits: opened.append(conf) or time.sleep(0.1) or real(conf, **limits),
    )
    store = KafkaParticipant(kafka.client_conf, topic=topic)
    assert len(set(parallel(30)(lambda _: id(store.cluster), range(30)))) == len(opened) == 1
    store.close()


def threads_and_connections(kafka):
    """The threads of this process, and its connections to `kafka`. (All open files would count the
    attempts of an earlier test's client, whose broker is gone.)
    """
    process = psutil.Process()
    port = int(kafka.bootstrap_servers.rpartition(":")[2])
    remotes = [c.raddr for c in process.net_connections("tcp") if c.raddr]
    return process.num_threads(), len([r for r in remotes if r.port == port])


@pytest.mark.kafka
@pytest.mark.parametrize("store", first_of(ENGINES), indirect=True)
def test_clients_are_let_go_with_their_threads_and_their_transactions_stay(kafka, store):
    plan = a_plan()
    threads, connections = threads_and_connections(kafka)
    for n in range(30):
        with store.begin(plan) as txn:
            txn.write(rows(str(n)))
            txn.flush()
            txn.precommit()
    del txn
    assert len(store.in_doubt(plan.query_id)) == 30

    def are_few():
        now = threads_and_connections(kafka)
        return now[0] <= threads + 5 and now[1] <= connections + 3

    until(are_few, "all threads and connections but a few have ended")
    assert parallel()(store.abort, store.in_doubt(plan.query_id)) == [DONE] * 30


@pytest.mark.kafka
def test_end_txn_version_4_leaves_the_epoch_and_describe_knows(kafka, topic, store):
    with store.begin(a_plan()) as txn:
        txn.write(rows("a"))
        txn.flush()
        c = replace(txn.precommit(), end_txn_version=4)
    assert ask(store.commit, c) is DONE and ask(store.commit, c) is DONE
    assert store.describe([c])[0].state is TxnState.COMMITTED


# -- rows --


def written(store, batch, topic=None):
    store.topic = topic
    with store.begin(a_plan()) as txn:
        txn.write(batch)
        txn.flush()
        c = txn.precommit()
    assert store.commit(c) is DONE
    settled(store)
    return c


@pytest.mark.kafka
def test_columns_mean_what_they_mean_in_sparks_sink(kafka, topic, store):
    headers = pa.array(
        [[{"key": "h", "value": b"1"}, {"key": "h", "value": None}], [], None],
        pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())])),
    )
    written(
        store,
        pa.RecordBatch.from_pydict(
            {
                "headers": headers,
                "partition": pa.array([1, None, 0], pa.int32()),
                "topic": [topic] * 3,
                "key": pa.array([b"k", None, b""]),
                "value": pa.array(["späte", None, "c"]),
            }
        ),
    )
    found = {m.value(): m for m in records(kafka, topic)}
    assert {m.value(): m.key() for m in found.values()} == {
        "späte".encode(): b"k",
        None: None,
        b"c": b"",
    }
    assert (
        found["späte".encode()].headers() == [("h", b"1"), ("h", None)]
        and found[None].headers() is None
    )
    assert (found["späte".encode()].partition(), found[b"c"].partition()) == (1, 0)


@pytest.mark.kafka
def test_a_text_that_is_not_utf_8_is_written_as_it_is(kafka, topic, store):
    """Spark's `cast(value as string)` keeps such bytes."""
    text = pa.array([b"bad\xff\xfe"]).view(pa.string())
    written(store, pa.RecordBatch.from_pydict({"key": text, "value": text}), topic)
    (found,) = read_topic(kafka.client_conf, topic)
    assert (found.key, found.value) == (b"bad\xff\xfe",) * 2


@pytest.mark.kafka
def test_the_option_topic_wins_over_the_column(kafka, topic, store):
    c = written(
        store,
        pa.RecordBatch.from_pydict({"value": ["a", "b"], "topic": ["no-such-topic", None]}),
        topic=topic,
    )
    assert {p.topic for p in c.partitions} == {topic} and sorted(values(kafka, topic)) == ["a", "b"]


@pytest.mark.kafka
@pytest.mark.parametrize(
    "kind",
    [
        pa.large_string(),
        pa.large_binary(),
        # pyarrow below 16 has no views
        *(getattr(pa, name)() for name in ("string_view", "binary_view") if hasattr(pa, name)),
        pa.dictionary(pa.int32(), pa.string()),
        pa.binary(3),
    ],
)
def test_every_arrow_form_of_bytes_and_text(kafka, topic, store, kind):
    texts = [b"abc", None, b"abc"] if "binary" in str(kind) else ["abc", None, "abc"]
    batch = pa.RecordBatch.from_pydict({"value": pa.array(texts, kind)})
    written(store, batch, topic)
    assert sorted(m.value() or b"" for m in records(kafka, topic)) == [b"", b"abc", b"abc"]


@pytest.mark.kafka
def test_a_full_queue_loses_nothing_and_the_committable_names_all_offsets(kafka, topic):
    store = KafkaParticipant(
        kafka.client_conf | {"queue.buffering.max.messages": "500", "linger.ms": "1"}, topic=topic
    )
    with store.begin(a_plan()) as txn:
        for start in range(0, 30_000, 10_000):
            txn.write(rows(*map(str, range(start, start + 10_000))))
        txn.flush()
        c = txn.precommit()
    assert store.commit(c) is DONE
    found = records(kafka, topic)
    assert sorted(int(m.value()) for m in found) == list(range(30_000))
    for p in c.partitions:
        offsets = [m.offset() for m in found if m.partition() == p.partition]
        assert (p.records, p.first_offset, p.last_offset) == (
            len(offsets),
            min(offsets),
            max(offsets),
        )
    store.close()


BAD_TIME = [datetime(year, 1, 1, tzinfo=timezone.utc) for year in (1969, 2000, 2090)]
BAD_ROWS = {
    "null topic": (
        dict(value=["a", "b"], topic=["t", None]),
        "row 1 of 2: topic is null(.|\n)*fill the column topic",
    ),
    "no topic": (dict(value=["a"]), "neither the option topic nor a column topic"),
    "no value": (dict(key=["a"], topic=["t"]), "no column value"),
    "negative partition": (dict(value=["a"], topic=["t"], partition=[-1]), "partition -1"),
    "wrong type": (dict(value=[1], topic=["t"]), "column value has type int64"),
    "null timestamp": (
        dict(value=["a", "b"], topic=["t", "t"], timestamp=[BAD_TIME[1], None]),
        "timestamp is null",
    ),
    "timestamp before 1970": (
        dict(value=["a"], topic=["t"], timestamp=[BAD_TIME[0]]),
        "timestamp is before 1970",
    ),
    "timestamp that is none": (
        dict(value=["a"], topic=["t"], timestamp=["noon"]),
        "column timestamp has type string",
    ),
    "header without a key": (
        dict(value=["a"], topic=["t"], headers=[[{"key": None, "value": b"v"}]]),
        "header without a key",
    ),
}


@pytest.mark.kafka
def test_a_time_that_the_topic_refuses_is_a_bad_row(kafka, topic, store):
    with (
        pytest.raises(
            BadRow, match=f"topic {topic} refused 1 records(.|\n)*message.timestamp.after.max.ms"
        ),
        store.begin(a_plan()) as txn,
    ):
        txn.write(pa.RecordBatch.from_pydict(dict(value=["a"], timestamp=[BAD_TIME[2]])))
        txn.flush()


@pytest.mark.kafka
@pytest.mark.parametrize(("columns", "says"), BAD_ROWS.values(), ids=BAD_ROWS)
def test_a_bad_row_is_found_before_anything_of_its_batch_is_sent(
    kafka, topic, store, columns, says
):
    columns = {
        k: [topic if v == "t" else v for v in column] if k == "topic" else column
        for k, column in columns.items()
    }
    store.topic = None
    with pytest.raises(BadRow, match=says), store.begin(a_plan()) as txn:
        txn.write(pa.RecordBatch.from_pydict(columns))
    assert values(kafka, topic, "read_uncommitted") == []


@pytest.mark.kafka
@pytest.mark.parametrize(
    "columns",
    [
        dict(topic=["no-such-topic"]),
        dict(topic=["known"], partition=[7]),
    ],
    ids=str,
)
def test_an_unknown_topic_or_partition_is_an_error_at_once(topic, store, columns):
    columns = columns | {
        "value": ["a"],
        "topic": [topic if t == "known" else t for t in columns["topic"]],
    }
    started = time.monotonic()
    says = rf"{columns['topic'][0]}(.|\n)*no such topic or partition(.|\n)*(Create it|Correct)"
    store.topic = None
    with pytest.raises(BadRow, match=says), store.begin(a_plan()) as txn:
        txn.write(pa.RecordBatch.from_pydict(columns))
    # the client would try for two minutes
    assert time.monotonic() - started < 60


@pytest.mark.kafka
@pytest.mark.parametrize(
    ("name", "why"),
    [
        *((name, "1 to 249") for name in ("", ".", "not a name!", "a\0b", "x" * 250)),
        ("__consumer_offsets", "internal topic"),
    ],
)
def test_a_name_that_no_topic_can_have_is_refused_as_column_and_as_option(
    kafka, topic, store, name, why
):
    said = rf"{re.escape(repr(name))} cannot be written\n +why: .*{why}"
    store.topic = None
    with pytest.raises(BadRow, match=said), store.begin(a_plan()) as txn:
        txn.write(pa.RecordBatch.from_pydict({"value": ["a", "b"], "topic": [topic, name]}))
    with pytest.raises(BadOption, match=said):
        check(kafka.client_conf, topics=[topic, name])
    assert values(kafka, topic, "read_uncommitted") == []


@pytest.mark.kafka
def test_a_record_that_is_too_large_says_how_large_and_what_to_do(kafka, topic, store):
    with (
        pytest.raises(
            BadRow,
            match=(
                "a record of 1500000 bytes(.|\n)*kafka.max.request.size is"
                " 1048576(.|\n)*max.message.bytes"
            ),
        ),
        store.begin(a_plan()) as txn,
    ):
        txn.write(rows("x" * 1_500_000))
    larger = KafkaParticipant(
        kafka.client_conf | QUIET | {"message.max.bytes": "2000000"}, topic=topic
    )
    with (
        pytest.raises(BadRow, match=f"topic {topic} refused a record of 1500000 bytes"),
        larger.begin(a_plan()) as txn,
    ):
        txn.write(rows("x" * 1_500_000))
        txn.flush()


@pytest.mark.kafka
def test_small_records_fit_a_narrow_topic_because_the_limit_was_asked_for(kafka):
    name = f"narrow-{uuid.uuid4().hex[:8]}"
    kafka.create_topic(name, config={"max.message.bytes": 5000})
    facts = check(kafka.client_conf, topics=[name])
    assert facts.batch_bytes == 5000
    store = KafkaParticipant(kafka.client_conf | QUIET, topic=name, batch_bytes=facts.batch_bytes)
    with store.begin(a_plan()) as txn:
        txn.write(rows(*["x" * 100] * 1000))
        txn.flush()
        assert txn.precommit().records == 1000
    assert name not in store.cluster.batch_bytes  # no batch was refused


@pytest.mark.kafka
@pytest.mark.parametrize("codec", ["none", "lz4"])
def test_batches_that_are_too_large_for_the_topic_of_a_column_are_split(kafka, codec):
    """Nothing could ask for the limits of these topics before the rows came."""
    names = [f"{kind}-{uuid.uuid4().hex[:8]}" for kind in ("wide", "narrow")]
    kafka.create_topic(names[0])
    kafka.create_topic(names[1], config={"max.message.bytes": 5000})
    store = KafkaParticipant(kafka.client_conf | QUIET | {"compression.type": codec})
    numbers = [f"{n}-{os.urandom(40).hex()}" for n in range(4000)]
    columns = {"topic": [names[n % 2] for n in range(4000)], "value": numbers}
    refusals = []
    for _ in range(2):
        with patch.object(sender_module, "split", side_effect=sender_module.split) as split:
            with store.begin(a_plan()) as txn:
                txn.write(pa.RecordBatch.from_pydict(columns))
                txn.flush()
                committable = txn.precommit()
            refusals.append(split.call_count)
        store.commit(committable)
        assert committable.records == 4000
    for n, name in enumerate(names):
        written = [r.value.decode() for r in read_ended(kafka.client_conf, name)]
        assert written == numbers[n::2] * 2
    # the second transaction knows from the first what the topic takes
    assert refusals[0] > 0 and refusals[1] == 0 and list(store.cluster.batch_bytes) == names[1:]


@pytest.mark.kafka
def test_a_compacted_topic_wants_a_key(kafka):
    name = f"compacted-{uuid.uuid4().hex[:8]}"
    kafka.create_topic(name, config={"cleanup.policy": "compact"})
    with (
        pytest.raises(BadRow, match="why: .*Compacted topic cannot accept message without key"),
        KafkaParticipant(kafka.client_conf | QUIET, topic=name).begin(a_plan()) as txn,
    ):
        txn.write(rows("a"))
        txn.flush()


@pytest.mark.kafka
def test_no_promise_without_a_flush_or_without_a_record(store, monkeypatch):
    with (
        pytest.raises(PrecommitFailed, match="no record was written"),
        store.begin(a_plan()) as txn,
    ):
        txn.precommit()
    store.conf["linger.ms"] = "5000"
    # the columnar engine does not linger: no answer may come before the pre-commit
    monkeypatch.setattr(Sender, "step", lambda sender, wait_s=0.0: None)
    with (
        pytest.raises(PrecommitFailed, match="2 of 2 records are not acknowledged: flush first"),
        store.begin(a_plan()) as txn,
    ):
        txn.write(rows("a", "b"))
        txn.precommit()


@pytest.mark.kafka
def test_fenced_in_the_middle_there_is_no_promise(store):
    with (
        pytest.raises(PrecommitFailed, match=r"transaction had ended before(.|\n)*make batches"),
        store.begin(a_plan()) as txn,
    ):
        txn.write(rows("a"))
        txn.flush()
        init_producer_id(store.cluster, txn.label, timeout_ms=60_000)
        txn.write(rows("b"))
        txn.flush()


@pytest.mark.kafka
def test_at_least_once_checks_the_same_and_is_visible_at_once(kafka, topic):
    with RowWriter(kafka.client_conf, topic=topic).begin() as out:
        out.write(rows("a", "b"))
        out.flush()
        assert sum(p.records for p in out.partitions) == 2
    assert sorted(values(kafka, topic)) == ["a", "b"]
    with (
        pytest.raises(BadRow, match="no-such-topic"),
        RowWriter(kafka.client_conf, topic="no-such-topic").begin() as out,
    ):
        out.write(rows("a"))


@pytest.mark.kafka
@pytest.mark.parametrize(
    ("given", "limit"),
    [({"delivery.timeout.ms": "9000"}, 9000), ({"message.timeout.ms": "0"}, DELIVERY_MS)],
)
def test_the_users_delivery_timeout_bounds_every_wait_and_there_is_always_one(
    kafka, topic, given, limit
):
    with RowWriter(kafka.client_conf | given, topic=topic).begin() as out:
        out.write(rows("a"))
        out.flush()
        assert out.client.conf["message.timeout.ms"] == limit
    assert (
        RowTransaction(kafka.client_conf | given, "x", 5000).client.conf["message.timeout.ms"]
        == 5000
    )


# -- lost answers --


@pytest.fixture(scope="module")
def slow_broker():
    """A network that can hold requests back, and a broker behind it, which creates topics."""
    with SlowNetwork(lambda: broker.ports[0][0]) as network:
        config = {
            "advertised.listeners": f"PLAINTEXT://127.0.0.1:{network.port}",
            "auto.create.topics.enable": "true",
        }
        broker = LocalKafka(progress=None, config=config)
        with broker:
            yield network, broker


@pytest.fixture(scope="module")
def slow(slow_broker):
    """The network, and the settings of a client behind it."""
    network, broker = slow_broker
    broker.create_topic("slow")
    servers = {"bootstrap.servers": f"127.0.0.1:{network.port}", "socket.timeout.ms": "1000"}
    return network, servers | QUIET


@pytest.fixture
def creating(slow_broker):
    """A broker that creates topics."""
    return slow_broker[1]


def promise_while_an_init_is_late(slow, engine):
    """Begin while the network holds the first InitProducerId, write, let the late copy arrive, and
    return whether the transaction can still be committed.
    """
    network, conf = slow
    history, plan = History(), a_plan()
    store = KafkaParticipant(conf, topic="slow", history=history, engine=engine)
    store.store_id()  # connected
    network.hold(INIT_PRODUCER_ID)
    with store.begin(plan) as txn:
        assert network.held == 1
        txn.write(rows("a"))
        txn.flush()
        c = txn.precommit()
    network.release()
    stands = lambda: store.describe([c])[0].state is TxnState.PRECOMMITTED
    # it made its own name known, or ended the transaction
    until(lambda: len(store.traces(plan.query_id)) > 1 or not stands(), "it arrived", 20)
    found = stands(), {e.op for e in history.events}
    store.abort(c)
    store.close()
    return found


@pytest.mark.kafka
@pytest.mark.parametrize("engine", ENGINES)
def test_a_late_init_costs_the_name_and_not_the_promise(slow, engine):
    assert promise_while_an_init_is_late(slow, engine) == (True, {"retire"})


@pytest.mark.kafka
def test_without_that_rule_the_late_init_breaks_the_promise(slow, monkeypatch):
    monkeypatch.setattr(row_producer, "_init_may_be_under_way", lambda heard: False)
    assert promise_while_an_init_is_late(slow, "rows") == (False, set())


@pytest.mark.kafka
def test_an_init_that_never_answers_is_unclear_in_time(slow):
    network, conf = slow
    network.hold(INIT_PRODUCER_ID)
    started = time.monotonic()
    with pytest.raises(UnclearAnswer):
        RowTransaction(
            conf | {"socket.timeout.ms": "20000"}, "never", 60_000, begin_ms=1000
        ).begin()
    network.release()
    assert time.monotonic() - started < 5


@pytest.mark.kafka
def test_names_with_unclear_answers_are_given_up_in_limits(store, monkeypatch):
    tried = []
    for kind in (RowTransaction, ColumnTransaction):
        monkeypatch.setattr(
            kind,
            "begin",
            lambda txn: (_ for _ in ()).throw(UnclearAnswer(tried.append(txn.label) or txn.label)),
        )
    store.history = History()
    with pytest.raises(UnclearAnswer):
        store.begin(a_plan())
    assert (
        len(set(tried)) == 5 and [e.ids["transactional_id"] for e in store.history.events] == tried
    )


@pytest.mark.kafka
def test_a_dead_server_in_the_list_costs_no_name(kafka, topic):
    store = KafkaParticipant(
        kafka.client_conf | {"bootstrap.servers": f"127.0.0.1:1,{kafka.bootstrap_servers}"} | QUIET,
        topic=topic,
        history=History(),
    )
    with store.begin(a_plan()) as txn:
        txn.write(rows("a"))
        txn.flush()
        assert store.abort(txn.precommit()) is DONE
    assert store.history.events == []
    store.close()


@pytest.mark.kafka
def test_a_worn_out_name_is_replaced(store, monkeypatch):
    plan = a_plan()
    store.begin(plan)
    monkeypatch.setattr(requests, "EPOCH_MAX", 0)
    store.history = History()
    later = store.begin(replace(plan, batch_id=2))  # the same name again, epoch 1
    assert (later.state.epoch, [e.ids["error"] for e in store.history.events]) == (
        0,
        [NameWornOut.__name__],
    )
    monkeypatch.undo()
    # the worn out one does not come back
    assert store.begin(replace(plan, batch_id=4)).label == later.label


# -- silent brokers --


@pytest.mark.parametrize("listening", [False, True])
def test_no_broker_is_reported_in_the_stated_time(listening):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1] if listening else 1
        for begin in (
            RowTransaction(
                {"bootstrap.servers": f"127.0.0.1:{port}"} | QUIET, "x", 60_000, begin_ms=1500
            ).begin,
            RowWriter({"bootstrap.servers": f"127.0.0.1:{port}"} | QUIET, begin_ms=1500).begin,
            lambda: check({"bootstrap.servers": f"127.0.0.1:{port}"}, within_ms=1500),
        ):
            started = time.monotonic()
            with pytest.raises(BrokerUnreachable, match="1500 ms"):
                begin()
            assert time.monotonic() - started < 6


@pytest.mark.kafka
@pytest.mark.full
@pytest.mark.parametrize("engine", first_of(ENGINES, rest="nightly"))
def test_a_broker_that_falls_silent_ends_the_attempt_in_time_and_the_cause_goes_up(
    kafka, topic, engine
):
    store = KafkaParticipant(
        kafka.client_conf | QUIET | {"message.timeout.ms": "2000"}, topic=topic, engine=engine
    )
    started = time.monotonic()
    try:
        with (
            pytest.raises(PrecommitFailed, match=f"not acknowledged: .*{topic}"),
            store.begin(a_plan()) as txn,
        ):
            txn.write(rows("a"))
            txn.flush()
            kafka.pause()
            txn.write(rows("b", "c"))
            txn.flush()
    finally:
        kafka.resume()
        took = time.monotonic() - started
        back_at_work(kafka)
    # 2 s for the delivery, 10 s for trying to abort; the client's own patience is 2 minutes
    assert took < 60


# -- options and rights --


@pytest.mark.kafka
@pytest.mark.parametrize("engine", ["columnar", "rows"])
def test_topics_are_created_as_the_brokers_do_for_a_producer(creating, engine):
    conf, topics = creating.client_conf, [f"{engine}-option", f"{engine}-column"]
    facts = check(conf, topics=topics[:1])
    participant = KafkaParticipant(conf, engine=engine, **asdict(facts))
    with participant.begin(a_plan()) as txn:
        txn.write(pa.record_batch({"value": ["a", "b"], "topic": topics}))
        txn.flush()
        c = txn.precommit()
    assert participant.commit(c) is Outcome.DONE
    participant.close()
    assert [values(creating, t) for t in topics] == [["a"], ["b"]]


@pytest.mark.kafka
def test_the_topic_of_a_gate_is_created_as_that_of_a_row(creating):
    store = KafkaParticipant(creating.client_conf, gated=("gated",))
    gate = store.open_gate(a_plan())
    assert [(p.topic, p.partition, p.records) for p in gate.partitions] == [("gated", 0, 1)]
    assert store.abort(gate) is DONE
    store.close()


@pytest.mark.kafka
def test_the_preflight_names_every_missing_topic(kafka, topic):
    with pytest.raises(BadOption, match="topic one, two does not exist") as caught:
        check(kafka.client_conf, topics=["one", topic, "two"])
    line = f"kafka-topics.sh --bootstrap-server {kafka.bootstrap_servers} --create --topic"
    assert caught.value.action.startswith(f"Create it ({line} one; {line} two), or ")


@pytest.mark.kafka
def test_a_timeout_above_the_brokers_maximum_is_a_bad_option_in_a_task_too(kafka, topic):
    with pytest.raises(BadOption, match="900001"):
        RowTransaction(kafka.client_conf | QUIET, "too-long", 900_001, topic=topic).begin()


@pytest.fixture(scope="module")
def alice(secure):
    """Settings of a user who may use ids that begin with kafka2pc, write to `open` and `compacted`,
    see `closed`, and knows nothing of `hidden`.
    """
    for name in ("open", "closed", "hidden"):
        secure.create_topic(name)
    secure.create_topic("compacted", config={"cleanup.policy": "compact"})
    rights = [
        (
            ResourceType.TRANSACTIONAL_ID,
            "kafka2pc",
            AclOperation.WRITE,
            ResourcePatternType.PREFIXED,
        ),
        (ResourceType.TOPIC, "open", AclOperation.WRITE, ResourcePatternType.LITERAL),
        (ResourceType.TOPIC, "compacted", AclOperation.WRITE, ResourcePatternType.LITERAL),
        (ResourceType.TOPIC, "closed", AclOperation.DESCRIBE, ResourcePatternType.LITERAL),
    ]
    acls = [
        AclBinding(kind, name, pattern, "User:alice", "*", operation, AclPermissionType.ALLOW)
        for kind, name, operation, pattern in rights
    ]
    admin = AdminClient(secure.client_conf)
    for made in admin.create_acls(acls).values():
        made.result()
    conf = secure.client_conf_for("alice") | QUIET
    end = time.monotonic() + 20
    while time.monotonic() < end:  # rights take effect some milliseconds later
        try:
            check(conf, topics=["open", "compacted"])
            break
        except NotAuthorized:
            time.sleep(0.1)
    return conf


@pytest.mark.kafka
def test_with_the_rights_it_works(alice):
    store = KafkaParticipant(alice, topic="open", **asdict(check(alice, topics=["open"])))
    with store.begin(a_plan()) as txn:
        txn.write(rows("a"))
        txn.flush()
        assert store.commit(txn.precommit()) is DONE
    store.close()


@pytest.mark.kafka
def test_a_gate_needs_no_other_right_but_where_its_topic_is_compacted(alice):
    store, plan = KafkaParticipant(alice, gated=("open",)), a_plan()
    assert store.abort(store.open_gate(plan)) is DONE
    store.gated = ("open", "compacted")
    with pytest.raises(BadRow, match="topic compacted refused 1 records") as caught:
        store.open_gate(plan)
    assert "without key" in caught.value.why and "may not see" in caught.value.why
    assert "Grant DESCRIBE_CONFIGS on the resource Topic" in caught.value.action
    assert caught.value.risk == "No. Nothing was written."
    assert store.in_doubt(plan.query_id) == [], "the gate in the other topic is aborted"
    store.close()


@pytest.mark.kafka
@pytest.mark.parametrize("topic", ["closed", "hidden"])
def test_without_write_the_topic_and_the_right_are_named(alice, topic):
    with pytest.raises(NotAuthorized, match=f"topic {topic}(.|\n)*Grant WRITE"):
        check(alice, topics=["open", topic])
    for begun in (
        KafkaParticipant(alice, topic=topic).begin(a_plan()),
        RowWriter(alice, topic=topic).begin(),
    ):
        with pytest.raises(NotAuthorized, match=f"topic {topic}(.|\n)*Grant WRITE"), begun as out:
            out.write(rows("a"))
            out.flush()


@pytest.mark.kafka
def test_a_prefix_that_is_not_allowed_names_the_resource(alice):
    for attempt in (
        lambda: check(alice, prefix="orders"),
        lambda: KafkaParticipant(alice, prefix="orders", topic="open").begin(a_plan()),
    ):
        with pytest.raises(
            NotAuthorized,
            match="orders(.|\n)*Grant WRITE on the resource TransactionalId, PREFIXED",
        ):
            attempt()


@pytest.mark.kafka
def test_at_least_once_needs_no_right_to_a_prefix(alice):
    assert check(alice, prefix=None, topics=["open"]).cluster_id


@pytest.mark.kafka
def test_a_wrong_password_is_not_taken_for_silence_and_is_not_shown(alice):
    wrong = alice | {"sasl.password": "hunter2"}
    for attempt in (
        RowTransaction(wrong, "kafka2pc-x", 60_000, begin_ms=2000).begin,
        lambda: check(wrong, within_ms=2000),
    ):
        with pytest.raises(NotAuthorized, match="password") as caught:
            attempt()
        assert "hunter2" not in str(caught.value)


# -- the reader --


@pytest.mark.kafka
def test_the_reader_agrees_with_another_consumer_and_is_not_stopped_by_gaps(kafka, topic, store):
    # every second one is aborted: gaps of records and of markers, one at the end
    for n in range(6):
        with store.begin(a_plan()) as txn:
            txn.write(
                pa.RecordBatch.from_pydict(
                    {
                        "key": [str(n), None],
                        "value": [str(n), None],
                        "headers": [[{"key": "h", "value": b"v"}], None],
                    }
                )
            )
            txn.flush()
            assert (store.abort if n % 2 else store.commit)(txn.precommit()) is DONE
    settled(store)
    for isolation, count in (("read_committed", 6), ("read_uncommitted", 12)):
        found = read_topic(kafka.client_conf, topic, isolation)
        assert len(found) == count
        assert [(r.partition, r.offset, r.key, r.value, list(r.headers)) for r in found] == [
            (m.partition(), m.offset(), m.key(), m.value(), m.headers() or [])
            for m in records(kafka, topic, isolation)
        ]


@pytest.mark.kafka
def test_the_reader_stops_at_the_last_stable_offset(kafka, topic, store):
    with store.begin(a_plan()) as txn:
        txn.write(rows("a"))
        txn.flush()
        c = txn.precommit()
    assert read_topic(kafka.client_conf, topic, timeout_s=10) == []
    assert [r.value for r in read_topic(kafka.client_conf, topic, "read_uncommitted")] == [b"a"]
    assert store.abort(c) is DONE


@pytest.mark.kafka
@pytest.mark.parametrize("store", ["columnar"], indirect=True)
def test_both_readers_come_to_the_same_end_or_it_is_an_error(kafka, topic, store):
    def written(*numbers):
        with store.begin(a_plan()) as txn:
            txn.write(rows(*numbers))
            txn.flush()
            return txn.precommit()

    assert store.commit(written("1", "2")) is DONE and store.abort(written("3")) is DONE
    # at once: the markers may still be missing
    committed, uncommitted = read_both(
        kafka.client_conf, topic, lambda r: int(r.value), lambda row: row // 2
    )
    assert sorted((s.row, s.batch_id) for s in committed) == [(1, 0), (2, 1)] and {
        s.row for s in uncommitted
    } == {1, 2, 3}
    assert [s for s in uncommitted if s.row != 3] == committed and {
        (s.topic, s.key) for s in committed
    } == {(topic, None)}
    c = written("4")
    with pytest.raises(BrokerUnreachable, match=rf"held back: {topic}-\d at \d+ of \d+"):
        read_both(kafka.client_conf, topic, lambda r: int(r.value), timeout_s=5)
    assert store.abort(c) is DONE


@pytest.mark.kafka
@pytest.mark.parametrize("store", ["columnar"], indirect=True)
def test_offsets_of_a_topic_that_was_made_anew_are_inconsistent(kafka, topic, store):
    """A real reader, and real offsets that lie: what a reader keeps in its checkpoint now means
    other rows.
    """

    def read_after_writing(numbers):
        with store.begin(a_plan()) as txn:
            txn.write(
                pa.RecordBatch.from_pydict(
                    {"value": numbers, "partition": pa.array([0] * len(numbers), pa.int32())}
                )
            )
            txn.flush()
            assert store.commit(txn.precommit()) is DONE
        return read_both(kafka.client_conf, topic, lambda r: int(r.value))[0]

    before, after = read_after_writing(["1", "2"]), read_after_writing(["3"])
    assert inconsistent_offsets(before, after) == []
    admin = AdminClient(kafka.client_conf)
    admin.delete_topics([topic])[topic].result(30)
    until(lambda: topic not in describe_topics(store.cluster, [topic]), "the topic is gone")
    kafka.create_topic(topic, partitions=2)
    assert [s.row for s in inconsistent_offsets(before, read_after_writing(["7", "8"]))] == [
        1,
        7,
        2,
        8,
    ]


@pytest.mark.kafka
def test_the_reader_says_what_is_wrong(kafka):
    with pytest.raises(BadOption, match="no-such-topic"):
        read_topic(kafka.client_conf, "no-such-topic")
    with pytest.raises(BrokerUnreachable):
        read_topic({"bootstrap.servers": "127.0.0.1:1"} | QUIET, "x", timeout_s=1)


# -- clocks --


def with_a_clock_that_is_off(monkeypatch, minutes):
    """The driver's wall clock is `minutes` ahead of the broker's (negative: behind)."""
    monkeypatch.setattr(Clock, "now_ms", lambda _: time.time() * 1000 + 60_000 * minutes)


def batch_written(kafka, topic, engine, timeout_ms, margin_ms):
    """A driver, and the messages of one task that has pre-committed a row under a plan of this
    driver.
    """
    facts = asdict(check(kafka.client_conf, topics=[topic])) | {"timeout_ms": timeout_ms}
    store = KafkaParticipant(kafka.client_conf | QUIET, topic=topic, engine=engine, **facts)
    driver = Driver(
        query_id=str(uuid.uuid4()),
        log=MemoryLog(),
        participants={"kafka": store},
        policy=Policy(retry=retry_unknown, margin_ms=margin_ms),
    )
    return driver, [precommit([store], restore.restore(driver, 0), [rows("a")])]


def of_unknown_age(messages):
    """The messages, as if the plan had been made by a system without a clock."""
    return [replace(m, plan=replace(m.plan, planned=None)) for m in messages]


@pytest.mark.kafka
@pytest.mark.parametrize("engine", ENGINES)
def test_a_wrong_clock_changes_no_decision(kafka, topic, monkeypatch, engine):
    clocks = [(minutes, age) for minutes in (-5, 0, 5) for age in ("known", "unknown")]

    def prepared(minutes, age, timeout_ms, margin_ms):
        with_a_clock_that_is_off(monkeypatch, minutes)
        driver, messages = batch_written(kafka, topic, engine, timeout_ms, margin_ms)
        return driver, of_unknown_age(messages) if age == "unknown" else messages

    for minutes, age in clocks:
        driver, messages = prepared(minutes, age, timeout_ms=60_000, margin_ms=10_000)
        commit(driver, messages, 0)
    assert values(kafka, topic) == ["a"] * len(clocks)
    # it has one millisecond, and the round trips of its task take longer
    late = [prepared(*how, timeout_ms=60_000, margin_ms=59_999) for how in clocks]
    for (minutes, _), (driver, messages) in zip(clocks, late, strict=True):
        with_a_clock_that_is_off(monkeypatch, minutes)
        with pytest.raises(Refused, match="59999 ms must be left of its timeout of 60000 ms"):
            commit(driver, messages, 0)
        assert [d.kind for d in driver.log.chain(0)][-1] == "ABORT"
    assert values(kafka, topic) == ["a"] * len(clocks)


@pytest.mark.kafka
@pytest.mark.parametrize("prefix", ["kafka2pc", "another"])
def test_another_log_is_refused_under_any_prefix(kafka, topic, prefix):
    """It is empty, but the query has written before."""
    driver, messages = batch_written(kafka, topic, "columnar", timeout_ms=60_000, margin_ms=1_000)
    commit(driver, messages, 0)
    store = driver.participants["kafka"].under(prefix)
    other = replace(driver, log=MemoryLog("another"), participants={"kafka": store})
    with pytest.raises(StaleCheckpoint, match="knows 1 of its transactions .kafka2pc-.* is empty"):
        restore.restore(other, 0)
    assert other.log.slots() == [] and values(kafka, topic) == ["a"]


@pytest.mark.kafka
def test_applications_with_other_prefixes_may_use_the_same_name(store):
    named = replace(a_plan(), query_id=str(uuid.uuid5(uuid.NAMESPACE_OID, store.topic)))
    name = store.begin(named).label
    assert store.traces(named.query_id) == [name]
    assert store.under("another").traces(named.query_id) == []


@pytest.mark.parametrize(
    ("state", "complete"),
    [
        ("Ongoing", True),
        ("PrepareCommit", False),
        ("PrepareAbort", False),
        ("PrepareEpochFence", False),
        ("CompleteCommit", True),
        ("CompleteAbort", True),
    ],
)
def test_an_end_is_complete_when_its_markers_are_written(state, complete):
    c = Committable(transactional_id="t", state=PreparedTxnState(1, 0))
    d = DescribedTransaction(
        transactional_id="t", state=state, producer_id=1, epoch=0, timeout_ms=1, started_ms=1
    )
    assert transaction_states.description(c, d).complete is complete
    # about another transaction it says nothing
    other = replace(c, state=PreparedTxnState(2, 0))
    assert transaction_states.description(other, d) == Description(None)


class Coordinators:
    """What two requests answer: all transactions are Ongoing, `open_ms` says for how long.
    `filters`: they know the duration filter.
    """

    def __init__(self, open_ms, filters=True):
        self.open_ms, self.filters, self.asked = open_ms, filters, []

    def describe_transactions(self, cluster, ids):
        return {
            i: DescribedTransaction(
                transactional_id=i,
                state="Ongoing",
                producer_id=1,
                epoch=0,
                timeout_ms=1,
                started_ms=1,
            )
            for i in ids
        }

    def list_transactions(self, cluster, prefix, states, *, longer_ms, partial):
        self.asked.append((prefix, states, longer_ms))
        if not self.filters:
            raise TooOld("ListTransactions: node 0")
        return [
            ListedTransaction(i, 1, "Ongoing") for i, ms in self.open_ms.items() if ms > longer_ms
        ]


def in_time(monkeypatch, coordinators, timeouts, **limits):
    monkeypatch.setattr(KafkaParticipant, "cluster", None)
    for module, question in (
        (participant_module, "describe_transactions"),
        (transaction_states, "list_transactions"),
    ):
        monkeypatch.setattr(module, question, getattr(coordinators, question))
    cs = [
        Committable(transactional_id=i, state=PreparedTxnState(1, 0), timeout_ms=ms)
        for i, ms in timeouts.items()
    ]
    return [s.in_time for s in KafkaParticipant({}).describe(cs, **limits)]


LIMITS = {"a-1": 10_000, "a-2": 10_000, "a-3": 20_000, "a-4": None}


@pytest.mark.parametrize(
    "limits",
    [dict(margin_ms=1000, age_ms=9_000), dict(margin_ms=0, age_ms=None)],
    ids=["the plan is young", "no margin"],
)
def test_what_is_in_time_by_the_age_of_its_plan_costs_no_request(monkeypatch, limits):
    coordinators = Coordinators({})
    assert (
        in_time(monkeypatch, coordinators, LIMITS, **limits) == [True] * 4
        and coordinators.asked == []
    )


@pytest.mark.parametrize("age_ms", [None, 19_500])
def test_the_coordinators_are_asked_for_each_timeout_before_and_after_the_describe(
    monkeypatch, age_ms
):
    coordinators = Coordinators(
        {"a-1": 9_001, "a-2": 9_000, "a-3": 9_500, "a-4": 10**9, "a-5": 10**9}
    )
    assert in_time(monkeypatch, coordinators, LIMITS, margin_ms=1000, age_ms=age_ms) == [
        False,
        True,
        True,
        True,
    ]
    assert sorted(coordinators.asked) == 2 * [("a-", ("Ongoing",), 9_000)] + 2 * [
        ("a-3", ("Ongoing",), 19_000)
    ]


def test_without_a_duration_filter_the_age_decides_and_without_both_the_batch_is_refused(
    monkeypatch,
):
    old = Coordinators({}, filters=False)
    assert in_time(monkeypatch, old, LIMITS, margin_ms=1000, age_ms=9_001) == [
        False,
        False,
        True,
        True,
    ]
    with pytest.raises(Refused, match="transactions a-") as caught:
        in_time(monkeypatch, old, LIMITS, margin_ms=1000, age_ms=None)
    assert "from Kafka 3.8 on" in caught.value.why and "Kafka 3.8 or newer" in caught.value.action
    assert in_time(monkeypatch, old, {"a-4": None}, margin_ms=1000, age_ms=None) == [True], (
        "it never times out"
    )


# -- many transactions at once --


@pytest.mark.kafka
@pytest.mark.parametrize("store", first_of(ENGINES[:1]), indirect=True)
@pytest.mark.parametrize("refused", [False, True], ids=["four connections", "only the first"])
def test_many_are_ended_through_more_connections_and_the_outcomes_keep_their_order(
    store, monkeypatch, refused
):
    monkeypatch.setattr(participant_module, "_MANY", 10)
    opened = []

    def open_one(conf):
        opened.append(conf)
        if refused:
            raise BrokerUnreachable("no more connections")
        return Cluster(conf)

    monkeypatch.setattr(participant_module, "Cluster", open_one)
    chunk = pa.RecordBatch.from_pydict({"value": ["x"]})
    messages = [precommit([store], a_plan(), iter([chunk])) for _ in range(14)]
    cs = [c for m in messages for c in m.committables]
    assert store.abort(cs[6]) is DONE
    # the coordinator answers "not yet" until all markers of the abort are written
    assert ask(store.commit, cs[6]) is Outcome.REFUSED
    assert store.end_all("commit", cs) == [*[DONE] * 6, Outcome.REFUSED, *[DONE] * 7]
    assert len(opened) == (1 if refused else 3)
