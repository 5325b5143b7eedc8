"""The checks of every participant, run on each store; and what only one of them can break."""

import json
import os
import pickle
import time
import uuid
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import fsspec
import pyarrow as pa
import pyarrow.dataset as ds
import pytest
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem
from key_value import wal
from participant_suite import (
    DONE,
    DURABLE,
    REFUSED,
    REQUIRED,
    SMOKE,
    SMOKE_REQUIRED,
    UNKNOWN,
    At,
    a_commit_of_which_the_store_has_no_note_is_done,
    a_plan,
    another_store_at_the_same_place_is_refused_before_anything_is_written,
    another_store_at_the_same_place_reports_no_loss,
    in_another_process,
    in_doubt_lists_what_is_open_under_any_prefix_of_the_query,
    killed_after,
    precommit_rows,
    rows,
    two_processes_that_draw_one_name_do_not_share_a_transaction,
)

from kafka2pc.backends import storage
from kafka2pc.backends.storage import Storage
from kafka2pc.kafka.participant import KafkaParticipant
from kafka2pc.protocol import clock, participant
from kafka2pc.protocol.clock import Moment, age_ms, this_moment
from kafka2pc.protocol.driver import Driver, Policy
from kafka2pc.protocol.errors import BadOption, OutcomeUnknown, StoreUnreachable
from kafka2pc.protocol.log.slots import MemoryLog
from kafka2pc.protocol.memory import MemoryParticipant
from kafka2pc.protocol.messages import Mode
from kafka2pc.protocol.participant import (
    Brief,
    ChecksColumns,
    EndsMany,
    Identified,
    KeepsAborted,
    KeepsId,
    MayHide,
    MayRemove,
    OpensGate,
    Recalls,
    Shared,
    StoreIdentity,
    store_identity,
)
from kafka2pc.protocol.phases.commit import commit
from kafka2pc.protocol.phases.precommit import precommit
from kafka2pc.protocol.phases.restore import restore
from kafka2pc.protocol.policies import retry_unknown
from kafka2pc.protocol.states import TxnState
from kafka2pc.stores import object_store
from kafka2pc.stores.file import FileParticipant
from kafka2pc.stores.object_store import ObjectParticipant
from kafka2pc.stores.shaped import Shaped
from kafka2pc.stores.wal import WalParticipant

pytestmark = pytest.mark.never_unsteady


def checks(*of):
    return pytest.mark.parametrize("check", of, ids=lambda check: check.__name__)


@checks(*REQUIRED)
def test_memory_keeps(check):
    store = MemoryParticipant()
    check(At(store, store.read))


@checks(*SMOKE_REQUIRED)
def test_a_shaped_store_keeps(check):
    store = MemoryParticipant()
    check(At(Shaped(store, lambda batch: batch["value"].to_pylist()), store.read, rows))


@checks(*SMOKE)
def test_a_shaped_folder_keeps(check, tmp_path):
    at = folder(tmp_path / "out")
    check(At(Shaped(at.store, lambda batch: batch), at.seen, rows))


# -- time on one machine --


def test_the_age_of_a_moment_is_what_has_passed():
    moment = pickle.loads(pickle.dumps(this_moment()))
    time.sleep(0.05)
    assert 50 <= age_ms(moment) < 5_000


def test_of_another_boot_or_a_moment_to_come_the_age_is_unknown():
    now = this_moment()
    assert now.boot, "the tests run on Linux"
    assert [
        age_ms(m)
        for m in (
            None,
            Moment("", now.ms),
            Moment("another", now.ms),
            Moment(now.boot, now.ms + 60_000),
        )
    ] == [None] * 4


@pytest.mark.parametrize("lacking", ["boot id", "clock"])
def test_a_system_without_boot_id_or_clock_has_moments_too(monkeypatch, lacking):
    if lacking == "boot id":
        monkeypatch.setattr(clock, "Path", lambda path: Path("/no/such/file"))
    else:
        monkeypatch.setattr(clock, "time", SimpleNamespace(monotonic=lambda: 12.345))
        assert this_moment().ms == 12_345
    then, now = this_moment(), this_moment()
    assert then.boot == now.boot != "", "one process, or one network card, is one machine"
    assert age_ms(then, now) == now.ms - then.ms


# -- files --

FORMATS = ("parquet", "json")


def folder(path, format="parquet"):
    """A folder, and Arrow's own reader of it."""
    path.mkdir(exist_ok=True)
    read = lambda: (
        ds.dataset(str(path), pa.schema({"value": pa.string()}), format=format)
        .to_table()["value"]
        .to_pylist()
    )
    store = FileParticipant(path, format=format)

    def another():
        """The folder is a link or a mount that shows an empty one."""
        os.rename(path, f"{path}.former")
        os.makedirs(path)
        return FileParticipant(path, format=format)

    publish = lambda c: os.rename(store.path(c, "ready"), store.path(c))
    return At(store, read, rows, another=another, half_commit=publish)


@checks(*REQUIRED, *DURABLE)
def test_a_folder_keeps(check, tmp_path):
    check(folder(tmp_path / "out"))


@checks(*SMOKE)
def test_a_folder_of_json_keeps(check, tmp_path):
    check(folder(tmp_path / "out", "json"))


def bucket(url):
    """An object store, and a reader of its manifest."""
    store = ObjectParticipant(url, format="json")

    def another():
        """The bucket of another server, or a link that shows an empty folder."""
        store.fs.mv(store.root, f"{store.root}.former", recursive=True)
        return ObjectParticipant(url, format="json")

    return At(
        store,
        lambda: [
            json.loads(line)["value"]
            for p in store.committed_files()
            for line in store.fs.cat_file(p).splitlines()
        ],
        rows,
        another=another,
        half_commit=lambda c: store.storage.write(store.path(c, "manifest"), b"committed"),
    )


@checks(*SMOKE_REQUIRED)
def test_an_object_store_in_memory_keeps(check, request):
    check(bucket(f"memory://{request.node.name}"))


OF_ANOTHER_STORE = (
    another_store_at_the_same_place_is_refused_before_anything_is_written,
    another_store_at_the_same_place_reports_no_loss,
    a_commit_of_which_the_store_has_no_note_is_done,
)


# the whole: on S3 (tests/decision_logs), and in the lesson stores/03_object_store
@checks(*SMOKE, *OF_ANOTHER_STORE, two_processes_that_draw_one_name_do_not_share_a_transaction)
def test_an_object_store_keeps(check, tmp_path):
    check(bucket(f"file://{tmp_path}/bucket"))


def test_every_kind_of_column_comes_back(tmp_path):
    batch = pa.RecordBatch.from_pydict(
        {
            "n": pa.array([1, None]),
            "t": ['späte "1"\n', ""],
            "b": [b"\x00\xff", None],
            "l": [[1, 2], None],
            "w": pa.array([0, None], pa.timestamp("us", "UTC")),
        }
    )
    for format in FORMATS:
        store = FileParticipant(tmp_path / format, format=format)
        with store.begin(a_plan()) as txn:
            txn.write(batch)
            txn.write(batch)
            c = txn.precommit()
        assert (store.commit(c), c.records) == (DONE, 4)
        with open(store.path(c)) if format == "json" else open(os.devnull) as lines:
            found = (
                ds.dataset(store.where, format=format).to_table().to_pylist()
                if format == "parquet"
                else [json.loads(line) for line in lines]
            )
        assert (
            found[0] | {"b": 0, "w": 0} == batch.to_pylist()[0] | {"b": 0, "w": 0}
            and len(found) == 4
        )
    assert (found[0]["b"], found[1]["b"], found[0]["w"]) == (
        "AP8=",
        None,
        "1970-01-01 00:00:00+00:00",
    )


def test_a_disk_that_refuses_is_unknown_and_asked_again(tmp_path, monkeypatch):
    at = folder(tmp_path / "out")
    c = precommit_rows(at, a_plan(), "a")
    for call in ("rename", "unlink"):
        with monkeypatch.context() as broken:
            broken.setattr(
                os, call, lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device"))
            )
            assert {"rename": at.store.commit, "unlink": at.store.abort}[call](c) is UNKNOWN
    assert at.store.commit(c) is DONE and at.seen() == ["a"]


def test_a_commit_that_died_before_it_tidied_up_is_no_doubt(tmp_path, monkeypatch):
    at = bucket(f"file://{tmp_path}/bucket")
    plan = a_plan()
    c = precommit_rows(at, plan, "a")
    with monkeypatch.context() as broken, pytest.raises(KeyboardInterrupt):
        broken.setattr(
            at.store.storage, "remove", lambda path: (_ for _ in ()).throw(KeyboardInterrupt)
        )
        at.store.commit(c)
    assert at.store.in_doubt(plan.query_id) == [] and at.seen() == ["a"]
    assert (at.store.abort(c), at.store.commit(c)) == (REFUSED, DONE)


def test_what_a_late_put_leaves_is_removed(tmp_path):
    at = bucket(f"file://{tmp_path}/bucket")
    plan = a_plan()
    late = at.store.begin(plan)
    at.write(late, "late")
    [c] = at.store.in_doubt(plan.query_id)
    assert at.store.abort(c) is DONE
    with pytest.raises(Exception, match="was aborted"):
        late.precommit()
    assert at.store.fs.find(f"{at.store.root}/data") == []


def test_who_looked_before_the_other_wrote_learns_that_the_other_was_first(tmp_path):
    at = bucket(f"file://{tmp_path}/bucket")
    c = precommit_rows(at, a_plan(), "a")
    assert at.store.commit(c) is DONE
    with (
        patch.object(at.store, "outcome", lambda c: None),
        patch.object(Storage, "exists", lambda *a: False),
    ):
        assert at.store.abort(c) is REFUSED
    assert at.seen() == ["a"] and sorted(p.name for p in (tmp_path / "bucket").iterdir()) == [
        ".kafka2pc",
        "data",
        "manifest",
        "open",
    ]


def test_rows_are_on_the_disk_before_the_vote(tmp_path, monkeypatch):
    at, did = bucket(f"file://{tmp_path}/bucket"), []
    sync, outcome = object_store.sync, at.store.outcome
    with at.store.begin(a_plan()) as txn:
        at.write(txn, "a")
        data = at.store.path(txn.c, "data")
        monkeypatch.setattr(
            object_store,
            "sync",
            lambda path: (did.append((path, os.path.exists(data))), sync(path)),
        )
        monkeypatch.setattr(at.store, "outcome", lambda c: (did.append("looked"), outcome(c))[1])
        txn.precommit()
    assert did == [(data, True), (os.path.dirname(data), True), "looked"]


class Remembering(LocalFileSystem):
    """Answers `info` from what it has seen in a folder before, as s3fs does."""

    def info(self, path, **more):
        folder = os.path.dirname(path)
        self.seen = getattr(self, "seen", {})
        if os.path.basename(path) in self.seen.setdefault(folder, set(os.listdir(folder))):
            return {"name": path, "size": os.path.getsize(path), "type": "file"}
        raise FileNotFoundError(path)

    def invalidate_cache(self, path=None):
        self.seen = {}


def test_what_a_file_system_remembers_of_a_folder_is_not_believed(tmp_path):
    at = bucket(f"file://{tmp_path}/bucket")

    def late():
        with at.store.begin(a_plan()) as txn:
            # from now on it remembers this answer
            assert not at.store.fs.exists(at.store.path(txn.c, "data"))
            at.write(txn, "a")
            c = txn.precommit()
        assert not at.store.fs.exists(at.store.path(c, "data"))
        return c

    kind = type(at.store.fs)
    with (
        patch.object(kind, "info", Remembering.info),
        patch.object(kind, "invalidate_cache", Remembering.invalidate_cache),
    ):
        assert at.store.describe([late()])[0].state is TxnState.PRECOMMITTED
        assert list(at.store.rows(late())) == [{"value": "a"}]
        assert at.store.commit(late()) is DONE


def test_names_with_an_empty_prefix_or_one_of_two_lines_are_found_again(tmp_path):
    for n, prefix in enumerate(("", "two\nlines")):
        plan, store = a_plan(), FileParticipant(tmp_path / str(n), prefix=prefix)
        c = precommit_rows(At(store, list, rows), plan, "a")
        assert [left.transactional_id for left in store.in_doubt(plan.query_id)] == [
            c.transactional_id
        ] and store.commit(c) is DONE


def test_bad_options_of_files_are_named(tmp_path):
    for kind, where in ((FileParticipant, tmp_path), (ObjectParticipant, "memory://bad")):
        with pytest.raises(BadOption, match="format csv"):
            kind(where, format="csv")
        with pytest.raises(BadOption, match="prefix a/b"):
            kind(where, prefix="a/b")
        for hidden in ("_orders", ".orders"):
            with pytest.raises(BadOption, match=f"prefix {hidden}: readers skip"):
                kind(where, prefix=hidden)


class Guarded(MemoryFileSystem):
    """An object store behind a user and a password, which its URL names."""

    protocol, store, pseudo_dirs = "guarded", {}, [""]

    @classmethod
    def _strip_protocol(cls, path):
        return "/" + path.removeprefix("guarded://").rpartition("@")[2].strip("/")


def test_the_password_in_a_url_of_an_object_store_is_nowhere_to_be_seen():
    fsspec.register_implementation("guarded", Guarded, clobber=True)
    store = ObjectParticipant("guarded://bob:hunter2@host/bucket")
    c = precommit_rows(At(store, list, rows), a_plan(), "a")
    assert "hunter2" not in store.store_id() + repr(store) + repr(c) + repr(store.in_doubt("q"))
    assert store.store_id().startswith("guarded://bob@host/bucket (id ")
    assert store.commit(c) is DONE
    with (
        patch.object(storage.Storage, "create", lambda storage, path, content: True),
        patch.object(storage, "_CHECKED", {}),
        pytest.raises(BadOption, match=r"bob:\*\*\*@host") as e,
    ):
        ObjectParticipant("guarded://bob:hunter2@host/bucket")
    assert "hunter2" not in str(e.value)


def test_a_foreign_file_is_not_in_doubt_even_if_it_begins_like_ours(tmp_path):
    at, plan = folder(tmp_path / "out"), a_plan()
    precommit_rows(at, plan, "a")
    (tmp_path / "out" / ".kafka2pc" / f"kafka2pc-{plan.query_id}-by-hand.0.parquet.ready").touch()
    assert len(at.store.in_doubt(plan.query_id)) == 1


# -- a log before a store without transactions --


@checks(*SMOKE)  # the whole: in the lesson stores/07_wal
def test_a_log_before_a_store_keeps(check, tmp_path):
    check(wal(tmp_path))


def test_a_log_before_a_store_is_found_under_each_prefix(tmp_path):
    log = ObjectParticipant(f"file://{tmp_path}/log", prefix="former", name="kv", format="json")
    sent = []
    at = At(WalParticipant(log, sent.extend, chunk=2), list, rows)
    assert store_identity(at.store) == store_identity(log) == StoreIdentity("former")
    assert at.store.differs("another place") == log.where
    in_doubt_lists_what_is_open_under_any_prefix_of_the_query(at)
    plan = a_plan()
    c = precommit_rows(at, plan, "a", "b", "c")
    new = at.store.under("new")
    assert new.chunk == 2
    [left] = new.in_doubt(plan.query_id)
    assert left.transactional_id == c.transactional_id
    assert new.commit(c) is DONE and len(sent) == 3


def test_another_process_finishes_the_replay_of_a_killed_one(tmp_path):
    plan = a_plan()
    c = killed_after(wal(tmp_path, dies_at="c"), plan, "commit", "a", "b", "c", "d")
    at = wal(tmp_path)
    assert at.seen() == ["a", "b"] and at.store.in_doubt(plan.query_id) == []
    assert in_another_process(at, "abort", c) is REFUSED
    assert in_another_process(at, "commit", c) is DONE and at.seen() == ["a", "b", "c", "d"]


def test_a_store_that_is_away_is_asked_again_and_a_bug_goes_up(tmp_path):
    c = precommit_rows(wal(tmp_path), a_plan(), "a", "b")
    assert wal(tmp_path, dies_at="b", error=ConnectionError()).store.commit(c) is UNKNOWN
    with pytest.raises(ZeroDivisionError):
        wal(tmp_path, dies_at="b", error=ZeroDivisionError()).store.commit(c)
    at = wal(tmp_path)
    assert at.store.commit(c) is DONE and at.seen() == ["a", "b"]
    assert at.store.wal.fs.find(f"{at.store.wal.root}/data") == []
    # there is nothing to replay
    assert wal(tmp_path, dies_at="a", error=ConnectionError()).store.commit(c) is DONE


def test_a_log_that_still_holds_rows_is_not_committed(tmp_path):
    c = precommit_rows(wal(tmp_path), a_plan(), "a", "b", "c")
    at = wal(tmp_path, dies_at="c", error=ConnectionError())
    assert at.store.commit(c) is UNKNOWN and at.seen() == ["a", "b"]
    [found] = at.store.describe([c])
    assert found.state is TxnState.PRECOMMITTED, "the target has not received all rows"
    assert at.store.wal.describe([c])[0].state is TxnState.COMMITTED
    at = wal(tmp_path)
    assert at.store.commit(c) is DONE
    assert at.store.describe([c])[0].state is TxnState.COMMITTED


@pytest.mark.parametrize(
    ("error", "answer"), [(FileNotFoundError(), TxnState.COMMITTED), (OSError(5, "EIO"), None)]
)
def test_a_log_that_cannot_be_read_leaves_the_state_unknown(tmp_path, error, answer):
    at = wal(tmp_path, dies_at="a", error=ConnectionError())
    c = precommit_rows(at, a_plan(), "a")
    assert at.store.commit(c) is UNKNOWN
    with patch.object(at.store.wal, "rows", side_effect=error):
        if answer:
            assert at.store.describe([c])[0].state is answer
        else:
            with pytest.raises(StoreUnreachable, match="EIO"):
                at.store.describe([c])


def test_a_target_that_is_away_stops_the_query_until_it_has_the_rows(tmp_path):
    """Retries come to an end; then the batch is decided and not complete."""
    query, log = str(uuid.uuid4()), MemoryLog()

    def a_run(**trouble):
        at = wal(tmp_path, **trouble)
        policy = Policy(retry=lambda: retry_unknown(3, first_ms=1, longest_ms=2))
        return at, Driver(query_id=query, log=log, participants={"kv": at.store}, policy=policy)

    at, driver = a_run(dies_at="b", error=ConnectionError())
    plan = restore(driver, 0)
    messages = [precommit([at.store], plan, [rows(["a", "b", "c"])])]
    with pytest.raises(OutcomeUnknown):
        commit(driver, messages, 0)
    _, still_away = a_run(dies_at="b", error=ConnectionError())
    with pytest.raises(OutcomeUnknown):
        restore(still_away, 0)
    at, driver = a_run()
    assert restore(driver, 0).mode is Mode.DRAIN and at.seen() == ["a", "b", "c"]
    _, driver = a_run(dies_at="a", error=ZeroDivisionError())
    assert restore(driver, 0).mode is Mode.DRAIN, "nothing is sent again"
    assert at.seen() == ["a", "b", "c"]


@pytest.mark.parametrize(
    "ability",
    [
        EndsMany,
        Identified,
        KeepsAborted,
        KeepsId,
        Shared,
        Brief,
        MayRemove,
        MayHide,
        OpensGate,
        Recalls,
    ],
    ids=lambda a: a.__name__,
)
def test_a_shaped_participant_keeps_every_ability_of_its_store(ability):
    kafka = KafkaParticipant({"bootstrap.servers": "nowhere:1"})
    store = FileParticipant("/nowhere") if ability is KeepsId else kafka
    assert isinstance(store, ability)
    assert isinstance(Shaped(store, lambda batch: batch), ability)


def test_a_shaped_participant_has_no_gate_if_its_store_has_none():
    assert not isinstance(Shaped(FileParticipant("/nowhere"), lambda batch: batch), OpensGate)


def test_the_columns_of_a_shaped_participant_are_not_those_of_the_rows():
    store = FileParticipant("/nowhere", columns=("id",))
    assert isinstance(store, ChecksColumns)
    assert not isinstance(Shaped(store, lambda batch: batch), ChecksColumns)


def test_the_abilities_are_all_that_the_protocol_has():
    optional = {
        value
        for value in vars(participant).values()
        if getattr(value, "_is_runtime_protocol", False)
        and value.__module__ == participant.__name__
    }
    assert optional == {
        EndsMany,
        Identified,
        KeepsAborted,
        KeepsId,
        Shared,
        Brief,
        MayRemove,
        MayHide,
        OpensGate,
        Recalls,
        ChecksColumns,
    }
