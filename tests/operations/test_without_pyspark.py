"""An operator needs no PySpark: here neither PySpark nor Py4J nor pandas can be imported."""

import json
import pkgutil
import subprocess
import sys

import pytest
from dead_query_fixtures import ROWS

from kafka2pc import operations

pytestmark = pytest.mark.never_unsteady

WITHOUT = """
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("pyspark", "py4j", "pandas"):
            raise ModuleNotFoundError(f"absent in this test: {name}", name=name)

sys.meta_path.insert(0, Absent())
"""


def run(code, *words):
    """What the code prints, and its exit status."""
    line = [sys.executable, "-c", WITHOUT + code, *words]
    done = subprocess.run(line, capture_output=True, text=True)
    assert "Traceback" not in done.stderr, done.stderr
    return done.stdout, done.returncode


def typed(*words):
    return run("from kafka2pc.operations.cli.main import main; main()", *words)


def test_every_module_is_imported():
    walked = pkgutil.walk_packages(operations.__path__, "kafka2pc.operations.")
    names = [module.name for module in walked]
    assert len(names) > 10
    assert run("".join(f"import {name}\n" for name in names)) == ("", 0)


@pytest.mark.kafka
def test_a_dead_query_is_found_and_restored(dead):
    dead.leave(decided=True)
    place, servers = str(dead.place), ["--bootstrap-servers", dead.kafka.bootstrap_servers]
    found, status = typed("doctor", "--checkpoint", place, "--json", *servers)
    assert (json.loads(found)["findings"][0]["name"], status) == ("decided-and-open", 4)
    records, status = typed("decisions", "list", place, "--json")
    assert ([d["commit"] for d in json.loads(records)], status) == ([False, True], 0)
    batches, status = typed("progress", place, "--json")
    assert ([(b["state"], b["rows"]) for b in json.loads(batches)], status) == (
        [("decided", 4)],
        0,
    )
    steps, status = typed("restore", place, "--json", *servers)
    assert ([s["do"] for s in json.loads(steps)], status) == (["commit", "commit"], 0)
    assert dead.seen() == ROWS
