"""The order of the tests on several workers: what takes longest begins first, so that all workers
end together. A file that begins last keeps one worker busy while the others have nothing left.

Each run writes the seconds of its tests into .test-output/durations.csv; `make seconds` carries
them over into tests/seconds.csv, which the next run reads. A test that is not there takes 0.1 s.
"""

import csv
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SECONDS = ROOT / "tests" / "seconds.csv"
DURATIONS = ROOT / ".test-output" / "durations.csv"
SHORT_S = 0.1


def scope(nodeid):
    """What one worker runs as a whole: a file, with its broker and its Spark, or a notebook."""
    file = nodeid.partition("::")[0]
    return nodeid if file.endswith("test_notebooks.py") else file


def read(file):
    """Test -> seconds."""
    if not file.exists():
        return {}
    with file.open(encoding="utf-8", newline="") as opened:
        return {row["test"]: float(row["seconds"]) for row in csv.DictReader(opened)}


def write(file, seconds):
    with file.open("w", encoding="utf-8", newline="") as opened:
        rows = csv.writer(opened, lineterminator="\n")
        rows.writerow(["test", "seconds"])
        rows.writerows([test, f"{spent:g}"] for test, spent in sorted(seconds.items()))


@cache
def known():
    return read(SECONDS)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config, items):
    if not hasattr(config, "workerinput"):
        return
    total = Counter()
    for item in items:
        total[scope(item.nodeid)] += known().get(item.nodeid, SHORT_S)
    items.sort(key=lambda item: -total[scope(item.nodeid)])


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    from xdist.scheduler import LoadScopeScheduling

    class InScopes(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            return scope(nodeid)

    config.option.loadscopereorder = False  # keep the order of pytest_collection_modifyitems
    return InScopes(config, log)


def pytest_terminal_summary(terminalreporter, config):
    """Write the seconds of all tests, in the process to which the workers report."""
    if hasattr(config, "workerinput"):
        return
    spent = Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                spent[report.nodeid] += round(report.duration, 3)
    if spent:
        DURATIONS.parent.mkdir(exist_ok=True)
        write(DURATIONS, spent)
