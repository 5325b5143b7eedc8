"""Histories of the real client on simulated brokers, each from a seed."""

import os
import struct
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import google_crc32c
import pyarrow as pa
import pytest

from kafka2pc.kafka.aborted_rows import copy_rows
from kafka2pc.proof.simulation.brokers import Brokers
from kafka2pc.proof.simulation.mutants import MUTANTS, SEEDS, found_by
from kafka2pc.proof.simulation.network import Network
from kafka2pc.proof.simulation.partition_log import remove_before
from kafka2pc.proof.simulation.producer_histories import SimulatedKafka, rows_in
from kafka2pc.proof.simulation.query_histories import query_history
from kafka2pc.proof.simulation.rules_off import FIRST_SEEDS, QUERY_MUTANTS
from kafka2pc.proof.simulation.seeds import play, shortest
from kafka2pc.proof.simulation.trouble import chances_of
from kafka2pc.proof.simulation.virtual_clock import VirtualClock
from kafka2pc.protocol.errors import BrokerUnreachable
from kafka2pc.protocol.messages import Plan
from kafka2pc.protocol.names import Token
from kafka2pc.protocol.participant import RowsMissing
from kafka2pc.protocol.policies import retry_unknown
from kafka2pc.protocol.states import TxnState

pytestmark = pytest.mark.never_unsteady

LOGS = """
from kafka2pc.proof.simulation.seeds import play
for kind, seeds in ("producer", range(10)), ("query", (8, 34)):
    for seed in seeds:
        print(*play(kind, seed, keep_log=True).log, sep="\\n")
"""


@pytest.mark.parametrize(("kind", "count"), [("producer", 1_000), ("log", 250), ("query", 400)])
def test_each_history_is_exactly_once(kind, count):
    wrong = [seed for seed in range(count) if play(kind, seed).wrong]
    assert not wrong, f"{len(wrong)} seeds; {shortest(kind, wrong[0])}"


def test_each_mutant_is_found_by_its_seed():
    """Another generator has other seeds: `seeds_until_found` names the new ones."""
    survivors = [name for name, m in MUTANTS.items() if not found_by(m, SEEDS[name])]
    assert survivors == []


def test_each_rule_that_is_off_and_each_fault_put_back_is_found_by_its_seed():
    """Another generator has other seeds: `make first-seeds` writes the new ones."""
    shown = {
        name: found_by(QUERY_MUTANTS[name], n, query_history) for name, n in FIRST_SEEDS.items()
    }
    assert [name for name, text in shown.items() if not text] == []
    every_kind = ("duplicate", "lost", "is open at", "the last run", "are there", "torn", "late:")
    assert [kind for kind in every_kind if not any(kind in t for t in shown.values())] == []


def test_a_seed_that_goes_wrong_is_a_story():
    with QUERY_MUTANTS["sweep"].planted():
        text = str(shortest("query", FIRST_SEEDS["sweep"]))
    for words in ("begins to plan batch 0", "has written task 0", "is open at", "drill --hist"):
        assert words in text, text


def test_a_seed_is_the_same_history_in_each_process():
    """Each process orders a set of texts in another way."""
    command = [sys.executable, "-c", LOGS]
    processes = [
        subprocess.Popen(
            command, env=os.environ | {"PYTHONHASHSEED": order}, stdout=subprocess.PIPE, text=True
        )
        for order in ("1", "3")
    ]
    logs = [process.communicate()[0].splitlines() for process in processes]
    assert len(logs[0]) > 1_000
    assert logs[0] == logs[1]


# -- rows of aborted transactions, written again --

PLAN = Plan(
    query_id="11111111-2222-3333-4444-555555555555",
    batch_id=0,
    attempt=1,
    token=Token(0, 1, "0" * 8),
)


class Lost:
    """A cluster with 270 rows in three transactions, two of which were aborted."""

    def __init__(self, seed, errors=0):
        self.clock = VirtualClock(seed)
        self.brokers = Brokers(self.clock, 3, bumps=seed % 2 == 0)
        self.brokers.create("t", 3)
        self.brokers.weather.errors = errors
        conf = {"batch.size": "300"}
        self.store = SimulatedKafka(Network(self.brokers), "t", **conf)
        open_now = [self.store.begin(PLAN) for _ in range(3)]
        for n in range(0, 270, 10):
            txn = open_now[self.clock.dice.randrange(3) if n > 20 else n // 10]
            txn.write(self.rows(range(n, n + 10)))
            if self.clock.dice.random() < 0.5:
                txn.flush()
        for txn in open_now:
            txn.flush()
        kept, *self.lost = (txn.precommit() for txn in open_now)
        self.end(kept, "commit")
        for c in self.lost:
            self.end(c, "abort")

    def rows(self, numbers):
        partitions = [self.clock.dice.randrange(3) for _ in numbers]
        columns = {
            "value": [str(n) for n in numbers],
            "partition": pa.array(partitions, pa.int32()),
        }
        return pa.record_batch(columns)

    def end(self, c, verb):
        retry_unknown(100, total_ms=600_000, clock=self.clock)(lambda: getattr(self.store, verb)(c))
        self.clock.sleep(1)

    def seen(self, only_committed=True):
        logs = self.brokers.topics["t"].partitions
        return [[n for _, n in rows_in(log, only_committed=only_committed)] for log in logs]

    def compact_one(self, partition):
        """Remove a record from a batch of this partition."""
        ours = {(c.state.producer_id, c.state.epoch) for c in self.lost}
        entries = self.brokers.log(("t", partition)).entries
        entry = next(e for e in entries if (e.producer_id, e.epoch) in ours and e.marker is None)
        content = bytearray(entry.content)
        (count,) = struct.unpack_from(">i", content, 57)
        struct.pack_into(">i", content, 57, count - 1)
        struct.pack_into(">I", content, 17, google_crc32c.value(bytes(content[21:])))
        entry.content = bytes(content)
        return count

    def check_missing(self, why):
        """Returns the partitions in which rows are missing."""
        before = self.seen()
        with pytest.raises(RowsMissing) as caught:
            self.store.write_again(self.lost, PLAN)
        places = [gone for found in caught.value.gone.values() for gone in found]
        assert all(why in gone.why for gone in places)
        assert self.seen() == before and self.store.in_doubt(PLAN.query_id) == []
        return {gone.partition for gone in places}


def forgotten(c):
    return replace(c, transactional_id="forgotten")


@pytest.mark.parametrize("seed", range(20))
def test_aborted_rows_are_written_again_while_requests_fail(seed):
    with chances_of(seed):
        world = Lost(seed, errors=20)
        kept, written = world.seen(), world.seen(only_committed=False)
        copy = world.store.write_again(world.lost, PLAN)
        ended = [TxnState.ABORTED, TxnState.ABORTED]
        all_of_them = [*map(forgotten, [*world.lost, copy])]
        # behind an open transaction nothing is proven
        found = world.store.final([*all_of_them, copy])
        assert list(found.values()) == [*ended, None, None]
        world.end(copy, "commit")
        found = world.store.final(all_of_them)
        assert list(found.values()) == [*ended, TxnState.COMMITTED]
    assert sorted(n for numbers in written for n in numbers) == list(range(270))
    assert world.seen() == [
        here + [n for n in numbers if n not in here]
        for here, numbers in zip(kept, written, strict=True)
    ]


def test_rows_that_are_not_there_are_never_taken_for_an_outage_nor_an_outage_for_a_loss():
    world = Lost(1)
    [first, *_] = [p.first_offset for c in world.lost for p in c.partitions if p.partition == 1]
    remove_before(world.brokers.log(("t", 1)), first + 1)
    assert world.check_missing("retention") == {1}
    world = Lost(1)
    count = world.compact_one(2)
    assert world.check_missing("compaction") == {2}
    taken = []
    with pytest.raises(RowsMissing):
        copy_rows(world.store.cluster, world.lost, SimpleNamespace(write_section=taken.append))
    # a batch with a gap is not taken
    assert sum(s.count for s in taken) == sum(c.records for c in world.lost) - count
    world.brokers.create("t", 3)
    assert world.check_missing("created again") == {0, 1, 2}
    del world.brokers.topics["t"]
    lost = [replace(c, topic_ids=()) for c in world.lost]
    with pytest.raises(RowsMissing, match="Topic t was deleted"):
        world.store.write_again(lost, PLAN)
    world = Lost(1)
    world.brokers.down.add(world.brokers.log(("t", 1)).leader)
    with pytest.raises(BrokerUnreachable):
        world.store.write_again(world.lost, PLAN)
