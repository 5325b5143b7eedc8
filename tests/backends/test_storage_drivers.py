"""Storage: errors that speak of something else, older drivers."""

import errno
import os
import traceback
from unittest.mock import Mock, patch

import fsspec
import pytest
from failing_driver import FailingDriver
from fsspec.implementations.local import LocalFileSystem
from participant_suite import At, a_plan, precommit_rows, rows
from store_proxy import Answer

from kafka2pc.backends.places import masked
from kafka2pc.backends.storage import Storage
from kafka2pc.decision_logs.files import FileLog
from kafka2pc.decision_logs.opening import open_folder_log, open_log
from kafka2pc.protocol.errors import BadOption, StoreUnreachable
from kafka2pc.protocol.participant import Outcome
from kafka2pc.spark.checkpoint import Checkpoint
from kafka2pc.stores.object_store import ObjectParticipant
from kafka2pc.stores.wal import WalParticipant


class Answered(Exception):
    """An error with an HTTP status, as botocore makes it."""

    def __init__(self, status, code):
        self.response = {"ResponseMetadata": {"HTTPStatusCode": status}, "Error": {"Code": code}}


class Failing(FailingDriver):
    """A driver that raises `error`, if there is one."""

    protocol, store, error = "failing", {}, None

    def fails(self):
        if self.error:
            raise self.error


class OldS3(Failing):
    """The driver of S3 as it was before 2025: `cat_file` knows no `max_concurrency`."""

    protocol = ("olds3", "s3")


@pytest.fixture
def hurry(monkeypatch):
    """A request is asked again at once."""
    monkeypatch.setattr(
        "kafka2pc.backends.storage.wait_random_exponential", lambda **_: lambda state: 0
    )


@pytest.fixture
def failing(monkeypatch, hurry):
    fsspec.register_implementation("failing", Failing, clobber=True)
    fsspec.register_implementation("olds3", OldS3, clobber=True)
    Failing.store.clear()
    storage = Storage("failing://a")
    storage.write("/a/0.0.json", b"1")
    yield lambda error: monkeypatch.setattr(Failing, "error", error)


@pytest.fixture
def s3fs():
    """The driver of S3 without credentials. fsspec would give the same instance to later tests."""
    yield pytest.importorskip("s3fs")
    fsspec.get_filesystem_class("s3").clear_instance_cache()


@pytest.mark.parametrize("status", [404, 412])
def test_an_error_that_the_caller_is_handling_is_no_answer_of_the_store(failing, status):
    """Python chains it to what the driver raises; a lost connection must not be taken for an empty
    folder.
    """
    storage = Storage("failing://a")
    failing(RuntimeError("connection lost"))
    try:
        raise Answered(status, "NoSuchKey")
    except Answered:
        with pytest.raises(StoreUnreachable, match="no clear answer"):
            storage.names("/a")
        with pytest.raises(StoreUnreachable, match="no clear answer"):
            storage.read("/a/0.0.json")
        assert storage.create("/a/1.0.json", b"2") is None


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (OSError(errno.EIO, "Input/output error"), "no clear answer"),
        (OSError(errno.ESTALE, "Stale file handle"), "no clear answer"),
        (PermissionError(errno.EACCES, "Permission denied"), "was refused"),
        (Answered(404, ""), "no clear answer"),  # a proxy before the store
        (Answered(503, "SlowDown"), "no clear answer"),
        (Answered(403, "AccessDenied"), "was refused"),
    ],
)
def test_an_object_that_cannot_be_looked_up_is_not_absent(failing, error, says):
    storage = Storage("failing://a")
    failing(error)
    with pytest.raises(StoreUnreachable, match=says):
        storage.exists("/a/0.0.json")


@pytest.mark.parametrize("error", [FileNotFoundError(), Answered(404, "NoSuchKey")])
def test_an_object_is_absent_if_the_store_says_so(failing, error):
    storage = Storage("failing://a")
    assert storage.exists("/a/0.0.json") and not storage.exists("/a/none")
    failing(error)
    assert not storage.exists("/a/0.0.json")


@pytest.mark.usefixtures("hurry")
def test_a_folder_that_cannot_be_looked_up_hides_no_row_and_no_batch(tmp_path, monkeypatch):
    sent = []
    wal = ObjectParticipant(f"file://{tmp_path}/log", format="json")
    store = WalParticipant(wal, sent.extend)
    cs = [precommit_rows(At(store, list, rows), a_plan(), text) for text in ("a", "b")]
    assert wal.commit(cs[1]) is Outcome.DONE, "a driver died before it sent the rows"
    (tmp_path / "ck" / "commits").mkdir(parents=True)
    (tmp_path / "ck" / "commits" / "0").touch()
    broken = Mock(side_effect=OSError(errno.EIO, "Input/output error"))
    with monkeypatch.context() as away:
        away.setattr(LocalFileSystem, "info", broken)
        assert [store.commit(c) for c in cs] == [Outcome.UNKNOWN] * 2
        with pytest.raises(StoreUnreachable):
            Checkpoint(str(tmp_path / "ck")).committed(0)
    assert sent == []
    assert [store.commit(c) for c in cs] == [Outcome.DONE] * 2
    assert [row["value"] for _, row in sent] == ["a", "b"]


def test_an_older_driver_of_s3_reads(failing):
    assert Storage("olds3://a").read("/a/0.0.json") == b"1"


@pytest.mark.parametrize(
    "error",
    [
        ValueError("Bad Request: b/x/o\ninvalid_grant"),
        TypeError("the driver's own"),
        NotImplementedError(),
    ],
)
def test_an_error_while_reading_is_not_blamed_on_exclusive_creates(failing, error):
    storage = Storage("failing://a")
    failing(error)
    for ask in (lambda: storage.names("/a"), lambda: storage.read("/a/0.0.json")):
        with pytest.raises(StoreUnreachable, match=f"was refused(?s:.*){type(error).__name__}"):
            ask()


def test_a_request_that_gcs_calls_invalid_says_nothing_of_exclusive_creates(failing):
    """Its driver makes a `ValueError` of each such answer, also of one to expired credentials."""
    failing(ValueError("Bad Request: upload/storage/v1/b/x/o\ninvalid_grant"))
    with pytest.raises(StoreUnreachable, match="invalid_grant"):
        Storage("failing://a").create("/a/1.0.json", b"2")


@pytest.mark.usefixtures("s3fs")
def test_a_bucket_that_cannot_be_is_named_as_such():
    with pytest.raises(StoreUnreachable, match="was refused(?s:.*)Invalid bucket name"):
        open_folder_log("s3://My_Bucket!/x")


@pytest.mark.usefixtures("s3fs")
@pytest.mark.parametrize("place", ["s3://KEYID:SECRET@bucket/x", "s3a://KEYID:SE/SECRET@bucket/x"])
def test_credentials_in_the_url_of_a_bucket_are_refused_and_not_shown(place):
    """The driver of S3 takes them for a part of the bucket's name, and says so in its errors."""
    for ask in (lambda: Checkpoint(place).query_id(), lambda: open_folder_log(place)):
        with pytest.raises(BadOption, match=r"\*\*\*@bucket(?s:.*)environment") as e:
            ask()
        assert "SECRET" not in "".join(traceback.format_exception(e.value))


def test_a_signature_in_a_url_is_not_shown():
    place = "abfs://c@account.dfs.core.windows.net/x?sv=2024&sig=SE%2FCRET%3D&se=2027"
    assert masked(place) == place.replace("SE%2FCRET%3D", "***")
    assert masked(f"{place}: its driver") == f"{place}: its driver".replace("SE%2FCRET%3D", "***")


def test_a_folder_that_cannot_be_listed_is_not_empty(tmp_path):
    log, real = FileLog(f"{tmp_path}/log"), os.stat
    os.makedirs(log.folder)

    def stale(path, *args, **more):
        if str(path) == log.folder:
            raise OSError(errno.ESTALE, "Stale file handle")
        return real(path, *args, **more)

    with (
        patch("os.stat", stale),
        patch("os.listdir", stale),
        pytest.raises(StoreUnreachable, match="Stale file handle"),
    ):
        log.slots()
    assert FileLog(f"{tmp_path}/none").slots() == []


@pytest.mark.usefixtures("hurry")
@pytest.mark.parametrize("name", ["s3", "azure"])
def test_a_404_that_is_not_the_stores_is_no_empty_folder(request, name):
    """A proxy before a store answers so while the store is away."""
    server = request.getfixturevalue(name)
    storage = Storage(f"{server.fresh()}/log")
    path = f"{storage.root}/0.0.json"
    storage.create(path, b"1")
    with server.proxy.faults(lambda request: Answer(404, b"404 page not found")):
        for ask in (lambda: storage.names(storage.root), lambda: storage.read(path)):
            with pytest.raises(StoreUnreachable, match="no clear answer"):
                ask()
    assert (storage.names(storage.root), storage.read(path)) == (["0.0.json"], b"1")
    with pytest.raises(FileNotFoundError):
        storage.read(f"{path}.none")
    assert (storage.names(f"{storage.root}/none"), storage.exists(f"{path}.none")) == ([], False)


def test_a_slash_at_the_end_of_a_place_makes_no_other_log():
    """In an object store log//q and log/q are two folders; the command line looks into the second
    one.
    """
    logs = [open_log(place, "q") for place in ("memory://slash/log/", "memory://slash/log")]
    assert logs[0].folder == logs[1].folder and logs[0].place == logs[1].place


def test_a_write_ahead_log_that_gives_no_clear_answer_is_asked_again():
    wal = Mock(
        commit=Mock(return_value=Outcome.DONE),
        rows=Mock(side_effect=StoreUnreachable("no clear answer")),
    )
    assert WalParticipant(wal, lambda items: None).commit(Mock()) is Outcome.UNKNOWN
