"""The control plane: what the broker answers to strangers, and that silence, refusal and missing
rights are told apart and bounded in time.
"""

import pickle
import socket
import threading
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import patch

import pytest
from confluent_kafka import Producer
from kafka.protocol.admin import CreateAclsRequest
from kafka.protocol.metadata import FindCoordinatorRequest
from kafka.protocol.producer.transaction import AddPartitionsToTxnRequest
from kafka_fixtures import settled

from kafka2pc.kafka.cluster_check import check
from kafka2pc.kafka.read.fetcher import FetchSettings, fetch
from kafka2pc.kafka.wire.connection import NotSent
from kafka2pc.kafka.wire.control import Control
from kafka2pc.kafka.wire.topics import TopicInfo
from kafka2pc.kafka.wire.transactions import TimeoutTooLarge
from kafka2pc.local.broker import LocalKafka
from kafka2pc.operations.access import Access
from kafka2pc.operations.doctor.doctor import doctor
from kafka2pc.protocol.errors import BadOption, BrokerUnreachable, NotAuthorized, UnclearAnswer
from kafka2pc.protocol.messages import PreparedTxnState
from kafka2pc.protocol.participant import Outcome

DONE, REFUSED, UNKNOWN = Outcome.DONE, Outcome.REFUSED, Outcome.UNKNOWN
PASSWORD = "correct horse battery staple"


# -- nobody there --


@pytest.fixture
def silent_port():
    """A port that takes connections and never says a word."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def unreachable(conf, timeout_ms=1200):
    """The error of a Control that finds no broker, and the seconds that it took."""
    began = time.monotonic()
    with pytest.raises(BrokerUnreachable) as caught:
        Control(conf, timeout_ms=timeout_ms)
    assert str(timeout_ms) in caught.value.what and conf["bootstrap.servers"] in caught.value.what
    return caught.value, time.monotonic() - began


def test_a_closed_port_is_reported_in_time():
    error, seconds = unreachable({"bootstrap.servers": "127.0.0.1:1"})
    assert "ECONNREFUSED" in error.why and seconds < 2


def test_a_name_that_does_not_exist_is_reported_in_time():
    error, seconds = unreachable({"bootstrap.servers": "no-such-host.invalid:9092"})
    assert "DNS" in error.why and seconds < 10  # the name server has its own patience


def test_a_silent_server_is_reported_in_time_and_the_password_is_not(silent_port):
    conf = {
        "bootstrap.servers": f"127.0.0.1:{silent_port}",
        "security.protocol": "SASL_PLAINTEXT",
        "sasl.mechanism": "PLAIN",
        "sasl.username": "alice",
        "sasl.password": PASSWORD,
    }
    error, seconds = unreachable(conf)
    assert seconds < 2 and PASSWORD not in str(error)


def test_a_failed_start_leaves_no_thread():
    before = threading.active_count()
    unreachable({"bootstrap.servers": "127.0.0.1:1"}, timeout_ms=200)
    assert threading.active_count() == before


# -- a plain broker --


@pytest.fixture(scope="module")
def control(kafka):
    kafka.create_topic("control", partitions=2, config={"max.message.bytes": 54321})
    with Control(kafka.client_conf, timeout_ms=8000) as made:
        yield made


def begun(control, transactional_id, topic="control", **timeout):
    """An open transaction with one partition, begun without any client."""
    state = control.init_producer_id(transactional_id, **({"timeout_ms": 60_000} | timeout))
    at = (
        control.ask(
            FindCoordinatorRequest(key_type=1, coordinator_keys=[transactional_id], min_version=4)
        )
        .coordinators[0]
        .node_id
    )
    partitions = [AddPartitionsToTxnRequest.AddPartitionsToTxnTopic(name=topic, partitions=[0])]
    request = lambda: AddPartitionsToTxnRequest(
        v3_and_below_transactional_id=transactional_id,
        v3_and_below_producer_id=state.producer_id,
        v3_and_below_producer_epoch=state.epoch,
        v3_and_below_topics=partitions,
        max_version=3,
    )
    while (
        code := control.ask(request(), at)
        .results_by_topic_v3_and_below[0]
        .results_by_partition[0]
        .partition_error_code
    ) == 51:
        time.sleep(0.01)
    assert code == 0
    return state


@pytest.mark.kafka
def test_the_broker_says_what_it_accepts(control):
    assert control.api_version(22) == (0, 6) and control.api_version(9999) is None
    assert control.end_txn_version() == 5 and len(control.cluster_id) == 22


@pytest.mark.kafka
def test_a_stranger_commits_and_may_ask_again(control):
    state = begun(control, "again")
    assert control.end_txn("again", state, commit=True) is DONE
    # in PrepareCommit already
    assert control.describe_transactions(["again"])["again"].epoch == state.epoch + 1
    # UNKNOWN (51) while the partitions are being told
    assert control.end_txn("again", state, commit=True) in (DONE, UNKNOWN)
    assert settled(control, "again", state) == ("CompleteCommit", 1)
    assert control.end_txn("again", state, commit=True) is DONE
    assert control.end_txn("again", state, commit=False) is REFUSED
    assert settled(control, "again", state) == ("CompleteCommit", 1)


@pytest.mark.kafka
def test_a_stranger_aborts_and_may_ask_again(control):
    state = begun(control, "gone")
    assert control.end_txn("gone", state, commit=False) is DONE
    assert settled(control, "gone", state) == ("CompleteAbort", 1)
    assert control.end_txn("gone", state, commit=False) is DONE
    assert control.end_txn("gone", state, commit=True) is REFUSED


@pytest.mark.kafka
def test_version_4_leaves_the_epoch(control):
    state = begun(control, "four")
    assert control.end_txn("four", state, commit=True, version=4) is DONE
    assert settled(control, "four", state) == ("CompleteCommit", 0)


@pytest.mark.kafka
def test_a_timed_out_transaction_is_refused(control):
    state = begun(control, "late", timeout_ms=1000)
    assert settled(control, "late", state) == ("CompleteAbort", 1)
    assert control.end_txn("late", state, commit=True) is REFUSED


@pytest.mark.kafka
def test_a_fresh_epoch_fences(control):
    state = begun(control, "fenced")
    fresh = control.init_producer_id("fenced", timeout_ms=60_000)
    assert fresh.producer_id == state.producer_id and fresh.epoch > state.epoch
    assert control.end_txn("fenced", state, commit=True) is REFUSED


@pytest.mark.kafka
def test_an_id_that_nobody_used(control):
    assert control.end_txn("never", PreparedTxnState(4711, 0), commit=True) is REFUSED
    assert control.describe_transactions(["never"]) == {}


@pytest.mark.kafka
def test_an_initialised_id_has_nothing_to_commit(control):
    state = control.init_producer_id("empty", timeout_ms=60_000)
    assert control.describe_transactions(["empty"])["empty"].state == "Empty"
    assert control.end_txn("empty", state, commit=True) is REFUSED


@pytest.mark.kafka
def test_describe_says_all_of_it(control):
    before = time.time() * 1000
    state = begun(control, "told", timeout_ms=12_345)
    d = control.describe_transactions(iter(["told", "told", "unknown"]))["told"]
    assert (d.state, d.producer_id, d.epoch, d.timeout_ms, d.partitions) == (
        "Ongoing",
        state.producer_id,
        state.epoch,
        12_345,
        (("control", 0),),
    )
    assert before - 1000 < d.started_ms < before + 60_000
    control.end_txn("told", state, commit=False)


@pytest.mark.kafka
def test_list_takes_the_prefix_literally(control):
    for i in (".*+(x-1", ".*+(x-2", "ab+(x-3"):
        control.init_producer_id(i, timeout_ms=60_000)
    assert [t.transactional_id for t in control.list_transactions(".*+(x", states=())] == [
        ".*+(x-1",
        ".*+(x-2",
    ]
    found = lambda *prefix: control.list_transactions(*prefix, states=(), part="+(x-")
    assert [t.transactional_id for t in found()] == [".*+(x-1", ".*+(x-2", "ab+(x-3"]
    assert [t.transactional_id for t in found("ab")] == ["ab+(x-3"]
    assert found("ab+(x") == found("b") == [], "the part comes behind the prefix"
    assert control.list_transactions(".*+(x") == []  # none is Ongoing
    assert {t.state for t in control.list_transactions(".*+(x", states=["Empty"])} == {"Empty"}


@pytest.mark.kafka
def test_fifty_threads_end_fifty_transactions(control):
    ids = [f"many-{n}" for n in range(50)]
    states = [begun(control, i) for i in ids]
    with ThreadPoolExecutor(50) as pool:
        outcomes = list(pool.map(lambda i, s: control.end_txn(i, s, commit=True), ids, states))
    assert outcomes == [DONE] * 50
    for i, s in zip(ids, states):
        assert settled(control, i, s) == ("CompleteCommit", 1)
    assert control.list_transactions("many-") == []


@pytest.mark.kafka
def test_kip_939_without_keep(control):
    control.init_producer_id("two-phase", timeout_ms=60_000, enable_2pc=True)
    assert control.describe_transactions(["two-phase"])["two-phase"].timeout_ms == 2**31 - 1
    with pytest.raises(BadOption, match="35 UNSUPPORTED_VERSION"):
        control.init_producer_id("two-phase", timeout_ms=60_000, keep_prepared=True)


@pytest.mark.kafka
def test_timeouts(control):
    assert control.max_timeout_ms() == control.choose_timeout_ms("probe") == 900_000
    control.check_timeout("probe", 900_000)
    with pytest.raises(TimeoutTooLarge, match="900001: the broker allows at most 900000") as caught:
        control.check_timeout("probe", 900_001)
    assert isinstance(pickle.loads(pickle.dumps(caught.value)), TimeoutTooLarge)


@pytest.mark.kafka
def test_topics(control):
    assert (
        control.topics(["control", "absent", "no good name!"]) == {"control": TopicInfo(2, True)}
        and control.topics([]) == {}
    )
    assert (
        control.topic_max_message_bytes("control") == 54321
        and control.topic_max_message_bytes("absent") is None
    )
    assert control.topic_settings("control", ["max.message.bytes", "cleanup.policy"]) == {
        "max.message.bytes": "54321",
        "cleanup.policy": "delete",
    }
    assert (
        control.topic_settings("absent", ["cleanup.policy"]) == {}
        and uuid.UUID(control.topics(["control"])["control"].topic_id).int
    )


@pytest.mark.kafka
def test_tls_against_a_plain_listener_says_so(kafka):
    error, seconds = unreachable(
        {"bootstrap.servers": kafka.bootstrap_servers, "security.protocol": "SSL"}
    )
    assert "SSL" in error.why and seconds < 2


# -- a broker that is silent, then dead --


@pytest.mark.kafka
def test_a_node_that_nobody_has_heard_of_is_looked_for(control):
    with (
        patch.object(control.connection._manager.cluster, "request_update") as renewed,
        pytest.raises(NotSent),
    ):
        control.ask(FindCoordinatorRequest(coordinator_keys=["x"], key_type=1), 4711)
    assert renewed.called


@pytest.fixture
def impatient(control, kafka):
    """A Control that waits two seconds."""
    return Control(kafka.client_conf, timeout_ms=2000)


@pytest.mark.kafka
def test_silence_is_unknown_and_the_same_question_again_gives_the_end(impatient, kafka):
    with impatient as control:
        state = begun(control, "silent")
        kafka.pause()
        time.sleep(0.2)  # until the signal has reached every thread
        try:
            began = time.monotonic()
            assert control.end_txn("silent", state, commit=True) is UNKNOWN
            assert time.monotonic() - began < 1.5
            with pytest.raises(BrokerUnreachable, match="no usable answer within 2000 ms"):
                control.describe_transactions(["silent"])
        finally:
            kafka.resume()
        assert settled_by_asking(control, "silent", state) == ("CompleteCommit", 1)


@pytest.mark.kafka
def test_init_producer_id_is_sent_once_when_the_answer_is_unclear(impatient, kafka):
    with impatient as control:
        first = control.init_producer_id("once", timeout_ms=60_000)
        kafka.pause()
        time.sleep(0.2)  # until the signal has reached every thread
        try:
            with pytest.raises(UnclearAnswer, match="once: InitProducerIdRequest"):
                control.init_producer_id("once", timeout_ms=60_000)
        finally:
            kafka.resume()
        # this one, and perhaps the unclear one
        assert control.init_producer_id("once", timeout_ms=60_000).epoch - first.epoch in (1, 2)


@pytest.mark.kafka
def test_a_killed_broker_is_unknown_until_it_is_back(impatient, kafka):
    with impatient as control:
        state = begun(control, "killed")
        kafka.kill()
        try:
            assert control.end_txn("killed", state, commit=True) is UNKNOWN
            with pytest.raises(NotSent):
                control.ask(
                    FindCoordinatorRequest(key_type=1, coordinator_keys=["killed"], min_version=4)
                )
            with pytest.raises(BrokerUnreachable):
                control.list_transactions("killed")
            with pytest.raises(BrokerUnreachable):
                control.init_producer_id("killed", timeout_ms=60_000)
        finally:
            kafka.restart()
        assert settled_by_asking(control, "killed", state) == ("CompleteCommit", 1)


def settled_by_asking(control, transactional_id, state):
    """Ask to commit until the answer is clear."""
    end = time.monotonic() + 30
    while (
        outcome := control.end_txn(transactional_id, state, commit=True)
    ) is UNKNOWN and time.monotonic() < end:
        time.sleep(0.1)
    assert outcome is DONE
    return settled(control, transactional_id, state)


# -- other clusters --


@pytest.mark.kafka
@pytest.mark.full
def test_the_coordinator_dies_and_another_node_finishes():
    with (
        LocalKafka(nodes=3, progress=None) as kafka,
        Control(kafka.client_conf, timeout_ms=20_000) as control,
    ):
        kafka.create_topic("control")
        ids = [f"moved-{n}" for n in range(8)]
        states = {i: begun(control, i) for i in ids}
        rows = control.ask(
            FindCoordinatorRequest(key_type=1, coordinator_keys=ids, min_version=4)
        ).coordinators
        kafka.kill(rows[0].node_id)
        for i in ids:
            assert settled_by_asking(control, i, states[i]) == ("CompleteCommit", 1)
        assert (
            control.list_transactions("moved-") == []
            and len(control.list_transactions("moved-", states=())) == 8
        )
        assert control.max_timeout_ms() == 900_000


@pytest.mark.kafka
@pytest.mark.parametrize(
    ("config", "error", "says"),
    [
        ({}, BadOption, "KIP-939"),
        ({"unstable.api.versions.enable": True}, NotAuthorized, "TWO_PHASE_COMMIT"),
    ],
    ids=["no version 6", "switched off"],
)
def test_a_broker_without_two_phase_commit(config, error, says):
    with (
        LocalKafka(two_phase_commit=False, config=config, progress=None) as kafka,
        Control(kafka.client_conf) as control,
    ):
        with pytest.raises(error, match=says):
            control.init_producer_id("x", timeout_ms=60_000, enable_2pc=True)
        assert control.init_producer_id("x", timeout_ms=60_000).epoch >= 0


# -- rights --

READ, WRITE, DESCRIBE, TWO_PHASE_COMMIT = 3, 4, 8, 15
TOPIC, TRANSACTIONAL_ID, LITERAL, PREFIXED = 2, 5, 3, 4


@pytest.fixture(scope="module")
def secure():
    with LocalKafka(
        secure=True, progress=None, config={"transaction.max.timeout.ms": 120_000}
    ) as running:
        for topic in ("hidden", "seen", "own"):
            running.create_topic(topic)
        yield running


@pytest.fixture(scope="module")
def grant(secure):
    """Give alice a right, and wait until it is in force."""
    with Control(secure.client_conf) as admin:

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
    with Control(secure.client_conf_for("alice"), timeout_ms=8000) as made:
        yield made


def soon(attempt, want, seconds=10):
    """The result of `attempt` once it is `want`: a new ACL takes a moment to reach the broker."""
    end = time.monotonic() + seconds
    while (got := attempt()) != want and time.monotonic() < end:
        time.sleep(0.05)
    assert got == want


def allowed(attempt):
    try:
        attempt()
    except NotAuthorized:
        return False
    return True


@pytest.mark.kafka
def test_a_wrong_password_is_told_at_once(secure):
    began = time.monotonic()
    with pytest.raises(
        NotAuthorized, match="user alice at .*: (58 SASL_AUTHENTICATION_FAILED|the broker hangs up)"
    ) as caught:
        Control(secure.client_conf_for("alice") | {"sasl.password": PASSWORD}, timeout_ms=10_000)
    assert time.monotonic() - began < 5 and PASSWORD not in str(caught.value)


@pytest.mark.kafka
def test_no_login_at_a_listener_that_wants_one(secure):
    error, seconds = unreachable({"bootstrap.servers": secure.bootstrap_servers})
    assert seconds < 2


@pytest.mark.kafka
def test_without_write_the_error_names_the_id_and_the_right(alice):
    for attempt in (
        lambda: alice.init_producer_id("other-1", timeout_ms=60_000),
        lambda: alice.choose_timeout_ms("other-1"),
        lambda: alice.check_timeout("other-1", 60_000),
        lambda: alice.describe_transactions(["other-1"]),
        lambda: alice.end_txn("other-1", PreparedTxnState(1, 0), commit=True),
    ):
        with pytest.raises(
            NotAuthorized,
            match=(
                "other-1: 53 TRANSACTIONAL_ID_AUTHORIZATION_FAILED(.|\n)*Grant WRITE on the"
                " resource TransactionalId, PREFIXED"
            ),
        ):
            attempt()


@pytest.mark.kafka
def test_write_on_the_prefix_is_enough_and_two_phase_needs_more(alice, grant):
    grant(TRANSACTIONAL_ID, "own-", PREFIXED, WRITE)
    soon(lambda: allowed(lambda: alice.init_producer_id("own-1", timeout_ms=60_000)), True)
    # what she may not DESCRIBE she does not see
    assert [t.transactional_id for t in alice.list_transactions("", states=())] == ["own-1"]
    two_phase = lambda: alice.init_producer_id("own-1", timeout_ms=60_000, enable_2pc=True)
    with pytest.raises(
        NotAuthorized,
        match="also needs TWO_PHASE_COMMIT there, and transaction.two.phase.commit.enable=true",
    ):
        two_phase()
    assert "TWO_PHASE_COMMIT is not granted" in alice.why_no_two_phase("own-probe")
    grant(TRANSACTIONAL_ID, "own-", PREFIXED, TWO_PHASE_COMMIT)
    soon(lambda: allowed(two_phase), True)


@pytest.mark.kafka
def test_where_asking_is_forbidden_the_timeout_is_found_by_trying(alice, grant, secure):
    grant(TRANSACTIONAL_ID, "own-", PREFIXED, WRITE)
    soon(lambda: allowed(lambda: alice.init_producer_id("own-2", timeout_ms=60_000)), True)
    assert alice.max_timeout_ms() is None and alice.choose_timeout_ms("own-probe") == 60_000
    with pytest.raises(TimeoutTooLarge, match="the broker allows at most 60000"):
        alice.check_timeout("own-probe", 120_001)
    with Control(secure.client_conf) as admin:
        assert admin.choose_timeout_ms("probe") == 120_000


@pytest.mark.kafka
def test_topics_tell_what_alice_may_do(alice, grant):
    grant(TOPIC, "seen", LITERAL, DESCRIBE)
    grant(TOPIC, "own", LITERAL, WRITE)
    soon(
        lambda: alice.topics(["hidden", "seen", "own"]),
        {"hidden": TopicInfo(0, False), "seen": TopicInfo(1, False), "own": TopicInfo(1, True)},
    )
    assert alice.topic_max_message_bytes("own") is None


@pytest.mark.kafka
def test_why_a_broker_has_no_two_phase_commit_is_told():
    for config, why, finding in (
        (
            {"transaction.two.phase.commit.enable": False},
            "transaction.two.phase.commit.enable is false",
            "two-phase-off",
        ),
        (
            {"unstable.api.versions.enable": False},
            "no InitProducerId version 6",
            "two-phase-no-version",
        ),
    ):
        with (
            LocalKafka(progress=None, config=config) as kafka,
            Control(kafka.client_conf) as control,
        ):
            assert why in control.why_no_two_phase("kafka2pc-probe")
            assert [
                f.why for f in doctor(Access(kafka.bootstrap_servers)).findings if f.name == finding
            ] == [control.why_no_two_phase("kafka2pc-probe")]
            with pytest.raises(BadOption, match="twoPhaseCommit=required"):
                check(kafka.client_conf, two_phase="required")
            assert check(kafka.client_conf, two_phase="auto").two_phase is False


@pytest.mark.kafka
def test_a_range_is_fetched_with_login_and_encryption_and_the_missing_right_is_named(
    alice, grant, secure
):
    producer = Producer(secure.client_conf)
    producer.produce("own", b"read me", partition=0)
    producer.flush(30)

    def read(control):
        return [
            v
            for c in fetch(control, "own", 0, 0, 1, FetchSettings(patience_ms=5000))
            for v in c.values.to_pylist()
        ]

    with Control(secure.client_conf) as admin:
        assert read(admin) == [b"read me"]
    for rights in ((), (DESCRIBE,)):
        for right in rights:
            grant(TOPIC, "own", LITERAL, right)
            soon(lambda: allowed(lambda: alice.leaders(["own"])), True)
        with pytest.raises(NotAuthorized, match="topic own: 29 (.|\n)*Grant READ and DESCRIBE"):
            read(alice)
    grant(TOPIC, "own", LITERAL, READ)
    soon(lambda: allowed(lambda: read(alice)), True)
