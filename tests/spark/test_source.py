"""The source: a range ends by position, losses are reported, and Spark, started again and again,
reads each record once.
"""

import itertools
import logging
import os
import time
import uuid
from types import SimpleNamespace

import pytest
from confluent_kafka import Producer, TopicPartition
from confluent_kafka.admin import (
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    NewPartitions,
)

from kafka2pc.kafka.wire import error_codes as codes
from kafka2pc.kafka.wire.connection import NoAnswer
from kafka2pc.proof.child_process import until
from kafka2pc.protocol.errors import (
    BadOption,
    BrokerUnreachable,
    NotAuthorized,
    RecordsBroken,
    RecordsGone,
    TopicGone,
    TopicRecreated,
)
from kafka2pc.spark.source import range_reader
from kafka2pc.spark.source.cluster import NOTHING_READ, Questions
from kafka2pc.spark.source.lag import measure_lag, read_last_offsets
from kafka2pc.spark.source.offsets import (
    Bounds,
    Offsets,
    Range,
    Snapshot,
    from_json,
    plan_end,
    to_json,
)
from kafka2pc.spark.source.options import parse_source_options
from kafka2pc.spark.source.places import EARLIEST, LATEST
from kafka2pc.spark.source.range_reader import read_ranges
from kafka2pc.spark.source.rate import Tries
from kafka2pc.spark.source.readers import (
    BatchReader,
    RangePartition,
    StreamReader,
    drop_unwanted,
    limit_snapshot,
)
from kafka2pc.spark.source.starting_offsets import find_start, plan_read, take_snapshot

T = "t"


def test_what_is_no_longer_asked_for_is_left_out_with_a_warning(caplog):
    """The rest keeps its offsets and its topic id."""
    o = parse_source_options({"kafka.bootstrap.servers": "localhost:1", "subscribe": "t"})
    start = Offsets(
        at={("t", 0): 5, ("u", 0): 7}, ids={"t": "id", "u": "other"}, since={("u", 0): 1}
    )
    assert drop_unwanted(o, start) == Offsets(at={("t", 0): 5}, ids={"t": "id"}) and drop_unwanted(
        o, drop_unwanted(o, start)
    ) == drop_unwanted(o, start)
    assert "no longer asked for, and left out from here on: u-0 at offset 7" in caplog.text
    assert "If they are asked for again, they are read from their first record" in caplog.text


def test_what_is_no_longer_asked_for_is_named_once(caplog, monkeypatch):
    """Also if there is nothing new, so that the offsets in the checkpoint stay."""
    now = Snapshot({(T, 0): Bounds(0, 5)}, {T: "id"})
    monkeypatch.setattr("kafka2pc.spark.source.readers._compare", lambda *_: (now, []))
    o = parse_source_options({"kafka.bootstrap.servers": "localhost:1", "subscribe": T})
    start = to_json(Offsets(at={(T, 0): 5, ("u", 0): 7}, ids={T: "id", "u": "other"}))
    reader = StreamReader(o)
    assert [reader.latestOffset(start, None) for _ in range(3)] == [start] * 3
    assert caplog.text.count("no longer asked for") == 1


def test_a_topic_that_the_first_look_missed_is_not_forgotten():
    now = Snapshot({(T, 0): Bounds(0, 10), ("u", 0): Bounds(0, 5)}, {T: "1", "u": "2"})
    target, read_so_far = (
        Snapshot({("u", 0): Bounds(0, 5)}, {"u": "2"}),
        Offsets(at={(T, 0): 4, ("u", 0): 0}, ids=now.ids),
    )
    assert limit_snapshot(now, target, read_so_far).parts == {
        (T, 0): Bounds(0, 4),
        ("u", 0): Bounds(0, 5),
    }
    assert plan_end(read_so_far, limit_snapshot(now, target, read_so_far)).at == {
        (T, 0): 4,
        ("u", 0): 5,
    }


class GrowingTopic:
    """A cluster whose topic gets a record while a read is planned: its end was 5, and the offset of
    the time is 7.
    """

    def topics(self, names):
        return {T: ("id", [0])}

    def bounds(self, parts):
        return {(T, 0): Bounds(0, 5)}

    def offsets_of(self, times):
        return {(T, 0): 7}


def test_an_end_by_time_may_lie_behind_the_end_that_was_asked_before():
    o = parse_source_options(
        {"kafka.bootstrap.servers": "localhost:1", "subscribe": T, "endingTimestamp": "1"}
    )
    assert plan_read(GrowingTopic(), o) == [Range(T, 0, EARLIEST, 7)]


# -- on a broker --


@pytest.fixture
def topic(kafka):
    name = f"source-{uuid.uuid4().hex[:8]}"
    kafka.create_topic(name, partitions=2)
    return name


@pytest.fixture
def ask(kafka):
    with Questions(kafka.client_conf) as questions:
        yield questions


_READERS = []


@pytest.fixture(autouse=True)
def stop_readers():
    yield
    while _READERS:
        _READERS.pop().stop()


def stream(options):
    """A reader that is stopped when the test has ended, as Spark stops it."""
    _READERS.append(StreamReader(options))
    return _READERS[-1]


def delete_topic(kafka, ask, topic):
    admin = AdminClient(kafka.client_conf)
    admin.delete_topics([topic])[topic].result(60)
    until(lambda: not ask.topics([topic]), "the topic is gone", 60)


def delete_before(kafka, topic, begins):
    """Delete the records of some partitions before the offset that each of them begins with now."""
    cut = [TopicPartition(topic, p, begin) for p, begin in begins.items()]
    admin = AdminClient(kafka.client_conf)
    for deleted in admin.delete_records(cut).values():
        deleted.result(60)


def begin(kafka):
    producer = Producer(kafka.client_conf | {"transactional.id": str(uuid.uuid4()), "log_level": 0})
    producer.init_transactions(30)
    producer.begin_transaction()
    return producer


def write(kafka, topic, values, partition=0, commit=True):
    producer = begin(kafka)
    for value in values:
        producer.produce(topic, str(value).encode(), partition=partition)
    producer.flush(30)
    producer.commit_transaction(30) if commit else producer.abort_transaction(30)
    settle(kafka, topic)


def settle(kafka, topic):
    """Wait until all markers are written."""
    with Questions(kafka.client_conf) as ask:
        parts = [(topic, p) for p in ask.topics([topic])[topic][1]]
        until(lambda: ask.ends(parts) == ask.ends(parts, committed=False), "the markers", 60)


def options(kafka, topic, **more):
    return parse_source_options(
        {"kafka.bootstrap.servers": kafka.bootstrap_servers, "subscribe": topic} | more
    )


def values(batches):
    return [v.decode() for b in batches for v in b["value"].to_pylist()]


@pytest.mark.never_unsteady
@pytest.mark.kafka
def test_every_cut_through_gaps_ends_and_reads_each_record_once(kafka, topic, ask):
    for n in range(4):
        write(kafka, topic, [f"{n}a", f"{n}b"])
        write(kafka, topic, ["never"] * n, commit=False)
    end, o = ask.bounds([(topic, 0)])[topic, 0].end, options(kafka, topic)
    whole = [f"{n}{x}" for n in range(4) for x in "ab"]
    for size in (1, 2, 3, 5, end):
        marks = [*range(0, end, size), end]
        began = time.monotonic()
        assert [
            v
            for a, b in itertools.pairwise(marks)
            for v in values(read_ranges(o, [Range(topic, 0, a, b)]))
        ] == whole
        assert time.monotonic() - began < 30


@pytest.mark.kafka
@pytest.mark.never_unsteady
def test_an_open_transaction_holds_back_and_loses_nothing(kafka, topic, ask):
    waiting = begin(kafka)
    waiting.produce(topic, b"early", partition=0)
    waiting.flush(30)
    late = begin(kafka)
    late.produce(topic, b"late", partition=0)
    late.flush(30)
    late.commit_transaction(30)
    reader = stream(options(kafka, topic, startingOffsets="earliest"))
    start = reader.initialOffset()
    assert reader.partitions(start, reader.latestOffset(start, None)) == []
    dirty = stream(
        options(
            kafka,
            topic,
            startingOffsets="earliest",
            **{"kafka.isolation.level": "read_uncommitted"},
        )
    )
    assert dirty.partitions(start, dirty.latestOffset(start, None))
    waiting.commit_transaction(30)
    settle(kafka, topic)
    found = [
        v
        for r in reader.partitions(start, reader.latestOffset(start, None))
        for v in values(reader.read(r))
    ]
    assert found == ["early", "late"]


@pytest.mark.kafka
@pytest.mark.parametrize("fail", ["true", "false"])
@pytest.mark.never_unsteady
def test_where_another_source_read_on_past_an_open_transaction_nothing_is_lost_or_read_again(
    kafka, topic, fail
):
    """Spark's own source reads uncommitted records, and its checkpoint may be further."""
    waiting = begin(kafka)
    waiting.produce(topic, b"read before", partition=0)
    waiting.flush(30)
    reader = stream(options(kafka, topic, failOnDataLoss=fail))
    at_first = {topic: {"0": 1, "1": 0}}
    start = reader.latestOffset(at_first, None)
    assert reader.partitions(at_first, start) == []
    assert reader.latestOffset(start, None) is start
    with pytest.raises(TopicRecreated, match=f"{topic}-0 ends at offset 1, but it was read to 2"):
        stream(options(kafka, topic)).latestOffset({topic: {"0": 2, "1": 0}}, None)
    waiting.commit_transaction(30)
    settle(kafka, topic)
    write(kafka, topic, ["later"])
    end = reader.latestOffset(start, None)
    assert [v for r in reader.partitions(start, end) for v in values(reader.read(r))] == ["later"]


@pytest.mark.never_unsteady
@pytest.mark.kafka
def test_connections_are_reused_and_a_range_leaves_nothing_behind(kafka, topic):
    write(kafka, topic, range(3000))
    write(kafka, topic, ["other"], partition=1)
    o = options(kafka, topic, **{"kafka.client.id": topic})
    for _ in range(3):
        # far more was fetched, and must not show up
        assert values(read_ranges(o, [Range(topic, 0, 5, 9)])) == ["5", "6", "7", "8"]
        assert values(read_ranges(o, [Range(topic, 1, 0, 2)])) == ["other"]
    unfinished = read_ranges(o, [Range(topic, 0, 0, 3000)])
    next(unfinished)
    unfinished.close()
    assert values(read_ranges(o, [Range(topic, 0, 2998, 3001)])) == ["2998", "2999"]


@pytest.mark.never_unsteady
@pytest.mark.kafka
@pytest.mark.parametrize("fail", [True, False])
def test_truncated_offsets(kafka, topic, ask, fail, caplog):
    write(kafka, topic, range(20))
    o = options(kafka, topic, failOnDataLoss=str(fail).lower())
    start = to_json(
        Offsets(at={(topic, 0): 3, (topic, 1): 0}, ids={topic: ask.topics([topic])[topic][0]})
    )
    delete_before(kafka, topic, {0: 10})
    said, reader = f"{topic}-0: offsets 3 to 9 are gone", stream(o)
    if fail:
        with pytest.raises(RecordsGone, match=said):
            reader.latestOffset(start, None)
        with pytest.raises(RecordsGone, match=said):
            list(read_ranges(o, [Range(topic, 0, 3, 20)]))
        return
    with caplog.at_level(logging.WARNING, "kafka2pc"):
        end = reader.latestOffset(start, None)
        assert [v for r in reader.partitions(start, end) for v in values(reader.read(r))] == [
            str(n) for n in range(10, 20)
        ]
        assert values(read_ranges(o, [Range(topic, 0, 3, 20)])) == [str(n) for n in range(10, 20)]
    assert [r.getMessage() for r in caplog.records if topic in r.getMessage()] == [
        f"{said}. failOnDataLoss=false: going on with what is there."
    ] * 2


@pytest.mark.kafka
def test_a_vanished_topic_and_one_created_again_with_fewer_partitions(kafka, topic, ask, caplog):
    write(kafka, topic, range(5))
    write(kafka, topic, range(5), partition=1)
    strict, loose = (
        stream(options(kafka, topic)),
        stream(options(kafka, topic, failOnDataLoss="false")),
    )
    start = strict.initialOffset()
    delete_topic(kafka, ask, topic)
    read_to = "read were partitions 0 to offset 6, 1 to offset 6"
    with pytest.raises(TopicGone, match=f"topic {topic} does not exist any more; {read_to}"):
        strict.latestOffset(start, None)
    kafka.create_topic(topic, partitions=1)
    write(kafka, topic, range(50))
    expected = f"topic {topic} was created again (partitions: 1, before: 2); {read_to}"
    with pytest.raises(TopicRecreated) as e:
        strict.latestOffset(start, None)
    assert e.value.what == expected
    with caplog.at_level(logging.WARNING, "kafka2pc"):
        end = loose.latestOffset(start, None)
        assert loose.latestOffset(end, None) is end
    assert [r.getMessage() for r in caplog.records if topic in r.getMessage()] == [
        f"{expected}. failOnDataLoss=false: going on with what is there."
    ]
    assert loose.partitions(start, end) == [RangePartition((Range(topic, 0, 0, 51),))]


@pytest.mark.kafka
@pytest.mark.parametrize("fail", [True, False])
def test_a_batch_that_spark_repeats_is_not_read_in_another_topic_of_the_same_name(
    kafka, topic, ask, fail, caplog
):
    write(kafka, topic, range(5))
    o = options(kafka, topic, startingOffsets="earliest", failOnDataLoss=str(fail).lower())
    before = stream(o)
    start = before.initialOffset()
    end = before.latestOffset(start, None)
    assert (
        before.partitions(start, end)
        == stream(o).partitions(start, end)
        == [RangePartition((Range(topic, 0, 0, 6),))]
    )
    delete_topic(kafka, ask, topic)
    kafka.create_topic(topic, partitions=2)
    write(kafka, topic, range(50))
    after = stream(o)
    if fail:
        with pytest.raises(TopicRecreated, match=f"topic {topic} was created again"):
            after.partitions(start, end)
        return
    with caplog.at_level(logging.WARNING, "kafka2pc"):
        assert after.partitions(start, end) == []
    assert len([r for r in caplog.records if "was created again" in r.getMessage()]) == 1


def create_again(kafka, ask, topic):
    delete_topic(kafka, ask, topic)
    kafka.create_topic(topic, partitions=2)
    write(kafka, topic, [f"new {n}" for n in range(20)])


@pytest.mark.kafka
@pytest.mark.parametrize("fail", [True, False])
@pytest.mark.parametrize("places", [{}, {"endingOffsets": "latest"}], ids=["stream", "batch"])
def test_a_topic_that_is_created_again_between_plan_and_read(
    kafka, topic, ask, fail, places, caplog
):
    """A stream gets none of its rows. A batch read of whatever is there goes on with it, if it may
    lose records.
    """
    write(kafka, topic, range(5))
    o = options(
        kafka, topic, startingOffsets="earliest", failOnDataLoss=str(fail).lower(), **places
    )
    if places:
        reader = BatchReader(o)
        tasks = reader.partitions()
    else:
        reader = stream(o)
        start = reader.initialOffset()
        tasks = reader.partitions(start, reader.latestOffset(start, None))
    create_again(kafka, ask, topic)
    expected = f"topic {topic} was created again after the read of partition 0 was planned"
    read = lambda: [v for task in tasks for v in values(reader.read(task))]
    if fail:
        with pytest.raises(TopicRecreated) as e:
            read()
        assert e.value.what.startswith(expected)
        return
    with caplog.at_level(logging.WARNING, "kafka2pc"):
        assert read() == [f"new {n}" for n in range(20) if places]
    assert f"{expected}. failOnDataLoss=false" in caplog.text


@pytest.mark.never_unsteady
@pytest.mark.kafka
def test_a_task_of_many_ranges_reports_the_losses_and_reads_the_others(kafka, ask, caplog):
    """Some of its partitions are cut off at the begin, one is gone, the rest is whole."""
    topic = f"source-{uuid.uuid4().hex[:8]}"
    kafka.create_topic(topic, partitions=6)
    for partition in range(6):
        write(kafka, topic, [f"{partition}-{n}" for n in range(10)], partition)
    delete_before(kafka, topic, {1: 4, 3: 4})
    ranges = [Range(topic, p, 2, 9) for p in (*range(6), 7)]
    o = options(kafka, topic, failOnDataLoss="false", **{"kafkaConsumer.pollTimeoutMs": "2000"})
    with caplog.at_level(logging.WARNING, "kafka2pc"):
        found = values(read_ranges(o, ranges))
    for partition in range(6):
        first = 4 if partition in (1, 3) else 2
        of_partition = [v for v in found if v.startswith(f"{partition}-")]
        assert of_partition == [f"{partition}-{n}" for n in range(first, 9)]
    for loss in ("1: offsets 2 to 3 are gone", "3: offsets 2 to 3 are gone", "7, offsets 2 to 8:"):
        assert f"{topic}-{loss}" in caplog.text
    with pytest.raises(RecordsGone, match=f"{topic}-1: offsets 2 to 3 are gone; {topic}-3"):
        list(read_ranges(options(kafka, topic), ranges[:6]))


@pytest.mark.kafka
def test_small_partitions_share_tasks(kafka):
    """Four tasks for each core, or as many as `minPartitions` asks for; every row comes once."""
    topic = f"source-{uuid.uuid4().hex[:8]}"
    count = 10 * (os.cpu_count() or 1)
    kafka.create_topic(topic, partitions=count)
    producer = Producer(kafka.client_conf)
    for n in range(3 * count):
        producer.produce(topic, str(n).encode(), partition=n % count)
    producer.flush(30)
    tasks_per_reader = []
    for more in {}, {"minPartitions": str(count)}:
        reader = BatchReader(options(kafka, topic, **more))
        tasks = reader.partitions()
        found = [v for task in tasks for v in values(reader.read(task))]
        assert sorted(map(int, found)) == list(range(3 * count))
        tasks_per_reader.append(len(tasks))
    assert tasks_per_reader == [4 * (os.cpu_count() or 1), count]


class Broker:
    """A cluster of one topic with one partition, in memory. It answers each question for an offset
    with the next one of `codes` (None: not at all), then with offset 7. `leaders`: those that it
    names, one for each question, then node 1; None: it does not know the partition.
    """

    timeout_ms = 1_000

    def __init__(self, codes=(), leaders=()):
        self.codes, self.leaders = iter(codes), iter(leaders)
        self.sent = []

    def highest(self, request):
        return -1

    def ask_metadata(self, request):
        self.sent.append("leaders")
        leader = next(self.leaders, 1)
        parts = [] if leader is None else [SimpleNamespace(partition_index=0, leader_id=leader)]
        row = SimpleNamespace(name=T, error_code=0, partitions=parts, topic_id=None)
        return SimpleNamespace(topics=[row])

    def ask_each(self, requests):
        self.sent += [r.topics[0].partitions[0].timestamp for r, _ in requests]
        return [self.answer() for _ in requests]

    def answer(self):
        code = next(self.codes, 0)
        if code is None:
            return NoAnswer("the node has died")
        row = SimpleNamespace(partition_index=0, error_code=code, offset=-1 if code else 7)
        return SimpleNamespace(topics=[SimpleNamespace(name=T, partitions=[row])])

    def close(self):
        self.sent.append("close")


class SilentBroker(Broker):
    def ask_metadata(self, request):
        raise NoAnswer("no answer in time")


def asking(*brokers, **limits):
    """Questions on connections to these brokers, one after the other."""
    ask, left = Questions({"bootstrap.servers": "a:1"}, **limits), list(brokers)
    ask.connection.open = lambda: left.pop(0)
    return ask


@pytest.mark.parametrize(
    "code",
    [
        codes.OFFSET_NOT_AVAILABLE,
        codes.FENCED_LEADER_EPOCH,
        codes.UNKNOWN_LEADER_EPOCH,
        codes.NOT_LEADER_OR_FOLLOWER,
        codes.UNKNOWN_TOPIC_OR_PARTITION,
        codes.KAFKA_STORAGE_ERROR,
        codes.REQUEST_TIMED_OUT,
        None,
    ],
)
def test_what_a_change_of_leaders_answers_is_asked_again(code):
    broker = Broker(codes=[code, code])
    assert asking(broker).ends([(T, 0)]) == {(T, 0): 7}
    assert broker.sent == ["leaders", LATEST] * 3


@pytest.mark.parametrize("limits", [{}, {"tries": Tries(1, 0)}])
def test_a_leader_is_asked_for_until_there_is_one_and_then_remembered(limits):
    """One try lasts as long as one of Java's client, which waits for leaders, too."""
    broker = Broker(leaders=[-1, -1, 2])
    ask = asking(broker, **limits)
    assert ask.ends([(T, 0)]) == ask.ends([(T, 0)]) == {(T, 0): 7}
    assert broker.sent == ["leaders"] * 3 + [LATEST] * 2
    assert ask.leaders == {(T, 0): 2}


@pytest.mark.parametrize(("absent", "found"), [(2, {(T, 0): 7}), (3, {})])
def test_a_partition_is_gone_if_three_answers_do_not_have_it(absent, found):
    """It may be new, and not known everywhere yet."""
    assert asking(Broker(leaders=[None] * absent)).ends([(T, 0)]) == found


@pytest.mark.parametrize(
    ("code", "error"),
    [
        (codes.TOPIC_AUTHORIZATION_FAILED, NotAuthorized),
        (codes.INVALID_CONFIG, BrokerUnreachable),
    ],
)
def test_an_error_that_does_not_pass_is_raised_at_once(code, error):
    broker = Broker(codes=[code])
    with pytest.raises(error, match=f": {code} "):
        asking(broker).ends([(T, 0)])
    assert broker.sent == ["leaders", LATEST]


def test_one_connection_is_kept_until_it_brings_no_answer():
    silent, broker = SilentBroker(), Broker()
    ask = asking(silent, broker)
    assert ask.ends([(T, 0)]) == ask.ends([(T, 0)]) == {(T, 0): 7}
    ask.close()
    assert (silent.sent, broker.sent) == (["close"], ["leaders", LATEST, LATEST, "close"])


def test_the_begin_is_asked_before_the_end():
    """Asked the other way round, retention could put the begin behind the end."""
    broker = Broker()
    assert asking(broker).bounds([(T, 0)]) == {(T, 0): Bounds(7, 7)}
    assert broker.sent == ["leaders", EARLIEST, LATEST]


def test_a_group_that_refuses_offsets_is_named_in_a_warning_and_the_query_goes_on(caplog):
    class WithMembers(GrowingTopic):
        leaders = {}

        def ends(self, parts, committed):
            return {}

        def commit_offsets(self, group, offsets):
            raise BadOption(f"group {group}: 25")

    o = {"kafka.bootstrap.servers": "a:1", "subscribe": T, "kafka.group.id": "g"}
    reader = StreamReader(parse_source_options(o))
    reader._questions = WithMembers()
    start = to_json(Offsets(at={(T, 0): 2}, ids={T: "id"}))
    assert from_json(reader.latestOffset(start, None)).at == {(T, 0): 5}
    assert "group g: offsets could not be committed: group g: 25" in caplog.text


@pytest.mark.parametrize("limits", [{}, {"tries": Tries(3, 0)}])
def test_a_question_that_fails_for_good_names_the_last_answer(limits):
    never = Broker(codes=itertools.repeat(codes.NOT_LEADER_OR_FOLLOWER))
    with pytest.raises(BrokerUnreachable) as e:
        asking(never, within_ms=1, **limits).ends([(T, 0)])
    assert e.value.what.startswith("list offsets at a:1: t-0: 6 ")
    assert e.value.risk == NOTHING_READ


@pytest.mark.never_unsteady
@pytest.mark.kafka
@pytest.mark.parametrize("fail", [True, False])
def test_a_topic_that_vanished_is_reported_by_the_plan_and_by_a_task(
    kafka, topic, ask, fail, caplog
):
    write(kafka, topic, range(5))
    o = options(
        kafka,
        topic,
        startingOffsets="earliest",
        failOnDataLoss=str(fail).lower(),
        **{"kafkaConsumer.pollTimeoutMs": "3000"},
    )
    reader, planned = stream(o), Range(topic, 0, 0, 6)
    start = reader.latestOffset(reader.initialOffset(), None)
    delete_topic(kafka, ask, topic)
    said = (
        f"topic {topic} does not exist any more; read were partitions 0 to offset 6, 1 to offset 0"
    )
    said_by_task = f"{topic}-0, offsets 0 to 5: the topic or partition does not exist any more"
    if fail:
        for call, text in (
            (lambda: reader.latestOffset(start, None), said),
            (
                lambda: list(read_ranges(o, [planned])),
                said_by_task,
            ),
        ):
            with pytest.raises(TopicGone) as e:
                call()
            assert e.value.what == text
        return
    with caplog.at_level(logging.WARNING, "kafka2pc"):
        end = reader.latestOffset(start, None)
        assert reader.partitions(start, end) == values(read_ranges(o, [planned])) == []
    assert [r.getMessage() for r in caplog.records if topic in r.getMessage()] == [
        f"{w}. failOnDataLoss=false: going on with what is there." for w in (said, said_by_task)
    ]
    kafka.create_topic(topic)
    write(kafka, topic, ["back"])
    assert [
        v
        for r in reader.partitions(end, reader.latestOffset(end, None))
        for v in values(reader.read(r))
    ] == ["back"]


class Before(Questions):
    """Answers the question for topics as it was when this was made, with a topic that is gone."""

    def __init__(self, kafka, names):
        super().__init__(kafka.client_conf, within_ms=6_000)
        self.known = super().topics(names)

    def topics(self, names):
        return self.known


@pytest.mark.kafka
@pytest.mark.never_unsteady
def test_a_topic_that_goes_between_two_questions_is_left_out(kafka, topic, ask):
    """With `subscribePattern`, the query goes on; what it had read there is found by comparing."""
    kafka.create_topic(f"{topic}-2")
    before = Before(kafka, [topic, f"{topic}-2"])
    delete_topic(kafka, ask, f"{topic}-2")
    if_late = {"startingOffsetsByTimestampStrategy": "latest"}
    o = options(kafka, f"{topic},{topic}-2", startingTimestamp="1", **if_late)
    now = take_snapshot(before, o)
    assert now == take_snapshot(ask, o)
    assert now.parts.keys() == {(topic, 0), (topic, 1)}
    seen = Snapshot(now.parts | {(f"{topic}-2", 0): Bounds(0, 0)}, now.ids | {f"{topic}-2": "id"})
    assert find_start(before, o, seen, "latest").keys() == now.parts.keys()


@pytest.mark.kafka
@pytest.mark.never_unsteady
def test_a_new_topic_of_a_pattern_and_a_new_partition_are_read_from_their_first_record(
    kafka, topic, ask
):
    reader = stream(
        parse_source_options(
            {"kafka.bootstrap.servers": kafka.bootstrap_servers, "subscribePattern": f"{topic}.*"}
        )
    )
    start = reader.initialOffset()
    kafka.create_topic(f"{topic}-2")
    admin = AdminClient(kafka.client_conf)
    admin.create_partitions([NewPartitions(topic, 3)])[topic].result(60)
    until(lambda: len(ask.topics([topic])[topic][1]) == 3, "the partition is known", 60)
    write(kafka, f"{topic}-2", ["new topic"])
    write(kafka, topic, ["new partition"], partition=2)
    end = reader.latestOffset(start, None)
    assert sorted(v for r in reader.partitions(start, end) for v in values(reader.read(r))) == [
        "new partition",
        "new topic",
    ]


@pytest.mark.kafka
def test_a_group_gives_the_start_and_receives_the_offsets_also_of_the_last_batch(kafka, topic, ask):
    write(kafka, topic, range(5))
    wrong = options(kafka, topic, startingOffsets="group", **{"kafka.group.id": f"{topic}-wrong"})
    with pytest.raises(
        BadOption, match=f"group {topic}-wrong has no offset for {topic}-0, {topic}-1"
    ):
        stream(wrong).initialOffset()
    ask.commit_offsets(topic, {(topic, 0): 2})
    partly = options(
        kafka,
        topic,
        startingOffsets="group",
        **{"kafka.group.id": topic, "kafka.auto.offset.reset": "earliest"},
    )
    reader = stream(partly)
    start = reader.initialOffset()
    end = reader.latestOffset(start, None)
    assert from_json(start).at == {(topic, 0): 2, (topic, 1): 0} and ask.group_offsets(
        topic, [(topic, 0), (topic, 1)]
    ) == {(topic, 0): 2}
    # Spark asks for the next batch when this one is done
    assert reader.latestOffset(end, None) is end
    assert ask.group_offsets(topic, [(topic, 0), (topic, 1)]) == from_json(end).at


@pytest.mark.kafka
@pytest.mark.never_unsteady
def test_available_now_reads_what_is_there_now_and_no_more(kafka, topic):
    write(kafka, topic, range(5))
    reader = stream(options(kafka, topic, startingOffsets="earliest"))
    reader.prepareForTriggerAvailableNow()
    start = reader.initialOffset()
    write(kafka, topic, range(5))
    write(kafka, topic, range(5), partition=1)
    end = reader.latestOffset(start, None)
    assert (
        reader.partitions(start, end) == [RangePartition((Range(topic, 0, 0, 6),))]
        and reader.latestOffset(end, None) is end
    )
    assert from_json(end).ids == from_json(start).ids and from_json(end).ids[topic]


@pytest.mark.kafka
def test_lag_tells_an_open_transaction_from_a_slow_query(kafka, topic):
    write(kafka, topic, range(5))
    waiting = begin(kafka)
    waiting.produce(topic, b"open", partition=0)
    waiting.flush(30)
    first, _ = measure_lag({"kafka.bootstrap.servers": kafka.bootstrap_servers, "subscribe": topic})
    waiting.abort_transaction(30)
    assert (first.stable, first.end, first.current, first.behind) == (6, 7, None, None)


@pytest.mark.kafka
def test_a_batch_read_is_planned_between_its_ends(kafka, topic, ask):
    write(kafka, topic, range(9))
    both = {
        "startingOffsets": f'{{"{topic}": {{"0": 3, "1": -2}}}}',
        "endingOffsets": f'{{"{topic}": {{"0": 7, "1": -1}}}}',
    }
    assert plan_read(ask, options(kafka, topic, **both)) == [
        Range(topic, 0, 3, 7),
        Range(topic, 1, EARLIEST, LATEST),
    ]
    with pytest.raises(BadOption, match="behind the end"):
        plan_read(ask, options(kafka, topic, endingOffsets=f'{{"{topic}": {{"0": 70, "1": -1}}}}'))
    with pytest.raises(BadOption, match="no such topic"):
        plan_read(ask, options(kafka, f"{topic},nothing"))
    assert take_snapshot(ask, options(kafka, f"{topic},nothing")).parts.keys() == {
        (topic, 0),
        (topic, 1),
    }


@pytest.mark.kafka
def test_the_outer_ends_of_a_cut_partition_are_left_to_the_tasks(kafka, topic, ask):
    write(kafka, topic, range(3))  # and a marker
    o = options(kafka, topic, minPartitions="3")
    assert plan_read(ask, o) == [
        Range(topic, 0, EARLIEST, 1),
        Range(topic, 0, 1, 2),
        Range(topic, 0, 2, LATEST),
        Range(topic, 1, EARLIEST, LATEST),
    ]


@pytest.mark.kafka
def test_the_ends_of_a_cut_partition_stay_where_offsets_name_them(kafka, topic, ask):
    write(kafka, topic, range(10))
    places = {
        "startingOffsets": f'{{"{topic}": {{"0": 1, "1": 0}}}}',
        "endingOffsets": f'{{"{topic}": {{"0": 4, "1": 0}}}}',
    }
    o = options(kafka, topic, minPartitions="3", **places)
    assert plan_read(ask, o) == [Range(topic, 0, n, n + 1) for n in (1, 2, 3)]


@pytest.mark.never_unsteady
@pytest.mark.kafka
def test_a_task_looks_for_the_ends_of_its_range(kafka, topic, ask):
    write(kafka, topic, range(20))
    o = options(kafka, topic)
    whole, first = Range(topic, 0, EARLIEST, LATEST), Range(topic, 0, EARLIEST, 5)
    assert values(read_ranges(o, [first])) == [str(n) for n in range(5)]
    delete_before(kafka, topic, {0: 10})
    assert values(read_ranges(o, [whole])) == [str(n) for n in range(10, 20)]
    assert values(read_ranges(o, [first])) == []
    write(kafka, topic, ["later"])
    assert values(read_ranges(o, [whole])) == [str(n) for n in range(10, 20)] + ["later"]
    waiting = begin(kafka)
    waiting.produce(topic, b"open", partition=0)
    waiting.flush(30)
    assert values(read_ranges(o, [whole]))[-1] == "later"
    waiting.abort_transaction(30)


@pytest.mark.never_unsteady
@pytest.mark.kafka
def test_what_is_deleted_after_the_task_looked_is_no_loss_for_earliest(
    kafka, topic, ask, monkeypatch
):
    write(kafka, topic, range(20))
    bind = range_reader.bind_ranges

    def bind_and_delete(o, ranges):
        bound = bind(o, ranges)
        delete_before(kafka, topic, {0: 10})
        return bound

    monkeypatch.setattr(range_reader, "bind_ranges", bind_and_delete)
    found = values(read_ranges(options(kafka, topic), [Range(topic, 0, EARLIEST, LATEST)]))
    assert found == [str(n) for n in range(10, 20)]


@pytest.mark.never_unsteady
@pytest.mark.kafka
@pytest.mark.parametrize("fail", [True, False])
def test_an_open_range_of_a_topic_that_is_gone_or_shorter(kafka, topic, ask, fail):
    o = options(kafka, topic, failOnDataLoss=str(fail).lower())
    cases = [
        (Range(topic, 7, EARLIEST, LATEST), TopicGone, f"{topic}-7 does not exist any more"),
        (Range(topic, 0, 5, LATEST), TopicRecreated, "ends at offset 0, but the read begins at 5"),
    ]
    for r, error, said in cases:
        if fail:
            with pytest.raises(error, match=said):
                list(read_ranges(o, [r]))
        else:
            assert list(read_ranges(o, [r])) == []


@pytest.mark.kafka
def test_a_time_that_spark_does_not_have_is_named(kafka, topic):
    now_ns = time.time_ns()
    config = ConfigResource("TOPIC", topic)
    for name in ("before", "after"):
        setting = f"message.timestamp.{name}.max.ms"
        config.add_incremental_config(
            ConfigEntry(setting, str(2**63 - 1), incremental_operation=AlterConfigOpType.SET)
        )
    admin = AdminClient(kafka.client_conf)
    admin.incremental_alter_configs([config])[config].result()
    producer = Producer(kafka.client_conf)
    producer.produce(topic, b"good", partition=0)
    producer.produce(topic, b"bad", partition=0, timestamp=now_ns)
    producer.flush(30)
    with pytest.raises(RecordsBroken, match=f"{topic}-0, offset 1: timestamp {now_ns}(.|\n)*nano"):
        list(read_ranges(options(kafka, topic), [Range(topic, 0, 0, 2)]))


# -- in Spark --


@pytest.fixture(scope="module")
def spark(tmp_path_factory):
    from pyspark.sql import SparkSession

    import kafka2pc

    builder = (
        SparkSession.builder.master("local[2]")
        .config("spark.ui.enabled", False)
        .config("spark.sql.shuffle.partitions", 2)
    )
    session = builder.config(
        "spark.sql.warehouse.dir", str(tmp_path_factory.mktemp("warehouse"))
    ).getOrCreate()
    kafka2pc.register(session)
    yield session
    session.stop()


def load(reader, kafka, topic, **more):
    return (
        reader.format("kafka2pc")
        .options(**{"kafka.bootstrap.servers": kafka.bootstrap_servers, "subscribe": topic} | more)
        .load()
    )


@pytest.mark.spark
@pytest.mark.kafka
@pytest.mark.full
def test_columns_are_those_of_sparks_own_source(spark, kafka, topic):
    now_ms = int(time.time() * 1000)
    producer = Producer(kafka.client_conf)
    producer.produce(
        topic, b"v", key=b"k", partition=1, timestamp=now_ms, headers=[("a", b"1"), ("a", None)]
    )
    producer.produce(topic, None, partition=1, timestamp=now_ms)
    producer.flush(30)
    rows = load(spark.read, kafka, topic, includeHeaders="true").orderBy("offset")
    assert (
        rows.schema.simpleString()
        == "struct<key:binary,value:binary,topic:string,partition:int,offset:bigint,"
        "timestamp:timestamp,timestampType:int,"
        "headers:array<struct<key:string,value:binary>>>"
    )
    full, empty = rows.selectExpr("*", "unix_millis(timestamp) ms").collect()
    assert (
        bytes(full.key),
        bytes(full.value),
        full.topic,
        full.partition,
        full.offset,
        full.ms,
        full.timestampType,
    ) == (b"k", b"v", topic, 1, 0, now_ms, 0)
    assert [(h.key, h.value and bytes(h.value)) for h in full.headers] == [("a", b"1"), ("a", None)]
    assert (empty.key, empty.value, empty.headers, empty.offset) == (None, None, None, 1)
    assert (
        load(spark.read, kafka, topic, endingOffsets=f'{{"{topic}": {{"0": 0, "1": 0}}}}').count()
        == 0
    )


@pytest.mark.spark
@pytest.mark.kafka
@pytest.mark.never_unsteady
def test_a_query_that_fails_in_its_first_batch_and_later_reads_each_record_once(
    spark, kafka, topic, tmp_path
):
    """It begins at the latest offset; batch 0 fails after more records came, and is run again by a
    new reader.
    """
    write(kafka, topic, ["before"])
    found, fail_at = [], {0, 2}

    def keep(rows, batch_id):
        if batch_id in fail_at:
            fail_at.remove(batch_id)
            write(kafka, topic, [f"while {batch_id} failed"])
            raise RuntimeError("a fault on purpose")
        found.extend(r.v for r in rows.selectExpr("cast(value as string) v").collect())

    def run():
        rows = load(
            spark.readStream, kafka, topic, maxOffsetsPerTrigger="4", **{"kafka.group.id": topic}
        )
        writer = rows.writeStream.foreachBatch(keep).option(
            "checkpointLocation", str(tmp_path / "checkpoint")
        )
        writer.trigger(availableNow=True).start().awaitTermination(120)

    # batch 0 is empty; Spark runs it all the same
    with pytest.raises(Exception, match="a fault on purpose"):
        run()
    write(kafka, topic, [f"first {n}" for n in range(6)])
    for partition in (0, 1):
        write(kafka, topic, ["never"], partition=partition, commit=False)
        write(kafka, topic, [f"second {partition} {n}" for n in range(3)], partition=partition)
    with pytest.raises(Exception, match="a fault on purpose"):
        run()
    run()
    expected = (
        [f"first {n}" for n in range(6)]
        + [f"second {p} {n}" for p in (0, 1) for n in range(3)]
        + ["while 0 failed", "while 2 failed"]
    )
    assert sorted(found) == sorted(expected)
    end = read_last_offsets(str(tmp_path / "checkpoint"))
    with Questions(kafka.client_conf) as ask:
        assert ask.group_offsets(topic, end.at) == end.at
    stand = measure_lag(
        {
            "kafka.bootstrap.servers": kafka.bootstrap_servers,
            "subscribe": topic,
            "kafka.group.id": topic,
        },
        str(tmp_path / "checkpoint"),
    )
    assert [(s.behind, s.current == s.committed) for s in stand] == [(0, True)] * 2


@pytest.mark.spark
@pytest.mark.kafka
def test_errors_reach_the_user_through_spark(spark, kafka, topic):
    for more, said in (
        ({"startingOffsets": "newest"}, "startingOffsets=newest"),
        ({"startingOffsets": "latest"}, "a batch would read nothing"),
        ({"startingOffsets": f'{{"{topic}": {{"0": -1, "1": 0}}}}'}, f"-1 for {topic}-0"),
        ({"subscribe": "no-such-topic"}, "no-such-topic: no such topic"),
    ):
        with pytest.raises(Exception, match=said):
            load(spark.read, kafka, topic, **more).count()


@pytest.mark.spark
@pytest.mark.kafka
@pytest.mark.full
def test_what_is_wrong_reaches_the_user_of_a_stream(spark, kafka, topic, ask, tmp_path):
    """A bad option, a wrong group, truncated offsets, a topic that is gone, and one that was
    created again with fewer partitions.
    """
    found = []

    def run(**more):
        rows = load(spark.readStream, kafka, topic, **more).selectExpr("cast(value as string) v")
        writer = rows.writeStream.foreachBatch(
            lambda batch, n: found.extend(r.v for r in batch.collect())
        )
        writer.option("checkpointLocation", str(tmp_path / "checkpoint")).trigger(
            availableNow=True
        ).start().awaitTermination(120)

    def refused(said, **more):
        with pytest.raises(Exception, match=said):
            run(**more)

    refused("unknown option startingoffset", startingOffset="earliest")
    refused(
        "\\[KAFKA2PC.BAD_OPTION\\] group unused has no offset for",
        startingOffsets="group",
        **{"kafka.group.id": "unused"},
    )
    write(kafka, topic, range(3))
    run(startingOffsets="earliest")
    write(kafka, topic, range(3, 9))
    delete_before(kafka, topic, {0: 6})
    refused(f"RECORDS_GONE. {topic}-0: offsets 4 to 5 are gone")
    run(failOnDataLoss="false")
    delete_topic(kafka, ask, topic)
    refused(f"TOPIC_GONE. topic {topic} does not exist any more")
    kafka.create_topic(topic)
    write(kafka, topic, ["new"])
    refused(f"TOPIC_RECREATED. topic {topic} was created again .partitions: 1, before: 2.")
    run(failOnDataLoss="false")
    assert found == ["0", "1", "2", "5", "6", "7", "8", "new"]


@pytest.mark.spark
@pytest.mark.kafka
def test_a_worker_that_is_kept_is_frozen(spark, kafka, topic):
    """What a worker has loaded costs no garbage collection after each task."""
    write(kafka, topic, range(3))
    assert load(spark.read, kafka, topic).count() == 3

    def frozen(batches):
        import gc

        import pyarrow as pa

        yield pa.RecordBatch.from_pydict({"objects": [gc.get_freeze_count() for _ in batches]})

    counts = spark.range(2, numPartitions=2).mapInArrow(frozen, "objects long").collect()
    assert max(row.objects for row in counts) > 10_000
