"""A query with a gate, and a reader of its topic that is there all the time."""

import threading
import uuid
from collections import defaultdict
from dataclasses import asdict, replace
from functools import partial

import pyarrow as pa
from kafka.protocol.consumer.fetch import FetchRequest
from killed_driver import Killed

from kafka2pc.kafka.cluster_check import check
from kafka2pc.kafka.participant import KafkaParticipant
from kafka2pc.kafka.read.whole_topic import read_ended
from kafka2pc.kafka.records.decoder import split
from kafka2pc.kafka.transaction_states import ENDING
from kafka2pc.kafka.wire.cluster import Cluster
from kafka2pc.kafka.wire.descriptions import list_transactions
from kafka2pc.kafka.wire.offsets import LATEST, list_offsets
from kafka2pc.kafka.wire.topics import find_leaders
from kafka2pc.proof.child_process import until
from kafka2pc.protocol.driver import Driver
from kafka2pc.protocol.history import History
from kafka2pc.protocol.log.slots import MemoryLog
from kafka2pc.protocol.messages import CommitMessage, Mode
from kafka2pc.protocol.phases.commit import commit
from kafka2pc.protocol.phases.precommit import flush_and_precommit, precommit
from kafka2pc.protocol.phases.restore import restore
from kafka2pc.protocol.policies import retry_unknown

TASKS, PARTITIONS = 3, 3
SOON = partial(retry_unknown, 600, total_ms=60_000, first_ms=2, longest_ms=100)


class Reader(threading.Thread):
    """Asks for the last stable offset of all partitions of its topics in one request, again and
    again: a `read_committed` reader sees what is before it. `polls`: each answer, and whether no
    transaction of the prefix was ending after the answer before.
    """

    def __init__(self, kafka, topics, prefix):
        super().__init__(daemon=True)
        self.topics, self.prefix = topics, prefix
        self.polls, self.failure, self._over = [], None, threading.Event()
        # a connection of its own
        self.cluster = Cluster(kafka.client_conf | {"client.id": f"reader-{prefix}"})
        self.leaders = find_leaders(self.cluster, topics)

    def __enter__(self):
        self.start()
        return self

    def __exit__(self, *_):
        self.stop()

    def stop(self):
        self._over.set()
        self.join(30)
        self.cluster.close()

    def run(self):
        try:
            while not self._over.is_set():
                at_rest = not list_transactions(self.cluster, self.prefix, ENDING)
                found = list_offsets(self.cluster, self.leaders, LATEST, committed=True)
                self.polls.append((at_rest, {part: row.offset for part, row in found.items()}))
        except Exception as e:
            self.failure = e

    def look(self):
        """Return when it has looked twice, with everything at rest."""
        first = len(self.polls) + 1
        looked = lambda: self.failure or sum(rest for rest, _ in self.polls[first:]) >= 2
        until(looked, "the reader looks", 30)
        assert self.failure is None

    def parts(self, rows):
        """The polls that show a part of these rows, ((topic, partition), offset), although nothing
        was ending since the poll before, which showed a part, too. (A Kafka transaction reaches
        its partitions one after the other: a part may be seen while it ends.)
        """
        torn, before = [], False
        for n, (at_rest, ends) in enumerate(self.polls):
            seen = sum(offset < ends[part] for part, offset in rows)
            part = 0 < seen < len(rows)
            if part and before and at_rest:
                torn.append((n, seen))
            before = part
        return torn


class GatedQuery:
    """A query whose batches have a gate, and three tasks of three rows: one in each partition.
    The last task has two tries; the first of them wrote its rows, and died: these are between the
    rows of the other tasks and its own (`tries` 1: it has one). Each start has a new driver.
    `gate_ms`: the timeout of the gate, if it has one of its own; `how`: of the store.
    """

    partitions = PARTITIONS

    def __init__(self, kafka, topic, prefix, two_phase="off", tries=2, gate_ms=None, **how):
        self.id, self.log, self.topic = str(uuid.uuid4()), MemoryLog(), topic
        self.tries, self.gate_ms = tries, gate_ms
        facts = asdict(check(kafka.client_conf, topics=[topic], prefix=prefix, two_phase=two_phase))
        facts |= dict(topic=topic, prefix=prefix, gated=(topic,)) | how
        self.store = KafkaParticipant(kafka.client_conf, **facts)
        self.stores = {"kafka": self.store}

    def driver(self, watch=None):
        history = History(watcher=watch)
        return Driver(
            query_id=self.id, log=self.log, participants=self.stores, history=history
        ).within(retry=retry_unknown, retry_end=SOON)

    def rows(self, batch_id, task):
        """A row for each partition."""
        values = [f"{self.id} {batch_id} {task} {n}" for n in range(self.partitions)]
        numbers = pa.array(range(self.partitions), pa.int32())
        return pa.record_batch({"value": values, "partition": numbers})

    def begun(self, plan, task):
        """A transaction with the rows of a task. Nothing ends it when its process dies."""
        txn = self.store.begin(replace(plan, task=task))
        txn.write(self.rows(plan.batch_id, task))
        return txn

    def task(self, driver, plan, task):
        if plan.mode is Mode.DRAIN:
            return precommit([self.store], plan, [self.rows(plan.batch_id, task)])
        if task == TASKS - 1 and self.tries == 2:
            self.begun(plan, task).flush()
        txn = self.begun(plan, task)
        c = flush_and_precommit(txn, driver.history, batch_id=plan.batch_id)
        return CommitMessage(plan=plan, committables=(c,), rows=self.partitions)

    def planned(self, driver, batch_id=0, mine=None):
        """The messages of all tasks of a batch, and its plan."""
        timeout_ms = self.store.timeout_ms
        self.store.timeout_ms = self.gate_ms or timeout_ms
        plan = restore(driver, batch_id, offsets_hash=f"offsets {batch_id}", mine=mine)
        self.store.timeout_ms = timeout_ms
        return [self.task(driver, plan, n) for n in range(TASKS)], plan

    def start(self, watch=None, batches=1):
        """One run, of the batches from the newest in the log on, below `batches`. True: to its end;
        False: it was killed.
        """
        driver, mine = self.driver(watch), None
        try:
            for batch_id in range(max(self.log.batches(), default=0), batches):
                messages, plan = self.planned(driver, batch_id, mine)
                commit(driver, messages, batch_id)
                assert self.open().open == [], "what hides the batch"
                mine = plan.token if plan.mode is Mode.WRITE else None
        except Killed:
            return False
        return True

    def kinds(self, batch_id=0):
        return [d.kind for d in self.log.chain(batch_id)]

    def open(self):
        return self.store.unended(self.id)


def rows_by_batch(kafka, topic):
    """(query id, batch) -> ((topic, partition), offset) of its rows, as a `read_committed` reader
    finds them; and all values.
    """
    found = defaultdict(list)
    values = []
    for r in read_ended(kafka.client_conf, topic):
        query_id, batch_id, *_ = r.value.decode().split()
        found[query_id, int(batch_id)].append(((r.topic, r.partition), r.offset))
        values.append(r.value.decode())
    return found, values


def transactions(cluster, topic):
    """((topic, partition), producer id, epoch) -> (offset of its first record, of its marker), of
    each transaction in the topic that has ended.
    """
    field = FetchRequest.FetchTopic.FetchPartition
    leaders = find_leaders(cluster, [topic])
    parts = [
        field(partition=p, fetch_offset=0, partition_max_bytes=4 << 20) for _, p in sorted(leaders)
    ]
    request = FetchRequest(
        max_wait_ms=0,
        min_bytes=0,
        max_bytes=16 << 20,
        rack_id="",
        isolation_level=0,
        topics=[FetchRequest.FetchTopic(topic=topic, partitions=parts)],
        min_version=4,
        max_version=12,
    )
    (node,) = set(leaders.values())
    ended, begun = {}, {}
    for answer in cluster.ask(request, node).responses[0].partitions:
        for batch in split(answer.records or b""):
            who = (topic, answer.partition_index), batch.producer_id
            if not batch.control:
                begun.setdefault(who, (batch.epoch, batch.offset))
            elif who in begun:
                epoch, first = begun.pop(who)
                ended[*who, epoch] = first, batch.offset
    return ended


def hiding(found, rows):
    """(producer id, epoch) of the transactions that hide all these rows, ((topic, partition),
    offset), until each of them can be read: in each partition it began before the first row, and
    ended behind all others that began before the last. `found`: see `transactions`.
    """
    by_part = []
    for part in {part for part, _ in rows}:
        own = [offset for other, offset in rows if other == part]
        there = {t: ends for t, ends in found.items() if t[0] == part and ends[0] <= max(own)}
        last = max(there, key=lambda t: there[t][1])
        by_part.append({last[1:]} if there[last][0] < min(own) else set())
    return set.intersection(*by_part)
