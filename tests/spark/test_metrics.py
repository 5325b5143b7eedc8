"""Metrics: what is counted, by whom, where it is kept, and what the dashboard and the alerts make
of it.
"""

import json
import logging
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from urllib.request import urlopen

import pytest
from confluent_kafka import Producer
from prometheus_tools import RULES, firing, names, panels, program, prometheus, rules, series

import kafka2pc
from kafka2pc.decision_logs.files import FileLog
from kafka2pc.operations.access import Access
from kafka2pc.operations.doctor.doctor import doctor
from kafka2pc.operations.doctor.findings import Diagnosis, Finding
from kafka2pc.operations.metrics import (
    Cluster,
    cluster_samples,
    doctor_samples,
    finding_samples,
    open_samples,
)
from kafka2pc.operations.metrics import progress_samples as checkpoint_samples
from kafka2pc.operations.progress import Progress, find_progress
from kafka2pc.operations.query import open_query
from kafka2pc.operations.survey import FoundTransaction
from kafka2pc.proof.child_process import until
from kafka2pc.protocol.driver import Driver
from kafka2pc.protocol.errors import BadOption
from kafka2pc.protocol.history import Silence
from kafka2pc.protocol.memory import MemoryParticipant
from kafka2pc.protocol.messages import CommitMessage, Committable, Plan, PreparedTxnState
from kafka2pc.protocol.names import new_token
from kafka2pc.protocol.phases.decide import decide
from kafka2pc.protocol.phases.finish import report_loss
from kafka2pc.protocol.phases.precommit import precommit
from kafka2pc.protocol.phases.restore import restore
from kafka2pc.spark.metrics.families import METRICS, from_text, sample, to_text
from kafka2pc.spark.metrics.files import add_to_file, measure_into, read_folder
from kafka2pc.spark.prometheus import listen, make_listener, progress_samples
from kafka2pc.spark.sink.batch_line import BatchHistory, count_failure, log_batch
from kafka2pc.spark.sink.options import parse_sink_options

pytestmark = [pytest.mark.never_unsteady]

QUERY = "11111111-2222-3333-4444-555555555555"


OPEN = FoundTransaction(
    transactional_id="x",
    state="Ongoing",
    producer_id=1,
    epoch=0,
    partitions=(),
    age_ms=1000,
    left_ms=800_000,
    query_id=QUERY,
    decided=True,
)


def value(samples, family, **labels):
    """The one value of a family, of those samples that have these labels."""
    wanted = set(labels.items())
    found = [s.value for s in samples if s.family == f"kafka2pc_{family}" and not s.suffix]
    if labels:
        found = [
            s.value
            for s in samples
            if s.family == f"kafka2pc_{family}" and wanted <= set(s.labels) and not s.suffix
        ]
    assert len(found) == 1, (family, labels, found)
    return found[0]


def write_batch(history, batch_id=0):
    """Log and count a batch with one transaction, as the committer does after its commit."""
    plan = Plan(query_id=QUERY, batch_id=batch_id, attempt=0, token=new_token(batch_id, 0))
    began = int(time.time() * 1000) - 200
    state = PreparedTxnState(1, 0)
    one = Committable(transactional_id="x", state=state, started_ms=began, timeout_ms=900_000)
    log_batch([CommitMessage(plan=plan, committables=(one,), bytes=100)], history, swept=2)


def history_in(folder, name="flights"):
    return BatchHistory(measure_into(str(folder), QUERY), query=QUERY, name=name)


def write_everything(folder):
    """Each of the four programs writes into the folder."""
    history = history_in(folder)
    write_batch(history)
    labels = {"sink": "PythonTable"}
    progress = SimpleNamespace(
        id=QUERY,
        name="flights",
        batchId=0,
        numInputRows=5,
        durationMs={"addBatch": 100},
        sources=[
            SimpleNamespace(
                endOffset='{"offsets": {"t": {"0": 5}}, "behind": {"avg": 1.0, "max": 1, "min": 1}}'
            )
        ],
    )
    ended = sample("spark_failures_total", 0, query=QUERY, name="flights", **labels)
    add_to_file(folder, f"spark-{QUERY}", [*progress_samples(progress, "PythonTable", 1), ended])
    at = {("flights", 0): 7}
    cluster = Cluster(
        query_id=QUERY,
        found=[OPEN],
        stable=at,
        ends=at,
        ids={"kafka2pc": 3},
        groups={"billing": {("flights", 0): SimpleNamespace(offset=5)}},
    )
    lost = Finding(name="decided-and-lost", level="danger", what="", why="", risk="", action="")
    seen = [*finding_samples(Diagnosis((), (lost,)), 1), *cluster_samples(cluster)]
    add_to_file(folder, "doctor", seen)
    newest = Progress(
        batch_id=0,
        state="done",
        attempt=0,
        rows=5,
        began_ms=1,
        took_ms=100,
        left_ms=800_000,
        max_behind=1,
    )
    add_to_file(folder, "progress", checkpoint_samples([newest], QUERY))


def scrape(port):
    return urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10).read().decode()


def scraped_names(text):
    return {
        line.partition("{")[0].partition(" ")[0] for line in text.splitlines() if line[0] != "#"
    }


def test_the_dashboard_and_the_rules_ask_only_for_what_is_scraped(tmp_path):
    write_everything(str(tmp_path))
    endpoint = kafka2pc.metrics.serve(0, str(tmp_path), "127.0.0.1")
    try:
        scraped = scraped_names(scrape(endpoint.port))
    finally:
        endpoint.close()
    assert {s.removesuffix("_sum") for s in scraped} >= METRICS.keys(), "each family is made"
    asked = {n for _, e in panels() for n in names(e)} | {
        n for e in rules().values() for n in names(e)
    }
    assert len(asked) > 20 and asked <= scraped


def test_promtool_accepts_rules_and_files(tmp_path):
    tool = program("promtool")
    done = subprocess.run([tool, "check", "rules", RULES], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    write_everything(str(tmp_path))
    for text in (path.read_text() for path in tmp_path.glob("*.prom")):
        check = lambda t: subprocess.run(
            [tool, "check", "metrics"], input=t, capture_output=True, text=True
        )
        assert check(text).returncode == 0, check(text).stderr
    # what doctor and progress print is read by node_exporter, too
    printed = to_text(from_text((tmp_path / "kafka2pc-doctor.prom").read_text()), openmetrics=True)
    assert printed.endswith("# EOF\n") and check(printed).returncode == 0


class Session:
    """A session of Spark with its listeners."""

    def __init__(self):
        self.streams, self.listeners = self, []
        self.addListener, self.removeListener = self.listeners.append, self.listeners.remove


def test_a_cell_that_listens_again_counts_nothing_twice(tmp_path):
    session, folder = Session(), str(tmp_path)
    first, other = listen(session, folder), listen(session, f"{folder}/other")
    again = listen(session, folder)
    assert session.listeners == [other, again] and first is not again
    assert listen(Session(), folder) is not again and session.listeners == [other, again]


def test_each_lost_transaction_is_counted(tmp_path):
    store = MemoryParticipant("kafka")
    driver = Driver(query_id=QUERY, log=FileLog(f"{tmp_path}/log"), participants={"kafka": store})
    driver = replace(driver.within(lost_transactions="skip"), history=history_in(tmp_path))
    plan = restore(driver, 0)
    messages = [precommit([store], replace(plan, task=n), [["a"]]) for n in range(3)]
    decided = decide(driver, plan, messages)
    report_loss(driver, decided, decided.committables)
    assert value(read_folder(str(tmp_path)), "lost_transactions_total") == 3


def test_readers_wait_only_for_what_is_open_for_long(tmp_path):
    """Some transaction of a busy query is open whenever doctor looks."""
    held = sample("doctor_findings", 1, query=QUERY, finding="readers-held-back", level="trouble")
    busy = series(sample("unstable_offsets", 7, query=QUERY, topic="busy"), 60)
    assert "Kafka2pcReadersWait" not in firing([busy], [50], tmp_path)[50]
    at = firing([busy, series(held, 60)], [14, 16], tmp_path)
    assert "Kafka2pcReadersWait" not in at[14] and "Kafka2pcReadersWait" in at[16]


def test_a_loss_that_is_the_first_count_of_a_folder_is_an_alert(tmp_path):
    """A driver in a new container: its counter begins at 1, and never grows."""
    lost = sample("lost_transactions_total", 1, query=QUERY)
    other = sample("lost_transactions_total", 0, query=QUERY, name="flights")
    begins = {**series(lost, 0), "values": "_x10 1+0x60"}
    grows = {**series(other, 0), "values": "0+0x40 1+0x60"}
    at = firing([begins, grows], [9, 12, 20, 35, 45, 60], tmp_path)
    assert [minute for minute, found in at.items() if "Kafka2pcRowsLost" in found] == [12, 20, 45]


def test_counters_go_on_in_another_process_and_failures_are_counted(tmp_path):
    for batch_id in range(2):
        write_batch(history_in(tmp_path), batch_id)  # each as in a process of its own
    failing = history_in(tmp_path)
    failing.append("ok", "abort", batch_id=2, transactional_id="y")
    failing.append("ok", "lost", what="batch 1", transactions=1)
    count_failure(failing)
    seen = read_folder(str(tmp_path))
    assert value(seen, "batches_total") == 2 and value(seen, "failed_batches_total") == 1
    assert value(seen, "rows_total") == 0 and value(seen, "bytes_total") == 200
    assert value(seen, "aborted_transactions_total") == 5
    assert value(seen, "lost_transactions_total") == 1
    assert value(seen, "last_batch_id") == 1
    assert 890 < value(seen, "last_batch_time_left_seconds") < 900
    counts = [
        s.value for s in seen if s.suffix == "_count" and dict(s.labels)["phase"] == "precommit"
    ]
    assert counts == [2]


def test_a_query_that_starts_again_without_new_rows_runs(tmp_path):
    """Spark then reports no progress, only that it is idle."""
    folder, name = str(tmp_path), "flights"
    progress = SimpleNamespace(
        id=QUERY,
        name=name,
        batchId=0,
        numInputRows=5,
        durationMs={"addBatch": 100},
        sources=[],
        sink=SimpleNamespace(description="PythonTable"),
    )
    one = make_listener(folder)
    one.onQueryProgress(SimpleNamespace(progress=progress))
    one.onQueryTerminated(SimpleNamespace(id=QUERY, exception=None))
    assert value(read_folder(folder), "spark_running") == 0
    for begin in (
        lambda again: again.onQueryStarted(SimpleNamespace(id=QUERY, name=name)),
        lambda again: None,  # it was started before the listener was added
    ):
        before = time.time()
        again = make_listener(folder)
        begin(again)
        again.onQueryIdle(SimpleNamespace(id=QUERY))
        seen = read_folder(folder)
        assert value(seen, "spark_running") == 1
        assert value(seen, "spark_progress_timestamp_seconds") >= int(before)
        both = [
            s.labels for s in seen if s.family.endswith(("_running", "_progress_timestamp_seconds"))
        ]
        assert len(set(both)) == 1, "the alert joins them"
        again.onQueryTerminated(SimpleNamespace(id=QUERY, exception="died"))
        assert value(read_folder(folder), "spark_running") == 0


PAGE = Path(__file__).resolve().parents[2] / "nbs/guide/20_metrics.ipynb"


@pytest.mark.parametrize("status", [0, 1, 2, 3, 4, 126, 127, 137])
def test_only_a_doctor_that_has_looked_replaces_its_file(status, tmp_path):
    """Of any other end, the script keeps the last file, which Kafka2pcDoctorSilent needs."""
    text = "".join(t for c in json.loads(PAGE.read_text())["cells"] for t in c["source"])
    [script] = re.findall(r"```\n(F=/var/lib(?:.|\n)*?)```", text)
    program = tmp_path / "kafka2pc"
    program.write_text(f"#!/bin/sh\n[ {status} -gt 4 ] || echo new\nexit {status}\n")
    program.chmod(0o755)
    last = tmp_path / "kafka2pc-doctor-NAME.prom"
    last.write_text("old\n")
    script = script.replace("/var/lib/node_exporter", str(tmp_path))
    path = f"{tmp_path}:{os.environ['PATH']}"
    subprocess.run(["sh", "-c", script], env={"PATH": path}, check=False)
    assert last.read_text() == ("new\n" if status in (0, 3, 4) else "old\n")


def test_a_name_comes_back_as_it_is(tmp_path):
    for name in ("a\rb", 'a"b\\n', "a\nb", "\u2028", "x,y}# "):
        for batch_id in range(2):
            write_batch(history_in(tmp_path / name.encode().hex(), name), batch_id)
        seen = read_folder(str(tmp_path / name.encode().hex()))
        assert value(seen, "batches_total", name=name) == 2, name


def test_two_doctors_of_one_cluster_have_no_sample_in_common():
    """node_exporter refuses all files if two of them have a sample in common."""
    other = replace(OPEN, query_id="22222222-2222-3333-4444-555555555555")
    at = {("flights", 0): 7}
    same = dict(found=[OPEN, other], stable=at, ends=at, ids={"kafka2pc": 3}, groups={})
    nothing = Diagnosis((), ())
    first, second = (
        {
            (s.family, s.labels)
            for s in (
                *finding_samples(nothing, 1, name),
                *cluster_samples(Cluster(query_id=name, **same)),
            )
        }
        for name in (QUERY, other.query_id)
    )
    assert first and second and not first & second


def test_without_the_option_nothing_is_written_and_a_full_disk_fails_no_batch(tmp_path, caplog):
    write_batch(BatchHistory())
    write_batch(Silence())
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").write_text("")
    write_batch(history_in(tmp_path / "file"))
    assert "metrics cannot be written" in caplog.text


def test_without_prometheus_client_the_option_is_refused_and_all_else_works(monkeypatch):
    given = {"kafka.bootstrap.servers": "localhost:1", "topic": "t"}
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    assert parse_sink_options(given).query.metrics is None
    with pytest.raises(BadOption) as refused:
        parse_sink_options(given | {"metrics": "/metrics"})
    assert "prometheus_client" in refused.value.what
    for call in (lambda: kafka2pc.metrics.serve(0, "/metrics"), lambda: to_text([])):
        with pytest.raises(BadOption, match="pip install"):
            call()


def test_the_option_is_for_streams_with_transactions():
    given = {"kafka.bootstrap.servers": "localhost:1", "topic": "t", "metrics": "/metrics"}
    loose = parse_sink_options(given | {"deliveryGuarantee": "at_least_once"})
    assert "metrics" in loose.given.idle
    with pytest.raises(BadOption, match="absolute"):
        parse_sink_options(given | {"metrics": "here"})
    job = kafka2pc.exactly_once(given | {"decisionLog": "/decisions"}, name="job")
    with pytest.raises(BadOption, match="this is a batch write"):
        job.write(None)


QUIET = """
import logging, sys
import test_metrics
test_metrics.write_batch(test_metrics.BatchHistory())
log = logging.getLogger("kafka2pc")
print(log.level, log.handlers, logging.getLogger().handlers)
"""


def test_the_package_sets_no_log_level_and_adds_no_handler():
    path = os.pathsep.join(sys.path)
    env = os.environ | {"PYTHONPATH": f"{os.path.dirname(__file__)}{os.pathsep}{path}"}
    code = [sys.executable, "-c", QUIET]
    done = subprocess.run(code, env=env, capture_output=True, text=True)
    assert done.stdout == "0 [] []\n", done.stderr
    asked = subprocess.run(code, env=env | {"KAFKA2PC_LOG": "1"}, capture_output=True, text=True)
    assert asked.stdout.startswith(f"{logging.INFO} [<StreamHandler"), asked.stderr


JOB = """
import sys

from pyspark.sql import SparkSession

import kafka2pc

servers, source, target, folder = sys.argv[1:]
spark = SparkSession.builder.master("local[2]").config("spark.ui.enabled", False).getOrCreate()
endpoint = kafka2pc.metrics.serve(0, f"{folder}/metrics", "127.0.0.1")
kafka2pc.metrics.listen(spark, f"{folder}/metrics")
kafka = {"kafka.bootstrap.servers": servers}
rows = spark.readStream.format("kafka2pc").options(**kafka, subscribe=source)
rows = rows.option("startingOffsets", "earliest").option("maxOffsetsPerTrigger", 20).load()
sink = rows.select("value").writeStream.format("kafka2pc").options(**kafka, topic=target)
sink = sink.queryName("flights").option("metrics", f"{folder}/metrics")
query = sink.option("checkpointLocation", f"{folder}/checkpoint").start()
print(endpoint.port, flush=True)
query.awaitTermination()
"""


def start_job(folder, kafka, topics):
    """A process group, and the port of its endpoint."""
    (folder / "job.py").write_text(JOB)
    command = [sys.executable, folder / "job.py", kafka.bootstrap_servers, *topics, folder]
    with open(folder / "job.log", "ab") as log:
        job = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=log, text=True, start_new_session=True
        )
    return job, int(job.stdout.readline())


def batches(folder):
    """How many micro-batches the file of the sink counts."""
    found = [s.value for s in read_folder(folder) if s.family == "kafka2pc_batches_total"]
    return sum(found)


def alerts(ask):
    return {r["metric"]["alertname"] for r in ask('ALERTS{alertstate="firing"}')}


@pytest.mark.spark
@pytest.mark.kafka
@pytest.mark.nightly
def test_a_real_prometheus_answers_each_panel_and_sees_a_driver_that_hangs_or_dies(kafka, tmp_path):
    topics = [kafka.create_topic(f"metrics-{name}-{tmp_path.name}") for name in ("in", "out")]
    producer = Producer(kafka.client_conf)
    for n in range(4000):
        producer.produce(topics[0], str(n).encode())
    producer.flush(30)
    folder = str(tmp_path / "metrics")
    job, port = start_job(tmp_path, kafka, topics)
    try:
        until(lambda: batches(folder) >= 2, "two batches are counted", 120)
        write_operators_files(kafka, topics, tmp_path)
        with prometheus(tmp_path, port) as ask:
            empty = lambda: [title for title, e in panels() if not ask(e)]
            until(lambda: empty() == [], "each panel has a series", 60)
            assert alerts(ask) == set()
            os.killpg(job.pid, signal.SIGSTOP)
            until(lambda: alerts(ask) == {"Kafka2pcEndpointDown"}, "the alert fires", 60)
            os.killpg(job.pid, signal.SIGCONT)
            until(lambda: alerts(ask) == set(), "the alert is over", 60)
            os.killpg(job.pid, signal.SIGKILL)
            until(lambda: alerts(ask) == {"Kafka2pcEndpointDown"}, "the alert fires", 60)
        before = batches(folder)
        job.wait(30)
        job, port = start_job(tmp_path, kafka, topics)
        until(lambda: batches(folder) > before, "a new process counts on", 120)
        found = from_text(scrape(port))
        assert sum(s.value for s in found if s.family == "kafka2pc_rows_total") >= 20 * before
    finally:
        os.killpg(job.pid, signal.SIGKILL)
        job.wait(30)


def write_operators_files(kafka, topics, folder):
    """What doctor and progress print, where the endpoint finds it."""
    access, checkpoint = Access(kafka.bootstrap_servers), str(folder / "checkpoint")
    diagnosis = doctor(access, topics=topics, checkpoint=checkpoint)
    seen = doctor_samples(diagnosis, access, checkpoint=checkpoint)
    open_now = open_samples([OPEN], QUERY)  # a batch of this query may be between two transactions
    lag = sample("group_lag_offsets", 0, group="billing", topic=topics[1])
    add_to_file(str(folder / "metrics"), "doctor", [*seen, *open_now, lag])
    query = open_query(checkpoint)
    found = checkpoint_samples(find_progress(query), query.query_id)
    add_to_file(str(folder / "metrics"), "progress", found)
