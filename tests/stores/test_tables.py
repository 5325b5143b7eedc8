"""Tables of Delta Lake and Iceberg: the suite of participants, a commit that is killed at each of
its steps, zombies, compaction and clean-ups, other writers, types, and what is refused by name.
"""

import json
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from datetime import UTC, date, datetime
from decimal import Decimal
from itertools import combinations, count
from pathlib import Path
from unittest.mock import patch

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, TableFeatures, write_deltalake
from disk_suite import (
    a_disk_that_refuses_any_step_is_an_error_of_ours,
    an_abort_before_any_step_of_a_precommit_is_an_ordinary_error,
)
from driver_steps import decide_only, orders_driver
from driver_steps import write as write_batch
from participant_suite import (
    DONE,
    DURABLE,
    REFUSED,
    REQUIRED,
    UNKNOWN,
    At,
    a_plan,
    few_of,
    precommit_rows,
    rows,
)
from pyiceberg.io.pyarrow import pyarrow_to_schema
from pyiceberg.types import (
    DecimalType,
    DoubleType,
    FloatType,
    LongType,
    MapType,
    StringType,
)
from table_stores import TABLES, TEXTS, Delta, Iceberg

from kafka2pc.backends.storage import Storage
from kafka2pc.protocol.clock import CLOCK
from kafka2pc.protocol.errors import (
    BadOption,
    BadRow,
    LostTransaction,
    PrecommitFailed,
    UnfinishedBatch,
)
from kafka2pc.protocol.phases.commit import commit
from kafka2pc.protocol.phases.precommit import precommit
from kafka2pc.protocol.phases.restore import restore
from kafka2pc.protocol.states import TxnState
from kafka2pc.stores import object_store, table
from kafka2pc.stores.data_files import Layout, PartitionKey, PartWriter, spell
from kafka2pc.stores.delta import DeltaParticipant
from kafka2pc.stores.table import Conflict

pytestmark = pytest.mark.never_unsteady


def checks(*of):
    return pytest.mark.parametrize("check", of, ids=lambda check: check.__name__)


@checks(*REQUIRED, *DURABLE)
def test_delta_keeps(check, tmp_path):
    check(Delta(tmp_path).at())


@checks(*few_of(REQUIRED + DURABLE))
def test_iceberg_keeps(check, tmp_path):
    check(Iceberg(tmp_path).at())


@pytest.fixture(params=TABLES)
def one(request, tmp_path):
    """A table of one column of text."""
    return TABLES[request.param](tmp_path)


def write(store, plan, *texts):
    return precommit_rows(At(store, list, rows), plan, *texts)


# -- one version for all, once --


def test_the_rows_of_all_tasks_become_visible_in_one_version(one):
    store, plan = one.store(), a_plan()
    cs = [write(store, plan, *texts) for texts in (("a", "b"), ("c",), ("d",))]
    before = one.versions()
    assert store.end_all("commit", cs) == [DONE] * 3
    assert (sorted(one.texts()), one.versions()) == (["a", "b", "c", "d"], before + 1)
    assert store.end_all("commit", cs) == [DONE] * 3
    assert one.versions() == before + 1


class Killed(BaseException):
    """The process ends here."""


class Steps:
    """Counts what a participant does to its table and its objects, and dies at one of them: right
    `before` it, or right after.
    """

    def __init__(self, dies_at=None, before=True):
        self.done, self.dies_at, self.before = 0, dies_at, before

    def of(self, real):
        def step(*args, **named):
            self.done += 1
            dies = self.done == self.dies_at
            if dies and self.before:
                raise Killed
            answer = real(*args, **named)
            if dies:
                raise Killed
            return answer

        return step


class Meeting(Steps):
    """Calls `other` right before one of the steps."""

    def __init__(self, meets_at, other):
        super().__init__()
        self.meets_at, self.other = meets_at, other

    def of(self, real):
        def step(*args, **named):
            self.done += 1
            if self.done == self.meets_at:
                self.other()
            return real(*args, **named)

        return step


@contextmanager
def stepwise(store, steps):
    """All that `store` changes is one of these steps."""
    with (
        patch.object(store, "add", steps.of(store.add)),
        patch.object(object_store, "put_new", steps.of(object_store.put_new)),
        patch.object(store.storage, "remove", steps.of(store.storage.remove)),
    ):
        yield steps


def both(store, plan):
    return [write(store, plan, "a", "b"), write(store, plan, "c")]


@pytest.mark.parametrize("before", [True, False], ids=["before", "after"])
def test_a_commit_that_is_killed_at_any_step_is_finished_by_another_process(one, before):
    store, plan = one.store(), a_plan()
    for dies_at in count(1):
        cs = both(store, plan)
        with stepwise(store, Steps(dies_at, before)) as steps, suppress(Killed):
            store.end_all("commit", cs)
        other = one.store()
        states = {d.state for d in other.describe(cs)}
        assert states <= {TxnState.PRECOMMITTED, TxnState.COMMITTED}
        assert other.end_all("commit", cs) == [DONE, DONE]
        assert other.end_all("abort", cs) == [REFUSED, REFUSED]
        assert sorted(one.texts()) == sorted(["a", "b", "c"] * dies_at)
        assert other.in_doubt(plan.query_id) == []
        if steps.done < dies_at:
            break
    assert dies_at > 5, "two outcomes, one version, two removals"


@pytest.mark.parametrize("before", [True, False], ids=["before", "after"])
def test_an_abort_that_is_killed_at_any_step_is_finished_by_another_process(one, before):
    store, plan = one.store(), a_plan()
    for dies_at in count(1):
        cs = both(store, plan)
        with stepwise(store, Steps(dies_at, before)) as steps, suppress(Killed):
            store.end_all("abort", cs)
        other = one.store()
        assert other.end_all("abort", cs) == [DONE, DONE]
        assert other.end_all("commit", cs) == [REFUSED, REFUSED]
        assert (one.texts(), other.in_doubt(plan.query_id)) == ([], [])
        assert [other.storage.names(other.files(c).folder) for c in cs] == [[], []]
        if steps.done < dies_at:
            break
    assert dies_at > 8, "of each: outcome, file or files, note, open"


def test_of_a_commit_and_an_abort_that_meet_at_any_step_one_wins_for_all(one):
    """The other process runs right before each step in turn."""
    for verbs in (("commit", "abort"), ("abort", "commit")):
        for meets_at in count(1):
            store, plan = one.store(), a_plan()
            c, other, answers = write(store, plan, "a"), one.store(), {}
            seen = len(one.texts())
            steps = Meeting(
                meets_at, lambda: answers.update({verbs[1]: getattr(other, verbs[1])(c)})
            )
            with stepwise(store, steps):
                answers[verbs[0]] = getattr(store, verbs[0])(c)
            answers.setdefault(verbs[1], getattr(other, verbs[1])(c))
            assert sorted(o.value for o in answers.values()) == ["done", "refused"], answers
            assert len(one.texts()) - seen == (answers["commit"] is DONE)
            if steps.done < meets_at:
                break


def all_of(kinds):
    """Every choice of some of these."""
    return [choice for n in range(len(kinds) + 1) for choice in combinations(kinds, n)]


def died_at(stage, store, c):
    """The commit of a decided transaction, until its process dies."""
    dies = {"promised": (store, "add"), "in the table": (table, "close")}.get(stage)
    with suppress(Killed), patch.object(*dies, side_effect=Killed) if dies else nullcontext():
        if stage != "decided":
            store.commit(c)


@pytest.mark.parametrize("stage", ["decided", "promised", "in the table", "closed"])
def test_the_note_of_the_table_counts_whichever_objects_are_removed(one, stage):
    """After a crash in the commit. What is not in the table is committed, or named as lost."""
    for removed in all_of(table.TableParticipant.kinds):
        store, plan = one.store(), a_plan()
        c = write(store, plan, plan.query_id)
        died_at(stage, store, c)
        for kind in removed:
            store.storage.remove(store.path(c, kind))
        other, before = one.store(), one.texts().count(plan.query_id)
        assert before == (stage in ("in the table", "closed"))
        if before:
            assert other.abort(c) is REFUSED
        state = other.describe([c])[0].state
        found = [state.name, other.commit(c), one.texts().count(plan.query_id)]
        waits = ["PRECOMMITTED", DONE, 1]  # or so it seems, if its outcome alone is gone
        left = [["COMMITTED", DONE, 1], waits] if before else [["ABORTED", REFUSED, 0], waits]
        assert found in left, removed
        assert other.describe([c])[0].state.name == ("COMMITTED" if found[2] else "ABORTED")
        assert other.in_doubt(plan.query_id) == [] or not found[2]


@pytest.mark.parametrize("passed", [False, True], ids=["replayed", "passed over"])
def test_a_decided_batch_of_which_all_objects_are_removed_is_lost_by_name(one, passed):
    """Also if Spark says that it is finished: its word is no proof."""
    driver = orders_driver(one.folder, one.store())
    write_batch(driver, 0, rows(["a"]))
    decide_only(driver, 1, rows(["b"]))
    [store] = driver.participants.values()
    store.fs.rm(store.root, recursive=True)
    restarted = replace(driver, participants={store.name: one.store()})
    with pytest.raises(LostTransaction, match="batch 1 of query"):
        restore(restarted, 1 + passed)
    assert one.texts() == ["a"]


def data_of(store, c):
    return store.storage.names(store.files(c).folder)


def test_an_abort_in_the_middle_of_a_precommit_leaves_nothing(one):
    an_abort_before_any_step_of_a_precommit_is_an_ordinary_error(one.store, data_of)
    assert one.texts() == []


def test_what_an_object_store_has_no_more_is_an_aborted_transaction(one):
    """It answers 404 for a part of an upload that was aborted."""
    store = one.store()
    with store.begin(a_plan()) as txn:
        txn.write(rows(["a"]))
        with patch.object(Storage, "upload", side_effect=FileNotFoundError("no such upload")):
            with pytest.raises(PrecommitFailed, match="was aborted"):
                txn.precommit()
    assert (data_of(store, txn.c), store.commit(txn.c)) == ([], REFUSED)


def test_a_disk_that_refuses_is_named(one):
    a_disk_that_refuses_any_step_is_an_error_of_ours(one.store)


def test_what_is_in_the_table_under_an_id_that_was_used_again_is_not_in_doubt(one):
    """The disk takes no marks while three batches are committed: one of two ids comes again."""
    driver, token, written = orders_driver(one.folder, one.store()), None, []
    [store] = driver.participants.values()
    with patch.object(table, "_mark_done", side_effect=OSError("read-only")):
        for n in range(3):
            plan = restore(driver, n, mine=token)
            message = precommit([store], plan, iter([rows([str(n)])]))
            commit(driver, [message], n)
            token, written = plan.token, [*written, *message.committables]
    first, _, third = written
    assert first.transactional_id == third.transactional_id
    assert store.describe([first])[0].state is TxnState.COMMITTED
    one.compact()
    assert store.commit(first) is DONE and sorted(one.texts()) == ["0", "1", "2"]
    assert one.store().in_doubt(driver.query_id) == []


def test_a_column_that_goes_right_before_the_version_is_noticed(tmp_path):
    """Iceberg: a change of columns makes no version of the rows."""
    one = Iceberg(tmp_path, pa.schema([("value", pa.string()), ("n", pa.int64())]))
    store, batch = one.store(), pa.record_batch({"value": ["a"], "n": [1]})
    with store.begin(a_plan()) as txn:
        txn.write(batch)
        c = txn.precommit()
    add = store.add

    def late(loaded, files):
        if loaded.schema().find_field("n", case_sensitive=True):
            with one.load().update_schema(allow_incompatible_changes=True) as change:
                change.delete_column("n")
        add(loaded, files)

    with patch.object(store, "add", late), pytest.raises(UnfinishedBatch, match="n"):
        store.commit(c)
    assert one.texts() == []


# -- other writers --


def test_another_writer_that_is_faster_at_each_try_but_the_last_doubles_nothing(one):
    store, plan = one.store(), a_plan()
    cs, add, tries = both(store, plan), store.add, []

    def slow(loaded, files):
        tries.append(1)
        if len(tries) <= 3:
            one.append([f"other {len(tries)}"])
        add(loaded, files)

    with patch.object(store, "add", slow), patch.object(table.random, "uniform", lambda *_: 0):
        assert store.end_all("commit", cs) == [DONE, DONE]
    assert len(tries) == 4
    assert sorted(one.texts()) == ["a", "b", "c", "other 1", "other 2", "other 3"]


def test_a_table_that_is_never_free_is_asked_again_later(one):
    store = one.store()
    c = write(store, a_plan(), "a")
    with (
        patch.object(store, "add", side_effect=Conflict),
        patch.object(table.random, "uniform", lambda *_: 0),
    ):
        assert store.commit(c) is UNKNOWN
    assert store.describe([c])[0].state is TxnState.PRECOMMITTED
    assert (store.commit(c), one.texts()) == (DONE, ["a"])


def test_an_answer_that_is_lost_doubles_nothing(one):
    store = one.store()
    c, add = write(store, a_plan(), "a"), store.add

    def lost(loaded, files):
        add(loaded, files)
        raise ConnectionError("no answer")

    with patch.object(store, "add", lost):
        assert store.commit(c) is UNKNOWN
    assert store.describe([c])[0].state is TxnState.COMMITTED
    assert (store.commit(c), one.texts()) == (DONE, ["a"])


# -- zombies --


def test_a_driver_that_wakes_with_a_stale_or_a_fresh_handle_adds_nothing_twice(one):
    plan, cs, woken = a_plan(), {}, one.store()
    cs["stale"], cs["fresh"] = write(woken, plan, "stale"), write(woken, plan, "fresh")
    stale, load = woken.load(), woken.load
    for c in cs.values():
        assert one.store().commit(c) is DONE
    with patch.object(woken, "load", side_effect=lambda: handles.pop() if handles else load()):
        handles = [stale]
        assert woken.commit(cs["stale"]) is DONE
        assert woken.commit(cs["fresh"]) is DONE
    assert sorted(one.texts()) == ["fresh", "stale"]


@pytest.mark.parametrize("handle", ["stale", "fresh"])
def test_a_zombie_in_the_middle_of_its_commit_adds_nothing_twice(one, handle):
    """It has asked everything, and stops right before it adds; the other one commits, and goes on
    until the notes of this batch are gone.
    """
    zombie, plan = one.store(), a_plan()
    c = write(zombie, plan, "a")

    def sleeps(loaded, files):
        other = one.store()
        assert other.commit(c) is DONE
        for batch_id in (1, 2, 3):
            assert other.commit(write(other, replace(plan, batch_id=batch_id), "b")) is DONE
        if handle == "fresh":
            raise Conflict
        add(loaded, files)

    add = zombie.add
    with patch.object(zombie, "add", sleeps), patch.object(table.random, "uniform", lambda *_: 0):
        assert zombie.commit(c) is not UNKNOWN
    assert sorted(one.texts()) == ["a", "b", "b", "b"]


def test_an_abort_that_comes_when_the_outcome_is_forgotten_takes_no_file_of_the_table(one):
    store, plan = one.store(), a_plan()
    c = write(store, plan, "a")
    assert store.commit(c) is DONE
    for batch_id in (1, 2, 3):
        assert store.commit(write(store, replace(plan, batch_id=batch_id), "b")) is DONE
    store.abort(c)
    assert sorted(one.texts()) == ["a", "b", "b", "b"]


# -- compaction and clean-ups --


def test_compaction_and_clean_up_after_the_commit_lead_to_no_second_one(one):
    store, plan = one.store(), a_plan()
    cs = both(store, plan)
    with patch.object(table, "close", side_effect=Killed), suppress(Killed):
        store.end_all("commit", cs)
    one.append(["other"])
    one.compact()
    one.clean()
    assert not any(path for c in cs for path in store.storage.names(store.files(c).folder))
    other = one.store()
    assert [d.state for d in other.describe(cs)] == [TxnState.COMMITTED] * 2
    assert other.end_all("commit", cs) == [DONE, DONE]
    assert sorted(one.texts()) == ["a", "b", "c", "other"]


def test_compaction_between_the_decision_and_the_commit_changes_nothing(one):
    store = one.store()
    one.append(["x"])
    one.append(["y"])
    c = write(store, a_plan(), "a")
    one.compact()
    assert (store.commit(c), sorted(one.texts())) == (DONE, ["a", "x", "y"])


def test_files_that_a_clean_up_took_are_a_loss_that_is_named_and_no_commit_of_half(one):
    store, plan = one.store(), a_plan()
    cs = both(store, plan)
    one.append(["other"])
    one.clean()
    cs.append(write(store, plan, "d"))
    assert [d.state.name for d in store.describe(cs)] == ["ABORTED", "ABORTED", "PRECOMMITTED"]
    assert store.end_all("commit", cs) == [REFUSED, REFUSED, DONE]
    assert sorted(one.texts()) == ["d", "other"]
    assert one.store().in_doubt(plan.query_id) == [], "no abort ends them"
    assert [d.state.name for d in store.describe(cs)] == ["ABORTED", "ABORTED", "COMMITTED"]


def test_what_is_not_in_the_table_yet_is_not_forgotten(one):
    """Whatever later batches do."""
    store, plan = one.store(), a_plan()
    c = write(store, plan, "a")
    with patch.object(store, "add", side_effect=ConnectionError):
        assert store.commit(c) is UNKNOWN
    for batch_id in (1, 3, 5):  # other ids, or it would be aborted
        assert store.commit(write(store, replace(plan, batch_id=batch_id), "b")) is DONE
    assert (store.commit(c), sorted(one.texts())) == (DONE, ["a", "b", "b", "b"])


def test_a_commit_lists_a_folder_as_often_for_many_tasks_as_for_one(one):
    def lists(tasks):
        store, plan = one.store(), a_plan()
        cs, kinds = [write(store, plan, "a") for _ in range(tasks)], []
        with patch.object(store, "names_of", lambda kind: kinds.append(kind) or real(kind)):
            real = type(store).names_of.__get__(store)
            assert store.end_all("commit", cs) == [DONE] * tasks
        return kinds

    assert lists(1) == lists(5)


def test_no_two_files_have_one_name(one):
    """Some clean-ups compare only names."""
    store = one.store()
    assert store.end_all("commit", both(store, a_plan())) == [DONE, DONE]
    names = [path.rpartition("/")[2] for path in one.files()]
    assert len(set(names)) == 2


def test_what_is_kept_of_a_query_does_not_grow(one):
    store, plan, most = one.store(), a_plan(), 0
    for batch_id in range(6):
        left = write(store, replace(plan, batch_id=batch_id), "left")
        assert store.abort(left) is DONE
        c = write(store, replace(plan, batch_id=batch_id), str(batch_id))
        assert store.commit(c) is DONE
        kept = [
            name for kind in store.kinds for name in store.storage.names(f"{store.root}/{kind}")
        ]
        most = max(most, len(kept))
    assert most <= 8, "of two batches: outcomes, lists of files, and that they are done"
    if isinstance(one, Iceberg):
        [noted] = [v for k, v in one.load().properties.items() if k.startswith("kafka2pc.")]
        assert len(json.loads(noted)) == 1


# -- types --

NOON = datetime(2020, 1, 1, 12, 0, 0, 123456)
EVERY_TYPE = pa.table(
    {
        "i": pa.array([1, 2, None, 4], pa.int64()),
        "s": ["a", None, "é" * 40, "x" * 100],
        "d": [date(2020, 1, 1)] * 4,
        "t": pa.array([NOON.replace(tzinfo=UTC)] * 4, pa.timestamp("us", "UTC")),
        "n": pa.array([NOON] * 4, pa.timestamp("us")),
        "c": pa.array([Decimal("1.50")] * 4, pa.decimal128(10, 2)),
        "big": pa.array([Decimal("12345678901234567890.50")] * 4, pa.decimal128(38, 2)),
        "b": [True, False, None, True],
        "x": pa.array([b"\x00", b"z", None, b""], pa.binary()),
        "f": [1.5, float("nan"), 2.0, None],
        "st": [{"x": 1, "y": "q"}] * 4,
        "li": [[1, 2]] * 4,
        "m": pa.array([[("k", 1)]] * 4, pa.map_(pa.string(), pa.int64())),
        "p": ["x", "y /%", None, "ü"],
        "pd": [date(2020, 1, 2)] * 4,
        "pi": pa.array([7, -7, 7, 7], pa.int32()),
        "pb": [True] * 4,
        "pc": pa.array([Decimal("1.50")] * 4, pa.decimal128(10, 2)),
    }
)


@pytest.mark.parametrize("kind", TABLES.values(), ids=TABLES)
def test_every_type_comes_back_from_a_partitioned_table(kind, tmp_path):
    one = kind(tmp_path, EVERY_TYPE.schema, ("p", "pd", "pi", "pb", "pc"))
    store = one.store()
    with store.begin(a_plan()) as txn:
        for batch in EVERY_TYPE.to_batches(2):
            txn.write(batch)
        c = txn.precommit()
    assert (store.commit(c), c.records) == (DONE, 4)
    found = one.read().select(EVERY_TYPE.schema.names).cast(EVERY_TYPE.schema)
    spell = lambda table: sorted(map(repr, table.to_pylist()))
    assert spell(found) == spell(EVERY_TYPE)
    assert len(one.files()) == 4, "one for each partition"


def test_files_of_iceberg_have_the_ids_of_all_fields(tmp_path):
    """Of a file that has some a reader takes no field by its name: the others would be null."""
    one = Iceberg(tmp_path, EVERY_TYPE.schema)
    store = one.store()
    with store.begin(a_plan()) as txn:
        txn.write(EVERY_TYPE.to_batches()[0])
        assert store.commit(txn.precommit()) is DONE
    [path] = one.files()
    leaves = pq.ParquetFile(path).schema_arrow
    ids = pyarrow_to_schema(leaves)  # raises if one has no id
    assert ids.as_struct() == one.load().schema().as_struct()


def test_what_only_arrow_distinguishes_fits(one):
    store = one.store()
    for kind in (pa.large_string(), pa.string_view()):
        with store.begin(a_plan()) as txn:
            txn.write(pa.RecordBatch.from_pydict({"value": pa.array(["a"], kind)}))
            assert store.commit(txn.precommit()) is DONE
    assert one.texts() == ["a", "a"]


@pytest.mark.parametrize(
    ("columns", "says"),
    [
        ({"value": pa.array([1])}, "value is int64 in the rows and string in the table"),
        ({"other": ["a"], "value": ["a"]}, "the table lacks other"),
        ({"other": ["a"]}, "the rows lack value"),
    ],
)
def test_other_columns_or_types_are_refused_before_anything_is_written(one, columns, says):
    store, plan = one.store(), a_plan()
    with pytest.raises(BadOption, match=says), store.begin(plan) as txn:
        txn.write(pa.RecordBatch.from_pydict(columns))
    assert (store.in_doubt(plan.query_id), one.files()) == ([], [])


@pytest.mark.parametrize("kind", TABLES.values(), ids=TABLES)
def test_columns_are_compared_before_the_first_task(kind, tmp_path):
    one = kind(tmp_path, pa.schema({"id": pa.int64(), "item": pa.string()}))
    one.store().check_columns(["item", "id"])
    one.store(columns=["id", "item"]).check_columns(["key", "id", "item"])
    with pytest.raises(BadOption, match="has no column key"):
        one.store().check_columns(["key", "id", "item"])
    with pytest.raises(BadOption, match="its column item is not written"):
        one.store().check_columns(["id"])


@pytest.mark.parametrize("kind", TABLES.values(), ids=TABLES)
def test_a_null_where_the_table_has_none_is_a_bad_row(kind, tmp_path):
    one = kind(tmp_path, pa.schema([pa.field("value", pa.string(), nullable=False)]))
    with pytest.raises(BadRow, match="column value: null") as e, one.store().begin(a_plan()) as txn:
        txn.write(rows(["a", None]))
    assert "Kafka" not in e.value.why


@pytest.mark.parametrize("keys", [(), ("day",)])
@pytest.mark.parametrize("kind", TABLES.values(), ids=TABLES)
def test_a_year_after_9999_is_a_bad_row(kind, keys, tmp_path):
    """The library could never commit it: its statistics are of Python's dates."""
    one = kind(tmp_path, pa.schema({"n": pa.int64(), "day": pa.date32()}), keys)
    days = pa.array([0, 10_000_000], pa.int32()).cast(pa.date32())
    with pytest.raises(BadRow, match="out of range"), one.store().begin(a_plan()) as txn:
        txn.write(pa.record_batch({"n": [1, 2], "day": days}))
        txn.precommit()
    assert one.files() == []


# -- statistics --


def written(folder, table, most=64, keys=()):
    layout = Layout(
        schema=table.schema,
        keys=tuple(PartitionKey(name=k, source=k, of=lambda column: column) for k in keys),
        stored=tuple(table.schema.names),
    )
    writer = PartWriter(str(folder), layout, most)
    for batch in table.to_batches(2):
        writer.write(batch)
    return writer.close()


def test_bounds_are_given_only_where_they_hide_no_row(tmp_path):
    [file] = written(tmp_path, EVERY_TYPE.select(["i", "s", "d", "t", "c", "big", "x", "f", "b"]))
    assert file.low == {
        "i": 1,
        "s": "a",
        "d": "2020-01-01",
        "t": "2020-01-01T12:00:00.123Z",
        "c": 1.5,
        "b": False,
    }
    assert file.high == file.low | {"i": 4, "b": True, "s": "é" * 40}
    assert file.nulls == dict(i=1, s=1, d=0, t=0, c=0, big=0, x=1, b=1)
    [file] = written(tmp_path, pa.table({"f": [1.5, 2.5], "s": ["a", "b" * 100]}))
    assert (file.low, file.high) == ({}, {})
    [file] = written(tmp_path, pa.table({"t": [NOON.time()]}))
    assert (file.low, file.high, file.nulls) == ({}, {}, {"t": 0})


def test_no_reader_skips_a_nan_by_bounds_that_leave_it_out(tmp_path):
    """Spark sorts NaN behind all numbers, and asks the Parquet file, too."""
    floats = pa.table({"f": [1.0, float("nan")], "st": [{"f": 2.0}] * 2, "n": [1, 2]})
    [file] = written(tmp_path, floats)
    group = pq.read_metadata(tmp_path / file.path).row_group(0)
    has = {c.path_in_schema: c.is_stats_set for c in map(group.column, range(3))}
    assert has == {"f": False, "st.f": False, "n": True}


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (NOON.replace(tzinfo=UTC), "2020-01-01T12:00:00.123456Z"),
        (datetime(1, 2, 3), "0001-02-03 00:00:00.000000"),
        (date(1, 2, 3), "0001-02-03"),
        (Decimal("0E-10"), "0.0000000000"),
        (Decimal("-1.50"), "-1.50"),
        (float("nan"), "NaN"),
        (float("-inf"), "-Infinity"),
        ("nan", "nan"),
        (True, "true"),
        (None, None),
    ],
)
def test_a_partition_value_is_spelled_so_that_each_reader_finds_the_same(value, text):
    assert spell(value) == text


def test_the_note_of_a_delta_table_has_its_time(tmp_path):
    """Spark drops one without, in its next checkpoint, from a table that sets a retention."""
    one = Delta(tmp_path)
    store, begun = one.store(), CLOCK.now_ms() - 1
    assert store.commit(write(store, a_plan(), "a")) is DONE
    log = (one.folder / "table/_delta_log/00000000000000000001.json").read_text()
    [noted] = [json.loads(line)["txn"] for line in log.splitlines() if "txn" in line]
    assert begun <= noted["lastUpdated"] <= CLOCK.now_ms() + 1


def test_many_partitions_do_not_open_many_files(tmp_path):
    table = pa.table({"k": [n % 5 for n in range(20)], "n": range(20)})
    files = written(tmp_path, table, most=2, keys=["k"])
    assert sum(f.rows for f in files) == 20 and len(files) > 5
    assert {f.values["k"] for f in files} == {str(n) for n in range(5)}
    assert len({f.path for f in files}) == len(files)


def test_many_are_asked_at_once_about_one_version_of_the_table(one):
    """As in an object store."""
    store = one.store()
    cs = [write(store, a_plan(), str(n)) for n in range(20)]
    store.local = False
    assert store.end_all("commit", cs[::2]) == [DONE] * 10
    assert store.end_all("abort", cs) == [REFUSED, DONE] * 10
    assert len(one.texts()) == 10


def test_the_files_of_a_delta_table_are_where_its_library_looks_for_them(tmp_path):
    one = Delta(tmp_path / "a b#c")
    for url in (f"file://{tmp_path}/a%20b%23c/table", f"{tmp_path}/a b#c/table"):
        store = DeltaParticipant(url)
        assert store.commit(write(store, a_plan(), "a")) is DONE
    assert one.texts() == ["a", "a"]


# -- Iceberg: columns by their ids, partitions by what the task has found --


def commit_all(one, table):
    store = one.store()
    with store.begin(a_plan()) as txn:
        for batch in table.to_batches():
            txn.write(batch)
        assert store.commit(txn.precommit()) is DONE


@pytest.mark.parametrize(
    "values",
    [
        ["a", "", None, "x" * 5_000],
        [1.5, float("nan"), float("-inf"), None],
        [date(1969, 12, 31), date(1, 1, 1)],
        [NOON.replace(year=1), NOON],
        [NOON.replace(tzinfo=UTC)],
        [Decimal("-1.50"), Decimal("0.00")],
        [True, False],
    ],
    ids=lambda values: type(values[0]).__name__,
)
@pytest.mark.parametrize("metrics", ["truncate(16)", "none"])
def test_iceberg_names_the_partition_of_a_file_whatever_its_statistics_say(
    tmp_path, metrics, values
):
    table = pa.table({"k": values})
    one = Iceberg(tmp_path, table.schema, ["k"])
    with one.load().transaction() as changes:
        changes.set_properties({"write.metadata.metrics.default": metrics})
    commit_all(one, table)
    named = one.load().inspect.files()["partition"].to_pylist()
    found = one.read()["k"].to_pylist()
    assert sorted(repr(p["k"]) for p in named) == sorted(map(repr, found))
    assert sorted(map(str, found)) == sorted(map(str, values))


def test_iceberg_keeps_the_rows_of_a_column_that_was_renamed(tmp_path):
    """Also if another column has its name now, between two commits or before this one."""
    one = Iceberg(tmp_path, pa.schema({"a": pa.string()}))
    store = one.store()
    with store.begin(a_plan()) as txn:
        txn.write(pa.record_batch({"a": ["first"]}))
        c = txn.precommit()
    commit_all(one, pa.table({"a": ["second"]}))
    with one.load().update_schema() as schema:
        schema.rename_column("a", "b")
    with one.load().update_schema() as schema:
        schema.add_column("a", StringType())
    assert store.commit(c) is DONE
    rows = sorted(one.read().to_pylist(), key=str)
    assert rows == [{"b": "first", "a": None}, {"b": "second", "a": None}]


def test_iceberg_needs_no_mapping_of_names(tmp_path):
    one = Iceberg(tmp_path, pa.schema({"a": pa.string(), "b": pa.string()}))
    swapped = [{"field-id": 1, "names": ["b"]}, {"field-id": 2, "names": ["a"]}]
    with one.load().transaction() as changes:
        changes.set_properties({"schema.name-mapping.default": json.dumps(swapped)})
    commit_all(one, pa.table({"a": ["in a"], "b": ["in b"]}))
    assert one.read().to_pylist() == [{"a": "in a", "b": "in b"}]


# -- the table changes between the decision and the commit --

SHAPE = pa.schema(
    [
        ("id", pa.int32()),
        ("value", pa.string()),
        ("price", pa.decimal128(5, 2)),
        ("point", pa.struct([("x", pa.float32())])),
    ]
)
ROWS = [
    {"id": 1, "value": "a", "price": Decimal("1.50"), "point": {"x": 1.5}},
    {"id": 2, "value": None, "price": Decimal("2.00"), "point": {"x": 2.5}},
]


def decided(one):
    """Two rows in two partitions."""
    store = one.store()
    with store.begin(a_plan()) as txn:
        txn.write(pa.RecordBatch.from_pylist(ROWS, SHAPE))
        return store, txn.precommit()


def anew(*columns, keys=("id",), without=()):
    """Another job overwrites the Delta table, with other columns."""
    kept = [f for f in SHAPE if f.name not in (*without, *(c.name for c in columns))]
    settings = {"mode": "overwrite", "schema_mode": "overwrite", "partition_by": list(keys)}

    def change(one):
        rows = pa.schema([*kept, *columns]).empty_table()
        write_deltalake(one.load(), rows, **settings)

    return change


def evolved(*changes):
    """Another job changes the columns of the Iceberg table."""

    def change(one):
        for step in changes:
            with one.load().update_schema(allow_incompatible_changes=True) as schema:
                step(schema)

    return change


def partitioned(old, new):
    def change(one):
        with one.load().update_spec() as spec:
            spec.remove_field(old).add_identity(new)

    return change


def constraint(one):
    one.load().alter.add_constraint({"positive": "id > 0"})


STOPS = {
    "delta-type": (Delta, anew(pa.field("id", pa.int64())), "column id was int32 and is int64"),
    "delta-gone": (Delta, anew(without=["value"]), "column value is gone"),
    "delta-inside": (
        Delta,
        anew(pa.field("point", pa.struct([("y", pa.float32())]))),
        "column point.x is gone",
    ),
    "delta-required": (
        Delta,
        anew(pa.field("new", pa.string(), nullable=False)),
        "column new is new, and allows no null",
    ),
    "delta-no-null": (
        Delta,
        anew(pa.field("value", pa.string(), nullable=False)),
        "column value allows no null any more",
    ),
    "delta-keys": (Delta, anew(keys=["value"]), "partitioned by id, and the table by value"),
    "delta-constraint": (Delta, constraint, "the constraint positive"),
    "iceberg-gone": (
        Iceberg,
        evolved(lambda s: s.delete_column("value")),
        r"column value \(id 2\) is gone",
    ),
    "iceberg-added-again": (
        Iceberg,
        evolved(lambda s: s.delete_column("value"), lambda s: s.add_column("value", StringType())),
        r"column value \(id 2\) is gone",
    ),
    "iceberg-inside": (
        Iceberg,
        evolved(
            lambda s: s.delete_column("point.x"),
            lambda s: s.add_column(("point", "y"), FloatType()),
        ),
        r"column point.x \(id 5\) is gone",
    ),
    "iceberg-required": (
        Iceberg,
        evolved(lambda s: s.add_column("new", StringType(), required=True)),
        "column new is new, and allows no null",
    ),
    "iceberg-no-null": (
        Iceberg,
        evolved(lambda s: s.update_column("value", required=True)),
        r"column value \(id 2\) allows no null any more",
    ),
    "iceberg-keys": (
        Iceberg,
        partitioned("id", "value"),
        "partitioned by id, and the table by value",
    ),
}
UNDO = {
    "delta-constraint": lambda one: one.load().alter.drop_constraint("positive"),
    "iceberg-no-null": evolved(lambda s: s.update_column("value", required=False)),
    "iceberg-keys": partitioned("value", "id"),
}


@pytest.mark.parametrize("case", STOPS)
def test_rows_that_a_changed_table_would_show_otherwise_wait_by_name(case, tmp_path):
    kind, change, says = STOPS[case]
    one = kind(tmp_path, SHAPE, ["id"])
    store, c = decided(one)
    change(one)
    with pytest.raises(UnfinishedBatch, match=says) as e:
        one.store().commit(c)
    assert f"{c.transactional_id}: 2 rows" in e.value.what and e.value.risk.startswith("Not yet.")
    assert (one.files(), store.abort(c), store.describe([c])[0].state.name) == (
        [],
        REFUSED,
        "PRECOMMITTED",
    )
    if undo := UNDO.get(case, anew() if kind is Delta else None):
        undo(one)
        assert store.commit(c) is DONE
        assert sorted(one.read().to_pylist(), key=str) == ROWS
    else:
        store.files(c).remove()
        assert store.commit(c) is REFUSED, "as a loss, which can be skipped"


PASSES = {
    "delta-added": (Delta, anew(pa.field("new", pa.string())), {"new": None}),
    "delta-added-again": (Delta, anew, {}),
    "iceberg-added": (
        Iceberg,
        evolved(
            lambda s: s.add_column("new", StringType()),
            lambda s: s.add_column(("point", "y"), StringType()),
            lambda s: s.add_column("map", MapType(90, StringType(), 91, StringType())),
        ),
        {"new": None, "map": None, "point": {"y": None}},
    ),
    "iceberg-wider": (
        Iceberg,
        evolved(
            lambda s: s.update_column("id", LongType()),
            lambda s: s.update_column("price", DecimalType(9, 2)),
            lambda s: s.update_column("point.x", DoubleType()),
        ),
        {},
    ),
}


@pytest.mark.parametrize("case", PASSES)
def test_rows_are_added_to_a_changed_table_whose_readers_find_them(case, tmp_path):
    kind, change, more = PASSES[case]
    one = kind(tmp_path, SHAPE, ["id"])
    store, c = decided(one)
    if case == "delta-added-again":
        anew(without=["value"])(one)
        change = anew()
    change(one)
    assert one.store().commit(c) is DONE
    point = more.pop("point", {})
    assert sorted(one.read().to_pylist(), key=str) == [
        row | {"point": row["point"] | point} | more for row in ROWS
    ]


@pytest.mark.parametrize(
    ("feature", "waits"),
    {
        "DeletionVectors": False,
        "ChangeDataFeed": False,
        "V2Checkpoint": False,
        "RowTracking": True,
        "DomainMetadata": True,
        "IdentityColumns": True,
        "IcebergCompatV1": True,
    }.items(),
)
def test_decided_rows_are_added_beside_a_feature_that_asks_nothing_of_them(
    tmp_path, feature, waits
):
    one = Delta(tmp_path)
    store = one.store()
    c = write(store, a_plan(), "a")
    named = feature[0].lower() + feature[1:]
    more = {"allow_protocol_versions_increase": True}
    one.load().alter.add_feature(getattr(TableFeatures, feature), **more)
    other = one.store()
    if waits:
        with pytest.raises(UnfinishedBatch, match=f"the feature {named}"):
            other.commit(c)
    else:
        assert (other.commit(c), len(one.files())) == (DONE, 1)
    if feature not in ("ChangeDataFeed", "V2Checkpoint"):
        with pytest.raises(BadOption, match=f"the feature {named}"):
            other.check_columns(["value"])
    assert other.describe([c])[0].state.name == ("PRECOMMITTED" if waits else "COMMITTED")


@pytest.mark.parametrize("passed", [False, True], ids=["replayed", "passed over"])
def test_a_restart_says_why_decided_rows_wait_and_adds_them_later(tmp_path, passed):
    one = Delta(tmp_path, SHAPE)
    driver = orders_driver(tmp_path, one.store())
    batch = pa.RecordBatch.from_pylist(ROWS, SHAPE)
    decide_only(driver, 0, batch)
    constraint(one)
    restarted = replace(driver, participants={"delta": one.store()})
    with pytest.raises(UnfinishedBatch, match="the constraint positive") as e:
        restore(restarted, int(passed))
    assert e.value.risk.startswith("Not yet.")
    UNDO["delta-constraint"](one)
    restore(restarted, int(passed))
    assert sorted(one.read().to_pylist(), key=str) == ROWS


def test_a_table_that_is_dropped_after_the_decision_does_not_say_that_nothing_was_written(one):
    store = one.store()
    c = write(store, a_plan(), "a")
    one.drop()
    for ask in (one.store, lambda: store.commit(c), lambda: store.describe([c])):
        with pytest.raises(BadOption, match="there is no table") as e:
            ask()
        assert "rows of a batch that is decided may wait" in e.value.risk


def test_a_list_without_columns_is_not_trusted(one):
    store = one.store()
    c = write(store, a_plan(), "a")
    files = json.loads(store.storage.read(store.path(c, "data")))["files"]
    store.storage.write(store.path(c, "data"), json.dumps(files).encode())
    with pytest.raises(UnfinishedBatch, match="the list of the files names no columns"):
        store.commit(c)


# -- what is refused by name --


def set_anyhow(one, settings):
    """Write these settings into the first version, as another library would."""
    first = one.folder / "table/_delta_log/00000000000000000000.json"
    actions = [json.loads(line) for line in first.read_text().splitlines()]
    for action in actions:
        if "metaData" in action:
            action["metaData"]["configuration"] |= settings
    first.write_text("\n".join(map(json.dumps, actions)))


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"delta.enableDeletionVectors": "true"}, "deletion vectors"),
        ({"delta.columnMapping.mode": "name"}, "column mapping"),
        ({"delta.constraints.short": "value <> 'long'"}, "the constraint short"),
        ({"delta.setTransactionRetentionDuration": "interval 6 days"}, "is interval 6 days"),
        ({"delta.setTransactionRetentionDuration": "interval 1 fortnight"}, "1 fortnight"),
    ],
)
def test_a_delta_table_that_cannot_be_written_is_refused_by_name(tmp_path, settings, says):
    one = Delta(tmp_path)
    set_anyhow(one, settings)
    with pytest.raises(BadOption, match=says):
        one.store().check_columns(["value"])


def test_a_relative_path_counts_from_where_the_participant_is_made(tmp_path, monkeypatch):
    """As for deltalake; a task may have another working directory."""
    there = Delta(tmp_path)
    monkeypatch.chdir(tmp_path)
    store, same = DeltaParticipant("table"), DeltaParticipant(Path("table"))
    monkeypatch.chdir("/")
    assert store.store_id() == same.store_id() == there.store().store_id()
    assert store.commit(write(same, a_plan(), "a")) is DONE and there.texts() == ["a"]


def test_a_table_at_a_relative_path_of_its_catalog_is_refused(tmp_path, monkeypatch):
    """Its metadata name the files so, and a process elsewhere does not find them."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Iceberg, "warehouse", "warehouse")
    table = Iceberg(tmp_path)
    with pytest.raises(BadOption, match="participant=warehouse/db.*: a relative path"):
        table.store()


def test_nothing_is_written_where_no_table_is(tmp_path):
    with pytest.raises(BadOption, match="there is no table"):
        DeltaParticipant(f"{tmp_path}/none")
    assert list(tmp_path.iterdir()) == []


def test_a_length_is_refused_by_name(tmp_path):
    """Spark checks it while it writes."""
    of_spark = {"__CHAR_VARCHAR_TYPE_STRING": "varchar(3)"}
    one = Delta(tmp_path, pa.schema([pa.field("value", pa.string(), metadata=of_spark)]))
    with pytest.raises(BadOption, match="column value has __CHAR_VARCHAR"):
        one.store().begin(a_plan())


def test_partitions_of_iceberg_that_cannot_be_written_are_refused_by_name(tmp_path):
    point = pa.struct([("x", pa.int32())])
    one = Iceberg(tmp_path, pa.schema({"at": point, "a.x": pa.string(), "b": pa.binary()}), ["a.x"])
    columns = ["at", "a.x", "b"]
    one.store().check_columns(columns)  # a name may have a dot
    for column, says in (("at.x", "a part of a column, at.x"), ("b", "by b, which is binary")):
        with one.load().update_spec() as spec:
            spec.add_identity(column)
        with pytest.raises(BadOption, match=says):
            one.store().check_columns(columns)


# -- in an object store: the servers of GCS and ADLS that tests have fail on appends of deltalake --


class DeltaInS3(Delta):
    """`folder`: the URL of a bucket."""

    options = {"AWS_ALLOW_HTTP": "true"}

    def __init__(self, url):
        self.folder, self.schema, self.keys = url, TEXTS, ()
        DeltaTable.create(f"{url}/table", TEXTS, storage_options=self.options)

    def store(self):
        return DeltaParticipant(f"{self.folder}/table", storage_options=self.options)

    def load(self):
        return DeltaTable(f"{self.folder}/table", storage_options=self.options)


class IcebergInS3(Iceberg):
    """The catalog is in `folder`, the table in the bucket `url`."""

    def __init__(self, folder, url, server):
        self.url, self.server = url, server
        super().__init__(folder)

    @property
    def catalog(self):
        return super().catalog | {
            "warehouse": self.url,
            "s3.endpoint": self.server.env["AWS_ENDPOINT_URL"],
            "s3.access-key-id": self.server.env["AWS_ACCESS_KEY_ID"],
            "s3.secret-access-key": self.server.env["AWS_SECRET_ACCESS_KEY"],
            "s3.region": self.server.env["AWS_DEFAULT_REGION"],
        }


def without_another(at):
    """Of a bucket there is no second one under its name."""
    return At(at.store, at.seen, rows, half_commit=at.half_commit)


@checks(*few_of(REQUIRED + DURABLE, rest="nightly"))
def test_delta_in_s3_keeps(check, s3):
    check(without_another(DeltaInS3(s3.fresh()).at()))


def test_an_object_store_is_asked_about_many_transactions_at_once(s3):
    one = DeltaInS3(s3.fresh())
    store, plan = one.store(), a_plan()
    cs = [write(store, plan, str(n)) for n in range(8)]
    version = one.versions()
    assert store.end_all("commit", cs[1:]) == [DONE] * 7
    assert store.end_all("abort", cs) == [DONE] + [REFUSED] * 7
    assert (one.versions() - version, sorted(one.texts())) == (1, list("1234567"))


@checks(*few_of(REQUIRED + DURABLE, rest="nightly"))
def test_iceberg_in_s3_keeps(check, s3, tmp_path):
    check(without_another(IcebergInS3(tmp_path, s3.fresh(), s3).at()))
