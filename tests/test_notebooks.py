"""Every notebook runs from top to bottom in a fresh kernel, with nbs/ as working directory. One that needs a broker and does not stop it is a guest."""
import json
import os
import re
import sys
import time
from pathlib import Path

import nbformat
import pytest
from kafka_fixtures import state
from papermill import inspect_notebook

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tools"))
from run_notebooks import CELL_SECONDS, NBS, execute  # noqa: E402

NOTEBOOKS = sorted(NBS.glob("*.ipynb"))
OTHER = {"22_demo": {"rows": 4000}, "41_drills": {"seed": 8}, "51_bench": {"rows": 30_000}}  # a lesson holds for other values, too


def code(notebook):
    return [cell.source for cell in nbformat.read(notebook, 4).cells if cell.cell_type == "code"]


def is_guest(notebook):
    """Would it run on a cluster that somebody named?"""
    return any("= a_kafka(" in source for source in code(notebook)) and not any("LocalKafka(" in source for source in code(notebook))


def marked(notebook):
    """The flags of its cells (`#| kafka`, `#| spark`) are the needs of the notebook."""
    needs = [name for name in ("kafka", "spark", "mysql") if any(re.match(rf"#\|\s*{name}\b", source) for source in code(notebook))]
    return pytest.param(notebook, id=notebook.stem, marks=[getattr(pytest.mark, name) for name in needs])


@pytest.fixture
def own_folders(tmp_path, monkeypatch):
    """Nothing that a user has in HOME changes the run, and nothing is written there."""
    for name in ("JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR", "IPYTHONDIR", "MPLCONFIGDIR"):
        folder = tmp_path / name.lower()
        folder.mkdir()
        monkeypatch.setenv(name, str(folder))
    monkeypatch.setenv("PYSPARK_PYTHON", sys.executable)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    return tmp_path


@pytest.mark.timeout(900)
@pytest.mark.parametrize("notebook", [marked(path) for path in NOTEBOOKS])
def test_notebook_runs(notebook, own_folders, capsys, monkeypatch, request):
    host = request.getfixturevalue("open_host") if is_guest(notebook) else None
    if host:
        monkeypatch.setenv("KAFKA2PC_BOOTSTRAP_SERVERS", host.bootstrap_servers)
        before = state(host)
    started, parameters = time.monotonic(), OTHER.get(notebook.stem, {})
    assert parameters.keys() <= inspect_notebook(str(notebook)).keys(), "papermill would not complain"
    trouble = execute(notebook, own_folders / notebook.name, CELL_SECONDS, json.dumps(parameters))
    with capsys.disabled():
        print(f"  {notebook.stem}: {time.monotonic() - started:.0f} s ", end="", flush=True)
    assert not trouble, f"{notebook.stem} failed:\n{trouble}"
    assert not host or state(host) == before, "the guest left something, or touched what is not its own"


def test_most_rooms_that_need_a_broker_are_guests():
    guests = [notebook.stem for notebook in NOTEBOOKS if is_guest(notebook)]
    assert {"index", "11_precommit", "20_sink", "34_dual_write"} <= set(guests) and len(guests) > 12, guests


def test_there_are_notebooks():
    assert NOTEBOOKS
