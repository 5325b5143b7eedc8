"""Every finding about a query is provoked on a real broker, and its printed commands repair it."""

import os
import shutil
import uuid
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest
from confluent_kafka import TopicPartition
from confluent_kafka.admin import AdminClient
from dead_query_fixtures import ROWS, DeadQuery, find_open, finding_of, names, newest_file, write
from one_task_query import abort_there
from shell import typed

from kafka2pc.decision_logs.files import FileLog
from kafka2pc.operations.access import Access
from kafka2pc.operations.doctor import cluster_checks
from kafka2pc.operations.doctor.cluster_checks import find_speculation
from kafka2pc.operations.doctor.doctor import doctor
from kafka2pc.operations.doctor.findings import FINDINGS
from kafka2pc.operations.survey import Survey
from kafka2pc.proof.child_process import until
from kafka2pc.proof.dead_query import run_tasks
from kafka2pc.protocol.log.decisions import CLAIM, REPAIR, Slot
from kafka2pc.protocol.log.format import dump_decision, load_decision
from kafka2pc.protocol.log.questions import newest_commit
from kafka2pc.protocol.messages import Plan
from kafka2pc.protocol.names import new_token
from kafka2pc.protocol.participant import Outcome
from kafka2pc.protocol.phases.claim import claim
from kafka2pc.protocol.phases.commit import commit
from kafka2pc.protocol.phases.decide import decide
from kafka2pc.protocol.phases.precommit import precommit
from kafka2pc.protocol.phases.reopen import repair_record, win_repair
from kafka2pc.protocol.phases.requests import send_all
from kafka2pc.protocol.phases.restore import restore
from kafka2pc.protocol.phases.verify import judge

pytestmark = [pytest.mark.kafka, pytest.mark.never_unsteady]


def test_an_undecided_leftover_is_aborted_by_the_printed_lines_and_the_reader_goes_on(dead):
    dead.leave(decided=False)
    write(dead, "another producer's")
    assert dead.seen(still_open=True) == []
    found = dead.doctor()
    who = f"2 of query {dead.id}, the oldest for "
    held = finding_of(found, "readers-held-back", who, f"{dead.topic}-0 at 0 of 5")
    assert "Nothing is lost by waiting" in held.risk and found.status == 3
    assert held.items == (), "another finding says what ends them"
    what = f"2 open transactions of query {dead.id} in {dead.topic}, the oldest for "
    leftover = finding_of(found, "leftovers", what, "No. Spark replays")
    said, statuses = zip(*map(typed, leftover.commands), strict=True)
    assert statuses == (3, 0) and "2 to abort" in said[0] and "2 aborted" in said[1]
    assert dead.seen() == ["another producer's"]
    assert names(dead.doctor()) == {"one-copy"}


def test_what_is_decided_is_committed_by_the_printed_lines(dead):
    dead.leave(decided=True)
    found = dead.doctor()
    assert found.status == 4 and "leftovers" not in names(found)
    assert finding_of(found, "readers-held-back", "Not yet. In ").level == "danger"
    what = f"2 of its transactions are open: 4 records in {dead.topic}"
    settled = finding_of(
        found, "decided-and-open", "batch 0", what, "Not yet. In ", "writes it again"
    )
    assert found.findings[0] == settled, "what to do comes first"
    assert [typed(line)[1] for line in settled.commands] == [3, 0]
    assert dead.seen() == ROWS
    assert names(dead.doctor()) == {"one-copy"}
    assert typed(settled.commands[1])[1] == 0, "asked again it finds nothing to do"


def test_what_is_committed_and_hidden_is_shown_by_the_printed_lines(kafka, tmp_path):
    dead = DeadQuery(kafka, tmp_path, gate=True).leave(decided=True)
    newest = newest_commit(dead.log)
    (store,) = dead.opened
    late = finding_of(dead.doctor(), "decided-and-open", "2 of its transactions are open: 4 rec")
    assert "2 to commit, 1 to make visible" in typed(late.commands[0])[0]
    for verb in ("abort", "commit", "commit --force"):
        line = dead.access.command(*verb.split(), newest.gates[0].transactional_id)
        said, status = typed(f"{line} --checkpoint {dead.place}")
        assert status == 1 and "it is the gate of a batch that is decided" in said, said
    outcomes = [store.commit(c) for c in newest.committables]
    write(dead, "another producer's")
    assert outcomes == [Outcome.DONE] * 2 and dead.seen(still_open=True) == []
    found = dead.doctor()
    who = f"1 of query {dead.id}, the oldest for "
    held = finding_of(found, "readers-held-back", who, f"{dead.topic}-0 at 0 of 8")
    assert held.level == "trouble"
    hidden = finding_of(found, "decided-and-hidden", "batch 0 of query", "No. All of the batch is")
    assert [name for name, _ in hidden.items] == [c.transactional_id for c in newest.gates]
    assert found.status == 3 and "leftovers" not in names(found)
    said, statuses = zip(*map(typed, hidden.commands), strict=True)
    assert statuses == (3, 0) and "To make visible, batch 0: 1 transaction" in said[0]
    assert "1 made visible, 2 committed before; nothing is open any more.\n" in said[1]
    assert dead.seen() == [*ROWS, "another producer's"]
    assert names(dead.doctor()) == {"one-copy"}
    assert typed(hidden.commands[1])[1] == 0, "asked again it finds nothing to do"


def test_with_kip_939_no_decided_batch_times_out(kafka, tmp_path):
    found = DeadQuery(kafka, tmp_path, two_phase="required").leave(decided=True).doctor()
    finding_of(found, "decided-and-open", "Not yet: these never time out. But retention")
    assert finding_of(found, "readers-held-back", "lost by waiting").level == "trouble"


def test_what_was_decided_and_timed_out_is_salvaged_by_the_printed_lines(kafka, tmp_path):
    topic = f"doctor-{uuid.uuid4().hex[:8]}"
    kafka.create_topic(topic, config={"retention.ms": 604_800_000})
    dead = DeadQuery(kafka, tmp_path, topic, timeout_ms=1000).leave(decided=True)
    until(lambda: not dead.open(), "the broker has aborted them", 20)
    found = finding_of(
        dead.doctor(),
        "decided-and-aborted",
        "batch 0",
        f"2 of its transactions were aborted afterwards: 4 records in {dead.topic}",
        f"2 records in {dead.topic}-0 at offsets 0 to 1",
        f"Not yet, as long as the rows are there. {dead.topic} keeps them for about 7 d more",
        "Either reads the rows back from the topic",
    )
    assert found.level == "danger"
    said, statuses = zip(*map(typed, found.commands), strict=True)
    assert statuses == (3, 0) and dead.seen() == ROWS
    assert "To salvage, batch 0: 2 transactions, 4 records\n" in said[0]
    assert "2 salvaged, 1 committed; nothing is open any more.\n" in said[1]
    assert names(dead.doctor()) == {"one-copy"}
    assert typed(found.commands[1])[1] == 0, "asked again it finds nothing to do"


@pytest.mark.parametrize("told", ["open", "committed"])
def test_what_another_program_has_aborted_is_salvaged_by_the_printed_lines(dead, told):
    dead.leave(decided=True)
    decided = newest_commit(dead.log)
    abort_there(dead.kafka.bootstrap_servers, decided.committables[0])
    if told == "committed":
        assert send_all(dead.run(), "commit", decided.committables, 0) == [Outcome.DONE] * 2
    found = finding_of(
        dead.doctor(),
        "aborted-in-partition",
        f"1 of its transactions were aborted afterwards in {dead.topic}-0, and their coordinator",
        f"another program has aborted it in {dead.topic}-0",
        "Another program has ended it where its rows are",
    )
    assert found.level == "danger"
    said, statuses = zip(*map(typed, found.commands), strict=True)
    assert statuses == (3, 0) and dead.seen() == ROWS
    assert "To salvage, batch 0: 1 transaction, 2 records\n" in said[0]
    assert names(dead.doctor()) == {"one-copy"}


def test_rows_that_are_gone_where_they_were_committed_are_not_counted(kafka, tmp_path):
    """Another program has aborted partition 0; the topic has removed what is committed in 1."""
    topic = kafka.create_topic(f"doctor-{uuid.uuid4().hex[:8]}", partitions=2)
    dead = DeadQuery(kafka, tmp_path, topic)
    driver = dead.run()
    plan = restore(driver, 0)
    rows = pa.record_batch({"value": list("abcd"), "partition": pa.array([0, 1] * 2, pa.int32())})
    message = precommit(list(driver.participants.values()), plan, iter([rows]))
    [c] = decide(driver, plan, [message]).committables
    abort_there(kafka.bootstrap_servers, c, (topic, 0))
    assert send_all(driver, "commit", [c], 0) == [Outcome.DONE]
    remove(dead, 1, partition=1)
    found = finding_of(dead.doctor(), "aborted-in-partition", f"aborted afterwards in {topic}-0,")
    said, statuses = zip(*map(typed, found.commands), strict=True)
    assert statuses == (3, 0) and "1 salvaged" in said[1]
    dead.close()


def remove(dead, offset, partition=0):
    """The topic removes what is before this offset."""
    at = TopicPartition(dead.topic, partition, offset)
    admin = AdminClient(dead.kafka.client_conf)
    admin.delete_records([at])[at].result()


def test_rows_that_a_topic_removes_while_they_are_decided_and_open_are_lost(dead):
    """With --skip-lost the rest becomes visible."""
    dead.leave(decided=True)
    remove(dead, 1)
    gone = f"gone are offsets 0 to 0 of {dead.topic}-0"
    diagnosis = dead.doctor()
    certain = finding_of(diagnosis, "decided-and-lost", "batch 0", gone)
    assert certain.level == "danger" and certain.risk.startswith("YES")
    assert finding_of(diagnosis, "decided-and-open", "1 of its transactions").level == "danger"
    assert diagnosis.findings[0] == certain, "what is certain comes before what may be"
    restore = dead.access.command("restore", str(dead.place))
    said, status = typed(f"{restore} --dry-run")
    assert status == 4 and "1 lost, 1 to commit" in said
    said, status = typed(restore)
    assert status == 4 and "LOST_TRANSACTION" in said and gone in said
    assert len(dead.open()) == 1, "the other one is committed"
    typed(f"{restore} --skip-lost")
    until(lambda: not dead.open(), "the rest is committed", 20)
    assert names(dead.doctor()) == {"one-copy"}


def half_a_repair(dead, record):
    """Both transactions of a decided batch were aborted. A run that salvages them dies before it
    writes this record.
    """
    dead.leave(decided=True).abort_all()
    driver = dead.run()
    judged = judge(driver, newest_commit(dead.log))
    attempt, lost = judged.slot.attempt + 1, judged.decision.committables
    token = new_token(0, attempt)
    win_repair(driver, repair_record(driver, judged, CLAIM, judged.slot, token))
    claimed = dead.doctor()
    finding_of(claimed, "decided-and-aborted", "2 of its transactions were aborted afterwards")
    assert names(claimed) == {"decided-and-aborted", "one-copy"}
    plan = Plan(query_id=dead.id, batch_id=0, attempt=attempt, token=token)
    new = driver.participants["kafka"].write_again(lost, plan)
    if record != REPAIR:
        more = dict(lost=lost, committables=(new,))
        slot = Slot(0, attempt)
        win_repair(driver, repair_record(driver, judged, REPAIR, slot, token, **more))


def test_a_repair_that_died_before_its_record_is_a_leftover_and_done_anew(dead):
    half_a_repair(dead, REPAIR)
    found = dead.doctor()
    finding_of(found, "decided-and-aborted", "2 of its transactions were aborted afterwards")
    leftover = finding_of(found, "leftovers", f"1 open transaction of query {dead.id}")
    assert [(t.decided, t.fenced) for t in dead.open()] == [(False, False)]
    said, statuses = zip(*map(typed, leftover.commands), strict=True)
    assert statuses == (3, 0) and "2 to salvage, 1 to abort" in said[0]
    assert "To abort, batch 0: 1 transaction;" in said[0]
    assert "2 salvaged, 1 committed, 1 aborted; nothing is open" in said[1]
    assert dead.seen() == ROWS and names(dead.doctor()) == {"one-copy"}
    shown = typed(f"kafka2pc decisions show {dead.place} 0")[0]
    assert shown.count("\nlost:\n") == 1 and shown.count("\nnow:\n") == 1
    listed = typed(f"kafka2pc decisions list {dead.place}")[0]
    assert "CLAIM: A run began" in listed and "REPAIR: The rows" in listed


def test_a_repair_that_died_after_its_record_is_decided_and_open(dead):
    half_a_repair(dead, "the commit")
    found = dead.doctor()
    what = f"1 of its transactions are open: 4 records in {dead.topic}"
    line = finding_of(found, "decided-and-open", "batch 0", what).commands[1]
    assert not names(found) & {"leftovers", "decided-and-aborted"}
    assert [(t.decided, t.fenced) for t in dead.open()] == [(True, False)]
    assert "1 committed; nothing is open" in typed(line)[0]
    assert dead.seen() == ROWS and names(dead.doctor()) == {"one-copy"}


def test_a_batch_that_is_reopened_leaves_no_gate(kafka, tmp_path):
    dead = DeadQuery(kafka, tmp_path, gate=True)
    driver = dead.run()
    plan = restore(driver, 0, offsets_hash="read again")
    decided = decide(driver, plan, run_tasks(driver, plan))
    outcomes = [dead.opened[0].abort(c) for c in decided.committables]
    remove(dead, 2)  # the record of the gate, and a row
    line = dead.access.command("restore", str(dead.place))
    planned, done = typed(f"{line} --dry-run")[0], typed(line)[0]
    assert outcomes == [Outcome.DONE] * 2 and "2 to reopen, 1 to abort" in planned
    assert "2 reopened, 1 aborted; nothing is open any more" in done and dead.open() == []


@pytest.mark.parametrize("replayed", [True, False])
def test_what_was_aborted_and_removed_is_reopened_or_lost(replayed, dead):
    """Spark replays a batch of which nothing is visible, if it has its offsets."""
    driver = dead.run()
    plan = restore(driver, 0, offsets_hash="read again" if replayed else "")
    decide(driver, plan, run_tasks(driver, plan))
    dead.abort_all()
    if replayed:
        action = finding_of(dead.doctor(), "decided-and-aborted", "Not yet").action
        assert "lets Spark write all of the batch again" in action and "(salvage)" in action
    remove(dead, 1)
    found = dead.doctor()
    line = dead.access.command("restore", str(dead.place))
    (planned, status), (done, ended) = typed(f"{line} --dry-run"), typed(line)
    gone = f"gone are offsets 0 to 0 of {dead.topic}-0"
    assert gone in planned
    if not replayed:
        assert (status, ended) == (4, 4) and "2 lost" in planned and "LOST_TRANSACTION" in done
        finding_of(found, "decided-and-lost", gone, "YES: these records are lost")
        assert typed(f"{line} --skip-lost")[1] == 4
        return
    finding_of(found, "decided-and-aborted", gone, "Spark replays it", "Restart the query: that")
    assert (status, ended) == (3, 3) and "To reopen, batch 0" in planned
    assert "2 reopened" in done and "query: Spark writes it again" in done
    assert typed(line) == ("Nothing is open, and nothing was decided.\n", 0)
    again = dead.run()
    plan = restore(again, 0, offsets_hash="read again")
    commit(again, run_tasks(again, plan), 0)
    assert dead.seen() == ROWS, "the batch is there once"


def test_without_its_checkpoint_it_is_unknown_what_is_decided(dead):
    """So rows may be lost when the timeout ends. If the checkpoint is gone, it names them."""
    dead.leave(decided=True)
    diagnosis = dead.doctor(checkpoint=None)
    found = finding_of(
        diagnosis,
        "leftovers-of-unknown",
        dead.id,
        "no checkpoint was named",
        "file metadata",
        "gone for good",
        f"\nat most 4 records in {dead.topic}-0 at offsets 0 to 3\n",
        f"\nat most 2 records in {dead.topic}-0 at offsets 2 to 3",
    )
    assert [name for name, _ in found.items] == [t.transactional_id for t in dead.open()]
    assert found.commands == (dead.access.command("doctor", "--checkpoint", "CHECKPOINT"),)
    held = finding_of(diagnosis, "readers-held-back")
    for each in (found, held):
        assert each.level == "danger" and each.risk.startswith("Perhaps, in ")


def test_what_is_young_is_left_in_peace_unless_it_is_fenced(dead):
    dead.leave(decided=False)
    young = dead.doctor(older_ms=60_000)
    assert not names(young) & {"leftovers", "readers-held-back"}
    said = "2 open transactions: of a batch that is being written, or of a query that died just now"
    assert dict(young.facts)["younger than 60 s, not reported"] == said
    claim(dead.run(), 0)  # a new run, that dies before its sweep
    finding_of(dead.doctor(older_ms=60_000), "leftovers", "2 open transactions")


def test_a_decision_log_elsewhere_and_a_prefix_of_its_own_are_in_the_printed_lines(kafka, tmp_path):
    dead = DeadQuery(kafka, tmp_path, prefix="operations v1")
    driver = replace(dead.run(), log=FileLog(tmp_path / "log" / dead.id))
    dead.write(driver)
    found = dead.doctor(decision_log=str(tmp_path / "log"))
    lines = finding_of(found, "leftovers").commands
    assert "--prefix 'operations v1'" in lines[1] and f"--decision-log {tmp_path}/log" in lines[1]
    assert [typed(line)[1] for line in lines] == [3, 0] and find_open(kafka, "operations v1") == []


DAMAGE = {
    "corrupt-decision": lambda d: d[:-40],
    "unknown-format": lambda d: d.replace(b'"format": 4', b'"format": 99'),
    "wrong-cluster": lambda d: dump_decision(
        replace(load_decision(d, "here"), stores=(("kafka", "another-cluster"),))
    ),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_decision_that_cannot_be_trusted_is_a_finding_and_nothing_is_ended(name, dead):
    file = newest_file(dead.leave(decided=True))
    file.write_bytes(DAMAGE[name](file.read_bytes()))
    found = dead.doctor(prefix=None)
    finding_of(found, name)
    if name != "wrong-cluster":  # that log can be read: both are decided
        left = finding_of(found, "leftovers-of-unknown", "2 open", dead.id, "cannot be used")
        assert left.commands == () and "was named" not in left.what + left.action
    for words in (
        ["restore", str(dead.place)],
        ["restore", str(dead.place), "--dry-run"],
        ["abort", find_open_of(dead)[0], "--checkpoint", str(dead.place)],
    ):
        assert typed(dead.access.command(*words))[1] == 1
    assert len(find_open_of(dead)) == 2


def find_open_of(dead):
    return [t.transactional_id for t in find_open(dead.kafka, dead.prefix)]


def test_a_copied_checkpoint_is_a_finding_and_nothing_is_ended_from_there(dead, tmp_path):
    dead.leave(decided=True)
    copy = shutil.copytree(dead.place, tmp_path / "copy")
    found = doctor(dead.access, prefix=dead.prefix, checkpoint=str(copy)).findings
    (finding,) = [f for f in found if f.name == "moved-log"]
    assert finding.level == "danger" and "kafka2pc adopt" in finding.action
    assert not any("restore" in line for f in found for line in f.commands)
    said, status = typed(dead.access.command("restore", str(copy), "--prefix", dead.prefix))
    assert status == 1 and "MOVED_LOG" in said and len(dead.open()) == 2


def test_batches_that_take_most_of_the_timeout_are_reported_before_it_hurts(kafka, tmp_path):
    dead = DeadQuery(kafka, tmp_path, timeout_ms=60_000)
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
    finding_of(
        found, "timeout-short", "55 s of a transaction timeout of 60 s", "Make batches smaller"
    )


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


def test_speculation_and_a_missing_topic_are_reported(kafka, tmp_path):
    (tmp_path / "spark-defaults.conf").write_text("spark.speculation true")
    own = "of this test alone"  # others leave transactions open on this broker
    access, conf = Access(kafka.bootstrap_servers), str(tmp_path)
    found = doctor(access, topics=["no such"], prefix=own, spark_conf=conf)
    finding_of(found, "speculation", str(tmp_path))
    (line,) = finding_of(found, "topic-missing", "no such", "--create --topic 'no such'").commands
    assert line.startswith(f"kafka-topics.sh --bootstrap-server {kafka.bootstrap_servers} ")
    assert "decided-and-open" not in names(found) and found.status == 3
    said, status = typed(access.command("doctor", "--topic", "nowhere", "--prefix", own))
    assert "admin.properties stands for your client's properties file" in said, said
    assert status == 3


def test_a_busy_topic_keeps_no_reader_waiting(dead, monkeypatch):
    """Records that are written between the two requests are no gap, for a user without READ too."""
    ends = Survey.ends

    def busy(self, layout, committed):
        found = ends(self, layout, committed)
        write(dead, "x")
        return found

    monkeypatch.setattr(Survey, "ends", busy)
    monkeypatch.setattr(Survey, "open_producers", lambda self, layout: None)
    found = dead.doctor(topics=[dead.topic])
    assert names(found) == {"one-copy", "read-not-allowed"}


def test_doctor_outlives_answers_that_are_not_there(dead, monkeypatch):
    dead.leave(decided=True)
    monkeypatch.setattr(cluster_checks, "why_no_two_phase", lambda *_: "The broker is too old.")
    monkeypatch.setattr(
        Survey,
        "ends",
        lambda self, layout, committed: (
            {} if committed else {(p.topic, p.partition): 9 for p in layout}
        ),
    )
    assert any("KIP-939 cannot be had" in f.what for f in dead.doctor().findings)


def test_every_finding_of_the_table_is_provoked_here_or_beside_the_wire():
    tests = Path(__file__).parents[1]
    files = [*tests.glob("operations/*.py"), *tests.glob("kafka/*.py")]
    text = "".join(file.read_text(encoding="utf-8") for file in files)
    assert [name for name in FINDINGS if f'"{name}"' not in text] == []
