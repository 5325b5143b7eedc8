"""Whole columns become exactly the bytes that a reader of records expects, whatever is in them."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kafka.partitioner import murmur2 as one_murmur2
from kafka.record import MemoryRecords

from kafka2pc.kafka.records import varints as kafka_varints
from kafka2pc.kafka.records.encoder import CODECS, HEADER_BYTES, record_batch, sections
from kafka2pc.kafka.records.partitioner import PIECE, Dealer, murmur2
from kafka2pc.kafka.records.rows import Rows, payload_bytes, rows_of
from kafka2pc.kafka.records.varints import varint_sizes, varints
from kafka2pc.protocol.messages import PreparedTxnState

TEXT = st.one_of(st.none(), st.binary(max_size=300))
HEADERS = st.one_of(
    st.none(),
    st.lists(
        st.tuples(st.text(max_size=5), st.one_of(st.none(), st.binary(max_size=9))), max_size=3
    ),
)
HEADER_TYPE = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
STAMPS = st.integers(0, 2**41)
ROWS = st.lists(st.tuples(TEXT, TEXT, HEADERS, STAMPS, st.integers(0, 3)), min_size=1, max_size=60)


def batch_of(rows):
    keys, values, headers, stamps, _ = zip(*rows, strict=True)
    headers = [h and [{"key": k, "value": v} for k, v in h] for h in headers]
    return pa.RecordBatch.from_pydict(
        {
            "key": pa.array(keys, pa.binary()),
            "value": pa.array(values, pa.binary()),
            "headers": pa.array(headers, HEADER_TYPE),
            "timestamp": pa.array(stamps, pa.timestamp("ms")),
        }
    )


def read_back(content):
    found, batches = [], MemoryRecords(content)
    while (part := batches.next_batch()) is not None:
        assert part.validate_crc()
        found += [(r.key, r.value, [(k, v) for k, v in r.headers], r.timestamp) for r in part]
    return found


# short rows are taken by their places, long ones are joined
@given(
    ROWS, st.integers(200, 2000), st.sampled_from(["none", "gzip"]), st.sampled_from([0, 1 << 30])
)
@settings(max_examples=200, deadline=None)
def test_whatever_is_in_the_columns_is_read_back_in_order(rows, most, codec, short):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kafka_varints, "_SHORT", short)
        made = sections(rows_of(batch_of(rows)), np.array([r[4] for r in rows]), "t", most)
    for partition in range(4):
        own = [s for s in made if s.partition == partition]
        found = [
            r
            for s in own
            for r in read_back(record_batch(s, PreparedTxnState(1, 0), 0, codec=codec))
        ]
        assert found == [(k, v, h or [], t) for k, v, h, t, p in rows if p == partition]
        assert all(s.count == 1 or s.content.size + HEADER_BYTES <= most for s in own)


@settings(deadline=None)
@given(st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=50))
def test_sizes_are_those_of_the_bytes(numbers):
    x = np.array(numbers, np.int64)
    assert varint_sizes(x).tolist() == [len(b) for b in varints(x).to_pylist()]


@settings(deadline=None)
@given(st.lists(st.binary(max_size=40), min_size=1, max_size=30))
def test_murmur2_is_that_of_the_other_client(keys):
    assert murmur2(pa.array(keys, pa.large_binary())).view("u4").tolist() == [
        one_murmur2(k) & 0xFFFFFFFF for k in keys
    ]


@settings(deadline=None)
@given(st.integers(1, 300), st.lists(st.integers(1, 20_000), min_size=1, max_size=20))
def test_rows_without_a_key_are_dealt_evenly(partitions, sizes):
    dealer = Dealer(partitions)
    dealt = [dealer.deal(None, n) for n in sizes]
    assert all(d.min() >= 0 and d.max() < partitions and (np.diff(d) >= 0).all() for d in dealt)
    if all(n >= PIECE * partitions for n in sizes):
        counts = np.bincount(np.concatenate(dealt), minlength=partitions)
        assert counts.max() - counts.min() <= len(sizes)


@pytest.mark.parametrize("codec", CODECS)
def test_the_crc_covers_what_is_sent(codec):
    whole = sections(
        rows_of(pa.RecordBatch.from_pydict({"value": ["x" * 50] * 100})),
        np.zeros(100, int),
        "t",
        100_000,
    )[0]
    content = bytearray(record_batch(whole, PreparedTxnState(1, 0), 0, codec=codec))
    assert MemoryRecords(bytes(content)).next_batch().validate_crc()
    content[-1] ^= 1
    assert not MemoryRecords(bytes(content)).next_batch().validate_crc()


def test_rows_are_sliced_with_all_their_columns():
    rows = rows_of(
        batch_of(
            [(b"a", b"1", [("h", b"x")], 5, 0), (b"b", b"2", None, 6, 0), (None, None, [], 7, 0)]
        )
    ).slice(1, 3)
    assert isinstance(rows, Rows)
    (made,) = sections(rows, np.zeros(2, int), "t", 1000)
    assert read_back(record_batch(made, PreparedTxnState(1, 0), 0)) == [
        (b"b", b"2", [], 6),
        (None, None, [], 7),
    ]


def test_the_picture_of_the_format_shows_the_bytes_that_are_sent(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "tools"))
    import pictures

    fields = list(pictures.fields())
    assert (
        sum(len(content) for _, content, of_record in fields if not of_record) == HEADER_BYTES == 61
    )
    assert pictures.record_format() == (pictures.ROOT / "images" / "record-format.svg").read_text(
        encoding="utf-8"
    ), "make images"


@pytest.mark.parametrize("zone", [None, "UTC", "Europe/Berlin", "America/New_York"])
def test_an_hour_that_comes_twice_in_autumn_is_no_problem(zone):
    us = np.arange(
        1_729_900_000_000_123, 1_729_900_000_000_123 + 10 * 86_400_000_000, 1_800_000_000
    )
    stamps = (
        pa.array(us).cast(pa.timestamp("us"))
        if zone is None
        else pa.array(us).cast(pa.timestamp("us", zone))
    )
    made = sections(
        rows_of(pa.RecordBatch.from_pydict({"value": ["x"] * len(us), "timestamp": stamps})),
        np.zeros(len(us), int),
        "t",
        10**6,
    )[0]
    assert [t for *_, t in read_back(record_batch(made, PreparedTxnState(1, 0), 0))] == [
        int(u) // 1000 for u in us
    ]


@pytest.mark.parametrize("codec", CODECS)
def test_what_cannot_be_packed_is_sent_as_it_is(codec):
    noise = np.random.default_rng(1)
    made = sections(
        rows_of(pa.RecordBatch.from_pydict({"value": [noise.bytes(9000) for _ in range(100)]})),
        np.zeros(100, int),
        "t",
        10**6,
    )[0]
    state = PreparedTxnState(1, 0)
    packed = record_batch(made, state, 0, codec=codec)
    assert len(packed) <= len(record_batch(made, state, 0)) and len(read_back(packed)) == 100


def test_bytes_are_those_of_keys_and_values_however_they_are_cut():
    whole = pa.record_batch(
        {
            "key": pa.array(["k", None, "kkk"]),
            "value": pa.array([b"abc", b"", None]),
            "topic": ["t", "t", "t"],
        }
    )
    assert payload_bytes(whole, ("key", "value")) == 7
    assert sum(payload_bytes(whole.slice(i, 1), ("key", "value")) for i in range(3)) == 7
    assert payload_bytes(whole) == 10
    assert (
        payload_bytes(whole.slice(0, 0)) == 0 and payload_bytes(pa.record_batch({"n": [1, 2]})) == 0
    )
