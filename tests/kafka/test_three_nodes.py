"""What needs three nodes: a node that dies costs time only, for a writer, a reader and the control
plane; what doctor says of copies.

All tests share one cluster, which ends with this file: three idle nodes take a seventh of a core
and 600 MB.
"""

import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from itertools import count
from unittest.mock import patch

import pyarrow as pa
import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import (
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    NewTopic,
    ResourceType,
)
from dead_query_fixtures import finding_of, names
from gated_query import GatedQuery, rows_by_batch
from kafka.protocol.admin import (
    AlterPartitionReassignmentsRequest,
    DescribeProducersRequest,
    ElectLeadersRequest,
)
from kafka.protocol.metadata import MetadataRequest
from kafka_fixtures import settled
from kafka_tools import administered
from killed_driver import Watch
from one_task_query import Query, abort_there
from shell import typed

from kafka2pc.decision_logs.topic.log import TopicLog
from kafka2pc.kafka.open_there import open_in, producers_requests
from kafka2pc.kafka.read.fetcher import Wanted, fetch
from kafka2pc.kafka.read.settings import FetchSettings
from kafka2pc.kafka.read.whole_topic import read_ended, read_topic
from kafka2pc.kafka.wire.cluster import Cluster
from kafka2pc.kafka.wire.descriptions import list_transactions
from kafka2pc.kafka.wire.timeouts import max_timeout_ms
from kafka2pc.kafka.wire.topics import find_leaders, topic_rows, topics_request
from kafka2pc.kafka.wire.transactions import end_txn
from kafka2pc.kafka.write.column_producer import ColumnTransaction
from kafka2pc.operations.access import Access
from kafka2pc.operations.doctor import transaction_checks
from kafka2pc.operations.doctor.doctor import doctor
from kafka2pc.operations.survey import Survey, find_hanging
from kafka2pc.proof.child_process import until
from kafka2pc.protocol.errors import BrokerUnreachable, Refused
from kafka2pc.protocol.log.questions import commit_of
from kafka2pc.protocol.participant import Outcome
from kafka2pc.protocol.phases.commit import commit
from kafka2pc.protocol.phases.restore import restore

pytestmark = [pytest.mark.kafka, pytest.mark.full]
STATES = "__transaction_state"


@pytest.fixture
def cluster(three):
    with Cluster(three.client_conf, timeout_ms=20_000) as opened:
        yield opened


def begun(cluster, three, name, topic, rows=("a",)):
    """An open transaction that has written `rows`; its Committable."""
    with ColumnTransaction(cluster, three.client_conf, name, 60_000, topic=topic).begin() as txn:
        txn.write(pa.RecordBatch.from_pydict({"value": list(rows)}))
        txn.flush()
        return txn.precommit()


def committed(cluster, c):
    """Ask until it is clear that the transaction is committed. Returns its last state."""
    ask = lambda: end_txn(cluster, c.transactional_id, c.state, commit=True, version=5)
    until(lambda: ask() is Outcome.DONE, "the answer is clear", 120)
    return settled(cluster, c.transactional_id, c.state)[0]


def coordinator(cluster, transactional_id):
    """The node that keeps the state of this transactional id."""
    until(lambda: find_leaders(cluster, ["__transaction_state"]), "its topic exists")
    return cluster.persist(lambda: cluster.coordinators([transactional_id]))[transactional_id]


@pytest.mark.never_unsteady
def test_the_coordinator_dies_and_another_node_finishes(three, cluster):
    three.create_topic("control")
    open_ones = [begun(cluster, three, f"coordinated-{n}", "control") for n in range(8)]
    three.kill(coordinator(cluster, open_ones[0].transactional_id))
    assert [committed(cluster, c) for c in open_ones] == ["CompleteCommit"] * 8
    assert list_transactions(cluster, "coordinated-") == []
    assert len(list_transactions(cluster, "coordinated-", states=())) == 8
    assert max_timeout_ms(cluster) == 900_000


@pytest.mark.nightly
@pytest.mark.never_unsteady
@pytest.mark.parametrize("point", ["ok decide", "invoke end gate"])
def test_the_coordinator_of_a_gate_dies_and_a_leader_of_its_topic_with_it(three, cluster, point):
    """Between the decision and the end of the gate. The batch stays hidden until all of it is
    committed.
    """
    topic = three.create_topic(f"gated-{uuid.uuid4().hex[:8]}", partitions=3)
    query = GatedQuery(three, topic, topic)
    assert not query.start(Watch(tuple(point.split(" ", 1)), 1))
    gate = commit_of(query.log, 0).gates[0]
    victim = coordinator(cluster, gate.transactional_id)
    assert victim in find_leaders(cluster, [topic]).values()
    three.kill(victim)
    assert read_topic(three.client_conf, topic) == []
    assert query.start()
    found, values = rows_by_batch(three, topic)
    assert [len(rows) for rows in found.values()] == [len(set(values))] == [9]
    query.store.close()


@pytest.mark.never_unsteady
def test_a_leader_that_dies_costs_a_writer_time_only(three, cluster):
    three.create_topic("written", partitions=6)
    transaction = ColumnTransaction(cluster, three.client_conf, "w", 60_000, topic="written")
    with transaction.begin() as txn:
        for n, start in enumerate(range(0, 60_000, 5000)):
            if n == 4:
                three.kill(find_leaders(cluster, ["written"])["written", 0])
            rows = [str(row) for row in range(start, start + 5000)]
            txn.write(pa.RecordBatch.from_pydict({"value": rows}))
        txn.flush()
        c = txn.precommit()
    assert committed(cluster, c) == "CompleteCommit"
    found = read_ended(three.client_conf, "written")
    assert sorted(int(r.value) for r in found) == list(range(60_000))


@pytest.mark.never_unsteady
def test_a_leader_that_dies_costs_a_reader_time_only(three, cluster):
    three.create_topic("read")
    producer = Producer(three.client_conf | {"batch.size": 20_000})
    wanted = [str(n).encode() * 5 for n in range(20_000)]
    for value in wanted:
        producer.produce("read", value, partition=0)
    assert producer.flush(60) == 0
    found, killed = [], None
    ranges = [Wanted("read", 0, 0, 20_000)]
    for _, columns in fetch(cluster, ranges, FetchSettings(most_bytes=50_000)):
        found += columns.values.to_pylist()
        if killed is None and len(found) > 3000:
            killed = find_leaders(cluster, ["read"])["read", 0]
            three.kill(killed)
    assert killed is not None and found == wanted


def test_doctor_finds_nothing_until_copies_are_missing(three, tmp_path):
    three.create_topic("sound")
    access = Access(three.bootstrap_servers)
    sound = lambda: doctor(access, topics=["sound"]).findings
    until(lambda: sound() == (), "a node that came back has all copies", 60)
    assert "can be kept" in typed(access.command("doctor", "--topic", "sound"))[0]
    three.create_topic("lonely", replication=1)
    three.create_topic("careless", config={"min.insync.replicas": 1})
    three.create_topic("strict", config={"min.insync.replicas": 3})
    found = doctor(access, topics=["lonely", "careless"])
    finding_of(found, "one-copy", "lonely")
    log = doctor(access, topics=["sound"], decision_log="kafka:lonely")
    finding_of(log, "one-copy", "lonely")
    administered(three, tmp_path, *finding_of(found, "one-copy-is-enough", "careless").commands)
    assert names(doctor(access, topics=["careless", "strict"])) == set()
    three.kill(2)
    strict = lambda: doctor(access, topics=["strict"])
    until(lambda: "too-few-copies" in names(strict()), "the broker knows that one is down", 60)
    finding_of(strict(), "too-few-copies", "2 copies in sync; 3 are needed")


def test_a_decision_topic_that_may_have_one_copy_is_reported(three, caplog):
    compact = {"cleanup.policy": "compact"}
    three.create_topic("log-alone", replication=1, config=compact)
    three.create_topic("log-careless", config=compact | {"min.insync.replicas": 1})
    for topic in ("log-alone", "log-careless", "log-sound"):  # the last one is created by us
        TopicLog(three.client_conf, topic, "q")
    alone, careless = [r.getMessage() for r in caplog.records if "decision log" in r.getMessage()]
    assert "log-alone has one copy, and the cluster has 3 brokers" in alone
    assert "log-careless keeps a decision when one of its 3 copies has it" in careless
    assert "Set min.insync.replicas=2" in careless


# -- a partition without a leader --


@pytest.mark.never_unsteady
def test_a_list_without_a_coordinator_is_not_taken_for_complete(three, cluster):
    """One partition of the coordinators' topic has no leader, because its only node is down."""
    three.create_topic("kept")
    open_ones = {
        c.transactional_id: c
        for c in (begun(cluster, three, f"kept-{n}", "kept") for n in range(8))
    }
    with coordinators_on(three, cluster, [[node] for node in COORDINATORS]):
        cluster.forget(open_ones)
        at = {name: coordinator_of(name) for name in (*open_ones, "kept-probe")}
        victim = next(node for node in at.values() if node != at["kept-probe"])
        rest = [name for name in open_ones if at[name] != victim]
        assert 0 < len(rest) < 8
        three.kill(victim)
        until(lambda: -1 in find_leaders(cluster, [STATES]).values(), "no leader is left", 60)
        with pytest.raises(BrokerUnreachable, match=f"{STATES}: no leader for partition"):
            list_transactions(cluster.briefly(1500), "kept-")
        listed = list_transactions(cluster, "kept-", partial=True)
        assert [t.transactional_id for t in listed] == rest
        access = Access(three.bootstrap_servers)
        said, status = typed(access.command("transactions", "list", "--prefix", "kept"))
        assert status == 3 and rest[0] in said and "The list is incomplete" in said
        at_once = partial(find_hanging, idle_ms=0)
        with Survey(three.client_conf) as survey, pytest.raises(BrokerUnreachable):
            at_once(survey.briefly(1500), ["kept"])
        with patch.object(transaction_checks, "find_hanging", at_once):
            found = doctor(access, prefix="kept", topics=["kept"], older_ms=0)
        lines = finding_of(found, "list-incomplete", STATES, "partition").commands
        assert "--unavailable-partitions" in lines[0]
        assert not names(found) & {"hanging", "broker-unreachable"}
        three.restart(victim)
        listed = lambda: [t.transactional_id for t in list_transactions(cluster, "kept-")]
        until(lambda: listed() == [*open_ones], "all are listed", 60)
    for name, c in open_ones.items():
        ask = partial(end_txn, cluster, name, c.state, commit=False)
        until(lambda ask=ask: ask() is Outcome.DONE, "it is aborted", 60)


COORDINATORS = [0, 1, 2, 0]  # the node of each partition of their topic


def coordinator_of(transactional_id):
    """Its partition is chosen by Java's `String.hashCode`. (After a move a broker may still name
    the former node.)
    """
    code = 0
    for letter in transactional_id:
        code = (31 * code + ord(letter)) % 2**32
    return COORDINATORS[(2**32 - code if code >= 2**31 else code) % len(COORDINATORS)]


@contextmanager
def coordinators_on(kafka, cluster, replicas):
    """The partitions of the coordinators' topic are on these nodes, and at the end on all."""
    set_min_isr(kafka, "1")
    place_coordinators(cluster, replicas)
    yield
    place_coordinators(cluster, [[0, 1, 2]] * len(replicas))
    set_min_isr(kafka, "2")


def set_min_isr(kafka, value):
    entry = ConfigEntry("min.insync.replicas", value, incremental_operation=AlterConfigOpType.SET)
    resource = ConfigResource(ResourceType.TOPIC, STATES, incremental_configs=[entry])
    admin = AdminClient(kafka.client_conf)
    admin.incremental_alter_configs([resource])[resource].result()


def place_coordinators(cluster, replicas):
    topic = AlterPartitionReassignmentsRequest.ReassignableTopic
    partitions = [
        topic.ReassignablePartition(partition_index=p, replicas=nodes)
        for p, nodes in enumerate(replicas)
    ]
    request = AlterPartitionReassignmentsRequest(
        timeout_ms=20_000, topics=[topic(name=STATES, partitions=partitions)]
    )
    cluster.persist(lambda: cluster.ask(request))

    def moved():
        (row,) = topic_rows(cluster, [STATES])
        in_sync = {p.partition_index: sorted(p.isr_nodes) for p in row.partitions}
        assigned = {p.partition_index: sorted(p.replica_nodes) for p in row.partitions}
        return in_sync == assigned == dict(enumerate(replicas))

    until(moved, "the partitions are where they shall be", 60)


PARTITIONS = 100


@pytest.mark.nightly
@pytest.mark.never_unsteady
def test_a_partition_without_a_leader_holds_up_no_other(three, cluster):
    """All rows of 99 partitions arrive while the only node of the last one is down."""
    name = "leaderless"
    victim, *others = sorted({0, 1, 2}, key=lambda n: n == coordinator(cluster, name))
    place(three, "wide", [[others[p % 2]] for p in range(PARTITIONS - 1)] + [[victim]])
    txn = ColumnTransaction(cluster, three.client_conf, name, 60_000, topic="wide")
    with ThreadPoolExecutor(1) as beside, metadata_requests(cluster) as asked, txn.begin():
        three.kill(victim)
        asked.clear()
        writes = beside.submit(write_everywhere, txn, batches=20)
        until(lambda: acknowledged(txn) == 20 * 10 * (PARTITIONS - 1), "99 partitions have all", 60)
        until(lambda: len(asked) >= 12, "the client looks for the leader", 60)
        assert not writes.done() and three.pids[victim] is None
        assert asked[11] - asked[0] > 4, "it asks less and less often"
        three.restart(victim)
        writes.result(60)
        c = txn.precommit()
    assert committed(cluster, c) == "CompleteCommit"
    found = read_ended(three.client_conf, "wide")
    assert sorted(int(r.value) for r in found) == list(range(20 * 10 * PARTITIONS))
    assert all(int(r.value) % PARTITIONS == r.partition for r in found)


def place(kafka, topic, replicas):
    """Create a topic, each partition on the given nodes."""
    config = {"min.insync.replicas": "1"}
    new = NewTopic(topic, len(replicas), replica_assignment=replicas, config=config)
    admin = AdminClient(kafka.client_conf)
    admin.create_topics([new])[topic].result()
    with Cluster(kafka.client_conf) as cluster:
        wanted = {(topic, p): nodes[0] for p, nodes in enumerate(replicas)}
        until(lambda: find_leaders(cluster, [topic]) == wanted, "every partition has its leader")


@contextmanager
def metadata_requests(cluster):
    """The time of each Metadata request for a topic. (kafka-python asks for the nodes, too.)"""
    asked, original = [], cluster.wire.manager.send

    def send(request, *more, **named):
        if isinstance(request, MetadataRequest) and request.topics:
            asked.append(time.monotonic())
        return original(request, *more, **named)

    with patch.object(cluster.wire.manager, "send", send):
        yield asked


def write_everywhere(txn, batches):
    """Ten rows for each partition in each of `batches` Arrow batches; a row's value is its number,
    which says its partition, too.
    """
    numbers = count()
    for _ in range(batches):
        rows = [next(numbers) for _ in range(10 * PARTITIONS)]
        columns = {
            "value": [str(n) for n in rows],
            "partition": pa.array([n % PARTITIONS for n in rows], pa.int32()),
        }
        txn.write(pa.RecordBatch.from_pydict(columns))
    txn.flush()


def acknowledged(txn):
    return sum(p.records for p in txn.partitions)


# -- a leader that moves, and a transaction that is ended in its partition alone --


@pytest.fixture
def one_task(three):
    """A query of one task, whose topic has one partition, and a connection of an administrator."""
    made = Query(three)
    yield made
    for c in made.store.in_doubt(made.id):
        made.store.abort(c)
    made.store.close()


def leaders_by_node(cluster, topic):
    """Who leads the first partition, as each node has it."""
    asked = [topics_request(cluster, [topic])] * 3
    found = [cluster.ask(request, node) for node, request in enumerate(asked)]
    return [a.topics[0].partitions[0].leader_id for a in found]


def lead(cluster, topic, node):
    """Make this node the leader, as a rolling restart does, until every node knows it."""
    topics = AlterPartitionReassignmentsRequest.ReassignableTopic
    replicas = sorted(range(3), key=lambda n: (n - node) % 3)
    part = topics.ReassignablePartition(partition_index=0, replicas=replicas)
    asked = topics(name=topic, partitions=[part])
    request = AlterPartitionReassignmentsRequest(timeout_ms=20_000, topics=[asked])
    cluster.persist(lambda: cluster.ask(request))
    one = ElectLeadersRequest.TopicPartitions(topic=topic, partitions=[0])

    def moved():
        request = ElectLeadersRequest(election_type=0, topic_partitions=[one], timeout_ms=5_000)
        cluster.persist(lambda: cluster.ask(request))
        return leaders_by_node(cluster, topic) == [node] * 3

    until(moved, f"node {node} leads {topic}", 60)


def write_batch(query, batch_id):
    """A driver, and the message of a task."""
    driver = query.start()
    return driver, query.task(restore(driver, batch_id), [f"{batch_id}{x}" for x in "abc"])


@pytest.mark.never_unsteady
@pytest.mark.parametrize("moves", ["between two batches", "when it is asked"])
@pytest.mark.parametrize("ended", [False, True])
def test_a_former_leader_is_not_believed_about_what_is_open(
    cluster, one_task, moves, ended, monkeypatch
):
    """A follower answers DescribeProducers without an error. Here it says what was open there
    before another program ended it; what the leader of now says counts.
    """
    query, place = one_task, (one_task.topic, 0)
    commit(*one_message(query, 0), 0)
    former = query.store.cluster.leaders[place]
    move = partial(lead, cluster, query.topic, (former + 1) % 3)
    if moves == "between two batches":
        move()
    driver, message = write_batch(query, 1)
    [c] = message.committables
    # the question before the decision goes to the former leader
    query.store.cluster.leaders[place] = former
    old = producers_at(query, former)
    assert [p.producer_id for p in open_in(query.topic, old)] == [c.state.producer_id]
    if ended:
        abort_there(query.kafka.bootstrap_servers, c)
    first = OldAnswer(query.store.cluster, former, old, move)
    monkeypatch.setattr(query.store.cluster, "ask_each", first.ask_each)
    if ended:
        with pytest.raises(Refused, match=f"not open at .*{query.topic}-0"):
            commit(driver, [message], 1)
        driver, message = write_batch(query, 1)
    commit(driver, [message], 1)
    assert first.asked == [former] and query.store.cluster.leaders[place] == (former + 1) % 3
    written = [f"{n}{x}" for n in range(2) for x in "abc"]
    # the coordinator may have to look for the new leader before it can write its marker
    assert sorted(query.seen()) == written


@pytest.mark.never_unsteady
def test_a_new_leader_that_does_not_know_yet_where_it_ends_makes_no_count_short(three, cluster):
    """Its first fetches tell the high watermark of before, where nothing is open either."""
    topic = three.create_topic(f"led-{uuid.uuid4().hex[:8]}")
    for n in range(1, 9):
        c = begun(cluster, three, f"{topic}-{n}", topic)
        lead(cluster, topic, n % 3)
        assert end_txn(cluster, c.transactional_id, c.state, commit=True, version=5) is Outcome.DONE
        assert len(read_ended(three.client_conf, topic)) == n


def producers_at(query, node):
    """What this node says now of the producers of the partition."""
    with Cluster(query.kafka.client_conf) as other:
        other.nodes()
        [(request, _)] = producers_requests({(query.topic, 0): node})
        return other.ask(request, node).topics[0].partitions[0]


class OldAnswer:
    """Moves the leader before the first question of a connection is sent, and puts an `old` answer
    of this node into the place of its first one.
    """

    def __init__(self, connection, node, old, move):
        self.connection, self.node, self.old, self.move = connection, node, old, move
        self.asked, self._ask_each = [], Cluster.ask_each

    def ask_each(self, requests):
        if self.asked:
            return self._ask_each(self.connection, requests)
        self.move()
        found = self._ask_each(self.connection, requests)
        for (request, node), answer in zip(requests, found, strict=True):
            if request.API_KEY == DescribeProducersRequest.API_KEY:
                self.asked.append(node)
                # a follower gives no error
                assert answer.topics[0].partitions[0].error_code == 0
                answer.topics[0].partitions = [self.old]
        return found


def one_message(query, batch_id):
    driver, message = write_batch(query, batch_id)
    return driver, [message]


# -- the local cluster itself; the last one, because it ends all nodes --


@pytest.mark.never_unsteady
def test_one_node_may_die_and_come_back_in_sync_and_all_may_die_and_come_back(three):
    three.create_topic("power", partitions=3)
    three.kill(0)
    write_one(three, "without 0")
    three.restart(0)
    for action in (three.kill, three.restart):  # a power failure
        for node in range(3):
            action(node)
    assert [r.value for r in read_ended(three.client_conf, "power")] == [b"without 0"]


def write_one(three, value):
    conf = {"transactional.id": "power", "log_level": 0}
    producer = Producer(three.client_conf | conf)
    producer.init_transactions(60)
    producer.begin_transaction()
    producer.produce("power", value)
    producer.commit_transaction(60)
