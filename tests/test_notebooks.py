"""Every notebook runs from top to bottom in a fresh process, with its folder as working directory.

A notebook that needs a broker and does not stop it runs on a cluster that a user named, and leaves
nothing there. `make test` runs those that need no server, without a kernel; `make test-all` runs
the others, but for those of `proof`: what they explain, tests/proof runs every time, and `make
bench` renews those that measure. `make test-nightly` runs them.
"""

import re
import time
from pathlib import Path

import nbformat
import pytest
from kafka_fixtures import state
from papermill import inspect_notebook

ROOT = Path(__file__).resolve().parent.parent
from run_notebooks import CELL_SECONDS, NBS, execute  # noqa: E402
from without_kernel import NAME as WITHOUT_KERNEL  # noqa: E402

NOTEBOOKS = sorted(NBS.rglob("*.ipynb"))
# The lessons hold for other values, too.
OTHER = {
    "proof/drills/05_random_steps": {"seed": 8},
    "proof/bench/06_sources": {"rows": 30_000},
}
# What the lessons must show. No other test of `make test-all` runs these: a drill that must be
# red, a dual write that is cut between its two stores, and a pipeline.
SHOWS = {
    "proof/drills/04_one_store": ["'', 1, 80)", "'NotExactlyOnce: duplicate'"],
    "proof/drills/07_two_stores": ["[40, 80]", "(80, 80, [])"],
    "proof/drills/09_end_to_end": ["('', 1, 1785)"],
}


def short(notebook):
    return str(notebook.relative_to(NBS).with_suffix(""))


def code(notebook):
    return [cell.source for cell in nbformat.read(notebook, 4).cells if cell.cell_type == "code"]


def runs_on_your_cluster(notebook):
    """Does it run on a cluster of yours?"""
    return any("= start_kafka(" in source for source in code(notebook)) and not any(
        "LocalKafka(" in source for source in code(notebook)
    )


def needs(notebook):
    """The servers that it needs, by the flags of its cells (`#| kafka`, `#| spark`)."""
    flags = "\n".join(code(notebook))
    return [name for name in ("kafka", "spark", "mysql") if re.search(rf"(?m)^#\| {name}\b", flags)]


def marked(notebook):
    """A notebook that needs a server is `full`, and one of `proof` `nightly`."""
    marks = needs(notebook)
    if marks:
        marks.append("nightly" if short(notebook).startswith("proof/") else "full")
    return pytest.param(
        notebook, id=short(notebook), marks=[getattr(pytest.mark, name) for name in marks]
    )


def missing(notebook, executed):
    """What an executed notebook does not show, of `SHOWS`."""
    cells = nbformat.read(executed, 4).cells
    outputs = [output for cell in cells for output in cell.get("outputs", [])]
    shown = [output.get("data", {}).get("text/plain", "") for output in outputs]
    return [text for text in SHOWS.get(short(notebook), []) if text not in "\n".join(shown)]


@pytest.mark.timeout(900)
@pytest.mark.parametrize("notebook", [marked(path) for path in NOTEBOOKS])
def test_notebook_runs(notebook, own_folders, capsys, monkeypatch, request):
    host = request.getfixturevalue("open_host") if runs_on_your_cluster(notebook) else None
    if host:
        monkeypatch.setenv("KAFKA2PC_BOOTSTRAP_SERVERS", host.bootstrap_servers)
        before = state(host)
    started, parameters = time.monotonic(), OTHER.get(short(notebook), {})
    engine = None if needs(notebook) else WITHOUT_KERNEL
    trouble = execute(notebook, own_folders / notebook.name, CELL_SECONDS, parameters, engine)
    with capsys.disabled():
        print(f"  {short(notebook)}: {time.monotonic() - started:.0f} s ", end="", flush=True)
    assert not trouble, f"{short(notebook)} failed:\n{trouble}"
    assert missing(notebook, own_folders / notebook.name) == []
    assert not host or state(host) == before, (
        "the notebook left something, or touched what is not its own"
    )


def test_most_notebooks_that_need_a_broker_run_on_your_cluster():
    shared = [short(notebook) for notebook in NOTEBOOKS if runs_on_your_cluster(notebook)]
    assert {
        "index",
        "protocol/phases/01_precommit",
        "spark/sink/04_stream_writer",
        "spark/05_foreach_batch",
    } <= set(shared) and len(shared) > 12, shared


def test_there_are_notebooks():
    assert NOTEBOOKS and SHOWS.keys() <= set(map(short, NOTEBOOKS))


@pytest.mark.parametrize("name", OTHER)
def test_notebooks_have_the_parameters_that_papermill_sets(name):
    """Papermill does not complain."""
    assert OTHER[name].keys() <= inspect_notebook(str(NBS / f"{name}.ipynb")).keys()


def test_the_outputs_that_must_show_are_in_the_committed_notebooks():
    assert [path for path in NOTEBOOKS if missing(path, path)] == []
