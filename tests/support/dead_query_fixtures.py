"""A query that dies: pre-committed, decided or not, as a new run or an operator finds it."""

import json
import uuid
from dataclasses import asdict
from pathlib import Path

import pyarrow as pa
import pytest
from confluent_kafka import Producer
from kafka_fixtures import values

from kafka2pc.decision_logs.files import FileLog
from kafka2pc.kafka.cluster_check import check
from kafka2pc.kafka.participant import KafkaParticipant
from kafka2pc.kafka.wire.cluster import Cluster
from kafka2pc.kafka.wire.descriptions import list_transactions
from kafka2pc.kafka.wire.transactions import end_txn
from kafka2pc.operations.access import Access
from kafka2pc.operations.doctor.doctor import doctor
from kafka2pc.operations.query import open_query
from kafka2pc.operations.survey import Survey, find_transactions
from kafka2pc.proof.child_process import until
from kafka2pc.protocol.driver import Driver
from kafka2pc.protocol.phases.decide import decide
from kafka2pc.protocol.phases.precommit import precommit
from kafka2pc.protocol.phases.restore import restore


class DeadQuery:
    """A query with a checkpoint as Spark makes it. `write` pre-commits a batch of two tasks with
    two rows each; the test chooses what happens then. `conf`: the client settings, if not those of
    the broker; `gate`: its batches have one; `how`: options of the sink.
    """

    def __init__(self, kafka, folder, topic=None, conf=None, gate=False, **how):
        self.kafka = kafka
        self.topic = topic or f"operations-{uuid.uuid4().hex[:8]}"
        self.prefix = how.pop("prefix", None) or f"operations-{uuid.uuid4().hex[:8]}"
        self.how = how
        self.gated = (self.topic,) if gate else ()
        self.conf = conf or kafka.client_conf
        self.place = Path(folder) / "checkpoint"
        self.id = str(uuid.uuid4())
        self.opened = []
        QUERIES.append(self)
        if topic is None:
            kafka.create_topic(self.topic)
        for name in ("offsets", "commits"):
            (self.place / name).mkdir(parents=True)
        (self.place / "metadata").write_text(json.dumps({"id": self.id}))

    def run(self):
        """The driver of a new run, as the sink makes it."""
        facts = asdict(check(self.conf, topics=[self.topic], prefix=self.prefix, **self.how))
        facts |= dict(topic=self.topic, prefix=self.prefix, gated=self.gated)
        participant = KafkaParticipant(self.conf, **facts)
        self.opened.append(participant)
        return Driver(query_id=self.id, log=self.log, participants={"kafka": participant})

    @property
    def log(self):
        return FileLog(self.place / "kafka2pc")

    @property
    def query(self):
        return open_query(str(self.place))

    @property
    def access(self):
        return Access(self.kafka.bootstrap_servers)

    def write(self, driver, batch_id=0, mine=None):
        """The messages of both tasks of a batch. `mine`: the token of the driver's run."""
        (self.place / "offsets" / str(batch_id)).write_text("v1")
        return self.run_tasks(driver, restore(driver, batch_id, mine=mine))

    def run_tasks(self, driver, planned):
        """The messages of both tasks of a batch that is planned."""
        stores = list(driver.participants.values())
        tasks = [[f"{planned.batch_id}{v}" for v in task] for task in ("ab", "cd")]
        return [
            precommit(stores, planned, [pa.RecordBatch.from_pydict({"value": v})]) for v in tasks
        ]

    def leave(self, decided):
        """Write batch 0, decide it or not, and do no more."""
        driver = self.run()
        messages = self.write(driver)
        if decided:
            decide(driver, messages[0].plan, messages)
        return self

    def seen(self):
        """What a `read_committed` consumer sees once the brokers have written all ends."""
        until(
            lambda: not find_open(self.kafka, self.prefix, ("PrepareCommit", "PrepareAbort")),
            "the ends are written",
        )
        return sorted(values(self.kafka, self.topic))

    def doctor(self, **how):
        defaults = dict(checkpoint=str(self.place), older_ms=0, prefix=self.prefix)
        return doctor(self.access, **defaults | how)

    def open(self):
        """Its open transactions, oldest first."""
        with Survey(self.conf) as survey:
            return find_transactions(survey, (self.prefix,), self.query)

    def abort_all(self):
        """Abort what it has open, as the broker does after the timeout."""
        with Survey(self.conf) as survey:
            for t in find_transactions(survey, (self.prefix,)):
                end_txn(survey, *t.exact, commit=False)

    def close(self):
        """Leave nothing open on the shared broker."""
        if self.kafka.started and not self.kafka.down:
            self.abort_all()
        for participant in self.opened:
            participant.close()


QUERIES = []


@pytest.fixture(autouse=True)
def closing():
    """Ends what the queries of a test left open."""
    yield
    while QUERIES:
        QUERIES.pop().close()


@pytest.fixture
def dead(kafka, tmp_path):
    return DeadQuery(kafka, tmp_path)


ROWS = ["0a", "0b", "0c", "0d"]


def finding_of(diagnosis, name, *words):
    """The finding of this name. It is there once, has all its parts, and contains these words."""
    found = [f for f in diagnosis.findings if f.name == name]
    assert len(found) == 1, [(f.name, f.what) for f in diagnosis.findings]
    parts = (found[0].what, found[0].why, found[0].risk, found[0].action)
    assert all(parts)
    items = [f"{name}\n{text}" for name, text in found[0].items]
    text = "\n".join((*parts, *items, *found[0].commands))
    assert [word for word in words if word not in text] == []
    return found[0]


def names(diagnosis):
    return {f.name for f in diagnosis.findings}


def write(dead, text):
    """A record of another producer, without a transaction."""
    producer = Producer(dead.conf)
    producer.produce(dead.topic, text.encode())
    producer.flush()


def find_open(kafka, prefix, states=("Ongoing",)):
    with Cluster(kafka.client_conf) as cluster:
        return list_transactions(cluster, prefix, states)


def newest_file(dead):
    """The file of the newest record of its decision log."""
    files = (dead.place / "kafka2pc").glob("*.json")
    return max(files, key=lambda file: [int(n) for n in file.name.split(".")[:2]])
