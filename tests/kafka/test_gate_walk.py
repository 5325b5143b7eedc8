"""A driver is killed at each step of a batch that has a gate, and another run goes on: on a real
broker, while a reader looks all the time. It sees all of a batch or nothing.
"""

import uuid

import pytest
from gated_query import (
    PARTITIONS,
    TASKS,
    GatedQuery,
    Reader,
    ended_behind,
    rows_by_batch,
    transactions,
)
from killed_driver import Watch

from kafka2pc.protocol.log.questions import commit_of

pytestmark = [pytest.mark.kafka, pytest.mark.never_unsteady]

PLANNED = ("invoke", "plan")
EACH = TASKS * PARTITIONS


@pytest.fixture
def place(kafka):
    """A topic, which is also the prefix of the transactional ids."""
    name = f"walk-{uuid.uuid4().hex[:8]}"
    return kafka.create_topic(name, PARTITIONS) or name


@pytest.fixture
def reader(kafka, place):
    with Reader(kafka, place, place) as running:
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
    """Each row is there once, and no batch was seen in part."""
    reader.look()
    found, values = rows_by_batch(kafka, reader.topic)
    expected = {(q.id, n) for q in queries for n in range(batches)}
    assert found.keys() == expected and {len(rows) for rows in found.values()} == {EACH}
    assert len(set(values)) == len(values)
    torn = {key: reader.parts(rows) for key, rows in found.items()}
    assert {key: polls for key, polls in torn.items() if polls} == {}
    ended = transactions(reader.cluster, reader.topic)
    gates = {(q.id, n): commit_of(q.log, n).gates[0] for q in queries for n in range(batches)}
    late = {key: ended_behind(ended, gates[key], rows) for key, rows in found.items()}
    assert {key: txns for key, txns in late.items() if txns} == {}


@pytest.mark.parametrize("engine", ["columnar", "rows"])
def test_killed_at_any_step_a_batch_is_seen_as_a_whole(kafka, reader, query, engine):
    two_phase = "required" if engine == "columnar" else "off"
    how = dict(engine=engine, two_phase=two_phase)
    whole = query(**how)
    assert whole.start(steps := Watch(PLANNED))
    queries = [whole]
    for n in range(1, len(steps.events)):
        queries.append(query(**how))
        assert not queries[-1].start(Watch(PLANNED, n))
        reader.look()
        assert queries[-1].start(batches=2), steps.events[n - 1]
        assert queries[-1].open().open == [], steps.events[n - 1]
    assert whole.start(batches=2)
    each_once(kafka, reader, queries, batches=2)
    print(steps.events, len(reader.polls))


def test_in_each_partition_the_end_of_the_gate_is_behind_all_ends_of_its_batch(
    kafka, reader, query
):
    """Nothing waits for a watcher here: the ends of all tasks are under way at once."""
    quick = query()
    assert quick.start(batches=30)
    each_once(kafka, reader, [quick], batches=30)
