"""The timeline: legible for everybody, right about every crash point, and played with in a real
browser.
"""

import copy
import itertools
import os
import re
import shutil
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import nbformat
import pytest
from run_notebooks import execute

from kafka2pc.local.nodes import free_ports
from kafka2pc.proof.crash_points import CrashPoint
from kafka2pc.proof.timeline.captions import POINTS
from kafka2pc.proof.timeline.drawing import LOOKS, Drawn, draw, has_widgets
from kafka2pc.proof.timeline.run import QUERY
from kafka2pc.proof.timeline.scene import scene_of
from kafka2pc.proof.timeline.timeline import Timeline
from kafka2pc.protocol.history import Event
from kafka2pc.protocol.states import TxnState

ROOT = Path(__file__).resolve().parents[2]
NO_BROWSER = "needs a browser (Debian: chromium) and playwright (the extra browser)"


# -- the picture --


def luminance(colour):
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    red, green, blue = (p / 12.92 if p <= 0.03928 else ((p + 0.055) / 1.055) ** 2.4 for p in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one, other):
    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)


def test_every_state_has_a_look_of_its_own_and_not_by_colour_alone():
    assert set(LOOKS) == set(TxnState)
    for a, b in itertools.combinations(LOOKS.values(), 2):
        assert a.letter != b.letter and a.word != b.word and a.colour != b.colour


def test_text_is_legible_on_every_state_and_on_both_backgrounds():
    """4.5 is what WCAG asks for text (level AA)."""
    assert [look.word for look in LOOKS.values() if contrast("#111111", look.colour) < 4.5] == []
    light, dark = draw([]).split("@media(prefers-color-scheme:dark)")
    for sheet in (light, dark):
        page = re.search(r"\.bg\{fill:(#\w{6})", sheet)[1]
        for ink in ("text", r"\.q", r"\.says", r"\.dead"):
            assert contrast(page, re.search(ink + r"\{fill:(#\w{6})", sheet)[1]) >= 4.5, (ink, page)


def event(kind, op, process=1, **ids):
    return Event(kind=kind, op=op, at_ms=0, process=process, ids=ids)


def test_a_transaction_that_wrote_nothing_leaves_no_bar():
    ids = {"batch_id": 0, "attempt": 1}
    events = [event("ok", "begin", participant=name, **ids) for name in ("a", "b")]
    events += [
        event("ok", "precommit", participant="a", **ids),
        event("ok", "precommit", participant="b", **ids, transactional_id="t"),
    ]
    assert [(bar.lane[0], bar.name) for bar in scene_of(events).bars] == [("b", "t")]


def test_two_participants_of_one_task_have_a_lane_each():
    ids = dict(batch_id=0, attempt=1)
    begun = [event("ok", "begin", participant=name, **ids) for name in ("kafka", "postgres")]
    promised = [event("ok", "precommit", transactional_id=name, **ids) for name in ("k", "p")]
    scene = scene_of([*begun, *promised, event("ok", "commit", batch_id=0, transactional_id="p")])
    assert scene.lanes == [("kafka", 0, 0), ("postgres", 0, 0)]
    assert [b.state for b in scene.bars] == [TxnState.PRECOMMITTED, TxnState.COMMITTED]


def test_a_history_without_a_timeline_shows_itself_too():
    shown = Drawn([])._repr_mimebundle_()
    assert shown["image/svg+xml"].startswith("<svg") and shown["text/plain"] == ""


# -- on a real broker --


@pytest.fixture
def timeline(kafka):
    made = Timeline(kafka.client_conf)
    yield made
    made.close()


@pytest.mark.kafka
@pytest.mark.full
def test_whatever_point_it_is_killed_at_nothing_is_lost_and_nothing_is_there_twice(timeline):
    for point in POINTS:
        timeline.crash(point)
        assert timeline.unfinished, f"{point} was not reached"
        assert timeline.verdict.anomalies == {}
        timeline.restart()
        assert (
            str(timeline.verdict)
            == f"{timeline.done * timeline.size} rows visible, lost 0, duplicate 0"
        ), point
    assert timeline.done == len(POINTS)


@pytest.mark.kafka
def test_a_restart_after_the_timeout_shows_what_the_broker_did_meanwhile(timeline):
    timeline.timeout_ms = 1000
    timeline.crash(CrashPoint.AFTER_FLUSH)
    while timeline.store.in_doubt(QUERY):
        time.sleep(0.1)
    timeline.restart()
    assert "The broker aborted 1 transaction by timeout" in str(Drawn(timeline.events))
    assert str(timeline.verdict) == "6 rows visible, lost 0, duplicate 0"


@pytest.mark.kafka
def test_a_crash_leaves_real_transactions_and_a_closed_timeline_no_process(timeline):
    timeline.crash(CrashPoint.BEFORE_DECISION)
    assert timeline.verdict.open == 2
    timeline.restart()
    process = timeline.run.process
    process.stdin.close()  # as when the notebook's kernel dies
    assert process.wait(10) == 0


@pytest.mark.kafka
def test_who_begins_anew_ends_what_is_open(timeline):
    timeline.crash(CrashPoint.BEFORE_DECISION)
    left = timeline.store
    assert len(left.in_doubt(QUERY)) == 2
    timeline.anew()
    assert left.in_doubt(QUERY) == []


# -- in a browser --


@pytest.fixture
def chromium():
    """A headless Chromium of the system, without any download. Skips, with the reason, where there
    is none.
    """
    found = (
        shutil.which("chromium")
        or shutil.which("chromium-browser")
        or shutil.which("google-chrome")
    )
    if not found:
        pytest.skip(NO_BROWSER)
    playwright = pytest.importorskip("playwright.sync_api", reason=NO_BROWSER)
    with playwright.sync_playwright() as session:
        window = session.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield window
        window.close()


IN_A_KERNEL = """
import os
from kafka2pc.proof.timeline.drawing import has_widgets

recorded = has_widgets()
del os.environ["KAFKA2PC_WIDGETS"]
assert (recorded, has_widgets()) == (False, True)
"""


def test_widgets_are_shown_in_a_kernel_unless_outputs_are_recorded(tmp_path, monkeypatch):
    monkeypatch.delenv("KAFKA2PC_WIDGETS", raising=False)
    assert not has_widgets()
    cells = [nbformat.v4.new_code_cell(IN_A_KERNEL)]
    nbformat.write(nbformat.v4.new_notebook(cells=cells), tmp_path / "in.ipynb")
    assert execute(tmp_path / "in.ipynb", tmp_path / "out.ipynb", 60) == ""


def short(folder):
    """The notebook without its lessons: what it exports, its broker, and its buttons."""
    notebook = nbformat.read(ROOT / "nbs" / "proof/timeline/06_buttons.ipynb", 4)
    wanted = [
        c
        for c in notebook.cells
        if c.cell_type == "code" and re.search(r"#\| export|start_kafka\(|^play\(", c.source, re.M)
    ]
    made = nbformat.v4.new_notebook(cells=copy.deepcopy(wanted), metadata=notebook.metadata)
    for cell in made.cells:
        cell.outputs = []
    nbformat.write(made, folder / "notebook.ipynb")


@pytest.fixture
def lab(tmp_path):
    """JupyterLab on loopback, with folders of its own. Its address."""
    [port] = free_ports(1)
    places = (
        "JUPYTER_CONFIG_DIR",
        "JUPYTER_DATA_DIR",
        "JUPYTER_RUNTIME_DIR",
        "JUPYTERLAB_SETTINGS_DIR",
        "JUPYTERLAB_WORKSPACES_DIR",
        "IPYTHONDIR",
    )
    env = (
        os.environ
        | {name: str(tmp_path / "own" / name.lower()) for name in places}
        | {"PYTHONPATH": str(ROOT)}
    )
    (tmp_path / "notebooks").mkdir()
    command = [
        sys.executable,
        "-m",
        "jupyterlab",
        "--no-browser",
        "--allow-root",
        "--ip=127.0.0.1",
        f"--port={port}",
        "--ServerApp.port_retries=0",
        "--IdentityProvider.token=",
        "--ServerApp.password=",
        "--LabApp.news_url=",
        "--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate",
    ]
    with open(tmp_path / "lab.log", "wb") as log:
        server = subprocess.Popen(
            command,
            cwd=tmp_path / "notebooks",
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )
    try:
        _wait_for(f"http://127.0.0.1:{port}/api/status", server, tmp_path / "lab.log")
        yield f"http://127.0.0.1:{port}", tmp_path / "notebooks"
    finally:
        server.terminate()  # it ends its kernels, and each kernel what it has started
        server.wait(30)


def _wait_for(address, server, log, seconds=60):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        assert server.poll() is None, log.read_text(errors="replace")[-3000:]
        try:
            return urllib.request.urlopen(address, timeout=2).close()
        except OSError:
            time.sleep(0.2)
    raise AssertionError(
        f"no JupyterLab within {seconds} s:\n{log.read_text(errors='replace')[-3000:]}"
    )


@pytest.mark.kafka
@pytest.mark.full
def test_a_crash_and_a_restart_in_a_browser(chromium, lab):
    """With KAFKA2PC_SCREENSHOTS=FOLDER, a picture of the page after the crash is kept there."""
    address, notebooks = lab
    short(notebooks)
    page = chromium.new_page(viewport={"width": 1300, "height": 1000})
    asked = []
    page.on("request", lambda request: asked.append(request.url))
    page.goto(f"{address}/lab/tree/notebook.ipynb?reset")
    # the notebook's own sign says so before it is connected
    page.get_by_text("Python 3 (ipykernel) | Idle").wait_for(timeout=60_000)
    page.get_by_role("menuitem", name="Run", exact=True).click()
    page.get_by_role("menuitem", name=re.compile("^Run All Cells")).first.click()
    said, crash = (
        page.get_by_role("status").filter(has_text="rows visible"),
        page.get_by_role("button", name="Crash", exact=True),
    )
    crash.wait_for(timeout=90_000)
    page.get_by_label("crash at").select_option("between two commits")
    crash.press("Enter")  # a key is as good as a mouse
    said.filter(has_text="Killed by SIGKILL between two commits. The decision is durable").wait_for(
        timeout=60_000
    )
    assert "open transactions 1" in said.inner_text()
    if folder := os.environ.get("KAFKA2PC_SCREENSHOTS"):
        page.screenshot(path=f"{folder}/lab.png")
    page.get_by_role("button", name="Restart", exact=True).click()
    said.filter(has_text="The decision log holds a COMMIT").wait_for(timeout=60_000)
    said.filter(has_text=re.compile("12 rows visible, lost 0, duplicate 0$")).wait_for(
        timeout=60_000
    )
    assert [
        url
        for url in asked
        if not url.startswith((address, "data:", "blob:", address.replace("http", "ws")))
    ] == []
