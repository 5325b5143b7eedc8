"""Rows that are removed while their transaction is open: refused before the decision, lost after
it; and what only looks like that is no loss.
"""

import logging
import time
import uuid
from collections import Counter
from dataclasses import replace
from datetime import UTC, datetime
from types import SimpleNamespace

import pyarrow as pa
import pytest
from confluent_kafka import Producer
from hurried import Hurried
from one_task_query import ROWS, Query, new_query  # noqa: F401  (the fixture)

from kafka2pc.kafka import rows_gone
from kafka2pc.kafka.wire.cluster import Cluster
from kafka2pc.kafka.wire.error_codes import (
    TOPIC_AUTHORIZATION_FAILED,
    UNKNOWN_TOPIC_OR_PARTITION,
)
from kafka2pc.kafka.wire.topics import topic_rows
from kafka2pc.local.broker import LocalKafka
from kafka2pc.proof.child_process import until
from kafka2pc.protocol.clock import CLOCK
from kafka2pc.protocol.errors import LostTransaction, Refused
from kafka2pc.protocol.messages import Mode
from kafka2pc.protocol.phases.commit import commit
from kafka2pc.protocol.phases.precommit import precommit
from kafka2pc.protocol.phases.restore import restore

pytestmark = [pytest.mark.kafka, pytest.mark.never_unsteady]
ENGINES = pytest.mark.parametrize("engine", ["columnar", "rows"])


def finish(query, **policy):
    return restore(query.start(**policy), 0)


@ENGINES
def test_removed_before_the_decision_is_refused_and_the_replay_writes_it_again(new_query, engine):
    query = new_query(engine=engine, **{"retention.ms": 604_800_000})
    first = datetime(2019, 1, 1, tzinfo=UTC)
    query.columns = {"timestamp": [datetime.now(UTC), first, *[datetime.now(UTC)] * 4]}
    driver, message = query.precommitted()
    query.remove(4)
    with pytest.raises(Refused) as caught:
        commit(driver, [message], 0)
    assert f"gone are offsets 0 to 3 of {query.topic}-0; the batch has 6 rows" in caught.value.what
    assert caught.value.what.endswith("; its oldest row has the timestamp 2019-01-01T00:00:00Z")
    assert "retention.ms=604800000" in caught.value.why and caught.value.risk.startswith("No.")
    assert caught.value.why.endswith(" The topic keeps rows for 7 days (retention.ms).")
    assert "maxOffsetsPerTrigger" in caught.value.action
    assert query.run() is Mode.WRITE
    assert query.seen() == ROWS, "the replay"


def test_removed_after_the_decision_is_lost_with_its_offsets_until_losses_are_skipped(new_query):
    query = new_query()
    query.decided()
    query.remove(4)
    for _ in range(2):
        with pytest.raises(LostTransaction) as caught:
            finish(query)
        assert f"gone are offsets 0 to 3 of {query.topic}-0" in caught.value.what
        assert "retention" in caught.value.why and caught.value.risk.startswith("YES")
    assert finish(query, lost_transactions="skip").mode is Mode.DRAIN
    assert query.seen() == ROWS[4:], "the rest"
    assert finish(query).mode is Mode.DRAIN, "it is committed now"


@pytest.mark.full
def test_retention_during_an_outage_is_noticed():
    """A decided batch waits, and its topic keeps records for a second."""
    config = {
        "log.retention.check.interval.ms": 200,
        "log.initial.task.delay.ms": 200,
        "log.segment.delete.delay.ms": 100,
    }
    with LocalKafka(config=config, progress=None) as kafka:
        query = Query(kafka, **{"retention.ms": 1_000, "segment.ms": 500})
        query.decided()
        writer = Producer(kafka.client_conf)

        def is_gone():
            writer.produce(query.topic, b"of another program")
            writer.flush()
            return any(query.store.gone(query.log.listing().chain(0)[-1].committables))

        until(is_gone, "retention", 60)
        with pytest.raises(LostTransaction, match="gone are offsets 0 to 5"):
            finish(query)
        query.store.close()


@pytest.mark.parametrize(
    ("engine", "by_column"),
    [
        ("columnar", True),
        ("rows", False),
        pytest.param("columnar", False, marks=pytest.mark.full),
        pytest.param("rows", True, marks=pytest.mark.full),
    ],
)
def test_a_topic_created_again_before_the_decision_is_refused(new_query, engine, by_column):
    query = new_query(engine=engine, by_column=by_column)
    driver, message = query.precommitted()
    query.recreate()
    with pytest.raises(Refused) as caught:
        commit(driver, [message], 0)
    assert caught.value.why == f"Topic {query.topic} was deleted and created again."
    assert "timestamp" not in caught.value.what, "the rows have the time of writing"
    assert query.run() is Mode.WRITE
    assert query.seen() == ROWS, "the replay"


@pytest.mark.parametrize("again", [True, False], ids=["created again", "deleted"])
def test_another_topic_after_the_decision_is_a_loss(new_query, again):
    query = new_query()
    query.decided()
    if again:
        query.recreate()
    else:
        query.admin.delete_topics([query.topic])[query.topic].result(30)
    with pytest.raises(LostTransaction) as caught:
        finish(query)
    assert f"gone are offsets 0 to 5 of {query.topic}-0" in caught.value.what
    assert caught.value.why.startswith(f"Topic {query.topic} was deleted")


# -- no loss --


def test_a_committed_batch_may_lose_its_rows_or_its_topic_before_it_is_drained(new_query):
    query = new_query()
    assert query.run() is Mode.WRITE
    assert query.seen() == ROWS, "committed"
    query.remove(6)
    assert query.run() is Mode.DRAIN
    query.recreate()
    assert query.run() is Mode.DRAIN


def test_a_topic_created_again_between_two_batches_is_no_loss(new_query):
    query = new_query()
    query.run()
    query.recreate()
    driver = query.start()
    commit(driver, [query.task(restore(driver, 1), ["next"])], 1)
    assert query.seen() == ["next"], "the next batch"


def test_unknown_offsets_and_an_old_record_prove_nothing(new_query):
    query = new_query()
    _, message = query.precommitted()
    [c] = message.committables
    [p] = c.partitions
    unknown = replace(c, partitions=(replace(p, first_offset=-1, last_offset=-1),))
    query.remove(4)
    assert query.store.gone([c]) != [()] and query.store.gone([unknown]) == [()]
    query.recreate()
    assert query.store.gone([c]) != [()] and query.store.gone([replace(c, topic_ids=())]) == [()]
    query.store.abort(c)


def metadata(name, number, error=0):
    return SimpleNamespace(
        name=name,
        error_code=error,
        topic_id=uuid.UUID(int=number) if number else None,
        partitions=[],
    )


@pytest.mark.parametrize(
    ("answers", "gone"),
    [
        ([7], False),
        ([5, 7], False),  # a broker that is behind
        ([None, None, 7], False),  # one that does not know a new topic yet
        ([5], True),
        ([None], True),
        ([0], False),  # a broker that gives no ids
        ([5, 0], False),
    ],
)
def test_an_id_is_another_one_if_each_answer_of_some_seconds_says_so(monkeypatch, answers, gone):
    rows = [
        metadata("t", n or 0, 0 if n is not None else UNKNOWN_TOPIC_OR_PARTITION) for n in answers
    ]
    left = iter(rows[1:])
    monkeypatch.setattr(rows_gone, "topic_rows", lambda cluster, names: [next(left, rows[-1])])
    cluster = SimpleNamespace(clock=Hurried())
    pair = ("t", str(uuid.UUID(int=7)))
    found = rows_gone._other_topics(cluster, [pair], rows[:1])  # noqa: SLF001
    assert list(found) == ([pair] if gone else [])


def test_what_this_user_may_not_see_is_logged_and_not_judged(monkeypatch, caplog, new_query):
    query = new_query()
    _, message = query.precommitted()
    query.remove(4)
    hidden = [metadata(query.topic, 0, TOPIC_AUTHORIZATION_FAILED)]
    monkeypatch.setattr(rows_gone, "topic_rows", lambda cluster, names: hidden)
    with caplog.at_level(logging.WARNING, "kafka2pc"):
        assert query.store.gone(message.committables) == [()]
    assert f"this user may not DESCRIBE {query.topic}" in caplog.text
    query.store.abort(message.committables[0])


def test_a_partition_whose_leader_does_not_answer_is_logged_and_not_judged(
    monkeypatch, caplog, new_query
):
    query = new_query()
    _, message = query.precommitted()
    query.remove(4)
    cluster = SimpleNamespace(
        timeout_ms=300,
        leaders={},
        unreadable=set(),
        clock=CLOCK,
        ask_each=lambda requests: [],
        highest=lambda request: 0,
        cluster_id="",
    )
    monkeypatch.setattr(
        rows_gone, "topic_rows", lambda _, names: topic_rows(query.store.cluster, names)
    )
    began = time.monotonic()
    with caplog.at_level(logging.WARNING, "kafka2pc"):
        assert rows_gone.rows_gone(cluster, message.committables) == [()]
    assert time.monotonic() - began < 60
    assert f"no leader answered for {query.topic}-0" in caplog.text
    query.store.abort(message.committables[0])


def test_a_former_leader_does_not_count(monkeypatch, new_query):
    query = new_query()
    _, message = query.precommitted()
    query.remove(4)
    place = query.topic, 0
    query.store.cluster.leaders[place] = 99
    all_is_there = {place: SimpleNamespace(error_code=0, offset=0)}
    answers, real = iter([[all_is_there, {}, {}]]), rows_gone.rows_in_order
    monkeypatch.setattr(rows_gone, "rows_in_order", lambda *q: next(answers, None) or real(*q))
    assert query.store.gone(message.committables) != [()]
    assert query.store.cluster.leaders[place] != 99


def test_a_thousand_partitions_are_two_questions(new_query, monkeypatch):
    query = new_query()
    many = f"{query.topic}-many"
    query.kafka.create_topic(many, partitions=1_000)
    query.store.topic = many
    driver = query.start()
    columns = {"value": [str(n) for n in range(1_000)], "partition": pa.array(range(1_000), "i4")}
    plan = restore(driver, 0)
    message = precommit([query.store], plan, [pa.RecordBatch.from_pydict(columns)])
    assert len(message.committables[0].partitions) == 1_000
    sent = Counter()
    ask_each = Cluster.ask_each
    monkeypatch.setattr(
        Cluster,
        "ask_each",
        lambda self, requests: (sent.update(r.name for r, _ in requests), ask_each(self, requests))[
            1
        ],
    )
    assert query.store.gone(message.committables) == [()]
    assert sent == {"ListOffsetsRequest": 1}
    assert query.store.gone(message.committables) == [()]
    assert sent == {"ListOffsetsRequest": 2, "MetadataRequest": 1}, "both at once"
    commit(driver, [message], 0)
