"""Reading a decision topic to its end, from a broker in memory and by a clock that only waits
move.
"""

import struct
from types import SimpleNamespace as Answer

import numpy as np
import pyarrow as pa
import pytest
from hurried import Hurried
from kafka.future import Future

from kafka2pc.decision_logs.topic.reader import Tail
from kafka2pc.kafka.records.encoder import record_batch, sections
from kafka2pc.kafka.records.rows import rows_of
from kafka2pc.protocol.errors import BrokerUnreachable, CorruptDecision, NotAuthorized
from kafka2pc.protocol.messages import PreparedTxnState


def batch(offset, key, producer_id=1):
    """A record batch with one record, in a transaction."""
    rows = rows_of(pa.RecordBatch.from_pydict({"key": [key], "value": [b"x"]}), now_ms=0)
    (section,) = sections(rows, np.zeros(1, int), "d", 10_000)
    content = record_batch(section, PreparedTxnState(producer_id, 0), 0)
    return struct.pack(">q", offset) + content[8:]


class Broker:
    """Leads partition 0 of the topic d, and sends one batch in an answer, after `each_s`. Producer
    2 has aborted its transaction. `codes`: of the next answers; the last one stays.
    """

    def __init__(self, log, codes=(0,), each_s=0.0):
        self.log = dict(log)
        self.codes = list(codes)
        self.each_s = each_s
        self.clock = Hurried()
        self.looks = 0

    def highest(self, request):
        return 0

    def persist(self, once):
        return once()

    def ask(self, request):
        self.looks += 1
        partitions = [Answer(partition_index=0, leader_id=self.looks)]
        return Answer(topics=[Answer(error_code=0, name="d", topic_id=None, partitions=partitions)])

    def send(self, request, node, within_ms):
        self.clock.sleep(self.each_s)
        assert node == self.looks, "not the leader that was named last"
        (wanted,) = request.topics[0].partitions
        code = self.codes[0] if len(self.codes) == 1 else self.codes.pop(0)
        behind = [b for offset, b in self.log.items() if offset >= wanted.fetch_offset]
        part = Answer(
            partition_index=0,
            error_code=code,
            records=b"".join(behind[:1]) if not code else b"",
            preferred_read_replica=-1,
            aborted_transactions=[Answer(producer_id=2, first_offset=0)],
        )
        return Future().success(
            Answer(
                error_code=0,
                throttle_time_ms=0,
                responses=[Answer(topic="d", topic_id=None, partitions=[part])],
            )
        )


def batches(keys):
    return {offset: batch(offset, key) for offset, key in enumerate(keys)}


THREE = batches(["q/0.0", "q/0.1", "q/1.0"])


def test_no_read_succeeds_without_a_batch_that_cannot_be_read():
    broker = Broker(THREE | {1: THREE[1][:-1] + b"?"})
    tail = Tail("d", ("q/", "q:"))
    for _ in range(3):
        with pytest.raises(BrokerUnreachable, match="topic d-0, offset 1: the checksum"):
            tail.read(broker, 3, 300)
        assert (tail.at, list(tail.found), tail.records) == (1, ["q/0.0"], 1)
    broker.log = THREE  # another replica leads
    tail.read(broker, 3, 300)
    assert (tail.at, list(tail.found), tail.records) == (3, ["q/0.0", "q/0.1", "q/1.0"], 3)


def test_a_read_ends_at_its_end_behind_gaps_and_aborted_records_and_goes_on_there():
    log = {0: THREE[0], 4: batch(4, "q/1.0"), 5: batch(5, "q/2.0", producer_id=2)}
    broker = Broker(log | {6: batch(6, "another/0.0"), 7: batch(7, "q/3.0")})
    tail = Tail("d", ("q/", "q:"))
    tail.read(broker, 6, 300)
    assert (tail.at, list(tail.found), tail.records) == (6, ["q/0.0", "q/1.0"], 2)
    tail.read(broker, 8, 300)
    assert tail.found == {"q/0.0": {b"x": 0}, "q/1.0": {b"x": 4}, "q/3.0": {b"x": 7}}
    assert (tail.at, tail.records) == (8, 4)
    with pytest.raises(CorruptDecision, match="ends at 7, and was read to 8"):
        tail.read(broker, 7, 300)


@pytest.mark.parametrize(
    ("codes", "error", "reason"),
    [
        ([0], BrokerUnreachable, "to 4 of 5: nothing came within 300 ms(.|\n)*transaction is open"),
        ([0, 1], BrokerUnreachable, "to 1 of 5: offset 1: 1 OFFSET_OUT_OF_RANGE"),
        ([0, 29], NotAuthorized, "Grant READ"),
    ],
)
def test_a_read_that_cannot_reach_its_end_keeps_what_it_has_and_says_why(codes, error, reason):
    broker = Broker(THREE | {3: batch(3, "q/1.1", producer_id=2)}, codes)
    tail = Tail("d")
    with pytest.raises(error, match=reason):
        tail.read(broker, 5, 300)
    assert tail.found and broker.clock.at_s < 0.5
    broker.log[4] = batch(4, "q/2.0")
    broker.codes = [6, 0]  # another broker leads
    tail.read(broker, 5, 300)
    assert (tail.at, list(tail.found)) == (5, ["q/0.0", "q/0.1", "q/1.0", "q/2.0"])


def test_a_read_that_makes_progress_has_no_end_and_is_logged(caplog):
    broker = Broker(batches(["q/0.0"] * 6), each_s=4)
    Tail("d").read(broker, 6, within_ms=300)
    needed = "decision log kafka:d: %d s were needed to read to offset %d of 6"
    said = [message for message in caplog.messages if message.startswith("decision log kafka")]
    # the broker is always asked one batch ahead
    assert said == [needed % (12, 2), needed % (24, 5)]
