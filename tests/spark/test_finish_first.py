"""A start that cannot write finishes first what is decided: each start, with each trouble.

    start             rights  timeout  columns  table  library  full disk
    format            real    real     memory   -      door     memory
    foreachBatch      real    memory   memory   tables door     as format
    a key, a job      memory  memory   memory   tables door     as format
    kafka2pc restore  real    none     none     tables door     none
    PostgreSQL        store   none     door     store  door     as format
    MariaDB           as PostgreSQL
    Delta, Iceberg    as a disk        tables   tables door     disks
    files, objects    as a disk        none     none   door     disks

real, memory: here. none: it is not asked for what is decided. tables: stores/test_tables. store:
stores/test_postgres. door: refused where it is opened, before any start (test_libraries;
`check_columns`). disks: support/disk_suite, in the tests of these stores.
"""

import json
import uuid
from dataclasses import replace
from types import SimpleNamespace

import pyarrow as pa
import pytest
from confluent_kafka.admin import (
    AclBinding,
    AclBindingFilter,
    AclOperation,
    AclPermissionType,
    AdminClient,
    ResourcePatternType,
    ResourceType,
)
from driver_steps import decide_only

from kafka2pc.kafka.cluster_check import ClusterFacts
from kafka2pc.kafka.read.whole_topic import read_topic
from kafka2pc.kafka.wire.transactions import TimeoutTooLarge, TooOld
from kafka2pc.local.nodes import write_node_settings
from kafka2pc.operations.query import open_query
from kafka2pc.operations.repair import operate
from kafka2pc.operations.repair import restore as restore_by_hand
from kafka2pc.proof.child_process import until
from kafka2pc.protocol.driver import Driver
from kafka2pc.protocol.errors import (
    DECIDED,
    NOTHING_WRITTEN,
    BadOption,
    NotAuthorized,
    OutcomeUnknown,
    PassedOver,
    Reopened,
)
from kafka2pc.protocol.log.questions import newest_commit
from kafka2pc.protocol.log.slots import MemoryLog
from kafka2pc.protocol.memory import MemoryParticipant
from kafka2pc.protocol.phases.decide import decide
from kafka2pc.protocol.phases.finish import complete, complete_newest
from kafka2pc.protocol.phases.passed_over import leave_note, refuse_after
from kafka2pc.protocol.phases.precommit import precommit
from kafka2pc.protocol.phases.restore import finish_decided, restore
from kafka2pc.spark import foreach_batch
from kafka2pc.spark.checkpoint import Checkpoint
from kafka2pc.spark.foreach_batch import exactly_once
from kafka2pc.spark.running_query import RunningQuery
from kafka2pc.spark.sink import opening
from kafka2pc.spark.sink.batch_writer import DecisionPlace, plan_write
from kafka2pc.spark.sink.columns import check_columns
from kafka2pc.spark.sink.keys import query_id_of
from kafka2pc.spark.sink.options import parse_sink_options
from kafka2pc.spark.sink.stream_writer import plan_stream

pytestmark = pytest.mark.never_unsteady

ROWS = pa.record_batch({"value": ["a"]})


class Frame:
    """What `exactly_once` asks of a micro-batch before it writes. `kind`: of its column."""

    sparkSession = SimpleNamespace(__module__="pyspark.sql.session")  # noqa: N815
    columns = ("value",)

    def __init__(self, kind):
        self.columns_now = [("value", kind)]
        field = SimpleNamespace(name="value", dataType=SimpleNamespace(simpleString=lambda: kind))
        self.schema = SimpleNamespace(fields=[field])


class Job:
    """A query, or a write under a key, whose driver has died behind the decision of batch 0."""

    def __init__(self, folder, patch, options):
        self.id, self.place = str(uuid.uuid4()), folder / "checkpoint"
        (self.place / "offsets").mkdir(parents=True)
        (self.place / "metadata").write_text(json.dumps({"id": self.id}))
        (self.place / "offsets/0").write_text("v1\n{}\n0")
        self.options = options | {"maxCommitRetries": "1"}
        self.keyed = {"decisionLog": str(folder / "log")}
        self.frame = Frame("string")
        running = RunningQuery(self.id, 0, f"file:{self.place}", "run 2", lambda: None)
        patch.setattr(foreach_batch, "running_query", lambda df: running)
        self.another_process()

    def another_process(self):
        opening.open_participant.kept.clear()

    def parsed(self, **more):
        return parse_sink_options(self.options | more)

    def stream(self):
        options = self.parsed(checkpointLocation=str(self.place))
        check = lambda: check_columns(self.frame.columns_now, options.target.topic, False)
        return options, plan_stream(options, check)

    def write(self):
        options = self.parsed(idempotenceKey=self.id, **self.keyed)
        check = lambda: check_columns(self.frame.columns_now, options.target.topic, False)
        return options, plan_write(options, check)

    def decide(self, start, rows=ROWS):
        """By the same driver that the start will have."""
        options, writer = (self.stream if start in STREAMS else self.write)()
        store = writer.participant
        if start in STREAMS:
            checkpoint = Checkpoint(str(self.place))
            driver = opening.stream_driver(options, checkpoint, self.id, [store])
        else:
            driver = DecisionPlace(options, query_id_of(self.id)).driver(store)
        decide(driver, writer.plan, [precommit([store], writer.plan, iter([rows]), measure=len)])
        self.another_process()


STREAMS = {
    "format": lambda job: job.stream(),
    "foreachBatch": lambda job: exactly_once(job.options)(job.frame, 0),
}
STARTS = STREAMS | {
    "key": lambda job: job.write(),
    "job": lambda job: exactly_once(job.options | job.keyed, name=job.id).write(job.frame),
}
TROUBLES = {
    "right": NotAuthorized("topic orders: 29 TOPIC_AUTHORIZATION_FAILED"),
    "topic": BadOption("topic orders does not exist"),
    "timeout": TimeoutTooLarge("kafka.transaction.timeout.ms=600000: the broker allows less"),
    "version": TooOld("node 0 is too old"),
    "column": None,
}
FACTS = ClusterFacts(cluster_id="", end_txn_version=5, timeout_ms=60_000)


@pytest.fixture
def store():
    return MemoryParticipant("kafka")


@pytest.fixture
def job(store, tmp_path, monkeypatch):
    class Kafka(MemoryParticipant):
        def __new__(cls, conf, **facts):
            return store

    monkeypatch.setattr(opening, "KafkaParticipant", Kafka)
    monkeypatch.setattr(opening, "check", lambda conf, **wanted: FACTS)
    for name in ("batch_bytes", "two_phase", "end_txn_version", "cluster_id"):
        setattr(store, name, None)  # what a planner leaves of its Kafka
    return Job(tmp_path, monkeypatch, {"kafka.bootstrap.servers": "nowhere:1", "topic": "orders"})


def trouble(job, monkeypatch, name):
    """From now on a check of new work fails."""

    def refuse(conf, **wanted):
        raise TROUBLES[name]

    if name == "column":
        job.frame = Frame("bigint")
    else:
        monkeypatch.setattr(opening, "check", refuse)


@pytest.mark.parametrize("name", TROUBLES)
@pytest.mark.parametrize("start", STARTS)
def test_what_is_decided_is_finished_and_the_error_says_so(job, store, monkeypatch, start, name):
    job.decide(start, [b"a"])
    trouble(job, monkeypatch, name)
    with pytest.raises(type(TROUBLES[name] or BadOption("")), match="Batch 0 .* is finished"):
        STARTS[start](job)
    assert store.read() == [b"a"]


@pytest.mark.parametrize("start", STARTS)
def test_what_cannot_be_finished_is_called_decided_and_nothing_else_is(
    job, store, monkeypatch, start
):
    trouble(job, monkeypatch, "right")
    with pytest.raises(NotAuthorized) as nothing:
        STARTS[start](job)
    assert nothing.value.risk == NOTHING_WRITTEN
    monkeypatch.setattr(opening, "check", lambda conf, **wanted: FACTS)
    job.decide(start, [b"a"])
    trouble(job, monkeypatch, "topic")

    def refuse(c):
        raise NotAuthorized(c.transactional_id)

    monkeypatch.setattr(store, "commit", refuse)
    with pytest.raises(NotAuthorized, match="kafka2pc-") as left:
        STARTS[start](job)
    assert left.value.risk == DECIDED and store.read() == []


@pytest.mark.parametrize("start", STREAMS)
def test_what_was_aborted_waits_for_a_start_that_can_write_it_again(job, store, monkeypatch, start):
    job.decide(start, [b"a"])
    store.expire()
    trouble(job, monkeypatch, "right")
    with pytest.raises(OutcomeUnknown, match="The next start writes it again"):
        STARTS[start](job)
    assert store.read() == [] and len(store.txns) == 1


@pytest.mark.parametrize("start", ["key", "job"])
def test_of_a_finished_key_no_store_is_asked(job, store, monkeypatch, start):
    job.decide(start, [b"a"])
    STARTS["job"](job)
    store.expire()
    monkeypatch.setattr(store, "describe", None)
    trouble(job, monkeypatch, "column")
    with pytest.raises(BadOption) as e:
        STARTS[start](job)
    assert e.value.risk == NOTHING_WRITTEN and store.read() == [b"a"]


def test_a_log_that_cannot_be_opened_hides_no_error(job, monkeypatch):
    job.options |= {"decisionLog": "postgresql://nowhere:1/x"}
    trouble(job, monkeypatch, "right")
    with pytest.raises(NotAuthorized, match="TOPIC_AUTHORIZATION_FAILED"):
        job.stream()


def test_a_batch_that_is_reopened_is_not_called_finished(store):
    driver = Driver(query_id=str(uuid.uuid4()), log=MemoryLog(), participants={"kafka": store})
    plan = restore(driver, 0, offsets_hash="rows")
    decide(driver, plan, [precommit([store], plan, iter([["a"]]), measure=len)])
    store.expire()
    store.records.clear()
    with pytest.raises(Reopened):
        complete(driver, newest_commit(driver.log))
    assert complete_newest(driver) is None and finish_decided(driver, 0) is None


def test_a_full_disk_refuses_the_claim_of_the_next_batch_behind_that(store):
    class Full(MemoryLog):
        def create(self, decision, *late):
            raise OutcomeUnknown("no space left on device")

    driver = Driver(query_id=str(uuid.uuid4()), log=MemoryLog(), participants={"kafka": store})
    decide_only(driver, 0)
    full = Full()
    full.records = driver.log.records
    with pytest.raises(OutcomeUnknown, match="no space left"):
        restore(Driver(query_id=driver.query_id, log=full, participants={"kafka": store}), 1)
    assert store.read() == ["row"]


def test_a_batch_that_was_passed_over_is_reported_behind_that(store):
    """The errors of batch 0, which is decided, and of batch 1, which is not, were caught."""
    driver = Driver(query_id=str(uuid.uuid4()), log=MemoryLog(), participants={"kafka": store})
    decide_only(driver, 0)
    leave_note(driver, 1)
    with pytest.raises(PassedOver, match="batch 1 failed"):
        restore(replace(driver, began=lambda: 2), 2)
    assert store.read() == ["row"]


def test_a_store_that_a_caught_call_has_not_any_more_is_named_by_what_it_has(store):
    """The next call of the same run has one store less."""
    both = {"kafka": store, "other": MemoryParticipant("other")}
    driver = Driver(query_id=str(uuid.uuid4()), log=MemoryLog(), participants=both)
    decide_only(driver, 0)
    error = refuse_after(replace(driver, participants={"kafka": store}), 0, 1)
    assert error.risk.startswith("Not known. Batch 0 was decided") and store.read() == ["row"]


# -- on real brokers --


@pytest.fixture(scope="module")
def admin(secure):
    return AdminClient(secure.client_conf)


class Rights:
    """What alice may do with one topic, and with the ids of one prefix."""

    def __init__(self, admin, topic, prefix):
        name = {
            ResourceType.TOPIC: (topic, ResourcePatternType.LITERAL),
            ResourceType.TRANSACTIONAL_ID: (prefix, ResourcePatternType.PREFIXED),
        }
        allow = lambda kind, right: AclBinding(
            kind, *name[kind], "User:alice", "*", right, AclPermissionType.ALLOW
        )
        self.admin = admin
        self.topic = allow(ResourceType.TOPIC, AclOperation.WRITE)
        self.ids = allow(ResourceType.TRANSACTIONAL_ID, AclOperation.WRITE)
        asked = [*self.both, allow(ResourceType.TOPIC, AclOperation.READ)]
        for made in admin.create_acls(asked).values():
            made.result(30)

    @property
    def both(self):
        return [self.topic, self.ids]

    def revoke(self, acl):
        parts = acl.restype, acl.name, acl.resource_pattern_type, acl.principal, acl.host
        for gone in self.admin.delete_acls(
            [AclBindingFilter(*parts, acl.operation, acl.permission_type)]
        ).values():
            gone.result(30)


@pytest.fixture
def real(secure, admin, tmp_path, monkeypatch):
    topic = secure.create_topic(f"first-{uuid.uuid4().hex[:8]}")
    rights = Rights(admin, topic, topic)
    login = secure.client_conf_for("alice")
    options = {
        "kafka.bootstrap.servers": secure.bootstrap_servers,
        "kafka.security.protocol": login["security.protocol"],
        "kafka.sasl.mechanism": login["sasl.mechanism"],
        "kafka.sasl.jaas.config": (
            "org.apache.kafka.common.security.scram.ScramLoginModule required"
            f' username="alice" password="{login["sasl.password"]}";'
        ),
        "topic": topic,
        "transactionalIdPrefix": topic,
    }
    job = Job(tmp_path, monkeypatch, options)
    job.rights, job.topic = rights, topic

    def allowed():
        try:
            opening.open_participant(job.parsed(checkpointLocation="/x").target)
        except NotAuthorized:
            return False
        return True

    until(allowed, "the rights are in force", 60)
    job.allowed = lambda: (job.another_process(), allowed())[1]
    return job


def visible(secure, job):
    return [r.value.decode() for r in read_topic(secure.client_conf, job.topic)]


@pytest.mark.kafka
@pytest.mark.parametrize("start", STREAMS)
def test_without_write_on_the_topic_what_is_decided_is_committed(real, secure, start):
    real.decide(start)
    real.rights.revoke(real.rights.topic)
    until(lambda: not real.allowed(), "the right is gone", 60)
    with pytest.raises(NotAuthorized, match="Batch 0 was decided, and it is finished"):
        STARTS[start](real)
    assert visible(secure, real) == ["a"]


@pytest.mark.kafka
def test_without_write_on_the_ids_the_error_says_that_the_batch_is_decided(real, secure):
    real.decide("format")
    real.rights.revoke(real.rights.ids)
    until(lambda: not real.allowed(), "the right is gone", 60)
    with pytest.raises(NotAuthorized) as waits:
        real.stream()
    assert waits.value.risk == DECIDED
    query = open_query(str(real.place))
    with operate(secure.client_conf, query, real.topic) as driver:  # an administrator
        assert [step.do for step in restore_by_hand(driver)] == ["commit"]
    assert visible(secure, real) == ["a"]


@pytest.mark.kafka
def test_restore_by_hand_needs_no_right_on_the_topic(real, secure):
    real.decide("format")
    real.rights.revoke(real.rights.topic)
    until(lambda: not real.allowed(), "the right is gone", 60)
    with operate(secure.client_conf_for("alice"), open_query(str(real.place)), real.topic) as mine:
        assert [step.do for step in restore_by_hand(mine)] == ["commit"]
    assert visible(secure, real) == ["a"]


@pytest.mark.kafka
def test_brokers_that_allow_less_time_do_not_hold_back_what_is_decided(real, secure):
    """The next start of the same process takes the new limit, as a new process does."""
    unset = real.options
    real.options = unset | {"kafka.transaction.timeout.ms": "600000"}
    real.decide("format")
    opened = opening.open_participant(
        parse_sink_options(unset | {"checkpointLocation": str(real.place)}).target
    )
    assert opened.timeout_ms > 600_000
    secure.config["transaction.max.timeout.ms"] = "60000"
    write_node_settings(secure.nodes, secure.ports, secure.scheme, secure.config)
    secure.restart()
    with pytest.raises(TimeoutTooLarge, match="Batch 0 was decided, and it is finished"):
        real.stream()
    assert visible(secure, real) == ["a"]
    real.options = unset
    assert real.stream()[1].participant.timeout_ms == 60_000
