"""One name, one writer: whatever queries, batches, threads and forks a worker process sees."""

import os
import pickle
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from forked import ended_after

from kafka2pc.protocol import names as of_names
from kafka2pc.protocol.names import Names, Token

ONE, TWO = "11111111-2222-3333-4444-555555555555", "99999999-2222-3333-4444-555555555555"
TOKEN = Token(0, 1, "5f3a09c1")


def next_of(names, query=ONE, batch_id=0):
    return names.next("kafka2pc", query, TOKEN, batch_id)


def test_the_tasks_of_two_queries_may_take_turns_in_one_process():
    names = Names()
    made = [next_of(names, query) for query in (ONE, TWO, ONE, TWO)]
    assert len(set(made)) == 4


@pytest.mark.parametrize("batches", [(0, 1, 0), (0, 2, 0), (2, 0, 2)])
def test_two_batches_may_take_turns_too(batches):
    names = Names()
    made = [next_of(names, batch_id=batch_id) for batch_id in batches]
    assert made[0] != made[2]


def test_a_later_batch_takes_the_same_names_whatever_another_query_does():
    names = Names()
    first = [next_of(names), next_of(names, TWO, 4), next_of(names)]
    assert [next_of(names, batch_id=2), next_of(names, batch_id=2)] == [first[0], first[2]]


class Slow(dict):
    """Another thread gets its turn after each look."""

    def get(self, key, default):
        found = super().get(key, default)
        time.sleep(0.001)
        return found


def test_threads_never_get_the_same_name():
    names = Names()
    names._mine.counters = Slow()
    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(lambda n: next_of(names, (ONE, TWO)[n % 2]), range(32)))
    assert len(set(made)) == 32


def test_a_fork_has_names_of_its_own_even_while_another_thread_asks():
    names = Names()
    first = next_of(names)
    with names._mine.lock:  # as another thread would hold it
        read, write = os.pipe()
        child = os.fork()
        if not child:
            with ended_after(20):
                os.write(write, next_of(names).encode())
        assert os.waitpid(child, 0)[1] == 0
    assert os.read(read, 1000).decode() not in (first, next_of(names))


def test_what_is_kept_has_a_limit_and_no_name_comes_back(monkeypatch):
    monkeypatch.setattr(of_names, "_CLAIMS", 5)
    names = Names()
    queries = [f"{n:08x}{ONE[8:]}" for n in range(100)]
    made = [next_of(names, query) for query in queries * 2]
    assert len(set(made)) == 200
    assert len(names._mine.counters) <= 11


def test_a_pickled_copy_has_names_of_its_own():
    names = Names()
    assert next_of(pickle.loads(pickle.dumps(names))) != next_of(names)
