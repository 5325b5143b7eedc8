"""A query that is moved from Spark's own `format("kafka")`: small things that it relies on, and
what differs. The fixture `either_format` runs a case with both.
"""

import threading
import time

import pytest
from both_formats import OURS, send, values
from pyspark import InheritableThread

pytestmark = [pytest.mark.full, pytest.mark.spark, pytest.mark.kafka]


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
