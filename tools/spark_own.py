#!/usr/bin/env python3
"""Record in tests/fixtures/spark_own.json what Spark's own format("kafka") answers in the tests
that ask for `either_format` (tests/support/both_formats.py).

`tools/spark_own.py 4.2.0` for one version, nothing for all of `RECORDED`; `--missing` asks only
what is not recorded. The tests run in environments that tools/compat.py makes, with this file as a
plugin of pytest. The answers of a test that fails there are not recorded.
"""

import json
import os
import sys
import tempfile
from pathlib import Path

from compat import ROOT, Failed, prepare, run, say

KEPT = ROOT / "tests" / "fixtures" / "spark_own.json"
FIXTURE = "either_format"
# The oldest and the newest PySpark of tools/compat.py, and the version that is recorded for each:
# the newest that Maven Central had the connector of, when it was recorded.
RECORDED = {"3.5.9": "3.5.7", "4.3.0": "4.2.0"}


# -- the plugin --

ANSWERS = {}  # case -> answers, which the fixture fills
KNOWN = {}  # case -> what the file had


def pytest_addoption(parser):
    parser.addoption("--spark-own", help="a file of answers; what it lacks is asked and added")


def pytest_collection_modifyitems(config, items):
    from both_formats import case_of

    known = json.loads(Path(config.getoption("--spark-own")).read_text())
    cases = {case_of(item.nodeid): item for item in items if FIXTURE in item.fixturenames}
    KNOWN.update({case: known[case] for case in cases if case in known})
    items[:] = [item for case, item in cases.items() if case not in known]


def pytest_runtest_logreport(report):
    from both_formats import case_of

    if report.failed:
        ANSWERS.pop(case_of(report.nodeid), None)


def pytest_sessionfinish(session, exitstatus):
    given = {case: answers.given for case, answers in ANSWERS.items()}
    Path(session.config.getoption("--spark-own")).write_text(json.dumps(KNOWN | given))
    if exitstatus == 5:  # nothing was missing
        session.exitstatus = 0


# -- the program --


def compared_files() -> list[Path]:
    """The files with tests that compare the two formats."""
    files = sorted((ROOT / "tests" / "spark").glob("test_*.py"))
    return [file for file in files if FIXTURE in file.read_text(encoding="utf-8")]


def record(version: str, build: Path, known: dict) -> None:
    """Run the tests that are not `known` on Spark's own format, and keep their answers. Raises
    `Failed`.
    """
    inside, given = prepare(version, build), build / f"{version}.json"
    tests = ["pytest", "pytest-timeout"]
    run(inside, "-m", "pip", "install", "-q", "-c", ROOT / "constraints.txt", *tests)
    say("  3/3 the tests, on Spark's own format (a quarter of an hour)")
    given.write_text(json.dumps(known))
    paths = {"PYTHONPATH": f"{ROOT}:{ROOT / 'tools'}"}
    env = {k: v for k, v in os.environ.items() if k != "SPARK_HOME"} | paths
    command = [inside, "-m", "pytest", "-q", "-p", "spark_own", "--spark-own", given]
    try:
        run(*command, *compared_files(), cwd=ROOT, env=env)
    finally:
        keep(version, json.loads(given.read_text()))


def as_text(answers: dict[str, dict]) -> str:
    """JSON with one line for each case."""
    versions = []
    for version in sorted(answers):
        cases = sorted(answers[version].items())
        lines = [f"  {json.dumps(case)}: {json.dumps(given)}" for case, given in cases]
        versions.append(f" {json.dumps(version)}: {{\n" + ",\n".join(lines) + "\n }")
    return "{\n" + ",\n".join(versions) + "\n}\n"


def kept() -> dict[str, dict]:
    """What is recorded."""
    return json.loads(KEPT.read_text(encoding="utf-8")) if KEPT.exists() else {}


def keep(version: str, given: dict) -> None:
    """Replace what is recorded of this version, and leave out what is not to be recorded."""
    answers = kept() | {version: given}
    wanted = {v: cases for v, cases in answers.items() if v in RECORDED.values()}
    KEPT.write_text(as_text(wanted), encoding="utf-8")


def main() -> int:
    only_missing, failed = "--missing" in sys.argv, []
    versions = [word for word in sys.argv[1:] if word != "--missing"]
    with tempfile.TemporaryDirectory() as build:
        for version in versions or RECORDED.values():
            say(f"PySpark {version}")
            try:
                record(version, Path(build), kept().get(version, {}) if only_missing else {})
            except Failed as e:
                failed.append(f"PySpark {version} is not complete: {e}")
    say("\n".join(failed) or "recorded")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
