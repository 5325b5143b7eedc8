"""A query that is moved from Spark's own `format("kafka")`: small things that it relies on, and
what differs. Spark's own format is the oracle (`make spark-own`).
"""

import threading
import time

import pytest
from both_formats import OURS, SAME, Format, dicts, run, send
from confluent_kafka import Producer
from marks import first_of
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
    (writer.mode(mode) if mode else writer).save()
    format.answers.add("written")


@pytest.mark.parametrize("engine", ["columnar", "confluent"])
def test_names_inside_headers_have_no_case(either_format, topic, engine):
    headers = "array(named_struct('Key', 'a', 'VALUE', cast('x' as binary))) headers"
    own = {"engine": engine} if either_format.name == OURS else {}
    write(either_format, topic, "'v' value", headers, **own)
    (row,) = dicts(either_format.load(topic, includeHeaders="true"))
    found = [[h["key"], h["value"].decode()] for h in row["headers"]]
    assert either_format.answers.add(found) == [["a", "x"]]


def test_headers_in_another_order_are_refused(either_format, topic):
    headers = "array(named_struct('value', cast('x' as binary), 'key', 'a')) headers"
    with either_format.refuses("headers"):
        write(either_format, topic, "'v' value", headers)


def test_the_option_topic_is_trimmed(either_format, topic):
    write(either_format, f" {topic} ")
    assert either_format.values(topic) == ["v"]


def test_the_option_topic_wins_over_the_column(either_format, topic):
    write(either_format, topic, "'v' value", "'nowhere' topic")
    assert either_format.values(topic) == ["v"]


def test_sql_makes_a_view_of_a_topic(either_format, kafka, topic):
    send(kafka, topic, ["a", "b"])
    spark = either_format.spark
    spark.sql(
        f"CREATE OR REPLACE TEMPORARY VIEW moved USING {either_format.name} OPTIONS"
        f" (`kafka.bootstrap.servers` '{kafka.bootstrap_servers}', subscribe '{topic}')"
    )
    assert either_format.read(spark.table("moved")) == ["a", "b"]


def test_a_table_of_the_catalog(either_format, kafka, topic):
    """Spark keeps the options of a table, and does not pass them to a source in Python."""
    send(kafka, topic, ["a"])
    name, spark = f"moved_{either_format.name}", either_format.spark
    create = (
        f"CREATE TABLE {name} USING {either_format.name} OPTIONS"
        f" (`kafka.bootstrap.servers` '{kafka.bootstrap_servers}', subscribe '{topic}')"
    )
    if either_format.name == OURS:
        with either_format.refuses("CREATE TEMPORARY VIEW", own=["a"]):
            spark.sql(create)
        assert not spark.catalog.tableExists(name)
    else:
        spark.sql(create)
        assert either_format.read(spark.table(name)) == ["a"]
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
        either_format.answers.add("written", own="refused")
        with pytest.raises(Exception, match="kafka.bootstrap.servers is missing"):
            either_format.spark.table(name).collect()
        either_format.spark.sql(f"DROP TABLE {name}")
    else:
        with either_format.refuses("Save mode Overwrite not allowed"):
            writer.saveAsTable(name)
    assert either_format.values(topic, own=[] if ours else SAME) == (["v"] if ours else [])


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
    assert either_format.answers.add(sorted(found)) == [[0, 2], [5, 1]]


def test_a_stream_that_is_joined_with_itself_is_one_source(either_format, kafka, topic, tmp_path):
    send(kafka, topic, [1, 2, 3, 6])
    frame = either_format.load_stream(topic, startingOffsets="earliest")
    numbers = frame.selectExpr("int(string(value)) n", "int(string(value)) % 5 key")
    found = []
    query = run(
        numbers.join(numbers, "key"),
        tmp_path,
        lambda rows, _: found.extend(list(r) for r in rows.collect()),
    )
    joined = [[1, 1, 1], [1, 1, 6], [1, 6, 1], [1, 6, 6], [2, 2, 2], [3, 3, 3]]
    assert either_format.answers.add(sorted(found)) == joined
    assert {len(p["sources"]) for p in query.recentProgress} == {1}
    rows = sum(p["numInputRows"] for p in query.recentProgress)
    assert either_format.answers.add(rows) == 4


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
    either_format.answers.add([[v if v is None else v.decode() for v in row] for row in found])


# What each refuses, and how.
SAVE_MODES = {
    None: ("UNSUPPORTED_DATA_SOURCE_SAVE_MODE", ""),
    "errorifexists": ("UNSUPPORTED_DATA_SOURCE_SAVE_MODE", ""),
    "ignore": ("UNSUPPORTED_DATA_SOURCE_SAVE_MODE", "Save mode Ignore not allowed"),
    "overwrite": ("a topic cannot be overwritten", "Save mode Overwrite not allowed"),
    "append": ("", ""),
}


@pytest.mark.parametrize("mode", SAVE_MODES)
def test_save_modes(either_format, topic, mode):
    """Spark refuses other modes than append for every data source in Python, before it asks it. Its
    own format writes if no mode is given, and with `errorifexists`.
    """
    ours = either_format.name == OURS
    refusal, own_refusal = SAVE_MODES[mode] if ours else (SAVE_MODES[mode][1],) * 2
    own_writes = bool(refusal) and not own_refusal
    if refusal:
        with either_format.refuses(refusal, "", own="written" if own_writes else SAME):
            write(either_format, topic, mode=mode)
    else:
        write(either_format, topic, mode=mode)
    found = either_format.values(topic, own=["v"] if own_writes else SAME)
    assert found == ([] if refusal else ["v"])


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


THREADS = {"thread": threading.Thread, "inheritable thread": InheritableThread}
SESSIONS = {"its session": lambda s: s, "a new session": lambda s: s.newSession()}


@pytest.mark.parametrize("kind", first_of(THREADS, rest="nightly"))
@pytest.mark.parametrize("session_of", first_of(SESSIONS, rest="nightly"))
def test_a_thread_that_registers_writes_and_reads(
    both_formats, kafka, topic, tmp_path, kind, session_of
):
    """A thread of Python's has no active session in Spark, and there Spark looks for the format of
    a write. `register` gives it one.
    """
    import kafka2pc

    session = SESSIONS[session_of](both_formats)
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

    assert in_thread(THREADS[kind], work) == ["0", "1", "v"]


def test_a_thread_reads_without_registering(both_formats, kafka, topic):
    send(kafka, topic, ["a"])
    assert in_thread(threading.Thread, lambda: Format(OURS, both_formats, kafka).values(topic)) == [
        "a"
    ]
