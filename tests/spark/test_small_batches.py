"""Micro-batches that the driver writes: once, whatever their size turns out to be, in one
transaction, and never where that cannot work.
"""

import os
import re
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pytest
from numbered_files import query, spark  # noqa: F401  (fixtures)

import kafka2pc
from kafka2pc.kafka.read.whole_topic import read_ended
from kafka2pc.kafka.write.column_producer import ColumnTransaction
from kafka2pc.proof.child_process import until
from kafka2pc.protocol.errors import BadRow, PrecommitFailed
from kafka2pc.protocol.history import read_history
from kafka2pc.spark import foreach_batch, small_batches
from kafka2pc.spark.checkpoint import Checkpoint
from kafka2pc.spark.small_batches import arrow_rows, kept

pytestmark = [pytest.mark.kafka, pytest.mark.spark, pytest.mark.never_unsteady]


@pytest.fixture
def history(tmp_path, monkeypatch):
    """The batches of which this process has begun a transaction. (Workers have the environment of
    Spark's daemon, so their events are not in the file.)
    """
    file = tmp_path / "history"
    file.touch()
    monkeypatch.setenv("KAFKA2PC_HISTORY", str(file))

    def begun():
        return [
            e.ids["batch_id"]
            for e in read_history(file)
            if (e.kind, e.op, e.process) == ("ok", "begin", os.getpid())
        ]

    return begun


def decided(query):
    """How many transactions each batch has."""
    log = foreach_batch.stream_driver(
        kafka2pc.exactly_once(query.options()).given.options, Checkpoint(query.checkpoint), None, []
    ).log
    records = [log.load(slot) for slot in log.slots()]
    return {d.slot.batch_id: len(d.committables) for d in records if d.commit}


def split(df, parts=3):
    """More than one task."""
    return df.repartition(parts)


def test_after_a_small_batch_the_driver_writes_one_transaction(query, history):
    door = kafka2pc.exactly_once(query.options())
    words = [[f"{batch}-{n}" for n in range(90)] for batch in range(4)]
    query.feed(words[0], words[1])
    assert query.run(lambda df, n: door(split(df), n)) == ""
    assert (history(), decided(query)) == ([1], {0: 3, 1: 1})
    # a restart knows no size
    query.feed(words[2], words[3])
    assert query.run(lambda df, n: door(split(df), n)) == ""
    assert (history(), decided(query)) == ([1, 3], {0: 3, 1: 1, 2: 3, 3: 1})
    assert query.seen() == sorted(word for batch in words for word in batch)
    assert query.open() == []


@pytest.mark.parametrize("limit", ["most bytes", "maxResultSize"])
def test_a_batch_that_turns_out_larger_is_computed_once(
    query, history, monkeypatch, tmp_path, limit
):
    """Tasks write what is kept, and so they write the next one."""
    if limit == "most bytes":
        monkeypatch.setattr(small_batches, "MOST_BYTES", 100_000)
    computed = tmp_path / "computed"
    computed.mkdir()

    def note(chunks):
        from pyspark import TaskContext

        rows = [chunk for chunk in chunks if len(chunk)]
        part = TaskContext.get().partitionId()
        Path(computed, f"{part}-{os.getpid()}-{time.monotonic_ns()}").touch()
        yield from rows

    large = [f"{n:06d}" * 100 for n in range(4_000)]  # 2.4 MB
    counts = []

    def call(df, batch_id):
        before = len(list(computed.iterdir()))
        door(split(df, 2).mapInArrow(note, "value string"), batch_id)
        counts.append(len(list(computed.iterdir())) - before)

    door = kafka2pc.exactly_once(query.options())
    query.feed(["a"], large, ["b"], ["c"])
    conf = query.spark.sparkContext._jsc.sc().conf()
    if limit == "maxResultSize":
        conf.set("spark.driver.maxResultSize", "1m")
    try:
        assert query.run(call) == ""
    finally:
        conf.remove("spark.driver.maxResultSize")
    until(lambda: nothing_kept(query), "the rows are not kept any more", 30)
    assert query.seen() == sorted(["a", "b", "c", *large])
    assert (counts, history(), query.open()) == ([2, 2, 2, 2], [3], [])


@pytest.mark.full
def test_a_state_is_computed_to_its_end(query, history):
    """Three operators with a state, in 2 partitions of the shuffle, also in an empty batch."""
    door = kafka2pc.exactly_once(query.options())
    counted = query.words().groupBy("value").count().selectExpr("concat(value, '=', count) value")
    query.feed(["a", "b"], ["a"], [], ["b", "b"], ["a", "c"])
    assert query.run(door, counted, "update") == ""
    assert query.seen() == ["a=1", "a=2", "a=3", "b=1", "b=3", "c=1"]
    assert 1 in history() and 0 not in history()


def slow_writes(monkeypatch, begun):
    """A write in this process takes three seconds, and `begun` exists from then on."""
    write = ColumnTransaction.write

    def slow(self, rows):
        begun.touch()
        time.sleep(3)
        write(self, rows)

    monkeypatch.setattr(ColumnTransaction, "write", slow)


def test_a_stop_while_the_driver_writes_leaves_nothing(query, monkeypatch, tmp_path, history):
    """Spark cannot end the thread that writes: it looks for the stop itself."""
    begun, door = tmp_path / "begun", kafka2pc.exactly_once(query.options())
    slow_writes(monkeypatch, begun)
    query.feed(["a"], [f"b{n}" for n in range(300)])
    running = query.start(door)
    until(begun.exists, "the driver writes", 60)
    running.stop()
    assert running.exception() is None and query.open() == []
    assert (history(), query.seen()) == ([1], ["a"])
    monkeypatch.undo()
    assert query.run(door) == ""
    assert len(query.seen()) == 301


def test_a_stop_after_the_last_row_leaves_the_batch_undecided(query, monkeypatch):
    door, flush = kafka2pc.exactly_once(query.options()), ColumnTransaction.flush

    def flush_and_stop(self):
        flush(self)
        (running,) = query.spark.streams.active
        threading.Thread(target=running.stop).start()
        until(lambda: not running.isActive, "Spark stops the query", 30)

    monkeypatch.setattr(ColumnTransaction, "flush", flush_and_stop)  # not in the workers
    query.feed(["a"], ["b"])
    assert query.run(door) == ""
    assert (decided(query), query.seen(), query.open()) == ({0: 1}, ["a"], [])
    monkeypatch.undo()
    assert query.run(door) == ""
    assert query.seen() == ["a", "b"]


@pytest.mark.full
def test_a_stop_ends_the_driver_s_wait_for_a_broker_that_is_away(query, monkeypatch, tmp_path):
    door = kafka2pc.exactly_once(query.options())
    here, paused = small_batches.KeptRows.here, []

    def pause_then_rows(self):
        for rows in here(self):
            yield rows
            paused.append(query.kafka.pause())

    monkeypatch.setattr(small_batches.KeptRows, "here", pause_then_rows)
    query.feed(["a"], ["b"])
    running = query.start(door)
    try:
        until(lambda: paused, "the driver has written", 60)
        asked = time.monotonic()
        running.stop()
        assert time.monotonic() - asked < 60  # a delivery may take two minutes
    finally:
        query.kafka.resume()
    assert running.exception() is None
    monkeypatch.undo()
    # a request that was under way may begin the transaction when a batch has looked: the batch
    # after it ends that
    written = ["a", "b"]
    for more in "cdef":
        query.feed([more])
        written.append(more)
        assert query.run(door) == ""
        if not query.open():
            break
    assert query.seen() == written and query.open() == []


ZONE, LARGE = "spark.sql.session.timeZone", "spark.sql.execution.arrow.useLargeVarTypes"
SHAPED = (
    "if(value = 'b', null, value) Key",
    "value",
    "timestamp_millis(1700000000000 + ascii(value)) timestamp",
    "array(named_struct('Key', value, 'value', cast(value as binary))) headers",
    "cast(1 as int) partition",
)


@pytest.fixture(params=[("UTC", "false"), ("America/New_York", "True")])
def types(spark, request):
    zone = spark.conf.get(ZONE)
    spark.conf.set(ZONE, request.param[0])
    spark.conf.set(LARGE, request.param[1])
    yield
    spark.conf.set(ZONE, zone)
    spark.conf.unset(LARGE)


def plain(kind):
    """A type without the name of the time zone, without the name of what a list has, and without
    the note that there is no null.
    """
    return re.sub("tz=[^]]*|not null|item|element|[ :]", "", str(kind))


def test_the_rows_are_those_that_tasks_get(spark, types):
    """Also their types."""
    df = spark.createDataFrame([("a",), ("b",)], "value string").selectExpr(*SHAPED)
    df = df.withColumnsRenamed({"Key": "key"})

    def as_pickle(chunks):
        import pickle

        table = pa.Table.from_batches(chunks)
        yield pa.RecordBatch.from_pydict({"table": [pickle.dumps(table)]})

    import pickle

    rows = df.coalesce(1).mapInArrow(as_pickle, "table binary").collect()
    with kept(arrow_rows(df.coalesce(1))) as found:
        here = pa.Table.from_batches(found.here())
    tasks = pickle.loads(rows[0].table)
    assert here.cast(tasks.schema).equals(tasks)
    assert [plain(field.type) for field in here.schema] == [plain(f.type) for f in tasks.schema]


def test_what_the_driver_decided_and_tasks_replay_is_equal(query, types, monkeypatch, history):
    """`replayCheck` compares rows and bytes."""
    door = kafka2pc.exactly_once(query.options(includeTimestamp="true"))
    call = lambda df, n: door(df.selectExpr(*SHAPED), n)
    commit = foreach_batch.commit

    def fail(driver, messages, batch_id):
        commit(driver, messages, batch_id)
        if batch_id == 1:
            monkeypatch.setattr(foreach_batch, "commit", commit)
            raise ZeroDivisionError

    monkeypatch.setattr(foreach_batch, "commit", fail)
    query.feed(["a", "b"], ["a", "bb", "c"])
    assert "ZeroDivisionError" in query.run(call)
    assert history() == [1]
    assert query.run(call) == ""
    found = sorted((r.value, r.key, r.timestamp_ms, r.headers, r.partition) for r in records(query))
    wanted = [("a", "a"), ("a", "a"), ("b", None), ("bb", "bb"), ("c", "c")]
    assert [(v.decode(), k and k.decode()) for v, k, *_ in found] == wanted
    assert {(t - ord(v[:1]), p) for v, _, t, _, p in found} == {(1_700_000_000_000, 1)}


HEADERS = "array<struct<key:string,value:binary>>"
BAD = "cast(X'62FF00FE' as string)"  # is not UTF-8
# columns of three rows in two partitions, with an `id` from 0 on
SELECTED = {
    "text": ["cast(id as string) key", "concat('v', id) value"],
    "bytes": ["encode(cast(id as string), 'UTF-8') key", "X'00FF' value"],
    "no UTF-8": [f"{BAD} key", f"if(id = 1, {BAD}, 'good') value"],
    "null and empty": ["if(id = 1, null, '') key", "if(id = 0, null, if(id = 1, '', 'a')) value"],
    "only null": ["cast(null as string) key", "cast(null as binary) value"],
    "char and varchar": ["cast('a' as varchar(9)) key", "cast('a' as char(3)) value"],
    "large": ["repeat('ä€😀', 50000) value"],
    "a constant": ["'v' value", "'t' topic"],
    "topics": ["'v' value", "concat('t', id) topic"],
    "partitions": ["'v' value", "if(id = 1, null, cast(id as int)) partition"],
    "headers": ["'v' value", f"array(named_struct('key', {BAD}, 'value', X'FF')) headers"],
    "null in headers": [
        "'v' value",
        "if(id = 0, null, if(id = 1, array(), array(named_struct('Key', 'h', 'VALUE',"
        f" cast(null as binary)), named_struct('Key', '', 'VALUE', X'')))) headers",
    ],
    "no headers": ["'v' value", f"cast(null as {HEADERS}) headers"],
    "times": ["'v' value", "timestamp_micros(1700000000000000 + 333 * id) timestamp"],
    "year 9999": ["'v' value", "timestamp_micros(253402300799999999) timestamp"],
    "1970": ["'v' value", "timestamp_micros(id) timestamp"],
    "no rows": ["'v' value", "id"],
    "one row": ["cast(id as string) value", "id"],
    # what tasks refuse
    "year 1": ["'v' value", "timestamp'0001-01-01 00:00:00Z' timestamp"],
    "before 1970": ["'v' value", "timestamp_micros(-1) timestamp"],
    "no time": ["'v' value", "cast(null as timestamp) timestamp"],
    "partition -1": ["'v' value", "-1 partition"],
    "topic that is no UTF-8": ["'v' value", f"{BAD} topic"],
    "no topic": ["'v' value", "cast(null as string) topic"],
    "header without a key": [
        "'v' value",
        "array(named_struct('key', cast(null as string), 'value', X'')) headers",
    ],
    "too large": ["repeat('v', 2000000) value"],
}
REFUSED = list(SELECTED).index("year 1")


def handing():
    """Stands for a task of the sink: what is made of the rows on their way to Kafka, or the error.
    (In a function, so that a worker need not import this file.)
    """

    def each(topic, rows):
        columns = [rows.keys, rows.values, rows.headers, rows.wanted]
        if not isinstance(rows.timestamps_ms, int):
            columns.append(rows.timestamps_ms)
        lists = [c.tolist() for c in columns if c is not None]
        return list(zip([topic] * len(rows), *lists, strict=True))

    class Handed:
        def __call__(self, chunks):
            from kafka2pc.kafka.records.rows import rows_by_topic
            from kafka2pc.spark.sink.columns import plain_names

            found = []
            try:
                for chunk in chunks:
                    batch = plain_names(chunk, "timestamp" in chunk.schema.names)
                    named = None if "topic" in batch.schema.names else "named"
                    for topic, rows in rows_by_topic(batch, named, 1 << 20):
                        found += map(str, each(topic, rows))
            except Exception as e:
                return [repr(e)]
            return found

        def as_rows(self, chunks):
            import pickle

            yield pa.RecordBatch.from_pydict({"message": [pickle.dumps(self(chunks))]})

    return Handed()


def handed(messages):
    return sorted(row for rows in messages for row in rows)


def frames(spark):
    three = spark.range(3, numPartitions=2)
    few = {"no rows": "false", "one row": "id = 2"}
    for name, columns in SELECTED.items():
        yield name, three.selectExpr(*columns).where(few.get(name, "true")).drop("id")
    yield "no partitions", spark.createDataFrame(spark.sparkContext.emptyRDD(), "value string")


def test_the_sink_makes_the_same_of_all_rows_and_refuses_the_same(spark, types):
    """Byte for byte, whether tasks or the driver read them, or tasks what is kept."""
    counts = {"no rows": 0, "one row": 1, "no partitions": 0}
    for n, (name, df) in enumerate(frames(spark)):
        refused = REFUSED <= n < len(SELECTED)
        df = df.coalesce(1) if refused else df  # errors number rows
        wanted = handed(foreach_batch.in_tasks(df, handing()))
        if refused:
            assert wanted[0].startswith("BadRow"), name
        else:
            assert len(wanted) == counts.get(name, 3), name
        with kept(arrow_rows(df)) as rows:
            assert rows.few() and handed([handing()(rows.here())]) == wanted, name
            assert handed(rows.each_partition(handing())) == wanted, name


def records(query):
    return read_ended(query.kafka.client_conf, query.topic)


@pytest.mark.parametrize("why", ["option", "batch"])
def test_where_the_driver_does_not_write_or_shows_a_batch_as_a_whole(query, history, why):
    more = {"option": {"smallBatches": "tasks"}, "batch": {"visibility": "batch"}}[why]
    door = kafka2pc.exactly_once(query.options(**more))
    query.feed(["a"], ["b"])
    assert query.run(door) == ""
    assert (query.seen(), query.open()) == (["a", "b"], [])
    assert history() == ([] if why == "option" else [1])


def test_rows_that_fail_in_their_computation_leave_nothing(query, history):
    door = kafka2pc.exactly_once(query.options())
    bad = "if(value = 'c', raise_error('row c'), value) value"
    query.feed(["a"], ["b", "c"])
    assert "row c" in query.run(lambda df, n: door(df.selectExpr(bad), n))
    assert (history(), query.seen(), query.open()) == ([], ["a"], [])
    until(lambda: nothing_kept(query), "the rows are not kept any more", 30)


def test_rows_that_executors_could_not_keep_are_written_by_tasks(spark):
    df = spark.range(10).selectExpr("cast(id as string) value").coalesce(1)
    with kept(arrow_rows(df)) as found:
        assert found.few()
        found.rdd._jrdd.unpersist(True)
        assert not found.few()
        assert found.each_partition(lambda chunks: sum(map(len, chunks))) == [10]


def test_spark_may_learn_late_what_its_executors_keep():
    info = SimpleNamespace(
        id=lambda: 7,
        numPartitions=lambda: 2,
        numCachedPartitions=lambda: len(asked) - 1,
        memSize=lambda: 10,
        diskSize=lambda: 0,
    )
    asked = []
    conf = SimpleNamespace(getSizeAsBytes=lambda name, default: 1 << 30)
    context = SimpleNamespace(
        getRDDStorageInfo=lambda: asked.append(1) or [info][: len(asked) - 1], conf=lambda: conf
    )
    rdd = SimpleNamespace(
        id=lambda: 7, context=SimpleNamespace(_jsc=SimpleNamespace(sc=lambda: context))
    )
    assert small_batches.KeptRows(rdd, pa.schema([])).few()
    assert len(asked) == 3


def test_an_empty_batch_waits_for_nothing(spark, monkeypatch):
    """Spark does not list what keeps nothing, so nothing is asked."""
    monkeypatch.delattr(small_batches, "_stored")
    for name, df in frames(spark):
        if name in ("no rows", "no partitions"):
            with kept(arrow_rows(df)) as found:
                assert found.few() and list(found.here()) == [], name


def test_rows_on_a_disk_stay_with_the_executors(spark):
    """Their size there is that of compressed bytes."""
    from pyspark import StorageLevel

    found = arrow_rows(spark.range(10).selectExpr("cast(id as string) value").coalesce(1))
    found.rdd.persist(StorageLevel.DISK_ONLY)
    found.rdd._jrdd.count()
    assert not found.few()
    found.rdd.unpersist()


def test_tasks_do_not_write_bytes_of_another_schema(spark):
    """As `here`: the bytes of 64-bit offsets could be read as 32-bit ones."""
    df = spark.range(10).selectExpr("cast(id as string) value").coalesce(1)
    with kept(replace(arrow_rows(df), schema=pa.schema([("value", pa.large_string())]))) as found:
        with pytest.raises(Exception, match="ArrowInvalid"):
            found.each_partition(lambda chunks: pa.Table.from_batches(chunks).to_pylist())
        with pytest.raises(pa.ArrowInvalid):
            list(found.here())


def test_an_executor_has_few_rows_at_a_time_on_its_heap(spark):
    df = spark.range(3 * small_batches.MOST_ROWS).selectExpr("cast(id as string) value").coalesce(1)
    before = spark.conf.get(small_batches._ROWS)
    with kept(arrow_rows(df)) as found:
        assert found.rdd._jrdd.count() == 3
        assert [len(batch) for batch in found.here()] == [3 * small_batches.MOST_ROWS]
    assert spark.conf.get(small_batches._ROWS) == before


def test_rows_of_other_types_are_left_to_tasks(spark):
    assert arrow_rows(spark.range(1)) is None
    assert arrow_rows(spark.range(1).selectExpr("array(id) headers")) is None


@pytest.mark.parametrize("what", ["a column", "another engine", "an observation"])
def test_what_ran_before_runs(query, history, what):
    """A further column whose name the sink knows; an engine whose waits a stop cannot end; and an
    `Observation`, which waits for an action of the frame.
    """
    from pyspark.sql import Observation
    from pyspark.sql import functions as F

    counts = []

    def call(df, batch_id):
        if what == "a column":
            df = df.selectExpr("value Value", "cast(1 as bigint) timestamp", "1 more")
        if what == "an observation":
            seen = Observation()
            df = df.observe(seen, F.count(F.lit(1)).alias("rows")).select("value")
        door(df, batch_id)
        if what == "an observation":
            counts.append(seen.get["rows"])

    engine = "confluent" if what == "another engine" else "auto"
    door = kafka2pc.exactly_once(query.options(engine=engine))
    query.feed(["a"], ["b", "c"])
    assert query.run(call) == ""
    assert query.seen() == ["a", "b", "c"]
    assert history() == ([1] if what == "a column" else [])
    assert counts == ([1, 2] if what == "an observation" else [])


@pytest.mark.parametrize("error", [PrecommitFailed, BadRow])
def test_what_may_pass_is_tried_again_by_tasks(query, history, monkeypatch, error):
    def fail(self):
        raise error("on purpose")

    monkeypatch.setattr(ColumnTransaction, "flush", fail)  # not in the workers
    door = kafka2pc.exactly_once(query.options())
    query.feed(["a"], ["b"])
    message = query.run(door)
    again = error is PrecommitFailed
    assert message == "" if again else "on purpose" in message
    assert (query.seen(), history()) == (["a", "b"] if again else ["a"], [1])
    assert query.open() == []


def nothing_kept(query):
    return not query.spark.sparkContext._jsc.getPersistentRDDs()
