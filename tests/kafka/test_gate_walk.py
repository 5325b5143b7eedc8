"""A driver is killed at each step of a batch that has a gate, and another run goes on: on a real
broker, while a reader looks all the time. It sees all of a batch or nothing.
"""

import uuid

import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, NewPartitions
from gated_query import (
    PARTITIONS,
    TASKS,
    GatedQuery,
    Reader,
    hiding,
    rows_by_batch,
    transactions,
)
from kafka_fixtures import values
from killed_driver import Killed, Watch

from kafka2pc.kafka.read.whole_topic import read_topic
from kafka2pc.kafka.wire.topics import find_leaders
from kafka2pc.proof.child_process import until
from kafka2pc.protocol.errors import Refused, Superseded
from kafka2pc.protocol.log.questions import commit_of
from kafka2pc.protocol.participant import Outcome
from kafka2pc.protocol.phases.commit import commit
from kafka2pc.protocol.phases.decide import abort
from kafka2pc.protocol.phases.restore import restore
from kafka2pc.protocol.states import TxnState

pytestmark = [pytest.mark.kafka, pytest.mark.never_unsteady]

PLANNED, DECIDED, JUDGED = ("invoke", "plan"), ("ok", "decide"), ("invoke", "verify")
FIRST = 4  # events from the decision to the end of the first commit


@pytest.fixture
def place(kafka):
    """A topic, which is also the prefix of the transactional ids."""
    return kafka.create_topic(f"walk-{uuid.uuid4().hex[:8]}", PARTITIONS)


@pytest.fixture
def reader(kafka, place):
    with Reader(kafka, [place], place) as running:
        yield running


@pytest.fixture
def query(kafka, place, reader):
    """Makes queries; at the end no transaction of theirs is open on the shared broker."""
    made = []

    def make(**how):
        made.append(GatedQuery(kafka, place, place, **how))
        return made[-1]

    yield make
    for each in made:
        for c in each.open().open:
            each.store.abort(c)
    made[0].store.close()


def each_once(kafka, reader, queries, batches=1):
    """Each row is there once. Returns where, by query and batch."""
    reader.look()
    found, values = rows_by_batch(kafka, *reader.topics)
    expected = {(q.id, n): TASKS * q.partitions for q in queries for n in range(batches)}
    assert {key: len(rows) for key, rows in found.items()} == expected
    assert len(set(values)) == len(values)
    return found


def as_a_whole(reader, queries, found):
    """No batch was seen in part, and one marker in each partition has shown it."""
    torn = {key: reader.parts(rows) for key, rows in found.items()}
    assert {key: polls for key, polls in torn.items() if polls} == {}
    ended = transactions(reader.cluster, *reader.topics)
    logs = {q.id: q.log for q in queries}
    for (query_id, batch_id), rows in found.items():
        (gate,) = commit_of(logs[query_id], batch_id).gates
        by = (gate.state.producer_id, gate.state.epoch)
        assert hiding(ended, rows) == {by}, (query_id, batch_id)


@pytest.mark.parametrize(
    ("engine", "every"), [("columnar", 1), pytest.param("rows", 4, marks=pytest.mark.full)]
)
def test_killed_at_any_step_a_batch_is_seen_as_a_whole(kafka, reader, query, engine, every):
    how = dict(engine=engine, two_phase="required" if engine == "columnar" else "off")
    queries = [query(**how)]
    assert queries[0].start(steps := Watch(PLANNED))
    for n in range(1, len(steps.events), every):
        queries.append(query(**how))
        assert not queries[-1].start(Watch(PLANNED, n))
        reader.look()
        assert queries[-1].start(batches=2), steps.events[n - 1]
    assert queries[0].start(batches=2)
    as_a_whole(reader, queries, each_once(kafka, reader, queries, batches=2))


def test_in_each_partition_the_end_of_the_gate_is_behind_all_ends_of_its_batch(
    kafka, reader, query
):
    """Nothing waits for a watcher here: the ends of all tasks are under way at once."""
    quick = query()
    assert quick.start(batches=30)
    as_a_whole(reader, [quick], each_once(kafka, reader, [quick], batches=30))


class Meanwhile(Watch):
    """Another run works at event number `after`, while this one is stalled."""

    def __init__(self, begin, after, work):
        super().__init__(begin, after)
        self.work = work

    def on_event(self, event):
        try:
            super().on_event(event)
        except Killed:
            self.work()


def test_another_run_drains_or_goes_on_while_the_first_is_stalled_at_any_step(kafka, reader, query):
    queries, ended = [query()], []
    assert queries[0].start(steps := Watch(DECIDED), batches=2)
    for n in range(1, len(steps.events) // 2):
        stalled = query()
        queries.append(stalled)
        other = Meanwhile(DECIDED, n, lambda: stalled.start(batches=1 + n % 2))
        try:
            ended.append(stalled.start(other))
        except (Superseded, Refused) as e:
            ended.append(e)
        reader.look()
        assert stalled.start(batches=2), (steps.events[n - 1], ended[-1])
    as_a_whole(reader, queries, each_once(kafka, reader, queries, batches=2))


def decided(query):
    """It dies behind its decision. Returns the COMMIT."""
    assert not query.start(Watch(DECIDED, 1))
    return commit_of(query.log, 0)


SALVAGED = ["ABORT", "COMMIT", "CLAIM", "REPAIR"]
REOPENED = ["ABORT", "COMMIT", "LOST", "ABORT", "COMMIT"]


@pytest.mark.parametrize(("lost", "kinds"), [(1, SALVAGED), (TASKS, REOPENED)])
def test_a_repair_behind_the_gate_is_killed_at_any_step(kafka, reader, query, lost, kinds):
    """Some, or all, transactions of a decided batch were aborted, as by their timeout."""
    queries = []

    def broken():
        queries.append(query())
        for c in decided(queries[-1]).committables[:lost]:
            assert queries[-1].store.abort(c) is Outcome.DONE
        return queries[-1]

    assert broken().start(steps := Watch(JUDGED))
    assert queries[0].kinds() == kinds
    # behind it a batch is written as any other
    planned = steps.events.index("ok plan")
    for n in range(1, planned + 1):
        dies = broken()
        assert not dies.start(Watch(JUDGED, n))
        reader.look()
        assert dies.start(), steps.events[n - 1]
    as_a_whole(reader, queries, each_once(kafka, reader, queries))


@pytest.mark.parametrize("by_hand", [True, pytest.param(False, marks=pytest.mark.nightly)])
def test_a_gate_that_ends_after_the_decision_costs_no_row(kafka, reader, query, caplog, by_hand):
    """By its timeout, or as by that. A part may be seen, and the log says so."""
    late = query() if by_hand else query(gate_ms=5_000)
    (gate,) = decided(late).gates
    if by_hand:
        assert late.store.abort(gate) is Outcome.DONE
    state = lambda: late.store.describe([gate])[0].state
    until(lambda: state() is TxnState.ABORTED, "the timeout of the gate", 60)
    assert late.start()
    each_once(kafka, reader, [late])
    (said,) = [r.getMessage() for r in caplog.records if "its gate has ended" in r.getMessage()]
    assert f"query {late.id} batch 0: " in said and "No row is lost" in said


def test_a_batch_whose_gate_timed_out_before_the_decision_is_written_again(kafka, reader, query):
    late = query()
    driver = late.driver()
    messages, plan = late.planned(driver)
    assert late.store.abort(plan.gates[0]) is Outcome.DONE
    with pytest.raises(Refused, match="aborted before the decision"):
        commit(driver, messages, 0)
    reader.look()
    assert late.start()
    as_a_whole(reader, [late], each_once(kafka, reader, [late]))


@pytest.mark.parametrize("how", ["no message", "abort"])
def test_a_batch_that_is_given_up_hides_no_row_of_others(kafka, reader, query, how):
    over = query(tries=1)
    driver = over.driver()
    if how == "abort":
        messages, plan = over.planned(driver)
    else:
        messages, plan = [], restore(driver, 0, offsets_hash="offsets 0")
    producer = Producer(kafka.client_conf)
    for p in range(PARTITIONS):
        producer.produce(over.topic, b"another", partition=p)
    producer.flush()
    assert values(kafka, over.topic, still_open=True) == []
    if how == "abort":
        assert abort(driver, messages, 0)
    else:
        commit(driver, messages, 0)
    assert values(kafka, over.topic) == ["another"] * PARTITIONS


def test_a_partition_that_is_added_during_a_batch_is_not_hidden_and_loses_nothing(
    kafka, reader, query
):
    grown = query()
    driver = grown.driver(Watch(DECIDED, FIRST))
    plan = restore(driver, 0, offsets_hash="offsets 0")
    new = NewPartitions(grown.topic, PARTITIONS + 1)
    admin = AdminClient(kafka.client_conf)
    admin.create_partitions([new])[grown.topic].result(30)
    until(lambda: len(find_leaders(reader.cluster, [grown.topic])) == 4, "it is known", 20)
    grown.partitions += 1
    with pytest.raises(Killed):
        commit(driver, [grown.task(driver, plan, n) for n in range(TASKS)], 0)
    reader.look()
    seen = read_topic(kafka.client_conf, grown.topic)
    assert [r.partition for r in seen] == [PARTITIONS], "the row of the first task"
    assert grown.start()
    found = each_once(kafka, reader, [grown])
    hidden = {key: [r for r in rows if r[0][1] < PARTITIONS] for key, rows in found.items()}
    as_a_whole(reader, [grown], hidden)
