"""Topics of many partitions: small micro-batches fill all of them evenly, and a partition without a
leader holds up no other one.
"""

import time
import uuid
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import count

import pyarrow as pa
import pytest
from confluent_kafka.admin import AdminClient, NewTopic
from kafka.protocol.metadata import MetadataRequest

from kafka2pc.kafka.participant import KafkaParticipant
from kafka2pc.kafka.read.readers import read_topic
from kafka2pc.kafka.wire.cluster import Cluster
from kafka2pc.kafka.wire.descriptions import describe_transactions
from kafka2pc.kafka.wire.topics import find_leaders
from kafka2pc.kafka.wire.transactions import end_txn
from kafka2pc.kafka.write.column_producer import ColumnTransaction
from kafka2pc.local.broker import LocalKafka
from kafka2pc.proof.child_process import until
from kafka2pc.protocol.messages import Plan
from kafka2pc.protocol.names import new_token
from kafka2pc.protocol.participant import Outcome

pytestmark = pytest.mark.kafka
PARTITIONS = 100


# -- few rows without a key --


def test_small_micro_batches_fill_all_partitions_evenly(kafka):
    """Each task writes three rows to one partition: which one must depend on batch and task."""
    topic = kafka.create_topic(f"spread-{uuid.uuid4().hex[:8]}", partitions=PARTITIONS)
    store = KafkaParticipant(kafka.client_conf, topic=topic)
    query_id, rows = str(uuid.uuid4()), pa.RecordBatch.from_pydict({"value": ["a", "b", "c"]})
    for batch_id in range(1000):
        plan = Plan(query_id=query_id, batch_id=batch_id, attempt=0, token=new_token(batch_id, 0))
        written = [written_by(store, replace(plan, task=task), rows) for task in range(2)]
        assert [store.commit(c) for c in written] == [Outcome.DONE] * 2
    found = Counter(r.partition for r in read_topic(kafka.client_conf, topic))
    assert found.total() == 6000 and len(found) == PARTITIONS
    assert max(found.values()) <= 2 * min(found.values())


def written_by(store, plan, rows):
    """The Committable of a task."""
    with store.begin(plan) as txn:
        txn.write(rows)
        txn.flush()
        return txn.precommit()


# -- a partition without a leader --


@pytest.fixture
def three_nodes():
    with LocalKafka(3, progress=None) as kafka, Cluster(kafka.client_conf) as cluster:
        yield kafka, cluster


@pytest.mark.full
def test_a_partition_without_a_leader_holds_up_no_other(three_nodes, monkeypatch):
    """All rows of 99 partitions arrive while the only node of the last one is down for 10 s."""
    kafka, cluster = three_nodes
    name = "leaderless"
    victim, *others = sorted({0, 1, 2}, key=lambda n: n == coordinator(kafka, cluster, name))
    place(kafka, "wide", [[others[p % 2]] for p in range(PARTITIONS - 1)] + [[victim]])
    asked = metadata_requests(cluster, monkeypatch)
    txn = ColumnTransaction(cluster, kafka.client_conf, name, 60_000, topic="wide")
    with ThreadPoolExecutor(1) as beside, txn.begin():
        kafka.kill(victim)
        down = time.monotonic()
        writes = beside.submit(write_everywhere, txn, batches=20)
        until(lambda: acknowledged(txn) == 20 * 10 * (PARTITIONS - 1), "99 partitions have all", 60)
        time.sleep(max(0, down + 10 - time.monotonic()))
        assert not writes.done() and kafka.pids[victim] is None
        assert sum(down < at < down + 10 for at in asked) <= 20
        kafka.restart(victim)
        writes.result(60)
        c = txn.precommit()
    assert commit(cluster, c) == "CompleteCommit"
    found = read_topic(kafka.client_conf, "wide")
    assert sorted(int(r.value) for r in found) == list(range(20 * 10 * PARTITIONS))
    assert all(int(r.value) % PARTITIONS == r.partition for r in found)


def coordinator(kafka, cluster, transactional_id):
    """The node that keeps the state of this transactional id."""
    until(lambda: find_leaders(cluster, ["__transaction_state"]), "its topic exists")
    return cluster.persist(lambda: cluster.coordinators([transactional_id]))[transactional_id]


def place(kafka, topic, replicas):
    """Create a topic, each partition on the given nodes."""
    config = {"min.insync.replicas": "1"}
    new = NewTopic(topic, len(replicas), replica_assignment=replicas, config=config)
    admin = AdminClient(kafka.client_conf)
    admin.create_topics([new])[topic].result()
    with Cluster(kafka.client_conf) as cluster:
        wanted = {(topic, p): nodes[0] for p, nodes in enumerate(replicas)}
        until(lambda: find_leaders(cluster, [topic]) == wanted, "every partition has its leader")


def metadata_requests(cluster, monkeypatch):
    """The time of each Metadata request for a topic. (kafka-python asks for the nodes, too.)"""
    asked, original = [], cluster._manager.send

    def send(request, *more, **named):
        if isinstance(request, MetadataRequest) and request.topics:
            asked.append(time.monotonic())
        return original(request, *more, **named)

    monkeypatch.setattr(cluster._manager, "send", send)
    return asked


def write_everywhere(txn, batches):
    """Ten rows for each partition in each of `batches` Arrow batches; a row's value is its number,
    which says its partition, too.
    """
    numbers = count()
    for _ in range(batches):
        rows = [next(numbers) for _ in range(10 * PARTITIONS)]
        columns = {
            "value": [str(n) for n in rows],
            "partition": pa.array([n % PARTITIONS for n in rows], pa.int32()),
        }
        txn.write(pa.RecordBatch.from_pydict(columns))
        time.sleep(0.05)
    txn.flush()


def acknowledged(txn):
    return sum(p.records for p in txn.partitions)


def commit(cluster, c):
    """Ask until it is clear that the transaction is committed. Returns its last state."""
    ask = lambda: end_txn(cluster, c.transactional_id, c.state, commit=True, version=5)
    until(lambda: ask() is Outcome.DONE, "the answer is clear")
    state = lambda: describe_transactions(cluster, [c.transactional_id])[c.transactional_id].state
    until(lambda: state() != "PrepareCommit", "the markers are written")
    return state()
