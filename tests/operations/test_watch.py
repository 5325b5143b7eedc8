"""`kafka2pc restore --watch` beside a query, on a real broker: what is decided is committed while
the driver is away, and nothing else changes.
"""

import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from dead_query_fixtures import ROWS, DeadQuery
from shell import typed

from kafka2pc.decision_logs.opening import open_log
from kafka2pc.operations import watch as watch_module
from kafka2pc.operations.query import open_query
from kafka2pc.operations.repair import operate
from kafka2pc.operations.watch import Watcher
from kafka2pc.proof.child_process import until
from kafka2pc.proof.dead_query import remove_first, run_tasks
from kafka2pc.protocol.clock import CLOCK
from kafka2pc.protocol.errors import BrokerUnreachable, TwoPhaseError
from kafka2pc.protocol.memory import MemoryParticipant
from kafka2pc.protocol.messages import Mode
from kafka2pc.protocol.operators.watch import finish_decided, unfinished
from kafka2pc.protocol.phases.commit import commit
from kafka2pc.protocol.phases.decide import decide
from kafka2pc.protocol.phases.finish import finish
from kafka2pc.protocol.phases.restore import restore
from kafka2pc.protocol.policies import retry_unknown

pytestmark = [pytest.mark.kafka, pytest.mark.never_unsteady]
ROOT = Path(__file__).resolve().parents[2]
SHORT_MS = 6_000  # transactions end by themselves soon after that
COMMAND = "from kafka2pc.operations.cli.main import main; main()"


def once(dead, *more):
    words = ["restore", "--watch", "--once", "--after", "0", str(dead.place), *more]
    return typed(dead.access.command(*words))


def kinds(dead, batch_id=0):
    return [d.kind for d in dead.log.chain(batch_id)]


@pytest.fixture
def watching(tmp_path):
    """Starts `kafka2pc restore --watch` as a process of its own."""
    started = []

    def start(dead, *more):
        words = ["--every", "0.5", "--after", "1", "--alive", str(tmp_path / "alive"), *more]
        line = [sys.executable, "-c", COMMAND, "restore", "--watch", str(dead.place), *words]
        line += ["--bootstrap-servers", dead.kafka.bootstrap_servers]
        out = (tmp_path / "watch.log").open("w")
        env = os.environ | {"PYTHONPATH": str(ROOT)}
        started.append(subprocess.Popen(line, stdout=out, stderr=out, env=env))
        until(lambda: (tmp_path / "alive").exists(), "the watcher looks", 60)
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()


# -- an outage that is longer than the timeout --


@pytest.mark.parametrize("watched", [True, False])
def test_an_outage_longer_than_the_timeout_aborts_nothing_if_it_is_watched(
    watched, kafka, tmp_path, watching
):
    """A driver dies at its decision. Its query starts again when the timeout is over."""
    dead = DeadQuery(kafka, tmp_path, timeout_ms=SHORT_MS)
    if watched:
        process = watching(dead)
    dead.leave(decided=True)
    decided_at = time.monotonic()
    until(lambda: dead.open() == [], "they are committed, or time out", 60)
    took_s = time.monotonic() - decided_at
    assert (took_s < SHORT_MS / 1000) == watched
    assert dead.seen() == (ROWS if watched else [])
    time.sleep(max(0, SHORT_MS / 1000 + 2 - took_s))

    plan = restore(dead.run(), 0)
    assert plan.mode is Mode.DRAIN and dead.seen() == ROWS
    assert kinds(dead) == ["ABORT", "COMMIT"] + ["CLAIM", "REPAIR"] * (not watched)
    if watched:
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
        said = (tmp_path / "watch.log").read_text()
        assert said == f"batch 0: committed 2 transactions (4 records in {dead.topic})\n"


# -- beside a query that lives --


def watch_always(dead, over, found):
    """Look without a pause, and without a grace period, until `over`."""
    query = open_query(dead.checkpoint)
    with operate(dead.conf, query, dead.prefix) as driver:
        while not over.is_set():
            try:
                decided = unfinished(driver)
                found.append(finish_decided(driver, decided) if decided else None)
            except TwoPhaseError as e:
                found.append(e)


def test_fifty_batches_of_a_living_query_are_not_disturbed(dead):
    (dead.place / "commits").mkdir(exist_ok=True)
    found, over = [], threading.Event()
    watchers = [threading.Thread(target=watch_always, args=(dead, over, found)) for _ in range(2)]
    dice = random.Random(7)
    # as in the sink: Kafka answers "not yet" while it writes down the commit of another process
    policy = dict(retry=retry_unknown, retry_commit=partial(retry_unknown, 20))
    driver, mine = dead.run().within(**policy), None
    for watcher in watchers:
        watcher.start()
    try:
        for batch_id in range(50):
            messages = dead.write(driver, batch_id, mine)
            mine = messages[0].plan.token
            time.sleep(dice.choice((0, 0.01, 0.05)))
            commit(driver, messages, batch_id)
            time.sleep(dice.choice((0, 0.01, 0.1)))
            (dead.place / "commits" / str(batch_id)).write_text("v1")
    finally:
        over.set()
        for watcher in watchers:
            watcher.join()
    assert [each for each in found if isinstance(each, TwoPhaseError)] == []
    assert [kinds(dead, n) for n in range(50)] == [["ABORT", "COMMIT"], *[["COMMIT"]] * 49]
    assert dead.seen() == sorted(f"{n}{v}" for n in range(50) for v in "abcd")
    assert dead.open() == []
    looked = [each for each in found if each]
    assert [each for each in looked if each.aborted or each.gone] == []
    assert len([each for each in looked if each.committed]) > 5 < len(looked), "both commit"


# -- one look --


def test_one_look_says_by_its_status_what_a_start_has_to_do(dead):
    assert once(dead) == ("", 0)
    messages = dead.write(dead.run())
    assert once(dead) == ("", 0) and len(dead.open()) == 2, "what is not decided is not touched"
    driver = dead.run()
    restore(driver, 0)
    assert messages and once(dead) == ("", 0)
    dead.leave(decided=True)
    before = [d for n in dead.log.batches() for d in dead.log.chain(n)]
    said, status = once(dead)
    assert (said, status) == (
        f"batch 0: committed 2 transactions (4 records in {dead.topic})\n",
        0,
    )
    assert dead.seen() == ROWS
    assert once(dead) == ("", 0)
    assert [d for n in dead.log.batches() for d in dead.log.chain(n)] == before


def test_what_was_aborted_is_only_reported(dead):
    dead.leave(decided=True)
    dead.abort_all()
    said, status = once(dead)
    assert status == 3 and "2 transactions (4 records" in said and "aborted after the dec" in said
    assert kinds(dead) == ["ABORT", "COMMIT"] and dead.seen() == []


def test_rows_that_are_gone_are_not_committed(kafka, dead):
    dead.leave(decided=True)
    remove_first(kafka, dead.topic)
    said, status = once(dead)
    assert status == 4 and "not committed, rows are missing" in said
    assert kinds(dead) == ["ABORT", "COMMIT"] and len(dead.open()) >= 1


def test_a_gate_is_left_to_the_next_start(kafka, tmp_path):
    dead = DeadQuery(kafka, tmp_path, gate=True).leave(decided=True)
    said, status = once(dead)
    assert status == 0 and "its gate hides it until the next start" in said
    assert len(dead.open()) == 1 and dead.seen(still_open=True) == []
    assert restore(dead.run(), 0).mode is Mode.DRAIN
    assert dead.seen() == ROWS and dead.open() == []


def test_a_checkpoint_that_was_moved_ends_it(dead, tmp_path):
    dead.leave(decided=True)
    copy = shutil.copytree(dead.place, tmp_path / "copy")
    said, status = typed(dead.access.command("restore", "--watch", "--once", str(copy)))
    assert status == 1 and "KAFKA2PC.MOVED_LOG" in said and len(dead.open()) == 2


@pytest.mark.parametrize("words", ["--dry-run", "--skip-lost", "--json"])
def test_options_that_have_no_effect_are_refused(words, dead):
    said, status = once(dead, words)
    assert status == 2 and "--watch" in said
    said, status = typed(dead.access.command("restore", str(dead.place), "--once"))
    assert status == 2 and "--watch" in said


# -- a long life --


class Turns:
    """A clock whose pauses are counted, and end what waits after some."""

    monotonic, now_ms = CLOCK.monotonic, CLOCK.now_ms

    def __init__(self, most):
        self.left = most

    def sleep(self, seconds):
        self.left -= 1
        if not self.left:
            raise KeyboardInterrupt


def test_an_outage_is_waited_for(dead, monkeypatch, tmp_path):
    dead.leave(decided=True)
    lines, answers, alive = [], iter(2 * [BrokerUnreachable("no broker")]), tmp_path / "alive"

    def operate_late(*arguments, **more):
        if error := next(answers, None):
            raise error
        return operate(*arguments, **more)

    monkeypatch.setattr(watch_module, "operate", operate_late)
    watcher = Watcher(
        conf=dead.conf, place=dead.checkpoint, prefix=dead.prefix, after_s=0, clock=Turns(4)
    )
    with pytest.raises(KeyboardInterrupt):
        watch_module.watch(watcher, lambda *line: lines.append(line), alive=alive)
    assert [status for _, status in lines] == [1, 0, 0], lines
    assert lines[0][0].startswith("waiting: [KAFKA2PC.BROKER_UNREACHABLE] no broker")
    assert lines[1][0].startswith("batch 0: committed 2") and "again" in lines[2][0]
    assert dead.seen() == ROWS and alive.exists()


def test_a_file_for_a_probe_that_cannot_be_written_does_not_end_it(dead, tmp_path):
    dead.leave(decided=True)
    lines, watcher = [], Watcher(conf=dead.conf, place=dead.checkpoint, prefix=dead.prefix)
    watcher.after_s, watcher.clock = 0, Turns(3)
    say = lambda line, status: lines.append((line[:24], status))
    with pytest.raises(KeyboardInterrupt):
        watch_module.watch(watcher, say, alive=tmp_path / "no" / "alive")
    assert lines == [("batch 0: committed 2 tra", 0), ("waiting: FileNotFoundErr", 1)]
    assert dead.seen() == ROWS


def test_a_log_in_a_topic_is_read_and_its_owner_goes_on(kafka, dead):
    """Looking takes nothing from the run that owns the log: it decides after the look."""
    topic = f"kafka:{dead.topic}-decisions"
    kafka.create_topic(f"{dead.topic}-decisions", config={"cleanup.policy": "compact"})
    log = open_log(topic, dead.id, dead.conf, dead.prefix)
    driver = replace(dead.run(), log=log)
    messages = dead.write(driver)
    assert once(dead, "--decision-log", topic) == ("", 0)
    decided = decide(driver, messages[0].plan, messages)
    said, status = once(dead, "--decision-log", topic)
    assert status == 0 and said.startswith("batch 0: committed 2 transactions")
    assert finish(driver, decided) and dead.seen() == ROWS
    assert restore(driver, 1, mine=messages[0].plan.token).attempt == 0, "it goes on in its line"


def test_a_store_that_is_not_named_ends_it(dead):
    """A decision must reach all stores, so none of it is committed without them."""
    driver = dead.run()
    both = {**driver.participants, "postgres": MemoryParticipant("postgres")}
    driver = replace(driver, participants=both)
    alone = replace(driver, participants={"kafka": both["kafka"]})
    messages = run_tasks(alone, restore(driver, 0))
    decide(driver, messages[0].plan, messages)
    said, status = once(dead)
    assert status == 1 and "are also about postgres" in said and "--store postgres=URL" in said
    assert len(dead.open()) == 2
