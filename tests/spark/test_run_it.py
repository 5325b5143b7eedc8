"""What the guide's page "Run it" says: a packed environment on a standalone cluster, a supervisor
that starts a killed program again, SIGTERM, two supervisors of one query, and brokers that restart
one after another. The programs run as users run them: by `spark-submit` or `python`.
"""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tarfile
import threading
import zipfile
from collections import Counter
from importlib.metadata import distribution
from pathlib import Path

import pytest
import yaml
from shell import typed

from kafka2pc.kafka.read.whole_topic import read_ended
from kafka2pc.kafka.wire.cluster import Cluster
from kafka2pc.kafka.wire.descriptions import list_transactions
from kafka2pc.proof.child_process import until

pytestmark = pytest.mark.never_unsteady

ROOT = Path(__file__).resolve().parents[2]
PAGE = json.loads((ROOT / "nbs/guide/16_run_it.ipynb").read_text(encoding="utf-8"))["cells"]
TEXT = "\n".join("".join(cell["source"]) for cell in PAGE if cell["cell_type"] == "markdown")
STOP = next(c for c in re.findall(r"(?s)```python\n(.*?)```", TEXT) if "SIGTERM" in c)
SPARK = str(distribution("pyspark").locate_file("pyspark"))  # with its pyspark.zip, as on a cluster
PATIENCE_S = 300  # a start of Spark takes a minute on a machine that does other things, too
# what a run says that meets another one of its query
SEEN = (
    "CONCURRENT_STREAM_LOG_UPDATE",
    "Multiple streaming queries",
    "Superseded",
    "is aborted before the decision",
    "got the plan of batch",
    "claimed this batch",
)
JARS = ("spark-core", "spark-sql", "spark-yarn", "spark-kubernetes")

# 100 rows a micro-batch; a transaction is open for most of the time
JOB = """
import signal
import sys
import threading
import time

from pyspark.sql import SparkSession
from pyspark.sql.functions import udf

import kafka2pc

servers, topic, checkpoint, how, seconds = sys.argv[1:]
spark = SparkSession.builder.config("spark.ui.enabled", False).getOrCreate()


@udf("string")
def slow(value):
    if value % 50 == 0:
        time.sleep(float(seconds))
    return str(value)


rows = spark.readStream.format("rate-micro-batch").options(rowsPerBatch=100, numPartitions=2)
writer = rows.load().select(slow("value").alias("value")).writeStream
options = {"kafka.bootstrap.servers": servers, "topic": topic}
if how == "format":
    writer = writer.format("kafka2pc").options(**options)
else:
    writer = writer.foreachBatch(kafka2pc.exactly_once(options))
query = writer.option("checkpointLocation", checkpoint).start()
"""


def test_every_setting_of_the_page_is_one_of_this_spark():
    """Spark ignores a setting that it does not know."""
    named = set(re.findall(r"\bspark(?!\.streams)(?:\.\w+){2,}", TEXT))
    folder = Path(SPARK) / "jars"
    known = b"".join(
        archive.read(name)
        for jar in JARS
        for archive in [zipfile.ZipFile(next(folder.glob(f"{jar}_*.jar")))]
        for name in archive.namelist()
        if name.endswith(".class") and ("conf" in name.lower() or "deploy/yarn" in name)
    )
    unknown = {name for name in named if name.removesuffix(".PYSPARK_PYTHON").encode() not in known}
    assert len(named) > 3 and unknown == set()


class Supervised:
    """Starts a program again, as the page's supervisor does, until `stop`. `ends`: how each run has
    ended. What the program prints is in the file `log`.
    """

    def __init__(self, words, log, folder, env, pause_s=1):
        self.words, self.log, self.folder, self.env, self.pause_s = words, log, folder, env, pause_s
        self.ends, self.process = [], None
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._go_on)
        self._thread.start()

    def _go_on(self):
        while not self._over.is_set():
            with open(self.log, "ab") as log:
                self.process = subprocess.Popen(
                    self.words,
                    cwd=self.folder,
                    env=self.env,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
            self.ends.append(self.process.wait())
            self._over.wait(self.pause_s)

    def signal(self, number, whole=False):
        """Send a signal to the program that runs now (`whole`: and to all that it has started), and
        wait until the next one runs, or until it has ended.
        """
        ended = len(self.ends)
        (os.killpg if whole else os.kill)(self.process.pid, number)
        until(lambda: len(self.ends) > ended, "the program ends", PATIENCE_S)

    def stop(self):
        """SIGTERM to the program, and no next one."""
        self._over.set()
        if self.process.poll() is None:
            os.kill(self.process.pid, signal.SIGTERM)
        self._thread.join(PATIENCE_S)
        if self._thread.is_alive():
            os.killpg(self.process.pid, signal.SIGKILL)


@pytest.fixture
def supervise(tmp_path, kafka):
    """Supervise a job. All that were started are stopped at the end."""
    started = []

    def make(topic, how="format", *, words=(sys.executable,), env=None, seconds=0.2, name="job"):
        job = tmp_path / "job.py"
        job.write_text(JOB + STOP)
        env = os.environ | {"PYTHONPATH": str(ROOT)} if env is None else env
        arguments = [kafka.bootstrap_servers, topic, tmp_path / "checkpoint", how, str(seconds)]
        words = [*words, job, *arguments]
        started.append(Supervised(words, tmp_path / f"{name}.log", tmp_path, env))
        return started[-1]

    yield make
    for supervised in started:
        supervised.stop()


def committed(folder):
    """How many micro-batches Spark has committed."""
    return len(list((folder / "checkpoint" / "commits").glob("[0-9]*")))


def await_batches(folder, more=2):
    wanted = committed(folder) + more
    until(lambda: committed(folder) >= wanted, f"{more} more batches", PATIENCE_S)


def open_ones(kafka, folder):
    """The transactions of the query that are open now."""
    query_id = json.loads((folder / "checkpoint" / "metadata").read_text())["id"]
    cluster = Cluster(kafka.client_conf)
    try:
        found = list_transactions(cluster, f"kafka2pc-{query_id}", ("Ongoing",))
        return [t.transactional_id for t in found]
    finally:
        cluster.close()


def check_rows(kafka, topic):
    """Each row is there once, and none is missing before the last one."""
    rows = Counter(int(r.value) for r in read_ended(kafka.client_conf, topic))
    assert rows == Counter(range(len(rows))) and len(rows) >= 300


# -- a packed environment, and a cluster --


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    """The commands of the page: a new environment with this project, packed, and unpacked again as
    `environment` in the folder of the driver. It has no PySpark: that is the cluster's.
    """
    folder = tmp_path_factory.mktemp("packed")
    source, env = folder / "source", folder / "env"
    shutil.copytree(ROOT / "kafka2pc", source / "kafka2pc")
    for file in ROOT.iterdir():
        if file.is_file():
            shutil.copy(file, source)
    subprocess.run([sys.executable, "-m", "venv", env], check=True)
    install = [env / "bin/pip", "install", "-q", source, "pandas<3", "venv-pack"]
    subprocess.run(install, check=True)
    subprocess.run(
        [env / "bin/venv-pack", "-q", "-p", env, "-o", folder / "environment.tar.gz"], check=True
    )
    return folder / "environment.tar.gz"


@pytest.fixture(scope="module")
def hosts(tmp_path_factory):
    """A standalone master and two workers on loopback, which know no Python of this project."""
    from kafka2pc.proof.drills.setups import TwoHosts

    with pytest.MonkeyPatch.context() as patch:
        for name in ("PYSPARK_PYTHON", "PYSPARK_DRIVER_PYTHON", "PYTHONPATH"):
            patch.delenv(name, raising=False)
        patch.setenv("SPARK_HOME", SPARK)
        cluster = TwoHosts(tmp_path_factory.mktemp("hosts") / "cluster")
    yield cluster
    cluster.stop()


@pytest.mark.nightly
@pytest.mark.kafka
@pytest.mark.spark
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("how", ["format", "foreachBatch"])
def test_a_packed_environment_on_a_cluster_survives_sigkill_and_sigterm(
    kafka, tmp_path, supervise, packed, hosts, how
):
    topic = f"packed-{how}"
    kafka.create_topic(topic, partitions=2)
    with tarfile.open(packed) as archive:
        archive.extractall(tmp_path / "environment", filter="fully_trusted")
    submit = [f"{SPARK}/bin/spark-submit", "--master", hosts.url, "--archives"]
    submit += [f"{packed}#environment", "--executor-memory", "700m"]
    env = {k: v for k, v in os.environ.items() if not k.startswith(("PYSPARK_", "PYTHONPATH"))}
    env |= {"SPARK_HOME": SPARK, "PYSPARK_PYTHON": "./environment/bin/python"}
    supervised = supervise(topic, how, words=submit, env=env)
    for number in (signal.SIGKILL, signal.SIGTERM):
        await_batches(tmp_path)
        supervised.signal(number, whole=True)
    await_batches(tmp_path)
    supervised.stop()
    check_rows(kafka, topic)


# -- a watcher --

MANIFESTS = re.findall(r"(?s)```yaml\n(.*?)```", TEXT)


def containers_of(manifest):
    """The containers of a manifest of Kubernetes."""
    spec = yaml.safe_load(manifest)["spec"]
    spec = spec.get("jobTemplate", {}).get("spec", spec)
    return spec["template"]["spec"]["containers"]


WATCHES = [c for manifest in MANIFESTS for c in containers_of(manifest)]
LINES = [
    *(shlex.join(each["command"]) for each in WATCHES),
    *re.findall(r"ExecStart=\S*/(kafka2pc .*)", TEXT),
]


@pytest.mark.parametrize("line", LINES)
def test_a_watcher_of_the_page_is_a_line_that_the_command_takes(line, tmp_path):
    line = re.sub(r"\S*/checkpoint\b", str(tmp_path), line)
    said, status = typed(line, KAFKA2PC_BOOTSTRAP_SERVERS="127.0.0.1:1")
    assert status == 1 and "finds no checkpoint" in said, said


def test_the_manifests_of_a_watcher_hold_together():
    kinds = [yaml.safe_load(manifest)["kind"] for manifest in MANIFESTS]
    assert (kinds, len(LINES)) == (["Deployment", "CronJob"], 3)
    watch, job = WATCHES
    alive = watch["command"][watch["command"].index("--alive") + 1]
    assert alive in watch["livenessProbe"]["exec"]["command"][-1]
    assert "--once" in job["command"] and "livenessProbe" not in job


# -- on one machine --


@pytest.mark.nightly
@pytest.mark.kafka
@pytest.mark.spark
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("how", ["format", "foreachBatch"])
def test_sigterm_stops_the_query_and_nothing_stays_open(kafka, tmp_path, supervise, how):
    topic = f"sigterm-{how}"
    kafka.create_topic(topic, partitions=2)
    supervised = supervise(topic, how, seconds=1)
    await_batches(tmp_path)
    if how == "format":  # a small batch of foreachBatch has its transaction open for a moment
        until(lambda: open_ones(kafka, tmp_path), "a transaction is open", PATIENCE_S)
    supervised.stop()
    assert supervised.ends == [0]
    assert open_ones(kafka, tmp_path) == []


@pytest.mark.nightly
@pytest.mark.kafka
@pytest.mark.spark
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("how", ["format", "foreachBatch"])
def test_two_supervisors_of_one_query_double_nothing_and_lose_nothing(
    kafka, tmp_path, supervise, how
):
    topic = f"twice-{how}"
    kafka.create_topic(topic, partitions=2)
    supervised = [supervise(topic, how, seconds=2, name="first")]
    await_batches(tmp_path)
    supervised.append(supervise(topic, how, seconds=2, name="second"))
    until(lambda: sum(len(s.ends) for s in supervised) >= 3, "three runs end", 3 * PATIENCE_S)
    await_batches(tmp_path)
    for one in supervised:
        one.stop()
    check_rows(kafka, topic)
    logs = "".join(one.log.read_text() for one in supervised)
    assert any(text in logs for text in SEEN)
    assert logs.count("\n") < 400 * sum(len(one.ends) for one in supervised)


@pytest.mark.nightly
@pytest.mark.kafka
@pytest.mark.spark
@pytest.mark.timeout(1800)
def test_brokers_that_restart_one_after_another_end_no_query(three, tmp_path, monkeypatch):
    three.create_topic("rolling", partitions=3)
    job = tmp_path / "job.py"
    job.write_text(JOB + STOP)
    words = [sys.executable, job, three.bootstrap_servers, "rolling", tmp_path / "checkpoint"]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    supervised = Supervised([*words, "format", "0.2"], tmp_path / "job.log", tmp_path, env)
    try:
        for node in range(3):
            await_batches(tmp_path)
            three.kill(node)
            await_batches(tmp_path)
            three.restart(node)
        await_batches(tmp_path)
        assert supervised.ends == []
    finally:
        supervised.stop()
    check_rows(three, "rolling")
