"""Another program ends transactions in a partition while our source reads it: what was read stays
what it was.
"""

from dataclasses import replace

import pyarrow as pa
import pytest
from confluent_kafka import Producer
from one_task_query import abort_there, new_query  # noqa: F401  (the fixture)

from kafka2pc.protocol.errors import Refused
from kafka2pc.protocol.phases.commit import commit
from kafka2pc.protocol.phases.decide import decide
from kafka2pc.protocol.phases.restore import restore
from kafka2pc.spark.source.options import parse_source_options
from kafka2pc.spark.source.readers import StreamReader

pytestmark = [pytest.mark.kafka, pytest.mark.never_unsteady]


@pytest.fixture
def query(new_query):  # noqa: F811
    made = new_query(partitions=2)
    made.columns = {"partition": [0, 1] * 3}
    return made


@pytest.fixture
def reader(query):
    servers = query.kafka.bootstrap_servers
    options = {"subscribe": query.topic, "startingOffsets": "earliest"}
    made = StreamReader(parse_source_options({"kafka.bootstrap.servers": servers} | options))
    yield made
    made.stop()


def rows_between(reader, start, end):
    """All columns of these rows, as a new task of Spark reads them."""
    batches = [b for r in reader.partitions(start, end) for b in reader.read(r)]
    found = pa.Table.from_batches(batches).to_pylist() if batches else []
    return sorted(found, key=place_of)


def place_of(row):
    return row["partition"], row["offset"]


def values_of(rows):
    return sorted(row["value"].decode() for row in rows)


def transaction(query, name, values, then):
    """Of another program; `then`: commit_transaction or abort_transaction."""
    producer = Producer(query.kafka.client_conf | {"transactional.id": name, "log_level": 0})
    producer.init_transactions(30)
    producer.begin_transaction()
    for n, value in enumerate(values):
        producer.produce(query.topic, value, partition=n % 2)
    producer.flush(30)
    getattr(producer, then)(30)


def task(query, batch_id):
    driver = query.start()
    return driver, query.task(restore(driver, batch_id), [f"{batch_id}{x}" for x in "abcdef"])


def batch_rows(batch_id):
    return [f"{batch_id}{x}" for x in "abcdef"]


@pytest.mark.parametrize("decided", [False, True])
@pytest.mark.parametrize("ended", [1, 2])
def test_a_range_that_was_read_stays_the_same_and_a_copy_comes_later_once(
    query, reader, decided, ended
):
    """A range ends at the last stable offset, and each transaction below it has its marker: what
    another program aborts lies behind it. A later marker for a transaction that has one ends
    nothing. So a sink that reads such a range again counts the same rows and bytes, and
    `ReplayDiffers` cannot come from it.
    """
    servers = query.kafka.bootstrap_servers
    driver, first = task(query, 0)
    commit(driver, [first], 0)
    transaction(query, f"{query.topic}-x", ["never"] * 4, "abort_transaction")
    driver, message = task(query, 1)
    if decided:
        decide(driver, message.plan, [message])
    # behind the open transaction, and not to be read before it has ended
    transaction(query, f"{query.topic}-y", ["late"] * 2, "commit_transaction")
    start = reader.initialOffset()
    query.settle()
    middle = reader.latestOffset(start, None)
    before = rows_between(reader, start, middle)
    assert values_of(before) == batch_rows(0)

    [c], [c0] = message.committables, first.committables
    abort_there(servers, c, *[(query.topic, n) for n in range(ended)])
    abort_again(servers, c0)
    assert rows_between(reader, start, middle) == before
    if not decided:
        with pytest.raises(Refused):
            commit(driver, [message], 1)
        driver, message = task(query, 1)
        commit(driver, [message], 1)
    restore(query.start(), 2)
    assert rows_between(reader, start, middle) == before

    query.settle()
    end = reader.latestOffset(middle, None)
    after = rows_between(reader, middle, end)
    assert values_of(after) == sorted([*batch_rows(1), "late", "late"])
    assert reader.latestOffset(end, None) == end
    # a query that begins now reads the same
    whole = rows_between(reader, start, reader.latestOffset(start, None))
    assert whole == sorted(before + after, key=place_of)


def abort_again(servers, c):
    """A marker for a transaction that is committed; its coordinator has raised the epoch."""
    raised = replace(c, state=replace(c.state, epoch=c.state.epoch + 1))
    abort_there(servers, raised)
