"""How much a micro-batch and a task read: lower and upper limits, the wait for more, and how
often Kafka is asked. Spark's own source is the oracle.
"""

import random
import time

import pytest
from both_formats import OURS, SAME, send, values

import kafka2pc
from kafka2pc.kafka.wire.connection import NotYet
from kafka2pc.protocol.errors import BrokerUnreachable
from kafka2pc.spark.interfaces import ReadAllAvailable, ReadMaxRows, ReadMinRows
from kafka2pc.spark.source.cluster import _ask_again
from kafka2pc.spark.source.offsets import Range, cut_ranges, from_json
from kafka2pc.spark.source.options import parse_source_options
from kafka2pc.spark.source.rate import Rate, Tries, Wait, duration_ms
from kafka2pc.spark.source.readers import StreamReader

pytestmark = pytest.mark.never_unsteady

LONG_MAX = 2**63 - 1


@pytest.mark.parametrize(
    ("text", "ms"),
    [
        ("250", 250),
        ("2500us", 2),
        ("250ms", 250),
        (" 5S ", 5_000),
        ("15m", 900_000),
        ("15min", 900_000),
        ("2h", 7_200_000),
        ("1d", 86_400_000),
    ],
)
def test_times_are_written_as_spark_writes_them(text, ms):
    assert duration_ms("maxTriggerDelay", text) == ms


def test_a_micro_batch_waits_for_enough_offsets_or_until_its_delay_is_over():
    """The first one of a run does not wait. The delay begins anew with each one that does not."""
    clock_ms = [0]
    wait = Wait(Rate(min_offsets=15, delay_ms=5_000), lambda: clock_ms[0])
    seen = []
    for at_ms, waiting in [(0, 1), (100, 14), (200, 15), (5_199, 14), (5_200, 0), (9_000, 14)]:
        clock_ms[0] = at_ms
        seen.append(wait.must_wait(waiting))
    assert seen == [False, True, False, True, False, True]


def test_without_a_lower_limit_nothing_waits():
    wait = Wait(Rate())
    assert [wait.must_wait(n) for n in (0, 0, 1)] == [False] * 3


def test_a_question_is_tried_as_often_as_the_options_say():
    conf = {"kafka.bootstrap.servers": "127.0.0.1:1", "subscribe": "a"}
    tries = parse_source_options(
        conf | {"fetchOffset.numRetries": "5", "fetchOffset.retryIntervalMs": "1"}
    ).tries
    asked = []

    def once():
        asked.append(1)
        raise NotYet("no leader")

    with pytest.raises(BrokerUnreachable):
        _ask_again(once, "offsets", 20, tries)
    assert (tries, len(asked)) == (Tries(5, 1), 5)


def test_one_of_the_two_options_of_tries_is_enough():
    conf = {"kafka.bootstrap.servers": "127.0.0.1:1", "subscribe": "a"}
    parsed = lambda **more: parse_source_options(conf | more).tries
    assert parsed() is None
    assert parsed(**{"fetchOffset.numRetries": "7"}) == Tries(7, 1_000)
    assert parsed(**{"fetchOffset.retryIntervalMs": "7"}) == Tries(3, 7)


# -- on a broker --


def reader_of(kafka, topic, **more):
    servers = {"kafka.bootstrap.servers": kafka.bootstrap_servers, "subscribe": topic}
    return StreamReader(parse_source_options(servers | {"startingOffsets": "earliest"} | more))


@pytest.mark.kafka
def test_lower_and_upper_limit_together(kafka, topic):
    """33 offsets, 15 at least and 20 at most: 19 (in proportion), a wait for the other 14, and with
    one more all 15. After the delay, one.
    """
    send_unevenly(kafka, topic)
    limits = {"minOffsetsPerTrigger": "15", "maxOffsetsPerTrigger": "20", "maxTriggerDelay": "5s"}
    reader, clock_ms = reader_of(kafka, topic, **limits), [0]
    reader._wait.now_ms = lambda: clock_ms[0]
    limit = reader.getDefaultReadLimit()
    assert limit == ReadMaxRows(20)
    start = reader.initialOffset()
    first = reader.latestOffset(start, limit)
    assert sum(from_json(first).at.values()) == 19
    assert reader.latestOffset(first, limit) is first
    assert reader.reportLatestOffset()["offsets"][topic] == {"0": 21, "1": 11, "2": 1}
    send(kafka, topic, ["more"])
    second = reader.latestOffset(first, limit)
    assert sum(from_json(second).at.values()) == 34
    send(kafka, topic, ["one"])
    assert reader.latestOffset(second, limit) is second
    clock_ms[0] = 5_000
    assert sum(from_json(reader.latestOffset(second, limit)).at.values()) == 35


@pytest.mark.kafka
def test_a_run_that_reads_all_there_is_does_not_wait(kafka, topic):
    """`trigger(once=True)` asks for all; `availableNow` asks with the limits of the source."""
    once, available = (
        reader_of(kafka, topic, minOffsetsPerTrigger="15", maxTriggerDelay="1d") for _ in range(2)
    )
    limit = once.getDefaultReadLimit()
    assert limit == ReadMinRows(15)
    available.prepareForTriggerAvailableNow()
    starts = [r.latestOffset(r.initialOffset(), limit) for r in (once, available)]
    send(kafka, topic, range(5))
    assert once.latestOffset(starts[0], limit) is starts[0]
    assert sum(from_json(once.latestOffset(starts[0], ReadAllAvailable())).at.values()) == 5
    available.prepareForTriggerAvailableNow()
    assert sum(from_json(available.latestOffset(starts[1], limit)).at.values()) == 5


@pytest.mark.kafka
def test_a_task_reads_at_most_so_many_records(kafka, topic):
    send(kafka, topic, range(9))
    reader = reader_of(kafka, topic, maxRecordsPerPartition="4", minPartitions="2")
    start = reader.initialOffset()
    tasks = reader.partitions(start, reader.latestOffset(start, None))
    ranges = [r for task in tasks for r in task.ranges]
    assert ranges == [Range(topic, 0, 0, 3), Range(topic, 0, 3, 6), Range(topic, 0, 6, 9)]


# -- beside Spark's own source --


def send_unevenly(kafka, topic):
    """33 rows: 21, 11 and 1."""
    for partition, n in enumerate((21, 11, 1)):
        send(kafka, topic, range(n), partition)


def run_stream(format, topic, tmp_path, trigger, own=SAME, **more):
    """How many rows each micro-batch of a run has read."""
    options = {"startingOffsets": "earliest"} | more
    writer = format.load_stream(topic, **options).writeStream.format("noop")
    query = writer.option("checkpointLocation", str(tmp_path / "cp")).trigger(**trigger).start()
    assert query.awaitTermination(120)
    rows = [p["numInputRows"] for p in query.recentProgress if p["numInputRows"]]
    return format.answers.add(rows, own)


@pytest.mark.full
@pytest.mark.spark
@pytest.mark.kafka
def test_cuts_are_those_of_sparks_own_calculator(both_formats):
    """400 random batches, cut by both."""
    jvm = both_formats._jvm
    own, rng = jvm.org.apache.spark.sql.kafka010, random.Random(7)
    to_seq = jvm.org.apache.spark.api.python.PythonUtils.toSeq
    nowhere = getattr(getattr(jvm.scala, "None$"), "MODULE$")

    def by_spark(whole, options):
        entries = jvm.java.util.HashMap()
        for name, value in options.items():
            entries.put(name, str(value))
        conf = jvm.org.apache.spark.sql.util.CaseInsensitiveStringMap(entries)
        ranges = jvm.java.util.ArrayList()
        for r in whole:
            part = jvm.org.apache.kafka.common.TopicPartition(r.topic, r.partition)
            ranges.add(own.KafkaOffsetRange(part, r.begin, r.end, nowhere))
        calculator = own.KafkaOffsetRangeCalculator.apply(conf)
        cut = calculator.getRanges(to_seq(ranges), to_seq(jvm.java.util.ArrayList()))
        found = [cut.apply(i) for i in range(cut.size())]
        return [Range(r.topic(), r.partition(), r.fromOffset(), r.untilOffset()) for r in found]

    for _ in range(400):
        sizes = [rng.choice((0, 1, 5, rng.randint(1, 3000))) for _ in range(rng.randint(1, 5))]
        whole = [Range("t", p, 3, 3 + n) for p, n in enumerate(sizes)]
        least = rng.choice((None, rng.randint(1, 40)))
        most = rng.choice((None, 1_000, rng.randint(20, 300)))
        options = {"minPartitions": least, "maxRecordsPerPartition": most}
        given = {name: value for name, value in options.items() if value}
        assert cut_ranges(whole, least, most) == by_spark(whole, given), (whole, given)


@pytest.mark.full
@pytest.mark.spark
@pytest.mark.kafka
def test_the_upper_limit_is_shared_out_as_spark_does(either_format, kafka, topic, tmp_path):
    send_unevenly(kafka, topic)
    now = {"availableNow": True}
    rows = run_stream(either_format, topic, tmp_path / "10", now, maxOffsetsPerTrigger="10")
    assert rows == [10, 9, 9, 5]
    largest = {"maxOffsetsPerTrigger": str(LONG_MAX)}
    assert run_stream(either_format, topic, tmp_path / "long", now, **largest) == [33]


@pytest.mark.full
@pytest.mark.spark
@pytest.mark.kafka
def test_how_far_each_batch_was_behind(either_format, kafka, topic, tmp_path):
    """Spark's own source reports it to Spark; `progress` reads ours from the checkpoint."""
    send_unevenly(kafka, topic)
    rows = either_format.load_stream(topic, startingOffsets="earliest", maxOffsetsPerTrigger="10")
    writer = rows.writeStream.format("noop").option("checkpointLocation", str(tmp_path / "cp"))
    query = writer.trigger(availableNow=True).start()
    assert query.awaitTermination(120)
    names = ("avg", "max", "min")
    if either_format.name == OURS:
        seen = kafka2pc.progress(str(tmp_path / "cp"))
        behind = [
            float(tuple(seen[f"{name}_behind"])[n]) for n in range(len(seen)) for name in names
        ]
    else:
        behind = [
            round(float(p["sources"][0]["metrics"][f"{name}OffsetsBehindLatest"]), 1)
            for p in query.recentProgress
            for name in names
        ]
    assert either_format.answers.add(behind) == [7.7, 15, 0, 4.7, 9, 0, 1.7, 3, 0, 0, 0, 0]


@pytest.mark.full
@pytest.mark.spark
@pytest.mark.kafka
def test_a_run_that_ends_and_the_lower_limit(either_format, kafka, topic, tmp_path):
    """`once` reads all in both. `availableNow` leaves 14 in Spark's own, and reads them here."""
    send_unevenly(kafka, topic)
    limits = {"minOffsetsPerTrigger": "15", "maxOffsetsPerTrigger": "20"}
    assert run_stream(either_format, topic, tmp_path / "1", {"once": True}, **limits) == [33]
    ours = either_format.name == OURS
    own = [19] if ours else SAME
    rows = run_stream(either_format, topic, tmp_path / "2", {"availableNow": True}, own, **limits)
    assert rows == ([19, 14] if ours else [19])


@pytest.mark.full
@pytest.mark.spark
@pytest.mark.kafka
def test_a_running_stream_waits_for_the_lower_limit(either_format, kafka, topic, tmp_path):
    send(kafka, topic, range(3))
    limits = {"minOffsetsPerTrigger": "15", "maxTriggerDelay": "1h"}
    rows = either_format.load_stream(topic, startingOffsets="earliest", **limits)
    found = []
    writer = rows.writeStream.foreachBatch(lambda batch, number: found.append(values(batch)))
    query = writer.option("checkpointLocation", str(tmp_path / "cp")).start()
    try:
        wait_until(lambda: [len(batch) for batch in found] == [3], query)
        send(kafka, topic, range(5))
        time.sleep(1)  # the source is asked meanwhile; if it is not, the test sees less
        send(kafka, topic, range(10))
        wait_until(lambda: len(found) > 1, query)
    finally:
        query.stop()
    assert either_format.answers.add([len(batch) for batch in found]) == [3, 15]


def wait_until(is_so, query, within_s=120):
    end = time.monotonic() + within_s
    while not is_so():
        assert time.monotonic() < end and not query.exception(), query.exception()
        time.sleep(0.1)


@pytest.mark.full
@pytest.mark.spark
@pytest.mark.kafka
def test_a_batch_read_is_cut_and_ignores_what_is_for_streams(either_format, kafka, topic):
    either_format.needs("4.0")  # maxRecordsPerPartition
    send(kafka, topic, range(9))
    first = {"assign": f'{{"{topic}": [0]}}'}
    rows = either_format.load(topic, maxRecordsPerPartition="4", minPartitions="2", **first)
    found = [rows.rdd.getNumPartitions(), rows.count()]
    assert either_format.answers.add(found) == [3, 9]
    limits = {
        "maxOffsetsPerTrigger": "5",
        "minOffsetsPerTrigger": "2",
        "maxTriggerDelay": "1s",
        "fetchOffset.numRetries": "4",
        "fetchOffset.retryIntervalMs": "10",
        "groupIdPrefix": "team-a",
        "kafka.consumer.cache.capacity": "3",
        "kafkaConsumer.pollTimeoutMs": "20000",
    }
    assert either_format.answers.add(either_format.load(topic, **limits).count()) == 9


@pytest.fixture
def topic(kafka):
    name = f"rate-{time.time_ns()}"
    kafka.create_topic(name, partitions=3)
    return name
