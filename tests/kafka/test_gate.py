"""The gate: an open transaction that hides committed rows in each partition of its topics, and what
it refuses.
"""

import json
import uuid

import pyarrow as pa
import pytest
from kafka_fixtures import settled
from participant_suite import DONE, a_plan, run_python

from kafka2pc.kafka.gate import HEADER, KEY
from kafka2pc.kafka.participant import KafkaParticipant
from kafka2pc.kafka.read.whole_topic import read_topic
from kafka2pc.protocol.errors import BadRow
from kafka2pc.protocol.messages import committable_from_dict
from kafka2pc.protocol.states import TxnState

pytestmark = [pytest.mark.kafka, pytest.mark.never_unsteady]

ANOTHER_PROCESS = """
import json, pickle, sys
from dataclasses import asdict
store, plan = pickle.load(sys.stdin.buffer)
print(json.dumps(asdict(store.open_gate(plan))))
"""


def opened_here(store, plan):
    return store.open_gate(plan)


def opened_by_a_process_that_has_ended(store, plan):
    return committable_from_dict(json.loads(run_python(ANOTHER_PROCESS, store, plan)))


@pytest.fixture
def name():
    """Of a topic, and the prefix of the transactional ids."""
    return f"gate-{uuid.uuid4().hex[:8]}"


@pytest.fixture
def make(kafka, name):
    """Stores whose transactions do not stay open."""
    made = []
    plan = a_plan()

    def store(*gated, **options):
        made.append(KafkaParticipant(kafka.client_conf, prefix=name, gated=gated, **options))
        return made[-1], plan

    yield store
    for one in made:
        for c in one.in_doubt(plan.query_id):
            one.abort(c)


def precommitted(store, plan, **columns):
    with store.begin(plan) as txn:
        txn.write(pa.record_batch(columns))
        txn.flush()
        return txn.precommit()


def end(store, c, verb):
    assert getattr(store, verb)(c) is DONE
    settled(store.cluster, c.transactional_id, c.state)


def seen(kafka, topic, isolation="read_committed"):
    return sorted((r.partition, r.value) for r in read_topic(kafka.client_conf, topic, isolation))


def gate_records(kafka, topic):
    """Key and headers of the records without a value, by partition."""
    found = read_topic(kafka.client_conf, topic, "read_uncommitted")
    return [(r.key, r.headers) for r in found if r.value is None]


def places(c):
    return [(p.topic, p.partition, p.records) for p in c.partitions]


@pytest.mark.parametrize(
    ("engine", "opened"),
    [("columnar", opened_by_a_process_that_has_ended), ("rows", opened_here)],
    ids=["columnar", "rows"],
)
def test_rows_that_are_committed_behind_a_gate_show_all_at_once(kafka, make, name, engine, opened):
    kafka.create_topic(name, 6)
    store, plan = make(name, topic=name, engine=engine)
    gate = opened(store, plan)
    assert places(gate) == [(name, p, 1) for p in range(6)]
    everywhere = pa.array(range(6), pa.int32())
    for value in ("a", "b"):
        c = precommitted(store, plan, partition=everywhere, value=[value] * 6)
        end(store, c, "commit")
        assert seen(kafka, name) == []
    assert [c.state for c in store.in_doubt(plan.query_id)] == [gate.state]
    assert store.describe([gate])[0].state is TxnState.PRECOMMITTED
    end(store, gate, "abort")
    assert seen(kafka, name) == [(p, value) for p in range(6) for value in (b"a", b"b")]
    header = HEADER, f"{plan.query_id} {plan.batch_id}".encode()
    assert gate_records(kafka, name) == [(None, (header,))] * 6
    assert (gate.timeout_ms, gate.oldest_ms) == (store.timeout_ms, None)


def test_the_record_has_a_key_where_the_topic_is_compacted(kafka, make, name):
    """Another partitioner than that of the columns is of no use to a record with a partition."""
    compacted = f"{name}-compacted"
    kafka.create_topic(name, 2)
    kafka.create_topic(compacted, 2, config={"cleanup.policy": "delete,compact"})
    store, plan = make(compacted, name, engine="rows")
    store.conf["partitioner"] = "murmur2"
    gate = store.open_gate(plan)
    assert places(gate) == [(topic, p, 1) for topic in (name, compacted) for p in range(2)]
    keys = [[key for key, _ in gate_records(kafka, topic)] for topic in (name, compacted)]
    assert keys == [[None, None], [KEY, KEY]]
    end(store, gate, "abort")


@pytest.mark.nightly
def test_a_gate_of_a_thousand_partitions(kafka, make, name):
    kafka.create_topic(name, 1_000)
    store, plan = make(name, topic=name)
    gate = store.open_gate(plan)
    assert places(gate) == [(name, p, 1) for p in range(1_000)]
    end(store, precommitted(store, plan, value=["a"] * 2_000), "commit")
    assert seen(kafka, name) == []
    end(store, gate, "abort")
    assert len(seen(kafka, name)) == 2_000


@pytest.mark.parametrize("engine", ["columnar", "rows"])
def test_rows_for_a_topic_without_a_gate_are_refused_before_they_are_sent(
    kafka, make, name, engine
):
    other = f"{name}-other"
    for topic in (name, other):
        kafka.create_topic(topic)
    store, plan = make(name, engine=engine)
    with pytest.raises(BadRow, match=f"topic '{other}' is not in the option topics") as caught:
        precommitted(store, plan, topic=[name, other], value=["a", "b"])
    assert "visibility=batch" in caught.value.why and "Add the topic" in caught.value.action
    assert store.in_doubt(plan.query_id) == []
    found = [seen(kafka, topic, "read_uncommitted") for topic in (name, other)]
    assert found == [[], []]


def test_rows_that_an_earlier_run_wrote_elsewhere_are_written_again(kafka, make, name):
    """Its option topics may have been another one."""
    kafka.create_topic(name)
    store, plan = make(topic=name)
    lost = precommitted(store, plan, value=["a"])
    end(store, lost, "abort")
    gated, plan = make(f"{name}-other")
    again = gated.write_again([lost], plan)
    assert places(again) == places(lost)
    end(store, again, "abort")


def test_copies_of_a_store_have_its_gate(kafka, make, name):
    store, _ = make(name)
    with store.under("other").briefly(10_000) as twin:
        assert twin.gated == (name,)
    assert not make()[0].gated
