"""Where a read begins and ends: earliest, latest, offsets and times, what each action of a frame
finds, and what is refused. Without Spark; Spark's own format is the oracle (`make spark-own`).
"""

import json
import time
import uuid

import pytest
from both_formats import OURS, SAME, add_partition, dicts, in_json, send
from confluent_kafka import Producer, TopicPartition
from confluent_kafka.admin import AdminClient
from kafka_fixtures import values
from marks import first_of

pytestmark = [pytest.mark.kafka, pytest.mark.never_unsteady]
PARTITIONS = (0, 1, 2)


@pytest.fixture
def topic(kafka):
    """A topic with three partitions."""
    name = f"places-{uuid.uuid4().hex[:8]}"
    kafka.create_topic(name, partitions=len(PARTITIONS))
    return name


def text(*ranges):
    """The numbers of the ranges as text, sorted as text."""
    return sorted(str(n) for numbers in ranges for n in numbers)


def fill(kafka, topic):
    """0 to 20, in three partitions: 0 to 9, 10 to 19, and 20."""
    send(kafka, topic, range(10), partition=0)
    send(kafka, topic, range(10, 20), partition=1)
    send(kafka, topic, [20], partition=2)


def delete_before(kafka, topic, offset, partition=0):
    at = TopicPartition(topic, partition, offset)
    admin = AdminClient(kafka.client_conf)
    admin.delete_records([at])[at].result(60)


# -- earliest, latest and offsets; what an action finds --


@pytest.mark.parametrize(
    "ends",
    [{}, {"startingOffsets": "earliest", "endingOffsets": "latest"}],
    ids=["default", "given"],
)
def test_each_action_of_a_frame_reads_to_the_end_of_its_moment(either_format, kafka, topic, ends):
    fill(kafka, topic)
    frame = either_format.load(topic, **ends)
    assert either_format.read(frame) == text(range(21))
    send(kafka, topic, range(21, 30), partition=2)
    assert either_format.read(frame) == text(range(30))


def test_rows_of_a_partition_that_was_empty_are_found(either_format, kafka, topic):
    frame = either_format.load(topic)
    assert either_format.read(frame) == []
    fill(kafka, topic)
    assert either_format.read(frame) == text(range(21))


def test_only_the_ends_that_are_latest_move(either_format, kafka, topic):
    fill(kafka, topic)
    frame = either_format.load(
        topic,
        startingOffsets=in_json(topic, [-2, -2, 0]),
        endingOffsets=in_json(topic, [-1, -1, 1]),
    )
    assert either_format.read(frame) == text(range(21))
    send(kafka, topic, range(31, 40), partition=2)
    assert either_format.read(frame) == text(range(21))
    send(kafka, topic, range(21, 31), partition=1)
    assert either_format.read(frame) == text(range(31))


@pytest.mark.parametrize("of_one", [False, True], ids=["the word", "-2 in JSON"])
def test_what_is_deleted_before_the_action_is_no_loss_for_earliest(
    either_format, kafka, topic, of_one
):
    fill(kafka, topic)
    start = in_json(topic, [-2, 0, 0]) if of_one else "earliest"
    frame = either_format.load(topic, startingOffsets=start)
    assert either_format.read(frame) == text(range(21))
    delete_before(kafka, topic, 4)
    send(kafka, topic, range(21, 24), partition=0)
    assert either_format.read(frame) == text(range(4, 24))


def test_what_is_deleted_before_the_action_is_a_loss_for_an_offset(either_format, kafka, topic):
    fill(kafka, topic)
    frame = either_format.load(topic, startingOffsets=in_json(topic, [0, 0, 0]))
    assert either_format.read(frame) == text(range(21))
    delete_before(kafka, topic, 4)
    with either_format.refuses("failOnDataLoss|gone", "RecordsGone"):
        either_format.read(frame)


def test_cut_partitions_end_at_the_latest_offset_of_the_action(either_format, kafka, topic):
    fill(kafka, topic)
    frame = either_format.load(topic, minPartitions="6")
    assert either_format.read(frame) == text(range(21))
    assert either_format.count_tasks(frame) >= 6
    send(kafka, topic, range(21, 31), partition=1)
    assert either_format.read(frame) == text(range(31))


def test_a_partition_that_is_new_since_the_last_action_is_read(either_format, kafka, topic):
    fill(kafka, topic)
    frame = either_format.load(topic)
    assert either_format.read(frame) == text(range(21))
    add_partition(kafka, topic, 3)
    send(kafka, topic, [21], partition=3)
    assert either_format.read(frame) == text(range(22))


def test_a_topic_that_is_new_since_the_last_action_is_read(either_format, kafka, topic):
    frame = either_format.load(topic, subscribePattern=f"{topic}-.*")
    assert either_format.read(frame) == []
    for n in range(2):
        kafka.create_topic(f"{topic}-{n}")
        send(kafka, f"{topic}-{n}", [n])
        assert either_format.read(frame) == text(range(n + 1))


@pytest.mark.parametrize("isolation", ["read_committed", "read_uncommitted"])
def test_each_action_reads_what_its_isolation_level_shows(either_format, kafka, topic, isolation):
    frame = either_format.load(topic, **{"kafka.isolation.level": isolation})
    dirty = isolation == "read_uncommitted"
    producer = Producer(kafka.client_conf | {"transactional.id": f"{topic}-{uuid.uuid4()}"})
    producer.init_transactions(30)

    def write(numbers):
        producer.begin_transaction()
        for n in numbers:
            producer.produce(topic, str(n).encode(), partition=0)
        producer.flush(30)

    write(range(1, 6))
    assert either_format.read(frame) == (text(range(1, 6)) if dirty else [])
    producer.commit_transaction(30)
    values(kafka, topic)  # until nothing is open
    assert either_format.read(frame) == text(range(1, 6))
    write(range(6, 11))
    producer.abort_transaction(30)
    write(range(11, 16))
    producer.commit_transaction(30)
    values(kafka, topic)  # until nothing is open
    late = text(range(1, 16)) if dirty else text(range(1, 6), range(11, 16))
    assert either_format.read(frame) == late


def test_headers_of_a_batch_read(either_format, kafka, topic):
    producer = Producer(kafka.client_conf)
    twice = [("e", b"f"), ("e", b"g"), ("none", None)]
    for value, headers in [("1", None), ("2", [("a", b"b"), ("c", b"d")]), ("3", twice)]:
        producer.produce(topic, value.encode(), partition=0, headers=headers)
    producer.flush(30)
    rows = dicts(either_format.load(topic, includeHeaders="true"))
    found = [row["headers"] and [(h["key"], h["value"]) for h in row["headers"]] for row in rows]
    assert found == [None, [("a", b"b"), ("c", b"d")], twice]
    texts = [[[k, v and v.decode()] for k, v in headers or ()] for headers in found]
    either_format.answers.add(texts)
    assert "headers" not in either_format.load(topic).columns


# -- times --


@pytest.fixture
def times(kafka, topic):
    """0 to 29, number n in partition n % 3; ten numbers at each of the first three times, in ms.
    The fourth time is later than all records.
    """
    first = int(time.time() * 1000) - 60_000
    times = [first + 1000 * n for n in range(4)]
    producer = Producer(kafka.client_conf)
    for n in range(30):
        producer.produce(topic, str(n).encode(), partition=n % 3, timestamp=times[n // 10])
    assert producer.flush(30) == 0
    return times


NEVER = 2**63 - 1
BY_TIME = {
    "start and end": (
        lambda topic, t: {
            "startingOffsetsByTimestamp": in_json(topic, [t[1]] * 3),
            "endingOffsetsByTimestamp": in_json(topic, [t[2]] * 3),
        },
        range(10, 20),
    ),
    "start, and an offset as the end": (
        lambda topic, t: {
            "startingOffsetsByTimestamp": in_json(topic, [t[0]] * 3),
            "endingOffsets": in_json(topic, [-1, -1, 1]),
        },
        [n for n in range(30) if n % 3 != 2 or n == 2],
    ),
    "an offset as the start, and end": (
        lambda topic, t: {
            "startingOffsets": in_json(topic, [-2, -2, 0]),
            "endingOffsetsByTimestamp": in_json(topic, [t[2]] * 3),
        },
        range(20),
    ),
    "start only": (
        lambda topic, t: {"startingOffsetsByTimestamp": in_json(topic, [t[1]] * 3)},
        range(10, 30),
    ),
    "end only": (
        lambda topic, t: {"endingOffsetsByTimestamp": in_json(topic, [t[2]] * 3)},
        range(20),
    ),
    "one time each for start and end": (
        lambda topic, t: {"startingTimestamp": str(t[1]), "endingTimestamp": str(t[2])},
        range(10, 20),
    ),
    "other times for each partition": (
        lambda topic, t: {
            "startingOffsetsByTimestamp": in_json(topic, t[:3]),
            "endingOffsetsByTimestamp": in_json(topic, [t[1], t[2], t[3]]),
        },
        [n for n in range(30) if n % 3 == n // 10],
    ),
    "no record as young as the end": (
        lambda topic, t: {"endingOffsetsByTimestamp": in_json(topic, [t[1], t[1], NEVER])},
        [n for n in range(30) if n < 10 or n % 3 == 2],
    ),
    "no record as young as the only end": (
        lambda topic, t: {"endingTimestamp": str(t[3])},
        range(30),
    ),
    "no record as young as the start, strategy latest": (
        lambda topic, t: {
            "startingOffsetsByTimestamp": in_json(topic, [t[2], t[2], NEVER]),
            "startingOffsetsByTimestampStrategy": "latest",
        },
        [n for n in range(20, 30) if n % 3 != 2],
    ),
    "the time wins over times and offsets": (
        lambda topic, t: {
            "startingTimestamp": str(t[2]),
            "startingOffsetsByTimestamp": in_json(topic, [t[1]] * 3),
            "startingOffsets": "earliest",
        },
        range(20, 30),
    ),
    "times win over offsets": (
        lambda topic, t: {
            "startingOffsetsByTimestamp": in_json(topic, [t[1]] * 3),
            "startingOffsets": "latest",
        },
        range(10, 30),
    ),
    "the end time wins over times and offsets": (
        lambda topic, t: {
            "endingTimestamp": str(t[1]),
            "endingOffsetsByTimestamp": in_json(topic, [t[2]] * 3),
            "endingOffsets": "latest",
        },
        range(10),
    ),
    "end times win over offsets": (
        lambda topic, t: {
            "endingOffsetsByTimestamp": in_json(topic, [t[1]] * 3),
            "endingOffsets": "latest",
        },
        range(10),
    ),
    "times with cut partitions": (
        lambda topic, t: {
            "startingTimestamp": str(t[1]),
            "endingTimestamp": str(t[2]),
            "minPartitions": "7",
        },
        range(10, 20),
    ),
}


@pytest.mark.parametrize("case", BY_TIME)
def test_a_batch_read_by_time(either_format, topic, times, case):
    options, expected = BY_TIME[case]
    assert either_format.values(topic, **options(topic, times)) == text(expected)


def test_rows_after_an_end_in_the_future_are_left_out(either_format, kafka, topic, times):
    frame = either_format.load(topic, endingTimestamp=str(times[3]))
    assert either_format.read(frame) == text(range(30))
    send(kafka, topic, [30, 31], partition=0, timestamp_ms=times[3] - 1)
    assert either_format.read(frame) == text(range(32))
    send(kafka, topic, [32], partition=0, timestamp_ms=times[3])
    send(kafka, topic, [33], partition=0, timestamp_ms=times[3] + 1)
    assert either_format.read(frame) == text(range(32))


STREAM_BY_TIME = {
    "one time": (lambda topic, t: {"startingTimestamp": str(t[1])}, range(10, 30)),
    "times": (
        lambda topic, t: {"startingOffsetsByTimestamp": in_json(topic, t[:3])},
        [n for n in range(30) if n // 10 >= n % 3],
    ),
    "the time wins": (
        lambda topic, t: {
            "startingTimestamp": str(t[2]),
            "startingOffsetsByTimestamp": in_json(topic, [t[1]] * 3),
            "startingOffsets": "earliest",
        },
        range(20, 30),
    ),
    "strategy latest": (
        lambda topic, t: {
            "startingOffsetsByTimestamp": in_json(topic, [t[1], t[1], NEVER]),
            "startingOffsetsByTimestampStrategy": "LATEST",
        },
        [n for n in range(10, 30) if n % 3 != 2],
    ),
}


@pytest.mark.parametrize("case", STREAM_BY_TIME)
def test_a_stream_by_time(either_format, topic, times, tmp_path, case):
    options, expected = STREAM_BY_TIME[case]
    batches = either_format.stream_values(tmp_path, topic, **options(topic, times))
    assert sorted(v for batch in batches for v in batch) == text(expected)


def test_where_a_stream_begins_is_for_a_new_query_only(
    either_format, kafka, topic, times, tmp_path
):
    either_format.stream_values(tmp_path, topic, startingTimestamp=str(times[2]))
    send(kafka, topic, [30], partition=0)
    batches = either_format.stream_values(tmp_path, topic, startingTimestamp=str(times[0]))
    assert batches == [["30"]]


NAMED = {
    "subscribe": lambda topic: topic,
    "subscribePattern": lambda topic: f"{topic}.*",
    "assign": lambda topic: json.dumps({topic: list(PARTITIONS)}),
}
BEGINS = {
    "earliest": lambda topic, t: ({"startingOffsets": "earliest"}, range(30)),
    "latest": lambda topic, t: ({"startingOffsets": "latest"}, []),
    "offsets": lambda topic, t: (
        {"startingOffsets": in_json(topic, [-2, -1, 9])},
        [n for n in range(30) if n % 3 == 0 or n == 29],
    ),
    "times": lambda topic, t: (
        {"startingOffsetsByTimestamp": in_json(topic, t[:3])},
        [n for n in range(30) if n // 10 >= n % 3],
    ),
    "a time": lambda topic, t: ({"startingTimestamp": str(t[1])}, range(10, 30)),
}


@pytest.mark.parametrize("begin", BEGINS)
@pytest.mark.parametrize("way", NAMED)
def test_a_stream_begins_at_its_place_and_goes_on_after_a_restart(
    either_format, kafka, topic, times, tmp_path, way, begin
):
    place, expected = BEGINS[begin](topic, times)
    options = place | {way: NAMED[way](topic)}

    def read():
        batches = either_format.stream_values(tmp_path, topic, **options)
        return sorted(v for batch in batches for v in batch)

    assert read() == text(expected)
    assert read() == []
    send(kafka, topic, range(30, 33), partition=1)
    assert read() == text(range(30, 33))
    add_partition(kafka, topic, 3)
    send(kafka, topic, [33], partition=0)
    send(kafka, topic, [34], partition=3)
    assert read() == text([33] if way == "assign" else [33, 34])


# Each way and each begin: a restart reads neither of them.
LOSSES = [
    ("subscribe", "earliest"),
    ("subscribePattern", "latest"),
    ("assign", "offsets"),
    ("subscribe", "times"),
    ("subscribePattern", "a time"),
]


@pytest.mark.parametrize("place", first_of(LOSSES, ids="-".join))
def test_a_stream_goes_on_after_a_loss_between_two_runs(
    either_format, kafka, topic, times, tmp_path, place
):
    """failOnDataLoss=false: 30 to 32 are deleted before they are read."""
    way, begin = place
    options, expected = BEGINS[begin](topic, times)
    options |= {way: NAMED[way](topic), "failOnDataLoss": "false"}

    def read():
        batches = either_format.stream_values(tmp_path, topic, **options)
        return sorted(v for batch in batches for v in batch)

    assert read() == text(expected)
    send(kafka, topic, range(30, 35), partition=1)
    delete_before(kafka, topic, 13, partition=1)
    assert read() == text(range(33, 35))
    send(kafka, topic, [35], partition=0)
    assert read() == text([35])


@pytest.mark.parametrize("fail", ["true", "false"])
@pytest.mark.parametrize("stream", [True, False])
def test_records_are_deleted_after_the_read_was_planned(
    either_format, kafka, topic, tmp_path, stream, fail
):
    """A stream has planned offsets 0 to 9; a batch read names them."""
    send(kafka, topic, range(10))
    found = []

    def read_late(rows, _):
        delete_before(kafka, topic, 6)
        found.extend(either_format.read(rows))

    def read():
        loss = {"failOnDataLoss": fail}
        if stream:
            either_format.run(topic, tmp_path, read_late, startingOffsets="earliest", **loss)
        else:
            start = in_json(topic, [0, 0, 0])
            read_late(either_format.load(topic, startingOffsets=start, **loss), None)

    if fail == "true":
        with either_format.refuses("failOnDataLoss|gone", "RecordsGone"):
            read()
    else:
        read()
    assert found == ([] if fail == "true" else text(range(6, 10)))


@pytest.mark.parametrize("strategy", [None, "error"])
@pytest.mark.parametrize("of_all", [True, False])
@pytest.mark.parametrize("way", ["subscribe", "subscribePattern"])
def test_a_stream_needs_a_record_as_young_as_its_start(
    either_format, topic, times, tmp_path, way, of_all, strategy
):
    options = {way: topic}
    if of_all:
        options["startingTimestamp"] = str(times[3])
    else:
        options["startingOffsetsByTimestamp"] = in_json(topic, [times[0], times[1], times[3]])
    if strategy:
        options["startingOffsetsByTimestampStrategy"] = strategy
    with either_format.refuses("(?i)no record in|no offset matched"):
        either_format.stream_values(tmp_path, topic, **options)


NOT_ALL = {
    "start, one missing": lambda topic, t: {"startingOffsetsByTimestamp": in_json(topic, t[:2])},
    "start, one too many": lambda topic, t: {"startingOffsetsByTimestamp": in_json(topic, t)},
    "end, one missing": lambda topic, t: {"endingOffsetsByTimestamp": in_json(topic, t[:2])},
    "end, one too many": lambda topic, t: {"endingOffsetsByTimestamp": in_json(topic, t)},
    "offsets, one missing": lambda topic, t: {"startingOffsets": in_json(topic, [0, 0])},
    "end offsets, one missing": lambda topic, t: {"endingOffsets": in_json(topic, [1, 1])},
    "no record as young as the start": lambda topic, t: {
        "startingOffsetsByTimestamp": in_json(topic, [t[1], t[1], NEVER])
    },
    "no record as young as the only start": lambda topic, t: {"startingTimestamp": str(t[3])},
    "the start is later than the end": lambda topic, t: {
        "startingTimestamp": str(t[2]),
        "endingTimestamp": str(t[1]),
    },
    "the offset is behind the time": lambda topic, t: {
        "startingOffsets": in_json(topic, [9, 9, 9]),
        "endingTimestamp": str(t[1]),
    },
    "the offset is behind the end": lambda topic, t: {"startingOffsets": in_json(topic, [99] * 3)},
}


@pytest.mark.parametrize("case", NOT_ALL)
def test_a_place_that_does_not_fit_the_topic_is_refused(either_format, topic, times, case):
    with either_format.refuses("artition|record|offset|ends before it begins"):
        either_format.values(topic, **NOT_ALL[case](topic, times))


# -- what needs no broker: refused by load() or by the action --

A, AB = '{"t": {"0": 5}}', '{"t": {"0": 5, "1": 5}}'
REFUSED = {
    "start at latest": ({"startingOffsets": "latest"}, False),
    "start at latest in JSON": ({"startingOffsets": '{"t": {"0": -1}}'}, False),
    "end at earliest": ({"endingOffsets": "earliest"}, True),
    "end at earliest in JSON": ({"endingOffsets": '{"t": {"0": -2}}'}, True),
    "other partitions in start and end": ({"startingOffsets": AB, "endingOffsets": A}, True),
    "an end before the start": (
        {"startingOffsets": AB, "endingOffsets": '{"t": {"0": 9, "1": 4}}'},
        True,
    ),
    "other partitions in start and end times": (
        {"startingOffsetsByTimestamp": AB, "endingOffsetsByTimestamp": A},
        True,
    ),
    "an end time before the start time": (
        {"startingOffsetsByTimestamp": A, "endingOffsetsByTimestamp": '{"t": {"0": 4}}'},
        True,
    ),
    "a time that is no number": ({"startingTimestamp": "noon"}, True),
    "an end that is no number": ({"endingTimestamp": "1764000000000.5"}, True),
    "times that are no JSON": ({"startingOffsetsByTimestamp": "1764000000000"}, True),
    "times that are no numbers": ({"endingOffsetsByTimestamp": '{"t": {"0": "noon"}}'}, True),
    "a strategy that does not exist": (
        {"startingTimestamp": "1", "startingOffsetsByTimestampStrategy": "earliest"},
        True,
    ),
    "no partition to assign": ({"assign": ""}, True),
    "no topic to subscribe": ({"subscribe": ""}, True),
    "an empty pattern": ({"subscribePattern": ""}, True),
    "two ways to name topics": ({"subscribe": "t", "assign": '{"t": [0]}'}, True),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_batch_read_that_cannot_be_meant_is_refused(either_format, case):
    """By Spark's own always at load(). Ours knows at load() what is wrong for streams, too; what is
    wrong only in a batch read it refuses at the first action.
    """
    options, at_load = REFUSED[case]
    if {name.partition("ing")[0] for name in options} == {"start", "end"}:
        either_format.needs("4.0")  # Spark 3.5 does not compare the two at load()
    if at_load or either_format.name != OURS:
        with either_format.refuses("(?i)offset|time|subscribe|assign|no value|expected"):
            either_format.load("t", **options)
        return
    frame = either_format.load("t", **options)
    with either_format.refuses("a batch would read nothing"):
        either_format.read(frame)


NO_TOPICS = ["no partition to assign", "no topic to subscribe", "an empty pattern"]


@pytest.mark.parametrize("case", [*NO_TOPICS, "two ways to name topics"])
def test_a_stream_without_topics_is_refused_by_load(either_format, case):
    options, _ = REFUSED[case]
    with either_format.refuses("(?i)subscribe|assign"):
        either_format.load_stream("t", **options)


ENDS = {
    "endingOffsets": "latest",
    "endingOffsetsByTimestamp": '{"t": {"0": 5}}',
    "endingTimestamp": "1764000000000",
}


@pytest.mark.parametrize("option", ENDS)
def test_a_stream_has_no_end(either_format, topic, tmp_path, option):
    """Spark's own ignores endingTimestamp there."""
    ignored = option == "endingTimestamp"
    read = lambda: either_format.stream_values(tmp_path, topic, **{option: ENDS[option]})
    if ignored and either_format.name != OURS:
        assert read() == []
        return
    own = [] if ignored else SAME
    with either_format.refuses(f"(?i){option} is for batches|ending .* not valid", own=own):
        read()


# -- topics and partitions --


def test_headers_are_asked_for_later_and_no_longer(either_format, kafka, topic, tmp_path):
    """Three runs of one checkpoint: without, with and without headers."""
    found = []
    for number, included in enumerate(("false", "true", "false")):
        send(kafka, topic, [number])
        more = {"startingOffsets": "earliest", "includeHeaders": included}
        found += either_format.stream_values(tmp_path, topic, **more)
    assert found == [["0"], ["1"], ["2"]]


def test_a_partition_that_does_not_exist_is_left_out(either_format, kafka, topic, tmp_path):
    send(kafka, topic, ["a"])
    assigned = {"assign": json.dumps({topic: [0, 7]}), "startingOffsets": "earliest"}
    assert either_format.values(topic, **assigned) == ["a"]
    assert either_format.stream_values(tmp_path, topic, **assigned) == [["a"]]
    assert either_format.values(topic, assign=json.dumps({topic: [7]})) == []


def test_a_topic_that_does_not_exist_is_an_error(either_format, topic):
    with either_format.refuses("such topic|UnknownTopicOrPartition"):
        either_format.values(topic, assign=json.dumps({f"{topic}-absent": [0]}))


JAVA_PATTERNS = [r"\Q{}\E", r"\p{{Lower}}+-\p{{Digit}}+", r"(?i){}", r"[\w-]*{}\z"]


@pytest.mark.parametrize("pattern", JAVA_PATTERNS)
def test_a_pattern_is_one_of_java(either_format, kafka, pattern):
    topic = f"pattern-{time.time_ns()}"
    kafka.create_topic(topic)
    send(kafka, topic, ["a"])
    rows = dicts(either_format.load(topic, subscribePattern=pattern.format(topic)))
    found = [row["value"].decode() for row in rows if row["topic"] == topic]
    assert either_format.answers.add(found) == ["a"]
