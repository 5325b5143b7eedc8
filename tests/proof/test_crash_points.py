"""An order to crash: which event it is for, and that it is carried out once."""

import json

import pytest

from kafka2pc.proof.crash_points import Crash, CrashPoint, CrashWatcher, arm, read_order
from kafka2pc.protocol.history import Event, History


def report(path):
    return Event(**json.loads((path / "crash.done").read_text()))


@pytest.fixture
def history(tmp_path):
    return History(watcher=CrashWatcher(tmp_path / "crash"))


def test_an_order_is_for_the_event_that_it_names(history, tmp_path):
    order = Crash(
        point=CrashPoint.AFTER_FLUSH, batch_id=3, participant="kafka", pid=None, wait=False
    )
    arm(tmp_path / "crash", order)
    assert read_order(tmp_path / "crash") == order
    for other in ({"batch_id": 2}, {"batch_id": 3, "participant": "files"}, {}):
        history.append("ok", "flush", **other)
    history.append("invoke", "flush", batch_id=3, participant="kafka")
    assert read_order(tmp_path / "crash") == order
    event = history.append("ok", "flush", batch_id=3, participant="kafka")
    assert report(tmp_path) == event
    assert read_order(tmp_path / "crash") is None


def test_an_order_is_carried_out_once(history, tmp_path):
    arm(tmp_path / "crash", Crash(point=CrashPoint.AFTER_FLUSH, pid=None, wait=False))
    first = history.append("ok", "flush", batch_id=1)
    history.append("ok", "flush", batch_id=2)
    assert report(tmp_path) == first


def test_a_process_that_reads_the_order_while_another_takes_it_reads_all_of_it(tmp_path):
    history = History(str(tmp_path / "history"), CrashWatcher(tmp_path / "crash"))
    arm(tmp_path / "crash", Crash(point=CrashPoint.BEFORE_DECISION, pid=None, wait=False))
    with open(tmp_path / "crash") as open_before:
        event = history.append("invoke", "decide", batch_id=3)
        assert json.load(open_before)["point"] == "BEFORE_DECISION"
    assert report(tmp_path) == event
    assert {file.name for file in tmp_path.iterdir()} == {"history", "crash.done"}
