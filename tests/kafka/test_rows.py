"""Rows of several batches as one: each keeps its own time; a topic's name is text."""

import numpy as np
import pyarrow as pa
import pytest

from kafka2pc.kafka.records.checks import topic_column
from kafka2pc.kafka.records.rows import join_rows, rows_by_topic, rows_of
from kafka2pc.protocol.errors import BadRow


def part(values, *, times=None, now_ms=5):
    columns = {"value": values}
    if times:
        columns["timestamp"] = pa.array(times, pa.timestamp("ms"))
    return rows_of(pa.RecordBatch.from_pydict(columns), now_ms=now_ms)


BARE, TIMED = part(["a", "b"], now_ms=5), part(["c", "d", "e"], times=[7, 8, 9])


@pytest.mark.parametrize(
    ("parts", "times"),
    [
        ([BARE, TIMED], [5, 5, 7, 8, 9]),
        ([TIMED, BARE], [7, 8, 9, 5, 5]),
        ([TIMED, TIMED], [7, 8, 9, 7, 8, 9]),
        ([BARE, TIMED, part(["f"], now_ms=6)], [5, 5, 7, 8, 9, 6]),
        ([BARE, part(["f"], now_ms=6)], 5),
    ],
)
def test_rows_that_are_joined_keep_their_times(parts, times):
    assert np.array_equal(join_rows(parts).timestamps_ms, times)


def with_topics(column):
    return pa.RecordBatch.from_pydict({"value": ["v"] * len(column), "topic": column})


@pytest.mark.parametrize("kind", [pa.binary(), pa.string()], ids=str)
def test_a_topic_that_is_no_text_is_a_bad_row(kind):
    """Spark does not promise UTF-8 in a text."""
    batch = with_topics(pa.array([b"good", b"\xff\xfe"]).view(kind))
    with pytest.raises(BadRow, match="column topic.*UTF-8"):
        rows_by_topic(batch, None, 1000)
    with pytest.raises(BadRow, match="column topic.*UTF-8"):
        topic_column(batch)


@pytest.mark.parametrize(
    "column",
    [
        pa.array(["t", "s"]),
        pa.array(["t", "s"], pa.large_string()),
        pa.array([b"t", b"s"]),
        pa.array([b"t", b"s"], pa.large_binary()),
        pa.array([b"t", b"s"], pa.binary(1)),
        pa.array(["t", "s"]).dictionary_encode(),
        pa.array([b"t", b"s"]).dictionary_encode(),
    ],
    ids=lambda column: str(column.type),
)
def test_both_engines_take_each_type_of_a_topic(column):
    assert topic_column(with_topics(column)).to_pylist() == ["t", "s"]
    assert [name for name, _ in rows_by_topic(with_topics(column), None, 1000)] == ["t", "s"]
