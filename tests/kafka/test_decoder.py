"""Record batches of every client become the columns that were written; aborted records stay out;
damage is an error and never a row.
"""

import random
import struct

import google_crc32c
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kafka.record.memory_records import MemoryRecordsBuilder

from kafka2pc.kafka.records import decoder
from kafka2pc.kafka.records.decoder import PackedBatch, committed, decode, split, unpack
from kafka2pc.kafka.records.encoder import CODECS, HEADER_BYTES, record_batch, sections
from kafka2pc.kafka.records.rows import rows_of
from kafka2pc.kafka.records.varints import varints
from kafka2pc.protocol.errors import RecordsBroken, UnknownFormat
from kafka2pc.protocol.messages import PreparedTxnState

TEXT = st.one_of(st.none(), st.binary(max_size=300))
HEADERS = st.lists(
    st.tuples(st.text(max_size=5), st.one_of(st.none(), st.binary(max_size=9))), max_size=3
)
ROWS = st.lists(st.tuples(TEXT, TEXT, HEADERS, st.integers(0, 2**41)), min_size=1, max_size=60)
HEADER_TYPE = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))


def rows_in(pieces):
    """(offset, key, value, headers, timestamp) of every row."""
    found = []
    for c in pieces:
        for column in (c.keys, c.values, c.headers):
            column.validate(full=True)
        headers = [[(h["key"], h["value"]) for h in hs or ()] for hs in c.headers.to_pylist()]
        found += zip(
            c.offsets.tolist(),
            c.keys.to_pylist(),
            c.values.to_pylist(),
            headers,
            c.timestamps_ms.tolist(),
            strict=True,
        )
    return found


def decoded(content, begin=0, end=2**62, aborted=(), **more):
    return rows_in(decode(committed(split(content), aborted), begin, end, headers=True, **more))


# as a broker does: it is not in the checksum
def numbered(batch, offset):
    return struct.pack(">q", offset) + batch[8:]


def ours(rows, codec, most=1500):
    """The rows as our engine sends them, in batches of about `most` bytes."""
    keys, values, headers, stamps = zip(*rows, strict=True)
    batch = pa.RecordBatch.from_pydict(
        {
            "key": pa.array(keys, pa.binary()),
            "value": pa.array(values, pa.binary()),
            "timestamp": pa.array(stamps, pa.timestamp("ms")),
            "headers": pa.array(
                [[{"key": k, "value": v} for k, v in h] for h in headers], HEADER_TYPE
            ),
        }
    )
    content, offset = b"", 100
    for s in sections(rows_of(batch), np.zeros(len(rows), int), "t", most):
        content += numbered(record_batch(s, PreparedTxnState(1, 0), 0, codec=codec), offset)
        offset += s.count
    return content


def theirs(rows, codec, gaps=(), magic=2):
    """The rows as kafka-python's producer writes them; after some of them offsets are left out, as
    if compacted.
    """
    made = MemoryRecordsBuilder(magic, codec, 10**9)
    for n, (key, value, headers, stamp) in enumerate(rows):
        made.append(stamp, key, value, headers)
        if n in gaps:
            made.skip(3)
    made.close()
    return numbered(made.buffer(), 100)


@given(
    ROWS, st.sampled_from([*CODECS]), st.integers(95, 165), st.integers(0, 70), st.integers(1, 5000)
)
@settings(max_examples=150, deadline=None)
@pytest.mark.never_unsteady
def test_what_our_engine_writes_is_read_back_from_any_offset_to_any(rows, codec, begin, size, most):
    expected = [(100 + n, *row) for n, row in enumerate(rows)]
    assert decoded(ours(rows, codec), begin, begin + size, most=most) == [
        r for r in expected if begin <= r[0] < begin + size
    ]


@given(ROWS, st.sampled_from([0, 1, 4]), st.sets(st.integers(0, 59)))
@settings(max_examples=100, deadline=None)
@pytest.mark.never_unsteady
def test_what_another_client_writes_and_compaction_leaves_is_read_back(rows, codec, gaps):
    offsets = np.cumsum([0, *(4 if n in gaps else 1 for n in range(len(rows)))]) + 100
    content = theirs(rows, codec, gaps)
    assert decoded(content) == [(o, *row) for o, row in zip(offsets.tolist(), rows, strict=False)]
    assert [b.next_offset for b in split(content)][-1] > offsets[len(rows) - 1]


@pytest.mark.parametrize("magic", [0, 1])
def test_formats_of_before_kafka_0_11_are_named(magic):
    with pytest.raises(
        UnknownFormat, match=f"offset 100: records of format {magic}(.|\n)*the copy has format 2"
    ):
        decoded(numbered(theirs([(b"k", b"v", [], 1)], 0, magic=magic), 100))


def test_the_time_of_appending_counts_if_the_topic_says_so():
    content = bytearray(ours([(None, b"a", [], 5), (None, b"b", [], 9)], "none"))
    content[22] |= 8
    struct.pack_into(">q", content, 35, 777)
    (columns,) = decode(split(signed(content)), 0, 1000)
    assert columns.timestamps_ms.tolist() == [777, 777] and columns.kinds.tolist() == [1, 1]


def test_a_header_that_is_no_text_is_read_as_java_reads_it():
    content = bytearray(ours([(None, b"v", [("key", b"x")], 5)], "none"))
    content[content.index(b"key")] = 0xFF
    assert decoded(signed(content))[0][3] == [("\ufffdey", b"x")]


# -- transactions --


def control(offset, producer_id, kind):
    body = bytes([0, 0, 0, 8]) + struct.pack(">hh", 0, kind) + bytes([12]) + bytes(6) + bytes([0])
    rest = (
        struct.pack(">hiqqqhii", 0x30, 0, 0, 0, producer_id, 0, -1, 1)
        + bytes([2 * len(body)])
        + body
    )
    return struct.pack(">qiibI", offset, len(rest) + 9, 0, 2, google_crc32c.value(rest)) + rest


def write_log(dice, steps):
    """Producers in one partition, each with a transaction after the other: (offset, batch), the
    offsets that are committed, (producer id, first, last) of what is aborted, and the last stable
    offset.
    """
    log, offset, open_, fates, aborted = [], 0, {}, {}, []
    for _ in range(steps):
        producer = dice.randrange(4)
        if producer == 3:
            transaction = None
        elif producer in open_ and dice.random() < 0.4:
            first, rows = open_.pop(producer)
            commit = dice.random() < 0.5
            log.append((offset, control(offset, producer, int(commit))))
            fates |= dict.fromkeys(rows, commit)
            if not commit:
                aborted.append((producer, first, offset))
            offset += 1
            continue
        else:
            transaction = open_.setdefault(producer, (offset, []))
        count = dice.randrange(1, 4)
        rows = rows_of(
            pa.RecordBatch.from_pydict({"value": [str(offset + n) for n in range(count)]}), now_ms=0
        )
        (section,) = sections(rows, np.zeros(count, int), "t", 10_000)
        made = record_batch(
            section,
            PreparedTxnState(producer if transaction else -1, 0),
            0,
            transactional=transaction is not None,
        )
        log.append((offset, numbered(made, offset)))
        if transaction:
            transaction[1].extend(range(offset, offset + count))
        else:
            fates |= dict.fromkeys(range(offset, offset + count), True)
        offset += count
    stable = min([first for first, _ in open_.values()], default=offset)
    return (
        [(o, b) for o, b in log if o < stable],
        sorted(o for o, good in fates.items() if good and o < stable),
        aborted,
        stable,
    )


@given(st.integers(0, 10**6), st.integers(1, 60), st.data())
@settings(max_examples=200, deadline=None)
@pytest.mark.never_unsteady
def test_a_committed_reader_sees_what_was_committed_wherever_it_begins(seed, steps, data):
    log, good, aborted, stable = write_log(random.Random(seed), steps)
    at = data.draw(st.integers(0, stable))
    sent = [b for o, b in log if next(split(b)).next_offset > at]
    # as a broker does: those that reach into the answer
    listed = [(p, first) for p, first, last in aborted if last >= at and first < stable]
    found = decoded(b"".join(sent), at, stable, listed)
    assert [r[0] for r in found] == [o for o in good if o >= at] and all(
        int(r[2]) == r[0] for r in found
    )


# -- damage --


def signed(content):
    """With the checksum that fits."""
    struct.pack_into(">I", content, 17, google_crc32c.value(bytes(content[21:])))
    return bytes(content)


def outcome(content, *aborted):
    try:
        return decoded(bytes(content), aborted=aborted)
    except (RecordsBroken, UnknownFormat) as e:
        return e


# the offset and the leader's epoch are filled in by the broker, behind the producer's checksum
NOT_CHECKED = {*range(8), *range(12, 16)}


@given(ROWS, st.sampled_from([*CODECS]), st.data())
@settings(max_examples=150, deadline=None)
def test_a_bit_that_turned_is_never_a_row(rows, codec, data):
    content = bytearray(ours(rows, codec, most=10**6))
    whole, at = (
        decoded(bytes(content)),
        data.draw(st.sampled_from([n for n in range(len(content)) if n not in NOT_CHECKED])),
    )
    content[at] ^= 1 << data.draw(st.integers(0, 7))
    found = outcome(content)
    # a longer length reads as cut off
    assert isinstance(found, Exception) or (found == [] and at < 12 and whole)


@given(ROWS, st.sampled_from([*CODECS]), st.data())
@settings(max_examples=100, deadline=None)
def test_an_answer_that_is_cut_off_gives_its_whole_batches(rows, codec, data):
    content = ours(rows, codec, most=300)
    cut = data.draw(st.integers(0, len(content)))
    whole = [b.next_offset for b in split(content[:cut])]
    assert decoded(content[:cut]) == [
        r for r in decoded(content) if r[0] < (whole[-1] if whole else 0)
    ]


@given(
    ROWS,
    st.sampled_from([*CODECS]),
    st.lists(st.tuples(st.floats(0, 1), st.integers(0, 255)), min_size=1, max_size=5),
    st.integers(0, 60),
)
@settings(max_examples=250, deadline=None)
def test_nonsense_under_a_good_checksum_ends_in_an_error_or_in_sound_columns(
    rows, codec, changes, shorter
):
    """For any bytes: no other exception, no endless loop, no byte read outside the answer."""
    content = bytearray(ours(rows, codec, most=10**6))
    if shorter and len(content) - shorter > HEADER_BYTES:
        content = content[:-shorter]
        struct.pack_into(">i", content, 8, len(content) - 12)
    for at, byte in changes:
        content[21 + int(at * (len(content) - 22))] = byte
    outcome(signed(content))


@pytest.mark.parametrize(
    "content",
    [b"", b"\xff" * 40, b"\x82SNAPPY\x00" + bytes(8) + b"\x7f\xff\xff\xff" + b"x" * 20, bytes(100)],
)
@pytest.mark.parametrize("codec", [0, 1, 2, 3, 4, 5, 7])
def test_no_codec_takes_nonsense(codec, content):
    batch = PackedBatch(0, 5, codec, 0, 0, -1, -1, 5, pa.py_buffer(content))
    with pytest.raises(RecordsBroken, match="offset"):
        list(decode([batch], 0, 5))
    if codec > 4:
        with pytest.raises(RecordsBroken, match="not known"):
            unpack(batch)


def test_a_marker_whose_record_compaction_removed_ends_nothing():
    """Java's reader, too, takes it for no abort."""
    empty = PackedBatch(7, 8, 0x30, 0, 0, 1, 0, 0, pa.py_buffer(b""))
    rows = PackedBatch(8, 9, 0x10, 0, 0, 1, 0, 1, pa.py_buffer(b""))
    assert list(committed([empty, rows])) == [rows]
    assert list(committed([empty, rows], [(1, 5)])) == []


def test_a_marker_that_says_nothing_is_an_error():
    with pytest.raises(RecordsBroken, match="a marker"):
        list(committed([PackedBatch(7, 8, 0x30, 0, 0, 1, 0, 1, pa.py_buffer(b"\x20"))]))


@pytest.mark.parametrize("size", [3, 2**31, 2**62, 2**63 - 1, -2, -(2**63)])
def test_a_field_never_reaches_out_of_its_record(size):
    """Also where adding so much would overflow."""
    body = b"\0\0\0" + varints(np.array([size]))[0].as_py() + b"\1\0"
    record = varints(np.array([len(body)]))[0].as_py() + body
    other = bytes([14, 0, 0, 2, 1, 2, 120, 0])
    with pytest.raises(RecordsBroken, match="offsets 0 to 1: a field"):
        list(decode([PackedBatch(0, 2, 0, 0, 0, -1, -1, 2, pa.py_buffer(record + other))], 0, 2))
    assert decoded_values([PackedBatch(1, 2, 0, 0, 0, -1, -1, 1, pa.py_buffer(other))]) == [b"x"]


def decoded_values(packed):
    return [v for c in decode(packed, 0, 99) for v in c.values.to_pylist()]


@given(
    st.lists(
        st.tuples(st.sampled_from([0, 1, 62, 63, 64, 100, 8191, 8192]), st.integers(1, 300)),
        min_size=1,
        max_size=12,
    )
)
@settings(max_examples=60, deadline=None)
def test_runs_of_equal_length_are_found_where_a_walk_finds_their_records(runs):
    sizes = [size for size, count in runs for _ in range(count)]
    content = b"".join(varint(size) + bytes(size) for size in sizes) + bytes(decoder._PAD)
    walked = []
    end = decoder._walk(content, 0, len(sizes), walked)
    parts, at = decoder._chain(content, np.frombuffer(content, np.uint8), 0, len(sizes))
    assert (np.concatenate(parts).tolist(), at) == (walked, end)


def varint(n):
    """A number as the length of a record is written."""
    plain = n << 1
    if plain < 128:
        return bytes([plain])
    return bytes([plain & 127 | 128]) + (
        bytes([plain >> 7]) if plain < 1 << 14 else bytes([plain >> 7 & 127 | 128, plain >> 14])
    )
