"""What `exactly_once` remembers of a running query between its calls, without Spark: which run has
looked into the checkpoint for a name, which batch is written, and which call has failed.
"""

import json
import uuid
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from types import SimpleNamespace

import pyarrow as pa
import pytest
from driver_steps import orders_driver, write

from kafka2pc.protocol.driver import Driver
from kafka2pc.protocol.errors import (
    BadOption,
    MovedLog,
    OutcomeUnknown,
    PassedOver,
    Refused,
    StoreUnreachable,
)
from kafka2pc.protocol.kept import Kept
from kafka2pc.protocol.log.slots import MemoryLog
from kafka2pc.protocol.memory import MemoryParticipant
from kafka2pc.protocol.operators.fence import fence
from kafka2pc.protocol.participant import OpenBeside, Outcome
from kafka2pc.protocol.phases.commit import commit
from kafka2pc.protocol.phases.precommit import precommit
from kafka2pc.spark import foreach_batch
from kafka2pc.spark.checkpoint import Checkpoint
from kafka2pc.spark.foreach_batch import exactly_once
from kafka2pc.spark.running_query import RunningQuery
from kafka2pc.spark.sink import opening
from kafka2pc.spark.sink.opening import check_beside, plan_batch

pytestmark = pytest.mark.never_unsteady


class Frame:
    """A micro-batch with one task for each of `rows`."""

    sparkSession = SimpleNamespace(__module__="pyspark.sql.session")  # noqa: N815

    def __init__(self, *rows):
        self.rows = rows

    def mapInArrow(self, task, schema):  # noqa: N802  (Spark's name)
        self.task = task
        return self

    def collect(self):
        chunks = [pa.record_batch({"value": [row]}) for row in self.rows]
        answers = [next(self.task(iter([chunk]))) for chunk in chunks]
        return [SimpleNamespace(**answer.to_pylist()[0]) for answer in answers]


class Query:
    """A query whose batches Spark runs. `run`: of this start of the query (None: Spark does not
    say it); `began`: with which batch.
    """

    def __init__(self, folder, monkeypatch):
        self.id, self.run, self.folder = str(uuid.uuid4()), "run 1", folder / "checkpoint"
        self.began = 0
        self.rows = ()
        (self.folder / "offsets").mkdir(parents=True)
        (self.folder / "metadata").write_text(json.dumps({"id": self.id}))
        self.decisions = str(folder / "decisions")
        self.running = None
        monkeypatch.setattr(foreach_batch, "running_query", lambda df: self.running)

    def writer(self, name=None, **options):
        """`name`: with the id of the query, because the whole process remembers it."""
        name = name and f"{name} of {self.id}"
        return exactly_once(options, participants=[MemoryParticipant()], name=name)

    def named(self, name="orders"):
        return self.writer(name, decisionLog=self.decisions)

    def call(self, function, batch_id, passed_on=None):
        """What Spark does with one batch."""
        place = f"file:{self.folder}"
        (self.folder / "offsets" / str(batch_id)).write_text(f"v1\n{{}}\n{batch_id}")
        began = self.began if self.began < batch_id else None
        self.running = self.run and RunningQuery(self.id, batch_id, place, self.run, lambda: began)
        function(Frame(*self.rows), batch_id if passed_on is None else passed_on)

    def start(self, run, began):
        """Another run of the query, which begins with this batch."""
        self.run, self.began = run, began

    def decide_elsewhere(self, batch_id):
        """Another process runs the query without a name."""
        (self.folder / "kafka2pc").mkdir()
        (self.folder / "kafka2pc" / f"{batch_id}.0.json").touch()


@pytest.fixture
def query(tmp_path, monkeypatch):
    return Query(tmp_path, monkeypatch)


# -- a name that is added later --


def test_every_start_under_an_added_name_is_refused(query):
    query.call(query.writer(), 0)
    for query.run in ("run 2", "run 3"):
        for _ in range(2):
            with pytest.raises(MovedLog, match="up to batch 0, are in"):
                query.call(query.named(), 0)


@pytest.mark.parametrize("name", ["orders", None])
@pytest.mark.parametrize("process", ["this process", "another process"])
def test_a_log_is_refused_after_a_run_without_it(query, name, process):
    """The first run had it, so this process has looked into the checkpoint before."""
    log = query.writer(name, decisionLog=query.decisions)
    query.call(log, 0)
    query.run = "run 2"
    if process == "this process":
        query.call(query.writer(), 1)
    else:
        query.decide_elsewhere(1)
    query.run = "run 3"
    with pytest.raises(MovedLog, match="up to batch 1, are in"):
        query.call(log, 1)


def test_each_name_of_a_query_is_checked(query):
    query.call(query.named("first"), 0)
    query.decide_elsewhere(0)
    with pytest.raises(MovedLog):
        query.call(query.named("second"), 0)


def test_a_run_looks_into_the_checkpoint_for_a_name_once(query, monkeypatch):
    looked = []

    def refuses(checkpoint):
        looked.append(checkpoint.location)
        raise StoreUnreachable("no answer")

    monkeypatch.setattr(Checkpoint, "decided_slots", refuses)
    named = query.named()
    for batch_id in range(3):
        query.call(named, batch_id)
    assert len(looked) == 1


def test_each_name_is_checked_where_all_decisions_have_one_place(query):
    """As in a topic. The first name has decided the batch; the second one is new."""
    query.call(query.writer(), 0)
    place, first = Checkpoint(str(query.folder)), MemoryLog()
    driver = Driver(query_id=query.id, log=first, participants={"memory": MemoryParticipant()})
    write(driver, 0)
    check_beside(place, query.id, first, "run 2")
    with pytest.raises(MovedLog):
        check_beside(place, str(uuid.uuid4()), MemoryLog(), "run 2")


@pytest.mark.parametrize("order", [("orders", None), (None, "orders")])
def test_calls_with_and_without_a_name_are_not_mixed(query, order):
    log = {None: {}, "orders": {"decisionLog": query.decisions}}
    first, second = [query.writer(name, **log[name]) for name in order]
    query.call(first, 0)
    with pytest.raises(BadOption, match="batch 0 was passed on with a name and without one"):
        query.call(second, 0)
    query.run = "run 2"
    query.call(first, 0)


def test_calls_with_and_without_a_name_may_both_have_a_log_outside(query):
    unnamed = query.writer(decisionLog=f"{query.decisions}-too")
    for query.run, batch_id in (("run 1", 0), ("run 1", 1), ("run 2", 1)):
        query.call(query.named(), batch_id)
        query.call(unnamed, batch_id)


# -- what a process remembers of its plans --


@pytest.fixture
def orders(tmp_path):
    return orders_driver(tmp_path, MemoryParticipant())


def run_batch(driver, batch_id):
    plan = plan_batch(driver, batch_id, "")
    commit(driver, [precommit(driver.participants.values(), plan, iter([["row"]]))], batch_id)
    return plan


def test_a_planner_that_missed_a_claim_does_not_plan_over_it(orders, monkeypatch):
    """Python workers take turns as planners; the query was stopped and started again between."""
    first, second = Kept(), Kept()
    monkeypatch.setattr(opening, "_RUNS", first)
    run_batch(orders, 5)
    monkeypatch.setattr(opening, "_RUNS", second)
    plan_batch(orders, 6, "")
    monkeypatch.setattr(opening, "_RUNS", first)
    run_batch(orders, 6)
    assert run_batch(orders, 7).attempt == 0


@pytest.mark.parametrize("change", ["prefix", "participants"])
def test_a_query_that_has_changed_claims_in_the_same_process(orders, change):
    """The claim records what is new, so a later start finds what is open there."""
    both = orders.participants | {"second": MemoryParticipant("second")}
    changed = {
        "prefix": replace(orders, about=replace(orders.about, prefix="new")),
        "participants": replace(orders, participants=both),
    }[change]
    run_batch(orders, 0)
    drivers = orders, changed, changed
    assert [run_batch(d, n).attempt for n, d in enumerate(drivers, 1)] == [0, 1, 0]


# -- a query that begins anew --


class Crowded(MemoryParticipant):
    """A store in which `others` have each a transaction open; it counts the questions."""

    def __init__(self, others, error=None):
        super().__init__()
        self.others, self.error, self.asked = others, error, 0

    def open_beside(self, query_id):
        self.asked += 1
        if self.error:
            raise self.error
        return [
            OpenBeside(
                transactional_id=f"kafka2pc-{other}-0.1.abcdefab-aaaaaaaa-0-0",
                query_id=other,
                places=(f"topic {age_s}",),
                age_ms=1000 * age_s,
                left_ms=left_ms,
                abort_with=f"abort {other}",
            )
            for age_s, (other, left_ms) in enumerate(self.others.items())
        ]


def test_a_query_that_begins_anew_names_what_others_have_open_once(tmp_path, monkeypatch, caplog):
    """Also if batch 0 is planned again, by this process or another one."""
    others = {str(uuid.uuid4()): left_ms for left_ms in (None, 30_000)}
    store = Crowded(others)
    driver = orders_driver(tmp_path, store)
    plan_batch(driver, 0, "")
    texts = [r.getMessage() for r in caplog.records if "begins anew" in r.getMessage()]
    for text, other, what in zip(
        reversed(texts), others, ["never time out", "times out in 30 s"], strict=True
    ):
        assert f"query {driver.query_id} begins anew, and query {other} has open" in text
        assert what in text and f"abort {other}" in text and "this is normal" in text
        assert "kafka2pc restore CHECKPOINT" in text and "gone for good" in text
    plan_batch(driver, 0, "")
    monkeypatch.setattr(opening, "_RUNS", Kept())
    run_batch(driver, 0)
    run_batch(driver, 1)
    assert store.asked == 1


def test_of_many_queries_the_oldest_are_named(tmp_path, caplog):
    plan_batch(
        orders_driver(tmp_path, Crowded({str(uuid.uuid4()): None for _ in range(12)})), 0, ""
    )
    texts = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert len(texts) == 11 and "topic 11: 1, the oldest for 11 s" in texts[0]
    assert texts[-1].startswith("2 more queries")


def test_a_store_that_cannot_say_it_stops_no_query(tmp_path, caplog):
    assert run_batch(orders_driver(tmp_path, Crowded({}, StoreUnreachable("no answer"))), 0)
    assert "memory could not say" in caplog.text and "no answer" in caplog.text


# -- an error that the user's function catches --


@pytest.mark.parametrize(
    "name, place",
    [
        *product(
            ["orders", None], ["identify_rows", "open_driver", "choose_columns", "plan_batch"]
        ),
        ("orders", "check_added_name"),
    ],
)
def test_an_error_before_the_plan_stops_the_next_batch(query, monkeypatch, name, place):
    """The next batch would be claimed, and the rows of this one would be missing."""
    writer = query.writer(name, decisionLog=query.decisions)

    def refuses(*args):
        raise StoreUnreachable("no answer")

    with monkeypatch.context() as broken, pytest.raises(StoreUnreachable):
        broken.setattr(foreach_batch, place, refuses)
        query.call(writer, 0)
    with pytest.raises(PassedOver, match="batch 0 failed and nothing of it is decided"):
        query.call(writer, 1)


def test_a_wrong_number_is_an_error_of_the_batch_that_runs(query):
    writer = query.writer()
    query.call(writer, 0)
    with pytest.raises(BadOption, match="batch 0 was passed on, and query .* runs batch 1"):
        query.call(writer, 1, passed_on=0)
    query.start("run 2", 2)
    with pytest.raises(PassedOver, match="batch 1 failed and nothing of it is decided"):
        query.call(writer, 2)


def test_a_batch_that_the_function_repeats_does_not_stop_the_next(query, monkeypatch):
    writer = query.writer()
    with monkeypatch.context() as broken, pytest.raises(ZeroDivisionError):
        broken.setattr(foreach_batch, "commit", lambda *args: 1 / 0)
        query.call(writer, 0)
    for batch_id in range(3):
        query.call(writer, batch_id)
    assert Checkpoint(str(query.folder)).decided_slots()[-1].batch_id == 2


# -- a batch that Spark passed over --


@contextmanager
def broken(monkeypatch, place="commit"):
    """In this block a call fails, and the function catches the error."""
    with monkeypatch.context() as context, pytest.raises(ZeroDivisionError):
        context.setattr(foreach_batch, place, lambda *args: 1 / 0)
        yield


@pytest.fixture
def writer(query):
    return query.writer()


def fails(query, writer, monkeypatch, batch_id, place="commit"):
    with broken(monkeypatch, place):
        query.call(writer, batch_id)


def test_the_run_after_a_caught_error_is_refused_until_it_is_accepted(query, writer, monkeypatch):
    """Each refused call that is caught leaves a gap, too. All are named."""
    query.call(writer, 0)
    fails(query, writer, monkeypatch, 1)
    for run, batch_id, missing in (
        ("run 1", 2, "1"),
        ("run 2", 3, "1, 2"),
        ("run 3", 4, "1, 2, 3"),
    ):
        query.start(run, batch_id if run != "run 1" else 0)
        with pytest.raises(PassedOver, match=f"a call for batch {missing} failed and nothing"):
            query.call(writer, batch_id)
    place = query.writer()
    place = replace(place, given=replace(place.given, checkpoint=str(query.folder)))
    (query.folder / "commits").mkdir()
    with pytest.raises(Refused, match="batch 4 is not one that Spark passed over"):
        place.accept(4)
    (query.folder / "commits" / "4").touch()
    place.accept(4)
    query.start("run 4", 5)
    query.call(writer, 5)
    query.start("run 5", 6)
    query.call(writer, 6)


def test_a_run_that_repeats_the_failed_batch_goes_on(query, writer, monkeypatch):
    for run in ("run 1", "run 2"):
        query.start(run, 0)
        fails(query, writer, monkeypatch, 0, "plan_batch")
    query.start("run 3", 0)
    query.call(writer, 0)
    query.call(writer, 1)
    query.start("run 4", 2)
    query.call(writer, 2)


def skips_batches(query, writer, monkeypatch):
    query.call(writer, 0)


def was_killed(query, writer, monkeypatch):
    """The batch was claimed. Its repetition is empty, and the function does not call the sink."""
    driver = foreach_batch.open_driver(writer.given, Checkpoint(str(query.folder)))
    (query.folder / "offsets" / "0").touch()
    plan_batch(driver, 0, "")


def skips_the_repetition(query, writer, monkeypatch):
    query.call(writer, 0)
    fails(query, writer, monkeypatch, 1)
    query.start("run 2", 1)


def was_fenced(query, writer, monkeypatch):
    query.call(writer, 0)
    fence(foreach_batch.open_driver(writer.given, Checkpoint(str(query.folder))))


def repeats_the_call(query, writer, monkeypatch):
    fails(query, writer, monkeypatch, 0)
    query.call(writer, 0)


def has_no_partitions_in_the_format(query, writer, monkeypatch):
    (query.folder / "offsets" / "0").touch()
    driver = foreach_batch.open_driver(writer.given, Checkpoint(str(query.folder)))
    commit(driver, [], 0)
    assert [d.kind for d in driver.log.chain(0)] == ["ABORT"]


@pytest.mark.parametrize(
    "history",
    [
        skips_batches,
        was_killed,
        skips_the_repetition,
        was_fenced,
        repeats_the_call,
        has_no_partitions_in_the_format,
    ],
)
def test_a_batch_that_is_left_out_is_no_failed_batch(query, writer, monkeypatch, history):
    history(query, writer, monkeypatch)
    for batch_id in (2, 4):
        query.call(writer, batch_id)
    query.start("run 9", 5)
    query.call(writer, 5)


def test_of_several_names_the_one_that_failed_is_refused(query, monkeypatch):
    first, second = query.named("first"), query.named("second")
    fails(query, first, monkeypatch, 0)
    query.call(second, 0)
    for run in ("run 1", "run 2"):
        query.start(run, 0 if run == "run 1" else 2)
        query.call(second, 1 + int(run == "run 2"))
        with pytest.raises(PassedOver, match="nothing of it is decided"):
            query.call(first, query.running.batch_id)


def test_where_spark_names_no_run_the_same_text_is_a_warning(query, monkeypatch, caplog):
    query.run = None  # over Connect, with a name
    named = query.named()
    fails(query, named, monkeypatch, 0)
    query.call(named, 1)
    assert "a call for batch 0 failed and nothing of it is decided" in caplog.text
    caplog.clear()
    query.call(named, 2)
    assert "failed" not in caplog.text


def test_a_log_that_cannot_be_written_says_so_and_the_run_is_refused(query, monkeypatch, caplog):
    writer = query.named()
    with monkeypatch.context() as full:
        full.setattr(foreach_batch, "leave_note", lambda *args: 1 / 0)
        fails(query, writer, full, 0)
    assert "its decision log could not note it" in caplog.text
    with pytest.raises(PassedOver, match="nothing of it is decided"):
        query.call(writer, 1)


# -- a batch that is decided and not finished --


class Deaf(MemoryParticipant):
    """A store that does not answer."""

    deaf = False

    def commit(self, c):
        return Outcome.UNKNOWN if self.deaf else super().commit(c)

    def rows(self):
        return [value.as_py() for column in self.read() for value in column]


@pytest.fixture
def deaf(query):
    """A writer into a store that falls silent, without pauses between its questions."""
    store = Deaf()
    writer = exactly_once(dict(maxCommitRetries=1), participants=[store])
    query.rows = ("a",)
    query.call(writer, 0)
    store.deaf, query.rows = True, ("b",)
    with pytest.raises(OutcomeUnknown):
        query.call(writer, 1)
    assert store.rows() == ["a"]
    query.rows = ("c",)
    return writer, store


def test_the_next_run_finishes_what_was_decided(query, deaf):
    """Two availableNow runs in one process: the token of the first one is still there."""
    writer, store = deaf
    store.deaf = False
    query.start("run 2", 2)
    query.call(writer, 2)
    query.call(writer, 3)
    assert store.rows() == ["a", "b", "c", "c"]
    assert store.in_doubt(query.id) == []


def test_the_next_call_of_the_run_finishes_it_and_says_what_not_to_do(query, deaf):
    writer, store = deaf
    with pytest.raises(PassedOver, match="Not yet. .*Do not write them again") as unclear:
        query.call(writer, 2)
    assert "nothing of it is decided" not in str(unclear.value)
    store.deaf = False
    with pytest.raises(PassedOver, match="its rows are committed: do not write them again"):
        query.call(writer, 3)
    assert store.rows() == ["a", "b"]


def test_what_timed_out_behind_a_caught_error_is_written_again(query, deaf):
    """Spark has the batch in its commits, so no replay comes."""
    writer, store = deaf
    store.deaf = False
    store.expire()
    query.start("run 2", 2)
    query.call(writer, 2)
    assert store.rows() == ["a", "b", "c"]
