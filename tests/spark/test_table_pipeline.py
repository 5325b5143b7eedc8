"""Kafka -> an aggregation -> Kafka and a Delta table, killed at random moments: both equal an
oracle, and each is read by a program that has nothing to do with ours.
"""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pyarrow as pa
import pytest
from confluent_kafka import Producer
from deltalake import DeltaTable

from kafka2pc.kafka.read.whole_topic import read_ended

pytestmark = [pytest.mark.kafka, pytest.mark.spark, pytest.mark.never_unsteady, pytest.mark.nightly]
SCRIPT = Path(__file__).parent.parent / "support" / "table_pipeline.py"
EVENTS, KEYS, KILLS = 6_000, 40, 6
SCHEMA = pa.schema({"key": pa.string(), "count": pa.int64()})


def script(*words, **more):
    words = [sys.executable, str(SCRIPT), *map(str, words)]
    return subprocess.Popen(words, start_new_session=True, stderr=subprocess.PIPE, **more)


def killed(process, after_s):
    """Kill it with its JVM and its workers, unless it is done before."""
    try:
        process.communicate(timeout=after_s)
        return False
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        return True


@pytest.mark.parametrize("seed", range(1))
def test_counts_in_a_topic_and_in_a_table_equal_an_oracle_after_random_kills(seed, kafka, tmp_path):
    dice, folder = random.Random(seed), tmp_path
    events, counts = (f"{name}-{seed}-{time.time_ns()}" for name in ("events", "counts"))
    for topic in (events, counts):
        kafka.create_topic(topic, partitions=3)
    sent = [str(dice.randrange(KEYS)) for _ in range(EVENTS)]
    producer = Producer(kafka.client_conf)
    for value in sent:
        producer.produce(events, value)
    producer.flush()
    DeltaTable.create(f"{folder}/table", SCHEMA)
    words = ("run", kafka.bootstrap_servers, events, counts, f"{folder}/table", folder)
    kills = 0
    while kills < KILLS and killed(script(*words), dice.uniform(8, 16)):
        kills += 1
    last = script(*words)
    assert (last.communicate(timeout=300), last.returncode)[1] == 0
    with script("read", f"{folder}/table", stdout=subprocess.PIPE) as reader:
        in_table = [tuple(row) for row in json.loads(reader.communicate(timeout=300)[0])]
    in_topic = [(r.key.decode(), int(r.value)) for r in read_ended(kafka.client_conf, counts)]
    assert sorted(in_table) == sorted(in_topic)
    assert len(set(in_table)) == len(in_table), "a count grows with each batch: none is there twice"
    final = {key: max(n for k, n in in_table if k == key) for key in set(sent)}
    assert final == Counter(sent)
    assert kills >= 2
