"""A consumer that reports an error in the middle of what has arrived; in memory."""

import pytest
from confluent_kafka import KafkaError, KafkaException

from kafka2pc.decision_logs.topic import reader as topic_reader
from kafka2pc.decision_logs.topic.reader import Tail


class Message:
    """A record, or an error in its place."""

    def __init__(self, offset, key=None, error=None):
        self.offset, self.key = lambda: offset, lambda: key
        self.value, self.error = lambda: b"x", lambda: error


class FakeConsumer:
    """Reads `log` from where it was assigned, and goes on behind an error, as librdkafka does."""

    def __init__(self, log):
        self.log, self.at = log, 0

    def assign(self, partitions):
        self.at = partitions[0].offset

    def poll(self, seconds):
        return next(iter(self.consume(1, seconds)), None)

    def consume(self, n, seconds):
        found = [m for m in self.log if m.offset() >= self.at][:n]
        self.at = found[-1].offset() + 1 if found else self.at
        return found


def tail_of(log, monkeypatch):
    monkeypatch.setattr(topic_reader, "Consumer", lambda conf: FakeConsumer(log))
    monkeypatch.setattr(topic_reader, "for_librdkafka", lambda conf: {})
    return Tail({}, "d", ("q/", "q:"))


def three(code):
    """An error at offset 1, between two records."""
    return [Message(0, b"q/0.0"), Message(1, error=KafkaError(code)), Message(2, b"q/1.0")]


def test_no_read_succeeds_without_a_batch_that_cannot_be_read(monkeypatch):
    log = three(KafkaError._BAD_MSG)
    tail = tail_of(log, monkeypatch)
    for _ in range(3):
        with pytest.raises(KafkaException, match="_BAD_MSG"):
            tail.read(3, 300)
        assert (tail.at, list(tail.found), tail.records) == (1, ["q/0.0"], 1)
    log[1] = Message(1, b"q/0.1")  # another replica leads
    tail.read(3, 300)
    assert (tail.at, list(tail.found)) == (3, ["q/0.0", "q/0.1", "q/1.0"])


@pytest.mark.parametrize("code", [KafkaError._PARTITION_EOF, KafkaError.GROUP_AUTHORIZATION_FAILED])
def test_what_is_no_error_of_a_record_stops_no_read(code, monkeypatch):
    tail = tail_of(three(code), monkeypatch)
    tail.read(3, 300)
    assert (tail.at, list(tail.found)) == (3, ["q/0.0", "q/1.0"])
