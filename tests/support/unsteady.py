"""Second runs, for one kind of failure: the tests' waiting function gave up (`NotWithin`).

Every other failure is red at once: a wrong value, another error, a hang that pytest-timeout ends,
an error in set-up or tear-down, a worker that died, a wait inside a call of the product, a test
marked `never_unsteady`, and a test that tests/unsteady.csv names.

When all workers have ended, the test is run twice on the idle machine: alone, and after the test
that ran before it in its worker, because a bug of state that a process keeps shows only there. It
is excused if it passes both times. At most two tests get these runs: in one run of pytest, or in
all that share the file KAFKA2PC_UNSTEADY_RECORD, as those of .ci/run do.
"""

import csv
import os
import subprocess
import sys
import traceback
from pathlib import Path

import pytest

MOST = 2
NAMED = Path("tests", "unsteady.csv")  # below pytest's root
RECORD = "KAFKA2PC_UNSTEADY_RECORD"
LATE, EXCUSED = "late", "excused by two second runs"
BEFORE, ENTERED = pytest.StashKey[str](), pytest.StashKey[list]()


# -- in the process that runs the test --


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    result = yield
    item.config.stash[BEFORE] = item.nodeid
    return result


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if report.failed and call.when == "call" and is_late(call.excinfo.value) and may_be_late(item):
        report.before = item.config.stash.get(BEFORE, "")  # xdist hands it to the controller
    return report


def is_late(error):
    """Did the waiting function give up, outside the product and outside a fixture, and with no
    other error before?
    """
    waiting = sys.modules.get("kafka2pc.proof.child_process")
    if not waiting or type(error) is not waiting.NotWithin or error.__context__:
        return False
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    modules = [frame.f_globals.get("__name__", "") for frame in frames]
    return frames[-1].f_code is waiting.until.__code__ and not any(map(is_no_wait, modules))


def is_no_wait(module):
    """Is a wait that this module leads to a call of the product, or a fixture?"""
    is_product = module.split(".")[0] in ("kafka2pc", "pyspark_kafka2pc")
    return module == "_pytest.fixtures" or is_product and not module.startswith("kafka2pc.proof.")


def may_be_late(item):
    names = {row["test"] for row in rows(item.config.rootpath / NAMED)}
    is_named = not names.isdisjoint([item.nodeid, item.nodeid.partition("[")[0]])
    return not is_named and not item.get_closest_marker("never_unsteady")


def rows(file):
    """The rows of tests/unsteady.csv."""
    if not file.exists():
        return []
    with file.open(encoding="utf-8", newline="") as opened:
        return list(csv.DictReader(opened))


# -- in the process that reports --


def pytest_report_teststatus(report):
    if hasattr(report, "before"):
        return LATE, "w", ("NOT WITHIN ITS TIME", {"yellow": True})


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session, exitstatus):
    """Judge the late ones, now that pytest-xdist has ended its workers. The status is 0 if no other
    test failed. After a run that was cut short (`-x`, Ctrl-C) they are red.
    """
    reporter = session.config.pluginmanager.getplugin("terminalreporter")
    is_worker = hasattr(session.config, "workerinput")
    if is_worker or not reporter or LATE not in reporter.stats:
        return
    is_whole = exitstatus == pytest.ExitCode.TESTS_FAILED and not session.shouldfail
    for report in reporter.stats.pop(LATE):
        if is_whole and passes_twice(reporter, report):
            reporter._add_stats(EXCUSED, [report])
        else:
            del report.before  # a failure as any other
            reporter._add_stats("failed", [report])
    if session.testsfailed == len(reporter.stats.get(EXCUSED, [])):
        session.exitstatus = pytest.ExitCode.OK


def passes_twice(reporter, report):
    """Run the test alone, and after the one before it. Add a failure's output to its report."""
    if not enter(reporter.config, report.nodeid):
        text = f"{MOST} tests had second runs already. More than that are a fault of the tests."
        report.sections.append(("no second run", text))
        return False
    test, before = report.nodeid, report.before
    for tests in ([test], [before, test] if before else [test]):
        reporter.write_line(f"\nsecond run, on the idle machine: {' '.join(tests)}")
        output = trouble(reporter.config, tests)
        if output:
            report.sections.append((f"second run: {' '.join(tests)}", output))
            return False
    return True


def enter(config, test):
    """Write a test into the record, if there is room for it."""
    place = os.environ.get(RECORD)
    entered = config.stash.setdefault(ENTERED, [])
    if place and Path(place).exists():
        entered[:] = Path(place).read_text().splitlines()
    if len(entered) >= MOST:
        return False
    entered.append(test)
    if place:
        Path(place).parent.mkdir(parents=True, exist_ok=True)
        Path(place).write_text("\n".join(entered))
    return True


def trouble(config, tests):
    """Run these tests in one new process: what it wrote, or nothing if the last one passed and none
    failed. There a late one fails, and no duration is kept.
    """
    without = [f"-pno:{plugin}" for plugin in ("cacheprovider", "unsteady", "longest_first")]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-n", "0", *without, "-rp", *tests],
        cwd=config.rootpath,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    passed = f"PASSED {tests[-1]}" in done.stdout.splitlines()
    return "" if passed and done.returncode == 0 else done.stdout


def pytest_terminal_summary(terminalreporter):
    for report in terminalreporter.stats.get(EXCUSED, []):
        terminalreporter.section(f"excused: {report.nodeid}", yellow=True)
        terminalreporter.write_line(
            "It passed alone, and after the test before it. Add it to tests/unsteady.csv with its"
            " cause. Its first output:"
        )
        terminalreporter.write_line(report.longreprtext)
        for title, text in report.sections:
            terminalreporter.section(title, "-")
            terminalreporter.write_line(text)
