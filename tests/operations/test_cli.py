"""The command line: listings, tables, and errors without a stack trace."""

import json
import shlex
import subprocess
import sys
import uuid
from dataclasses import replace
from pathlib import Path

import pytest
from confluent_kafka.admin import AdminClient
from dead_query_fixtures import ROWS, DeadQuery, find_open
from shell import run, typed

from kafka2pc.backends.places import masked
from kafka2pc.decision_logs.opening import open_log
from kafka2pc.kafka.wire.cluster import Cluster
from kafka2pc.operations.query import open_query
from kafka2pc.protocol.errors import MovedLog, Superseded
from kafka2pc.protocol.phases.commit import commit
from kafka2pc.protocol.phases.decide import decide

pytestmark = [pytest.mark.kafka, pytest.mark.never_unsteady]


def test_adopt_gives_a_log_in_a_topic_to_another_prefix_and_then_restore_writes_under_it(
    kafka, tmp_path
):
    """The new prefix comes after the old one in the alphabet, so the ids in the cluster mislead."""
    dead, topic = DeadQuery(kafka, tmp_path), f"kafka:decisions-{uuid.uuid4().hex[:8]}"
    driver = lambda prefix: replace(
        dead.run(), log=open_log(topic, dead.id, dead.conf.items(), prefix)
    )
    where = ["--decision-log", topic]
    opened = lambda: open_query(str(dead.place), topic, conf=dead.conf).log.prefix
    old, new = driver("a-old"), driver("b-new")
    first = dead.write(old)
    commit(old, first, 0)
    assert opened() == "a-old"
    with pytest.raises(MovedLog):
        dead.write(new, 1)
    line = dead.access.command("adopt", str(dead.place), *where)
    said, status = typed(f"{line} --prefix b-new")
    assert (status, "adopted in slot" in said, opened()) == (0, True, "b-new"), said
    assert "nothing has changed" in typed(line)[0]  # without --prefix it stays the owner
    again = json.loads(run(f"{line} --json").stdout)
    assert again == {"place": str(dead.place), "adopted": False, "slot": None}
    with pytest.raises(MovedLog):  # in line it claims nothing: at the decision
        messages = dead.write(old, 1, first[0].plan.token)
        decide(old, messages[0].plan, messages)
    living = driver("b-new")
    messages = dead.write(living, 1)
    restored, status = typed(dead.access.command("restore", str(dead.place), *where))
    assert status == 0, restored
    with pytest.raises(Superseded):
        decide(living, messages[0].plan, messages)
    again = driver("b-new")
    commit(again, dead.write(again, 1), 1)
    assert dead.seen() == sorted([*ROWS, *(f"1{v}" for v in "abcd")])


@pytest.mark.parametrize(
    "prefix", ["kafka2pc", None], ids=["the default prefix", "a prefix of its own"]
)
def test_decisions_in_a_topic_are_listed_shown_and_restored_from_the_shell(prefix, kafka, tmp_path):
    dead, topic = (
        DeadQuery(kafka, tmp_path, prefix=prefix),
        f"kafka:decisions-{uuid.uuid4().hex[:8]}",
    )
    driver = replace(dead.run(), log=open_log(topic, dead.id, dead.conf.items(), dead.prefix))
    messages = dead.write(driver)
    decide(driver, messages[0].plan, messages)
    for place in ([str(dead.place), "--decision-log", topic], [f"{topic}/{dead.id}"]):
        shown, status = typed(dead.access.command("decisions", "show", *place[:1], "0", *place[1:]))
        assert (status, shown.count(f"{dead.prefix}-{dead.id}")) == (0, 2)
    line = dead.access.command("restore", str(dead.place), "--decision-log", topic)
    assert [typed(f"{line} --dry-run")[1], typed(line)[1]] == [3, 0]
    assert dead.seen() == ROWS
    slow = replace(dead.run(), log=driver.log)
    messages = dead.write(slow, 1)
    words = ["--checkpoint", str(dead.place), "--decision-log", topic]
    # others use the default prefix, too
    ours = [t.transactional_id for t in find_open(kafka, f"{dead.prefix}-{dead.id}")]
    assert [typed(dead.access.command("abort", name, *words))[1] for name in ours] == [0, 0]
    # an abort fences: a driver that is not dead after all may not decide
    with pytest.raises(Superseded):
        decide(slow, messages[0].plan, messages)
    writers = {
        t.transactional_id
        for t in find_open(kafka, "", ())
        if t.transactional_id.endswith(f"-decisions-{dead.id}")
    }
    # one id, so the last writer fences all others
    assert writers == {f"{dead.prefix}-decisions-{dead.id}"}


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


def test_the_words_of_kafkas_own_tool_are_understood(dead, tmp_path):
    dead.leave(decided=False)
    (tmp_path / "admin.properties").write_text("client.id=operator\n")
    servers = dead.kafka.bootstrap_servers
    front = f"--bootstrap-server {servers} --command-config {tmp_path}/admin.properties"
    ids = [t.transactional_id for t in dead.open()]
    described = run(f"kafka2pc transactions {front} describe --transactional-id {ids[0]} --json")
    assert json.loads(described.stdout)[0]["transactional_id"] == ids[0]
    listed = typed(f"kafka2pc transactions {front} list --prefix {dead.prefix}")[0]
    assert all(name in listed for name in ids)
    place = f"--checkpoint {shlex.quote(str(dead.place))}"
    for group, where in (("transactions ", front), ("", "")):
        words = f"abort --transactional-id {ids.pop()} {place} --bootstrap-server={servers}"
        assert typed(f"kafka2pc {group}{where} {words}")[1] == 0
    assert dead.open() == []
    unknown = f"kafka2pc transactions describe unused --bootstrap-server {servers}"
    error = json.loads(run(f"{unknown} --json").stderr)
    assert error["status"] == typed(unknown)[1] == 1


def test_tables_and_words_say_the_same(dead):
    dead.leave(decided=True)
    place, env = (
        shlex.quote(str(dead.place)),
        {
            "KAFKA2PC_BOOTSTRAP_SERVERS": dead.kafka.bootstrap_servers,
            "COLUMNS": "80",
        },
    )
    ids = [t.transactional_id for t in dead.open()]
    listed = typed(f"kafka2pc transactions list --checkpoint {place}", **env)[0]
    assert f"Query {dead.id}: 2 open, 2 decided, the oldest for " in listed
    unknown = f"kafka2pc doctor --prefix {dead.prefix} --older-than 0"
    for command in (unknown, f"kafka2pc decisions show {place} 0"):
        lines = typed(command, **env)[0].splitlines()
        for each in ids:
            assert f" in {dead.topic}-0 at offsets " in lines[lines.index(each) + 1]
    for shown in (listed, typed(f"kafka2pc restore {place} --dry-run", **env)[0]):
        lines = shown.splitlines()
        for each in ids:  # whole, and what there is to say below it
            assert f"{dead.topic}-0" in lines[lines.index(each) + 1]
            assert "; times out in " in lines[lines.index(each) + 1]
    assert listed.count("; decided: yes") == 2
    described = typed(f"kafka2pc transactions describe {ids[0]}", **env)[0]
    assert f"\n  partitions: {dead.topic}-0\n" in described and "(('" not in described
    assert "decided: ? (name its checkpoint)" in described
    decided = typed(f"kafka2pc decisions list {place}", **env)
    assert "COMMIT" in decided[0] and typed(f"kafka2pc decisions {place}", **env) == decided
    examined = typed(f"kafka2pc doctor --checkpoint {place}", **env)[0]
    assert examined.startswith("DANGER  decided-and-open") and "\nuser: " in examined
    assert examined.count("one-copy\n") == 1 and examined.count("a partition with one copy") == 2
    assert typed(f"kafka2pc decisions show {place} 7", **env)[1] == 1
    assert typed("kafka2pc transactions describe unused", **env)[1] == 1


def test_missing_servers_are_an_error(monkeypatch):
    monkeypatch.delenv("KAFKA2PC_BOOTSTRAP_SERVERS", raising=False)
    said, status = typed("kafka2pc transactions list")
    assert status == 1 and "bootstrap.servers is missing" in said


def test_a_decision_topic_is_not_created_by_a_command_that_only_reads(kafka, dead):
    dead.leave(decided=True)
    topic = f"typo-{uuid.uuid4().hex[:8]}"
    said, status = typed(
        dead.access.command(
            "decisions", "list", str(dead.place), "--decision-log", f"kafka:{topic}"
        )
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


def test_what_is_missing_for_a_storage_is_printed_without_a_stack_trace(monkeypatch):
    def no_s3(*args, **kwargs):
        raise ImportError("Install s3fs to access S3")

    monkeypatch.setattr("kafka2pc.operations.query.open_query", no_s3)
    assert typed("kafka2pc decisions list s3://bucket/checkpoint") == (
        "Install s3fs to access S3\n",
        1,
    )


def test_a_broker_for_a_script_prints_one_document_when_it_is_ready():
    code = "from kafka2pc.operations.cli.main import main; main()"
    line = [sys.executable, "-c", code, "broker", "--json"]
    printed = ""
    with subprocess.Popen(line, stdout=subprocess.PIPE, text=True) as process:
        try:
            while not printed.endswith("\n}\n"):
                row = process.stdout.readline()
                assert row, printed
                printed += row
            found = json.loads(printed)
            with Cluster({"bootstrap.servers": found["bootstrap_servers"]}) as cluster:
                assert cluster.nodes() == [0]
            assert Path(found["settings"]["client"]).exists()
        finally:
            process.terminate()
        assert (process.stdout.read(), process.wait(60)) == ("", 0)
