"""A decision log in a Kafka topic: fences, long decisions in parts, and where a reader begins."""

import random
import time
import uuid
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import chain, repeat
from unittest.mock import patch

import pytest
from confluent_kafka import KafkaError, Producer
from confluent_kafka.admin import (
    AclBinding,
    AclOperation,
    AclPermissionType,
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    ResourcePatternType,
    ResourceType,
)
from decision_log_suite import record
from kafka_fixtures import records

from kafka2pc.decision_logs.topic import log as topic_log_module
from kafka2pc.decision_logs.topic import records as topic_records
from kafka2pc.decision_logs.topic import settings as topic_settings
from kafka2pc.decision_logs.topic.bookmark import Bookmark, save_bookmark
from kafka2pc.decision_logs.topic.log import LogTransactions, TopicLog, log_id
from kafka2pc.decision_logs.topic.reader import HIGH_WATERMARK, LAST_STABLE, end_of_topic
from kafka2pc.decision_logs.topic.settings import read_settings
from kafka2pc.kafka.client import close_cluster
from kafka2pc.kafka.wire.cluster import Cluster
from kafka2pc.kafka.wire.connection import NotSent
from kafka2pc.kafka.wire.topics import topic_rows
from kafka2pc.kafka.wire.transactions import end_txn, init_producer_id
from kafka2pc.kafka.write.sender import Sender
from kafka2pc.proof.child_process import until
from kafka2pc.proof.missing_rights import error_of
from kafka2pc.protocol.errors import (
    BadOption,
    BrokerUnreachable,
    CorruptDecision,
    LogUnwritable,
    MovedLog,
    NotAuthorized,
    Superseded,
    UnknownFormat,
)
from kafka2pc.protocol.log.decisions import Identity, Slot
from kafka2pc.protocol.log.format import dump_decision, load_decision
from kafka2pc.protocol.messages import Committable, PartitionRange, PreparedTxnState
from kafka2pc.protocol.participant import Outcome
from kafka2pc.protocol.policies import retry_unknown

pytestmark = [pytest.mark.kafka, pytest.mark.never_unsteady]
COMPACT = {"cleanup.policy": "compact"}


def topic_log(kafka, topic="decisions", **more):
    return TopicLog(kafka.client_conf, topic, uuid.uuid4().hex, **more)


def again(log, **more):
    """The log of the same name, as a new process opens it."""
    return TopicLog(log._conf, log.topic, log.name, **{"prefix": log.prefix} | more)


def append(kafka, topic, key, value):
    producer = Producer(kafka.client_conf)
    producer.produce(topic, value, key=key)
    producer.flush()


def delete_topic(kafka, log):
    """Delete the log's topic, and wait until the brokers do not know it any more."""
    admin = AdminClient(kafka.client_conf)
    admin.delete_topics([log.topic])[log.topic].result()
    gone = lambda: not topic_rows(log._cluster, [log.topic])[0].partitions
    until(gone, "the topic is deleted", 60)


def keys_in(kafka, log):
    """(key, is it a deletion?) of each record with the log's name, in order."""
    found = [(m.key().decode(), m.value() is None) for m in records(kafka, log.topic)]
    return [(key, gone) for key, gone in found if key.startswith((f"{log.name}/", f"{log.name}:"))]


def end_of(log, end=HIGH_WATERMARK):
    return end_of_topic(log._cluster, log.topic, end)


def content(log):
    return {slot: log.load(slot) for slot in log.slots()}


# -- fences --


def test_a_second_line_past_the_log_is_found_and_so_is_a_key_that_names_no_slot(kafka):
    log = topic_log(kafka)
    first = log.create(record())
    append(kafka, log.topic, f"{log.name}/7.0", dump_decision(record()))
    for ask in (lambda: log.chain(7), lambda: log.create(first)):
        with pytest.raises(CorruptDecision, match="2 different lines"):
            ask()
    other = topic_log(kafka)
    append(kafka, log.topic, f"{other.name}/seven", b"x")
    with pytest.raises(CorruptDecision, match="names no slot"):
        other.batches()


def test_another_logs_open_transaction_hides_nothing(kafka):
    mine, other = topic_log(kafka, within_ms=3000), topic_log(kafka)
    state = init_producer_id(other._cluster, log_id(other.prefix, other.name), timeout_ms=10_000)
    other.transactions.append(other.prefix, state, {f"{other.name}/7.0": b"not ended"})
    first = record()
    with pytest.raises(LogUnwritable, match="was read to"):  # its end cannot be known yet
        mine.create(first)
    assert (
        end_txn(other._cluster, log_id(other.prefix, other.name), state, commit=False)
        is Outcome.DONE
    )
    assert mine.create(first) == first == mine.create(record(commit=False))


def test_who_loses_does_not_disturb_a_writer(kafka):
    log = topic_log(kafka)
    first = log.create(record())
    with patch.object(topic_log_module, "init_producer_id", side_effect=AssertionError("a fence")):
        assert log.create(record(commit=False)) == first


def test_a_broker_that_goes_away_is_no_answer_only_if_the_question_was_asked(kafka):
    log, away = topic_log(kafka), BrokerUnreachable("no broker")
    with (
        patch.object(topic_log_module, "init_producer_id", side_effect=away),
        pytest.raises(LogUnwritable, match="no broker"),
    ):
        log.create(record())
    real, asked = init_producer_id, []

    def once(*args, **more):
        if asked:
            raise away
        asked.append(1)
        return real(*args, **more)

    with (
        patch.object(topic_log_module, "init_producer_id", once),
        patch.object(topic_log_module, "end_txn", return_value=Outcome.UNKNOWN),
    ):
        assert log.create(record()) is None


def test_a_topic_that_is_not_the_one_of_before_is_found(kafka):
    log = topic_log(kafka, f"gone-{uuid.uuid4().hex}")
    log.create(record())
    log.chain(7)
    delete_topic(kafka, log)
    kafka.create_topic(log.topic, config={"cleanup.policy": "compact"})
    with pytest.raises(CorruptDecision, match="deleted and made again"):
        log.chain(7)


@pytest.mark.parametrize("policy", ["delete", "compact,delete"])
def test_a_topic_that_would_forget_is_refused(kafka, policy):
    name = uuid.uuid4().hex
    kafka.create_topic(name, config={"cleanup.policy": policy})
    with pytest.raises(BadOption, match="forgets decisions"):
        topic_log(kafka, name)
    assert records(kafka, name, "read_uncommitted") == []


def test_compaction_keeps_what_restore_needs_and_leaves_no_part_of_what_is_purged(kafka):
    admin, name = AdminClient(kafka.client_conf), uuid.uuid4().hex
    node = str(min(admin.list_topics(timeout=10).brokers))
    quick = ConfigResource(
        ResourceType.BROKER,
        node,
        incremental_configs=[
            ConfigEntry(
                "log.cleaner.backoff.ms", "100", incremental_operation=AlterConfigOpType.SET
            )
        ],
    )
    admin.incremental_alter_configs([quick])[quick].result()
    kafka.create_topic(
        name,
        config={
            "cleanup.policy": "compact",
            "segment.ms": 100,
            "min.cleanable.dirty.ratio": 0,
            "delete.retention.ms": 0,
            "max.message.bytes": 5000,
        },
    )
    log = topic_log(kafka, name)
    kept = [log.create(record(b, a, commit=a == 1, n=300)) for b in range(6) for a in range(2)][-4:]
    assert sum(m.key().count(b":") for m in records(kafka, name)) >= 12, "there are no parts"
    log.purge(4)
    purged = {f"{log.name}{sign}{b}.".encode() for sign in "/:" for b in range(4)}
    start = len(f"{log.name}/0.")

    def compacted():
        append(kafka, name, "another log", b"to begin a new segment")
        return not {m.key()[:start] for m in records(kafka, name)} & purged

    until(compacted, "the broker has compacted the topic", 60)
    for reader in (again(log), again(log, prefix="without-a-bookmark"), log.sibling(log.name)):
        assert (reader.batches(), reader.chain(4) + reader.chain(5)) == ([4, 5], kept)
    longer = record(6, n=5000)
    assert log.create(longer) == longer and again(log).chain(6) == [longer]


def test_a_log_goes_on_when_another_part_of_the_process_has_closed_the_connection(kafka):
    conf = kafka.client_conf | {"client.id": uuid.uuid4().hex}
    log = TopicLog(conf, uuid.uuid4().hex, "q")
    first = log.create(record())
    close_cluster(conf)
    assert log.chain(7) == [first]
    close_cluster(conf)
    log.purge(8)
    assert log.slots() == []
    close_cluster(conf)


def test_all_names_of_a_topic_share_one_reader(kafka):
    log = topic_log(kafka)
    log.create(record(7))
    twins = [log.sibling(uuid.uuid4().hex) for _ in range(20)]
    for twin in twins:
        twin.create(record(7))
    assert len({id(twin.reader.tail) for twin in (log, *twins)}) == 1
    log.close()


def owned(prefix, *, n=1, adopts=False, **more):
    """A record that a run with this prefix writes, with `n` Committables if it is a COMMIT."""
    return replace(
        record(n=n, **more), identity=Identity(prefix=prefix, fence=prefix), adopts=adopts
    )


@pytest.mark.parametrize("n", [1, 6000])
def test_one_prefix_owns_the_log_until_another_one_adopts_it(kafka, n):
    old, new = topic_log(kafka, prefix="old"), None
    assert old.owner() == ""
    old.create(owned("old", n=n))
    new = again(old, prefix="new")
    with patch.object(
        topic_records,
        "load_decision",
        side_effect=None if n == 1 else AssertionError("parsed"),
        wraps=load_decision,
    ):
        with pytest.raises(MovedLog, match="belongs to the prefix old"):
            new.create(owned("new", batch_id=8))
        adopted = owned("new", attempt=1, commit=False, adopts=True)
        assert new.create(adopted) == adopted
    with pytest.raises(MovedLog, match="belongs to the prefix new"):
        old.create(owned("old", batch_id=8))
    wanted = owned("new", batch_id=8)
    assert new.create(wanted) == wanted
    assert again(old, prefix="third").owner() == "new" and again(old).chain(8) == [wanted]


@pytest.mark.parametrize("point", ["fence", "append", "end"])
def test_an_adoption_fences_an_owner_that_is_suspended(kafka, point):
    """The old driver sleeps right before a request; meanwhile the log is adopted."""
    old = topic_log(kafka, prefix="old")
    old.create(owned("old"))
    new, real, adopted = again(old, prefix="new"), getattr(LogTransactions, point), []

    def sleeps(transactions, *args):
        if transactions.prefix == "old" and not adopted:
            adopted.append(new.create(owned("new", attempt=1, commit=False, adopts=True)))
        return real(transactions, *args)

    with (
        patch.object(LogTransactions, point, sleeps),
        pytest.raises(MovedLog, match="belongs to the prefix new"),
    ):
        old.create(owned("old", batch_id=8))
    assert content(again(new)).keys() == {Slot(7, 0), Slot(7, 1)}
    assert content(again(new))[Slot(7, 1)] == adopted[0]


def test_an_owner_that_goes_on_fences_an_adoption_that_is_suspended(kafka):
    old = topic_log(kafka, prefix="old")
    old.create(owned("old"))
    new, decided = again(old, prefix="new"), []
    real = LogTransactions.append

    def sleeps(transactions, *args):
        if transactions.prefix == "new" and not decided:
            decided.append(old.create(owned("old", batch_id=8)))
        return real(transactions, *args)

    with (
        patch.object(LogTransactions, "append", sleeps),
        pytest.raises(Superseded, match="it went on just now"),
    ):
        new.create(owned("new", attempt=1, commit=False, adopts=True))
    assert content(again(old)).keys() == {Slot(7, 0), Slot(8, 0)} and old.owner() == "old"


# -- decisions that are longer than a record --


def long_record(batch_id=7, attempt=0, tasks=200, partitions=400):
    """A decision of a large batch, with numbers as they are in production: 12.8 MB of JSON."""
    rng = random.Random(batch_id)

    def written(partition):
        n, at = rng.randrange(900, 1100), rng.randrange(10**9, 10**10)
        return PartitionRange(
            topic="shop.orders.enriched",
            partition=partition,
            records=n,
            first_offset=at,
            last_offset=at + n - 1,
        )

    cs = tuple(
        Committable(
            transactional_id=f"kafka2pc-{uuid.uuid4()}-{batch_id}-{t}-0-{rng.randrange(16**8):08x}",
            end_txn_version=5,
            state=PreparedTxnState(4000 + t, 3),
            cluster_id="MkU3OEVBNTcwNTJENDM2Qk",
            partitions=tuple(map(written, range(partitions))),
            started_ms=1_700_000_000_000 + t,
            timeout_ms=900_000,
        )
        for t in range(tasks)
    )
    return replace(record(batch_id, attempt), committables=cs)


@pytest.mark.full
def test_a_decision_of_200_tasks_and_400_partitions_fits_into_a_topic_with_default_settings(kafka):
    log, wanted = topic_log(kafka), long_record()
    assert len(dump_decision(wanted)) > 12_000_000
    assert log.create(wanted) == wanted
    assert (
        again(log).create(record()) == wanted
        and again(log).chain(7) == [wanted]
        and log.batches() == [7]
    )
    assert log.name in log.siblings() and not [
        name for name in log.siblings() if name.startswith(f"{log.name}:")
    ]
    log.sibling(log.name).purge(8)
    assert again(log).slots() == []
    written = keys_in(kafka, log)
    assert len(written) == 6 and {key for key, gone in written if not gone} == {
        key for key, gone in written if gone
    }


def test_a_short_decision_is_one_record_that_any_json_parser_reads(kafka):
    log, short = topic_log(kafka), record()
    log.create(short)
    assert [
        m.value() for m in records(kafka, log.topic) if m.key().decode().startswith(log.name)
    ] == [dump_decision(short)]


@pytest.fixture
def small(kafka):
    """A log in a topic that takes only 5000 bytes at once, so that most decisions have parts."""
    name = uuid.uuid4().hex
    kafka.create_topic(name, config=COMPACT | {"max.message.bytes": 5000})
    return topic_log(kafka, name, within_ms=2000)


def test_a_part_that_is_missing_or_was_written_twice_or_is_another_one_is_found(kafka, small):
    wanted = record(n=2000)
    for part, value, words in (
        (1, None, "is missing"),
        (1, b"x", "2 different lines"),
        (0, None, "is missing"),
    ):
        log = topic_log(kafka, small.topic)
        log.create(wanted)
        append(kafka, log.topic, f"{log.name}:7.0:{part}", value)
        for reader in (log, again(log)):
            for ask in (lambda: reader.chain(7), lambda: reader.create(wanted)):
                with pytest.raises(CorruptDecision, match=words):
                    ask()
        append(kafka, log.topic, f"{log.name}:7.0:{part}", None)
        append(kafka, log.topic, f"{log.name}:7.0:{part}", b"what compaction may leave")
        with pytest.raises(CorruptDecision, match="do not fit together"):
            again(log).chain(7)


@pytest.mark.parametrize(
    "head",
    [
        b'{"format": "parts", "par',
        b'{"format": "parts", "parts": "many"}',
        b'{"format": "parts", "parts": 0}',
    ],
)
def test_a_damaged_list_of_parts_is_found(kafka, head):
    log = topic_log(kafka)
    append(kafka, log.topic, f"{log.name}/7.0", head)
    for ask in (lambda: log.chain(7), lambda: log.create(record())):
        with pytest.raises(CorruptDecision, match="7.0"):
            ask()


def test_a_version_that_knows_no_parts_refuses_a_long_decision_as_newer_and_ignores_its_parts(
    small,
):
    small.create(record(n=2000))
    small.slots()
    ((key, (value,)),) = [
        (key, lines)
        for key, lines in small.reader.tail.found.items()
        if key.startswith(f"{small.name}/")
    ]
    assert key == f"{small.name}/7.0" and len(small.reader.tail.found) > 2
    with pytest.raises(UnknownFormat, match="known up to"):
        load_decision(value, key, Slot(7, 0))


@contextmanager
def open_between(other):
    """Inside, the first transaction that sends two batches gets another log's open transaction
    between them. Yields a function that ends that one.
    """
    real, opened = Sender.put, []

    def put(self, section):
        real(self, section)
        if opened:
            return
        opened.append(None)
        self.flush()
        opened[0] = init_producer_id(
            other._cluster, log_id(other.prefix, other.name), timeout_ms=60_000
        )
        other.transactions.append(other.prefix, opened[0], {"open": b"x"})

    with patch.object(Sender, "put", put):
        yield lambda: end_txn(
            other._cluster, log_id(other.prefix, other.name), opened[0], commit=False
        )


def test_a_reader_that_stops_between_the_parts_of_a_decision_sees_no_decision(kafka, small):
    other, reader = topic_log(kafka, small.topic), again(small, within_ms=500)
    first, wanted = (owned(small.prefix, batch_id=batch_id, n=2000) for batch_id in (6, 7))
    small.create(first)
    with open_between(other) as end:
        assert small.create(wanted) == wanted
    assert reader.reader.record_in(Slot(7, 0), LAST_STABLE) is None and reader.reader.tail.found, (
        "the reader has seen no part"
    )
    with pytest.raises(BrokerUnreachable, match="was read to"):
        reader.slots()
    assert end() is Outcome.DONE
    assert content(reader) == {Slot(6, 0): first, Slot(7, 0): wanted}


def test_a_purge_deletes_slots_before_their_parts(kafka, small):
    for batch_id in range(3):
        small.create(record(batch_id, n=2000))
    small.purge(2)
    deleted = [key for key, gone in keys_in(kafka, small) if gone]
    assert (
        deleted[:2] == [f"{small.name}/{n}.0" for n in range(2)]
        and len(deleted) > 4
        and all(":" in key for key in deleted[2:])
    )
    assert content(again(small)).keys() == {Slot(2, 0)}


def test_a_slot_that_is_purged_while_it_is_read_is_gone_and_no_damage(kafka, small):
    """Compaction has removed a part before the reader came to it; the purge is behind the end that
    the reader asked for.
    """
    small.create(record(n=2000))
    reader = again(small)
    (slot,) = reader.slots()
    small.purge(8)
    del reader.reader.tail.found[f"{small.name}:7.0:1"]
    assert reader.load(slot) is None


# -- where a reader begins --

FILLER = 5_000


def fill(kafka, topic, count=FILLER):
    producer = Producer(kafka.client_conf | {"linger.ms": 5})
    for n in range(count):
        producer.produce(topic, b"x" * 100, key=f"another name/{n}.0")
    producer.flush()


def insisting(method):
    """A method of a bookmark that asks again until the broker answers. The product does without a
    bookmark then.
    """
    return lambda self, *args: self._cluster.persist(lambda: method(self, *args))


INSISTING = {name: insisting(getattr(Bookmark, name)) for name in ("_ask_group", "_end_of")}
SureBookmark = type("SureBookmark", (Bookmark,), INSISTING)


def bookmark(log, **more):
    """The log's bookmark, as a new process finds it."""
    found = SureBookmark(lambda: log._cluster, log.topic, log_id(log.prefix, log.name))
    found.load()
    for name, value in more.items():
        setattr(found, name, value)
    return found


@contextmanager
def clear_answers():
    """Inside, the end of a transaction and a bookmark are asked for again while the answer is
    unclear.
    """
    end_again = lambda *args, **more: retry_unknown(20)(partial(end_txn, *args, **more))
    with (
        patch.object(topic_log_module, "end_txn", end_again),
        patch.multiple(Bookmark, **INSISTING),
    ):
        yield


def purged(log, batch_id):
    """Purge the batches before this one, and have the bookmark saved. A purge that gets no clear
    answer leaves both to the next one.
    """
    before = bookmark(log).at
    with clear_answers():
        until(lambda: log.purge(batch_id) or bookmark(log).at > before, "the bookmark is saved")


@pytest.fixture(scope="module")
def full(kafka):
    """A log that has decided four batches and purged two of them, in a topic with many lines of
    other names before, between and after them.
    """
    name = uuid.uuid4().hex
    kafka.create_topic(name, config=COMPACT)
    log = topic_log(kafka, name)
    for batch_id in range(4):
        fill(kafka, name)
        log.create(record(batch_id, 0, commit=False))
        log.create(record(batch_id, 1, n=7000 if batch_id == 2 else 1))
    purged(log, 2)
    return log


def read_by(log):
    """(what a new process finds, how many records it read for it)."""
    reader = again(log)
    with clear_answers():
        return content(reader), reader.reader.tail.records


def test_a_new_process_reads_only_what_is_not_purged_and_finds_the_same(full):
    wanted = {
        slot: decision
        for slot, decision in content(again(full, prefix="without-a-bookmark")).items()
    }
    assert sorted(wanted) == [(2, 0), (2, 1), (3, 0), (3, 1)]
    found, read = read_by(full)
    assert found == wanted and read < FILLER + 20, read


@pytest.mark.parametrize(
    "wrong", ["none", "another topic", "no topic", "beyond the end", "an epoch that is not known"]
)
def test_a_bookmark_that_does_not_count_is_as_none(full, wrong):
    wanted, good = content(again(full)), bookmark(full)
    end, epoch = end_of(full)
    try:
        if wrong == "none":
            admin = AdminClient(full._conf)
            admin.delete_consumer_groups([log_id(full.prefix, full.name)])[
                log_id(full.prefix, full.name)
            ].result(30)
        elif wrong == "beyond the end":
            bookmark(full).save(end + 1, epoch)
        elif wrong == "an epoch that is not known":
            bookmark(full).save(end, epoch + 1)
        else:
            bookmark(full, _topic_id=str(uuid.uuid4()) if wrong == "another topic" else "").save(
                end, epoch
            )
        found, read = read_by(full)
        assert found == wanted and read > 4 * FILLER
    finally:
        good.save(good.at, epoch)
    assert bookmark(full).at == good.at > 0


def test_an_older_bookmark_costs_time_and_no_decision(full):
    wanted, good = content(again(full)), bookmark(full)
    epoch = end_of(full)[1]
    good.save(FILLER, epoch)
    found, read = read_by(full)
    good.save(good.at, epoch)
    assert found == wanted and 2 * FILLER < read < 5 * FILLER


def test_a_topic_that_was_deleted_and_made_again_is_read_from_its_first_record(kafka):
    log = topic_log(kafka, uuid.uuid4().hex)
    log.create(record(0))
    for batch_id in range(1, 5):
        log.create(record(batch_id))
        purged(log, batch_id)
    assert bookmark(log).at > 4
    delete_topic(kafka, log)
    fresh = again(log)
    first = fresh.create(record(5))
    fill(kafka, log.topic, 100)
    save_bookmark(log.reader, {"anything"})  # a driver that was suspended meanwhile
    assert bookmark(log).at == 0 and content(again(log)) == {Slot(5, 0): first}


def test_records_that_were_cut_off_and_written_again_are_read(kafka):
    """As after an unclean leader election: a new leader's epoch begins before the bookmark."""
    log = topic_log(kafka, f"cut-{uuid.uuid4().hex}")
    log.create(record(0))
    # until the transaction's marker is written
    while (found := end_of(log, LAST_STABLE))[0] < 2:
        time.sleep(0.05)
    old_epoch = found[1]
    kafka.kill()
    kafka.restart()
    log = TopicLog(kafka.client_conf, log.topic, log.name)
    written = {d.slot: d for d in map(log.create, map(record, range(1, 5)))}
    log.slots()
    ended = bookmark(log)._end_of(old_epoch)
    assert ended == 2 and end_of(log)[1] > old_epoch
    for at, counts in ((ended, True), (ended + 1, False), (log.reader.tail.at, False)):
        bookmark(log).save(at, old_epoch)
        assert bookmark(log).at == (at if counts else 0)
        assert written.items() <= content(again(log)).items()


def test_a_bookmark_at_an_aborted_record_or_at_a_marker_hides_nothing(kafka):
    log = topic_log(kafka, uuid.uuid4().hex)
    log.create(record(0))
    state = log.transactions.fence(log.prefix)
    log.transactions.append(log.prefix, state, {f"{log.name}/1.0": b"aborted"})
    end_txn(log._cluster, log_id(log.prefix, log.name), state, commit=False)
    wanted = log.create(record(2))
    until(lambda: end_of(log)[0] >= 6, "a record and a marker of each is written")
    epoch = end_of(log)[1]
    for at in range(1, 5):
        bookmark(log).save(at, epoch)
        assert (
            content(again(log)) == {Slot(2, 0): wanted} and again(log).create(record(2)) == wanted
        )
    bookmark(log).save(5, epoch)
    assert content(again(log)) == {}, "this test cannot fail"


def test_a_purge_that_is_not_done_leaves_the_bookmark(kafka):
    log = topic_log(kafka)
    for batch_id in range(3):
        log.create(record(batch_id))
    purged(log, 1)
    before = bookmark(log).at
    real = end_txn
    for answer in (Outcome.UNKNOWN, Outcome.REFUSED):
        with patch.object(
            topic_log_module,
            "end_txn",
            lambda *args, commit, answer=answer: real(*args, commit=False) and answer,
        ):
            log.purge(2)
        assert 0 < bookmark(log).at == before
    assert content(again(log)).keys() == {Slot(1, 0), Slot(2, 0)}
    purged(log, 2)
    assert bookmark(log).at > before


def test_names_that_share_a_reader_save_no_bookmark(kafka):
    log = topic_log(kafka)
    twin = log.sibling(uuid.uuid4().hex)
    twin.create(record(1))
    twin.purge(2)
    log.close()
    alone = again(log)
    alone.create(record(1))
    purged(alone, 2)
    admin = AdminClient(kafka.client_conf)
    groups = {group.group_id for group in admin.list_consumer_groups().result(30).valid}
    assert (
        log_id(alone.prefix, alone.name) in groups and log_id(twin.prefix, twin.name) not in groups
    )


def test_without_a_right_to_any_group_all_works_and_every_start_reads_the_topic(secure, caplog):
    secure.create_topic("decisions", config=COMPACT)
    rights = [
        (ResourceType.TOPIC, "decisions", op)
        for op in (AclOperation.READ, AclOperation.WRITE, AclOperation.DESCRIBE_CONFIGS)
    ]
    admin = AdminClient(secure.client_conf)
    give = lambda kind, name, op: [
        f.result()
        for f in admin.create_acls(
            [
                AclBinding(
                    kind,
                    name,
                    ResourcePatternType.PREFIXED,
                    "User:alice",
                    "*",
                    op,
                    AclPermissionType.ALLOW,
                )
            ]
        ).values()
    ]
    for right in (*rights, (ResourceType.TRANSACTIONAL_ID, "kafka2pc", AclOperation.WRITE)):
        give(*right)
    with Cluster(secure.client_conf_for("alice")) as alice:
        ask = lambda: init_producer_id(alice, "kafka2pc-probe", timeout_ms=60_000)
        until(lambda: error_of(ask) is None, "the last of her rights is in force")
    log = TopicLog(secure.client_conf_for("alice"), "decisions", "orders")
    for batch_id in range(3):
        d = log.create(record(batch_id))
        assert d and log.chain(batch_id) == [d]
        log.purge(batch_id)
    assert content(again(log)) == {Slot(2, 0): d} and bookmark(log).at == 0
    assert "grant READ on the resource Group kafka2pc-decisions-orders" in caplog.text
    give(ResourceType.GROUP, "kafka2pc-", AclOperation.READ)
    purged(again(log), 2)
    assert bookmark(log).at > 0 and content(again(log)) == {Slot(2, 0): d}
    check_adoption_without_the_owners_right(secure, log)


def check_adoption_without_the_owners_right(secure, log):
    """The log belongs to a prefix that alice has no right on; then she gets it back."""
    former = TopicLog(secure.client_conf, log.topic, log.name, prefix="revoked")
    written = [former.create(owned("revoked", batch_id=3))]
    adopted = owned(log.prefix, batch_id=3, attempt=1, commit=False, adopts=True)
    with pytest.raises(NotAuthorized, match="was revoked") as caught:
        log.create(adopted)
    assert "Grant WRITE on that TransactionalId" in str(caught.value)
    assert log.chain(3) == written
    assert TopicLog(secure.client_conf, log.topic, log.name).create(adopted) == adopted
    wanted = owned(log.prefix, batch_id=4)
    assert log.create(wanted) == wanted  # the right is needed for the adoption only


# -- the topic's settings --


def settings(kafka, topic):
    with Cluster(kafka.client_conf) as cluster:
        return read_settings(cluster, topic)


def test_a_topic_that_we_make_stays_short_and_one_that_may_grow_is_reported(kafka, caplog):
    ours, theirs, hourly = (uuid.uuid4().hex for _ in range(3))
    kafka.create_topic(theirs, config=COMPACT)
    kafka.create_topic(hourly, config=COMPACT | {"max.compaction.lag.ms": 3_600_000})
    for name in (ours, hourly, theirs):
        topic_log(kafka, name).slots()
        again(topic_log(kafka, name)).siblings()
    assert (
        settings(kafka, ours).items()
        >= {
            "cleanup.policy": "compact",
            "segment.ms": "3600000",
            "max.compaction.lag.ms": "3600000",
        }.items()
    )
    warned = [
        r.getMessage()
        for r in caplog.records
        if r.levelname == "WARNING" and "may grow long" in r.getMessage()
    ]
    assert (
        len(warned) == 1
        and f"kafka:{theirs} " in warned[0]
        and "Set max.compaction.lag.ms=3600000" in warned[0]
    )
    assert "max.compaction.lag.ms is 9223372036854775807 and segment.ms is 604800000" in warned[0]


def test_a_topic_with_one_copy_is_reported_once_where_there_are_more_brokers(kafka, caplog):
    """A second broker is pretended: the only one is named twice. The first question for the
    brokers does not get through.
    """
    alone, ours, theirs = (uuid.uuid4().hex for _ in range(3))
    topic_log(kafka, alone)
    kafka.create_topic(theirs, config=COMPACT)
    answers = chain([NotSent("Metadata")], repeat([0, 0]))
    with patch.object(Cluster, "nodes", side_effect=answers):
        for _ in range(2):
            topic_log(kafka, ours)
            topic_log(kafka, theirs)
    warned = [r.getMessage() for r in caplog.records if "one copy" in r.getMessage()]
    assert len(warned) == 2 and alone not in caplog.text
    for topic, text in zip((ours, theirs), warned, strict=True):
        assert f"decision log kafka:{topic} has one copy, and the cluster has 2 brokers" in text
        assert "that broker's disk" in text and "kafka-reassign-partitions.sh" in text
        assert f"--create --topic {topic} --partitions 1 --replication-factor 2" in text


@pytest.mark.parametrize("code", [KafkaError.INVALID_CONFIG, KafkaError.POLICY_VIOLATION])
def test_a_cluster_that_refuses_our_settings_gets_a_topic_with_what_must_be(kafka, code):
    real, name = topic_settings.create_topic, uuid.uuid4().hex

    def strict(cluster, topic, wanted):
        return (code, "not here") if "segment.ms" in wanted else real(cluster, topic, wanted)

    with patch.object(topic_settings, "create_topic", strict):
        log = topic_log(kafka, name)
    assert settings(kafka, name)["segment.ms"] == "604800000"
    d = record()
    assert log.create(d) == d
    with patch.object(topic_settings, "create_topic", return_value=(code, "not here")):
        with pytest.raises(BadOption, match="not here"):
            topic_log(kafka, uuid.uuid4().hex)
