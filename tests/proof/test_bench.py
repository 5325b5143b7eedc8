"""The parts of the benchmark work: every engine writes what it should, what is missing is reported,
and the picture names what it shows.
"""

import subprocess
from collections import Counter
from unittest.mock import create_autospec
from xml.etree import ElementTree

import pytest
from kafka_fixtures import records
from marks import first_of

from kafka2pc.kafka.wire.cluster import Cluster
from kafka2pc.local.jars import find_java
from kafka2pc.proof.bench import bench as bench_module
from kafka2pc.proof.bench import engines as bench_engines
from kafka2pc.proof.bench import java as bench_java
from kafka2pc.proof.bench.bench import Bench, Sizes, machine
from kafka2pc.proof.bench.engines import columnar, confluent, confluent_producer, rows_of_size
from kafka2pc.proof.bench.java import (
    default_settings,
    has_compiler,
    java_producers,
    tuned_settings,
    tuning,
)
from kafka2pc.proof.bench.measure import Comparison, Measured, chart
from kafka2pc.proof.bench.topics import topic_of
from kafka2pc.proof.child_process import Failed

pytestmark = pytest.mark.never_unsteady


# -- Java's producer --


def needs_a_compiler():
    if not has_compiler(find_java()):
        pytest.skip("this Java has no compiler")


@pytest.mark.kafka
@pytest.mark.parametrize(
    "settings", first_of([tuned_settings, default_settings], ids=lambda kind: kind.__name__)
)
def test_java_writes_the_same_keyed_rows_into_the_same_partitions(kafka, settings):
    needs_a_compiler()
    chunk = rows_of_size(100, keyed=True, rows=300)
    with topic_of(kafka, 5) as ours, Cluster(kafka.client_conf) as cluster:
        columnar(cluster, kafka.client_conf, chunk, 2, ours)
        wanted = Counter((m.partition(), m.key(), m.value()) for m in records(kafka, ours))
    with topic_of(kafka, 5) as theirs, java_producers(print) as java:
        java.load(chunk)
        assert java.send(settings(kafka.client_conf, "lz4"), theirs, 600) > 0
        found = Counter((m.partition(), m.key(), m.value()) for m in records(kafka, theirs))
    assert sum(wanted.values()) == 600
    assert found == wanted


@pytest.mark.kafka
def test_java_begins_again_with_a_producer_that_it_has(kafka):
    needs_a_compiler()
    with topic_of(kafka, 1) as topic, java_producers(print) as java:
        java.load(rows_of_size(100, keyed=False, rows=10))
        for _ in range(3):
            java.send(default_settings(kafka.client_conf), topic, 25)
        assert len(records(kafka, topic)) == 75


@pytest.mark.kafka
def test_what_java_refuses_is_raised(kafka):
    needs_a_compiler()
    with java_producers(print) as java:
        java.load(rows_of_size(100, keyed=False, rows=10))
        with pytest.raises(Failed, match="ConfigException"):
            java.send(default_settings(kafka.client_conf, "no such codec"), "topic", 1)


def test_a_java_without_a_compiler_is_left_out_and_named(monkeypatch):
    only_base = subprocess.CompletedProcess([], 0, stdout="java.base@17\n")
    monkeypatch.setattr(bench_java.subprocess, "run", lambda *_, **__: only_base)
    monkeypatch.setattr(bench_java, "find_java", lambda: "/a/jre/bin/java")
    told = []
    with java_producers(told.append) as java:
        assert java is None
    assert len(told) == 1 and "left out: /a/jre/bin/java" in told[0] and "JDK" in told[0]


@pytest.mark.parametrize("partitions", [3, 100, 1_000, 100_000])
def test_open_batches_of_the_tuned_producer_fit_into_its_memory(partitions):
    tuned = tuning(partitions)
    assert tuned["batch.size"] * partitions <= tuned["buffer.memory"] / 2
    assert tuned["batch.size"] >= 600


# -- confluent-kafka --


@pytest.mark.kafka
def test_confluent_waits_while_its_queue_is_full_and_writes_all_rows(kafka, monkeypatch):
    monkeypatch.setattr(bench_engines, "_QUEUE", 250)
    monkeypatch.setitem(bench_engines._CONFLUENT, "queue.buffering.max.messages", 250)
    chunk = rows_of_size(100, keyed=False, rows=100)
    with topic_of(kafka, 3) as topic:
        confluent(confluent_producer(kafka.client_conf), chunk.to_pylist(), 20, topic)
        found = Counter(m.value() for m in records(kafka, topic))
    assert found == {value: 20 for value in chunk.column("value").to_pylist()}


# -- the picture --

SVG = "{http://www.w3.org/2000/svg}"


def compared(way, *values, unit="rows/s"):
    peer = Measured(way="a peer, tuned", unit=unit, values=(100.0, 200.0, 300.0))
    return Comparison(
        title=f"title of {way}", measured=(Measured(way=way, unit=unit, values=values), peer)
    )


def test_the_picture_alone_says_what_it_shows(tmp_path):
    shown = [compared("kafka2pc", 300.0, 320.0, 340.0), compared("two phases", 2.0, 4.0, 5.0)]
    shown.append(compared("drain", 0.5, 0.25, 0.125, unit="s"))
    chart(shown, tmp_path / "bench.svg", machine())
    drawn = ElementTree.parse(tmp_path / "bench.svg").getroot()
    texts = ["".join(text.itertext()).strip() for text in drawn.iter(f"{SVG}text")]
    everything = "\n".join(texts)
    assert machine() in everything and "medians of at least 3 rounds" in everything
    assert "title of kafka2pc, rows/s" in texts
    assert "title of drain, s" in texts
    assert {"320  (1.60x)", "4  (0.02x)", "0.250  (800.00x)"} <= set(texts)


# -- all of it --


def test_every_comparison_of_spark_is_in_the_bench(monkeypatch):
    """The notebooks run them: here nothing is measured."""
    for name in ("sinks", "wide_sinks", "visible_as_a_whole", "sources"):
        as_defined = create_autospec(getattr(bench_module, name), return_value=())
        monkeypatch.setattr(bench_module, name, as_defined)
    sizes = Sizes()
    run = Bench(kafka=None, rounds=3, tell=lambda text: None, sizes=sizes)
    titles = [one.title for one in (*run.sinks(), *run.sources())]
    assert len(set(titles)) == len(sizes.rows) + 2 * len(sizes.partitions) + 4


@pytest.mark.parametrize(("rows", "turns"), [(1_000, 30), (100_000, 9), (1_000_000, 3)])
def test_shorter_turns_are_taken_more_often(rows, turns):
    assert bench_engines._turns(rows, 3) == turns
