"""A query that is moved from Spark's own `format("kafka")`: small things that it relies on, and
what differs. The fixture `either_format` runs a case with both.
"""

import threading
import time

import pytest
from both_formats import OURS, run, send, values
from confluent_kafka import Producer
from pyspark import InheritableThread
from pyspark.sql.functions import window

pytestmark = [pytest.mark.full, pytest.mark.spark, pytest.mark.kafka, pytest.mark.never_unsteady]


@pytest.fixture
def topic(kafka):
    name = f"moved-{time.time_ns()}"
    kafka.create_topic(name)
    return name


def write(format, topic, *columns, mode="append", **more):
    """One row, with these columns."""
    frame = format.spark.range(1).selectExpr(*(columns or ["'v' value"]))
    servers = {"kafka.bootstrap.servers": format.kafka.bootstrap_servers, "topic": topic}
    writer = frame.write.format(format.name).options(**servers | more)
    return (writer.mode(mode) if mode else writer).save()


@pytest.mark.parametrize("engine", ["columnar", "confluent"])
def test_names_inside_headers_have_no_case(either_format, topic, engine):
    headers = "array(named_struct('Key', 'a', 'VALUE', cast('x' as binary))) headers"
    own = {"engine": engine} if either_format.name == OURS else {}
    write(either_format, topic, "'v' value", headers, **own)
    (row,) = either_format.load(topic, includeHeaders="true").collect()
    assert [(h.key, bytes(h.value)) for h in row.headers] == [("a", b"x")]


def test_headers_in_another_order_are_refused(either_format, topic):
    headers = "array(named_struct('value', cast('x' as binary), 'key', 'a')) headers"
    with pytest.raises(Exception, match="headers"):
        write(either_format, topic, "'v' value", headers)


def test_the_option_topic_is_trimmed(either_format, topic):
    write(either_format, f" {topic} ")
    assert either_format.values(topic) == ["v"]


def test_the_option_topic_wins_over_the_column(either_format, topic):
    write(either_format, topic, "'v' value", "'nowhere' topic")
    assert either_format.values(topic) == ["v"]


def test_headers_are_asked_for_later_and_no_longer(either_format, kafka, topic, tmp_path):
    """Three runs of one checkpoint: without, with and without headers."""
    found = []
    for number, included in enumerate(("false", "true", "false")):
        send(kafka, topic, [number])
        more = {"startingOffsets": "earliest", "includeHeaders": included}
        found += either_format.stream_values(tmp_path / "cp", topic, **more)
    assert found == [["0"], ["1"], ["2"]]


def test_a_partition_that_does_not_exist_is_left_out(either_format, kafka, topic, tmp_path):
    send(kafka, topic, ["a"])
    assigned = {"assign": f'{{"{topic}": [0, 7]}}', "startingOffsets": "earliest"}
    assert either_format.values(topic, **assigned) == ["a"]
    assert either_format.stream_values(tmp_path / "cp", topic, **assigned) == [["a"]]
    assert either_format.values(topic, assign=f'{{"{topic}": [7]}}') == []


def test_a_topic_that_does_not_exist_is_an_error(either_format, topic):
    with pytest.raises(Exception, match="such topic|UnknownTopicOrPartition"):
        either_format.values(topic, assign=f'{{"{topic}-absent": [0]}}')


@pytest.mark.parametrize(
    "pattern",
    [
        r"\Q{}\E",
        r"\p{{Lower}}+-\p{{Digit}}+",
        r"(?i){}",
        r"[\w-]*{}\z",
    ],
)
def test_a_pattern_is_one_of_java(either_format, kafka, topic, pattern):
    send(kafka, topic, ["a"])
    rows = either_format.load(topic, subscribePattern=pattern.format(topic))
    assert values(rows.where(f"topic = '{topic}'")) == ["a"]


def test_sql_makes_a_view_of_a_topic(either_format, kafka, topic):
    send(kafka, topic, ["a", "b"])
    spark = either_format.spark
    spark.sql(
        f"CREATE OR REPLACE TEMPORARY VIEW moved USING {either_format.name} OPTIONS"
        f" (`kafka.bootstrap.servers` '{kafka.bootstrap_servers}', subscribe '{topic}')"
    )
    assert values(spark.table("moved")) == ["a", "b"]


def test_a_table_of_the_catalog(either_format, kafka, topic):
    """Spark keeps the options of a table, and does not pass them to a source in Python."""
    send(kafka, topic, ["a"])
    name, spark = f"moved_{either_format.name}", either_format.spark
    create = (
        f"CREATE TABLE {name} USING {either_format.name} OPTIONS"
        f" (`kafka.bootstrap.servers` '{kafka.bootstrap_servers}', subscribe '{topic}')"
    )
    if either_format.name == OURS:
        with pytest.raises(Exception, match="CREATE TEMPORARY VIEW"):
            spark.sql(create)
        assert not spark.catalog.tableExists(name)
    else:
        spark.sql(create)
        assert values(spark.table(name)) == ["a"]
        spark.sql(f"DROP TABLE {name}")


def test_save_as_table(either_format, kafka, topic):
    """kafka2pc writes the rows once, and Spark adds a table without options to its catalog. Spark's
    own format refuses it.
    """
    name, ours = f"saved_{either_format.name}", either_format.name == OURS
    frame = either_format.spark.sql("select 'v' value")
    servers = {"kafka.bootstrap.servers": kafka.bootstrap_servers, "topic": topic}
    writer = frame.write.format(either_format.name).options(**servers).mode("append")
    if ours:
        writer.saveAsTable(name)
        with pytest.raises(Exception, match="kafka.bootstrap.servers is missing"):
            either_format.spark.table(name).collect()
        either_format.spark.sql(f"DROP TABLE {name}")
    else:
        with pytest.raises(Exception, match="Save mode Overwrite not allowed"):
            writer.saveAsTable(name)
    assert either_format.values(topic) == (["v"] if ours else [])


def test_a_stream_with_a_watermark(either_format, kafka, topic, tmp_path):
    """Two rows in the window from 0 to 5 s, one in the next, and one 100 s later."""
    start_ms = (int(time.time()) // 5 - 200) * 5000
    for at_s in (1, 2, 7, 100):
        send(kafka, topic, [at_s], timestamp_ms=start_ms + at_s * 1000)
    frame = either_format.load_stream(topic, startingOffsets="earliest")
    frame = frame.withWatermark("timestamp", "10 seconds")
    counts = frame.groupBy(window("timestamp", "5 seconds")).count()
    found = []
    run(
        counts.selectExpr("unix_millis(window.start) start", "count"),
        tmp_path,
        lambda rows, _: found.extend(
            ((r.start - start_ms) // 1000, r["count"]) for r in rows.collect()
        ),
    )
    assert sorted(found) == [(0, 2), (5, 1)]


def test_a_stream_that_is_joined_with_itself_is_one_source(either_format, kafka, topic, tmp_path):
    send(kafka, topic, [1, 2, 3, 6])
    frame = either_format.load_stream(topic, startingOffsets="earliest")
    numbers = frame.selectExpr("int(string(value)) n", "int(string(value)) % 5 key")
    found = []
    query = run(
        numbers.join(numbers, "key"),
        tmp_path,
        lambda rows, _: found.extend(tuple(r) for r in rows.collect()),
    )
    assert sorted(found) == [(1, 1, 1), (1, 1, 6), (1, 6, 1), (1, 6, 6), (2, 2, 2), (3, 3, 3)]
    assert {len(p.sources) for p in query.recentProgress} == {1}
    assert sum(p.numInputRows for p in query.recentProgress) == 4


def test_a_stream_reads_keys_and_values_that_are_null(either_format, kafka, topic, tmp_path):
    pairs = [(None, None), (b"1", None), (None, b"2"), (b"", b"")]
    producer = Producer(kafka.client_conf | {"transactional.id": topic})
    producer.init_transactions(60)
    producer.begin_transaction()
    for key, value in pairs:
        producer.produce(topic, value, key=key)
    producer.commit_transaction(60)
    frame = either_format.load_stream(topic, startingOffsets="earliest").select("key", "value")
    found = []
    run(frame, tmp_path, lambda rows, _: found.extend(rows.collect()))
    assert [tuple(v if v is None else bytes(v) for v in r) for r in found] == pairs


SAVE_MODES = {
    None: ("UNSUPPORTED_DATA_SOURCE_SAVE_MODE", ""),
    "errorifexists": ("UNSUPPORTED_DATA_SOURCE_SAVE_MODE", ""),
    "ignore": ("UNSUPPORTED_DATA_SOURCE_SAVE_MODE", "Save mode Ignore not allowed"),
    "overwrite": ("a topic cannot be overwritten", "Save mode Overwrite not allowed"),
    "append": ("", ""),
}


@pytest.mark.parametrize("mode", SAVE_MODES)
def test_save_modes(either_format, topic, mode):
    """Spark refuses other modes than append for every data source in Python, before it asks it."""
    refusal = SAVE_MODES[mode][either_format.name != OURS]
    if refusal:
        with pytest.raises(Exception, match=refusal):
            write(either_format, topic, mode=mode)
    else:
        write(either_format, topic, mode=mode)
    assert either_format.values(topic) == ([] if refusal else ["v"])


def in_thread(kind, call):
    """What a call returns that runs in a thread of this kind. Raises what it raises."""
    outcome = []

    def run():
        try:
            outcome.append((call(), None))
        except Exception as e:
            outcome.append((None, e))

    thread = kind(target=run)
    thread.start()
    thread.join(120)
    result, error = outcome[0]
    if error:
        raise error
    return result


@pytest.mark.parametrize("kind", [threading.Thread, InheritableThread])
@pytest.mark.parametrize("session_of", [lambda s: s, lambda s: s.newSession()])
def test_a_thread_that_registers_writes_and_reads(
    both_formats, kafka, topic, tmp_path, kind, session_of
):
    """A thread of Python's has no active session in Spark, and there Spark looks for the format of
    a write. `register` gives it one.
    """
    from both_formats import Format

    import kafka2pc

    session = session_of(both_formats)
    ours = Format(OURS, session, kafka)

    def work():
        kafka2pc.register(session)
        write(ours, topic)
        stream = session.readStream.format("rate-micro-batch").option("rowsPerBatch", 2).load()
        writer = stream.selectExpr("cast(value as string) value").writeStream.format(OURS)
        servers = {"kafka.bootstrap.servers": kafka.bootstrap_servers, "topic": topic}
        writer = writer.options(checkpointLocation=str(tmp_path / "cp"), **servers)
        query = writer.trigger(once=True).start()
        assert query.awaitTermination(120)
        assert [p.sink.numOutputRows for p in query.recentProgress] == [2]
        return ours.values(topic)

    assert in_thread(kind, work) == ["0", "1", "v"]


def test_a_thread_reads_without_registering(both_formats, kafka, topic):
    from both_formats import Format

    send(kafka, topic, ["a"])
    assert in_thread(threading.Thread, lambda: Format(OURS, both_formats, kafka).values(topic)) == [
        "a"
    ]
