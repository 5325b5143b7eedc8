"""Rows of aborted transactions: written again, each once, or not at all; and how it is proven that
they were aborted.
"""

import uuid
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pyarrow as pa
import pytest
from confluent_kafka import TopicPartition
from confluent_kafka.admin import (
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    ResourceType,
)
from kafka_fixtures import records, settled

from kafka2pc.kafka import aborted_rows
from kafka2pc.kafka.aborted_rows import final_states
from kafka2pc.kafka.participant import KafkaParticipant
from kafka2pc.kafka.wire.descriptions import describe_transactions
from kafka2pc.kafka.wire.topics import topic_max_message_bytes
from kafka2pc.kafka.write.column_producer import ColumnTransaction
from kafka2pc.proof.child_process import until
from kafka2pc.protocol.messages import Plan
from kafka2pc.protocol.names import new_token
from kafka2pc.protocol.participant import KeepsAborted, Outcome, RowsMissing
from kafka2pc.protocol.states import TxnState

pytestmark = [pytest.mark.kafka, pytest.mark.never_unsteady]

CODECS = ["none", "gzip", "snappy", "lz4", "zstd"]
HEADERS = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
FIRST = datetime(2026, 1, 1, tzinfo=UTC)


class Writer:
    """Writes transactions into a new topic, as the tasks of one query."""

    def __init__(self, kafka, partitions=3, **config):
        self.kafka = kafka
        self.topic = f"aborted-{uuid.uuid4().hex[:8]}"
        kafka.create_topic(self.topic, partitions, config=config)
        self.plan = Plan(query_id=str(uuid.uuid4()), batch_id=0, attempt=1, token=new_token(0, 1))
        self.admin = AdminClient(kafka.client_conf)
        self.store = self.participant()
        self.cluster = self.store.cluster

    def participant(self, codec="none", **options):
        conf = self.kafka.client_conf | {"compression.type": codec}
        return KafkaParticipant(conf, topic=self.topic, prefix=self.topic, **options)

    def begun(self, store=None):
        return (store or self.store).begin(self.plan)

    def precommitted(self, *values, **columns):
        with self.begun() as txn:
            txn.write(pa.record_batch({"value": values, **columns}))
            txn.flush()
            return txn.precommit()

    def end(self, c, verb):
        assert getattr(self.store, verb)(c) is Outcome.DONE
        settled(self.cluster, c.transactional_id, c.state)

    def abort(self, *cs):
        for c in cs:
            self.end(c, "abort")
        return list(cs)

    def seen(self, isolation="read_committed", **how):
        """By partition."""
        found = {}
        for m in records(self.kafka, self.topic, isolation, **how):
            row = m.key(), m.value(), m.headers(), m.timestamp()[1]
            found.setdefault(m.partition(), []).append(row)
        return found

    def open(self):
        return self.store.in_doubt(self.plan.query_id)

    def delete_before(self, offset):
        place = TopicPartition(self.topic, 0, offset)
        self.admin.delete_records([place])[place].result(30)

    def limit_batches(self, nbytes):
        entry = ConfigEntry(
            "max.message.bytes", str(nbytes), incremental_operation=AlterConfigOpType.SET
        )
        topic = ConfigResource(ResourceType.TOPIC, self.topic, incremental_configs=[entry])
        self.admin.incremental_alter_configs([topic])[topic].result(30)


@pytest.fixture
def new_writer(kafka):
    made = []

    def make(*args, **config):
        made.append(Writer(kafka, *args, **config))
        return made[-1]

    yield make
    for writer in made:  # no transaction stays open on the shared broker
        for c in writer.open():
            writer.store.abort(c)


def rows(numbers):
    """Keyed rows: each fifth without a key, each seventh without a value, some with headers."""
    keys = [None if n % 5 == 0 else b"key %d" % (n % 40) for n in numbers]
    values = [None if n % 7 == 0 else b"ours %d" % n for n in numbers]
    headers = [[{"key": "n", "value": b"%d" % n}, {"key": "x", "value": None}] for n in numbers]
    stamps = [FIRST + timedelta(seconds=n * 37 % 1000) for n in numbers]
    return pa.record_batch(
        {
            "key": pa.array(keys, pa.binary()),
            "value": pa.array(values, pa.binary()),
            "headers": pa.array([h if n % 3 else None for n, h in zip(numbers, headers)], HEADERS),
            "timestamp": pa.array(stamps, pa.timestamp("ms", "UTC")),
        }
    )


def test_rows_of_all_codecs_come_back_once_in_their_order(new_writer):
    """Five tasks write at the same time, and others in between."""
    writer = new_writer()
    stores = [writer.participant(codec) for codec in CODECS]
    open_now = [writer.begun(store) for store in stores]
    for start in range(0, 3000, 200):
        txn = open_now[start // 200 % 5]
        txn.write(rows(range(start, start + 200)))
        txn.flush()
        if start % 1000 == 0:
            writer.abort(writer.precommitted(f"foreign {start}"))
    lost = writer.abort(*(txn.precommit() for txn in open_now))
    before = {
        p: [row for row in found if not (row[1] or b"").startswith(b"foreign")]
        for p, found in writer.seen("read_uncommitted").items()
    }
    assert sum(map(len, before.values())) == 3000 and writer.seen() == {}
    assert len({(c.state, p.partition) for c in lost for p in c.partitions}) == 15
    assert isinstance(writer.store, KeepsAborted)
    copy = stores[-1].write_again(lost, writer.plan)
    assert writer.seen(still_open=True) == {} and copy.records == 3000
    assert copy.oldest_ms == FIRST.timestamp() * 1000 and copy.participant == "kafka"
    # a copy may be lost, too
    writer.abort(copy)
    writer.end(writer.store.write_again([copy], writer.plan), "commit")
    assert writer.seen() == before


def test_another_epoch_of_the_same_id_is_not_copied(new_writer):
    writer = new_writer(1)
    found = []
    for word in ("before", "lost", "after"):
        conf, name = writer.kafka.client_conf, f"{writer.topic}-same"
        txn = ColumnTransaction(writer.cluster, conf, name, 60_000, topic=writer.topic).begin()
        txn.write(pa.record_batch({"value": [word]}))
        txn.flush()
        found.append(txn.precommit())
        writer.abort(found[-1])
    assert len({c.state.producer_id for c in found}) == 1
    # its range reaches over the other two
    [lost] = found[1].partitions
    [first], [last] = found[0].partitions, found[2].partitions
    wide = replace(lost, first_offset=first.first_offset, last_offset=last.last_offset)
    writer.end(
        writer.store.write_again([replace(found[1], partitions=(wide,))], writer.plan), "commit"
    )
    assert [value for _, value, _, _ in writer.seen()[0]] == [b"lost"]


def test_the_times_of_the_broker_and_batches_that_are_too_large_now(new_writer):
    config = {"message.timestamp.type": "LogAppendTime"}
    writer = new_writer(1, **config)
    values = [f"{n:05}".ljust(1000, ".") for n in range(200)]
    lost = writer.abort(writer.precommitted(*values))
    writer.limit_batches(30_000)
    limit = lambda: topic_max_message_bytes(writer.cluster, writer.topic)
    until(lambda: limit() == 30_000, "the smaller limit")
    writer.end(writer.store.write_again(lost, writer.plan), "commit")
    [found] = writer.seen().values()
    assert [value.decode() for _, value, _, _ in found] == values
    assert writer.cluster.batch_bytes[writer.topic] < 200_000, "it was split"
    assert min(stamp for *_, stamp in found) >= lost[0].started_ms


def test_the_copy_has_at_least_the_time_of_the_lost_ones(new_writer):
    writer = new_writer(1)
    store = writer.participant(timeout_ms=120_000, engine="rows")
    store.conf["partitioner"] = "murmur2"  # only this engine has it
    with writer.begun(store) as txn:
        txn.write(pa.record_batch({"value": ["a"]}))
        txn.flush()
        lost = writer.abort(txn.precommit())
    for copier in (writer.store, store):
        copy = copier.write_again(lost, writer.plan)
        assert copy.timeout_ms == 120_000 and copy.oldest_ms == lost[0].started_ms
        writer.abort(copy)


# -- rows that are not there --


def test_rows_that_were_deleted_are_named_and_nothing_is_written(new_writer):
    writer = new_writer(1)
    lost = writer.abort(writer.precommitted(*"abcd"), writer.precommitted(*"ef"))
    writer.delete_before(2)
    with pytest.raises(RowsMissing) as caught:
        writer.store.write_again(lost, writer.plan)
    [(c, [gone])] = caught.value.gone.items()
    assert c == lost[0] and (gone.first_offset, gone.last_offset) == (0, 1)
    assert "retention" in gone.why
    assert writer.open() == [] and writer.seen() == {}


@pytest.mark.parametrize("more", [1, -1])
def test_another_count_than_that_of_the_task_is_not_committed(new_writer, more):
    writer = new_writer(1)
    good, short = writer.abort(writer.precommitted(*"abcd"), writer.precommitted(*"ef"))
    [p] = short.partitions
    far = replace(p, first_offset=900, last_offset=901)  # the log was cut
    with pytest.raises(RowsMissing):
        writer.store.write_again([replace(short, partitions=(far,))], writer.plan)
    short = replace(short, partitions=(replace(p, records=2 + more),))
    with pytest.raises(RowsMissing) as caught:
        writer.store.write_again([good, short], writer.plan)
    [(c, [gone])] = caught.value.gone.items()
    assert c == short and (gone.first_offset, gone.last_offset) == (4, 5)
    assert f"2 of {2 + more} rows" in gone.why
    assert writer.open() == [] and writer.seen() == {}


def test_unknown_offsets_are_searched_from_the_start_of_the_transaction_on(new_writer):
    writer = new_writer(1)
    old = writer.precommitted("c", timestamp=pa.array([FIRST], pa.timestamp("ms", "UTC")))
    new = writer.precommitted(*"ab")
    old, new = (
        replace(c, partitions=(replace(c.partitions[0], first_offset=-1, last_offset=-1),))
        for c in writer.abort(old, new)
    )
    with pytest.raises(RowsMissing) as caught:
        writer.store.write_again([old], writer.plan)
    [[gone]] = caught.value.gone.values()
    assert "0 of 1 rows" in gone.why and "not known" in gone.why
    writer.end(writer.store.write_again([new], writer.plan), "commit")
    assert [value for _, value, _, _ in writer.seen()[0]] == [b"a", b"b"]


# -- the proof of an end --


def test_a_transaction_that_is_being_fenced_may_still_be_committed(monkeypatch, new_writer):
    """Its coordinator may fail, and the next one knows only that it is open."""
    writer = new_writer(1)
    c = writer.precommitted("a")
    described = describe_transactions(writer.cluster, [c.transactional_id])
    [d] = described.values()
    fenced = {d.transactional_id: replace(d, state="PrepareEpochFence", epoch=d.epoch + 1)}
    monkeypatch.setattr(aborted_rows, "describe_transactions", lambda cluster, ids: fenced)
    assert final_states(writer.cluster, [c], patience_s=0) == {c: None}


def forgotten(c):
    """The same transaction under an id that no coordinator knows."""
    return replace(c, transactional_id=f"unknown-{uuid.uuid4().hex}")


def test_the_end_of_a_forgotten_transaction_is_in_the_log(new_writer):
    writer = new_writer()
    # another one around it is aborted
    around = writer.begun()
    around.write(pa.record_batch({"value": ["x"]}))
    around.flush()
    committed, aborted = writer.precommitted(*"abc"), writer.precommitted(*"def")
    writer.end(committed, "commit")
    writer.abort(aborted, around.precommit())
    blocker = writer.begun()
    blocker.write(pa.record_batch({"value": ["x"]}))
    blocker.flush()
    behind = writer.precommitted(*"ghi")
    writer.end(behind, "commit")
    known = [committed, aborted, behind, blocker.precommit()]
    wrong = replace(aborted, state=replace(aborted.state, epoch=aborted.state.epoch + 7))
    asked = [*known, *map(forgotten, [*known, wrong])]
    expected = [TxnState.COMMITTED, TxnState.ABORTED]
    found = final_states(writer.cluster, asked, patience_s=0.3)
    states = [*expected, TxnState.COMMITTED, None, *expected, None, None, None]
    assert found == dict(zip(asked, states, strict=True))
