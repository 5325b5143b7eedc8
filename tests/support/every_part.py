"""Every part of a query that logs in: both engines, the driver, the source, the log in a topic."""

import uuid
from dataclasses import asdict

import pyarrow as pa
from kafka_fixtures import values

from kafka2pc.decision_logs.opening import open_log
from kafka2pc.kafka.cluster_check import check
from kafka2pc.kafka.participant import KafkaParticipant
from kafka2pc.operations.doctor.rights import RIGHTS
from kafka2pc.proof.child_process import until
from kafka2pc.proof.missing_rights import Rights, error_of
from kafka2pc.protocol.driver import Driver
from kafka2pc.protocol.log.slots import MemoryLog
from kafka2pc.protocol.phases.commit import commit
from kafka2pc.protocol.phases.precommit import precommit
from kafka2pc.protocol.phases.restore import restore
from kafka2pc.spark.source.cluster import Questions
from kafka2pc.spark.source.offsets import Range
from kafka2pc.spark.source.options import parse_source_options
from kafka2pc.spark.source.range_reader import read_ranges
from kafka2pc.spark.source.starting_offsets import take_snapshot

GROUP = "kafka2pc-source"


def give_rights(kafka, conf, topic, **config):
    """A new topic, and all rights of alice to it, in force."""
    kafka.create_topic(topic, config=config)
    Rights(kafka, topic, "kafka2pc").give(*RIGHTS)
    until(
        lambda: error_of(lambda: check(conf, topics=[topic])) is None, "her rights are in force", 60
    )


def write(conf, topic, engine):
    """Two rows, committed."""
    facts = asdict(check(conf, topics=[topic]))
    participant = KafkaParticipant(conf, topic=topic, engine=engine, **facts)
    driver = Driver(
        query_id=str(uuid.uuid4()), log=MemoryLog(), participants={"kafka": participant}
    )
    rows = [pa.record_batch({"value": ["a", "b"]})]
    commit(driver, [precommit([participant], restore(driver, 0), rows)], 0)
    participant.close()


def read(conf, topic):
    """How many rows the source reads; it commits its offset to a group."""
    options = parse_source_options(
        {f"kafka.{name}": value for name, value in conf.items()} | {"subscribe": topic}
    )
    part = (topic, 0)
    with Questions(dict(options.conf)) as ask:
        end = take_snapshot(ask, options).parts[part].end
        ask.commit_offsets(GROUP, {part: end})
        assert ask.group_offsets(GROUP, [part]) == {part: end}
    return sum(batch.num_rows for batch in read_ranges(options, [Range(topic, 0, 0, end)]))


def write_and_read(kafka, conf, topic, engine):
    """The sink's part by one engine, and the source's."""
    before = len(values(kafka, topic))
    write(conf, topic, engine)
    assert len(values(kafka, topic)) == read(conf, topic) == before + 2


def open_topic_log(kafka, conf, topic):
    """A log of decisions in a topic of its own."""
    give_rights(kafka, conf, topic, **{"cleanup.policy": "compact"})
    assert open_log(f"kafka:{topic}", str(uuid.uuid4()), conf.items()).batches() == []


def write_properties(file, conf):
    """The file of `kafka2pc --config` and of Kafka's own tools, without the servers."""
    lines = (f"{name}={value}\n" for name, value in conf.items() if name != "bootstrap.servers")
    file.write_text("".join(lines))
    return str(file)
