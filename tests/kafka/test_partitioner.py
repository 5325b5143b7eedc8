"""Keys of any lengths get the hash that Java's client gives them, and mixed lengths cost no more
than their bytes.
"""

import random

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kafka2pc.kafka.records import partitioner
from kafka2pc.kafka.records.partitioner import murmur2

KEYS = 20_000  # more than are hashed together
MASK = 0xFFFFFFFF


def java_murmur2(data: bytes) -> int:
    """org.apache.kafka.common.utils.Utils.murmur2, line by line, without numpy."""
    m, r, length = 0x5BD1E995, 24, len(data)
    h = 0x9747B28C ^ length
    for i in range(length // 4):
        k = int.from_bytes(data[4 * i : 4 * i + 4], "little")
        k = k * m & MASK
        k ^= k >> r
        k = k * m & MASK
        h = h * m & MASK
        h ^= k
    rest = length & ~3
    if length % 4 == 3:
        h ^= data[rest + 2] << 16
    if length % 4 >= 2:
        h ^= data[rest + 1] << 8
    if length % 4 >= 1:
        h ^= data[rest]
        h = h * m & MASK
    h ^= h >> 13
    h = h * m & MASK
    h ^= h >> 15
    return h - (1 << 32) if h >> 31 else h


def column(keys):
    return pa.array(keys, pa.large_binary())


def random_keys(count, shortest, longest, seed=1):
    dice = random.Random(seed)
    return [dice.randbytes(dice.randint(shortest, longest)) for _ in range(count)]


def test_the_reference_agrees_with_kafkas_own_test():
    known = {b"21": -973932308, b"foobar": -790332482, b"abc": 479470107}
    assert {key: java_murmur2(key) for key in known} == known


@pytest.mark.parametrize(
    "keys",
    [
        [],
        [b""],
        [None],
        [b"", None, b""],
        [b"k"],
        random_keys(1, 1 << 18, 1 << 18),
        random_keys(KEYS, 0, 7),
        random_keys(KEYS, 8, 8),
        random_keys(KEYS, 37, 37),
        random_keys(KEYS, 20, 300),
        [*random_keys(300, 0, 40), *random_keys(66, 500, 700), *random_keys(2, 300_000, 300_003)],
        [k if n % 3 else None for n, k in enumerate(random_keys(1000, 0, 90))],
    ],
    ids=lambda keys: f"{len(keys)} keys of up to {max((len(k or b'') for k in keys), default=0)} B",
)
def test_every_mixture_of_lengths_is_hashed_as_java_does(keys):
    assert murmur2(column(keys)).tolist() == [java_murmur2(k or b"") for k in keys]


@given(
    st.lists(st.one_of(st.none(), st.binary(max_size=60)), max_size=40),
    st.integers(0, 5),
    st.integers(1, 9),
    st.integers(0, 9),
    st.integers(1, 9),
    st.integers(0, 99),
)
@settings(max_examples=300, deadline=None)
def test_no_limit_between_the_ways_changes_a_hash(keys, start, few, steps, together, words):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(partitioner, "_FEW", few)
        patch.setattr(partitioner, "_STEPS", steps)
        patch.setattr(partitioner, "_TOGETHER", together)
        patch.setattr(partitioner, "_AT_ONCE", words)
        found = murmur2(column(keys).slice(start))
    assert found.tolist() == [java_murmur2(k or b"") for k in keys[start:]]


def test_bytes_below_a_null_do_not_count():
    offsets = np.array([0, 3, 7, 8, 12], np.int64)
    valid = pa.py_buffer(bytes([0b1101]))
    keys = pa.Array.from_buffers(
        pa.large_binary(), 4, [valid, pa.py_buffer(offsets), pa.py_buffer(b"abcXXXXdefgh")]
    )
    assert murmur2(keys).tolist() == [java_murmur2(k) for k in (b"abc", b"", b"d", b"efgh")]


def steps(monkeypatch, keys):
    """How often numpy is called for a part of the keys."""
    mixed, original = [], partitioner._mix
    monkeypatch.setattr(partitioner, "_mix", lambda words: mixed.append(1) or original(words))
    murmur2(column(keys))
    return len(mixed)


def test_a_step_hashes_a_word_of_all_keys_whatever_their_lengths(monkeypatch):
    """A loop over the lengths took 10,500 steps for these: 25 times as long as for short keys."""
    assert steps(monkeypatch, random_keys(10_000, 20, 300)) <= 300 // 4 + partitioner._FEW


def test_one_very_long_key_costs_the_others_no_step(monkeypatch):
    """A step for each of its words took two seconds."""
    keys = [*random_keys(10_000, 8, 36), *random_keys(1, 1 << 20, 1 << 20)]
    assert steps(monkeypatch, keys) <= partitioner._STEPS + 1
