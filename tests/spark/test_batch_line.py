"""The line in the log for each batch, and the warning about a batch that takes too long."""

import time
import uuid
from dataclasses import replace

import pytest
from dead_query_fixtures import ROWS, closing, dead  # noqa: F401  (fixtures)

from kafka2pc.operations.progress import find_progress
from kafka2pc.operations.query import Query
from kafka2pc.proof.drills.spark_query import SparkQuery
from kafka2pc.protocol.log.decisions import Decision, Slot
from kafka2pc.protocol.log.slots import MemoryLog
from kafka2pc.protocol.messages import (
    CommitMessage,
    Committable,
    PartitionRange,
    Plan,
    PreparedTxnState,
)
from kafka2pc.protocol.names import new_token
from kafka2pc.protocol.participant import Outcome
from kafka2pc.protocol.phases.commit import commit
from kafka2pc.protocol.policies import retry_unknown
from kafka2pc.spark.sink.batch_line import (
    BatchHistory,
    batch_line,
    count_aborts,
    log_batch,
    warn_if_late,
)

pytestmark = [pytest.mark.kafka, pytest.mark.never_unsteady]


def test_the_line_of_a_batch_counts_what_was_asked_again_and_what_was_swept(dead):
    dead.leave(decided=False)
    planner = replace(dead.run(), history=BatchHistory())
    messages = dead.write(planner)
    answers = iter([Outcome.UNKNOWN] * 2)
    participant = planner.participants["kafka"]
    ends = type(
        "Twice",
        (),
        {
            "name": "kafka",
            "store_id": participant.store_id,
            "describe": participant.describe,
            "in_doubt": participant.in_doubt,
            "abort": participant.abort,
            "commit": lambda self, c: next(answers, None) or participant.commit(c),
        },
    )()
    noted = BatchHistory()
    commit(
        replace(planner.within(retry=retry_unknown), history=noted, participants={"kafka": ends}),
        messages,
        0,
    )
    line = batch_line(
        [replace(m, bytes=100) for m in messages],
        noted.events,
        time.time() * 1000,
        swept=count_aborts(planner.history.events),
    )
    assert (line.query, line.batch, line.mode, line.rows, line.bytes, line.transactions) == (
        dead.id,
        0,
        "write",
        4,
        200,
        2,
    )
    assert (
        line.swept == 2
        and line.retries >= 2
        and line.commit_ms >= 50
        and 0 < line.left_ms < participant.timeout_ms
    )
    assert dead.seen() == ROWS


def test_a_row_that_two_stores_have_counts_once_and_one_without_a_clock_does_not_tell_the_time():
    """Kafka's Committables say when they began, those of a database do not."""
    held = PartitionRange(topic="orders", partition=0, records=4)
    of = lambda name, **more: Committable(
        transactional_id=name,
        participant=name,
        state=PreparedTxnState(1, 0),
        partitions=(held,),
        **more,
    )
    in_kafka, in_table = of("kafka", started_ms=5_000), of("postgres")
    plan = Plan(query_id="q", batch_id=7, attempt=0, token=new_token(7, 0))
    line = lambda *cs: batch_line([CommitMessage(plan=plan, committables=cs)], [], 6_000)
    both = line(in_kafka, in_table)
    assert (both.rows, both.transactions, both.precommit_ms) == (4, 2, 1_000)
    assert " precommit_ms=- " in str(line(in_table))
    log = MemoryLog()
    slot, cs = Slot(7, 0), (in_kafka, in_table)
    log.create(Decision(query_id="q", slot=slot, commit=True, token=plan.token, committables=cs))
    [progress] = find_progress(Query(place="/data/orders", query_id="q", log=log))
    assert (progress.rows, progress.transactions) == (4, 2)


def test_a_late_batch_is_reported_in_four_parts_and_once_for_each_query(caplog):
    plan_of = lambda query: Plan(query_id=query, batch_id=7, attempt=0, token=new_token(7, 0))
    slow = Committable(transactional_id="x", state=PreparedTxnState(1, 0), timeout_ms=1000)
    late = lambda query: [CommitMessage(plan=plan_of(query), committables=(slow,))]
    first, second, third = (str(uuid.uuid4()) for _ in range(3))
    assert warn_if_late(late(first), 499) is None and "batch 7" not in caplog.text
    for query in (first, first, second):
        said = warn_if_late(late(query), 501)
        assert f"batch 7 of query {query} has used 501 of the 1000 ms" in said
        assert all(
            part in said for part in ("why: ", "is data at risk: ", "what to do: Make batches")
        )
    # a thread of an earlier test may log something, too
    warned = [r.message for r in caplog.records if "batch 7" in r.message]
    assert [first in message or second in message for message in warned] == [True, True]
    assert warn_if_late([CommitMessage(plan=plan_of(first))], 10**9) is None, (
        "an empty batch is never late"
    )
    log_batch(late(third), BatchHistory())
    assert any(third in r.message for r in caplog.records), "the committer asks"


@pytest.mark.spark
@pytest.mark.full
def test_under_spark_every_batch_has_its_line_on_standard_error_if_that_is_asked_for(
    jobs, kafka, tmp_path, monkeypatch
):
    monkeypatch.setenv("KAFKA2PC_LOG", "1")
    with SparkQuery(jobs("lines"), kafka, tmp_path) as spark_query:
        spark_query.feed(2)
        spark_query.run()
        said = spark_query.job.log_end(10**6)
        spark_query.job.ask(
            "write",
            source=str(spark_query.source),
            options=spark_query.options(checkpointLocation=None),
        )
        more = spark_query.job.log_end(10**6).removeprefix(said)
        spark_query.job.stop()
    first, second, third = (
        dict(pair.split("=") for pair in line.split())
        for line in (said + more).splitlines()
        if line.startswith("query=")
    )
    read = lambda line: [line[k] for k in ("batch", "mode", "rows", "transactions", "swept")]
    assert [read(line) for line in (first, second)] == [[n, "write", "40", "2", "0"] for n in "01"]
    assert first["query"] == second["query"] != third["query"] and (
        third["batch"],
        third["rows"],
    ) == ("0", "80")
    assert all(
        int(line["bytes"]) > 40 and int(line["commit_ms"]) > 0 for line in (first, second, third)
    )
