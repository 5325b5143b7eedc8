"""`foreachBatch(exactly_once(...))`: every output mode, every kind of batch frame, stops, second
drivers, two queries at a time, the way to `format("kafka2pc")` and back, and Spark Connect.
"""

import json
import os
import shutil
import subprocess
import sys
import threading
import uuid
from pathlib import Path

import pytest
from both_formats import LATE_WORKER
from gated_query import Reader, hiding, transactions
from kafka_fixtures import values
from marks import first_of
from numbered_files import Query, query, spark  # noqa: F401  (fixtures)
from pyarrow import RecordBatch

import kafka2pc
from kafka2pc.kafka.participant import KafkaParticipant
from kafka2pc.kafka.read.whole_topic import read_ended
from kafka2pc.proof.child_process import until
from kafka2pc.protocol.errors import BadOption, MovedLog, StaleCheckpoint
from kafka2pc.protocol.log.slots import MemoryLog
from kafka2pc.protocol.memory import MemoryParticipant
from kafka2pc.protocol.messages import Plan
from kafka2pc.protocol.names import new_token
from kafka2pc.protocol.participant import Outcome
from kafka2pc.spark import foreach_batch
from kafka2pc.spark.checkpoint import Checkpoint
from kafka2pc.spark.sink import opening
from kafka2pc.stores.file import FileParticipant

pytestmark = [pytest.mark.kafka, pytest.mark.spark, pytest.mark.never_unsteady]
ROOT = Path(__file__).resolve().parents[2]


def test_each_of_the_topics_exists_and_has_a_gate(kafka):
    topics = [f"topics-{uuid.uuid4().hex[:8]}" for _ in range(2)]
    options = {
        "kafka.bootstrap.servers": kafka.bootstrap_servers,
        "visibility": "batch",
        "topics": ", ".join(topics),
        "transactionalIdPrefix": topics[0],
    }
    kafka.create_topic(topics[0])
    with pytest.raises(BadOption, match=f"topic {topics[1]} does not exist") as caught:
        foreach_batch.open_stores(kafka2pc.exactly_once(options).given)
    assert "correct the option topic or topics" in caught.value.action
    kafka.create_topic(topics[1])
    [store] = foreach_batch.open_stores(kafka2pc.exactly_once(options).given)
    plan = Plan(query_id=str(uuid.uuid4()), batch_id=0, attempt=1, token=new_token(0, 1))
    gate = store.open_gate(plan)
    assert [p.topic for p in gate.partitions] == sorted(topics)
    assert store.abort(gate) is Outcome.DONE


class Broken(Exception):
    """What a test lets happen."""


def fail_once(monkeypatch, name, after):
    """Let the driver fail once in this function of the module, before it or after it."""
    original = getattr(foreach_batch, name)

    def failing(*args, **kwargs):
        monkeypatch.setattr(foreach_batch, name, original)
        if after:
            original(*args, **kwargs)
        raise Broken(name)

    monkeypatch.setattr(foreach_batch, name, failing)


# -- output modes --

EXPECTED = {  # of ["a", "b", "a"], then ["a", "c"]
    "append": ["a", "a", "a", "b", "c"],
    "update": ["a=2", "a=3", "b=1", "c=1"],
    "complete": ["a=2", "a=3", "b=1", "b=1", "c=1"],
}


@pytest.mark.parametrize("mode", first_of(["update", "append", "complete"]))
def test_every_output_mode_survives_failures_before_and_after_the_decision(
    query, monkeypatch, mode
):
    frame = query.words()
    if mode != "append":
        frame = frame.groupBy("value").count().selectExpr("concat(value, '=', count) value")
    door = kafka2pc.exactly_once(query.options())
    query.feed(["a", "b", "a"], ["a", "c"])
    for after in (False, True):
        fail_once(monkeypatch, "commit", after)
        assert "Broken" in query.run(door, frame, mode)
    assert query.run(door, frame, mode) == ""
    assert query.seen() == EXPECTED[mode] and query.open() == []


# -- frames --


def test_a_frame_may_be_used_twice(query):
    door, counted = kafka2pc.exactly_once(query.options()), []

    def twice(df, batch_id):
        df.persist()
        counted.append(df.count())
        door(df.selectExpr("value", "length(value) note"), batch_id)
        df.unpersist()

    query.feed(["a", "b"], ["c"])
    assert query.run(twice) == ""
    assert (counted, query.seen()) == ([2, 1], ["a", "b", "c"])


@pytest.mark.parametrize("topics", [1, 2])
def test_two_calls_for_one_batch_are_refused(query, topics):
    """The batch is decided by then: the rows of the second call would be left out."""
    other = f"{query.topic}-other" if topics == 2 else query.topic
    if topics == 2:
        query.kafka.create_topic(other)
    doors = [kafka2pc.exactly_once(query.options(topic=t)) for t in (query.topic, other)]
    letters = [f"value = '{letter}'" for letter in "ab"]  # as many rows and bytes in both calls
    query.feed(["a", "b"])
    call = lambda df, n: [d(df.where(w), n) for d, w in zip(doors, letters, strict=True)]
    for _ in range(2):  # a restart of the query is another run, and refuses it, too
        assert "batch 0 was passed on twice" in query.run(call)
        assert values(query.kafka, query.topic) == ["a"] and query.open() == []
    if topics == 2:
        assert values(query.kafka, other) == []


@pytest.mark.full
def test_two_calls_with_two_names_write_a_batch_twice(query, tmp_path):
    options = query.options(decisionLog=str(tmp_path / "decisions"))
    doors = [kafka2pc.exactly_once(options, name=query.topic + end) for end in "xy"]
    query.feed(["a"], ["b"])
    assert query.run(lambda df, n: [door(df, n) for door in doors]) == ""
    assert query.seen() == ["a", "a", "b", "b"]


@pytest.mark.parametrize(
    "partitions",
    [1, pytest.param(0, marks=pytest.mark.full), pytest.param(500, marks=pytest.mark.nightly)],
)
def test_batches_of_any_number_of_partitions(query, partitions):
    door = kafka2pc.exactly_once(query.options())
    empty = query.spark.createDataFrame(query.spark.sparkContext.emptyRDD(), "value string")
    split = lambda df: df.repartition(partitions) if partitions else empty
    query.feed([str(n) for n in range(600)])
    assert query.run(lambda df, n: door(split(df), n)) == ""
    assert query.seen() == sorted(str(n) for n in range(600 if partitions else 0))
    decided = foreach_batch.stream_driver(
        door.given.options, Checkpoint(query.checkpoint), None, []
    ).log
    assert sorted(slot.batch_id for slot in decided.slots() if decided.load(slot).commit) == [0]
    assert query.open() == []


def test_a_frame_that_fails_in_the_middle_leaves_nothing(query):
    """It fails in its last task; most others have pre-committed by then, and one may still run."""
    door = kafka2pc.exactly_once(query.options())
    bad = "if(value = '99', raise_error('row 99'), value) value"
    split = lambda df: df.selectExpr("value", "cast(value as int) n").repartitionByRange(4, "n")
    query.feed([str(n) for n in range(100)])
    wrong = lambda df, n: door(split(df).selectExpr(bad), n)
    assert "row 99" in query.run(wrong)
    assert query.seen(still_open=True) == []
    assert query.run(door) == ""
    assert query.seen() == sorted(str(n) for n in range(100)) and query.open() == []


def test_columns_are_checked_before_anything_is_written(query):
    door = kafka2pc.exactly_once(query.options())
    query.feed(["a"])
    error = query.run(lambda df, n: door(df.selectExpr("value content"), n))
    assert "column value is missing among ['content']" in error and "BadOption" in error
    assert foreach_batch.Checkpoint(query.checkpoint).decided_slots() == []


# -- visibility=batch --


def by_format(query, frame, options):
    writer = frame.writeStream.format("kafka2pc").options(**options)
    return writer.option("checkpointLocation", query.checkpoint).trigger(availableNow=True).start()


def by_foreach_batch(query, frame, options):
    return query.start(kafka2pc.exactly_once(options), frame)


def places(kafka, topics):
    """The number in front of a value -> ((topic, partition), offset) of its rows."""
    found = {}
    for r in [r for topic in topics for r in read_ended(kafka.client_conf, topic)]:
        number = int(r.value.split()[0])
        found.setdefault(number, []).append(((r.topic, r.partition), r.offset))
    return found


@pytest.mark.parametrize("start", [by_format, by_foreach_batch])
def test_a_reader_sees_each_micro_batch_as_a_whole(query, start):
    """Of three, each with four tasks."""
    query.feed(*([f"{n} {row}" for row in range(40)] for n in range(3)))
    with Reader(query.kafka, [query.topic], query.topic) as reader:
        running = start(query, query.words().repartition(4), query.options(visibility="batch"))
        running.awaitTermination(120)
        reader.look()
        ended = transactions(reader.cluster, query.topic)
    found = places(query.kafka, [query.topic])
    assert {n: len(rows) for n, rows in found.items()} == dict.fromkeys(range(3), 40)
    for rows in found.values():
        assert reader.parts(rows) == [] and len(hiding(ended, rows)) == 1
    assert query.open() == []


def test_a_reader_sees_a_batch_write_to_several_topics_as_a_whole(query):
    other = query.kafka.create_topic(f"{query.topic}-other", partitions=2)
    topics = [query.topic, other]
    frame = query.spark.range(40).repartition(4)
    frame = frame.selectExpr(
        "concat('0 ', id) value", f"if(id < 9, '{other}', '{query.topic}') topic"
    )
    with Reader(query.kafka, topics, query.topic) as reader:
        options = query.options(visibility="batch", topics=",".join(topics))
        del options["topic"]
        frame.write.format("kafka2pc").options(**options).mode("append").save()
        reader.look()
        ended = transactions(reader.cluster, query.topic) | transactions(reader.cluster, other)
    (rows,) = places(query.kafka, topics).values()
    assert len(rows) == 40 and {part[0] for part, _ in rows} == set(topics)
    assert reader.parts(rows) == [] and len(hiding(ended, rows)) == 1


def test_kafka_shows_a_batch_when_the_other_store_has_it(query, monkeypatch, tmp_path):
    store, noted = FileParticipant(str(tmp_path / "table"), format="json"), []
    original = FileParticipant.commit

    def noting(self, c):
        outcome = original(self, c)
        noted.append(query.seen(still_open=True))
        return outcome

    monkeypatch.setattr(FileParticipant, "commit", noting)
    door = kafka2pc.exactly_once(
        query.options(visibility="batch"), participants=[store], in_order=True
    )
    query.feed(["a", "b"], ["c"])
    assert query.run(door, query.words().repartition(2)) == ""
    in_table = query.spark.read.json(str(tmp_path / "table"))
    assert sorted(row["value"] for row in in_table.collect()) == query.seen() == ["a", "b", "c"]
    # each commit of a file comes before Kafka shows anything of its batch
    assert noted == [[]] * 2 + [["a", "b"]] * (len(noted) - 2) and len(noted) > 2


def test_a_query_downstream_reads_no_part_of_a_batch(query, monkeypatch, tmp_path):
    """The query upstream dies between two commits, and the other one reads what there is."""
    batches = []
    conf = {f"kafka.{k}": v for k, v in query.kafka.client_conf.items()}
    conf |= {"subscribe": query.topic, "startingOffsets": "earliest"}
    source = query.spark.readStream.format("kafka2pc").options(**conf)

    def read():
        writer = source.load().writeStream.foreachBatch(
            lambda df, n: batches.append(sorted(bytes(r.value).decode() for r in df.collect()))
        )
        place = writer.option("checkpointLocation", str(tmp_path / "downstream"))
        place.trigger(availableNow=True).start().awaitTermination(120)

    original = KafkaParticipant.end_all

    def dying(self, verb, cs):
        monkeypatch.setattr(KafkaParticipant, "end_all", original)
        # nothing but a gate is in front of its rows
        first = min(cs, key=lambda c: min(p.first_offset for p in c.partitions))
        original(self, verb, [first])
        raise ConnectionError("between two commits")  # tasks know no class of this module

    door = kafka2pc.exactly_once(query.options(visibility="batch"))
    query.feed([f"{n:02}" for n in range(40)])
    monkeypatch.setattr(KafkaParticipant, "end_all", dying)
    assert "between two commits" in query.run(door, query.words().repartition(4))
    read()
    assert query.run(door, query.words().repartition(4)) == ""
    read()
    assert [rows for rows in batches if rows] == [[f"{n:02}" for n in range(40)]]


# -- stops, and other drivers --


ARROW_ROWS = "spark.sql.execution.arrow.maxRecordsPerBatch"


def endless():
    """For `mapInArrow`: rows that are handed on at once, and then nothing until Spark kills the
    task.
    """

    def rows_then_nothing(chunks):
        for _ in chunks:
            for _ in range(40):
                yield RecordBatch.from_pydict({"value": ["x" * 100_000]})
            threading.Event().wait(600)

    return rows_then_nothing


@pytest.fixture
def row_by_row(spark):
    """Spark hands each row on as it comes."""
    spark.conf.set(ARROW_ROWS, 1)
    yield
    spark.conf.unset(ARROW_ROWS)


@pytest.mark.parametrize("door", first_of(["format", "foreachBatch"]))
@pytest.mark.parametrize("visibility", first_of(["batch", "transaction"]))
def test_a_stop_leaves_no_transaction_open(row_by_row, query, door, visibility):
    """The only task has begun and has sent no message. The gate, too, is open."""
    options = query.options(visibility=visibility)
    query.feed(["a"])
    writer = query.words().coalesce(1).mapInArrow(endless(), "value string").writeStream
    if door == "format":
        writer = writer.format("kafka2pc").options(**options)
    else:
        writer = writer.foreachBatch(kafka2pc.exactly_once(options))
    running = writer.option("checkpointLocation", query.checkpoint).start()
    begun = 2 if visibility == "batch" else 1
    until(lambda: len(query.open()) == begun, "the task has begun", 60)
    running.stop()
    assert query.open() == [] and running.exception() is None


def test_a_query_that_is_stopped_in_the_middle_goes_on(query, tmp_path):
    door, begun = kafka2pc.exactly_once(query.options()), tmp_path / "begun"

    def slow(rows):
        import time

        for batch in rows:
            yield batch
            begun.touch()
            time.sleep(600)

    query.feed(["a", "b"])
    running = query.start(lambda df, n: door(df.mapInArrow(slow, "value string"), n))
    until(begun.exists, "a task has begun", 60)
    running.stop()
    assert query.seen(still_open=True) == []
    assert query.run(door) == ""
    assert query.seen() == ["a", "b"] and query.open() == []


class Watched(MemoryLog):
    """A decision log that calls `decided` just before it writes a COMMIT."""

    def __init__(self, decided):
        super().__init__()
        self.decided = decided

    def create(self, decision, *more):
        if decision.commit:
            self.decided(decision.slot.batch_id)
        return super().create(decision, *more)


@pytest.mark.full
@pytest.mark.parametrize("at", ["plan", "commit"])
def test_a_stop_ends_the_wait_for_brokers_that_are_away(query, at):
    """Without an exception, as with Spark's own sink. They come back when it has returned."""
    away, left = threading.Event(), []

    def leave(batch_id):
        if batch_id == 1 and not left:
            left.append(query.kafka.pause())
            away.set()

    limits = {"kafka.delivery.timeout.ms": "20000", "kafka.max.block.ms": "20000"}
    log = Watched(leave if at == "commit" else lambda batch_id: None)
    options = query.options(decisionLog=log, maxCommitRetries="4", **limits)
    door = kafka2pc.exactly_once(options, name=query.topic)

    def call(df, batch_id):
        if at == "plan":
            leave(batch_id)
        door(df, batch_id)

    query.feed(["a", "b"], ["c", "d"])
    running = query.start(call)
    try:
        assert away.wait(120)
        running.stop()
    finally:
        query.kafka.resume()
    assert running.exception() is None
    assert query.run(call) == ""
    assert query.seen() == ["a", "b", "c", "d"] and query.open() == []


def test_a_driver_that_was_replaced_writes_nothing_twice(query, monkeypatch):
    """A second driver starts from the same checkpoint, aborts what the first one has open, and
    writes the batch, before the first one decides.
    """
    door = kafka2pc.exactly_once(query.options())
    original = foreach_batch.commit

    def second(driver, messages, batch_id):
        monkeypatch.setattr(foreach_batch, "commit", original)
        monkeypatch.setattr(opening, "_RUNS", {})
        plan = opening.plan_batch(driver, batch_id, messages[0].plan.offsets_hash)
        foreach_batch.write_batch(driver, frames[-1], plan)
        original(driver, messages, batch_id)

    frames = []

    def keep(df, batch_id):
        frames.append(df)
        door(df, batch_id)

    query.feed(["a", "b"])
    monkeypatch.setattr(foreach_batch, "commit", second)
    assert "is aborted before the decision" in query.run(keep)
    assert query.seen() == ["a", "b"]
    monkeypatch.setattr(opening, "_RUNS", {})
    assert query.run(door) == ""
    assert query.seen() == ["a", "b"] and query.open() == []


def test_two_queries_share_a_session_and_a_function(query, spark, kafka, tmp_path):
    """Each finds its own checkpoint. They run at the same time, and write into one topic."""
    (tmp_path / "second").mkdir()
    other = Query(spark, kafka, tmp_path / "second")
    both = threading.Barrier(2, timeout=60)
    door = kafka2pc.exactly_once(query.options())

    def together(df, batch_id):
        both.wait()
        door(df, batch_id)

    for q, letter in ((query, "a"), (other, "b")):
        q.feed([f"{letter}{n}" for n in range(50)], [letter])
    running = [q.start(together) for q in (query, other)]
    for one in running:
        one.awaitTermination(120)
    expected = [f"{letter}{n}" for letter in "ab" for n in range(50)] + ["a", "b"]
    assert query.seen() == sorted(expected) and query.open() == other.open() == []


def test_a_name_that_two_queries_have_is_refused(query, spark, kafka, tmp_path):
    (tmp_path / "second").mkdir()
    other = Query(spark, kafka, tmp_path / "second")
    named = kafka2pc.exactly_once(
        query.options(decisionLog=str(tmp_path / "decisions")), name="orders"
    )
    query.feed(["a"]), other.feed(["b"])
    assert query.run(named) == ""
    assert StaleCheckpoint.__name__ in other.run(named)
    assert query.seen() == ["a"]


@pytest.mark.parametrize("start", [by_format, by_foreach_batch])
def test_a_folder_of_checkpoints_is_no_checkpoint(query, start):
    """Spark's configuration names it, and Spark kept the query in a folder below: moved into the
    option as it is, all rows would be written again.
    """
    mine = query.checkpoint
    query.feed(["a"])
    assert query.run(kafka2pc.exactly_once(query.options())) == ""
    os.rename(mine, f"{mine}-moved")
    os.makedirs(mine)
    os.rename(f"{mine}-moved", f"{mine}/counts")
    with pytest.raises(Exception, match="holds checkpoints of queries: counts") as caught:
        start(query, query.words(), query.options()).awaitTermination(120)
    assert f'{mine}/counts"' in str(caught.value)
    assert query.seen() == ["a"]
    with pytest.raises(BadOption, match=f"Did you mean {mine}"):
        Checkpoint(str(query.folder)).query_id()


def test_an_error_that_is_caught_stops_the_next_batch(query, monkeypatch):
    """Spark would take the batch for written, and its rows would be missing without a word."""
    door = kafka2pc.exactly_once(query.options())

    def careless(df, batch_id):
        try:
            door(df, batch_id)
        except Broken:
            pass

    query.feed(["a"], ["b"])
    fail_once(monkeypatch, "commit", after=False)
    missing = "a call for batch 0 failed and nothing of it is decided"
    assert missing in query.run(careless)
    assert query.seen() == [] and query.open() == []


def test_a_run_after_a_caught_error_is_refused_until_the_gap_is_closed(query, monkeypatch):
    """Two runs with one batch each: the error is forgotten with the run, the note is not. A run
    that repeats the batch which failed is not refused.
    """
    door = kafka2pc.exactly_once(query.options())

    def careless(df, batch_id):
        try:
            door(df, batch_id)
        except Broken:
            pass

    query.feed(["a"])
    fail_once(monkeypatch, "commit", after=False)
    assert query.run(careless) == ""
    query.feed(["b"])
    assert "a call for batch 0 failed and nothing of it is decided" in query.run(door)
    by_hand = kafka2pc.exactly_once(query.options(), checkpoint=query.checkpoint)
    by_hand.accept(0)
    for words in (["c"], ["d"]):
        assert query.run(door) == ""
        query.feed(words)
    assert query.seen() == ["b", "c"]
    seen = []
    fail_once(monkeypatch, "commit", after=False)
    assert "Broken" in query.run(door)
    query.feed(["e"])
    assert query.run(lambda df, n: seen.append(n) or (n > 3 and door(df, n))) == ""
    assert seen == [3, 4] and query.seen() == ["b", "c", "e"]


def test_a_name_that_is_added_later_is_refused(query, monkeypatch, tmp_path):
    """The decisions are in the checkpoint: under the name, a decided batch would come twice."""
    query.feed(["a"])
    fail_once(monkeypatch, "commit", after=True)
    assert "Broken" in query.run(kafka2pc.exactly_once(query.options()))
    options = query.options(decisionLog=str(tmp_path / "decisions"))
    for _ in range(2):  # each start is refused
        assert MovedLog.__name__ in query.run(kafka2pc.exactly_once(options, name="orders"))
    assert query.seen() == ["a"]


# -- the checkpoint --


def test_a_query_moves_to_the_format_and_back(query):
    """One checkpoint, and decisions that both read: a batch that one has decided, the other
    finishes.
    """
    door = kafka2pc.exactly_once(query.options())

    def by_format():
        writer = query.words().writeStream.format("kafka2pc").options(**query.options())
        writer = writer.option("checkpointLocation", query.checkpoint)
        writer.trigger(availableNow=True).start().awaitTermination(120)

    with pytest.MonkeyPatch.context() as broken:
        query.feed(["a"], ["b"])
        fail_once(broken, "commit", after=True)
        assert "Broken" in query.run(door, query.words().selectExpr("value VALUE", "'x' note"))
    by_format()
    assert query.seen() == ["a", "b"]
    query.feed(["c"])
    assert query.run(door) == ""
    assert query.seen() == ["a", "b", "c"] and query.open() == []


def test_a_query_without_a_checkpoint_location_is_refused(query):
    query.feed(["a"])
    writer = query.words().writeStream.foreachBatch(kafka2pc.exactly_once(query.options()))
    with pytest.raises(Exception, match="the checkpoint of the query is not known"):
        writer.trigger(availableNow=True).start().awaitTermination(120)
    assert query.seen() == []


def test_the_checkpoint_of_another_query_is_refused(query, tmp_path):
    """`checkpoint=` names a copy that was made before the last batch."""
    door = kafka2pc.exactly_once(query.options())
    query.feed(["a"])
    assert query.run(door) == ""
    subprocess.run(["cp", "-r", query.checkpoint, tmp_path / "copy"], check=True)
    query.feed(["b"])
    copied = kafka2pc.exactly_once(query.options(), checkpoint=str(tmp_path / "copy"))
    assert StaleCheckpoint.__name__ in query.run(copied)
    assert query.run(door) == "" and query.seen() == ["a", "b"]


def test_a_checkpoint_put_back_from_a_backup_is_refused(query, tmp_path):
    """All runs go on in one process, under one claim: a commit that no decision names says it."""
    door = kafka2pc.exactly_once(query.options())
    query.feed(["a"])
    assert query.run(door) == ""
    shutil.copytree(query.checkpoint, tmp_path / "backup")
    query.feed(["b"])
    assert query.run(door) == ""
    shutil.rmtree(query.checkpoint)
    shutil.copytree(tmp_path / "backup", query.checkpoint)
    error = query.run(kafka2pc.exactly_once(query.options()))
    assert StaleCheckpoint.__name__ in error and "put back from a backup" in error
    assert query.seen() == ["a", "b"]


CONNECT = """
import json, sys
from pyspark.sql import SparkSession
import kafka2pc

options, source, checkpoint, places, late = json.loads(sys.argv[1])


def silent_once(door):
    # it catches its errors; the store falls silent after the second decision

    def careless(df, batch_id):
        from kafka2pc.spark import foreach_batch

        commit = foreach_batch.commit
        if batch_id == 1:
            die = lambda fn, items: 1 / 0
            foreach_batch.commit = lambda driver, *what: commit(driver.within(each=die), *what)
        try:
            door(df, batch_id)
        except ZeroDivisionError:
            pass
        finally:
            foreach_batch.commit = commit

    return careless


builder = SparkSession.builder.remote("local[2]").config("spark.ui.enabled", "false")
spark = builder.getOrCreate()
all_words = spark.readStream.text(source)
words = spark.readStream.option("maxFilesPerTrigger", 1).text(source)
for place in places:
    door = kafka2pc.exactly_once(options, checkpoint=place)
    at = checkpoint
    if place == "under a name":
        at = f"{checkpoint}-named"
        more = {"decisionLog": f"{at}-log"}
        door = silent_once(kafka2pc.exactly_once(options | more, name=at))
    if place in ("one batch", "a new checkpoint"):
        at = f"{checkpoint}-{place}"
        more = {"decisionLog": f"{checkpoint}-log"}
        door = kafka2pc.exactly_once(options | more, name="one batch")
        words = all_words
    writer = words.writeStream.foreachBatch(door).option("checkpointLocation", at)
    said = late
    for start in range(2):
        if late not in said:
            break
        try:
            query = writer.trigger(availableNow=True).start()
            said = "done" if query.awaitTermination(150) else "it has not ended"
        except Exception as e:
            said = str(e)
    print("answer", json.dumps(said))
"""


@pytest.mark.full
def test_over_spark_connect_the_checkpoint_is_asked_for(query):
    """The function runs in a process of the server, which does not know the query. Under a name it
    never learns which run it is in; what was decided before an error that the function caught is
    finished all the same.
    """
    query.feed(["a", "b"], ["c"], ["d"])
    other = query.folder / "other"
    (other / "offsets").mkdir(parents=True)
    (other / "metadata").write_text(json.dumps({"id": str(uuid.uuid4())}))
    (other / "offsets" / "0").write_text("v1\n{}\n0")
    places = [None, str(other), query.checkpoint, "under a name", "one batch", "a new checkpoint"]
    source = str(query.folder / "source")
    what = [query.options(), source, query.checkpoint, places, LATE_WORKER]
    done = subprocess.run(
        [sys.executable, "-c", CONNECT, json.dumps(what)],
        env=os.environ | {"PYTHONPATH": str(ROOT), "SPARK_TESTING": "1"},  # a free port
        capture_output=True,
        text=True,
        timeout=500,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("answer ")]
    assert len(lines) == len(places), done.stdout + done.stderr
    answers = [json.loads(line.removeprefix("answer ")) for line in lines]
    unknown, foreign, *good, new_checkpoint = answers
    assert "the checkpoint of the query is not known" in unknown
    assert "which this session does not run" in foreign
    assert good == ["done"] * 3
    assert "is about to replay" in new_checkpoint or "was decided for" in new_checkpoint
    assert query.seen() == sorted([*"abcd"] * 3) and query.open() == []


# -- arguments --


@pytest.mark.parametrize(
    "how, words",
    [
        ({}, "no store"),
        (dict(options={"topic": "t"}), "nothing uses topic"),
        (dict(options={"kafka.bootstrap.servers": "h:1", "topc": "t"}), "Did you mean topic"),
        (
            dict(options={"kafka.bootstrap.servers": "h:1", "checkpointLocation": "/c"}),
            "checkpointLocation is not for exactly_once",
        ),
        (
            dict(options={"kafka.bootstrap.servers": "h:1", "deliveryGuarantee": "at_least_once"}),
            "deliveryGuarantee=at_least_once is not for exactly_once",
        ),
        (
            dict(
                options={"kafka.bootstrap.servers": "h:1", "topic": "t"},
                participants=[MemoryParticipant("kafka")],
            ),
            "two participants have the name kafka",
        ),
        (
            dict(participants=[MemoryParticipant()], name="orders"),
            "name=orders without decisionLog",
        ),
        (
            dict(participants=[MemoryParticipant()], options={"topic": MemoryLog()}),
            "only decisionLog",
        ),
        (
            dict(participants=[MemoryParticipant()], options={"decisionLog": "kafka:decisions"}),
            "decisionLog=kafka:decisions without kafka.bootstrap.servers",
        ),
    ],
)
def test_arguments_that_cannot_work_are_refused_at_once(how, words):
    with pytest.raises(BadOption) as caught:
        kafka2pc.exactly_once(**how)
    assert words in str(caught.value)


def test_options_are_texts_and_a_password_is_not_shown():
    how = {"kafka.bootstrap.servers": "h:1", "topic": "t", "includeTimestamp": True}
    how["decisionLog"] = "postgresql://user:secret@h/db"
    shown = repr(kafka2pc.exactly_once(how))
    assert "timestamps=True" in shown and "secret" not in shown


def test_each_name_has_a_log_of_its_own_in_a_process(tmp_path):
    """Two threads may write under two names: a reader of a topic is for one thread."""
    jobs = [
        kafka2pc.exactly_once(
            {"decisionLog": str(tmp_path)}, participants=[MemoryParticipant()], name=name
        )
        for name in ("a", "b", "a")
    ]
    first, second, again = (foreach_batch.open_driver(job.given).log for job in jobs)
    assert first is again and first is not second


def test_a_job_needs_a_name():
    with pytest.raises(BadOption, match="a batch job without a name"):
        kafka2pc.exactly_once(participants=[MemoryParticipant()]).write(None)
