"""Why records were not delivered: the broker's own sentence, the end of the transaction, or the
connection that failed.
"""

from types import SimpleNamespace as Answer

import pyarrow as pa
import pytest
from confluent_kafka import KafkaError
from kafka.future import Future
from metadata_rows import metadata_rows

from kafka2pc.kafka.records.encoder import Section
from kafka2pc.kafka.wire.connection import NoAnswer, NotSent
from kafka2pc.kafka.write import leaders as leaders_module
from kafka2pc.kafka.write.deliveries import delivery_error
from kafka2pc.kafka.write.sender import Sender
from kafka2pc.protocol.clock import CLOCK
from kafka2pc.protocol.errors import BadRow, PrecommitFailed
from kafka2pc.protocol.messages import PreparedTxnState

OUT_OF_ORDER, INVALID_RECORD, INVALID_TIMESTAMP = 45, 87, 32


class Broker:
    """It leads the only partition, and gives this answer, or error, to every request."""

    batch_bytes = {}
    clock = CLOCK

    def __init__(self, said):
        self.said = said

    def highest(self, request):
        return 12

    def send(self, request, node, within_ms):
        if node is None:
            row = Answer(partition_index=0, leader_id=0)
            topic = Answer(name="t", error_code=0, partitions=[row])
            return Future().success(Answer(topics=[topic]))
        if isinstance(self.said, Exception):
            return Future().failure(self.said)
        topic = Answer(name="t", partition_responses=[self.said] if self.said else [])
        return Future().success(Answer(responses=[topic]))


def refusal(code, said=None):
    return Answer(index=0, error_code=code, base_offset=-1, error_message=said)


@pytest.fixture
def sender(monkeypatch):
    """How to make a sender whose one batch of seven records gets this answer."""
    monkeypatch.setattr(leaders_module, "topic_rows", lambda *_: metadata_rows({("t", 0): 0}))

    def make(said):
        made = Sender(Broker(said), "orders-0", PreparedTxnState(1, 0), delivery_ms=200)
        made.leaders.learn(["t"])
        made.put(Section("t", 0, 7, 0, 0, pa.py_buffer(b"")))
        return made

    return make


@pytest.mark.parametrize("kind", [NotSent, NoAnswer])
def test_the_connection_that_failed_is_the_cause(kind, sender):
    failure = kind("ProduceRequest: broker-2:9093: DNS Resolution failure")
    with pytest.raises(PrecommitFailed, match=r"7 of t-0 \(no answer\) within 200 ms") as caught:
        sender(failure).flush()
    assert caught.value.why == f"The last failure: {failure}."


def test_an_answer_after_a_failed_connection_is_the_cause(sender):
    stopped = sender(NotSent("ProduceRequest: broker-2:9093: 111 ECONNREFUSED"))
    stopped.step()
    stopped.step()
    stopped.cluster.said = refusal(19)
    with pytest.raises(PrecommitFailed, match="NOT_ENOUGH_REPLICAS") as caught:
        stopped.flush()
    assert "min.insync.replicas" in caught.value.why and "--describe" in caught.value.action


def test_an_answer_that_leaves_the_partition_out_is_named(sender):
    with pytest.raises(PrecommitFailed, match="no answer") as caught:
        sender(None).flush()
    assert "without this partition" in caught.value.why


def test_out_of_order_is_an_answer(sender):
    late = sender(None)
    late.cluster.send = lambda *_: Future()
    late.lanes["t", 0].send_again(0, OUT_OF_ORDER)
    with pytest.raises(PrecommitFailed, match=r"7 of t-0 \(OUT_OF_ORDER_SEQUENCE_NUMBER\)"):
        late.flush()


@pytest.mark.parametrize("code", [INVALID_RECORD, INVALID_TIMESTAMP])
def test_what_the_broker_says_of_a_record_is_in_the_error(code, sender):
    said = "One record was rejected: it has no schema id"
    with pytest.raises(BadRow, match=said):
        sender(refusal(code, said)).flush()


def test_without_a_sentence_of_the_broker_the_usual_cause_is_named(sender):
    with pytest.raises(BadRow, match="A compacted topic takes no record without a key"):
        sender(refusal(INVALID_RECORD)).flush()


def test_what_the_broker_says_of_another_refusal_is_in_the_error(sender):
    with pytest.raises(PrecommitFailed, match=r"\(POLICY_VIOLATION\)") as caught:
        sender(refusal(44, "records of this client are not taken")).flush()
    assert caught.value.why == "records of this client are not taken"


def test_too_few_copies_name_the_setting():
    error = delivery_error("orders-0", {("t", 0): (KafkaError(20), 5, 10)})
    assert "min.insync.replicas" in error.why and "--describe" in error.action


@pytest.mark.parametrize("code", [47, 48, 90, KafkaError._FENCED])
def test_a_transaction_that_has_ended_names_its_timeout(code):
    error = delivery_error("orders-0", {("t", 0): (KafkaError(code), 5, 10)})
    assert type(error) is PrecommitFailed and error.what.startswith("orders-0: topic t refused 5")
    assert "kafka.transaction.timeout.ms" in error.action


def test_a_bad_record_comes_before_the_end_of_the_transaction():
    failed = {("t", 0): (KafkaError(48), 5, 10), ("t", 1): (KafkaError(INVALID_RECORD), 1, 10)}
    assert isinstance(delivery_error("orders-0", failed), BadRow)
