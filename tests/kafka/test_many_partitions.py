"""Topics of many partitions: small micro-batches fill all of them evenly."""

import uuid
from collections import Counter
from dataclasses import replace

import pyarrow as pa
import pytest

from kafka2pc.kafka.participant import KafkaParticipant
from kafka2pc.kafka.read.whole_topic import read_ended
from kafka2pc.protocol.messages import Plan
from kafka2pc.protocol.names import new_token
from kafka2pc.protocol.participant import Outcome

pytestmark = [pytest.mark.kafka, pytest.mark.nightly]
PARTITIONS = 100


@pytest.mark.never_unsteady
def test_small_micro_batches_fill_all_partitions_evenly(kafka):
    """Each task writes three rows to one partition: which one must depend on batch and task."""
    topic = kafka.create_topic(f"spread-{uuid.uuid4().hex[:8]}", partitions=PARTITIONS)
    store = KafkaParticipant(kafka.client_conf, topic=topic)
    query_id, rows = str(uuid.uuid4()), pa.RecordBatch.from_pydict({"value": ["a", "b", "c"]})
    for batch_id in range(1000):
        plan = Plan(query_id=query_id, batch_id=batch_id, attempt=0, token=new_token(batch_id, 0))
        written = [written_by(store, replace(plan, task=task), rows) for task in range(2)]
        assert [store.commit(c) for c in written] == [Outcome.DONE] * 2
    found = Counter(r.partition for r in read_ended(kafka.client_conf, topic))
    assert found.total() == 6000 and len(found) == PARTITIONS
    assert max(found.values()) <= 2 * min(found.values())


def written_by(store, plan, rows):
    """The Committable of a task."""
    with store.begin(plan) as txn:
        txn.write(rows)
        txn.flush()
        return txn.precommit()
