"""The local Kafka that tests share, and a reader that uses no code of this project.

conftest.py imports the fixtures before every test, so each function imports what it needs.
"""

import uuid

import pytest


@pytest.fixture(scope="session")
def kafka():
    """One node, shared by all tests of the session. A test uses its own topics and transactional
    ids, and restarts the node if it kills it. It keeps rows of any age: by default it looks for
    those of last week half a minute after its start, also in a transaction that is open.
    """
    from kafka2pc.local.broker import LocalKafka

    with LocalKafka(config={"log.retention.ms": -1}) as cluster:
        yield cluster


# A broker that few files need ends with its file. To start one node takes 3 s of a core, three take
# 11 s; left idle, one takes 3.5 % of a core and 200 MB, three 14 % and 600 MB, for minutes.


@pytest.fixture(scope="module")
def secure():
    """One node with logins and rights, shared by all tests of a file. Each gives alice rights to
    its own topics and ids.
    """
    from kafka2pc.local.broker import LocalKafka

    with LocalKafka(secure=True, progress=None) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def three_nodes():
    from kafka2pc.local.broker import LocalKafka

    with LocalKafka(nodes=3, progress=None) as cluster:
        yield cluster


@pytest.fixture
def three(three_nodes):
    """Three nodes, shared by all tests of a file. What a test has killed is started again."""
    yield three_nodes
    for node, pid in enumerate(three_nodes.pids):
        if pid is None:
            three_nodes.restart(node)


@pytest.fixture(scope="session")
def open_host():
    """A cluster that a user named, without a password, shared by all tests of the session. It has
    topics with the names that the notebooks use, and each test leaves it as it was.
    """
    from kafka2pc.local.broker import LocalKafka

    with LocalKafka() as cluster:
        yield owned(cluster)


def owned(cluster):
    """The cluster, with topics of its owner."""
    from confluent_kafka import Producer

    producer = Producer(cluster.client_conf)
    for name in ("orders", "copied", "mine", "flights", "shared", "numbers"):
        cluster.create_topic(name)
        producer.produce(name, f"of the owner, in {name}")
    producer.flush(30)
    return cluster


def state(kafka):
    """The topics of a cluster and what is in them, without Kafka's own; its groups; the
    transactions that are open.
    """
    from confluent_kafka.admin import AdminClient

    from kafka2pc.kafka.read.whole_topic import read_topic
    from kafka2pc.kafka.wire.cluster import Cluster
    from kafka2pc.kafka.wire.descriptions import list_transactions

    admin = AdminClient(kafka.client_conf)
    found = {
        name: [r.value for r in read_topic(kafka.client_conf, name)]
        for name in admin.list_topics(timeout=10).topics
        if not name.startswith("__")
    }
    with Cluster(kafka.client_conf) as opened:
        still = [
            t.transactional_id
            for t in list_transactions(opened, states=("Ongoing", "PrepareCommit", "PrepareAbort"))
        ]
    return found | {
        "groups": sorted(g.group_id for g in admin.list_consumer_groups().result().valid),
        "open": still,
    }


def records(kafka, topic, isolation="read_committed", *, still_open=False):
    """Every message of `topic` that a reader of this isolation level sees up to its end, partition
    by partition. Nothing is open there then, unless `still_open`.
    """
    from confluent_kafka import OFFSET_BEGINNING, Consumer, TopicPartition

    conf = {
        "group.id": "tests",
        "isolation.level": isolation,
        "enable.partition.eof": True,
        "enable.auto.commit": False,
        "log_level": 0,
        "fetch.wait.max.ms": 50,
    }
    reader = Consumer(kafka.client_conf | conf)
    try:
        partitions = reader.list_topics(topic, timeout=30).topics[topic].partitions
        return [
            message
            for number in sorted(partitions)
            for message in _to_the_end(
                reader, TopicPartition(topic, number, OFFSET_BEGINNING), still_open
            )
        ]
    finally:
        reader.close()


def _to_the_end(reader, start, still_open):
    from confluent_kafka import KafkaError

    reader.assign([start])
    last = lambda: reader.get_watermark_offsets(start, cached=True)[1]
    while True:
        message = reader.poll(30)
        assert message is not None, f"{start}: no answer in 30 s, or what is open before {last()}"
        if message.error() is None:
            yield message
        elif message.error().code() == KafkaError._PARTITION_EOF:
            if still_open or message.offset() == last():
                return
        elif not message.error().retriable():
            raise AssertionError(message.error())


def values(kafka, topic, isolation="read_committed", **how):
    """The values of `records`, as text."""
    return [message.value().decode() for message in records(kafka, topic, isolation, **how)]


def settled(cluster, transactional_id, state):
    """(broker's state, epochs passed) once the transaction is neither open nor in preparation."""
    from kafka2pc.kafka.wire.descriptions import describe_transactions
    from kafka2pc.proof.child_process import until

    def ended():
        found = describe_transactions(cluster, [transactional_id])[transactional_id]
        return found.state not in ("Ongoing", "PrepareCommit", "PrepareAbort") and found

    found = until(ended, f"{transactional_id} has ended", 20)
    return found.state, found.epoch - state.epoch


def back_at_work(kafka, within_s=150):
    """Wait until a broker that was paused has registered again. The controller takes it for dead
    until then, and finds no place for a topic.
    """
    from confluent_kafka import KafkaException

    from kafka2pc.local.nodes import BrokerFailed
    from kafka2pc.proof.child_process import until

    def takes_a_topic():
        try:
            kafka.create_topic(f"back-{uuid.uuid4().hex}")
        except (KafkaException, BrokerFailed):
            return False
        return True

    until(takes_a_topic, "a broker has a place for a new topic", within_s)
