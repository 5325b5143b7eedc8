"""Several stores under one decision, and jobs with a key into every store: run again, died in the
middle, failed. (tests/proof/test_drills.py and the notebook proof/drills/07_two_stores kill them.)
"""

import json
import shutil
import uuid
from contextlib import suppress
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.compute
import pyarrow.dataset as ds
import pytest
import table_stores
from dead_query_fixtures import find_open
from kafka_fixtures import values
from key_value import wal
from participant_suite import At, a_plan, rows

from kafka2pc.decision_logs.files import FileLog
from kafka2pc.kafka.participant import KafkaParticipant
from kafka2pc.proof.drills.setups import Setup
from kafka2pc.proof.drills.spark_query import expect_failure
from kafka2pc.proof.drills.two_stores import make_dual_query
from kafka2pc.protocol.driver import Driver
from kafka2pc.protocol.errors import BadOption, LogUnwritable, StaleCheckpoint
from kafka2pc.protocol.log.slots import MemoryLog
from kafka2pc.protocol.memory import MemoryParticipant, MemoryTransaction
from kafka2pc.protocol.messages import Plan
from kafka2pc.protocol.names import new_token
from kafka2pc.protocol.states import IllegalStep
from kafka2pc.spark.foreach_batch import exactly_once, open_driver
from kafka2pc.spark.running_query import connected_rows
from kafka2pc.spark.sink import giving_up
from kafka2pc.spark.sink import opening as driver_side
from kafka2pc.spark.sink.keys import query_id_of
from kafka2pc.stores.file import FileParticipant
from kafka2pc.stores.mysql import MysqlParticipant
from kafka2pc.stores.object_store import ObjectParticipant
from kafka2pc.stores.postgres import PostgresParticipant
from kafka2pc.stores.shaped import Shaped

pytestmark = pytest.mark.never_unsteady

# -- jobs with a key --


class Frame:
    """What a job asks of a DataFrame, without Spark. `parts` are the texts of its partitions; a
    part that is an error is raised in its task.
    """

    sparkSession = SimpleNamespace(conf={"spark.master": "local[2]"})  # noqa: N815  (Spark's name)
    columns = ["value"]

    def __init__(self, *parts):
        self.parts = parts

    def mapInArrow(self, task, schema):  # noqa: N802  (Spark's name)
        self.task = task
        return self

    def chunks(self, part):
        yield rows(["early"] if isinstance(part, BaseException) else part)
        if isinstance(part, BaseException):
            raise part

    def collect(self):
        found = [batch for part in self.parts for batch in self.task(self.chunks(part))]
        return [SimpleNamespace(**row) for batch in found for row in batch.to_pylist()]


class Killed(BaseException):
    """The end of a process: nothing is tidied up."""


class Dying(FileLog):
    """A log whose driver dies just before, or just after, the decision is written."""

    def __init__(self, folder, after):
        super().__init__(folder)
        self.after = after

    def create(self, decision, *late):
        if decision.commit and not self.after:
            raise Killed
        stands = super().create(decision, *late)
        if decision.commit:
            raise Killed
        return stands


class Full(FileLog):
    """A log that has no room for a COMMIT."""

    def create(self, decision, *late):
        if decision.commit:
            raise LogUnwritable("no space left on device")
        return super().create(decision, *late)


class AlmostFull(FileLog):
    """A log that has no room for the record which says that a job is finished."""

    def create(self, decision, *late):
        if decision.slot.batch_id == 1:
            raise LogUnwritable("no space left on device")
        return super().create(decision, *late)


def files(request, folder):
    read = lambda: (
        ds.dataset(str(folder), pa.schema({"value": pa.string()}), format="json")
        .to_table()["value"]
        .to_pylist()
    )
    return At(FileParticipant(folder, format="json"), read)


def objects(request, folder):
    store = ObjectParticipant(f"file://{folder}/bucket", format="json")
    return At(
        store,
        lambda: [
            json.loads(line)["value"]
            for p in store.committed_files()
            for line in store.fs.cat_file(p).splitlines()
        ],
    )


def postgres(request, folder):
    server, table = request.getfixturevalue("postgres"), f"t{uuid.uuid4().hex[:8]}"
    server.execute(f"create table {table} (value text)")
    return At(
        PostgresParticipant(server.url, table),
        lambda: [value for (value,) in server.execute(f"select value from {table}")],
    )


def mysql(request, folder):
    server, table = request.getfixturevalue("mariadb"), f"t{uuid.uuid4().hex[:8]}"
    server.execute(f"create table {table} (value text) engine=innodb")
    return At(
        MysqlParticipant(server.url, table),
        lambda: [value for (value,) in server.execute(f"select value from {table}")],
    )


def delta(request, folder):
    folder.mkdir()
    one = table_stores.Delta(folder)
    return At(one.store(), one.texts)


def iceberg(request, folder):
    folder.mkdir()
    one = table_stores.Iceberg(folder)
    return At(one.store(), one.texts)


def log(request, folder):
    return wal(folder)


def kafka(request, folder):
    cluster, topic = request.getfixturevalue("kafka"), f"t-{uuid.uuid4().hex[:8]}"
    cluster.create_topic(topic, partitions=2)
    store = KafkaParticipant(cluster.client_conf, topic=topic, prefix=topic)
    return At(store, lambda: values(cluster, topic, still_open=bool(find_open(cluster, topic))))


STORES = [
    files,
    objects,
    postgres,
    pytest.param(mysql, marks=pytest.mark.mysql),
    delta,
    iceberg,
    log,
    pytest.param(kafka, marks=pytest.mark.kafka),
]


@pytest.fixture(params=STORES)
def at(request, tmp_path):
    """Each store, empty, and what its readers see."""
    return request.param(request, tmp_path / "out")


@pytest.fixture(autouse=True)
def another_day(monkeypatch):
    """The stores of all tests are one server each, and remember every job by its name."""
    monkeypatch.setitem(globals(), "TODAY", f"job of {uuid.uuid4()}")


TODAY = ""


@pytest.fixture(autouse=True)
def no_process_is_killed(monkeypatch):
    """The tasks run here, so none of them goes on after a failure."""
    monkeypatch.setattr(giving_up, "KILLED_S", 0)


def in_memory():
    store = MemoryParticipant()
    return store, Shaped(store, lambda batch: batch["value"].to_pylist())


def job_of(name, stores, log, **options):
    return exactly_once({"decisionLog": log} | options, participants=stores, name=name)


def started_again():
    """Nothing is remembered but what is on disk."""
    driver_side._RUNS.clear()


def test_columns_that_a_store_does_not_find_are_refused_before_a_task_begins(tmp_path):
    """A replay of what is decided writes nothing, so it is not refused."""
    _, texts = in_memory()
    lacks = lambda *columns: FileParticipant(str(tmp_path / "out"), columns=columns)
    job = lambda store: job_of(TODAY, [texts, store], str(tmp_path / "decisions"))
    with pytest.raises(BadOption, match="file: columns= names no, and the rows"):
        job(lacks("no")).write(Frame(AssertionError("a task has begun")))
    assert job(lacks("value")).write(Frame(["a"])) is True
    assert job(lacks("no")).write(Frame(["a"])) is False


def test_the_same_key_writes_once_and_another_key_again(at, tmp_path):
    today = lambda: job_of(TODAY, [at.store], str(tmp_path / "decisions"))
    assert [today().write(Frame(["a", "b"], ["c"])), today().write(Frame(["a", "b"], ["c"]))] == [
        True,
        False,
    ]
    started_again()
    assert (
        today().write(Frame(AssertionError("who has written it does not look at the rows again")))
        is False
    )
    assert at.seen() == ["a", "b", "c"]
    assert (
        job_of(f"after {TODAY}", [at.store], str(tmp_path / "decisions")).write(Frame(["d"]))
        is True
    )
    assert at.seen() == ["a", "b", "c", "d"]


@pytest.mark.parametrize("after", [False, True], ids=["before the decision", "after the decision"])
def test_a_job_that_died_is_undone_or_finished_by_the_next_run(at, tmp_path, after):
    folder = str(tmp_path / "decisions")
    with pytest.raises(Killed):
        job_of(TODAY, [at.store], Dying(folder, after)).write(Frame(["first a"], ["first b"]))
    assert at.seen() == []
    started_again()
    job = job_of(TODAY, [at.store], FileLog(folder))
    assert job.write(Frame(["second"])) is not after
    assert at.seen() == (["first a", "first b"] if after else ["second"])
    assert (
        at.store.in_doubt(query_id_of(job.given.name)) == []
        and job.write(Frame(["third"])) is False
    )


def test_a_task_that_fails_leaves_nothing_open(at, tmp_path):
    job = job_of(TODAY, [at.store], str(tmp_path / "decisions"))
    with pytest.raises(ZeroDivisionError):
        job.write(Frame(["a"], ZeroDivisionError()))
    assert (at.store.in_doubt(query_id_of(job.given.name)), at.seen()) == ([], [])
    assert job.write(Frame(["a"])) is True and at.seen() == ["a"]


def test_what_a_killed_task_begins_after_the_failure_is_aborted_too(monkeypatch):
    (store, texts), frame = in_memory(), Frame(["a"], ZeroDivisionError())
    late = SimpleNamespace(sleep=lambda seconds: list(frame.task(iter([rows(["late"])]))))
    monkeypatch.setattr(giving_up, "CLOCK", late)
    with pytest.raises(ZeroDivisionError):
        job_of(TODAY, [texts], MemoryLog()).write(frame)
    assert len(store.txns) == 3 and store.in_doubt(query_id_of(TODAY)) == []


def test_a_precommit_that_fails_in_the_second_store_leaves_nothing_open_in_the_first(at, tmp_path):
    """The exception leaves the first transaction pre-committed, so the driver must abort it."""
    second = Shaped(MemoryParticipant("second"), lambda batch: batch["value"].to_pylist())
    job = job_of(TODAY, [at.store, second], str(tmp_path / "decisions"))
    with pytest.MonkeyPatch.context() as broken, pytest.raises(ZeroDivisionError):
        broken.setattr(MemoryTransaction, "precommit", lambda txn: 1 / 0)
        job.write(Frame(["a"]))
    assert (
        at.store.in_doubt(query_id_of(job.given.name)),
        second.in_doubt(query_id_of(job.given.name)),
        at.seen(),
    ) == (
        [],
        [],
        [],
    )
    assert job.write(Frame(["a"])) is True and at.seen() == ["a"]


def test_a_decision_that_cannot_be_written_leaves_nothing_open(at, tmp_path):
    folder = str(tmp_path / "decisions")
    job = job_of(TODAY, [at.store], Full(folder))
    with pytest.raises(LogUnwritable):
        job.write(Frame(["a"], ["b"]))
    assert (at.store.in_doubt(query_id_of(job.given.name)), at.seen()) == ([], [])
    assert job_of(TODAY, [at.store], FileLog(folder)).write(Frame(["a"])) is True and at.seen() == [
        "a"
    ]


def test_what_is_decided_is_not_undone_by_an_error_after_it(at, tmp_path):
    """The log holds a COMMIT: the next run finishes it."""
    folder, told = str(tmp_path / "decisions"), []

    def breaks(c):
        told.append(c)
        raise LogUnwritable("not a word")

    job = job_of(TODAY, [at.store], FileLog(folder))
    with pytest.MonkeyPatch.context() as broken, pytest.raises(LogUnwritable):
        broken.setattr(at.store, "commit", breaks)
        job.write(Frame(["a"]))
    assert told and at.seen() == [] and job.write(Frame(["b"])) is False and at.seen() == ["a"]


def test_an_error_after_a_complete_job_is_logged(tmp_path, caplog):
    """All rows are visible: it would say that nothing of this attempt becomes visible."""
    (store, texts), log = in_memory(), AlmostFull(str(tmp_path / "decisions"))
    assert [job_of(TODAY, [texts], log).write(Frame(["a"])) for _ in range(2)] == [True, False]
    assert store.read() == ["a"]
    assert caplog.text.count("the write is complete; tidying up its decision log failed") == 2


@pytest.mark.parametrize("part", [["a"], ZeroDivisionError()], ids=["complete", "failed"])
def test_a_job_closes_its_log(monkeypatch, tmp_path, part):
    """A log in a topic has a consumer, with its threads, and each job has a log."""
    opened, closed = [], []

    class Closing(FileLog):
        def __init__(self, folder):
            super().__init__(folder)
            opened.append(folder)

        def close(self):
            closed.append(self.folder)

    monkeypatch.setattr("kafka2pc.decision_logs.opening.open_folder_log", Closing)
    for name in ("first", "second", "second"):
        with suppress(ZeroDivisionError):
            job_of(f"{name} {TODAY}", [in_memory()[1]], str(tmp_path)).write(Frame(part))
    assert len(closed) == 3 and closed == opened


def test_a_log_that_was_passed_stays_open():
    log = MemoryLog()
    log.close = lambda: 1 / 0
    assert job_of(TODAY, [in_memory()[1]], log).write(Frame(["a"])) is True


def test_two_participants_with_one_name_are_refused(tmp_path):
    with pytest.raises(BadOption, match="name twin(.|\n)*Nothing was written(.|\n)*`name=`"):
        job_of(
            TODAY,
            [MemoryParticipant("twin"), MemoryParticipant(), MemoryParticipant("twin")],
            str(tmp_path / "decisions"),
        )
    assert list(tmp_path.iterdir()) == []


def test_a_shape_may_leave_out_all_rows_of_a_task(at, tmp_path):
    """Then this task has nothing to promise in that store; the other tasks and the other stores
    have.
    """
    other = MemoryParticipant("other")
    stores = [
        Shaped(at.store, lambda batch: batch.filter(pa.compute.not_equal(batch["value"], "no"))),
        Shaped(other, lambda batch: batch["value"].to_pylist()),
    ]
    job = job_of(TODAY, stores, str(tmp_path / "decisions"))
    assert job.write(Frame(["no", "no"], ["a", "no"], ["b"])) is True
    assert at.seen() == ["a", "b"] and sorted(other.read()) == ["a", "b", "no", "no", "no"]
    assert (
        at.store.in_doubt(query_id_of(job.given.name))
        == other.in_doubt(query_id_of(job.given.name))
        == []
    )


def test_a_write_after_the_precommit_of_a_shape_without_rows_is_refused():
    store, plan = MemoryParticipant(), a_plan()
    with Shaped(store, lambda texts: [t for t in texts if t != "no"]).begin(plan) as txn:
        txn.write(["no"])
        txn.flush()
        assert txn.precommit() is None
        with pytest.raises(IllegalStep, match="write is not possible"):
            txn.write(["late"])
    assert store.in_doubt(plan.query_id) == store.records == []


def test_a_task_that_fails_before_its_shape_left_a_row_leaves_nothing_open(at, tmp_path):
    job = job_of(
        TODAY, [Shaped(at.store, lambda batch: batch.slice(0, 0))], str(tmp_path / "decisions")
    )
    with pytest.raises(ZeroDivisionError):
        job.write(Frame(["a"], ZeroDivisionError()))
    assert at.store.in_doubt(query_id_of(job.given.name)) == [] and job.write(Frame(["a"])) is True


def test_what_is_finished_is_not_asked_about_again():
    """A store may have forgotten it by then: readers moved its files, Kafka dropped the
    transactional id.
    """
    (store, texts), log = in_memory(), MemoryLog()
    assert job_of(TODAY, [texts], log).write(Frame(["a", "b"], ["c"])) is True
    store.txns.clear(), store.epochs.clear()
    assert job_of(TODAY, [texts], log).write(Frame(["a"])) is False


def test_a_frame_without_partitions_is_decided_too():
    log = MemoryLog()
    assert [job_of(TODAY, [MemoryParticipant()], log).write(Frame()) for _ in range(2)] == [
        True,
        False,
    ]


def test_an_interrupt_in_a_notebook_leaves_nothing_open():
    (store, texts), log = in_memory(), MemoryLog()
    job = job_of(TODAY, [texts], log)
    with pytest.raises(KeyboardInterrupt):
        job.write(Frame(["a"], KeyboardInterrupt()))
    assert store.in_doubt(query_id_of(TODAY)) == [] and job.write(Frame(["b"])) is True


def test_an_error_of_the_cleanup_does_not_hide_the_first_one(monkeypatch, caplog):
    (store, texts), log = in_memory(), MemoryLog()
    monkeypatch.setattr(giving_up, "abort", lambda *_: 1 / 0)
    with pytest.raises(ValueError, match="a row"):
        job_of(TODAY, [texts], log).write(Frame(["a"], ValueError("a row")))
    assert "batch 0: its transactions may stay open" in caplog.text
    assert "ZeroDivisionError" in caplog.text and "kafka2pc restore memory" in caplog.text


def test_a_used_name_for_other_stores_is_refused():
    (store, texts), log = in_memory(), MemoryLog()
    assert job_of(TODAY, [texts], log).write(Frame(["a"])) is True
    more = [texts, Shaped(MemoryParticipant("other"), lambda batch: batch["value"].to_pylist())]
    with pytest.raises(BadOption, match="went to memory, and this one would go to memory, other"):
        job_of(TODAY, more, log).write(Frame(["b"]))


def test_on_a_cluster_a_folder_for_names_is_warned_of(tmp_path, caplog):
    _, texts = in_memory()
    frame = Frame(["a"])
    for day, master in enumerate(("local[2]", "yarn")):
        frame.sparkSession = SimpleNamespace(conf={"spark.master": master})
        assert ("yarn" in caplog.text) is False
        job_of(f"{TODAY} {day}", [texts], str(tmp_path / "decisions")).write(frame)
    assert "Spark is a cluster here (yarn)" in caplog.text


def test_over_spark_connect_the_running_queries_tell_whose_rows_a_name_has():
    """The function runs in a process that knows only which queries its session runs."""
    log = MemoryLog()
    driver = Driver(query_id="q", log=log, participants={})
    plan = Plan(query_id="q", batch_id=0, attempt=1, token=new_token(0, 1))

    def rows(*ids):
        active = [SimpleNamespace(id=i) for i in ids]
        return connected_rows(SimpleNamespace(streams=SimpleNamespace(active=active)), log, 0)

    assert (rows("a"), rows("a", "b")) == ("a", "")
    for recorded in ("a", ""):  # an older version wrote none
        log.records.clear()
        log.create(driver.decision(plan, commit=True, offsets_hash=recorded))
        assert (rows("a"), rows("b", "a")) == (recorded, recorded)
        assert (rows("b") == recorded) is (recorded == "")


def test_stores_may_come_from_a_generator():
    store, texts = in_memory()
    assert job_of(TODAY, (p for p in [texts]), MemoryLog()).write(Frame(["a"])) is True
    assert store.read() == ["a"]


@pytest.mark.parametrize("without", ["memory", ["memroy"]])
def test_a_store_that_is_not_there_cannot_be_given_up(without):
    job = job_of(TODAY, [in_memory()[1]], MemoryLog())
    with pytest.raises(BadOption, match="a list of participants is needed"):
        job.adopt(without=without)


def test_what_is_done_about_a_loss_is_an_option():
    job = lambda how: job_of("orders", [MemoryParticipant()], MemoryLog(), **how)
    options = [{}, *({"lostTransactions": value} for value in ("fail", "skip"))]
    policies = [open_driver(job(how).given).policy.lost_transactions for how in options]
    assert policies == ["repair", "fail", "skip"]


def test_a_log_of_another_query_is_refused_before_anything_is_written():
    (store, texts), log = in_memory(), MemoryLog()
    job_of(TODAY, [texts], log).write(Frame(["a"]))
    with pytest.raises(StaleCheckpoint, match="each needs a log of its own"):
        job_of("tomorrow", [texts], log).write(Frame(["b"]))
    assert store.read() == ["a"]


# -- a real process --


@pytest.fixture(scope="module")
def setup(tmp_path_factory):
    with Setup(tmp_path_factory.mktemp("dual"), progress=None) as made:
        yield made


@pytest.mark.kafka
@pytest.mark.spark
@pytest.mark.full
def test_a_new_checkpoint_under_an_old_name_is_refused(setup):
    """Otherwise its first batches would be taken for those that the old one has written."""
    setup.end_query()
    spark_query = setup.query(make_dual_query)
    spark_query.feed()
    spark_query.run()
    for path in spark_query.checkpoint.iterdir():
        if path.name != "kafka2pc":
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    assert "StaleCheckpoint" in str(expect_failure(spark_query))
    spark_query.check()
    setup.end_query()
