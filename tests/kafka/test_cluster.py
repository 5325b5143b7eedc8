"""The control plane: the broker's answers to another process. A broker that is silent, one that
refuses and a missing right raise different errors, each within a limit of time.
"""

import pickle
import socket
import threading
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from types import SimpleNamespace as Broker
from unittest.mock import patch

import pyarrow as pa
import pytest
from confluent_kafka import Producer
from kafka.protocol.admin import CreateAclsRequest
from kafka.protocol.metadata import ApiVersionsRequest, FindCoordinatorRequest
from kafka.protocol.producer.transaction import AddPartitionsToTxnRequest
from kafka_fixtures import back_at_work, settled, values
from one_task_query import abort_there

from kafka2pc.kafka.client import close_cluster, shared_cluster
from kafka2pc.kafka.cluster_check import check
from kafka2pc.kafka.participant import KafkaParticipant
from kafka2pc.kafka.read.fetcher import Wanted, fetch
from kafka2pc.kafka.read.settings import FetchSettings
from kafka2pc.kafka.wire import connection
from kafka2pc.kafka.wire.cluster import Cluster
from kafka2pc.kafka.wire.connection import Connection, NotSent, NotYet
from kafka2pc.kafka.wire.descriptions import describe_transactions, list_transactions
from kafka2pc.kafka.wire.timeouts import (
    check_timeout,
    choose_timeout_ms,
    max_timeout_ms,
    why_no_two_phase,
)
from kafka2pc.kafka.wire.topics import (
    TopicInfo,
    describe_topics,
    find_leaders,
    topic_max_message_bytes,
    topic_settings,
)
from kafka2pc.kafka.wire.transactions import (
    TimeoutTooLarge,
    end_txn,
    end_txn_version,
    end_txns,
    init_producer_id,
)
from kafka2pc.local.broker import LocalKafka
from kafka2pc.operations.access import Access
from kafka2pc.operations.doctor.doctor import doctor
from kafka2pc.proof.child_process import until
from kafka2pc.protocol.driver import Driver
from kafka2pc.protocol.errors import (
    BadOption,
    BrokerUnreachable,
    NotAuthorized,
    Refused,
    UnclearAnswer,
)
from kafka2pc.protocol.log.slots import MemoryLog
from kafka2pc.protocol.messages import Committable, Plan, PreparedTxnState
from kafka2pc.protocol.names import new_token
from kafka2pc.protocol.participant import Outcome
from kafka2pc.protocol.phases.commit import commit
from kafka2pc.protocol.phases.precommit import precommit
from kafka2pc.protocol.phases.restore import restore
from kafka2pc.protocol.policies import retry_unknown
from kafka2pc.protocol.states import TxnState

DONE, REFUSED, UNKNOWN = Outcome.DONE, Outcome.REFUSED, Outcome.UNKNOWN
PASSWORD = "correct horse battery staple"


# -- no broker there --


@pytest.fixture
def silent_port():
    """A port that takes connections and never says a word."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def unreachable(conf, timeout_ms=1200):
    """The error of a Cluster that finds no broker, and the seconds that it took."""
    began = time.monotonic()
    with pytest.raises(BrokerUnreachable) as caught:
        Cluster(conf, timeout_ms=timeout_ms)
    assert str(timeout_ms) in caught.value.what and conf["bootstrap.servers"] in caught.value.what
    return caught.value, time.monotonic() - began


def test_a_silent_server_is_reported_in_time_and_the_password_is_not(silent_port):
    conf = {
        "bootstrap.servers": f"127.0.0.1:{silent_port}",
        "security.protocol": "SASL_PLAINTEXT",
        "sasl.mechanism": "PLAIN",
        "sasl.username": "alice",
        "sasl.password": PASSWORD,
    }
    error, seconds = unreachable(conf)
    assert seconds < 10 and PASSWORD not in str(error)


@pytest.fixture
def threads(monkeypatch):
    """kafka-python's threads that this thread has begun; another one may begin some as well."""
    begun, start, this = [], threading.Thread.start, threading.current_thread()

    def noted(thread):
        start(thread)
        if thread.name.startswith("kafka-io") and threading.current_thread() is this:
            begun.append(thread)

    monkeypatch.setattr(threading.Thread, "start", noted)
    return begun


def test_a_failed_start_leaves_no_thread(threads):
    unreachable({"bootstrap.servers": "127.0.0.1:1"}, timeout_ms=200)
    (thread,) = threads
    thread.join(10)
    assert not thread.is_alive()


@pytest.mark.parametrize("conf", [{"bootstrap.servers": "a:b:c"}, {"client.dns.lookup": "x"}])
def test_a_wrong_setting_begins_no_thread(conf, threads):
    with pytest.raises((BadOption, ValueError)):
        Connection({"bootstrap.servers": "127.0.0.1:1"} | conf)
    assert threads == []


# -- a plain broker --


@pytest.fixture(scope="module")
def cluster(kafka):
    kafka.create_topic("control", partitions=2, config={"max.message.bytes": 54321})
    with Cluster(kafka.client_conf) as made:
        yield made


def test_connections_are_closed_when_they_are_idle_and_opened_again(kafka):
    habits = {
        "connections.max.idle.ms": "300",
        "metadata.max.age.ms": "60000",
        "client.dns.lookup": "resolve_canonical_bootstrap_servers_only",
    }
    with Cluster(kafka.client_conf | habits, timeout_ms=8000) as idle:
        until(lambda: not idle.wire.manager._conns, "the connections are closed")
        assert idle.nodes()


# done; the coordinator loads, there is none, it has moved; the transaction before this one ends
BUSY = (0, 14, 15, 16, 51)


def begun(cluster, transactional_id, topic="control", **timeout):
    """An open transaction with one partition, begun without any client."""
    state = init_producer_id(cluster, transactional_id, **({"timeout_ms": 60_000} | timeout))
    who = FindCoordinatorRequest(key_type=1, coordinator_keys=[transactional_id], min_version=4)
    partitions = [AddPartitionsToTxnRequest.AddPartitionsToTxnTopic(name=topic, partitions=[0])]
    request = lambda: AddPartitionsToTxnRequest(
        v3_and_below_transactional_id=transactional_id,
        v3_and_below_producer_id=state.producer_id,
        v3_and_below_producer_epoch=state.epoch,
        v3_and_below_topics=partitions,
        max_version=3,
    )

    def added():
        at = cluster.ask(who).coordinators[0].node_id
        if at < 0:
            return False
        (of_topic,) = cluster.ask(request(), at).results_by_topic_v3_and_below
        code = of_topic.results_by_partition[0].partition_error_code
        assert code in BUSY
        return code == 0

    until(added, "the transaction has begun")
    return state


@pytest.mark.kafka
def test_the_broker_says_what_it_accepts(cluster):
    assert cluster.api_version(22) == (0, 6) and cluster.api_version(9999) is None
    assert end_txn_version(cluster) == 5 and len(cluster.cluster_id) == 22


@pytest.mark.kafka
def test_another_process_commits_and_may_ask_again(cluster):
    state = begun(cluster, "again")
    assert end_txn(cluster, "again", state, commit=True) is DONE
    # in PrepareCommit already
    assert describe_transactions(cluster, ["again"])["again"].epoch == state.epoch + 1
    # UNKNOWN (51) while the coordinator writes the markers
    assert end_txn(cluster, "again", state, commit=True) in (DONE, UNKNOWN)
    assert settled(cluster, "again", state) == ("CompleteCommit", 1)
    assert end_txn(cluster, "again", state, commit=True) is DONE
    assert end_txn(cluster, "again", state, commit=False) is REFUSED
    assert settled(cluster, "again", state) == ("CompleteCommit", 1)


@pytest.mark.kafka
def test_another_process_aborts_and_may_ask_again(cluster):
    state = begun(cluster, "gone")
    assert end_txn(cluster, "gone", state, commit=False) is DONE
    assert settled(cluster, "gone", state) == ("CompleteAbort", 1)
    assert end_txn(cluster, "gone", state, commit=False) is DONE
    assert end_txn(cluster, "gone", state, commit=True) is REFUSED


@pytest.mark.kafka
def test_version_4_leaves_the_epoch(cluster):
    state = begun(cluster, "four")
    assert end_txn(cluster, "four", state, commit=True, version=4) is DONE
    assert settled(cluster, "four", state) == ("CompleteCommit", 0)


@pytest.mark.kafka
def test_a_timed_out_transaction_is_refused(cluster):
    state = begun(cluster, "late", timeout_ms=1000)
    assert settled(cluster, "late", state) == ("CompleteAbort", 1)
    assert end_txn(cluster, "late", state, commit=True) is REFUSED


@pytest.mark.kafka
def test_a_fresh_epoch_fences(cluster):
    state = begun(cluster, "fenced")
    fresh = init_producer_id(cluster, "fenced", timeout_ms=60_000)
    assert fresh.producer_id == state.producer_id and fresh.epoch > state.epoch
    assert end_txn(cluster, "fenced", state, commit=True) is REFUSED


@pytest.mark.kafka
def test_an_id_without_a_transaction(cluster):
    assert end_txn(cluster, "never", PreparedTxnState(4711, 0), commit=True) is REFUSED
    assert describe_transactions(cluster, ["never"]) == {}


@pytest.mark.kafka
def test_an_initialised_id_has_nothing_to_commit(cluster):
    state = init_producer_id(cluster, "empty", timeout_ms=60_000)
    assert describe_transactions(cluster, ["empty"])["empty"].state == "Empty"
    assert end_txn(cluster, "empty", state, commit=True) is REFUSED


@pytest.mark.kafka
def test_describe_says_all_of_it(cluster):
    before = time.time() * 1000
    state = begun(cluster, "told", timeout_ms=12_345)
    d = describe_transactions(cluster, iter(["told", "told", "unknown"]))["told"]
    assert (d.state, d.producer_id, d.epoch, d.timeout_ms, d.partitions) == (
        "Ongoing",
        state.producer_id,
        state.epoch,
        12_345,
        (("control", 0),),
    )
    assert before - 1000 < d.started_ms < before + 60_000
    end_txn(cluster, "told", state, commit=False)


@pytest.mark.never_unsteady
@pytest.mark.kafka
def test_list_takes_the_prefix_literally(cluster):
    for i in (".*+(x-1", ".*+(x-2", "ab+(x-3"):
        init_producer_id(cluster, i, timeout_ms=60_000)
    assert [t.transactional_id for t in list_transactions(cluster, ".*+(x", states=())] == [
        ".*+(x-1",
        ".*+(x-2",
    ]
    found = lambda *prefix: list_transactions(cluster, *prefix, states=(), part="+(x-")
    assert [t.transactional_id for t in found()] == [".*+(x-1", ".*+(x-2", "ab+(x-3"]
    assert [t.transactional_id for t in found("ab")] == ["ab+(x-3"]
    assert found("ab+(x") == found("b") == [], "the part comes behind the prefix"
    assert list_transactions(cluster, ".*+(x") == []  # none is Ongoing
    assert {t.state for t in list_transactions(cluster, ".*+(x", states=["Empty"])} == {"Empty"}


@pytest.mark.never_unsteady
@pytest.mark.kafka
def test_fifty_threads_end_fifty_transactions(cluster):
    ids = [f"many-{n}" for n in range(50)]
    states = [begun(cluster, i) for i in ids]
    with ThreadPoolExecutor(50) as pool:
        outcomes = list(pool.map(lambda i, s: end_txn(cluster, i, s, commit=True), ids, states))
    assert outcomes == [DONE] * 50
    for i, s in zip(ids, states):
        assert settled(cluster, i, s) == ("CompleteCommit", 1)
    assert list_transactions(cluster, "many-") == []


class Listed:
    """A cluster with nodes 0 and 1, which list one transaction each, and these Metadata rows of the
    coordinators' topic.
    """

    def __init__(self, *rows, cluster_id="listed", nodes=(0, 1)):
        self.rows = rows
        self.brokers = [Broker(node_id=n) for n in nodes]
        self.cluster_id = cluster_id

    def highest(self, request):
        return 1

    def ask_metadata(self, request):
        assert [t.name for t in request.topics] == ["__transaction_state"]
        return Broker(brokers=self.brokers, topics=self.rows)

    def ask_all(self, requests):
        rows = {
            n: Broker(transactional_id=f"t{n}", producer_id=n, transaction_state="Ongoing")
            for _, n in requests
        }
        return [Broker(error_code=0, transaction_states=[row]) for row in rows.values()]

    def check(self, code, name):
        assert code == 0

    def persist(self, call):
        return call()


def states(*leaders, error_code=0):
    parts = [Broker(partition_index=n, leader_id=node) for n, node in enumerate(leaders)]
    return Broker(error_code=error_code, partitions=parts)


@pytest.mark.parametrize("rows", [(states(0, 1, 0),), (states(error_code=3),), ()])
def test_all_brokers_list_what_they_keep(rows, caplog):
    caplog.set_level("INFO")
    listed = list_transactions(Listed(*rows))
    assert [t.transactional_id for t in listed] == ["t0", "t1"] and caplog.text == ""


def test_a_partition_that_no_broker_can_answer_for_makes_a_list_incomplete():
    for gone in (-1, 2):  # no leader; one that is no broker any more
        leaderless = Listed(states(0, gone, 1, gone))
        with pytest.raises(NotYet, match="__transaction_state: no leader for partition 1, 3"):
            list_transactions(leaderless)
        assert len(list_transactions(leaderless, partial=True)) == 2
    for partial_is_enough in (True, False):
        with pytest.raises(NotYet, match="no broker"):
            list_transactions(Listed(nodes=()), partial=partial_is_enough)


def test_a_user_who_may_not_see_the_coordinators_reads_once_what_is_not_found(caplog):
    caplog.set_level("INFO")
    hidden = Listed(states(error_code=29), cluster_id=uuid.uuid4().hex)
    assert [len(list_transactions(hidden)) for _ in range(2)] == [2, 2]
    assert caplog.text.count("may not DESCRIBE the topic __transaction_state") == 1


LONG = {"timeout_ms": 600_000}  # longer than a busy machine and a paused broker need


def begun_all(cluster, ids):
    """A Committable of an open transaction for each id."""
    return [
        Committable(participant="kafka", transactional_id=i, state=begun(cluster, i, **LONG))
        for i in ids
    ]


def all_settled(cluster, cs):
    return {settled(cluster, c.transactional_id, c.state) for c in cs}


@pytest.mark.kafka
def test_hundreds_are_ended_by_one_call_each_with_its_own_outcome(cluster):
    cs = begun_all(cluster, [f"each-{n}" for n in range(250)])
    begun(cluster, "each-7")  # fences
    unused = replace(cs[0], transactional_id="each-unused")
    outcomes = end_txns(cluster, [unused, *cs], commit=True)
    assert outcomes == [REFUSED, *[DONE] * 7, REFUSED, *[DONE] * 242]
    assert all_settled(cluster, cs[:7] + cs[8:]) == {("CompleteCommit", 1)}


@pytest.mark.kafka
def test_kip_939_without_keep(cluster):
    init_producer_id(cluster, "two-phase", timeout_ms=60_000, enable_2pc=True)
    assert describe_transactions(cluster, ["two-phase"])["two-phase"].timeout_ms == 2**31 - 1
    with pytest.raises(BadOption, match="35 UNSUPPORTED_VERSION"):
        init_producer_id(cluster, "two-phase", timeout_ms=60_000, keep_prepared=True)


@pytest.mark.kafka
def test_timeouts(cluster):
    assert max_timeout_ms(cluster) == choose_timeout_ms(cluster, "probe") == 900_000
    check_timeout(cluster, "probe", 900_000)
    with pytest.raises(TimeoutTooLarge, match="900001: the broker allows at most 900000") as caught:
        check_timeout(cluster, "probe", 900_001)
    assert isinstance(pickle.loads(pickle.dumps(caught.value)), TimeoutTooLarge)


@pytest.mark.kafka
def test_topics(cluster):
    assert (
        describe_topics(cluster, ["control", "absent", "no good name!"])
        == {"control": TopicInfo(2, True)}
        and describe_topics(cluster, []) == {}
    )
    assert (
        topic_max_message_bytes(cluster, "control") == 54321
        and topic_max_message_bytes(cluster, "absent") is None
    )
    assert topic_settings(cluster, "control", ["max.message.bytes", "cleanup.policy"]) == {
        "max.message.bytes": "54321",
        "cleanup.policy": "delete",
    }
    assert (
        topic_settings(cluster, "absent", ["cleanup.policy"]) == {}
        and uuid.UUID(describe_topics(cluster, ["control"])["control"].topic_id).int
    )


@pytest.mark.kafka
def test_tls_against_a_plain_listener_says_so(kafka):
    error, seconds = unreachable(
        {"bootstrap.servers": kafka.bootstrap_servers, "security.protocol": "SSL"}
    )
    assert "SSL" in error.why and seconds < 10


@pytest.mark.kafka
def test_a_node_that_cannot_be_reached_is_named_with_the_reason(kafka):
    """As an executor that cannot reach what the brokers advertise."""
    with Connection(kafka.client_conf, timeout_ms=4_000) as connection:
        node = connection.nodes()[0]
        manager = connection.wire.manager
        elsewhere = Broker(node_id=node, host="localhost", port=1, rack=None)
        manager.run(partial(manager.call_soon, manager.close, node))
        with patch.object(manager.cluster, "broker_metadata", lambda _: elsewhere):
            # after the first failure there is a pause
            for _ in range(3):
                with pytest.raises(NotSent, match="ApiVersionsRequest: localhost:1: .*REFUSED"):
                    connection.ask(ApiVersionsRequest(min_version=0), node)


# -- a broker that is silent, then dead --


@pytest.mark.kafka
def test_an_unknown_node_is_looked_for(cluster):
    with (
        patch.object(cluster.wire.manager.cluster, "request_update") as renewed,
        pytest.raises(NotSent),
    ):
        cluster.ask(FindCoordinatorRequest(coordinator_keys=["x"], key_type=1), 4711)
    assert renewed.called


@pytest.fixture
def impatient(cluster, kafka):
    """A Cluster that waits two seconds, once it is connected."""
    with Cluster(kafka.client_conf) as made:
        made.timeout_ms = 2000
        yield made


def begun_for(impatient, cluster, transactional_id):
    """A transaction that `cluster` has begun; `impatient` knows its coordinator."""
    state = begun(cluster, transactional_id, **LONG)
    cluster.persist(lambda: impatient.coordinators([transactional_id]))
    return state


@pytest.mark.kafka
def test_silence_is_unknown_and_the_same_question_again_gives_the_end(cluster, impatient, kafka):
    state = begun_for(impatient, cluster, "silent")
    tries, connect = [], connection._connect

    async def noted(wire, request, *where):
        if wire is impatient.wire:
            tries.append(request.name)
        return await connect(wire, request, *where)

    kafka.pause()
    try:
        with patch.object(connection, "_connect", noted):
            assert end_txn(impatient, "silent", state, commit=True) is UNKNOWN
        assert tries == ["EndTxnRequest"]
        with pytest.raises(BrokerUnreachable, match="no usable answer within 2000 ms"):
            describe_transactions(impatient, ["silent"])
    finally:
        kafka.resume()
        back_at_work(kafka)
    assert settled_by_asking(cluster, "silent", state) == ("CompleteCommit", 1)


@pytest.mark.kafka
@pytest.mark.parametrize("answers", [0, 100])
def test_silence_after_some_answers_is_unknown_for_the_others(kafka, answers):
    left, finish = [answers], connection._finish

    async def pause_after(*args):
        answer = await finish(*args)
        left[0] -= 1
        if left[0] == 0:
            kafka.pause()
        return answer

    # a request waits three seconds: the first answers arrive in time, and the silence is short
    with Cluster(kafka.client_conf, timeout_ms=12_000) as cluster:
        cs = begun_all(cluster, [f"silence-{answers}-{n}" for n in range(400)])
        if not answers:
            kafka.pause()
        try:
            began = time.monotonic()
            with patch.object(connection, "_finish", pause_after):
                outcomes = end_txns(cluster, cs, commit=True)
            assert time.monotonic() - began < 30, "one waits after the other"
        finally:
            kafka.resume()
            back_at_work(kafka)
        assert set(outcomes[:answers]) <= {DONE} and UNKNOWN in outcomes
        assert set(outcomes[answers:]) <= {DONE, UNKNOWN}
        until(lambda: set(end_txns(cluster, cs, commit=True)) == {DONE}, "all are ended")
        assert all_settled(cluster, cs) == {("CompleteCommit", 1)}


@pytest.mark.kafka
def test_init_producer_id_is_sent_once_when_the_answer_is_unclear(cluster, impatient, kafka):
    first = init_producer_id(cluster, "once", timeout_ms=60_000)
    cluster.persist(lambda: impatient.coordinators(["once"]))
    kafka.pause()
    try:
        with pytest.raises(UnclearAnswer, match="once: InitProducerIdRequest"):
            init_producer_id(impatient, "once", timeout_ms=60_000)
    finally:
        kafka.resume()
        back_at_work(kafka)
    # this one, and perhaps the unclear one
    assert init_producer_id(cluster, "once", timeout_ms=60_000).epoch - first.epoch in (1, 2)


@pytest.mark.never_unsteady
@pytest.mark.kafka
def test_a_killed_broker_is_unknown_until_it_is_back(cluster, impatient, kafka):
    state = begun_for(impatient, cluster, "killed")
    kafka.kill()
    try:
        assert end_txn(impatient, "killed", state, commit=True) is UNKNOWN
        with pytest.raises(NotSent):
            impatient.ask(
                FindCoordinatorRequest(key_type=1, coordinator_keys=["killed"], min_version=4)
            )
        with pytest.raises(BrokerUnreachable):
            list_transactions(impatient, "killed")
        with pytest.raises(BrokerUnreachable):
            init_producer_id(impatient, "killed", timeout_ms=60_000)
    finally:
        kafka.restart()
    assert settled_by_asking(cluster, "killed", state) == ("CompleteCommit", 1)


def settled_by_asking(cluster, transactional_id, state):
    """Ask to commit until the answer is clear."""
    outcomes = []

    def is_clear():
        outcomes.append(end_txn(cluster, transactional_id, state, commit=True))
        return outcomes[-1] is not UNKNOWN

    until(is_clear, "a clear answer", 120)
    assert outcomes[-1] is DONE
    return settled(cluster, transactional_id, state)


# -- other clusters --


@pytest.mark.kafka
@pytest.mark.parametrize(
    ("config", "error", "says", "why", "finding"),
    [
        (
            {"unstable.api.versions.enable": False},
            BadOption,
            "KIP-939",
            "no InitProducerId version 6",
            "two-phase-no-version",
        ),
        (
            {"transaction.two.phase.commit.enable": False},
            NotAuthorized,
            "TWO_PHASE_COMMIT",
            "transaction.two.phase.commit.enable is false",
            "two-phase-off",
        ),
    ],
    ids=["no version 6", "switched off"],
)
def test_a_broker_without_two_phase_commit(config, error, says, why, finding):
    with (
        LocalKafka(config=config, progress=None) as kafka,
        Cluster(kafka.client_conf) as cluster,
    ):
        with pytest.raises(error, match=says):
            init_producer_id(cluster, "x", timeout_ms=60_000, enable_2pc=True)
        assert init_producer_id(cluster, "x", timeout_ms=60_000).epoch >= 0
        told = why_no_two_phase(cluster, "kafka2pc-probe")
        assert why in told
        findings = doctor(Access(kafka.bootstrap_servers)).findings
        assert [f.why for f in findings if f.name == finding] == [told]
        with pytest.raises(BadOption, match="twoPhaseCommit=required"):
            check(kafka.client_conf, two_phase="required")
        assert check(kafka.client_conf, two_phase="auto").two_phase is False


# -- rights --

READ, WRITE, DESCRIBE, TWO_PHASE_COMMIT = 3, 4, 8, 15
TOPIC, TRANSACTIONAL_ID, LITERAL, PREFIXED = 2, 5, 3, 4


@pytest.fixture(scope="module")
def secure():
    """Its longest timeout is none that a client tries."""
    config = {"transaction.max.timeout.ms": 120_000}
    with LocalKafka(secure=True, progress=None, config=config) as running:
        for topic in ("hidden", "seen", "own"):
            running.create_topic(topic)
        yield running


@pytest.fixture(scope="module")
def grant(secure):
    """Give alice a right, and wait until it is in force."""
    with Cluster(secure.client_conf) as admin:

        def allow(kind, name, pattern, operation):
            acl = CreateAclsRequest.AclCreation(
                resource_type=kind,
                resource_name=name,
                resource_pattern_type=pattern,
                principal="User:alice",
                host="*",
                operation=operation,
                permission_type=3,
            )
            assert (
                admin.ask(CreateAclsRequest(creations=[acl], max_version=3)).results[0].error_code
                == 0
            )

        yield allow


@pytest.fixture(scope="module")
def alice(secure):
    with Cluster(secure.client_conf_for("alice")) as made:
        yield made


def soon(attempt, want, seconds=60):
    """Wait for this result of `attempt`: a new ACL takes a moment to reach the broker."""
    until(lambda: attempt() == want, f"the answer is {want}", seconds)


def allowed(attempt):
    try:
        attempt()
    except NotAuthorized:
        return False
    return True


@pytest.mark.kafka
def test_a_login_at_a_listener_without_logins_is_refused_at_once(kafka, secure):
    conf = secure.client_conf_for("alice") | {"bootstrap.servers": kafka.bootstrap_servers}
    with pytest.raises(NotAuthorized, match="user alice at .*ILLEGAL_SASL_STATE"):
        Cluster(conf, timeout_ms=20_000)


@pytest.mark.kafka
def test_without_write_the_error_names_the_id_and_the_right(alice):
    for attempt in (
        lambda: init_producer_id(alice, "other-1", timeout_ms=60_000),
        lambda: choose_timeout_ms(alice, "other-1"),
        lambda: check_timeout(alice, "other-1", 60_000),
        lambda: describe_transactions(alice, ["other-1"]),
        lambda: end_txn(alice, "other-1", PreparedTxnState(1, 0), commit=True),
    ):
        with pytest.raises(
            NotAuthorized,
            match=(
                "other-1: 53 TRANSACTIONAL_ID_AUTHORIZATION_FAILED(.|\n)*Grant WRITE on the"
                " resource TransactionalId, PREFIXED"
            ),
        ):
            attempt()


@pytest.mark.never_unsteady
@pytest.mark.kafka
def test_write_on_the_prefix_is_enough_and_two_phase_needs_more(alice, grant):
    grant(TRANSACTIONAL_ID, "own-", PREFIXED, WRITE)
    soon(lambda: allowed(lambda: init_producer_id(alice, "own-1", timeout_ms=60_000)), True)
    # what she may not DESCRIBE she does not see
    assert [t.transactional_id for t in list_transactions(alice, "", states=())] == ["own-1"]
    two_phase = lambda: init_producer_id(alice, "own-1", timeout_ms=60_000, enable_2pc=True)
    with pytest.raises(
        NotAuthorized,
        match="also needs TWO_PHASE_COMMIT there, and transaction.two.phase.commit.enable=true",
    ):
        two_phase()
    assert "TWO_PHASE_COMMIT is not granted" in why_no_two_phase(alice, "own-probe")
    grant(TRANSACTIONAL_ID, "own-", PREFIXED, TWO_PHASE_COMMIT)
    soon(lambda: allowed(two_phase), True)


@pytest.mark.kafka
def test_where_asking_is_forbidden_the_timeout_is_found_by_trying(alice, grant, secure):
    grant(TRANSACTIONAL_ID, "own-", PREFIXED, WRITE)
    soon(lambda: allowed(lambda: init_producer_id(alice, "own-2", timeout_ms=60_000)), True)
    assert max_timeout_ms(alice) is None and choose_timeout_ms(alice, "own-probe") == 60_000
    with pytest.raises(TimeoutTooLarge, match="the broker allows at most 60000"):
        check_timeout(alice, "own-probe", 120_001)
    with Cluster(secure.client_conf) as admin:
        assert choose_timeout_ms(admin, "probe") == 120_000


@pytest.mark.kafka
def test_topics_tell_what_alice_may_do(alice, grant):
    grant(TOPIC, "seen", LITERAL, DESCRIBE)
    grant(TOPIC, "own", LITERAL, WRITE)
    soon(
        lambda: describe_topics(alice, ["hidden", "seen", "own"]),
        {"hidden": TopicInfo(0, False), "seen": TopicInfo(1, False), "own": TopicInfo(1, True)},
    )
    assert topic_max_message_bytes(alice, "own") is None


@pytest.mark.kafka
def test_a_range_is_fetched_with_login_and_encryption_and_the_missing_right_is_named(
    alice, grant, secure
):
    producer = Producer(secure.client_conf)
    producer.produce("own", b"read me", partition=0)
    producer.flush(30)

    def read(cluster):
        return [
            v
            for _, c in fetch(cluster, [Wanted("own", 0, 0, 1)], FetchSettings(patience_ms=5000))
            for v in c.values.to_pylist()
        ]

    with Cluster(secure.client_conf) as admin:
        assert read(admin) == [b"read me"]
    for rights in ((), (DESCRIBE,)):
        for right in rights:
            grant(TOPIC, "own", LITERAL, right)
            soon(lambda: allowed(lambda: find_leaders(alice, ["own"])), True)
        with pytest.raises(NotAuthorized, match="topic own: 29 (.|\n)*Grant READ and DESCRIBE"):
            read(alice)
    grant(TOPIC, "own", LITERAL, READ)
    soon(lambda: allowed(lambda: read(alice)), True)


@pytest.mark.kafka
def test_without_the_right_to_read_no_abort_is_proven_and_nothing_is_written_again(
    alice, grant, secure
):
    secure.create_topic("kept")
    grant(TOPIC, "kept", LITERAL, WRITE)
    grant(TRANSACTIONAL_ID, "own-", PREFIXED, WRITE)
    soon(lambda: describe_topics(alice, ["kept"]), {"kept": TopicInfo(1, True)})
    plan = Plan(query_id=str(uuid.uuid4()), batch_id=0, attempt=1, token=new_token(0, 1))
    store = KafkaParticipant(secure.client_conf_for("alice"), topic="kept", prefix="own")
    soon(lambda: allowed(lambda: store.begin(plan)), True)
    with store.begin(plan) as txn:
        txn.write(pa.record_batch({"value": ["a"]}))
        txn.flush()
        lost = txn.precommit()
    store.abort(lost)
    forgotten = replace(lost, transactional_id="own-forgotten")
    assert store.final([forgotten]) == {forgotten: None}
    with pytest.raises(NotAuthorized, match="topic kept: 29 (.|\n)*Grant READ"):
        store.write_again([lost], plan)
    assert store.in_doubt(plan.query_id) == []
    grant(TOPIC, "kept", LITERAL, READ)
    soon(lambda: store.final([forgotten]), {forgotten: TxnState.ABORTED})
    store.abort(store.write_again([lost], plan))
    store.close()


@pytest.fixture
def blind_query(alice, grant, secure):
    """A query of alice, who may write and not read."""
    topic = secure.create_topic("blind")
    grant(TOPIC, topic, LITERAL, WRITE)
    grant(TOPIC, topic, LITERAL, DESCRIBE)
    grant(TRANSACTIONAL_ID, "own-", PREFIXED, WRITE)
    seen = lambda: describe_topics(alice, [topic])[topic]
    until(lambda: (seen().may_write, seen().may_read) == (True, False), "the rights are there", 60)
    store = KafkaParticipant(secure.client_conf_for("alice"), topic=topic, prefix="own")
    driver = Driver(query_id=str(uuid.uuid4()), log=MemoryLog(), participants={"kafka": store})
    driver = driver.within(retry=retry_unknown)
    soon(lambda: allowed(lambda: init_producer_id(alice, "own-3", timeout_ms=60_000)), True)
    yield driver, store
    store.close()


@pytest.mark.kafka
@pytest.mark.never_unsteady
def test_without_the_right_to_read_a_batch_costs_one_request_more_and_an_abort_is_noticed(
    blind_query, secure, monkeypatch
):
    driver, store = blind_query
    asked, start = [], connection._start
    noted = lambda wire, request, *to: asked.append(request) or start(wire, request, *to)
    monkeypatch.setattr(connection, "_start", noted)

    def precommitted(batch_id):
        plan = restore(driver, batch_id)
        return precommit([store], plan, [pa.record_batch({"value": [str(batch_id)]})])

    def asked_by_commit(batch_id):
        message = precommitted(batch_id)
        asked.clear()
        commit(driver, [message], batch_id)
        return sorted(type(request).__name__ for request in asked)

    first, *others = [asked_by_commit(batch_id) for batch_id in range(3)]
    assert store.cluster.unreadable == {"blind"}
    # Metadata says it, so nothing is refused, and no leader is asked a second time
    assert first.count("ListOffsetsRequest") == 2 and first.count("_Ask") == 0
    # the number of each kind stays the same
    assert others == [first] * 2
    message = precommitted(3)
    conf = secure.client_conf
    login = {
        "security_protocol": conf["security.protocol"],
        "sasl_mechanism": conf["sasl.mechanism"],
        "sasl_plain_username": conf["sasl.username"],
        "sasl_plain_password": conf["sasl.password"],
    }
    abort_there(secure.bootstrap_servers, message.committables[0], **login)
    with pytest.raises(Refused, match="not open at .*blind-0"):
        commit(driver, [message], 3)
    asked_by_commit(3)
    assert values(secure, "blind") == list("0123")


@pytest.mark.kafka
def test_what_is_waited_for_is_logged_now_and_then(kafka, caplog, monkeypatch):
    monkeypatch.setattr(connection, "_SAY_EVERY_S", 0.2)
    with Cluster(kafka.client_conf, timeout_ms=1_000) as cluster:

        def ask():
            raise NotSent("broker 1 does not answer")

        with pytest.raises(BrokerUnreachable):
            cluster.persist(ask)
    [first, *_] = [r.getMessage() for r in caplog.records if "no usable answer" in r.getMessage()]
    assert "it is waited for 1 s in all. The last one: broker 1 does not answer" in first


@pytest.mark.kafka
def test_the_cluster_of_a_process_waits_as_long_as_a_producer_of_java(kafka):
    for conf, waits_ms in (({}, 120_000), ({"max.block.ms": "180000"}, 180_000)):
        conf = kafka.client_conf | conf
        try:
            assert shared_cluster(conf).timeout_ms == waits_ms
            assert shared_cluster(conf).request_ms == 5_000
        finally:
            close_cluster(conf)
