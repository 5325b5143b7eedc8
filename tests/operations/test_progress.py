"""What a checkpoint and its log say about the batches of a query."""

import json

import pytest
from dead_query_fixtures import DeadQuery
from shell import typed

import kafka2pc
from kafka2pc.operations.progress import find_progress
from kafka2pc.protocol.errors import BadOption
from kafka2pc.protocol.operators.fence import fence
from kafka2pc.protocol.phases.commit import commit
from kafka2pc.protocol.phases.decide import decide

pytestmark = [pytest.mark.kafka, pytest.mark.never_unsteady]


def test_progress_shows_what_is_done_decided_and_being_written(dead):
    driver, mine = dead.run(), None
    for batch_id in range(3):
        messages = dead.write(driver, batch_id, mine)
        mine = messages[0].plan.token
        if batch_id == 0:
            commit(driver, messages, 0)
            (dead.place / "commits" / "0").write_text("v1")
        if batch_id == 1:
            decide(driver, messages[0].plan, messages)
    seen = kafka2pc.progress(str(dead.place)).set_index("batch_id")
    assert (
        list(seen.state) == ["done", "decided", "writing"]
        and list(seen.rows) == [4, 4, 0]
        and list(seen.transactions) == [2, 2, 0]
    )
    assert (
        list(seen.took_ms.notna()) == [True, False, False]
        and set(seen.run[:2]) == {str(mine)}
        and list(seen.attempt[:2]) == [1, 0]
    )
    listed = json.loads(
        typed(dead.access.command("progress", str(dead.place), "--last", "2", "--json"))[0]
    )
    assert [(p["batch_id"], p["state"], p["rows"]) for p in listed] == [
        (1, "decided", 4),
        (2, "writing", 0),
    ]
    assert "done" in typed(dead.access.command("progress", str(dead.place)))[0]
    limit = driver.participants["kafka"].timeout_ms
    assert list(seen.timeout_ms[:2]) == [limit] * 2 and all(
        0 < left <= limit for left in seen.left_ms[:2]
    )
    assert all(0 <= used < 0.5 for used in seen.used[:2])
    assert seen[["timeout_ms", "left_ms", "used"]].loc[2].isna().all()
    assert json.loads(
        typed(dead.access.command("restore", str(dead.place), "--dry-run", "--json"))[0]
    ), "and it can still be finished"


def test_progress_without_a_timeout_and_of_a_batch_write_and_of_nothing(kafka, tmp_path):
    endless = DeadQuery(kafka, tmp_path, two_phase="required").leave(decided=True)
    seen = kafka2pc.progress(str(endless.place))
    assert list(seen.rows) == [4] and seen[["timeout_ms", "left_ms", "used", "took_ms"]].isna().all(
        axis=None
    )
    log = tmp_path / "log" / endless.id
    (endless.place / "kafka2pc").rename((log.parent.mkdir(), log)[1])
    assert list(kafka2pc.progress(str(log)).state) == ["decided"]
    assert kafka2pc.progress(str(endless.place), last=5).state.tolist() == ["writing"]
    (endless.place / "commits" / "0").write_text("v1")  # as by Spark's own sink
    assert kafka2pc.progress(str(endless.place))[["rows", "transactions"]].isna().all(axis=None)
    with pytest.raises(BadOption):
        kafka2pc.progress(str(tmp_path / "nowhere"))


def test_a_write_that_is_finished_is_done(dead):
    driver = dead.leave(decided=True).run()
    fence(driver)
    (dead.place / "offsets" / "7").write_text("v1")
    (dead.place / "commits" / "7").write_text("v1")  # by Spark's own sink
    assert [(p.batch_id, p.state) for p in find_progress(dead.query) if p.batch_id in (0, 7)] == [
        (0, "done"),
        (7, "done"),
    ]
