"""A driver is killed after each step of a commit, its transactions time out, and the next one is
killed after each step of the repair: on a real broker, each row is there once.
"""

import uuid
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict

import pyarrow as pa
import pytest
from confluent_kafka import TopicPartition
from confluent_kafka.admin import AdminClient
from kafka_fixtures import records
from killed_driver import Killed, Watch

from kafka2pc.kafka.cluster_check import check
from kafka2pc.kafka.participant import KafkaParticipant
from kafka2pc.proof.child_process import until
from kafka2pc.protocol.driver import Driver
from kafka2pc.protocol.errors import LostTransaction, PrecommitFailed, Refused, Superseded
from kafka2pc.protocol.history import History
from kafka2pc.protocol.log.slots import MemoryLog
from kafka2pc.protocol.phases.commit import commit
from kafka2pc.protocol.phases.precommit import precommit
from kafka2pc.protocol.phases.restore import restore
from kafka2pc.protocol.policies import retry_unknown
from kafka2pc.stores.postgres import PostgresParticipant

pytestmark = [pytest.mark.kafka, pytest.mark.never_unsteady]

TASKS, ROWS = 3, 4
TIMEOUT_MS = 1_000
EACH_ROW = sorted(str(n).encode() for n in range(TASKS * ROWS))


class Query:
    """A query of one batch with three tasks, and its topic. Each start has a new driver."""

    def __init__(self, kafka, timeout_ms=TIMEOUT_MS):
        self.kafka = kafka
        self.topic = f"repair-{uuid.uuid4().hex[:8]}"
        kafka.create_topic(self.topic, 2)
        self.id, self.log = str(uuid.uuid4()), MemoryLog()
        facts = asdict(check(kafka.client_conf, topics=[self.topic], prefix=self.topic))
        facts |= {"timeout_ms": timeout_ms}
        self.store = KafkaParticipant(
            kafka.client_conf, topic=self.topic, prefix=self.topic, **facts
        )

        self.stores = {"kafka": self.store}
        self.limits = {"retry": retry_unknown}

    def driver(self, watch=None):
        driver = Driver(
            query_id=self.id,
            log=self.log,
            participants=self.stores,
            history=History(watcher=watch) if watch else History(),
        )
        return driver.within(**self.limits)

    def task(self, plan, task):
        rows = [str(n).encode() for n in range(task, TASKS * ROWS, TASKS)]
        return precommit(
            list(self.stores.values()), plan, [pa.RecordBatch.from_pydict({"value": rows})]
        )

    def start(self, watch=None):
        """One run of the batch. True: to its end; False: it was killed."""
        driver = self.driver(watch)
        try:
            plan = restore(driver, 0, offsets_hash="offsets 0")
            commit(driver, [self.task(plan, n) for n in range(TASKS)], 0)
        except Killed:
            return False
        return True

    def kinds(self):
        return [d.kind for d in self.log.chain(0)]

    def timed_out(self):
        return not self.store.in_doubt(self.id)

    def rows(self):
        return sorted(m.value() for m in records(self.kafka, self.topic))


DECIDED, JUDGED = ("ok", "decide"), ("invoke", "verify")
# with three transactions: what a driver does behind its decision
STEPS = ["ok decide", "invoke finish", *["invoke commit", "ok commit"] * TASKS, "ok finish"]


@pytest.fixture
def query_of(kafka):
    """Makes queries; at the end no transaction of theirs is open on the shared broker."""
    made = []

    def make(number):
        made.extend(Query(kafka) for _ in range(number))
        return made[-number:]

    yield make
    for query in made:
        for c in query.store.in_doubt(query.id):
            query.store.abort(c)
    made[0].store.close()


def wait_for_timeouts(queries):
    until(lambda: all(q.timed_out() for q in queries), "the timeouts", 60)


def test_killed_at_any_step_behind_the_decision_and_started_after_the_timeout(query_of):
    queries = query_of(len(STEPS))
    for n, query in enumerate(queries, 1):
        assert not query.start(Watch(DECIDED, n))
    wait_for_timeouts(queries)
    for query in queries:
        assert query.start()
    assert [query.rows() for query in queries] == [EACH_ROW] * len(queries)
    committed = [STEPS[:n].count("ok commit") for n in range(1, len(STEPS) + 1)]
    reopened = ["ABORT", "COMMIT", "LOST", "ABORT", "COMMIT"]
    salvaged = ["ABORT", "COMMIT", "CLAIM", "REPAIR"]
    kinds = {0: reopened, TASKS: ["ABORT", "COMMIT"]}
    assert [query.kinds() for query in queries] == [kinds.get(n, salvaged) for n in committed]


@pytest.mark.parametrize("first", [1, STEPS.index("ok commit") + 1], ids=["reopened", "salvaged"])
def test_the_repair_is_killed_at_any_step_and_repeated_after_another_timeout(query_of, first):
    [whole] = query_of(1)
    assert not whole.start(Watch(DECIDED, first))
    wait_for_timeouts([whole])
    assert whole.start(steps := Watch(JUDGED))
    queries = query_of(len(steps.events))
    for query in queries:
        assert not query.start(Watch(DECIDED, first))
    wait_for_timeouts(queries)
    for n, query in enumerate(queries, 1):
        assert not query.start(Watch(JUDGED, n)), (n, steps.events)
    wait_for_timeouts(queries)
    for n, query in enumerate(queries):
        assert query.start()
        assert query.rows() == EACH_ROW, (steps.events[n], query.kinds())
        assert query.timed_out(), "a transaction stays open"


@pytest.mark.parametrize("first", [1, STEPS.index("ok commit") + 1], ids=["reopened", "salvaged"])
def test_two_drivers_repair_at_once(query_of, first):
    queries = query_of(6)
    for query in queries:
        assert not query.start(Watch(DECIDED, first))
    wait_for_timeouts(queries)
    ended = []

    def start(query):
        try:
            ended.append(query.start())
        except (Superseded, Refused, PrecommitFailed) as e:  # the other one was first
            ended.append(e)

    with ThreadPoolExecutor(12) as pool:
        for query in queries * 2:
            pool.submit(start, query)
    assert len(ended) == 12, "another error"
    for query in queries:
        assert query.start()
    assert [query.rows() for query in queries] == [EACH_ROW] * 6, ended


@pytest.mark.full
def test_kafka_is_lost_and_the_database_is_committed(query_of, postgres):
    """A replay would write the rows of the table twice."""
    [query] = query_of(1)
    table = query.topic.replace("-", "_")
    query.stores = {"table": PostgresParticipant(postgres.url, table, name="table")} | query.stores
    query.limits["in_order"] = True
    postgres.execute(f"create table {table} (value bytea)")
    in_table = lambda: sorted(v for (v,) in postgres.execute(f"select value from {table}"))
    behind_the_table = STEPS[: 2 + 2 * TASKS]
    assert not query.start(Watch(DECIDED, len(behind_the_table)))
    wait_for_timeouts([query])
    assert (in_table(), query.rows()) == (EACH_ROW, [])
    assert query.start()
    assert (in_table(), query.rows()) == (EACH_ROW, EACH_ROW)
    assert query.kinds() == ["ABORT", "COMMIT", "CLAIM", "REPAIR"]


def test_rows_that_the_topic_does_not_have_any_more_are_reported(query_of, kafka):
    """A part is committed, so Spark's replay cannot help."""
    [query] = query_of(1)
    assert not query.start(Watch(DECIDED, STEPS.index("ok commit") + 1))
    wait_for_timeouts([query])
    before = query.rows()
    admin = AdminClient(kafka.client_conf)
    everything = [TopicPartition(query.topic, p, -1) for p in range(2)]
    for future in admin.delete_records(everything).values():
        future.result(30)
    for _ in range(2):
        with pytest.raises(LostTransaction, match=f"gone are offsets .* of {query.topic}-0"):
            query.start()
    assert len(before) == ROWS and query.timed_out()
    assert query.kinds() == ["ABORT", "COMMIT"], "a claim of each start"
