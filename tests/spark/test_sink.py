"""The sink beyond crashes: retries, zombies, stops, separate executors, Connect, stateful queries,
batch writes, and what else a query can be.
"""

import json
import os
import shutil
import signal
from collections import Counter
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial
from itertools import product
from threading import Timer

import pytest
from confluent_kafka import Producer, TopicPartition
from confluent_kafka.admin import AdminClient, OffsetSpec
from kafka_fixtures import values
from marks import first_of
from typer.testing import CliRunner

from kafka2pc.kafka.read.whole_topic import read_topic
from kafka2pc.kafka.records.partitioner import first_partition
from kafka2pc.kafka.wire.cluster import Cluster
from kafka2pc.kafka.wire.topics import topic_rows
from kafka2pc.local.broker import LocalKafka
from kafka2pc.operations.cli.app import app
from kafka2pc.proof.checker import duplicate, lost, reordered
from kafka2pc.proof.child_process import Failed, until
from kafka2pc.proof.crash_points import CrashPoint
from kafka2pc.proof.drills.spark_job import running
from kafka2pc.proof.drills.spark_query import (
    SparkQuery,
    Stop,
    expect_failure,
    interrupt,
    last_events,
    order_crash,
)
from kafka2pc.spark.sink.batch_line import BatchHistory
from kafka2pc.spark.sink.batch_writer import plan_write
from kafka2pc.spark.sink.opening import warn_once
from kafka2pc.spark.sink.options import parse_sink_options

pytestmark = [pytest.mark.kafka, pytest.mark.spark, pytest.mark.never_unsteady]


def faults(**named):
    return {"faults": json.dumps(named)}


# -- rows --


def test_rows_are_counted_once_nothing_is_open_in_their_topic(spark_query, kafka):
    """One task has committed, and the commit of the other comes late."""

    def task(partition):
        name = f"{spark_query.name}-{partition}"
        producer = Producer(kafka.client_conf | {"transactional.id": name, "log_level": 0})
        producer.init_transactions(30)
        producer.begin_transaction()
        producer.produce(spark_query.name, b"a row", partition=partition)
        producer.flush(30)
        return producer

    first, late = task(0), task(1)
    first.commit_transaction(30)
    readers = spark_query.seen, partial(values, kafka, spark_query.name)
    with ThreadPoolExecutor(2) as beside:
        found = [beside.submit(reader) for reader in readers]
        wait(found, 1)
        late.commit_transaction(30)
    assert [len(rows.result()) for rows in found] == [2, 2]


def test_columns_are_those_of_sparks_own_sink(spark_query, kafka):
    kafka.create_topic(f"{spark_query.name}-other", partitions=4)
    spark_query.feed()
    spark_query.run(
        options={"topic": None},
        select=[
            f"concat('{spark_query.name}', if(row % 2 = 0, '', '-other')) TOPIC",
            "encode(cast(row as string), 'utf-8') Value",
            "encode(key, 'utf-8') kEy",
            "cast(if(row % 2 = 0, null, 3) as int) partition",
            (
                "array(named_struct('key', 'row', 'value', encode(cast(row as string), 'utf-8')))"
                " headers"
            ),
        ],
    )
    own, others = spark_query.seen(), spark_query.seen(topic=f"{spark_query.name}-other")
    assert len(own) == len(others) == spark_query.size // 2
    assert {m.partition for m in others} == {3} and len({m.partition for m in own}) > 1
    for m in own + others:
        row = int(m.value)
        assert (
            m.topic.endswith("-other") == bool(row % 2)
            and m.key.decode() == f"k{row % 7}"
            and m.headers == (("row", str(row).encode()),)
        )


@pytest.mark.parametrize("engine", first_of(["columnar", "confluent"]))
def test_a_timestamp_column_counts_only_if_it_is_asked_for(spark_query, engine):
    spark_query.feed()
    columns = ["cast(row as string) value", "timestamp_millis(1700000000000 + row) timestamp"]
    spark_query.run(options={"engine": engine}, select=columns)
    assert all(m.timestamp_ms > 1_750_000_000_000 for m in spark_query.seen())
    spark_query.feed()
    spark_query.run(options={"engine": engine, "includeTimestamp": "true"}, select=columns)
    asked = [m for m in spark_query.seen() if m.timestamp_ms < 1_750_000_000_000]
    assert len(asked) == spark_query.size and all(
        m.timestamp_ms == 1_700_000_000_000 + int(m.value) for m in asked
    )


def test_a_batch_without_rows_is_decided_and_begins_no_transaction(spark_query):
    spark_query.feed(3)
    spark_query.run(
        before=[f"if(row div {spark_query.size} = 1, null, row) row", "key"], shape="rows"
    )
    assert {e.ids["batch_id"] for e in spark_query.events("begin")} == {0, 2}
    assert [e.ids["batch_id"] for e in spark_query.events("decide") if e.kind == "ok"] == [0, 1, 2]
    assert len(spark_query.rows()) == 2 * spark_query.size


@pytest.mark.full
def test_rows_without_a_key_go_where_batch_and_task_say(spark_query, kafka):
    """Each task writes its few rows to one partition, another one in each batch."""
    topic = kafka.create_topic(f"{spark_query.name}-wide", partitions=16)
    spark_query.size = 42
    spark_query.feed(6)
    spark_query.run(options={"topic": topic}, select=["cast(row as string) value"], partitions=3)
    found = Counter(
        (int(m.value) // spark_query.size, m.partition) for m in spark_query.seen(topic=topic)
    )
    batches_and_tasks = product(range(6), range(3))
    assert found == {(b, first_partition(b, task, 16)): 14 for b, task in batches_and_tasks}
    rows = Counter()
    for (_, partition), number in found.items():
        rows[partition] += number
    assert len(rows) == 16 and max(rows.values()) <= 2 * min(rows.values())


# -- tasks that fail, and tasks that do not know it --


@pytest.fixture
def retrying(job):
    """Spark in local mode, but with three attempts for every task."""
    yield job.new_session(master="local[2,3]")
    job.new_session()


def begun_and_promised(spark_query):
    promised = {
        e.ids["transactional_id"] for e in spark_query.events("precommit") if e.kind == "ok"
    }
    aborted = {e.ids["transactional_id"] for e in spark_query.events("abort") if e.kind == "ok"}
    return promised, aborted


@pytest.mark.full
def test_a_worker_dies_after_its_precommit_and_what_it_left_is_swept(retrying, spark_query):
    spark_query.feed(2)
    order_crash(spark_query, CrashPoint.AFTER_PRECOMMIT, batch_id=1)
    spark_query.run(partitions=3)
    assert spark_query.job.done.exists()
    promised, aborted = begun_and_promised(spark_query)
    assert len(aborted) == 1 and aborted < promised, last_events(spark_query.events())
    spark_query.check()


def test_a_task_that_fails_once_aborts_by_itself_and_is_retried(retrying, spark_query, tmp_path):
    spark_query.feed(2)
    spark_query.run(options=faults(fail=dict(partition=1, sign=str(tmp_path / "failed"))))
    assert (tmp_path / "failed").exists()
    begun = Counter(e.ids["batch_id"] for e in spark_query.events("begin") if e.kind == "ok")
    assert begun == {0: 3, 1: 2}, last_events(spark_query.events())
    spark_query.check()


@pytest.mark.parametrize(
    ("rows", "ends"),
    [
        pytest.param(1, [("info", "write"), ("info", "flush")], id="in_write"),
        pytest.param(0, [("ok", "precommit")], id="before_begin", marks=pytest.mark.nightly),
    ],
)
@pytest.mark.full
def test_a_zombie_that_writes_on_after_abort_and_restart_changes_nothing(
    rows, ends, spark_query, tmp_path
):
    """What was open is aborted, and so the zombie is fenced. The transactions that it begins later
    bear an old token: no driver decides them, the next sweep aborts them.
    """
    stalled, failed, go_on = (str(tmp_path / name) for name in ("stalled", "failed", "go on"))
    spark_query.feed(2)
    with pytest.raises(Failed, match="a fault on purpose"):
        spark_query.run(
            options=faults(
                stall=dict(partition=1, sign=stalled, until=go_on, rows=rows),
                fail=dict(partition=0, sign=failed, after=stalled),
            )
        )
    zombie = int((tmp_path / "stalled").read_text())
    spark_query.run(partitions=3)  # on the other core
    assert running(zombie) and [e for e in spark_query.events("decide") if e.ids["batch_id"] == 1]
    (tmp_path / "go on").touch()
    until(
        lambda: [e for e in spark_query.events() if e.process == zombie and (e.kind, e.op) in ends],
        "the zombie writes on",
        90,
    )
    spark_query.feed()
    spark_query.run()
    spark_query.check()


@pytest.mark.full
def test_a_driver_that_was_overtaken_stops_and_writes_nothing(spark_query, jobs, tmp_path):
    stalled, go_on = str(tmp_path / "stalled"), tmp_path / "go on"
    spark_query.feed(2)
    overtaken, spark_query.job = spark_query.job, jobs("second")
    with ThreadPoolExecutor(1) as helper:
        waits = helper.submit(
            overtaken.ask,
            "stream",
            source=str(spark_query.source),
            partitions=2,
            options=spark_query.options(
                **faults(stall=dict(partition=1, sign=stalled, until=str(go_on)))
            ),
        )
        until((tmp_path / "stalled").exists, "the first driver is in the middle of batch 0", 120)
        spark_query.run()
        go_on.touch()
        with pytest.raises(Failed):
            waits.result()
    spark_query.check()


def test_stop_in_the_middle_of_a_batch_and_restart(spark_query, tmp_path):
    stalled, go_on = tmp_path / "stalled", tmp_path / "go on"
    spark_query.feed(2)
    spark_query.run(
        options=faults(stall=dict(partition=1, sign=str(stalled), until=str(go_on))),
        stop_at=str(stalled),
    )
    assert not spark_query.events("decide")
    go_on.touch()
    spark_query.run(partitions=5)
    spark_query.check()


@pytest.mark.full
def test_a_broker_that_is_silent_for_half_a_minute_ends_no_query(job, tmp_path):
    """Spark's own sink goes on, too. One task: the committer's first question of all meets the
    silence.
    """
    with LocalKafka(progress=None) as kafka, SparkQuery(job, kafka, tmp_path) as spark_query:
        resume = Timer(30, kafka.resume)

        def pause(event):
            kafka.pause()
            resume.start()
            return True

        spark_query.feed(2)
        try:
            stop = Stop(point=CrashPoint.AFTER_PRECOMMIT, inject=pause)
            assert interrupt(spark_query, stop, partitions=1) is None
        finally:
            resume.join()
        spark_query.check()


# -- where it runs --


@pytest.mark.full
def test_separate_executors(jobs, kafka, tmp_path):
    spark_query = SparkQuery(
        jobs("cluster", master="local-cluster[2,1,1024]", conf={"spark.executor.memory": "700m"}),
        kafka,
        tmp_path,
    ).watch()
    spark_query.feed(3)
    order_crash(spark_query, CrashPoint.AFTER_PRECOMMIT, batch_id=1)
    spark_query.run(partitions=4)
    assert spark_query.job.done.exists()
    spark_query.check()
    spark_query.close()
    spark_query.job.stop()


@pytest.mark.full
def test_spark_connect(jobs, kafka, tmp_path):
    spark_query = SparkQuery(jobs("connect", remote="local[2]"), kafka, tmp_path).watch()
    spark_query.feed(2)
    assert "unknown option acks" in str(expect_failure(spark_query, options={"acks": "all"}))
    order_crash(spark_query, CrashPoint.AFTER_DECISION, batch_id=1)
    with pytest.raises(Failed):
        spark_query.run(partitions=4)
    spark_query.feed()
    spark_query.run(partitions=2)
    spark_query.check()
    spark_query.job.ask(
        "write",
        source=str(spark_query.source),
        options=spark_query.options(checkpointLocation=None),
    )
    assert set(Counter(s.row for s in spark_query.rows()).values()) == {2}
    spark_query.close()
    spark_query.job.stop()


# -- stateful queries --


STATE = "spark.sql.streaming.stateStore"
ROCKSDB = {
    f"{STATE}.providerClass": (
        "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
    ),
    f"{STATE}.checkpointFormatVersion": "2",
    f"{STATE}.rocksdb.changelogCheckpointing.enabled": "true",
    "spark.sql.execution.arrow.maxRecordsPerBatch": "100",
}
# 400 MB a task: ten times what the sockets between a JVM and its Python worker can hold
WIDE = ["repeat('x', 40000) value", "cast(row as string) key"]


def drained(spark_query, batch_id):
    """How many tasks have drained this batch so far."""
    return sum(
        e.kind == "ok" and e.ids["batch_id"] == batch_id for e in spark_query.events("drain")
    )


@pytest.mark.full
def test_a_decided_batch_is_drained_and_its_state_survives(spark_query):
    """With RocksDB and its second checkpoint format every run of a batch makes a new version of the
    state; Spark fails if a task brings none.
    """
    size = 20_000
    distinct = dict(shape="dedup", partitions=None, conf=ROCKSDB)
    for batch in range(2):
        spark_query.feed(rows=[(row, f"u{row}") for row in range(batch * size, (batch + 1) * size)])
    order_crash(spark_query, CrashPoint.AFTER_LAST_COMMIT, batch_id=1)
    with pytest.raises(Failed):
        spark_query.run(**distinct)

    # this is what happens to a replay that returns at once
    with pytest.raises(Failed, match="CheckpointInfo length"):
        spark_query.run(
            options=faults(**{"return early": 1}) | {"replayCheck": "warn"},
            **distinct | {"select": WIDE},
        )
    before = drained(spark_query, 1)
    # the rows of the replay are wide, so that they do not fit into a pipe
    spark_query.run(options={"replayCheck": "warn"}, **distinct | {"select": WIDE})
    assert drained(spark_query, 1) - before == 2, "each task has read its rows to the end"

    # two thirds of them were there before
    spark_query.feed(rows=[(row, f"u{row}") for row in range(0, 3 * size, 2)])
    spark_query.run(**distinct)
    rows = spark_query.rows()
    assert (
        not lost([*range(2 * size), *range(2 * size, 3 * size, 2)], rows)
        and not duplicate(rows)
        and len(rows) == 2.5 * size
    )
    assert not spark_query.open()


@pytest.mark.full
def test_complete_mode_writes_every_result_of_every_batch_once(spark_query):
    counts = dict(
        shape="count",
        mode="complete",
        select=["concat(key, '=', count) value", "key"],
        partitions=None,
    )
    spark_query.feed(2)
    order_crash(spark_query, CrashPoint.AFTER_FIRST_COMMIT, batch_id=1)
    with pytest.raises(Failed):
        spark_query.run(**counts)
    spark_query.feed()
    spark_query.run(**counts)
    expected = Counter(
        f"k{key}={sum(row % 7 == key for row in range((batch + 1) * spark_query.size))}"
        for batch in range(3)
        for key in range(7)
    )
    assert Counter(m.value.decode() for m in spark_query.seen()) == expected
    assert not spark_query.open()


@pytest.mark.full
def test_windows_in_append_mode_appear_once(spark_query):
    windows = dict(
        shape="window",
        partitions=None,
        select=["concat(unix_timestamp(window.start), '=', count) value"],
    )
    spark_query.feed(2)
    # batch 0: rows, 1: the windows that they closed, 2: rows again
    order_crash(spark_query, CrashPoint.AFTER_DECISION, batch_id=2)
    with pytest.raises(Failed):
        spark_query.run(**windows)
    spark_query.feed()
    spark_query.run(**windows)
    last = (spark_query.files * spark_query.size - 1) // 10 * 10  # the window that is still open
    assert Counter(m.value.decode() for m in spark_query.seen()) == Counter(
        f"{start}=10" for start in range(0, last, 10)
    )
    assert not spark_query.open()


# -- batch writes --


def write(spark_query, partitions=4, **options):
    spark_query.job.ask(
        "write",
        source=str(spark_query.source),
        partitions=partitions,
        options=spark_query.options(
            **{
                "checkpointLocation": None,
                "decisionLog": str(spark_query.folder / "log"),
                **options,
            }
        ),
    )


@pytest.mark.parametrize(
    "point",
    first_of(
        [
            CrashPoint.AFTER_DECISION,
            CrashPoint.AFTER_PRECOMMIT,
            CrashPoint.BEFORE_DECISION,
            CrashPoint.AFTER_FIRST_COMMIT,
        ],
        ids=lambda p: p.name.lower(),
    ),
)
def test_a_batch_write_with_a_key_is_killed_and_run_again(point, spark_query):
    spark_query.feed(2)
    order_crash(spark_query, point)
    with pytest.raises(Failed):
        write(spark_query, idempotenceKey="job of today")
    assert spark_query.job.done.exists()
    write(spark_query, idempotenceKey="job of today")
    told = len(spark_query.events("commit"))
    write(spark_query, idempotenceKey="job of today")
    assert len(spark_query.events("commit")) == told, "Kafka was asked again about what is finished"
    spark_query.check()
    write(spark_query, idempotenceKey="job of tomorrow")
    write(spark_query)
    assert set(Counter(s.row for s in spark_query.rows()).values()) == {3}


@pytest.mark.full
def test_a_batch_write_that_fails_leaves_nothing_open(spark_query):
    """No later job can find it: it has no checkpoint, and the next job has another name."""
    spark_query.feed(2)
    order_crash(spark_query, CrashPoint.AFTER_PRECOMMIT)
    with pytest.raises(Failed):
        write(spark_query, partitions=1)  # with more, one that still runs may begin after the sweep
    assert spark_query.job.done.exists() and spark_query.open() == [] and spark_query.rows() == []


def test_a_key_is_not_for_two_topics(spark_query, kafka):
    kafka.create_topic(f"{spark_query.name}-other")
    spark_query.feed(2)
    write(spark_query, idempotenceKey="today")
    with pytest.raises(
        Failed,
        match=rf"under it went to kafka \(topics {spark_query.name}\), and this one would go",
    ):
        write(spark_query, idempotenceKey="today", topic=f"{spark_query.name}-other")
    write(spark_query, idempotenceKey="today")
    spark_query.check()


def test_a_loss_that_is_skipped_is_in_the_log(caplog):
    BatchHistory().append("fail", "lost", batch_id=7, what="orders-0: 7 at offsets 3 to 9")
    said = [(r.levelname, r.getMessage()) for r in caplog.records]
    assert said.count(("ERROR", "lost: orders-0: 7 at offsets 3 to 9")) == 1


@pytest.mark.parametrize("engine", ["auto", "columnar", "confluent"])
@pytest.mark.parametrize("guarantee", ["exactly_once", "at_least_once"])
def test_settings_without_effect_are_named_once(kafka, caplog, engine, guarantee):
    """Without transactions librdkafka writes, and it has a use for its settings."""
    options = {f"kafka.{name}": value for name, value in kafka.client_conf.items()} | {
        "engine": engine,
        "deliveryGuarantee": guarantee,
        "transactionalIdPrefix": f"{engine}-{guarantee}",
        "kafka.linger.ms": "5",
        "kafka.retries": "3",
        "kafka.metadata.max.idle.ms": "60000",
        "kafka.buffer.memory": "33554432",
        "kafka.compression.type": "lz4",
        "kafka.delivery.timeout.ms": "90000",
    }
    for _ in range(2):
        (warn_once if guarantee == "exactly_once" else plan_write)(parse_sink_options(options))
    says = {
        False: "these options have no effect: kafka.metadata.max.idle.ms",
        True: "these options have no effect: kafka.buffer.memory, kafka.linger.ms,"
        " kafka.metadata.max.idle.ms, kafka.retries; engine=confluent has a use for"
        " kafka.buffer.memory, kafka.linger.ms, kafka.retries",
    }
    columnar = engine != "confluent" and guarantee == "exactly_once"
    found = [r.getMessage() for r in caplog.records if "no effect" in r.getMessage()]
    assert found == [says[columnar]]


# -- rows that are removed while their transaction is open --


def removed(spark_query):
    """All records of the topic."""
    admin, place = AdminClient(spark_query.kafka.client_conf), TopicPartition(spark_query.name, 0)
    [end] = admin.list_offsets({place: OffsetSpec.latest()}).values()
    before = TopicPartition(spark_query.name, 0, end.result(30).offset)
    admin.delete_records([before])[before].result(30)


def recreated(spark_query):
    """The topic is deleted, and created again."""
    admin = AdminClient(spark_query.kafka.client_conf)
    admin.delete_topics([spark_query.name])[spark_query.name].result(30)
    with Cluster(spark_query.kafka.client_conf) as cluster:
        gone = lambda: not topic_rows(cluster, [spark_query.name])[0].partitions
        until(gone, "the topic is gone", 30)
    spark_query.kafka.create_topic(spark_query.name)


class InOnePartition(SparkQuery):
    """A query of one task, which is given one file after the other. `door`: how it writes."""

    def __init__(self, door, *arguments):
        super().__init__(*arguments, partitions=1)
        self.door = door
        if door == "batch write":
            self.does = "kafka2pc.proof.drills.spark_job.write"

    def run(self, options=None, **what):
        options = dict(options or {})
        if self.door == "exactly_once":
            what["for_each"] = True
        if self.door == "batch write":  # of all files, by one key for each number of files
            log, key = str(self.folder / "log"), f"of day {self.files}"
            options |= {"checkpointLocation": None, "decisionLog": log, "idempotenceKey": key}
        return super().run(options=options, partitions=1, **what)


# The check is the participant's: tests/kafka/test_rows_gone.py has each way to lose rows, with both
# engines. Here its answers come through Spark: each way by one door.
WAYS = [
    pytest.param("stream", removed),
    pytest.param("batch write", recreated, marks=pytest.mark.full),
    pytest.param("exactly_once", removed, marks=pytest.mark.nightly),
    pytest.param("stream", recreated, marks=pytest.mark.nightly),
    pytest.param("batch write", removed, marks=pytest.mark.nightly),
    pytest.param("exactly_once", recreated, marks=pytest.mark.nightly),
]


@pytest.mark.parametrize(("door", "remove"), WAYS)
def test_rows_that_are_removed_are_written_again_or_reported_as_lost(
    door, remove, job, kafka, tmp_path
):
    before_the_decision = lambda event: remove(spark_query) is None
    offsets = []

    def after_it(event):
        written = read_topic(kafka.client_conf, spark_query.name, "read_uncommitted")
        newest = written[-spark_query.size :]
        offsets.extend([newest[0].offset, newest[-1].offset])
        remove(spark_query)
        os.kill(event.process, signal.SIGKILL)
        return False

    with InOnePartition(door, job, kafka, tmp_path) as spark_query:
        spark_query.feed()
        stop = Stop(point=CrashPoint.AFTER_PRECOMMIT, inject=before_the_decision)
        assert "Refused: " in str(interrupt(spark_query, stop))
        spark_query.run()
        spark_query.check()
        (spark_query.source / "0000.csv").unlink()
        spark_query.feed()
        interrupt(spark_query, Stop(point=CrashPoint.AFTER_DECISION, inject=after_it))
        for _ in range(2):
            error = str(expect_failure(spark_query))
            assert "LostTransaction: " in error
            assert f"gone are offsets {offsets[0]} to {offsets[1]} of {spark_query.name}-0" in error
        spark_query.run(options={"lostTransactions": "skip"})
        assert spark_query.open() == []


# -- decisions in other places; tests/proof/test_drills.py kills such a query around them --


@pytest.fixture(params=first_of(["topic", "table"]))
def place(request, spark_query):
    """A value of the option decisionLog."""
    return (
        f"kafka:{spark_query.name}-decisions"
        if request.param == "topic"
        else request.getfixturevalue("postgres").url
    )


def test_a_batch_write_remembers_its_key_there(place, spark_query):
    spark_query.feed(2)
    for _ in range(2):
        write(spark_query, idempotenceKey="job of today", decisionLog=place)
    spark_query.check()


# -- at least once --


def test_at_least_once_needs_no_transaction(spark_query, tmp_path):
    spark_query.feed(2)
    with pytest.raises(Failed, match="a fault on purpose"):
        spark_query.run(
            options=faults(fail=dict(partition=1, sign=str(tmp_path / "failed")))
            | {"deliveryGuarantee": "at_least_once"}
        )
    spark_query.run(options={"deliveryGuarantee": "at_least_once"})
    rows = spark_query.rows()
    assert not lost(range(2 * spark_query.size), rows)
    assert spark_query.events() == [] and not spark_query.open()


def test_rows_of_a_key_stay_in_order(spark_query):
    spark_query.feed(4)
    spark_query.run(partitions=1)
    assert not reordered(spark_query.rows())


# -- whose checkpoint --


@pytest.mark.full
def test_a_copy_of_the_checkpoint_is_refused_and_the_original_goes_on(spark_query):
    spark_query.feed(2)
    spark_query.run()
    copy = shutil.copytree(spark_query.checkpoint, f"{spark_query.checkpoint}-copy")
    spark_query.feed(1)
    error = str(expect_failure(spark_query, options=dict(checkpointLocation=str(copy))))
    assert "MovedLog" in error and "kafka2pc adopt" in error and spark_query.open() == []
    spark_query.run()
    spark_query.check()


def test_a_checkpoint_that_was_moved_is_adopted_and_goes_on(spark_query):
    spark_query.feed(2)
    spark_query.run()
    moved = shutil.move(spark_query.checkpoint, f"{spark_query.checkpoint}-moved")
    assert CliRunner().invoke(app, ["adopt", str(moved)]).exit_code == 0
    spark_query.feed(1)
    spark_query.run(options=dict(checkpointLocation=str(moved)))
    spark_query.check()


def test_a_source_that_replays_other_rows_stops_the_query_once_the_batch_is_finished(spark_query):
    """Between the decision and Spark's commit log the driver dies; meanwhile a line of the file is
    gone.
    """
    spark_query.feed(1)
    order_crash(spark_query, CrashPoint.AFTER_FIRST_COMMIT)
    with pytest.raises(Failed):
        spark_query.run()
    (file,) = spark_query.source.glob("*")
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join(lines[:-1]))
    error = str(expect_failure(spark_query))
    assert (
        "ReplayDiffers" in error
        and f"{len(lines)} rows" in error
        and f"{len(lines) - 1} rows" in error
        and "replayCheck=warn" in error
    )
    assert len(spark_query.rows()) == len(lines), "what was decided is there, all of it"
    spark_query.run(options=dict(replayCheck="warn"))
    assert len(spark_query.rows()) == len(lines) and spark_query.open() == []
