"""Every notebook runs from top to bottom in a fresh process, with its folder as working directory.

A notebook that needs a broker and does not stop it runs on a cluster that a user named, and leaves
nothing there. `make test` runs those that need no server, without a kernel; `make test-all` runs
the others. `make test-nightly` runs what only repeats tests: those of `proof`, which tests/proof
plays in every run (`make bench` renews those that measure), and the pages of `REPEATS`.
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
from seconds import exists  # noqa: E402
from without_kernel import NAME as WITHOUT_KERNEL  # noqa: E402

NOTEBOOKS = sorted(NBS.rglob("*.ipynb"))
# The lessons hold for other values, too.
OTHER = {
    "proof/drills/05_walks": {"seed": 8},
    "proof/bench/06_sources": {"rows": 30_000},
}
# What the lessons must show. No other test of `make test-all` plays these: a drill that must be
# red, a dual write that is cut between its two stores, and a pipeline.
SHOWS = {
    "proof/drills/04_one_store": ["'', 1, 80)", "'NotExactlyOnce: duplicate'"],
    "proof/drills/07_two_stores": ["[40, 80]", "(80, 80, [])"],
    "proof/drills/09_end_to_end": ["('', 1, 1785)"],
}

# Pages of many processes. These tests of `make test-all` show the same.
REPEATS = {
    "course/05_spark": [
        "tests/proof/test_drills.py::test_every_row_is_there_once_when_it_dies_at",
        "tests/spark/test_exactly_once.py::test_a_checkpoint_put_back_from_a_backup_is_refused",
        "tests/course/test_small_implementation.py::test_no_state_shows_an_anomaly",
    ],
    "course/06_timeline": [
        "tests/proof/test_timeline.py::test_a_restart_after_the_timeout_shows_what_the_broker_did_meanwhile",
        "tests/proof/test_timeline.py::test_whatever_point_it_is_killed_at_nothing_is_lost_and_nothing_is_there_twice",
        "tests/proof/test_rules.py::test_on_a_broker_a_batch_is_there_twice_only_without_the_rule",
    ],
    "course/08_in_operation": [
        "tests/proof/test_drills.py::test_every_row_is_there_once_when_it_dies_at",
        "tests/spark/test_sink.py::test_a_batch_write_with_a_key_is_killed_and_run_again",
        "tests/spark/test_sink.py::test_a_decided_batch_is_drained_and_its_state_survives",
    ],
    "guide/15_moving_over": [
        "tests/spark/test_moving_over.py::test_it_goes_on_where_sparks_own_source_was",
        "tests/spark/test_moving_over.py::test_the_way_back_is_a_new_checkpoint_from_the_last_offsets",
    ],
    "local/05_broker": [
        "tests/local/test_broker.py::test_a_killed_node_comes_back_with_committed_rows_and_open_transactions",
        "tests/local/test_broker.py::test_secure_lets_admin_in_and_gives_alice_no_right",
        "tests/local/test_broker.py::test_a_start_that_fails_keeps_the_log_and_quotes_it",
        "tests/local/test_broker.py::test_serve_says_where_and_leaves_nothing",
        "tests/kafka/test_three_nodes.py::test_one_node_may_die_and_come_back_in_sync_and_all_may_die_and_come_back",
    ],
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
    """A notebook that needs a server is `full`, or `nightly`."""
    marks, name = needs(notebook), short(notebook)
    if marks:
        marks.append("nightly" if name.startswith("proof/") or name in REPEATS else "full")
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
    assert NOTEBOOKS and SHOWS.keys() | REPEATS.keys() <= set(map(short, NOTEBOOKS))


def test_what_a_page_repeats_is_there():
    named = [test for tests in REPEATS.values() for test in tests]
    assert [test for test in named if not exists(test)] == []


@pytest.mark.parametrize("name", OTHER)
def test_notebooks_have_the_parameters_that_papermill_sets(name):
    """Papermill does not complain."""
    assert OTHER[name].keys() <= inspect_notebook(str(NBS / f"{name}.ipynb")).keys()


def test_the_outputs_that_must_show_are_in_the_committed_notebooks():
    assert [path for path in NOTEBOOKS if missing(path, path)] == []
