"""Second runs (tests/support/unsteady.py), and the two tables that they and the order read."""

import os
import re
import subprocess
import sys
from datetime import date
from pathlib import Path

import pytest
import unsteady
from longest_first import SECONDS, read, write
from seconds import LEAST_S, exists, merge

ROOT = Path(__file__).resolve().parent.parent
NAMED = ROOT / unsteady.NAMED

BEGIN = """
import os
from functools import partial
from pathlib import Path

import pytest

from kafka2pc.proof.child_process import Failed, NotWithin, until
from kafka2pc.protocol.policies import retry_unknown

def late():
    until(lambda: False, "what never comes", 0)

def late_at_first():
    seen, mark = Path("seen").exists(), Path("seen").touch()
    if not seen:
        print("from the first run")
        late()

def test_before():
    pass

"""


CONFTEST = """
pytest_plugins = ["unsteady"]

def pytest_runtest_setup(item):
    if item.name == "test_set_up_by_a_hook":
        item.module.late()
"""


class Project:
    """A folder with a conftest.py like this one's, in which pytest runs in a new process."""

    def __init__(self, folder):
        self.folder = folder
        self.record = folder / "record"
        (folder / "pytest.ini").write_text(
            f"[pytest]\npythonpath = {ROOT / 'tests' / 'support'}\nmarkers = never_unsteady\n"
            "addopts = -p xdist -p pytest_timeout\n"
        )
        (folder / "conftest.py").write_text(CONFTEST)

    def run(self, tests, *options, shared=False):
        """(exit status, output, how often a test was run again) of a file of these tests."""
        (self.folder / "test_it.py").write_text(BEGIN + tests)
        env = os.environ | {"PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
        for name in ("PYTEST_ADDOPTS", "PYTEST_XDIST_WORKER", "PYTEST_XDIST_WORKER_COUNT"):
            env.pop(name, None)
        env[unsteady.RECORD] = str(self.record) if shared else ""
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", *options],
            cwd=self.folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=env,
        )
        return done.returncode, done.stdout, done.stdout.count("second run, on the idle machine")


@pytest.fixture
def project(tmp_path):
    return Project(tmp_path)


RED = """
def test_a_wrong_value():
    assert 1 == 2

def test_another_error():
    raise ValueError

def test_an_error_of_the_condition():
    until(partial(int, "x"), "a number")

def test_a_failure_of_another_kind():
    raise Failed("not within 3 s: raised by hand")

def test_the_right_kind_raised_by_hand():
    raise NotWithin("not within 3 s: raised by hand")

def test_a_wrong_value_and_then_a_wait():
    try:
        assert 1 == 2
    finally:
        late()

def test_a_wait_inside_the_product():
    retry_unknown(1)(late)

def test_a_hang():
    until(lambda: False, "what never comes", 100)
test_a_hang = pytest.mark.timeout(0.2)(test_a_hang)

@pytest.fixture
def set_up():
    late()

def test_set_up(set_up):
    pass

def test_set_up_by_a_hook():
    pass

def test_set_up_in_the_call(request):
    request.getfixturevalue("set_up")

@pytest.fixture
def tear_down():
    yield
    late()

def test_tear_down(tear_down):
    pass

@pytest.mark.never_unsteady
def test_that_counts_rows():
    late()

def test_that_the_table_names():
    late()

@pytest.mark.parametrize("n", [1, 2])
def test_of_which_the_table_names_all(n):
    late()
"""


def test_all_other_failures_are_red_at_once(project):
    (project.folder / "tests").mkdir()
    (project.folder / unsteady.NAMED).write_text(
        "test,date,cause,commit\ntest_it.py::test_that_the_table_names,2026-01-01,slow,0123abc\n"
        "test_it.py::test_of_which_the_table_names_all,2026-01-01,slow,0123abc\n"
    )
    status, output, again = project.run(RED, "-rfE")
    assert (status, again) == (1, 0), output
    names = re.findall(r"^(?:FAILED|ERROR) test_it.py::(\w+)", output, re.M)
    defined = re.findall(r"^def (test_\w+)", RED, re.M)
    assert sorted(set(names)) == sorted(defined), output


EXCUSED = """
def test_late():
    late_at_first()
"""


@pytest.mark.parametrize("workers", [0, 1])
def test_a_late_test_that_passes_twice_is_excused_and_printed(project, workers):
    status, output, again = project.run(EXCUSED, "-n", str(workers), shared=True)
    assert (status, again) == (0, 2), output
    after = "second run, on the idle machine: test_it.py::test_before test_it.py::test_late"
    shown = ["excused: test_it.py::test_late", "not within 0 s: what never comes", after]
    assert [line for line in [*shown, "from the first run"] if line not in output] == []
    assert output.splitlines()[-1].startswith("1 passed, 1 excused by two second runs in "), output
    assert project.record.read_text() == "test_it.py::test_late"


THREE = """
STATE = []

def test_that_leaves_state():
    STATE.append(1)

def test_that_fails_after_it():
    if STATE:
        late()

def test_late():
    late_at_first()

def test_the_third():
    if not Path("third").exists():
        Path("third").touch()
        late()
"""


def test_state_of_the_test_before_is_found_and_a_third_has_no_second_run(project):
    status, output, again = project.run(THREE, "-rf")
    assert (status, again) == (1, 2 + 2), output
    red = re.findall(r"^FAILED test_it.py::(\w+)", output, re.M)
    assert red == ["test_that_fails_after_it", "test_the_third"], output
    assert "2 failed, 2 passed, 1 excused by two second runs" in output
    assert "- second run: test_it.py::test_that_leaves_state test_it.py" in output
    assert "no second run" in output


AGAIN = """
def test_that_fails_each_time():
    late()

def test_that_is_skipped_later():
    if Path("seen").exists():
        pytest.skip("not here")
    late_at_first()
"""


def test_what_fails_or_is_skipped_in_a_second_run_is_red_at_once(project):
    status, output, again = project.run(AGAIN)
    assert (status, again) == (1, 2) and "2 failed, 1 passed" in output, output


def test_runs_with_one_record_have_two_second_runs_in_all(project):
    project.record.write_text("another.py::test_a\nanother.py::test_b")
    status, output, again = project.run(EXCUSED, shared=True)
    assert (status, again) == (1, 0) and "no second run" in output, output


def test_a_worker_that_died_is_red(project):
    dies = "\ndef test_that_kills_its_worker():\n    os._exit(1)\n"
    status, output, again = project.run(dies, "-n", "1")
    assert (status, again) == (1, 0) and "1 failed, 1 passed" in output, output


def test_a_run_that_is_cut_short_is_red(project):
    status, output, again = project.run(EXCUSED + "\ndef test_not_run():\n    pass\n", "-x")
    assert (status, again) == (1, 0) and "1 failed, 1 passed" in output, output


# -- the tables --


def faults(rows, root=ROOT):
    """What is wrong with rows of tests/unsteady.csv."""
    for row in rows:
        if list(row) != ["test", "date", "cause", "commit"] or not all(row.values()):
            yield f"{row} has not the four columns"
        elif not exists(row["test"], root):
            yield f"{row['test']} is no test"
        elif not re.fullmatch(r"[0-9a-f]{7,40}", row["commit"]) or not is_date(row["date"]):
            yield f"{row['test']}: a date such as 2026-01-31, and a commit such as 0123abc"


def is_date(text):
    try:
        return date.fromisoformat(text).isoformat() == text
    except ValueError:
        return False


def test_the_table_of_unsteady_tests_is_well_formed():
    assert NAMED.read_text(encoding="utf-8").startswith("test,date,cause,commit\n")
    assert list(faults(unsteady.rows(NAMED))) == []


THIS = "tests/test_unsteady.py::test_faults_of_the_table_are_found"


@pytest.mark.parametrize(
    "test, when, cause, commit",
    [
        (THIS + "_not", "2026-01-31", "slow", "0123abc"),
        ("tests/test_gone.py::test_a", "2026-01-31", "slow", "0123abc"),
        (THIS, "31.1.2026", "slow", "0123abc"),
        (THIS, "2026-02-31", "slow", "0123abc"),
        (THIS, "2026-01-31", "", "0123abc"),
        (THIS, "2026-01-31", "slow", "soon"),
    ],
)
def test_faults_of_the_table_are_found(test, when, cause, commit):
    row = {"test": test, "date": when, "cause": cause, "commit": commit}
    good = {"test": f"{THIS}[1]", "date": "2026-01-31", "cause": "slow", "commit": "0123abc"}
    assert len(list(faults([good, row]))) == 1


def test_the_seconds_are_as_the_tool_writes_them(tmp_path):
    """A test that is gone stays there until the next `make seconds`."""
    known = read(SECONDS)
    write(tmp_path / "seconds.csv", known)
    assert (tmp_path / "seconds.csv").read_bytes() == SECONDS.read_bytes()
    assert known and all(spent >= LEAST_S and spent % 0.5 == 0 for spent in known.values())


def test_a_run_renews_the_seconds_of_its_tests():
    this, other = f"{THIS}[1]", f"{THIS}[2]"
    old = {this: 10, f"{THIS}_gone": 9, other: 3}
    assert merge(old, {this: 12, f"{THIS}[3]": 0.7}) == {this: 10, other: 3, f"{THIS}[3]": 0.5}
    assert merge(old, {this: 20.3, other: 0.4}) == {this: 20.5}
