"""The local Kafka: jars that are whole, no orphan, clear words without Java, nodes that die and
come back, rights, logs when it fails.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import uuid
from pathlib import Path

import pytest
from confluent_kafka import KafkaError, KafkaException, Producer
from confluent_kafka.admin import AdminClient
from kafka_fixtures import back_at_work, values
from marks import first_of

from kafka2pc.local import broker, readiness
from kafka2pc.local.broker import LocalKafka
from kafka2pc.local.jars import FetchFailed, NoJava, fetch_jars, find_java
from kafka2pc.local.nodes import BrokerFailed, Node, free_ports
from kafka2pc.operations.access import read_properties
from kafka2pc.proof.child_process import until

SECONDS = 30  # for anything that should take one; a busy machine may need more


def runs(pid):
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return False
    return True


def python(code, *args, **more):
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, args)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        **more,
    )


@pytest.fixture
def killed_later():
    """Processes and pids that must not outlive the test."""
    left = []
    yield left
    for one in left:
        pid = one.pid if isinstance(one, subprocess.Popen) else int(one)
        if runs(pid):
            os.kill(pid, signal.SIGKILL)
        if isinstance(one, subprocess.Popen):
            one.communicate()


# -- Java --


def fake_java(folder, script, monkeypatch):
    java = folder / "bin" / "java"
    java.parent.mkdir()
    java.write_text(f"#!{sys.executable}\n{script}")
    java.chmod(0o755)
    monkeypatch.setenv("JAVA_HOME", str(folder))
    return str(java)


def version_script(text):
    return f"import sys; sys.stderr.write({text!r})"


@pytest.mark.parametrize(
    "said",
    [
        'java version "1.8.0_292"',
        'openjdk version "11.0.20" 2023-07-18',
        'openjdk version "16" 2021-03-16',
        "no idea",
    ],
)
def test_a_java_that_is_too_old_is_refused_with_what_to_install(said, tmp_path, monkeypatch):
    fake_java(tmp_path, version_script(said), monkeypatch)
    with pytest.raises(NoJava, match="needed is 17 or newer") as e:
        LocalKafka().start()
    assert "openjdk-17" in e.value.action and e.value.risk.startswith("No.")


NEW_ENOUGH = [
    'openjdk version "17.0.15" 2025-04-15',
    'java version "25" 2025-09-16',
    'Picked up JAVA_TOOL_OPTIONS: -Dx=1\nopenjdk version "21.0.1"',
]


@pytest.mark.parametrize("said", NEW_ENOUGH)
def test_a_java_that_is_new_enough_is_taken_from_java_home(said, tmp_path, monkeypatch):
    java = fake_java(tmp_path, version_script(said), monkeypatch)
    assert find_java() == java


def test_no_java_at_all_says_so(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("JAVA_HOME", raising=False)
    with pytest.raises(NoJava, match="no java on PATH"):
        find_java()


def test_a_java_home_without_java_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    with pytest.raises(NoJava, match="JAVA_HOME is .*no program bin/java"):
        find_java()


# -- the download, with an Ivy of our own: it writes two jars, and a line for each run --

IVY = """
import json, os, pathlib, sys, time
if sys.argv[1] == "-version":
    sys.stderr.write('openjdk version "17.0.1"')
    sys.exit()
home = pathlib.Path(__file__).parent.parent
note = lambda word: (home / "runs").open("a").write(word + "\\n")
note("begin")
time.sleep(float(os.environ.get("IVY_SECONDS", "0")))
if (home / "offline").exists():
    print("\\t\\tUNRESOLVED DEPENDENCY: org.example#one;1.0: not found")
    sys.exit(1)
jars = pathlib.Path(sys.argv[sys.argv.index("-retrieve") + 1]).parent
jars.mkdir()
for name in ("one", "two"):
    try:
        print(f"downloading {name}", flush=True)
    except BrokenPipeError:
        pass  # Java does not mind that the reader is gone
    (jars / f"{name}-1.0.jar").write_bytes(name.encode() * 1000)
note("end")
"""
WANTED = [("org.example", "one", "1.0")]
FETCH = (
    "from kafka2pc.local.jars import fetch_jars; print(fetch_jars('pair', [('org.example', 'one',"
    " '1.0')], progress=None))"
)


@pytest.fixture
def ivy(tmp_path, monkeypatch):
    """The folder of the fake: its file `runs` tells what it did."""
    home = tmp_path / "java"
    home.mkdir()
    fake_java(home, IVY, monkeypatch)
    monkeypatch.setenv("KAFKA2PC_CACHE", str(tmp_path / "cache"))
    return home


def runs_of(ivy):
    return (ivy / "runs").read_text().split() if (ivy / "runs").exists() else []


def contents(folder):
    return {p.name: p.read_bytes() for p in folder.glob("*.jar")}


BOTH = {"one-1.0.jar": b"one" * 1000, "two-1.0.jar": b"two" * 1000}


def test_jars_are_fetched_once_and_then_found_offline(ivy):
    folder = fetch_jars("pair", WANTED)
    (ivy / "offline").touch()
    assert fetch_jars("pair", WANTED) == folder and contents(folder) == BOTH
    assert runs_of(ivy) == ["begin", "end"]


@pytest.mark.parametrize(
    "harm",
    [
        lambda folder: os.truncate(folder / "one-1.0.jar", 10),
        lambda folder: (folder / "one-1.0.jar").unlink(),
        lambda folder: (folder / "one-1.0.jar").write_bytes(b""),
    ],
    ids=["truncated", "missing", "empty"],
)
def test_a_damaged_jar_is_noticed_named_and_repaired(harm, ivy):
    folder, told = fetch_jars("pair", WANTED), []
    harm(folder)
    fetch_jars("pair", WANTED, progress=told.append)
    assert contents(folder) == BOTH
    assert told[0] == "pair: damaged, fetching again: one-1.0.jar"


def test_a_mismatch_makes_all_checksums_count(ivy):
    folder, told = fetch_jars("pair", WANTED), []
    os.truncate(folder / "one-1.0.jar", 10)
    (folder / "two-1.0.jar").write_bytes(b"x" * 3000)  # same size
    fetch_jars("pair", WANTED, progress=told.append)
    assert contents(folder) == BOTH and "two-1.0.jar" in told[0]


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "{}"], ids=["empty", "cut", "list", "nothing in it"]
)
def test_a_damaged_manifest_counts_as_no_download(text, ivy):
    folder = fetch_jars("pair", WANTED)
    (folder / "manifest.json").write_text(text)
    fetch_jars("pair", WANTED, progress=None)
    assert set(json.loads((folder / "manifest.json").read_text())["jars"]) == set(BOTH)


def test_other_dependencies_under_the_same_name_are_fetched(ivy):
    fetch_jars("pair", WANTED, progress=None)
    fetch_jars("pair", [("org.example", "one", "2.0")], progress=None)
    assert runs_of(ivy) == ["begin", "end"] * 2


def test_a_failed_download_says_what_is_missing_and_leaves_no_jar(ivy, tmp_path):
    (ivy / "offline").touch()
    with pytest.raises(FetchFailed, match=r"UNRESOLVED DEPENDENCY: org.example#one;1.0"):
        fetch_jars("pair", WANTED, progress=None)
    assert not list((tmp_path / "cache").rglob("*.jar"))


def test_a_cache_that_cannot_be_written_is_named(ivy, tmp_path):
    (tmp_path / "cache").write_text("a file where a folder should be")
    with pytest.raises(FetchFailed, match="KAFKA2PC_CACHE"):
        fetch_jars("pair", WANTED, progress=None)


def test_two_processes_fetch_once(ivy, monkeypatch):
    monkeypatch.setenv("IVY_SECONDS", "0.5")
    both = [python(FETCH), python(FETCH)]
    folders = {p.communicate(timeout=60)[0].strip() for p in both}
    assert [p.returncode for p in both] == [0, 0] and len(folders) == 1
    assert contents(Path(folders.pop())) == BOTH
    assert runs_of(ivy) == ["begin", "end"]


def test_after_a_killed_fetch_the_next_one_waits_for_its_ivy_and_starts_clean(
    ivy, monkeypatch, killed_later
):
    monkeypatch.setenv("IVY_SECONDS", "1")
    first = python(FETCH)
    killed_later.append(first)
    until(lambda: runs_of(ivy) == ["begin"], "the first fetch has started its Ivy")
    first.kill()
    assert contents(fetch_jars("pair", WANTED, progress=None)) == BOTH
    assert runs_of(ivy) == ["begin", "end", "begin", "end"]


# -- the supervisor, with a sleep in place of the JVM --

SLEEP = ["/bin/sh", "-c", "exec sleep 60"]
NODE = """
import os, sys, time
from pathlib import Path
from kafka2pc.local.nodes import Node
node = Node(Path(sys.argv[1]), ["/bin/sh", "-c", "exec sleep 60"], keep=sys.argv[2] == "keep")
node.start()
fork = os.fork() if sys.argv[2] == "fork" else 1
if fork: print(node.pid, fork, flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("how", ["plain", "fork", "keep"])
def test_no_orphan_when_python_is_killed(how, tmp_path, killed_later):
    """Also when a fork of ours lives on and holds the pipe open. The folder goes too, unless it is
    to be kept.
    """
    folder = tmp_path / "cluster" / "node-0"
    folder.mkdir(parents=True)
    parent = python(NODE, folder, how)
    pid, fork = parent.stdout.readline().split()
    killed_later += [pid, *([fork] if how == "fork" else []), parent]
    assert runs(pid)
    parent.kill()
    until(lambda: not runs(pid), "the node is gone")
    until(lambda: folder.exists() == (how == "keep"), "the folder is kept or gone")
    assert folder.parent.exists() == (how == "keep")


@pytest.fixture
def node(tmp_path):
    one = Node(tmp_path, SLEEP)
    one.start()
    yield one
    one.kill()


def test_a_killed_node_is_gone_and_keeps_its_folder(node):
    pid = node.pid
    node.kill()
    assert not runs(pid) and not node.alive and not node.died and node.folder.exists()


def test_a_node_that_ends_by_itself_is_known_to_have_died(node):
    os.kill(node.pid, signal.SIGTERM)
    until(lambda: node.died, "the node is known to have died")


def test_a_node_is_out_of_reach_of_ctrl_c(node):
    assert os.getsid(node.pid) != os.getsid(0) and os.getpgid(node.pid) != os.getpgid(0)


def test_an_interrupted_start_leaves_no_process(node):
    pid, node.pid = node.pid, None  # as if Ctrl-C had come before we read it
    node.kill()
    assert not runs(pid)


# -- ports --


def test_ports_are_free_and_outside_the_range_of_outgoing_connections():
    ports = free_ports(50)
    assert len(set(ports)) == 50 and all(18000 <= port <= 32000 for port in ports)
    limits = Path("/proc/sys/net/ipv4/ip_local_port_range")
    assert not limits.exists() or max(ports) < int(limits.read_text().split()[0])


# -- the real broker --

real = pytest.mark.kafka


def commit_one(conf, topic, value, transactional_id="tests-broker"):
    producer = Producer(conf | {"transactional.id": transactional_id, "log_level": 0})
    producer.init_transactions(30)
    producer.begin_transaction()
    producer.produce(topic, value)
    producer.commit_transaction(30)


@pytest.mark.never_unsteady
@real
def test_a_killed_node_comes_back_with_committed_rows_and_open_transactions(kafka):
    kafka.create_topic("broker-kill")
    commit_one(kafka.client_conf, "broker-kill", "committed")
    producer = Producer(
        kafka.client_conf | {"transactional.id": "tests-broker-open", "log_level": 0}
    )
    producer.init_transactions(30)
    producer.begin_transaction()
    producer.produce("broker-kill", "open")
    producer.flush(30)
    before, servers = kafka.pids[0], kafka.bootstrap_servers
    kafka.kill()
    assert kafka.pids == [None] and not runs(before)
    kafka.restart()
    assert kafka.pids[0] not in (None, before) and kafka.bootstrap_servers == servers
    found = lambda: values(kafka, "broker-kill", still_open=True)
    assert until(found, "the committed row can be read", 60) == ["committed"]
    assert values(kafka, "broker-kill", "read_uncommitted") == ["committed", "open"]
    producer.commit_transaction(30)
    assert values(kafka, "broker-kill") == ["committed", "open"]


@real
def test_a_paused_node_does_not_answer_until_it_is_resumed(kafka):
    kafka.pause()
    try:
        assert not readiness.is_joined(kafka.client_conf, kafka.cluster_id, [0])
    finally:
        kafka.resume()
        back_at_work(kafka)
    until(lambda: readiness.is_joined(kafka.client_conf, kafka.cluster_id, [0]), "the node is back")


@pytest.mark.never_unsteady
@real
def test_topics_are_made_on_purpose_only(kafka):
    asked = (
        AdminClient(kafka.client_conf)
        .list_topics("broker-typo", timeout=SECONDS)
        .topics["broker-typo"]
    )
    assert asked.error.name() == "UNKNOWN_TOPIC_OR_PART"
    kafka.create_topic("broker-made", partitions=3, config={"max.message.bytes": 2000})
    assert values(kafka, "broker-made") == []


@pytest.mark.never_unsteady
@real
def test_secure_lets_admin_in_and_gives_alice_no_right(secure):
    secure.create_topic("t")
    commit_one(secure.client_conf, "t", "by admin")
    assert values(secure, "t") == ["by admin"]
    with pytest.raises(KafkaException) as e:
        commit_one(secure.client_conf_for("alice"), "t", "by alice")
    assert e.value.args[0].name() == "TRANSACTIONAL_ID_AUTHORIZATION_FAILED"
    secrets = set(secure.passwords.values())
    assert len(secrets) == 2
    logs = "".join(log.read_text() for log in secure.logs)
    assert not [s for s in secrets if s in logs or s in repr(secure)]


@real
def test_a_start_that_fails_keeps_the_log_and_quotes_it(tmp_path, monkeypatch):
    monkeypatch.setattr(broker.tempfile, "mkdtemp", lambda prefix: str(tmp_path))
    with pytest.raises(BrokerFailed, match="Invalid value 0 for configuration num.io.threads") as e:
        LocalKafka(config={"num.io.threads": 0}).start()
    assert str(tmp_path / "node-0" / "broker.log") in e.value.what
    assert "num.io.threads" in (tmp_path / "node-0" / "broker.log").read_text()


@real
@pytest.mark.full
def test_a_lost_race_for_a_port_is_run_again_and_a_dead_broker_leaves_its_log(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(broker.tempfile, "mkdtemp", lambda prefix: str(tmp_path))
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        answers = [[other.getsockname()[1], *free_ports(1)], free_ports(2)]
        monkeypatch.setattr(broker, "free_ports", lambda count: answers.pop(0))
        kafka = LocalKafka().start()
    assert answers == []
    os.kill(kafka.pids[0], signal.SIGKILL)  # not by kafka.kill
    until(lambda: kafka.pids == [None], "the node is known to have died")
    with pytest.warns(UserWarning, match="had failed"):
        kafka.stop()
    assert kafka.logs[0].exists()


SERVE = (
    "from kafka2pc.local.broker import serve; serve({}echo=lambda line: print(line, flush=True))"
)


@real
@pytest.mark.parametrize(
    "how", first_of([signal.SIGTERM, signal.SIGKILL], ids=lambda how: how.name)
)
def test_serve_says_where_and_leaves_nothing(how, killed_later):
    server = python(SERVE.format(""))
    killed_later.append(server)
    settings = Path(server.stdout.readline().split(": ")[1].strip())
    servers = server.stdout.readline().strip()
    assert servers in settings.read_text() and server.stdout.readline().startswith("ready")
    port = int(servers.rpartition(":")[2])
    assert readiness.is_listening(port)
    server.send_signal(how)
    said, _ = server.communicate(timeout=SECONDS)
    if how == signal.SIGTERM:
        assert server.returncode == 0 and said == "stopped\n"
    until(lambda: not readiness.is_listening(port), "the port is closed")
    until(lambda: not settings.parent.parent.exists(), "the folder is gone")


# The signal comes while `Popen.poll` holds the lock that `Popen.wait` needs.
SIGNAL_IN_POLL = """
import os, signal, subprocess
from kafka2pc.local.broker import serve
poll, ready = subprocess.Popen._internal_poll, []
def poll_with_signal(self, *args, **more):
    if ready.pop() if ready else False:
        self._waitpid_lock.acquire(False)
        os.kill(os.getpid(), signal.SIGTERM)
        self._waitpid_lock.release()
    return poll(self, *args, **more)
subprocess.Popen._internal_poll = poll_with_signal
def echo(line):
    print(line, flush=True)
    if line.startswith("ready"):
        ready.append(True)
serve(echo=echo)
"""


@real
@pytest.mark.full
def test_a_signal_in_the_middle_of_a_look_at_a_node_ends_it_too(killed_later):
    server = python(SIGNAL_IN_POLL)
    killed_later.append(server)
    said, _ = server.communicate(timeout=60)
    assert said.endswith("\nstopped\n") and server.returncode == 0


@real
@pytest.mark.full
@pytest.mark.parametrize(
    "tls", first_of([False, True], ids={False: "logins", True: "certificates"}.get, rest="nightly")
)
def test_serve_writes_for_each_user_what_a_client_needs(tls, killed_later):
    server = python(SERVE.format("tls=True, " if tls else "secure=True, "))
    killed_later.append(server)
    for user in ("admin", "alice"):
        said = server.stdout.readline()
        assert said.startswith(f"settings for {user}: ")
        assert (
            AdminClient(read_properties(said.split(": ")[1].strip()))
            .list_topics(timeout=SECONDS)
            .brokers
        )
    server.send_signal(signal.SIGTERM)
    server.communicate(timeout=SECONDS)


@pytest.mark.kafka
def test_a_connection_that_breaks_while_a_topic_is_made_is_no_failure(kafka, monkeypatch):
    asked = []

    class Flaky(AdminClient):
        def list_topics(self, *args, **kwargs):
            asked.append(args)
            if len(asked) == 1:
                raise KafkaException(KafkaError(KafkaError._TRANSPORT))
            return super().list_topics(*args, **kwargs)

    monkeypatch.setattr(readiness, "AdminClient", Flaky)
    name = f"flaky-{uuid.uuid4().hex[:8]}"
    kafka.create_topic(name, partitions=2)
    assert asked == [(name,)] * len(asked) and len(asked) > 1


def test_each_node_needs_one_version():
    with pytest.raises(ValueError, match="one for each of the 3 nodes"):
        LocalKafka(nodes=3, version=["3.9.1", "4.3.1"])
