"""What `format("kafka2pc")` reads is what Spark's own `format("kafka")` reads: each case runs on
both.
"""

import uuid

import pytest
from both_formats import send, values

pytestmark = [pytest.mark.full, pytest.mark.kafka, pytest.mark.spark]


@pytest.fixture
def topic(kafka):
    name = f"both-{uuid.uuid4().hex[:8]}"
    kafka.create_topic(name, partitions=3)
    return name


def test_default_ends_of_a_batch_read(either_format, kafka, topic):
    send(kafka, topic, range(3), partition=0)
    send(kafka, topic, range(3, 5), partition=2)
    assert either_format.values(topic) == ["0", "1", "2", "3", "4"]


def test_a_stream_reads_from_the_start(either_format, kafka, topic, tmp_path):
    send(kafka, topic, range(3))
    batches = either_format.stream_values(tmp_path, topic, startingOffsets="earliest")
    assert [v for batch in batches for v in batch] == ["0", "1", "2"]


def test_rows_that_arrive_between_load_and_action_are_found(either_format, kafka, topic):
    send(kafka, topic, ["before"])
    frame = either_format.load(topic, startingOffsets="earliest", endingOffsets="latest")
    send(kafka, topic, ["later"])
    assert values(frame) == ["before", "later"]
