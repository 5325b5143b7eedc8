"""Histories of the real client on simulated brokers, each from a seed."""

import os
import subprocess
import sys

import pytest

from kafka2pc.proof.simulation.mutants import MUTANTS, SEEDS, found_by
from kafka2pc.proof.simulation.seeds import play, shortest

LOGS = """
from kafka2pc.proof.simulation.producer_histories import producer_history
for seed in range(10):
    print(*producer_history(seed, keep_log=True).log, sep="\\n")
"""


@pytest.mark.parametrize(("kind", "count"), [("producer", 1_000), ("log", 250), ("query", 400)])
def test_each_history_is_exactly_once(kind, count):
    wrong = [seed for seed in range(count) if play(kind, seed).wrong]
    assert not wrong, f"{len(wrong)} seeds; {shortest(kind, wrong[0])}"


def test_each_mutant_is_found_by_its_seed():
    """Another generator has other seeds: `seeds_until_found` names the new ones."""
    survivors = [name for name, m in MUTANTS.items() if not found_by(m, SEEDS[name])]
    assert survivors == []


def test_a_seed_is_the_same_history_in_each_process():
    """Each process orders a set of texts in another way."""
    command = [sys.executable, "-c", LOGS]
    processes = [
        subprocess.Popen(
            command, env=os.environ | {"PYTHONHASHSEED": order}, stdout=subprocess.PIPE, text=True
        )
        for order in ("0", "1")
    ]
    logs = [process.communicate()[0].splitlines() for process in processes]
    assert len(logs[0]) > 1_000
    assert logs[0] == logs[1]
