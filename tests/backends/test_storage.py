"""Storage: drivers that fail in their own ways, stores that cannot hold decisions, and checkpoints
that Python cannot see.
"""

from unittest.mock import patch

import fsspec
import pytest
from failing_driver import FailingDriver
from fsspec.implementations.memory import MemoryFileSystem

from kafka2pc.backends import storage
from kafka2pc.backends.storage import Storage
from kafka2pc.decision_logs.opening import open_folder_log
from kafka2pc.protocol.errors import BadOption, StoreUnreachable
from kafka2pc.protocol.kept import Kept
from kafka2pc.spark.checkpoint import Checkpoint
from kafka2pc.spark.sink import opening as driver


class Moody(FailingDriver):
    """A driver with errors of its own kind. `left`: how many calls still fail."""

    protocol, store, left, calls = "moody", {}, 0, 0

    def fails(self):
        type(self).calls += 1
        if self.left:
            type(self).left -= 1
            raise RuntimeError("the driver's own error")


@pytest.fixture
def moody(monkeypatch):
    monkeypatch.setattr(storage, "wait_random_exponential", lambda **_: lambda state: 0)
    fsspec.register_implementation("moody", Moody, clobber=True)
    Moody.store.clear()
    Moody.left = 0
    return Storage("moody://a")


def test_an_error_that_is_no_oserror_is_asked_again(moody):
    for call in (
        lambda: moody.write("/a/x", b"1"),
        lambda: moody.read("/a/x"),
        lambda: moody.names("/a"),
    ):
        Moody.left = 3
        call()
    assert (moody.read("/a/x"), moody.names("/a")) == (b"1", ["x"])


def test_a_lasting_error_is_raised_with_its_cause_and_never_returned_as_an_empty_folder(moody):
    Moody.left, Moody.calls = 99, 0
    with pytest.raises(
        StoreUnreachable,
        match="no clear answer about /a(?s:.*)RuntimeError: the driver's own error",
    ):
        moody.names("/a")
    assert Moody.calls == 10
    assert moody.create("/a/y", b"1") is None, "it may have been written"
    Moody.left = 0


def test_the_check_for_an_exclusive_create_is_made_once_in_a_process(moody):
    with patch.object(storage, "_CHECKED", {}):
        open_folder_log("moody://bucket/one")
        Moody.calls = 0
        open_folder_log("moody://bucket/two")
        assert Moody.calls == 0
        open_folder_log("moody://other/one")
        assert Moody.calls > 0


@pytest.mark.parametrize("place", ["hdfs://namenode/checkpoints/kafka2pc", "webhdfs://namenode/x"])
def test_a_store_without_an_exclusive_create_is_refused_before_it_is_asked(place):
    with pytest.raises(BadOption, match="no exclusive create") as e:
        open_folder_log(place)
    assert (
        "decisionLog to kafka:TOPIC" in e.value.action
        and "the checkpoint can stay" in e.value.action
    )


def test_a_checkpoint_that_only_spark_sees_is_named_with_the_cause(tmp_path):
    """Spark on a cluster reads a path without a scheme in HDFS."""
    for ask in (
        Checkpoint(f"{tmp_path}/orders").query_id,
        Checkpoint(f"{tmp_path}/orders").newest_batch,
    ):
        with pytest.raises(BadOption, match=r"fs\.defaultFS") as e:
            ask()
        assert f"{tmp_path}/orders" in e.value.what and "hdfs://host/path" in e.value.action
    with pytest.raises(BadOption, match="Python finds no checkpoint") as e:
        Checkpoint(f"file://{tmp_path}/orders").query_id()
    assert "fs.defaultFS" not in str(e.value)


def test_a_driver_that_cannot_be_opened_is_named(tmp_path, monkeypatch):
    class NeedsMore(MemoryFileSystem):
        protocol = "needsmore"

        def __init__(self, **more):
            raise ValueError("Must provide either a connection_string or account_name")

    fsspec.register_implementation("needsmore", NeedsMore, clobber=True)
    with pytest.raises(BadOption, match="its driver cannot be opened(?s:.*)connection_string"):
        Checkpoint("needsmore://container/orders")


def test_the_log_inside_a_checkpoint_is_opened_once_in_a_process(tmp_path):
    with (
        patch.object(driver._open_inside, "kept", Kept()),
        patch.object(driver, "open_folder_log", side_effect=open_folder_log) as opened,
    ):
        logs = [driver.log_in(Checkpoint(f"{tmp_path}/{name}")) for name in ("a", "a", "b")]
    assert logs[0] is logs[1] is not logs[2] and opened.call_count == 2
