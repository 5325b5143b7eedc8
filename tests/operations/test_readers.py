"""Other programs beside a query: whose transaction holds readers back, and which groups wait."""

import uuid

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition
from dead_query_fixtures import finding_of, names
from kafka_tools import administered

from kafka2pc.operations import programs as programs_module
from kafka2pc.operations.access import Access
from kafka2pc.operations.doctor.doctor import doctor
from kafka2pc.operations.doctor.rights import RIGHTS
from kafka2pc.operations.programs import find_readers
from kafka2pc.operations.survey import Survey
from kafka2pc.proof.child_process import until
from kafka2pc.proof.missing_rights import Rights

pytestmark = [pytest.mark.kafka, pytest.mark.never_unsteady]

ELSEWHERE = "no query has this prefix"


class Cluster:
    """Other programs on the broker that all tests share."""

    def __init__(self, kafka):
        self.kafka, self.own = kafka, uuid.uuid4().hex[:8]
        self.topic = f"readers-{self.own}"
        self.writers, self.readers = [], []
        kafka.create_topic(self.topic)

    def writes(self, transactional_id, text="open"):
        """A program that leaves a transaction open."""
        conf = {"transactional.id": transactional_id, "transaction.timeout.ms": 60_000}
        writer = Producer(self.kafka.client_conf | conf)
        writer.init_transactions(30)
        writer.begin_transaction()
        writer.produce(self.topic, text)
        writer.flush(30)
        self.writers.append(writer)
        return writer

    def produces(self, text):
        """A record without a transaction."""
        plain = Producer(self.kafka.client_conf)
        plain.produce(self.topic, text)
        plain.flush(30)

    def reads(self, group, isolation, until_offset):
        """A member of a group that has committed this offset, by reading up to it."""
        conf = {
            "group.id": group,
            "isolation.level": isolation,
            "auto.offset.reset": "earliest",
            "enable.auto.commit": False,
            "log_level": 0,
        }
        reader = Consumer(self.kafka.client_conf | conf)
        self.readers.append(reader)
        reader.subscribe([self.topic])
        return self.goes_on(reader, until_offset)

    def goes_on(self, reader, until_offset):
        """The member reads up to this offset, and commits it."""

        def is_there():
            reader.poll(0.2)
            at = reader.position([TopicPartition(self.topic, 0)])
            return at[0].offset == until_offset

        until(is_there, f"it has read up to {until_offset}", 30)
        reader.commit(asynchronous=False)
        return reader

    def doctor(self, **how):
        access = Access(self.kafka.bootstrap_servers)
        defaults = dict(topics=[self.topic], prefix=ELSEWHERE, older_ms=0)
        return doctor(access, **defaults | how)

    def close(self):
        for reader in self.readers:
            reader.close()
        for writer in self.writers:
            try:
                writer.abort_transaction(30)
            except Exception:  # noqa: BLE001, S110  another one has ended it
                pass


@pytest.fixture
def programs(kafka):
    opened = Cluster(kafka)
    yield opened
    opened.close()


def test_the_transaction_of_another_program_is_named_and_ended_by_the_printed_line(
    programs, tmp_path
):
    name = f"clicks{programs.own}-3-17"
    programs.produces("first")
    programs.writes(name)
    programs.produces("last")
    found = programs.doctor()
    one = finding_of(
        found,
        "of-another-program",
        f"1 open transaction in {programs.topic}, the oldest for ",
        "holds readers back; by its id it looks like Flink's KafkaSink with the"
        f" transactionalIdPrefix clicks{programs.own}",
        "A guess",
        f"forceTerminateTransaction --transactionalId {name}",
        f"{name}\nopen for ",
    )
    assert one.level == "trouble" and found.status >= 3
    assert "of-another-program" not in names(programs.doctor(older_ms=60_000)), "it is young"
    administered(programs.kafka, tmp_path, *one.commands)
    gone = {"of-another-program", "readers-held-back"}
    until(lambda: not names(programs.doctor()) & gone, "readers go on", 20)


def test_ids_of_no_known_shape_and_transactions_that_hold_nothing_back_are_not_guessed(programs):
    programs.writes(f"my-producer-{programs.own}x")
    finding_of(programs.doctor(), "readers-held-back", "1 of other programs")
    assert "of-another-program" not in names(programs.doctor())
    other = Cluster(programs.kafka)
    other.writes(f"clicks{programs.own}-0-1")  # in another topic than the one that was named
    assert "of-another-program" not in names(programs.doctor())
    other.close()


def test_a_task_of_connect_is_guessed_only_where_its_leader_is_known(programs):
    group = f"etl{programs.own}"
    programs.writes(f"{group}-customers-0")
    assert "of-another-program" not in names(programs.doctor())
    leader = programs.writes(f"connect-cluster-{group}")
    leader.abort_transaction(30)
    finding_of(
        programs.doctor(),
        "of-another-program",
        f"the connector customers of the Kafka Connect cluster {group}",
    )


def test_groups_that_wait_are_named_and_those_that_read_what_is_not_committed_are_a_finding(
    programs,
):
    own = programs.own
    for text in ("a", "b"):
        programs.produces(text)
    writer = programs.writes(f"anyone-{own}")
    programs.produces("last")
    programs.reads(f"behind-{own}", "read_committed", 1)
    programs.reads(f"waits-{own}", "read_committed", 2)
    programs.reads(f"stopped-{own}", "read_committed", 2).close()
    programs.reads(f"dirty-{own}", "read_uncommitted", 4)
    found = programs.doctor()
    held = finding_of(found, "readers-held-back", f"{programs.topic}-0 at 2 of 4")
    assert held.why.endswith(f" Groups that have read all up to there: waits-{own}.")
    dirty = finding_of(
        found,
        "reads-uncommitted",
        f"the consumer group dirty-{own} is beyond the last stable offset",
        f"its offset is {programs.topic}-0 at 4, and a transaction is open from"
        f" {programs.topic}-0 at 2 on",
    )
    assert dirty.level == "trouble"
    assert "reads-uncommitted" not in names(programs.doctor(older_ms=60_000)), "it is young"
    writer.commit_transaction(30)
    until(lambda: "readers-held-back" not in names(programs.doctor()), "nothing is open", 20)
    assert "reads-uncommitted" not in names(programs.doctor()), "an offset proves nothing then"


def test_a_group_that_reads_what_is_committed_is_never_found_beyond(programs, monkeypatch):
    """A transaction ends, another one begins, and the group reads on, between the two questions."""
    own = programs.own
    programs.produces("a")
    first = programs.writes(f"first-{own}")
    quick = programs.reads(f"quick-{own}", "read_committed", 1)
    asked = programs_module.offsets_of_groups

    def meanwhile(survey, groups, places):
        first.commit_transaction(30)
        programs.writes(f"second-{own}")  # from offset 3 on
        programs.goes_on(quick, 3)
        return asked(survey, groups, places)

    monkeypatch.setattr(programs_module, "offsets_of_groups", meanwhile)
    found = programs.doctor()
    monkeypatch.undo()
    assert "reads-uncommitted" not in names(found)
    assert "readers-held-back" in names(found)
    with Survey(programs.kafka.client_conf) as survey:
        (reader,) = find_readers(survey, [(programs.topic, 0)])
    assert (reader.offset, reader.stable, reader.waits, reader.beyond) == (3, 3, True, False)


def test_groups_that_an_operator_may_not_describe_are_not_named(secure, tmp_path):
    programs = Cluster(secure)
    group = f"waits-{programs.own}"
    rights = Rights(secure, programs.topic, ELSEWHERE, group)
    on_topic = next(r for r in RIGHTS if (r.part, r.resource) == ("operator", "--topic {topic}"))
    on_group = next(r for r in RIGHTS if r.resource == "--group {group}")
    programs.produces("first")
    programs.writes(f"anyone-{programs.own}")
    programs.reads(group, "read_committed", 1)
    conf = secure.client_conf_for("alice")
    waits = lambda survey: [r.group for r in find_readers(survey, [(programs.topic, 0)]) if r.waits]
    try:
        rights.give(on_topic)
        with Survey(conf) as survey:
            until(lambda: survey.layout([programs.topic]), "her right is in force", 20)
            assert waits(survey) == []
            rights.give(on_group)
            until(lambda: waits(survey) == [group], "she may describe the group", 20)
    finally:
        programs.close()
        for right in (on_topic, on_group):
            rights.take(right)
