"""How a folder and an object store know themselves, their names and their files again: after a
move, a new version, another format, a consumer that takes files away, an old answer.
"""

import os
import pickle
import re
import uuid
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest
from disk_suite import (
    a_disk_that_refuses_any_step_is_an_error_of_ours,
    an_abort_before_any_step_of_a_precommit_is_an_ordinary_error,
)
from participant_suite import DONE, REFUSED, UNKNOWN, At, a_plan, precommit_rows, rows

from kafka2pc.backends.local_files import NoHardLinks
from kafka2pc.backends.storage import Storage
from kafka2pc.decision_logs.objects import ObjectLog
from kafka2pc.protocol.clock import CLOCK
from kafka2pc.protocol.driver import Driver
from kafka2pc.protocol.errors import (
    BadOption,
    LostTransaction,
    PrecommitFailed,
    Refused,
    StoreUnreachable,
    WrongCluster,
)
from kafka2pc.protocol.log.slots import MemoryLog
from kafka2pc.protocol.messages import Committable, Mode, PartitionRange, PreparedTxnState
from kafka2pc.protocol.names import Names
from kafka2pc.protocol.phases.commit import commit
from kafka2pc.protocol.phases.decide import decide
from kafka2pc.protocol.phases.precommit import precommit
from kafka2pc.protocol.phases.restore import restore
from kafka2pc.protocol.states import TxnState
from kafka2pc.stores import file, object_store, parts
from kafka2pc.stores.delta import DeltaParticipant
from kafka2pc.stores.file import FileParticipant
from kafka2pc.stores.object_store import ObjectParticipant

pytestmark = pytest.mark.never_unsteady


class Query:
    """A query, its decision log, and the store of its run."""

    def __init__(self, store):
        self.id, self.log = str(uuid.uuid4()), MemoryLog()
        self.store = store

    def driver(self):
        return Driver(query_id=self.id, log=self.log, participants={self.store.name: self.store})

    def write(self, batch_id, *texts):
        """Pre-commits: the plan, and the message of the only task."""
        plan = restore(self.driver(), batch_id)
        return plan, precommit([self.store], plan, [rows(texts)])

    def decide(self, batch_id, *texts):
        plan, message = self.write(batch_id, *texts)
        decide(self.driver(), plan, [message])
        return message.committables[0]

    def complete(self, batch_id, *texts):
        plan, message = self.write(batch_id, *texts)
        commit(self.driver(), [message], batch_id)
        return message.committables[0]


@pytest.fixture
def query(tmp_path):
    return Query(FileParticipant(tmp_path / "out", format="json"))


@pytest.fixture
def bucket(tmp_path):
    return Query(ObjectParticipant(f"file://{tmp_path}/bucket", format="json"))


def published(store):
    """The content of the files that a reader of the folder finds."""
    names = [n for n in os.listdir(store.where) if not n.startswith(".")]
    return sorted(open(f"{store.where}/{n}").read().strip() for n in names)


def marks(store):
    return sorted(n for n in os.listdir(f"{store.where}/.kafka2pc") if n.endswith(".done"))


def a_row(text):
    return f'{{"value": "{text}"}}'


# -- the id --


def left_by_an_older_version(query, paths):
    """Rows that are decided, and a transaction that is open, made by hand: there is no id, and
    records and Committables name the place alone. `paths`: of the first, and of the other.
    """
    store, plan = query.store, a_plan(query_id=query.id)
    name = f"kafka2pc-{query.id}-{plan.token}-5eedbeef"
    for path, tid in zip(paths, (f"{name}-0-0", f"{name}-1-0"), strict=True):
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path.format(f"{tid}.0.json"), "w") as written:
            written.write(a_row("a"))
    c = Committable(
        transactional_id=f"{name}-0-0",
        state=PreparedTxnState(0, 0),
        participant=store.name,
        cluster_id=store.where,
        partitions=(PartitionRange(topic=store.where, partition=0, records=1),),
    )
    with patch.object(type(store), "store_id", lambda self: self.where):
        query.log.create(query.driver().decision(plan, commit=True, committables=(c,)))


def takes_over(query):
    """Finishes the batch, sweeps, and names the id from the next record on."""
    assert restore(query.driver(), 0).mode is Mode.DRAIN
    assert query.store.kept_id() == ""
    query.complete(1, "b")
    assert query.store.in_doubt(query.id) == []
    stores = dict(query.log.listing().chain(1)[0].stores)
    assert stores == {query.store.name: query.store.store_id()}
    assert query.store.kept_id() in query.store.store_id()


def test_a_folder_of_an_older_version_is_taken_over(query):
    hidden = f"{query.store.where}/.kafka2pc"
    left_by_an_older_version(query, [f"{hidden}/{{}}.ready", f"{hidden}/{{}}.open"])
    takes_over(query)
    assert published(query.store) == [a_row("a"), a_row("b")]


def test_an_object_store_of_an_older_version_is_taken_over(bucket):
    root = bucket.store.root
    left_by_an_older_version(bucket, [f"{root}/data/{{}}", f"{root}/open/{{}}"])
    takes_over(bucket)
    assert len(bucket.store.committed_files()) == 2


def test_a_folder_at_the_same_place_without_the_id_is_refused_and_stays_as_it_is(query):
    query.complete(0, "a")
    os.rename(query.store.where, f"{query.store.where}.former")
    query.store = FileParticipant(query.store.where, format="json")
    with pytest.raises(WrongCluster, match="which has no id") as e:
        restore(query.driver(), 1)
    assert "where a link points" in e.value.action
    assert not os.path.exists(query.store.where)


def test_a_record_without_an_id_is_about_its_place(tmp_path, query):
    assert query.store.differs(query.store.where) == ""
    assert query.store.differs(f"{tmp_path}/other") == query.store.where


def test_a_folder_that_was_moved_is_the_same_store(tmp_path, query):
    c = query.decide(0, "a")
    os.rename(query.store.where, tmp_path / "moved")
    query.store = FileParticipant(tmp_path / "moved", format="json")
    assert restore(query.driver(), 0).mode is Mode.DRAIN
    assert published(query.store) == [a_row("a")]
    assert query.store.describe([c])[0].state is TxnState.COMMITTED


def test_a_folder_that_is_not_there_for_a_moment_loses_nothing(tmp_path, query):
    """Its mount is gone between the decision and the commit."""
    c = query.decide(0, "a")
    os.rename(query.store.where, tmp_path / "unmounted")
    assert (query.store.commit(c), query.store.abort(c)) == (UNKNOWN, UNKNOWN)
    with pytest.raises(StoreUnreachable, match="which has no id"):
        query.store.describe([c])
    os.rename(tmp_path / "unmounted", query.store.where)
    assert query.store.commit(c) is DONE and published(query.store) == [a_row("a")]


def test_nothing_is_written_under_a_mount_point(tmp_path, query):
    """The mount goes away between the plan and a task; a task is another process."""
    plan = restore(query.driver(), 0)
    os.rename(query.store.where, tmp_path / "unmounted")
    os.mkdir(query.store.where)
    with pytest.raises(StoreUnreachable, match="has now none"):
        precommit([pickle.loads(pickle.dumps(query.store))], plan, [rows(["a"])])
    assert os.listdir(query.store.where) == []


def test_a_batch_is_not_decided_while_its_folder_is_not_there(tmp_path, query):
    _, message = query.write(0, "a")
    os.rename(query.store.where, tmp_path / "unmounted")
    with pytest.raises(StoreUnreachable, match="which has no id"):
        commit(query.driver(), [message], 0)
    assert not any(d.commit for d in query.log.listing().chain(0))


@pytest.mark.parametrize("kind", ["file", "object"])
def test_of_two_processes_that_make_an_id_at_once_both_get_the_first(tmp_path, kind):
    if kind == "file":
        make, module = (lambda: FileParticipant(tmp_path / "out")), parts
    else:
        make, module = (lambda: ObjectParticipant(f"file://{tmp_path}/out")), object_store
    create, other = module.create_file, []

    def slow(*args, **kwargs):
        with patch.object(module, "create_file", create):
            other.append(make().store_id())
        create(*args, **kwargs)

    with patch.object(module, "create_file", slow):
        mine = make().store_id()
    assert [mine] == other


def test_a_disk_without_hard_links_keeps_an_id_too(query):
    with patch.object(parts, "create_file", side_effect=NoHardLinks(1, "no links")):
        os.makedirs(f"{query.store.where}/.kafka2pc")
        kept = query.store.store_id()
    assert query.store.store_id() == kept


def test_an_id_that_cannot_be_read_is_an_error_with_a_way_out(query, bucket):
    for store, path in (
        (query.store, f"{query.store.where}/.kafka2pc/id"),
        (bucket.store, f"{bucket.store.root}/.kafka2pc/id"),
    ):
        store.store_id()
        with open(path, "w") as damaged:
            damaged.write("half")
        with pytest.raises(StoreUnreachable, match="holds 'half'"):
            store.store_id()
    os.unlink(f"{query.store.where}/.kafka2pc/id")
    with (
        patch.object(parts, "create_file", side_effect=OSError(30, "Read-only file system")),
        pytest.raises(StoreUnreachable, match="Read-only file system"),
    ):
        FileParticipant(query.store.where).store_id()


# -- paths, and a disk that is in the way --


def test_a_relative_path_counts_from_where_the_participant_is_made(tmp_path, monkeypatch):
    """A task may have another working directory."""
    monkeypatch.chdir(tmp_path)
    stores = [kind(place) for kind in KINDS for place in ("out/x", Path("out/x"))]
    assert {store.where for store in stores} == {f"{tmp_path}/out/x"}


@pytest.mark.parametrize("place", ["nope://x", "file:out", "file://out/x", "kafka:t", "dbfs:/x"])
@pytest.mark.parametrize("kind", [FileParticipant, ObjectParticipant, DeltaParticipant, ObjectLog])
def test_a_place_that_cannot_be_used_is_refused_by_name(kind, place, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(BadOption, match=re.escape(place)):
        kind(place)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_made_or_listed_is_an_error_of_ours(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreUnreachable, match="NotADirectoryError"):
        ObjectParticipant(f"{tmp_path}/file/x")
    with (
        patch("os.listdir", side_effect=OSError(116, "Stale file handle")),
        pytest.raises(StoreUnreachable, match="Stale file handle"),
    ):
        FileParticipant(tmp_path).in_doubt("q")


KINDS = {
    FileParticipant: lambda store, c: [p for p in store.paths(c).values() if os.path.exists(p)],
    ObjectParticipant: lambda store, c: store.names_of("data"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_an_abort_in_the_middle_of_a_precommit_leaves_nothing(kind, tmp_path):
    make = partial(kind, tmp_path / "out")
    an_abort_before_any_step_of_a_precommit_is_an_ordinary_error(make, KINDS[kind])


@pytest.mark.parametrize("kind", KINDS)
def test_a_disk_that_refuses_is_named(kind, tmp_path):
    a_disk_that_refuses_any_step_is_an_error_of_ours(partial(kind, tmp_path / "out"))


# -- the format --


@pytest.mark.parametrize("which", ["query", "bucket"])
def test_a_batch_is_ended_in_the_format_in_which_it_was_written(which, request):
    query = request.getfixturevalue(which)
    old, place = query.store, getattr(query.store, "root", None)
    new = type(old)(f"file://{place}" if place else old.where, format="parquet", name=old.name)
    kept, left = query.decide(0, "a"), precommit_rows(At(old, list, rows), a_plan(), "b")
    query.store = new
    assert [d.state for d in new.describe([kept, left])] == [TxnState.PRECOMMITTED] * 2
    assert new.abort(left) is DONE and new.describe([left])[0].state is not TxnState.PRECOMMITTED
    assert restore(query.driver(), 0).mode is Mode.DRAIN
    assert new.describe([kept])[0].state is old.describe([kept])[0].state is TxnState.COMMITTED
    assert (new.abort(kept), new.commit(left)) == (REFUSED, REFUSED)
    if place:
        assert list(new.rows(kept)) == [{"value": "a"}] and len(new.committed_files()) == 1
    else:
        assert published(new) == [a_row("a")]


# -- one name, one process --


class OneLabel(Names):
    """The names of another process that has drawn the same label."""

    def __init__(self):
        with patch("uuid.uuid4", lambda: uuid.UUID(int=7)):
            super().__init__()


@pytest.mark.parametrize("which", ["query", "bucket"])
def test_what_a_person_removed_after_the_decision_is_lost_if_spark_has_gone_on(which, request):
    query = request.getfixturevalue(which)
    query.complete(0, "a")
    c = query.decide(1, "b")
    place = Path(getattr(query.store, "root", query.store.where))
    for found in place.rglob(f"*{c.transactional_id}.1.*"):
        found.unlink()
    assert query.store.describe([c])[0].state is TxnState.ABORTED
    for batch_id in (1, 2):
        with pytest.raises(LostTransaction, match=re.escape(c.transactional_id)):
            restore(query.driver(), batch_id)


@pytest.mark.parametrize("which", ["query", "bucket"])
def test_a_process_that_draws_the_name_of_another_takes_the_next(which, request):
    """Whatever the other has done with it: opened, pre-committed, committed, aborted."""
    query = request.getfixturevalue(which)
    plan, at, used = restore(query.driver(), 0), At(query.store, list, rows), []
    for end in (None, "precommit", "commit", "abort"):
        with patch.object(file, "_NAMES", OneLabel()):
            txn = query.store.begin(plan)
        used.append(txn.label)
        at.write(txn, str(end))
        if end:
            c = txn.precommit()
        if end in ("commit", "abort"):
            assert getattr(query.store, end)(c) is DONE
    left = {c.transactional_id for c in query.store.in_doubt(query.id)}
    assert left == {used[0], used[1]} and len(set(used)) == 4


def test_a_precommit_renames_only_the_file_that_it_wrote(query):
    """Its own was removed, and another process writes one of that name at this moment."""
    plan = restore(query.driver(), 0)
    with patch.object(file, "_NAMES", OneLabel()):
        mine = query.store.begin(plan)
    os.unlink(query.store.path(mine.c, "open"))
    with patch.object(file, "_NAMES", OneLabel()):
        theirs = query.store.begin(plan)
    assert mine.label == theirs.label
    At(query.store, list, rows).write(theirs, "whole")
    with pytest.raises(PrecommitFailed, match="its file is gone"):
        mine.precommit()
    assert query.store.commit(theirs.precommit()) is DONE
    assert published(query.store) == [a_row("whole")]


# -- files that a consumer takes away --


def take_away(store):
    for name in os.listdir(store.where):
        if not name.startswith("."):
            os.unlink(f"{store.where}/{name}")


class Killed(BaseException):
    """The process ends here."""


@pytest.mark.parametrize("step", ["rename", "mark", "publish", "end"])
def test_a_file_that_a_consumer_took_is_committed_wherever_the_commit_was_killed(query, step):
    c = query.decide(0, "a")
    rename, steps = os.rename, []

    def dying(old, new):
        rename(old, new)
        steps.append(new)
        if step == ("rename", "publish")[len(steps) - 1]:
            raise Killed

    died = patch.object(file.os, "rename", dying)
    if step == "mark":
        died = patch.object(file, "sync", side_effect=Killed)
    if step != "end":
        with pytest.raises(Killed), died:
            query.store.commit(c)
        assert query.store.abort(c) is REFUSED
    else:
        query.store.commit(c)
    take_away(query.store)
    assert restore(query.driver(), 0).mode is Mode.DRAIN
    assert query.store.describe([c])[0].state is TxnState.COMMITTED
    assert query.store.abort(c) is REFUSED and query.store.in_doubt(query.id) == []
    assert query.store.traces(query.id) == [c.transactional_id]


def test_marks_go_when_a_later_batch_is_committed_and_those_of_other_queries_by_age(query):
    for batch_id in range(3):
        c = query.complete(batch_id, "a")
    assert marks(query.store) == [f"{c.transactional_id}.2.json.done"]
    other = Query(query.store)
    other.complete(0, "b")
    assert len(marks(query.store)) == 2
    old = os.stat(query.store.path(c, "done")).st_mtime - 31 * 24 * 3600
    os.utime(query.store.path(c, "done"), (old, old))
    other.complete(1, "b")
    assert len(marks(query.store)) == 1


def test_a_query_that_has_rested_longer_than_marks_are_kept_has_lost_nothing(query):
    """A consumer took its file, and another query in the folder removed its old mark."""
    c = query.complete(0, "a")
    query.store.in_doubt("another")
    assert query.store.describe([c])[0].state is TxnState.COMMITTED
    later = SimpleNamespace(now_ms=lambda: CLOCK.now_ms() + 31 * 24 * 3600 * 1000)
    with patch.object(file, "CLOCK", later):
        take_away(query.store)
        query.store.in_doubt("another")
        assert marks(query.store) == [] and query.store.describe([c])[0].state is None
        query.complete(1, "b")


# -- an old answer of an object store --


def without_data(times=10**6):
    """A proxy says of data that it is not there, so many times."""
    exists, left = Storage.exists, [times]

    def stale(storage, path):
        if "/data/" in path and left[0]:
            left[0] -= 1
            return False
        return exists(storage, path)

    return patch.object(Storage, "exists", stale)


def test_a_batch_whose_data_is_not_seen_is_refused_before_the_decision(bucket):
    _, message = bucket.write(0, "a")
    with without_data(), pytest.raises(Refused, match="before the decision"):
        commit(bucket.driver(), [message], 0)
    bucket.complete(0, "a")
    assert len(bucket.store.committed_files()) == 1


def test_data_that_is_not_seen_after_the_decision_is_looked_for_in_the_listing(bucket):
    c = bucket.decide(0, "a")
    with without_data():
        assert restore(bucket.driver(), 0).mode is Mode.DRAIN
    assert bucket.store.describe([c])[0].state is TxnState.COMMITTED
    lost = bucket.decide(1, "b")
    bucket.store.drop(lost)
    assert bucket.store.commit(lost) is REFUSED, "data that is in no answer is gone"
