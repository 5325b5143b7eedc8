"""Brokers that are too old, and clusters in the middle of an upgrade: refused before anything is
written.
"""

import time
import uuid

import pyarrow as pa
import pytest
from confluent_kafka import IsolationLevel, TopicPartition
from confluent_kafka.admin import AdminClient, OffsetSpec
from kafka.protocol.admin import UpdateFeaturesRequest
from kafka_fixtures import settled, values
from one_task_query import ROWS, Query, abort_there

from kafka2pc.kafka.cluster_check import check
from kafka2pc.kafka.participant import KafkaParticipant
from kafka2pc.kafka.wire import transactions as requests
from kafka2pc.kafka.wire.cluster import Cluster
from kafka2pc.kafka.wire.connection import Connection, TooOld
from kafka2pc.kafka.wire.descriptions import describe_transactions, list_transactions
from kafka2pc.kafka.wire.transactions import end_txn, init_producer_id
from kafka2pc.kafka.write.column_producer import ColumnTransaction
from kafka2pc.local.broker import LocalKafka
from kafka2pc.proof.child_process import until
from kafka2pc.protocol.driver import Driver
from kafka2pc.protocol.errors import BadOption, Refused
from kafka2pc.protocol.log.slots import MemoryLog
from kafka2pc.protocol.participant import Outcome
from kafka2pc.protocol.phases.commit import commit
from kafka2pc.protocol.phases.precommit import precommit
from kafka2pc.protocol.phases.restore import restore

pytestmark = pytest.mark.never_unsteady

DONE = Outcome.DONE


@pytest.mark.kafka
@pytest.mark.parametrize("request_key", [66, 65], ids=["ListTransactions", "DescribeTransactions"])
def test_a_server_without_a_request_is_reported_in_four_parts(kafka, request_key):
    with Cluster(kafka.client_conf, timeout_ms=4000) as cluster:
        del cluster.wire.manager.broker_version_data.api_versions[request_key]
        with pytest.raises(
            TooOld,
            match=(
                "Transactions: node 0 does not offer(.|\n)*why: (.|\n)*No. Nothing was"
                " written(.|\n)*what to do: Use Apache Kafka 3.6"
            ),
        ):
            (
                list_transactions(cluster, "x")
                if request_key == 66
                else describe_transactions(cluster, ["x"])
            )


def last_stable_and_end(kafka, topic):
    """Where readers of both isolation levels stop in partition 0."""
    ask = AdminClient(kafka.client_conf).list_offsets
    found = [
        ask({TopicPartition(topic, 0): OffsetSpec.latest()}, isolation_level=level)
        for level in (IsolationLevel.READ_COMMITTED, IsolationLevel.READ_UNCOMMITTED)
    ]
    return tuple(next(iter(f.values())).result().offset for f in found)


@pytest.mark.kafka
@pytest.mark.nightly
def test_kafka_3_5_is_refused_because_a_late_write_hangs_there(monkeypatch):
    """A sweep aborts by EndTxn version 3, which leaves the epoch; the transaction's own task is
    alive and writes once more.
    """
    with (
        LocalKafka(version="3.5.2", two_phase_commit=False, progress=None) as kafka,
        Cluster(kafka.client_conf) as cluster,
    ):
        kafka.create_topic("t")
        before = list_transactions(cluster, states=())
        with pytest.raises(
            TooOld, match="node 0 does not offer AddPartitionsToTxn version 4(.|\n)*Kafka 3.6"
        ):
            check(kafka.client_conf, topics=["t"])
        with pytest.raises(TooOld, match="AddPartitionsToTxn version 4"):
            init_producer_id(cluster, "x", timeout_ms=60_000)
        assert list_transactions(cluster, states=()) == before, (
            "refused before anything was written"
        )
        check_that_queries_are_refused(kafka.client_conf, "node 0")
        assert list_transactions(cluster, states=()) == before and last_stable_and_end(
            kafka, "t"
        ) == (0, 0)
        check(kafka.client_conf, prefix=None, topics=["t"])  # at least once needs no transactions
        monkeypatch.setattr(requests, "VERIFIES", 3)
        task = ColumnTransaction(cluster, kafka.client_conf, "task", 60_000, topic="t").begin()
        task.write(pa.RecordBatch.from_pydict({"value": ["before the abort"]}))
        task.flush()
        assert end_txn(cluster, "task", task.state, commit=False, version=task.version) is DONE
        assert settled(cluster, "task", task.state) == ("CompleteAbort", 0)
        task.write(pa.RecordBatch.from_pydict({"value": ["after the abort"]}))
        task.flush()
        time.sleep(0.5)
        assert last_stable_and_end(kafka, "t") == (2, 3) and list_transactions(cluster) == [], (
            "readers wait, and nothing is open that could be ended"
        )


def query(conf, engine, topic="t"):
    """The driver of a query whose participant is not checked."""
    store = KafkaParticipant(conf, topic=topic, engine=engine)
    return Driver(query_id=str(uuid.uuid4()), log=MemoryLog(), participants={"kafka": store})


def check_that_queries_are_refused(conf, where):
    """With both engines, and before anything is claimed."""
    for engine in ("columnar", "rows"):
        driver = query(conf, engine)
        for _ in range(2):
            with pytest.raises(TooOld, match=f"{where} does not offer AddPartitionsToTxn"):
                restore(driver, 0)
        driver.participants["kafka"].close()
        assert driver.log.records == {}


@pytest.fixture(scope="module")
def upgrade():
    """A cluster in the middle of an upgrade: node 0 is old."""
    with LocalKafka(nodes=3, version=["3.9.1", "4.3.1", "4.3.1"], progress=None) as running:
        running.create_topic("t")
        yield running


def node(cluster, number):
    return {"bootstrap.servers": f"127.0.0.1:{cluster.ports[number][0]}"}


def timeout_given(cluster, transactional_id):
    """Of the id's transactions in ms, after it was asked for none; or the error."""
    try:
        init_producer_id(cluster, transactional_id, timeout_ms=60_000, enable_2pc=True)
    except BadOption as e:
        return e.what.partition(": ")[2]
    return describe_transactions(cluster, [transactional_id])[transactional_id].timeout_ms


@pytest.mark.kafka
@pytest.mark.nightly
def test_in_the_middle_of_an_upgrade_no_transaction_gets_a_timeout_that_was_not_wanted(upgrade):
    with Cluster(node(upgrade, 1)) as cluster:
        given = {timeout_given(cluster, f"wanted-{n}") for n in range(12)}
    assert given == {2**31 - 1, "not every broker offers InitProducerId version 6"}
    with Cluster(node(upgrade, 0)) as cluster:
        assert {timeout_given(cluster, f"wanted-{n}") for n in range(12)} == {
            "not every broker offers InitProducerId version 6"
        }


@pytest.mark.kafka
@pytest.mark.nightly
@pytest.mark.parametrize("connected_to", range(3))
def test_in_the_middle_of_an_upgrade_all_nodes_are_asked(upgrade, connected_to):
    conf = node(upgrade, connected_to)
    with pytest.raises(BadOption, match="twoPhaseCommit=required") as caught:
        check(conf, topics=["t"], two_phase="required")
    assert "InitProducerId version 6 (node 0)" in caught.value.why
    facts = check(conf, topics=["t"], two_phase="auto")
    assert (facts.two_phase, facts.end_txn_version) == (False, 4)


@pytest.mark.kafka
@pytest.mark.nightly
def test_one_old_node_is_enough_to_be_refused(upgrade, monkeypatch):
    monkeypatch.setattr(
        Connection, "highest_everywhere", lambda self, request: {0: 4, 1: 3, 2: 5, 3: -1}
    )
    with pytest.raises(TooOld, match="node 1, 3 does not offer AddPartitionsToTxn version 4"):
        check(node(upgrade, 0), topics=["t"])
    check_that_queries_are_refused(node(upgrade, 0), "node 1, 3")


@pytest.mark.kafka
@pytest.mark.nightly
@pytest.mark.parametrize("engine", ["columnar", "rows"])
def test_a_process_asks_all_brokers_once(upgrade, monkeypatch, engine):
    asked, ask = [], Connection.highest_everywhere
    monkeypatch.setattr(
        Connection, "highest_everywhere", lambda *what: asked.append(1) or ask(*what)
    )
    upgrade.create_topic(engine)
    driver = query(node(upgrade, 0), engine, topic=engine)
    store = driver.participants["kafka"]
    for batch_id in range(3):
        planned = restore(driver, batch_id)
        rows = [pa.RecordBatch.from_pydict({"value": [str(batch_id)]})]
        commit(driver, [precommit([store], planned, rows)], batch_id)
    store.close()
    assert asked == [1] and sorted(values(upgrade, engine)) == ["0", "1", "2"]


# -- a cluster that has not raised its transaction.version --


@pytest.fixture(scope="module", params=[2, 1, 0])
def at_version(request):
    """A cluster, and the level of its transaction.version. Below 2 a transaction keeps its epoch
    when its coordinator ends it.
    """
    with LocalKafka(two_phase_commit=False, progress=None) as running:
        set_version(running, request.param)
        yield running, request.param


def set_version(kafka, level):
    row = UpdateFeaturesRequest.FeatureUpdateKey(
        feature="transaction.version", max_version_level=level, upgrade_type=2, allow_downgrade=True
    )
    with Cluster(kafka.client_conf) as cluster:
        if cluster.feature_level("transaction.version") == level:
            return
        cluster.ask(UpdateFeaturesRequest(timeout_ms=10_000, feature_updates=[row]))

    def told():
        with Cluster(kafka.client_conf) as cluster:
            return cluster.feature_level("transaction.version") == level

    until(told, f"transaction.version is {level}", 30)


@pytest.fixture
def two_parts(at_version):
    """A query that has rows in two partitions, and by how much the end of a transaction of it
    raises the epoch.
    """
    kafka, level = at_version
    made = Query(kafka, partitions=2)
    made.columns = {"partition": [0, 1] * 3}
    yield made, int(level == 2)
    for c in made.store.in_doubt(made.id):
        made.store.abort(c)
    made.store.close()


def epoch_of(query, c):
    found = describe_transactions(query.store.cluster, [c.transactional_id])
    return found[c.transactional_id].epoch - c.state.epoch


@pytest.mark.kafka
@pytest.mark.nightly
def test_ended_in_a_partition_before_the_decision_is_refused_at_each_version(two_parts):
    """Kafka's tool leaves the epoch, and the coordinator's own end raises it at version 2."""
    query, raised = two_parts
    driver, message = query.precommitted()
    [c] = message.committables
    assert c.end_txn_version == (5 if raised else 4)
    abort_there(query.kafka.bootstrap_servers, c, (query.topic, 0))
    assert epoch_of(query, c) == 0
    [[gone]] = query.store.gone([c], open_there=True)
    assert (gone.ended, gone.partition) == (True, 0)
    with pytest.raises(Refused, match=f"not open at .*{query.topic}-0"):
        commit(driver, [message], 0)
    assert settled(query.store.cluster, c.transactional_id, c.state) == ("CompleteAbort", raised)
    query.run()
    assert sorted(query.seen()) == ROWS


@pytest.mark.kafka
@pytest.mark.nightly
@pytest.mark.parametrize("told", ["open", "committed"])
def test_ended_in_a_partition_after_the_decision_is_written_again_at_each_version(two_parts, told):
    query, raised = two_parts
    [c] = query.decided().committables
    abort_there(query.kafka.bootstrap_servers, c, (query.topic, 0))
    if told == "committed":
        assert query.store.commit(c) is DONE
    restore(query.start(), 1)
    assert settled(query.store.cluster, c.transactional_id, c.state) == ("CompleteCommit", raised)
    assert sorted(query.seen()) == ROWS
    restore(query.start(), 1)
    assert sorted(query.seen()) == ROWS
