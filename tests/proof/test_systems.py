"""The coordinator of the model beside the real one: the same states, and the same answers."""

import time
import uuid

import pyarrow as pa
import pytest
from kafka_fixtures import values

from kafka2pc.kafka import transaction_states as kafka
from kafka2pc.kafka.transaction_states import NEVER_MS
from kafka2pc.kafka.wire.cluster import Cluster
from kafka2pc.kafka.wire.descriptions import (
    DescribedTransaction,
    describe_transactions,
    list_transactions,
)
from kafka2pc.kafka.wire.transactions import end_txn, init_producer_id
from kafka2pc.kafka.write.row_producer import RowTransaction
from kafka2pc.proof.model import systems
from kafka2pc.proof.model.world import QUERY, Bounds, Config, Txn, Worker, World, find, worker_name
from kafka2pc.protocol.messages import Committable, Plan, PreparedTxnState
from kafka2pc.protocol.names import Token
from kafka2pc.protocol.states import TxnState

pytestmark = pytest.mark.never_unsteady


def txns():
    for epoch, state, rows, marking in [
        (0, TxnState.OPEN, (), False),
        (0, TxnState.OPEN, (1,), False),
        (1, TxnState.COMMITTED, (), True),
        (1, TxnState.COMMITTED, (), False),
        (0, TxnState.COMMITTED, (), False),
        (1, TxnState.ABORTED, (), False),
        (2, TxnState.ABORTED, (), False),
        (3, TxnState.OPEN, (1,), False),
    ]:
        yield Txn("id", epoch, state, rows, marking=marking)


def word(txn):
    if txn.state is TxnState.OPEN:
        return "Ongoing" if txn.rows else "Empty"
    return {
        TxnState.COMMITTED: "PrepareCommit" if txn.marking else "CompleteCommit",
        TxnState.ABORTED: "CompleteAbort",
    }[txn.state]


@pytest.mark.parametrize("end_txn", [4, 5])
@pytest.mark.parametrize("epoch", range(4))
def test_standing_is_the_same_as_in_the_participant(end_txn, epoch):
    for txn in txns():
        c = Committable(
            transactional_id="id", state=PreparedTxnState(0, epoch), end_txn_version=end_txn
        )
        d = DescribedTransaction(
            transactional_id="id",
            producer_id=0,
            epoch=txn.epoch,
            state=word(txn),
            timeout_ms=NEVER_MS,
            started_ms=0,
            partitions=(),
        )
        assert systems.description(txn, epoch, end_txn) == kafka.description(c, d).state, (
            txn,
            epoch,
        )


SEQUENCES = [
    ("commit 0",),
    ("abort 0",),
    ("write", "commit 0"),
    ("write", "abort 0"),
    ("write", "commit 0", "commit 0"),
    ("write", "abort 0", "abort 0"),
    ("write", "commit 0", "abort 0"),
    ("write", "abort 0", "commit 0"),
    ("write", "commit 0", "commit 1"),
    ("write", "commit 0", "abort 1"),
    ("write", "commit 0", "abort 1", "commit 0"),
    ("write", "timeout", "commit 0"),
    ("write", "init", "commit 0"),
    ("write", "commit 0", "init", "commit 0"),
]


def in_the_model(events):
    """The last answer, and how many rows a reader sees."""
    bounds = Bounds(Config())
    name = worker_name(
        Plan(query_id=QUERY, batch_id=0, attempt=1, token=Token(0, 1, "00000001")),
        Worker(1, 0, 0),
        0,
        0,
    )
    now, reply = systems.on_init(bounds, World(owed=((name, 0),)), 1, name).world, None
    for event in events:
        verb, _, epoch = event.partition(" ")
        if verb == "timeout":
            now = systems.end_transaction(bounds, now, find(now, name), "timeout")[0]
        elif verb == "write":
            now, reply, *_ = systems.on_produce(bounds, now, 1, name, 0, ((0, 0, 0),))
        elif verb == "init":
            now, reply, *_ = systems.on_init(bounds, now, 1, name)
        else:
            now, reply, *_ = systems.on_end(bounds, now, 1, name, int(epoch), verb == "commit")
    return reply, len(now.seen)


def apply_move(cluster, name):
    """Until then the coordinator says CONCURRENT_TRANSACTIONS, which is no answer; the model's
    client asks again too.
    """
    while list_transactions(cluster, name, ("PrepareCommit", "PrepareAbort")):
        time.sleep(0.02)


def on_a_broker(kafka, cluster, topic, events):
    name, state, reply, txn = f"model-{uuid.uuid4().hex}", None, None, None
    if events[0] != "write":
        state = init_producer_id(cluster, name, timeout_ms=60_000)
    for event in events:
        verb, _, epoch = event.partition(" ")
        if verb == "write":
            txn = RowTransaction(
                kafka.client_conf, name, 1_000 if "timeout" in events else 60_000, topic=topic
            ).begin()
            txn.write(pa.record_batch({"value": pa.array([name])}))
            txn.flush()
            state = txn.precommit().state
        elif verb == "timeout":
            while describe_transactions(cluster, [name])[name].state != "CompleteAbort":
                time.sleep(0.1)
        elif verb == "init":
            init_producer_id(cluster, name, timeout_ms=60_000)
        else:
            now = PreparedTxnState(state.producer_id, state.epoch + int(epoch))
            reply = end_txn(cluster, name, now, commit=verb == "commit", version=5).value
            apply_move(cluster, name)
    # the last event may leave it open
    return reply, values(kafka, topic, still_open=True).count(name)


@pytest.mark.kafka
def test_the_coordinator_of_the_model_answers_like_a_real_one(kafka):
    topic = f"model-{uuid.uuid4().hex[:8]}"
    kafka.create_topic(topic, partitions=1)
    with Cluster(kafka.client_conf) as cluster:
        real = {events: on_a_broker(kafka, cluster, topic, events) for events in SEQUENCES}
    assert real == {events: in_the_model(events) for events in SEQUENCES}


def test_the_topic_proves_an_abort_and_gives_its_rows_back_until_it_removes_one():
    bounds, rows = Bounds(Config(timeout=1, remove=1)), ((0, 0, 0), (0, 1, 0))
    open_one = Txn("id", 0, TxnState.OPEN, rows)
    world = bounds.opening()._replace(txns=(open_one,), owed=(("id", 0),))
    aborted, _ = systems.end_transaction(bounds, world, open_one, "timeout")
    forgotten = aborted._replace(txns=())
    ((*_, removed),) = systems.aborted_rows_vanish(bounds, forgotten)

    def ask(world):
        finals = systems.on_final(bounds, world, 1, (("id", 0),)).reply
        return *finals, *systems.on_read(bounds, world, 1, (("id", 0),)).reply

    assert ask(world) == (None, None)
    assert ask(aborted) == ask(forgotten) == (TxnState.ABORTED, rows)
    assert ask(removed.world) == (TxnState.ABORTED, rows[1:])
