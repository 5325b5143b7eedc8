"""What all tests share: an environment that does not depend on the caller's, the fixtures of
tests/support, and which tests are skipped and why. Two plugins, in tests/support: `unsteady`, which
runs some tests a second time, and `longest_first`, the order on several workers.

Nothing here imports PySpark, a Kafka client or a module of the package: a fixture imports what it
needs when a test asks for it. So one test of a small module starts in a second.

`KAFKA2PC_REQUIRE=all` turns every skip into a failure.
"""

import os
import re
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import fast_spark
import pytest
from both_formats import both_formats, either_format  # noqa: F401  (both formats, in Spark)
from database_fixtures import NO_MARIADB, mariadb, postgres  # noqa: F401  (the shared databases)
from kafka_fixtures import kafka, open_host, secure, three, three_nodes  # noqa: F401  (brokers)
from query_fixtures import job, jobs, spark_query  # noqa: F401  (the shared driver, and one query)
from store_fixtures import azure, gcs, s3  # noqa: F401  (servers of object stores)

pytest_plugins = ["unsteady", "longest_first"]

ROOT = Path(__file__).resolve().parent.parent
REQUIRE_ALL = os.environ.get("KAFKA2PC_REQUIRE") == "all"
JAVA_MIN = 17

# Spark's workers and the package read these. A value of the caller, an empty one too, would change
# what is tested.
for name in [
    "DATABRICKS_RUNTIME_VERSION",
    "KAFKA2PC_BOOTSTRAP_SERVERS",
    "KAFKA2PC_CRASH",
    "KAFKA2PC_WATCHER",
    "KAFKA2PC_HISTORY",
    "KAFKA2PC_LOG",
    "PYSPARK_SUBMIT_ARGS",
    "SPARK_CONF_DIR",
    "SPARK_HOME",
    "SPARK_REMOTE",
]:
    os.environ.pop(name, None)
os.environ["PYSPARK_PYTHON"] = os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
os.environ["SPARK_LOCAL_IP"] = "127.0.0.1"
os.environ.update(fast_spark.options())


@cache
def missing_java() -> str:
    """Empty if a Java that is new enough answers, otherwise what is missing."""
    home = os.environ.get("JAVA_HOME")
    java = shutil.which("java", path=f"{home}/bin" if home else None)
    if not java:
        return f"needs Java {JAVA_MIN}: no java in {'JAVA_HOME' if home else 'PATH'}"
    said = subprocess.run(
        [java, "-version"], stdin=subprocess.DEVNULL, capture_output=True, text=True
    ).stderr
    version = re.search(r'version "(?:1\.)?(\d+)', said)
    if version and int(version[1]) >= JAVA_MIN:
        return ""
    return f"needs Java {JAVA_MIN}: {java} says {said.splitlines()[0] if said else 'nothing'}"


def pytest_runtest_setup(item):
    if any(item.get_closest_marker(name) for name in ("kafka", "spark")) and missing_java():
        pytest.skip(missing_java())
    if item.get_closest_marker("mysql") and not shutil.which("mariadbd"):
        pytest.skip(NO_MARIADB)
    if item.get_closest_marker("spark"):
        fast_spark.archive()


def _fail_instead(report, reason):
    report.outcome = "failed"
    report.longrepr = f"KAFKA2PC_REQUIRE=all allows no skip, and this was to be skipped: {reason}"


def _reason(longrepr):
    return longrepr[2] if isinstance(longrepr, tuple) else str(longrepr)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if REQUIRE_ALL and report.skipped and not hasattr(report, "wasxfail"):
        _fail_instead(report, _reason(report.longrepr))
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector):
    report = yield
    if REQUIRE_ALL and report.skipped:
        _fail_instead(report, _reason(report.longrepr))
    return report


@pytest.fixture(scope="module", autouse=True)
def no_connection_is_left():
    """A client that a test leaves open would try again and again when its broker is gone."""
    yield
    client = sys.modules.get("kafka2pc.kafka.client")
    if client:
        for key in list(client.shared_cluster.kept):
            client.close_cluster(dict(key))


@pytest.fixture(scope="session")
def root() -> Path:
    """The project's top folder."""
    return ROOT


@pytest.fixture
def own_folders(tmp_path, monkeypatch):
    """Nothing that a user has in HOME changes the run, and nothing is written there."""
    for name in (
        "JUPYTER_CONFIG_DIR",
        "JUPYTER_DATA_DIR",
        "JUPYTER_RUNTIME_DIR",
        "IPYTHONDIR",
        "MPLCONFIGDIR",
    ):
        folder = tmp_path / name.lower()
        folder.mkdir()
        monkeypatch.setenv(name, str(folder))
    monkeypatch.setenv("PYSPARK_PYTHON", sys.executable)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    return tmp_path
