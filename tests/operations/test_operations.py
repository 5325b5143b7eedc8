"""For the person on call: every finding of doctor is provoked on a real broker, its printed
commands settle it, and no command without --force loses a decided row or shows one twice.
"""

import json
import os
import shlex
import shutil
import subprocess
import time
import uuid
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import pyarrow as pa
import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient
from kafka_fixtures import values
from rights import Rights, error_of
from shell import typed

import kafka2pc
from kafka2pc.backends.places import masked
from kafka2pc.kafka import column_producer as produce
from kafka2pc.kafka.column_producer import ColumnTransaction
from kafka2pc.kafka.control import Control
from kafka2pc.kafka.encoder import rows_of
from kafka2pc.kafka.participant import KafkaParticipant, check, retry_unknown
from kafka2pc.local.broker import LocalKafka
from kafka2pc.local.jars import fetch_jars, fetch_kafka, find_java
from kafka2pc.operations import repair
from kafka2pc.operations.access import Access
from kafka2pc.operations.cluster_checks import find_speculation
from kafka2pc.operations.doctor import doctor
from kafka2pc.operations.findings import FINDINGS
from kafka2pc.operations.progress import find_progress
from kafka2pc.operations.query import open_query
from kafka2pc.operations.repair import fence, operate, plan_restore, restore
from kafka2pc.operations.rights import RIGHTS
from kafka2pc.operations.survey import Survey, find_hanging, find_transactions
from kafka2pc.proof.child_process import Failed, until
from kafka2pc.proof.crash_points import CrashPoint
from kafka2pc.proof.scenario import Scenario
from kafka2pc.protocol.commit import Driver, commit, decide
from kafka2pc.protocol.decisions import FileLog, dump_decision, load_decision
from kafka2pc.protocol.errors import BadOption, StaleCheckpoint, Superseded
from kafka2pc.protocol.precommit import precommit
from kafka2pc.protocol.restore import claim, plan
from kafka2pc.protocol.transactions import (
    CommitMessage,
    Committable,
    Mode,
    Outcome,
    Plan,
    PreparedTxnState,
    new_token,
)
from kafka2pc.spark.batch_line import (
    BatchHistory,
    batch_line,
    count_aborts,
    log_batch,
    warn_if_late,
)
from kafka2pc.spark.checkpoint import log_at
from kafka2pc.spark.driver import plan_batch
from kafka2pc.spark.offsets import Range
from kafka2pc.spark.questions import Questions
from kafka2pc.spark.range_reader import read_range
from kafka2pc.spark.source_options import parse_source_options

pytestmark = [pytest.mark.kafka, pytest.mark.timeout(180)]

# -- a query that dies --


class Dead:
    """A query with a checkpoint as Spark makes it. `live` writes a batch of two tasks and two rows
    each; what happens then is the test's choice.
    """

    def __init__(self, kafka, folder, topic=None, conf=None, **how):
        self.kafka, self.topic, self.how = kafka, topic or f"operations-{uuid.uuid4().hex[:8]}", how
        self.conf, self.place, self.id = (
            conf or kafka.client_conf,
            Path(folder) / "checkpoint",
            str(uuid.uuid4()),
        )
        self.prefix, self.opened = (
            how.pop("prefix", None) or f"operations-{uuid.uuid4().hex[:8]}",
            [],
        )
        MADE.append(self)
        if topic is None:
            kafka.create_topic(self.topic)
        for name in ("offsets", "commits"):
            (self.place / name).mkdir(parents=True)
        (self.place / "metadata").write_text(json.dumps({"id": self.id}))

    def run(self):
        """The driver of a new run, as the sink makes it."""
        facts = asdict(check(self.conf, topics=[self.topic], prefix=self.prefix, **self.how))
        participant = KafkaParticipant(self.conf, topic=self.topic, prefix=self.prefix, **facts)
        self.opened.append(participant)
        return Driver(query_id=self.id, log=self.log, participants={"kafka": participant})

    @property
    def log(self):
        return FileLog(self.place / "kafka2pc")

    @property
    def query(self):
        return open_query(str(self.place))

    @property
    def door(self):
        return Access(self.kafka.bootstrap_servers)

    def write(self, driver, batch_id=0, mine=None):
        (self.place / "offsets" / str(batch_id)).write_text("v1")
        made = plan(driver, batch_id, mine=mine)
        store = list(driver.participants.values())
        return [
            precommit(store, made, [pa.record_batch({"value": [f"{batch_id}{v}" for v in task]})])
            for task in ("ab", "cd")
        ]

    def leave(self, decided):
        driver = self.run()
        messages = self.write(driver)
        if decided:
            decide(driver, messages[0].plan, messages)
        return self

    def seen(self):
        """What a reader sees once every end that was asked for has been written."""
        until(
            lambda: not find_open(self.kafka, self.prefix, ("PrepareCommit", "PrepareAbort")),
            "the ends are written",
        )
        return sorted(values(self.kafka, self.topic))

    def doctor(self, **how):
        return doctor(
            self.door, **dict(checkpoint=str(self.place), older_ms=0, prefix=self.prefix) | how
        )

    def open(self):
        with Survey(self.conf) as survey:
            return find_transactions(survey, self.prefix, self.query)

    def close(self):
        """Leave nothing on the shared broker."""
        for f in (
            self.kafka.started and not self.kafka.down and find_open(self.kafka, self.prefix) or ()
        ):
            with Survey(self.conf) as survey:
                found = survey.describe_transactions([f.transactional_id])[f.transactional_id]
                survey.end_txn(
                    f.transactional_id,
                    PreparedTxnState(found.producer_id, found.epoch),
                    commit=False,
                )
        for participant in self.opened:
            participant.close()


MADE = []


@pytest.fixture(autouse=True)
def closing():
    yield
    while MADE:
        MADE.pop().close()


@pytest.fixture
def dead(kafka, tmp_path):
    return Dead(kafka, tmp_path)


ROWS = ["0a", "0b", "0c", "0d"]


def told(diagnosis, name, *says):
    """The finding is there, once, with all its parts, and says all that."""
    found = [f for f in diagnosis.findings if f.name == name]
    assert len(found) == 1, [(f.name, f.what) for f in diagnosis.findings]
    assert all((found[0].what, found[0].why, found[0].risk, found[0].action))
    for word in says:
        assert word in "\n".join(
            (found[0].what, found[0].why, found[0].risk, found[0].action, *found[0].commands)
        )
    return found[0]


def names(diagnosis):
    return {f.name for f in diagnosis.findings}


# -- leftovers: found, explained, settled with the printed lines --


def test_an_undecided_leftover_is_aborted_by_the_printed_lines_and_the_reader_goes_on(dead):
    dead.leave(decided=False)
    write(dead, "somebody else's")
    assert dead.seen() == []
    found = dead.doctor()
    told(found, "readers-held-back", dead.open()[0].transactional_id, f"{dead.topic}-0 at 0 of 5")
    leftover = told(found, "leftovers", "2 open transactions", dead.id, "No. Spark replays")
    said, statuses = zip(*map(typed, leftover.commands), strict=True)
    assert statuses == (3, 0) and all(text.count("abort") == 2 for text in said)
    assert dead.seen() == ["somebody else's"]
    assert names(dead.doctor()) == {"one-copy"}


def write(dead, text):
    producer = Producer(dead.conf)
    producer.produce(dead.topic, text.encode())
    producer.flush()


def test_what_is_decided_is_committed_by_the_printed_lines(dead):
    dead.leave(decided=True)
    found = dead.doctor()
    assert found.status == 4 and "leftovers" not in names(found)
    settled = told(found, "decided-and-open", "batch 0", "2 of its transactions", "YES, in ")
    assert [typed(line)[1] for line in settled.commands] == [3, 0]
    assert dead.seen() == ROWS
    assert names(dead.doctor()) == {"one-copy"}
    assert typed(settled.commands[1])[1] == 0, "asked again it finds nothing to do"


def test_with_kip_939_nothing_presses(kafka, tmp_path):
    told(
        Dead(kafka, tmp_path, two_phase="required").leave(decided=True).doctor(),
        "decided-and-open",
        "No: these never time out.",
    )


def test_a_decided_batch_that_timed_out_is_told_with_its_records(kafka, tmp_path):
    dead = Dead(kafka, tmp_path, timeout_ms=1000).leave(decided=True)
    until(lambda: not dead.open(), "the broker has aborted them", 20)
    found = told(
        dead.doctor(),
        "decided-and-lost",
        "batch 0",
        "2 records in",
        f"{dead.topic}-0 [0..1]",
        "YES: these records are lost",
    )
    assert found.level == "danger"
    assert typed(dead.door.command("restore", str(dead.place), "--dry-run"))[1] == 4
    said, status = typed(dead.door.command("restore", str(dead.place)))
    assert status == 4 and "LostTransaction" in said and "lostTransactions=skip" in said
    assert typed(dead.door.command("restore", str(dead.place), "--skip-lost"))[1] == 4


def test_without_its_checkpoint_nobody_knows(dead):
    dead.leave(decided=True)
    found = told(
        dead.doctor(checkpoint=None),
        "leftovers-of-unknown",
        dead.id,
        "no checkpoint was named",
        "file metadata",
    )
    assert found.commands == (dead.door.command("doctor", "--checkpoint", "CHECKPOINT"),)


def test_what_is_young_is_left_in_peace_unless_it_is_fenced(dead):
    dead.leave(decided=False)
    young = dead.doctor(older_ms=60_000)
    assert not names(young) & {"leftovers", "readers-held-back"}
    claim(dead.run(), 0)  # a new run, that dies before its sweep
    told(dead.doctor(older_ms=60_000), "leftovers", "2 open transactions")


def test_a_batch_write_is_restored_by_the_folder_of_its_log(kafka, tmp_path):
    dead = Dead(kafka, tmp_path)
    log = FileLog(tmp_path / "log" / dead.id)
    driver = replace(dead.run(), log=log)
    decide(driver, (messages := dead.write(driver))[0].plan, messages)
    assert typed(dead.door.command("restore", str(tmp_path / "log" / dead.id)))[1] == 0
    assert dead.seen() == ROWS
    with pytest.raises(BadOption):
        open_query(str(tmp_path / "log"))


def test_a_decision_log_elsewhere_and_a_prefix_of_its_own_are_in_the_printed_lines(kafka, tmp_path):
    dead = Dead(kafka, tmp_path, prefix="operations v1")
    driver = replace(dead.run(), log=FileLog(tmp_path / "log" / dead.id))
    dead.write(driver)
    found = dead.doctor(decision_log=str(tmp_path / "log"))
    lines = told(found, "leftovers").commands
    assert "--prefix 'operations v1'" in lines[1] and f"--decision-log {tmp_path}/log" in lines[1]
    assert [typed(line)[1] for line in lines] == [3, 0] and find_open(kafka, "operations v1") == []


@pytest.mark.parametrize(
    "prefix", ["kafka2pc", None], ids=["the default prefix", "a prefix of its own"]
)
def test_decisions_in_a_topic_are_listed_shown_and_restored_from_the_shell(prefix, kafka, tmp_path):
    dead, topic = Dead(kafka, tmp_path, prefix=prefix), f"kafka:decisions-{uuid.uuid4().hex[:8]}"
    driver = replace(dead.run(), log=log_at(topic, dead.id, dead.conf.items(), dead.prefix))
    decide(driver, (messages := dead.write(driver))[0].plan, messages)
    for place in ([str(dead.place), "--decision-log", topic], [f"{topic}/{dead.id}"]):
        shown, status = typed(dead.door.command("decisions", "show", *place[:1], "0", *place[1:]))
        assert (status, shown.count(f"{dead.prefix}-{dead.id}")) == (0, 2)
    line = dead.door.command("restore", str(dead.place), "--decision-log", topic)
    assert [typed(f"{line} --dry-run")[1], typed(line)[1]] == [3, 0]
    assert dead.seen() == ROWS
    slow = replace(dead.run(), log=driver.log)
    messages = dead.write(slow, 1)
    words = ["--checkpoint", str(dead.place), "--decision-log", topic]
    # others use the default prefix, too
    ours = [t.transactional_id for t in find_open(kafka, f"{dead.prefix}-{dead.id}")]
    assert [typed(dead.door.command("abort", name, *words))[1] for name in ours] == [0, 0]
    # an abort fences: a driver that is not dead after all may not decide
    with pytest.raises(Superseded):
        decide(slow, messages[0].plan, messages)
    writers = {
        t.transactional_id
        for t in find_open(kafka, "", ())
        if t.transactional_id.endswith(f"-decisions-{dead.id}")
    }
    # one id, so whoever writes last fences all others
    assert writers == {f"{dead.prefix}-decisions-{dead.id}"}


def find_open(kafka, prefix, states=("Ongoing",)):
    with Control(kafka.client_conf) as control:
        return control.list_transactions(prefix, states)


# -- ending one by hand --


def by_hand(dead, commit, force=False, known=True):
    first = dead.open()[0].transactional_id
    words = [
        "commit" if commit else "abort",
        first,
        *(["--checkpoint", str(dead.place)] if known else []),
        *(["--force"] if force else []),
    ]
    return typed(dead.door.command(*words))


@pytest.mark.parametrize(
    ("decided", "commit", "known", "says"),
    [
        (True, False, True, "it is decided"),
        (False, True, True, "it is not decided"),
        (True, True, False, "no checkpoint was named"),
        (False, False, False, "no checkpoint was named"),
    ],
)
def test_what_would_lose_or_double_rows_is_refused(decided, commit, known, says, dead):
    dead.leave(decided)
    said, status = by_hand(dead, commit, known=known)
    assert status == 1 and says in said and "--force" in said and "Nothing was touched" in said
    assert len(dead.open()) == 2


@pytest.mark.parametrize(
    ("decided", "says", "rows"),
    [(True, "; lost: 2 records in", []), (False, "there twice after the replay", ["0a", "0b"])],
)
def test_force_does_it_and_names_the_loss(decided, says, rows, dead):
    dead.leave(decided)
    said, status = by_hand(dead, commit=not decided, force=True)
    assert status == 0 and says in said and len(dead.open()) == 1
    assert dead.seen() == rows
    if decided:
        told(dead.doctor(), "decided-and-lost", "2 records")


def test_force_without_a_checkpoint_says_what_it_could_mean(dead):
    dead.leave(decided=True)
    assert (
        "lost, if it was decided: an unknown number of records in"
        in by_hand(dead, commit=False, force=True, known=False)[0]
    )


@pytest.mark.parametrize("decided", [True, False])
def test_what_was_decided_is_done(decided, dead):
    dead.leave(decided)
    assert [by_hand(dead, commit=decided)[1] for _ in range(2)] == [0, 0] and dead.open() == []
    assert dead.seen() == (ROWS if decided else [])


@pytest.mark.parametrize(("word", "decided"), [("commit", True), ("abort", False)])
def test_what_was_ended_by_hand_is_told_as_json(word, decided, dead):
    dead.leave(decided)
    first = dead.open()[0].transactional_id
    said, status = typed(dead.door.command(word, first, "--checkpoint", str(dead.place), "--json"))
    assert status == 0 and json.loads(said) == {
        "transactional_id": first,
        "do": word,
        "said": f"{first}: {word}{'t' * decided}ed",
    }


def test_what_is_not_open_cannot_be_ended(dead):
    dead.leave(decided=True)
    first = dead.open()[0].transactional_id
    assert by_hand(dead, commit=True)[1] == 0
    said, status = typed(dead.door.command("abort", first, "--checkpoint", str(dead.place)))
    assert status == 1 and ("is CompleteCommit" in said or "is PrepareCommit" in said)
    assert "unknown to its coordinator" in typed(dead.door.command("abort", "nobody"))[0]


@pytest.mark.parametrize("how", ["abort", "restore"])
def test_a_living_run_is_fenced_before_anything_of_it_is_aborted(how, dead):
    """Otherwise it could decide between our look and our abort, and lose rows."""
    living = dead.run()
    messages = dead.write(living)
    if how == "abort":
        by_hand(dead, commit=False)
    else:
        with operate(dead.conf, dead.query) as driver:
            assert [s.do for s in restore(driver)] == ["abort", "abort"]
    with pytest.raises(Superseded):
        decide(living, messages[0].plan, messages)
    again = dead.run()
    commit(again, dead.write(again), 0)
    assert dead.seen() == ROWS


@pytest.mark.parametrize(("when", "batch_id"), [("claim", 0), ("claim", 1), ("finish", 1)])
def test_a_run_that_decides_while_we_look_is_left_alone_and_loses_nothing(
    when, batch_id, dead, monkeypatch
):
    """A slot won after a decision that nobody has finished would hide it for ever."""
    living, token = dead.run(), None
    if batch_id:
        first = dead.write(living)
        commit(living, first, 0)
        token = first[0].plan.token
    messages = dead.write(living, batch_id, token)
    with operate(dead.conf, dead.query) as driver:
        step, decided = getattr(repair, when), []

        def late(*args):
            if not decided:
                decided.append(decide(living, messages[0].plan, messages))
            return step(*args)

        monkeypatch.setattr(repair, when, late)
        with pytest.raises(Superseded, match="is running"):
            restore(driver)
    again = dead.run()
    assert plan(again, batch_id).mode is Mode.DRAIN
    assert dead.seen() == [f"{n}{v}" for n in range(batch_id + 1) for v in "abcd"]


def test_an_undecided_leftover_is_not_aborted_before_the_decision_is_finished(dead):
    """The slot that fences would hide the decision."""
    dead.leave(decided=True)
    lone = (
        dead.run()
        .participants["kafka"]
        .begin(Plan(query_id=dead.id, batch_id=0, attempt=1, token=new_token(9, 9)))
    )
    lone.write(pa.record_batch({"value": ["of a copy that was not heard"]}))
    lone.flush()
    left = next(f for f in dead.open() if not f.decided).transactional_id
    assert typed(dead.door.command("abort", left, "--checkpoint", str(dead.place)))[1] == 0
    assert dead.open() == [] and dead.seen() == ROWS


def test_after_restore_the_query_goes_on_without_loss_or_double(dead):
    first = dead.run()
    commit(first, dead.write(first), 0)
    messages = dead.write(first, 1)
    decide(first, messages[0].plan, messages)
    second = dead.run()
    assert plan(second, 1).mode is Mode.DRAIN
    dead.write(second, 2)
    with operate(dead.conf, dead.query) as driver:
        assert sorted(s.do for s in plan_restore(driver)) == [
            "abort",
            "abort",
            "nothing",
            "nothing",
        ]
        restore(driver)
    again = dead.run()
    commit(again, dead.write(again, 2), 2)
    assert dead.seen() == [f"{n}{v}" for n in range(3) for v in "abcd"]


@pytest.mark.spark
@pytest.mark.timeout(300)
def test_a_spark_query_that_died_after_its_decision_is_settled_from_the_shell_and_then_goes_on(
    story,
):
    if not story.job.alive:
        story.job.start()
    story.feed(2)
    story.arm(CrashPoint.AFTER_DECISION, batch_id=1, pid=0)
    with pytest.raises(Failed):
        story.run()
    line = Access(story.kafka.bootstrap_servers).command("restore", str(story.checkpoint), "--json")
    planned, status = typed(f"{line} --dry-run")
    assert ({step["do"] for step in json.loads(planned)}, status) == (
        {"commit"},
        3,
    ) and story.open()
    assert typed(line)[1] == 0 and story.open() == [] and len(story.rows()) == 2 * story.size
    with operate(story.kafka.client_conf, open_query(str(story.checkpoint))) as driver:
        # also what aborts do: Spark has not heard that batch 1 is done, and a slot of batch 2 is
        # taken
        fence(driver)
    story.feed()
    story.run()
    story.check()


# -- seen while it runs --


def test_progress_tells_what_is_done_decided_and_being_written(dead):
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
        typed(dead.door.command("progress", str(dead.place), "--last", "2", "--json"))[0]
    )
    assert [(p["batch_id"], p["state"], p["rows"]) for p in listed] == [
        (1, "decided", 4),
        (2, "writing", 0),
    ]
    assert "done" in typed(dead.door.command("progress", str(dead.place)))[0]
    limit = driver.participants["kafka"].timeout_ms
    assert list(seen.timeout_ms[:2]) == [limit] * 2 and all(
        0 < left <= limit for left in seen.left_ms[:2]
    )
    assert all(0 <= used < 0.5 for used in seen.used[:2])
    assert seen[["timeout_ms", "left_ms", "used"]].loc[2].isna().all()
    assert json.loads(
        typed(dead.door.command("restore", str(dead.place), "--dry-run", "--json"))[0]
    ), "and it can still be settled"


def test_progress_without_a_timeout_and_of_a_batch_write_and_of_nothing(kafka, tmp_path):
    endless = Dead(kafka, tmp_path, two_phase="required").leave(decided=True)
    seen = kafka2pc.progress(str(endless.place))
    assert list(seen.rows) == [4] and seen[["timeout_ms", "left_ms", "used", "took_ms"]].isna().all(
        axis=None
    )
    log = tmp_path / "log" / endless.id
    (endless.place / "kafka2pc").rename((log.parent.mkdir(), log)[1])
    assert list(kafka2pc.progress(str(log)).state) == ["decided"]
    assert kafka2pc.progress(str(endless.place), last=5).state.tolist() == ["writing"]
    with pytest.raises(BadOption):
        kafka2pc.progress(str(tmp_path / "nowhere"))


def test_the_line_of_a_batch_counts_what_was_asked_again_and_what_was_swept(dead):
    dead.leave(decided=False)
    planner = replace(dead.run(), history=BatchHistory())
    messages = dead.write(planner)
    answers = iter([Outcome.UNKNOWN] * 2)
    participant = planner.participants["kafka"]
    ends = type(
        "Twice",
        (),
        {
            "name": "kafka",
            "store_id": participant.store_id,
            "describe": participant.describe,
            "in_doubt": participant.in_doubt,
            "abort": participant.abort,
            "commit": lambda self, c: next(answers, None) or participant.commit(c),
        },
    )()
    noted = BatchHistory()
    commit(
        replace(planner, history=noted, participants={"kafka": ends}, retry=retry_unknown),
        messages,
        0,
    )
    line = batch_line(
        [replace(m, bytes=100) for m in messages],
        noted.kept,
        time.time() * 1000,
        swept=count_aborts(planner.history.kept),
    )
    assert (line.query, line.batch, line.mode, line.rows, line.bytes, line.transactions) == (
        dead.id,
        0,
        "write",
        4,
        200,
        2,
    )
    assert (
        line.swept == 2
        and line.retries >= 2
        and line.commit_ms >= 50
        and 0 < line.left_ms < participant.timeout_ms
    )
    assert dead.seen() == ROWS


def test_a_late_batch_is_told_in_four_parts_and_once_for_each_query(caplog):
    plan_of = lambda query: Plan(query_id=query, batch_id=7, attempt=0, token=new_token(7, 0))
    slow = Committable(transactional_id="x", state=PreparedTxnState(1, 0), timeout_ms=1000)
    late = lambda query: [CommitMessage(plan=plan_of(query), committables=(slow,))]
    first, second, third = (str(uuid.uuid4()) for _ in range(3))
    assert warn_if_late(late(first), 499) is None and not caplog.records
    for query in (first, first, second):
        said = warn_if_late(late(query), 501)
        assert f"batch 7 of query {query} has used 501 of the 1000 ms" in said
        assert all(
            part in said for part in ("why: ", "is data at risk: ", "what to do: Make batches")
        )
    assert [first in r.message or second in r.message for r in caplog.records] == [True, True]
    assert warn_if_late([CommitMessage(plan=plan_of(first))], 10**9) is None, (
        "an empty batch is never late"
    )
    log_batch(late(third), [])
    assert third in caplog.records[-1].message, "the committer asks"


@pytest.mark.spark
@pytest.mark.timeout(300)
@pytest.mark.full
def test_under_spark_every_batch_has_its_line_on_standard_error_if_that_is_asked_for(
    jobs, kafka, tmp_path, monkeypatch
):
    monkeypatch.setenv("KAFKA2PC_LOG", "1")
    with Scenario(jobs("lines"), kafka, tmp_path) as story:
        story.feed(2)
        story.run()
        said = story.job.log_end(10**6)
        story.job.ask(
            "write", source=str(story.source), options=story.options(checkpointLocation=None)
        )
        more = story.job.log_end(10**6).removeprefix(said)
        story.job.stop()
    first, second, third = (
        dict(pair.split("=") for pair in line.split())
        for line in (said + more).splitlines()
        if line.startswith("query=")
    )
    told_of = lambda line: [line[k] for k in ("batch", "mode", "rows", "transactions", "swept")]
    assert [told_of(line) for line in (first, second)] == [
        [n, "write", "40", "2", "0"] for n in "01"
    ]
    assert first["query"] == second["query"] != third["query"] and (
        third["batch"],
        third["rows"],
    ) == ("0", "80")
    assert all(
        int(line["bytes"]) > 40 and int(line["commit_ms"]) > 0 for line in (first, second, third)
    )


# -- the checkpoint --


def newest(dead):
    return max(
        (dead.place / "kafka2pc").glob("*.json"),
        key=lambda p: [int(n) for n in p.name.split(".")[:2]],
    )


DAMAGE = {
    "corrupt-decision": lambda d: d[:-40],
    "unknown-format": lambda d: d.replace(b'"format": 2', b'"format": 3'),
    "wrong-cluster": lambda d: dump_decision(
        replace(load_decision(d, "here"), stores=(("kafka", "another-cluster"),))
    ),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_decision_that_cannot_be_trusted_is_a_finding_and_nothing_is_ended(name, dead):
    file = newest(dead.leave(decided=True))
    file.write_bytes(DAMAGE[name](file.read_bytes()))
    told(dead.doctor(), name)
    for words in (
        ["restore", str(dead.place)],
        ["restore", str(dead.place), "--dry-run"],
        ["abort", find_open_of(dead)[0], "--checkpoint", str(dead.place)],
    ):
        assert typed(dead.door.command(*words))[1] == 1
    assert len(find_open_of(dead)) == 2


def find_open_of(dead):
    return [t.transactional_id for t in find_open(dead.kafka, dead.prefix)]


@pytest.mark.parametrize("decided", [True, False])
def test_decisions_that_also_concern_a_database_are_not_finished_from_here(decided, dead):
    file = newest(dead.leave(decided))
    decision = load_decision(file.read_bytes(), "here")
    file.write_bytes(
        dump_decision(replace(decision, stores=(*decision.stores, ("postgres", "5432"))))
    )
    with pytest.raises(BadOption, match="also about postgres"), operate(dead.conf, dead.query):
        pass


def test_no_checkpoint_is_told(dead, tmp_path):
    assert typed(dead.door.command("restore", str(tmp_path / "nowhere")))[1] == 1


# -- time, speculation, topics --


def test_batches_that_take_most_of_the_timeout_are_told_before_it_hurts(kafka, tmp_path):
    dead = Dead(kafka, tmp_path, timeout_ms=60_000)
    driver = dead.run()
    commit(driver, dead.write(driver), 0)
    (dead.place / "commits" / "0").write_text("v1")
    began = (dead.place / "offsets" / "0").stat().st_mtime
    for took, level in ((20, None), (40, "trouble"), (55, "danger")):
        os.utime(dead.place / "commits" / "0", (began + took, began + took))
        found = dead.doctor()
        assert {f.level for f in found.findings if f.name == "timeout-short"} == (
            {level} if level else set()
        )
    told(found, "timeout-short", "55 s of a transaction timeout of 60 s", "Make batches smaller")


@pytest.mark.parametrize(
    ("text", "on"),
    [
        ("spark.speculation true\n", True),
        ("spark.speculation=TRUE\n", True),
        ("#spark.speculation true\n", False),
        ("spark.speculation false\nspark.speculation.interval 1s\n", False),
    ],
)
def test_speculation_is_seen_in_sparks_defaults(text, on, tmp_path):
    (tmp_path / "spark-defaults.conf").write_text(text)
    assert bool(find_speculation(str(tmp_path))) is on


def test_speculation_and_a_missing_topic_are_told(kafka, tmp_path):
    (tmp_path / "spark-defaults.conf").write_text("spark.speculation true")
    found = doctor(Access(kafka.bootstrap_servers), topics=["no such"], spark_conf=str(tmp_path))
    told(found, "speculation", str(tmp_path))
    (line,) = told(found, "topic-missing", "no such", "--create --topic 'no such'").commands
    assert line.startswith(f"kafka-topics.sh --bootstrap-server {kafka.bootstrap_servers} ")
    assert "decided-and-open" not in names(found) and found.status == 3


# -- the door --


def test_listings_are_json_and_the_environment_names_the_servers(dead):
    dead.leave(decided=True)
    place, env = (
        shlex.quote(str(dead.place)),
        {"KAFKA2PC_BOOTSTRAP_SERVERS": dead.kafka.bootstrap_servers},
    )
    listed = [
        t
        for t in json.loads(
            typed(f"kafka2pc transactions list --all --json --checkpoint {place}", **env)[0]
        )
        if t["query_id"] == dead.id
    ]
    assert [(t["decided"], t["fenced"], t["run"][:4]) for t in listed] == [
        (True, False, "0.1.")
    ] * 2 and listed[0]["left_ms"] > 0
    first = listed[0]["transactional_id"]
    assert (
        json.loads(typed(f"kafka2pc transactions describe {first} --json", **env)[0])[0]["state"]
        == "Ongoing"
    )
    assert json.loads(typed(f"kafka2pc transactions hanging {dead.topic} --json", **env)[0]) == []
    assert [
        d["commit"] for d in json.loads(typed(f"kafka2pc decisions list {place} --json")[0])
    ] == [False, True]
    shown = json.loads(typed(f"kafka2pc decisions show {place} 0 --json")[0])
    assert {c["transactional_id"] for c in shown[1]["committables"]} == {
        t["transactional_id"] for t in listed
    }
    assert [
        s["do"] for s in json.loads(typed(f"kafka2pc restore {place} --dry-run --json", **env)[0])
    ] == ["commit", "commit"]
    found = json.loads(typed(f"kafka2pc doctor --checkpoint {place} --json", **env)[0])
    assert (
        found["status"] == 4
        and found["facts"]["cluster"] == dead.kafka.cluster_id
        and found["findings"][0]["name"] == "decided-and-open"
    )


def test_tables_and_words_say_the_same(dead):
    dead.leave(decided=True)
    place, env = (
        shlex.quote(str(dead.place)),
        {
            "KAFKA2PC_BOOTSTRAP_SERVERS": dead.kafka.bootstrap_servers,
            "COLUMNS": "250",
        },
    )
    first = dead.open()[0].transactional_id
    listed = typed(f"kafka2pc transactions list --checkpoint {place}", **env)[0]
    assert first in listed and "yes" in listed
    assert "decided: ?" in typed(f"kafka2pc transactions describe {first}", **env)[0]
    assert "COMMIT" in typed(f"kafka2pc decisions list {place}", **env)[0]
    assert f"{dead.topic}-0 [0..1]" in typed(f"kafka2pc decisions show {place} 0", **env)[0]
    assert "DANGER  decided-and-open" in typed(f"kafka2pc doctor --checkpoint {place}", **env)[0]
    assert typed(f"kafka2pc decisions show {place} 7", **env)[1] == 1
    assert typed("kafka2pc transactions describe nobody", **env)[1] == 1


def test_no_servers_is_told(monkeypatch):
    monkeypatch.delenv("KAFKA2PC_BOOTSTRAP_SERVERS", raising=False)
    said, status = typed("kafka2pc transactions list")
    assert status == 1 and "bootstrap.servers is missing" in said


# -- clusters that lack something --

TOOLS = {
    "kafka-acls.sh": "org.apache.kafka.tools.AclCommand",
    "kafka-transactions.sh": "org.apache.kafka.tools.TransactionsCommand",
    "kafka-configs.sh": "kafka.admin.ConfigCommand",
    "kafka-topics.sh": "org.apache.kafka.tools.TopicCommand",
    "kafka-features.sh": "org.apache.kafka.tools.FeatureCommand",
}


def administered(kafka, folder, *lines):
    """Type lines of Kafka's own tools, as an administrator with his admin.properties."""
    (folder / "admin.properties").write_text(
        "".join(f"{k}={v}\n" for k, v in java_conf(kafka).items())
    )
    jars = fetch_jars(
        "kafka-tools-4.3.1",
        [
            ("org.apache.kafka", "kafka-tools", "4.3.1"),
            ("net.sourceforge.argparse4j", "argparse4j", "0.7.0"),
        ],
        transitive=False,
        progress=None,
    )
    java = [
        find_java(),
        "-XX:TieredStopAtLevel=1",
        "-cp",
        f"{jars}/*:{fetch_kafka(progress=None)}/*",
    ]
    for line in lines:
        script, *words = shlex.split(line)
        done = subprocess.run(
            [*java, TOOLS[script], *words],
            cwd=folder,
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            timeout=60,
        )
        assert done.returncode == 0, (line, done.stdout, done.stderr)


def java_conf(kafka):
    if not kafka.secure:
        return {}
    login = (
        'org.apache.kafka.common.security.scram.ScramLoginModule required username="admin"'
        f' password="{kafka.passwords["admin"]}";'
    )
    return {
        "security.protocol": "SASL_PLAINTEXT",
        "sasl.mechanism": "SCRAM-SHA-256",
        "sasl.jaas.config": login,
    }


class Forgetful(Control):
    """A client with a bug: it never tells the coordinator where it writes."""

    def add_partitions(self, transactional_id, state, partitions):
        return dict.fromkeys(partitions, 0)


def test_a_cluster_without_version_6_with_a_timeout_and_something_hanging(tmp_path, monkeypatch):
    config = {
        "transaction.max.timeout.ms": 120_000,
        "transaction.partition.verification.enable": False,
    }
    with LocalKafka(two_phase_commit=False, config=config, progress=None) as kafka:
        kafka.create_topic("t")
        door = Access(kafka.bootstrap_servers)
        monkeypatch.setattr(
            produce, "rows_of", partial(rows_of, now_ms=int(time.time() * 1000) - 121_000)
        )
        hang(kafka, "t")
        with Survey(kafka.client_conf) as survey:
            assert find_hanging(survey, ["t"], idle_ms=200_000) == [], (
                "what was heard of lately may have begun or ended just now"
            )
        found = doctor(door, topics=["t"], older_ms=0, timeout_ms=120_001)
        told(found, "two-phase-no-version", "unstable.api.versions.enable=true")
        told(found, "timeout-too-large", "=120001", "transaction.max.timeout.ms=120000")
        told(found, "readers-held-back", "no coordinator knows")
        assert typed(door.command("transactions", "hanging", "t"))[1] == 3
        administered(kafka, tmp_path, *told(found, "hanging", "t-0", "from offset 0").commands)
        until(
            lambda: (
                not names(doctor(door, topics=["t"], older_ms=0)) & {"hanging", "readers-held-back"}
            ),
            "its end is written",
            20,
        )


def hang(kafka, topic):
    """Leave a record in a transaction that no coordinator knows."""
    with Forgetful(kafka.client_conf) as control:
        txn = ColumnTransaction(
            control, kafka.client_conf, "forgetful", 60_000, topic=topic, end_txn_version=4
        ).begin()
        txn.write(pa.record_batch({"value": ["a"]}))
        txn.flush()


def test_an_old_cluster():
    with LocalKafka(version="3.9.1", two_phase_commit=False, progress=None) as kafka:
        found = doctor(Access(kafka.bootstrap_servers))
        told(found, "two-phase-too-old", "Kafka 4.1")
        told(found, "old-transactions", "kafka-features.sh", "transaction.version=2")
        assert found.status == 3, "one copy"


@pytest.mark.full
def test_three_nodes_are_fine_until_copies_are_missing(tmp_path):
    with LocalKafka(nodes=3, progress=None) as kafka:
        kafka.create_topic("sound")
        door = Access(kafka.bootstrap_servers)
        assert (
            doctor(door, topics=["sound"]).findings == ()
            and "can be kept" in typed(door.command("doctor", "--topic", "sound"))[0]
        )
        kafka.create_topic("lonely", replication=1)
        kafka.create_topic("careless", config={"min.insync.replicas": 1})
        kafka.create_topic("strict", config={"min.insync.replicas": 3})
        found = doctor(door, topics=["lonely", "careless"])
        told(found, "one-copy", "lonely")
        told(doctor(door, topics=["sound"], decision_log="kafka:lonely"), "one-copy", "lonely")
        administered(kafka, tmp_path, *told(found, "one-copy-is-enough", "careless").commands)
        assert names(doctor(door, topics=["careless", "strict"])) == set()
        kafka.kill(2)
        until(
            lambda: "too-few-copies" in names(doctor(door, topics=["strict"])),
            "the broker knows that one is down",
            30,
        )
        told(doctor(door, topics=["strict"]), "too-few-copies", "2 copies in sync; 3 are needed")


# -- a secured cluster --


@pytest.fixture(scope="module")
def secure():
    with LocalKafka(secure=True, progress=None) as kafka:
        yield kafka


def as_alice(kafka, folder):
    """Her settings, and the file that holds them."""
    file = folder / "client.properties"
    conf = kafka.client_conf_for("alice")
    file.write_text("".join(f"{k}={v}\n" for k, v in conf.items() if k != "bootstrap.servers"))
    return conf, Access(kafka.bootstrap_servers, str(file))


def symptoms(conf, door, topic, prefix):
    """For each right: a question whose answer changes without it, and what is then said."""
    sink = lambda **how: error_of(lambda: check(conf, topics=[topic], prefix=prefix, **how))
    found = lambda: names(doctor(door, topics=[topic], prefix=prefix, older_ms=0))
    source = parse_source_options({f"kafka.{k}": v for k, v in conf.items()} | {"subscribe": topic})
    denied = lambda name: lambda: name in found()
    return {
        ("sink", "Write", "--topic"): (
            lambda: (
                (sink() or ("", ""))[0] == "NotAuthorized"
                and f"topic {topic}" in sink()[1]
                and "topic-not-allowed" in found()
            )
        ),
        ("sink", "Write", "--transactional-id"): (
            lambda: (
                (sink() or ("", ""))[0] == "NotAuthorized"
                and f"{prefix}-probe" in sink()[1]
                and "ids-not-allowed" in found()
            )
        ),
        ("sink", "TwoPhaseCommit", "--transactional-id"): (
            lambda: (
                sink() is None
                and "TWO_PHASE_COMMIT is not granted" in (sink(two_phase="required") or ("", ""))[1]
                and "two-phase-not-allowed" in found()
            )
        ),
        ("sink", "DescribeConfigs", "--topic"): (
            lambda: (
                "settings-not-allowed" in found()
                and check(conf, topics=[topic], prefix=prefix).batch_bytes is None
            )
        ),
        ("sink", "DescribeConfigs", "--cluster"): (
            lambda: "settings-not-allowed" in found() and sink() is None
        ),
        ("source", "Read", "--topic"): (
            lambda: (
                (error_of(lambda: list(read_range(source, Range(topic, 0, 0, 1)))) or ("", ""))[
                    1
                ].count(topic)
                > 0
            )
        ),
        ("source", "Read", "--group"): lambda: not told_group(conf, topic),
        ("operator", "Write", "--transactional-id"): denied("ids-not-allowed"),
        ("operator", "Read", "--topic"): denied("readers-held-back-by-whom"),
    }


def told_group(conf, topic):
    from confluent_kafka import KafkaException

    try:
        Questions(conf).commit_offsets("kafka2pc-source", {(topic, 0): 0})
    except KafkaException:
        return False
    return True


def test_each_right_that_is_taken_away_has_its_own_clear_error_before_anything_is_written(
    secure, tmp_path, request
):
    topic, prefix = "least", "least-"
    secure.create_topic(topic)
    conf, door = as_alice(secure, tmp_path)
    rights, asked = Rights(secure, topic, prefix), symptoms(conf, door, topic, prefix)
    assert {(r.part, r.operation, r.resource.split()[0]) for r in RIGHTS} == set(asked), (
        "the table and the test name the same rights"
    )
    hold(secure, topic)
    rights.give(*RIGHTS)
    request.addfinalizer(lambda: [rights.take(r) for r in RIGHTS])
    for r in RIGHTS:
        missing = asked[r.part, r.operation, r.resource.split()[0]]
        until(lambda: not missing(), f"{r} is in force", 20)  # noqa: B023
        rights.take(r)
        until(missing, f"without {r} it is told", 20)
        rights.give(r)
    assert find_open(secure, prefix) == []
    assert values(secure, topic, "read_uncommitted") == [
        "seen",
        "held",
    ], "nothing of hers was written"


def hold(kafka, topic):
    """Somebody else's record to read, and his open transaction to ask about."""
    producer = Producer(kafka.client_conf | {"transactional.id": "somebody", "log_level": 0})
    producer.init_transactions(30)
    for value in ("seen", "held"):
        producer.begin_transaction()
        producer.produce(topic, value.encode())
        producer.flush()
        if value == "seen":
            producer.commit_transaction(30)


@pytest.mark.full
def test_the_printed_commands_repair_a_dead_query_on_a_secured_cluster(secure, tmp_path):
    topic, prefix = "secured", "kafka2pc"
    secure.create_topic(topic)
    conf, door = as_alice(secure, tmp_path)
    Rights(secure, topic, prefix).give(*(r for r in RIGHTS if r.part == "sink" and r.needed))
    until(
        lambda: error_of(lambda: check(conf, topics=[topic])) is None, "her rights are in force", 20
    )
    dead = Dead(secure, tmp_path, topic, conf, prefix=prefix).leave(decided=True)
    ask = lambda: doctor(door, checkpoint=str(dead.place), older_ms=0)
    found = ask()
    assert {
        "decided-and-open",
        "readers-held-back-by-whom",
        "settings-not-allowed",
        "two-phase-refused",
    } <= names(found)
    administered(
        secure,
        tmp_path,
        *[line for f in found.findings for line in f.commands if line.startswith("kafka-acls.sh")],
    )
    until(
        lambda: (
            not names(ask())
            & {"readers-held-back-by-whom", "settings-not-allowed", "two-phase-refused"}
        ),
        "the rights are in force",
        20,
    )
    found = ask()
    told(found, "readers-held-back", dead.open()[0].transactional_id)
    assert not [f for f in found.findings if f.name.startswith("two-phase")], (
        "TWO_PHASE_COMMIT was granted by the printed line"
    )
    assert dead.seen() == []
    assert [typed(line)[1] for line in told(found, "decided-and-open").commands] == [3, 0]
    assert dead.seen() == ROWS
    assert not names(ask()) & {"readers-held-back", "decided-and-open"}
    assert_no_secret(secure, door, dead, str(found), repr(door))


def assert_no_secret(secure, door, dead, *texts):
    """The planted password is in the file that was named, and nowhere else: not in what is said,
    not in the checkpoint.
    """
    said = [
        typed(door.command(*words))[0]
        for words in (
            ["doctor", "--checkpoint", str(dead.place)],
            ["doctor", "--checkpoint", str(dead.place), "--json"],
            ["transactions", "list"],
            ["decisions", "show", str(dead.place), "0"],
            ["restore", str(dead.place), "--dry-run"],
            ["abort", "nobody"],
        )
    ]
    kept = [p.read_text() for p in dead.place.rglob("*") if p.is_file()]
    assert not [t for t in (*said, *kept, *texts) if secure.passwords["alice"] in t]


def test_a_wrong_password_is_told_without_it(secure, tmp_path):
    _, door = as_alice(secure, tmp_path)
    file = Path(door.config)
    file.write_text(file.read_text().replace(secure.passwords["alice"], "hunter2"))
    said, status = typed(door.command("transactions", "list"))
    assert status == 1 and "NotAuthorized" in said and "hunter2" not in said


def test_every_finding_of_the_table_is_provoked_here_or_beside_the_wire():
    text = "".join(
        (Path(__file__).parents[1] / name).read_text(encoding="utf-8")
        for name in ("operations/test_operations.py", "kafka/test_control.py")
    )
    assert [name for name in FINDINGS if f'"{name}"' not in text] == []


# -- a log that is not the query's --


def test_an_empty_log_never_counts_as_nothing_decided(dead, tmp_path):
    driver = dead.leave(decided=True).run()
    place, (first, *_) = str(dead.place), dead.open()
    elsewhere = tmp_path / "elsewhere" / dead.id
    elsewhere.parent.mkdir()
    (dead.place / "kafka2pc").rename(elsewhere)
    for line in (
        ["abort", first.transactional_id, "--checkpoint", place],
        ["restore", place],
        ["restore", place, "--dry-run"],
    ):
        said, status = typed(
            dead.door.command(*line, *(["--prefix", dead.prefix] if line[0] == "restore" else []))
        )
        assert (
            status == 1 and "this decision log is empty" in said and "is data at risk: Yes" in said
        )
    with pytest.raises(StaleCheckpoint, match="this decision log is empty"):
        plan_batch(driver, 0, "")
    findings = dead.doctor().findings
    assert any("this decision log is empty" in f.what for f in findings)
    assert not any("restore" in line for f in findings for line in f.commands), (
        "it would throw away what is decided"
    )
    there = ["--decision-log", str(elsewhere.parent)]
    said, status = typed(dead.door.command("restore", place, *there, "--prefix", dead.prefix))
    assert status == 1 and "MovedLog" in said and dead.seen() == []
    said, status = typed(f"kafka2pc adopt {place} {there[0]} {there[1]}")
    assert status == 0 and "adopted in slot 0.2" in said
    said, status = typed(dead.door.command("restore", place, *there, "--prefix", dead.prefix))
    assert status == 0, said
    assert dead.seen() == ROWS
    said, status = typed(f"kafka2pc adopt {place} {there[0]} {there[1]}")
    assert status == 0 and "nothing has changed" in said


def test_a_copied_checkpoint_is_a_finding_and_nothing_is_ended_from_there(dead, tmp_path):
    dead.leave(decided=True)
    copy = shutil.copytree(dead.place, tmp_path / "copy")
    found = doctor(dead.door, prefix=dead.prefix, checkpoint=str(copy)).findings
    (finding,) = [f for f in found if f.name == "moved-log"]
    assert finding.level == "danger" and "kafka2pc adopt" in finding.action
    assert not any("restore" in line for f in found for line in f.commands)
    said, status = typed(dead.door.command("restore", str(copy), "--prefix", dead.prefix))
    assert status == 1 and "MovedLog" in said and len(dead.open()) == 2


def test_a_decision_topic_is_not_made_by_who_only_looks(kafka, dead):
    dead.leave(decided=True)
    topic = f"typo-{uuid.uuid4().hex[:8]}"
    said, status = typed(
        dead.door.command("decisions", "list", str(dead.place), "--decision-log", f"kafka:{topic}")
    )
    assert status == 1 and "there is no such topic" in said
    assert topic not in AdminClient(kafka.client_conf).list_topics(timeout=10).topics
    said, status = typed(f"kafka2pc decisions list {dead.place} --decision-log kafka:{topic}")
    assert status == 1 and "no cluster is named" in said


def test_a_password_in_the_name_of_a_log_is_not_shown():
    assert masked("postgresql://u:hunter2@h/db?x=1") == "postgresql://u:***@h/db?x=1"
    assert [masked(place) for place in ("/a/b", "kafka:t", "s3://b/k", "postgresql://h/db")] == [
        "/a/b",
        "kafka:t",
        "s3://b/k",
        "postgresql://h/db",
    ]


def test_doctor_outlives_answers_that_are_not_there(dead, monkeypatch):
    dead.leave(decided=True)
    monkeypatch.setattr(Survey, "why_no_two_phase", lambda self, probe: "The broker is too old.")
    monkeypatch.setattr(
        Survey,
        "ends",
        lambda self, layout, committed: (
            {} if committed else {(p.topic, p.partition): 9 for p in layout}
        ),
    )
    assert any("KIP-939 cannot be had" in f.what for f in dead.doctor().findings)


def test_what_is_missing_for_a_storage_is_said_without_a_stack_trace(monkeypatch):
    def no_s3(*args, **kwargs):
        raise ImportError("Install s3fs to access S3")

    monkeypatch.setattr("kafka2pc.operations.query.open_query", no_s3)
    assert typed("kafka2pc decisions list s3://bucket/checkpoint") == (
        "Install s3fs to access S3\n",
        1,
    )


def test_a_write_that_is_finished_is_done(dead):
    driver = dead.leave(decided=True).run()
    fence(driver)
    (dead.place / "offsets" / "7").write_text("v1")
    (dead.place / "commits" / "7").write_text("v1")  # by Spark's own sink
    assert [(p.batch_id, p.state) for p in find_progress(dead.query) if p.batch_id in (0, 7)] == [
        (0, "done"),
        (7, "done"),
    ]
