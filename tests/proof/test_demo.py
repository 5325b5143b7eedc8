"""The demonstration: what it reads, how it judges, when it strikes, what it draws, and that nothing
of it stays behind.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from xml.etree import ElementTree

import psutil
import pytest
from typer.testing import CliRunner

from kafka2pc.kafka.read.whole_topic import Record
from kafka2pc.local import flights
from kafka2pc.operations.cli import app as cli
from kafka2pc.proof.demo import demo
from kafka2pc.proof.demo import job as demo_job
from kafka2pc.proof.demo import picture as demo_picture
from kafka2pc.proof.demo import report as demo_report
from kafka2pc.protocol.history import Event

KAFKA2PC = Path(sys.executable).with_name("kafka2pc")
SVG = "{http://www.w3.org/2000/svg}"


# -- what it reads --


def test_every_flight_has_its_row_number():
    header, *lines = flights.flights()
    assert header.startswith("row,year,") and header.split(",")[12] == "tailnum"
    assert len(lines) == 336_776
    assert [int(line.split(",", 1)[0]) for line in lines] == list(range(1, 336_777))
    assert sum(line.split(",")[12] == "NA" for line in lines) == 2_512
    assert len(header.split(",")) == len(demo_job.COLUMNS.split(","))


def test_files_hold_all_flights_in_order_and_age(tmp_path):
    lines = flights.flights(1_003)
    sizes = demo_job.write_files(lines, tmp_path / "flights", 8)
    files = sorted((tmp_path / "flights").iterdir(), key=lambda file: file.stat().st_mtime)
    assert [file.name for file in files] == [f"{i:03}.csv" for i in range(8)]
    read = [file.read_text().splitlines() for file in files]
    assert [len(found) - 1 for found in read] == sizes
    assert [line for found in read for line in found[1:]] == lines[1:]


# -- how it judges --


def records(*rows, key=b"N14228"):
    return [
        Record("flights", 0, offset, key, json.dumps({"row": row}).encode(), (), 0)
        for offset, row in enumerate(rows)
    ]


@pytest.mark.never_unsteady
@pytest.mark.parametrize(
    ("rows", "lost", "duplicated", "reordered", "status"),
    [
        ((1, 2, 3), 0, 0, 0, 0),
        ((1, 3), 1, 0, 0, 1),
        ((1, 2, 2, 3), 0, 1, 0, 1),
        ((1, 2, 3, 1, 2, 3), 0, 3, 2, 1),
        ((1, 2, 4), 1, 0, 0, 1),
        ((), 3, 0, 0, 1),
    ],
    ids=["exact", "lost", "twice", "replayed", "foreign", "empty"],
)
def test_status_is_0_only_if_nothing_is_lost_or_duplicated(
    rows, lost, duplicated, reordered, status
):
    report = demo_report.count("kafka2pc", 3, records(*rows))
    assert (report.lost, report.duplicated, report.reordered) == (lost, duplicated, reordered)
    assert demo_report.exit_status([report]) == status


def test_a_row_too_many_is_noticed():
    assert demo_report.exit_status([demo_report.count("kafka2pc", 3, records(1, 2, 3, 4))]) == 1


def test_a_kill_that_never_came_is_no_success():
    assert (
        demo_report.exit_status([demo_report.count("kafka2pc", 1, records(1), kills=4, survived=3)])
        == 1
    )


def test_sparks_own_sink_is_not_judged_and_ours_must_be_there():
    ours, theirs = (
        demo_report.count("kafka2pc", 1, records(1)),
        demo_report.count("kafka", 1, records(1, 1)),
    )
    assert demo_report.exit_status([ours, theirs]) == 0
    assert demo_report.exit_status([theirs]) == 1


def test_rows_without_a_key_have_no_order():
    assert demo_report.count("kafka2pc", 2, records(2, 1, key=None)).reordered == 0
    assert demo_report.count("kafka2pc", 2, records(2, 1)).reordered == 1


# -- when it strikes from outside --


class FakeProgress:
    """A batch of 10 rows, of which `there` are in the topic; the commit log grows as `commits`
    says, look by look.
    """

    sizes = [10] * 8

    def __init__(self, there, commits):
        self.there, self.commits = there, list(commits)

    def committed(self):
        return self.commits.pop(0)

    def arrived(self, batch_id):
        return self.there


class FakeJob:
    def __init__(self):
        self.signals = []

    def signal_driver(self, signum):
        self.signals.append(signum)


KILLED, SPARED = [signal.SIGSTOP, signal.SIGKILL], [signal.SIGSTOP, signal.SIGCONT]


@pytest.mark.parametrize(
    ("whole", "there", "commits", "struck", "signals"),
    [
        (True, 10, [3, 3], 3, KILLED),
        (True, 10, [3, 4], None, SPARED),
        (True, 9, [3], None, []),
        (True, 10, [2], None, []),
        (False, 4, [3, 3], 3, KILLED),
        (False, 4, [5, 5], 5, KILLED),
        (False, 0, [3], None, []),
        (False, 10, [3], None, []),
        (False, 4, [8], None, []),
    ],
    ids=[
        "all there",
        "just committed",
        "one missing",
        "too early",
        "some there",
        "a later batch",
        "none there",
        "all there already",
        "no batch left",
    ],
)
def test_a_kill_from_outside_hits_only_a_batch_that_is_not_complete(
    whole, there, commits, struck, signals
):
    job = FakeJob()
    kill = demo.FromOutside(batch_id=3, victim="driver", text="", whole=whole)
    run = SimpleNamespace(progress=FakeProgress(there, commits))
    assert kill.strike(run, job) == struck
    assert job.signals == signals


def test_both_sinks_are_killed_in_as_many_places_of_the_same_kind():
    ours, theirs = demo.kills("kafka2pc", 32), demo.kills("kafka", 32)
    assert [(k.batch_id, k.victim) for k in ours] == [(k.batch_id, k.victim) for k in theirs]
    assert [k.victim for k in ours] == ["worker", "driver", "driver", "broker"]


# -- what it draws --


def events(batches=32):
    """The history of a run with one kill of the driver and one of the broker."""
    found, now = [], 0

    def note(kind, op, **ids):
        nonlocal now
        now += 250
        found.append(Event(kind=kind, op=op, at_ms=now, process=1, ids=ids))

    note("ok", "start")
    for batch_id in range(batches):
        note("invoke", "plan", batch_id=batch_id)
        note("ok", "decide", batch_id=batch_id)
        if batch_id == 4:
            note(
                "info",
                "crash",
                batch_id=batch_id,
                victim="driver",
                text="the driver & its <workers>",
            )
            note("ok", "start")
            note("invoke", "plan", batch_id=batch_id)
            note("ok", "drain", batch_id=batch_id)
        if batch_id == 6:
            note("info", "crash", batch_id=batch_id, victim="broker", text="the broker")
            note("ok", "broker back")
        note("ok", "commit log", batch_id=batch_id)
    return found


def drawn(svg, kind):
    return [e for e in ElementTree.fromstring(svg).iter() if e.get("class") == kind]


def test_the_picture_is_well_formed_small_and_needs_nothing_from_outside():
    svg = demo_picture.picture([("kafka2pc", events()), ("kafka", events())])
    root = ElementTree.fromstring(svg)
    assert root.tag == f"{SVG}svg" and root.find(f"{SVG}title").text
    assert len(svg) < 60_000
    assert not re.search(r"href|url\(|<script|@import", svg)
    assert "prefers-color-scheme:dark" in svg
    classes = {c for e in root.iter() for c in (e.get("class") or "").split()} - {"k2pc"}
    assert all(f".k2pc .{c}" in svg for c in classes), "every class has a style"


def test_the_picture_shows_each_try_kill_absence_and_decision():
    svg, legend = demo_picture.picture([("kafka2pc", events())]), 1
    assert len(drawn(svg, "done")) == 31 + legend
    assert len(drawn(svg, "cut")) == 1 + legend
    assert len(drawn(svg, "drained")) == 1 + legend
    assert len(drawn(svg, "x")) == 2 + legend
    assert len(drawn(svg, "off")) == 2 + legend
    assert len(drawn(svg, "dot")) == 32 + legend
    assert len(drawn(svg, "up")) == 3 + legend


def test_everything_in_the_picture_is_inside_of_it():
    root = ElementTree.fromstring(
        demo_picture.picture([("kafka2pc", events(8)), ("kafka", events(32))])
    )
    width, height = map(float, root.get("viewBox").split()[2:])
    for rect in root.iter(f"{SVG}rect"):
        x, y, w, h = (float(rect.get(name)) for name in ("x", "y", "width", "height"))
        assert x >= 0 and y >= 0 and w > 0 and h > 0 and x + w <= width and y + h <= height
    assert all(
        float(text.get("x")) < width and float(text.get("y")) < height
        for text in root.iter(f"{SVG}text")
    )


# -- the command --


def test_help_is_quick_and_lists_the_commands():
    said = subprocess.run(
        [KAFKA2PC, "--help"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        env=os.environ | {"COLUMNS": "100"},
    )
    assert said.returncode == 0 and "broker" in said.stdout and "demo" in said.stdout
    heavy = (
        "import sys, kafka2pc.operations.cli.app; print([m for m in ('pyspark', 'pyarrow',"
        " 'confluent_kafka', 'kafka', 'pandas') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", heavy], stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    assert done.stdout == "[]\n", done.stdout + done.stderr


def shown(monkeypatch, rows, tmp_path):
    report = demo_report.count("kafka2pc", 3, records(*rows))
    monkeypatch.setattr(
        demo, "demonstrate", lambda *_, **__: [demo.Result(report=report, events=tuple(events(8)))]
    )
    monkeypatch.setattr(cli, "_tell_kills", lambda *_: None)
    return CliRunner().invoke(cli.app, ["demo", "--images", str(tmp_path / "pictures")])


def test_the_command_ends_with_0_and_leaves_the_picture(monkeypatch, tmp_path):
    done = shown(monkeypatch, (1, 2, 3), tmp_path)
    assert done.exit_code == 0, done.output
    ElementTree.parse(tmp_path / "pictures" / "demo.svg")


@pytest.mark.parametrize("rows", [(1, 2), (1, 2, 3, 3)], ids=["lost", "duplicated"])
def test_the_command_ends_with_1_if_a_row_is_lost_or_duplicated(monkeypatch, tmp_path, rows):
    assert shown(monkeypatch, rows, tmp_path).exit_code == 1


def failing(monkeypatch, error):
    def fail(*_, **__):
        raise error

    monkeypatch.setattr(demo, "demonstrate", fail)
    return CliRunner().invoke(cli.app, ["demo"])


def test_a_foreseen_error_is_reported_without_a_stack_trace(monkeypatch):
    done = failing(monkeypatch, demo_job.DemoFailed("nothing works"))
    assert done.exit_code == 1 and isinstance(done.exception, SystemExit)
    assert "nothing works" in done.output and "what to do" in done.output


def test_a_missing_package_is_reported_with_its_extra_and_a_missing_module_is_a_bug(monkeypatch):
    done = failing(monkeypatch, ModuleNotFoundError("no module", name="pyspark"))
    assert done.exit_code == 1 and "pyspark is missing: " in done.output
    assert isinstance(
        failing(
            monkeypatch, ModuleNotFoundError("no module", name="kafka2pc.proof.demo.demo")
        ).exception,
        ModuleNotFoundError,
    )


def test_sigterm_ends_a_command_like_ctrl_c():
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt), cli.plainly("demo"):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(1)
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.kafka
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM], ids=lambda s: s.name)
def test_the_broker_command_says_where_it_is_and_ends_when_told(signum):
    process = subprocess.Popen(
        [KAFKA2PC, "broker"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        said = iter(process.stdout.readline, "")
        assert any(line.startswith("bootstrap.servers=127.0.0.1:") for line in said)
        assert next(said).startswith("ready")
        process.send_signal(signum)
        assert process.communicate(timeout=60)[0] == "stopped\n"
        assert process.returncode == 0
    finally:
        process.kill()
        process.wait()


def test_two_nodes_are_refused():
    done = CliRunner().invoke(cli.app, ["broker", "--nodes", "2"])
    assert done.exit_code == 2 and "--nodes" in done.output


# -- all of it, small --


def demonstration(folder, *options):
    """What the command prints; status 0."""
    done = subprocess.run(
        [KAFKA2PC, "demo", *options, "--images", folder],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"COLUMNS": "120"},
        timeout=500,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.mark.kafka
@pytest.mark.spark
@pytest.mark.full
@pytest.mark.never_unsteady
def test_a_small_run_with_all_four_kills_ends_with_0(tmp_path):
    said = demonstration(tmp_path, "--rows", "2000", "--skip-spark-sink")
    assert re.search(r"kafka2pc\W+2,000\W+2,000\W+0\W+0\W+0\W+4 of 4", said), said
    assert said.count("SIGKILL to") == 4
    assert len(drawn((tmp_path / "demo.svg").read_text(), "badge")) == 4


@pytest.mark.kafka
@pytest.mark.spark
@pytest.mark.nightly
@pytest.mark.never_unsteady
def test_beside_it_sparks_own_sink_loses_nothing_and_writes_rows_twice(tmp_path):
    said = demonstration(tmp_path, "--rows", "6000")
    assert re.search(r"kafka2pc\W+6,000\W+6,000\W+0\W+0\W+0\W+4 of 4", said), said
    [theirs] = re.findall(r"Spark's own\W+6,000\W+([\d,]+)\W+0\W+([\d,]+)\W", said)
    found, twice = (int(number.replace(",", "")) for number in theirs)
    assert found > 6000 and 0 < twice <= found - 6000, said


def command_of(process):
    try:
        return " ".join(process.cmdline())
    except psutil.Error:  # it has ended
        return ""


@contextmanager
def heeding_ctrl_c():
    """Processes that start inside heed SIGINT. A shell has what it starts in the background ignore
    it, and all that this starts inherits that.
    """
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def started(place):
    """A demonstration whose first batch is done, and every process that belongs to it. It has far
    more rows than are written before it is ended.
    """
    process = subprocess.Popen(
        [KAFKA2PC, "demo", "--rows", "50000", "--skip-spark-sink"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=place,
        start_new_session=True,
        env=os.environ | {"TMPDIR": str(place)},
    )
    end = time.monotonic() + 300
    while time.monotonic() < end and process.poll() is None:
        if list(place.glob("kafka2pc-demo-*/kafka2pc/checkpoint/commits/0")):
            family = psutil.Process(process.pid).children(recursive=True)
            commands = "\n".join(map(command_of, family))
            assert all(
                name in commands for name in ("kafka.Kafka", "SparkSubmit", "pyspark.daemon")
            ), commands
            return process, family
        time.sleep(0.2)
    process.kill()
    pytest.fail(f"no Spark job came up: {process.stdout.read()}")


SIGNALS = [
    pytest.param(signal.SIGINT, id="SIGINT", marks=pytest.mark.full),
    pytest.param(signal.SIGKILL, id="SIGKILL", marks=pytest.mark.nightly),
]


@pytest.mark.kafka
@pytest.mark.spark
@pytest.mark.parametrize("signum", SIGNALS)
def test_nothing_stays_behind_when_it_is_ended(tmp_path, signum):
    with heeding_ctrl_c():
        process, family = started(tmp_path)
    process.send_signal(signum)
    process.communicate(timeout=120)
    assert process.returncode != 0
    _, alive = psutil.wait_procs([p for p in family if p.is_running()], timeout=60)
    assert not [command_of(p) for p in alive if command_of(p)]
    if signum != signal.SIGKILL:
        assert not list(tmp_path.glob("kafka2pc-*")), "temp folders are removed"
