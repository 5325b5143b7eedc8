"""A query that pre-commits, decides or not, and dies; for the lessons of an operator."""

import json
import re
import tempfile
from dataclasses import asdict
from pathlib import Path

import pyarrow as pa
from confluent_kafka import Producer

from kafka2pc.kafka.cluster_check import check
from kafka2pc.kafka.participant import KafkaParticipant
from kafka2pc.kafka.read.whole_topic import read_topic
from kafka2pc.operations.query import open_query
from kafka2pc.proof.both_levels import wait_until_ended
from kafka2pc.protocol.driver import Driver
from kafka2pc.protocol.phases.decide import decide
from kafka2pc.protocol.phases.precommit import precommit
from kafka2pc.protocol.phases.restore import restore


def leave(kafka, topic, number, decided):
    """Query `number` pre-commits batch 0 into a new topic, decides it or not, and is never started
    again. Returns its checkpoint.
    """
    kafka.create_topic(topic)
    place = Path(tempfile.mkdtemp()) / topic
    for folder in ("offsets", "commits"):
        (place / folder).mkdir(parents=True)
    (place / "metadata").write_text(json.dumps({"id": f"{number:08}-2222-3333-4444-555555555555"}))
    query = open_query(str(place))
    conf = kafka.client_conf
    participant = KafkaParticipant(conf, topic=topic, **asdict(check(conf, topics=[topic])))
    driver = Driver(query_id=query.query_id, log=query.log, participants={"kafka": participant})
    batch = restore(driver, 0)
    tasks = [["a", "b"], ["c", "d"]]
    messages = [
        precommit([participant], batch, [pa.RecordBatch.from_pydict({"value": v})]) for v in tasks
    ]
    if decided:
        decide(driver, batch, messages)
    participant.close()
    return str(place)


def write(kafka, topic, text):
    """A record of another producer, without a transaction."""
    producer = Producer(kafka.client_conf)
    producer.produce(topic, text.encode())
    producer.flush()


def read(survey, topic):
    """What a read_committed consumer sees once every end that was asked for is written."""
    wait_until_ended(survey)
    return sorted(
        r.value.decode() for r in read_topic({"bootstrap.servers": survey.servers}, topic)
    )


def calm(text):
    """The text without what changes at every run."""
    name = r"kafka2pc-[0-9a-f-]+-\d+\.\d+\.[0-9a-f]{8}-[0-9a-f]{16}-(\d)-\d"
    text = re.sub(name, r"kafka2pc-...-\1", str(text))
    return re.sub(r"127\.0\.0\.1:\d+", "broker:9092", re.sub(r"/\S*/(\w+)", r"/data/\1", text))
