"""A query of one task without Spark, for what happens to its transactions behind its back."""

import uuid
from dataclasses import asdict

import pyarrow as pa
import pytest
from confluent_kafka import TopicPartition
from confluent_kafka.admin import AdminClient
from kafka import KafkaAdminClient
from kafka import TopicPartition as KafkaPartition
from kafka.admin import AbortTransactionSpec

from kafka2pc.kafka.cluster_check import check
from kafka2pc.kafka.participant import KafkaParticipant
from kafka2pc.kafka.read.whole_topic import read_ended
from kafka2pc.kafka.wire.cluster import Cluster
from kafka2pc.kafka.wire.topics import topic_rows
from kafka2pc.proof.both_levels import wait_until_ended
from kafka2pc.proof.child_process import until
from kafka2pc.protocol.driver import Driver
from kafka2pc.protocol.log.slots import MemoryLog
from kafka2pc.protocol.phases.commit import commit
from kafka2pc.protocol.phases.decide import decide
from kafka2pc.protocol.phases.precommit import precommit
from kafka2pc.protocol.phases.restore import restore
from kafka2pc.protocol.policies import retry_unknown

ROWS = list("abcdef")


def abort_there(servers, c, *partitions, **login):
    """What `kafka-transactions.sh abort` does: write a marker into some partitions of a
    transaction, unknown to its coordinator. `login`: of an administrator, by kafka-python's names.
    """
    admin = KafkaAdminClient(bootstrap_servers=servers, **login)
    for topic, number in partitions or {(p.topic, p.partition) for p in c.partitions}:
        where = KafkaPartition(topic, number)
        known = admin.describe_producers([where])[where].active_producers
        epochs = [p.coordinator_epoch for p in known if p.producer_id == c.state.producer_id]
        of_it = where, c.state.producer_id, c.state.epoch
        admin.abort_transaction(AbortTransactionSpec(*of_it, max(epochs, default=-1)))
    admin.close()


class Query:
    """A query of one task that writes `ROWS` to a new topic; each start of it is a new driver.
    `config`: of the topic; `gated`: with visibility=batch.
    """

    columns = {}  # beside the value

    def __init__(
        self, kafka, engine="columnar", by_column=False, partitions=1, gated=False, **config
    ):
        self.kafka = kafka
        self.engine = engine
        self.topic = f"gone-{uuid.uuid4().hex[:8]}"
        self.by_column = by_column
        self.id, self.log = str(uuid.uuid4()), MemoryLog()
        self.admin = AdminClient(kafka.client_conf)
        kafka.create_topic(self.topic, partitions=partitions, config=config)
        facts = asdict(check(kafka.client_conf, topics=[self.topic], prefix=self.topic))
        place = None if by_column else self.topic
        self.store = KafkaParticipant(
            kafka.client_conf, topic=place, engine=engine, prefix=self.topic, **facts
        )
        self.store.gated = (self.topic,) if gated else ()

    def start(self, **policy):
        driver = Driver(query_id=self.id, log=self.log, participants={"kafka": self.store})
        return driver.within(retry=retry_unknown, **policy)

    def task(self, plan, rows=ROWS):
        return precommit([self.store], plan, [self.batch(rows)])

    def batch(self, rows):
        columns = {"value": rows} | {name: of[: len(rows)] for name, of in self.columns.items()}
        if self.by_column:
            columns["topic"] = [self.topic] * len(rows)
        return pa.RecordBatch.from_pydict(columns)

    def precommitted(self):
        """A driver, and the message of its task."""
        driver = self.start()
        return driver, self.task(restore(driver, 0))

    def decided(self):
        """The driver has decided, and died."""
        driver, message = self.precommitted()
        return decide(driver, message.plan, [message])

    def run(self):
        """A start that replays the batch and commits it."""
        driver = self.start()
        plan = restore(driver, 0)
        commit(driver, [self.task(plan)], 0)
        return plan.mode

    def remove(self, before):
        for done in self.admin.delete_records([TopicPartition(self.topic, 0, before)]).values():
            done.result(30)

    def recreate(self):
        self.admin.delete_topics([self.topic])[self.topic].result(30)
        with Cluster(self.kafka.client_conf) as cluster:
            gone = lambda: not topic_rows(cluster, [self.topic])[0].partitions
            until(gone, "the topic is gone", 30)
        self.kafka.create_topic(self.topic)

    def settle(self):
        """All markers are written: a commit returns before they are."""
        wait_until_ended(self.store.cluster, self.topic)

    def seen(self):
        # from its first record, wherever that is
        return [r.value.decode() for r in read_ended(self.kafka.client_conf, self.topic)]


@pytest.fixture
def new_query(kafka):
    made = []

    def make(**options):
        made.append(Query(kafka, **options))
        return made[-1]

    yield make
    for query in made:  # no transaction stays open on the shared broker
        for c in query.store.in_doubt(query.id):
            query.store.abort(c)
        query.store.close()
