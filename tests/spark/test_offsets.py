"""Planning, without Kafka: no offset is skipped or read twice, and every loss is found."""

import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kafka2pc.protocol.errors import (
    RecordsGone,
    StaleCheckpoint,
    TopicGone,
    TopicRecreated,
)
from kafka2pc.spark.source.offsets import (
    Bounds,
    Offsets,
    Range,
    Snapshot,
    admit,
    combine_behind,
    count_tasks,
    cut_ranges,
    find_losses,
    from_json,
    measure_behind,
    pack_ranges,
    plan_end,
    plan_ranges,
    to_json,
)
from kafka2pc.spark.source.places import EARLIEST

T = "t"
steps = st.lists(
    st.tuples(
        st.lists(st.integers(0, 50), min_size=1, max_size=4),
        st.one_of(st.none(), st.integers(1, 40)),
        st.booleans(),
    ),
    max_size=12,
)


@settings(deadline=None)
@given(
    first=st.lists(st.integers(0, 20), min_size=1, max_size=3),
    steps=steps,
    least=st.one_of(st.none(), st.integers(1, 9)),
)
def test_planning_skips_and_repeats_no_offset(first, steps, least):
    """Logs grow, partitions are added, limits change, the checkpoint is read again, batch 0 gets
    another start: each offset is planned once, in order.
    """
    ends, ids = dict(enumerate(first)), {T: "id"}
    start = began = Offsets(at={(T, p): e for p, e in ends.items()}, ids=ids, initial=True)
    planned = {}
    for grown, limit, again in steps:
        for p, more in enumerate(grown):
            ends[p] = ends.get(p, 0) + more
        end = plan_end(start, Snapshot({(T, p): Bounds(0, e) for p, e in ends.items()}, ids), limit)
        asked = (
            Offsets(at={(T, p): e for p, e in ends.items()}, initial=True)
            if again and start.initial
            else start
        )
        end, asked = (
            from_json(json.loads(json.dumps(to_json(end)))),
            from_json(json.loads(json.dumps(to_json(asked)))),
        )
        if end != start:
            for r in cut_ranges(plan_ranges(asked, end), least):
                assert r.begin < r.end
                planned.setdefault(r.partition, []).extend(range(r.begin, r.end))
        start = end
    for p, end in start.at.items():
        assert planned.get(p[1], []) == list(range(began.at.get(p, 0), end))


@settings(deadline=None)
@given(
    waiting=st.lists(st.integers(0, 10**12), min_size=1, max_size=20), limit=st.integers(1, 10**6)
)
def test_admission_keeps_to_its_limit_and_always_gets_on(waiting, limit):
    begins, ends = (
        {(T, p): 5 for p in range(len(waiting))},
        {(T, p): 5 + n for p, n in enumerate(waiting)},
    )
    taken = {part: o - 5 for part, o in admit(begins, ends, limit).items()}
    assert all(0 <= taken[part] <= ends[part] - 5 for part in taken)
    assert all(taken[part] for part in taken if ends[part] > 5)
    assert sum(taken.values()) <= max(limit, 0) + len(waiting)


@settings(deadline=None)
@given(sizes=st.lists(st.integers(1, 1000), min_size=1, max_size=6), least=st.integers(1, 30))
def test_cut_ranges_hold_the_same_offsets(sizes, least):
    whole = [Range(T, p, 3, 3 + n) for p, n in enumerate(sizes)]
    pieces = cut_ranges(whole, least)
    of = lambda rs: [(r.partition, o) for r in rs for o in range(r.begin, r.end)]
    assert of(pieces) == of(whole) and len(pieces) >= min(least, sum(sizes)) // 2


@pytest.mark.parametrize(
    ("sizes", "least", "most", "expected"),
    [
        ((4, 20), 4, None, [(0, 0, 4), (1, 0, 6), (1, 6, 13), (1, 13, 20)]),
        ((0, 20), 4, None, [(1, 0, 5), (1, 5, 10), (1, 10, 15), (1, 15, 20)]),
        ((1, 1000), 4, None, [(0, 0, 1), (1, 0, 333), (1, 333, 666), (1, 666, 1000)]),
        ((100, 3), 4, None, [(0, 0, 33), (0, 33, 66), (0, 66, 100), (1, 0, 3)]),
        ((4, 20), 1, None, [(0, 0, 4), (1, 0, 20)]),
        ((14,), 4, None, [(0, 0, 3), (0, 3, 6), (0, 6, 10), (0, 10, 14)]),
        ((3,), 9, None, [(0, 0, 1), (0, 1, 2), (0, 2, 3)]),
        ((4, 5), None, 4, [(0, 0, 4), (1, 0, 2), (1, 2, 5)]),
        ((49,), None, 20, [(0, 0, 16), (0, 16, 32), (0, 32, 49)]),
        ((39,), 1, 20, [(0, 0, 19), (0, 19, 39)]),
        ((39,), 4, 20, [(0, 0, 9), (0, 9, 19), (0, 19, 29), (0, 29, 39)]),
        ((39, 3), 4, 20, [(0, 0, 19), (0, 19, 29), (0, 29, 39), (1, 0, 3)]),
    ],
)
def test_ranges_are_cut_as_sparks_own_source_cuts_them(sizes, least, most, expected):
    """What is small stays whole, and does not count for the others; a piece too many goes last."""
    whole = [Range(T, p, 0, n) for p, n in enumerate(sizes)]
    assert [(r.partition, r.begin, r.end) for r in cut_ranges(whole, least, most)] == expected


@settings(deadline=None)
@given(
    sizes=st.lists(st.integers(0, 1000), min_size=1, max_size=6),
    least=st.one_of(st.none(), st.integers(1, 30)),
    most=st.integers(1, 100),
)
def test_no_task_reads_more_than_the_most_records(sizes, least, most):
    whole = [Range(T, p, 3, 3 + n) for p, n in enumerate(sizes)]
    pieces = cut_ranges(whole, least, most)
    of = lambda rs: [(r.partition, o) for r in rs for o in range(r.begin, r.end)]
    assert of(pieces) == of(whole)
    assert all(0 < r.size <= most for r in pieces)


def test_how_far_behind_is_combined_over_the_sources_of_a_query():
    """Entries of other sources do not count, nor those of earlier releases."""
    end = Offsets(at={(T, 0): 10, (T, 1): 1})
    behind = measure_behind(end, {(T, 0): 14, (T, 1): 1})
    assert (behind, measure_behind(Offsets(at={}), {})) == ({"avg": 2.0, "max": 4, "min": 0}, {})
    other = {"version": 1, "offsets": {"u": {"0": 5}}, "behind": {"avg": 8.0, "max": 8, "min": 8}}
    entries = [to_json(end) | {"behind": behind}, other, None, {"logOffset": 3}, to_json(end)]
    assert combine_behind(entries) == {"avg": 4.0, "max": 8, "min": 0}
    assert combine_behind(entries[2:]) is None


def test_nothing_new_is_the_same_text_so_that_spark_starts_no_batch():
    start = Offsets(at={(T, 1): 5, (T, 0): 4}, ids={T: "id"}, since={(T, 0): 1})
    assert (
        plan_end(start, Snapshot({(T, 0): Bounds(0, 4), (T, 1): Bounds(2, 5)}, {T: "id"})) is start
    )
    assert json.dumps(to_json(start)) == json.dumps(to_json(from_json(to_json(start))))


@pytest.mark.parametrize(
    "entry", [5, [1], "x", None, {"version": 1}, {"version": 1, "offsets": [1]}, {"t": 5}]
)
def test_an_entry_of_another_source_is_refused(entry):
    with pytest.raises(StaleCheckpoint, match="Another source wrote them"):
        from_json(entry)


LOSSES = [
    (
        Snapshot({(T, 0): Bounds(7, 20), (T, 1): Bounds(0, 9)}, {T: "id"}),
        RecordsGone,
        "t-0: offsets 5 to 6 are gone",
        {(T, 0): 7},
    ),
    (
        Snapshot({}, {}),
        TopicGone,
        "topic t does not exist any more; read were partitions 0 to offset 5, 1 to offset 9",
        {},
    ),
    (
        Snapshot({(T, 0): Bounds(0, 99)}, {T: "other"}),
        TopicRecreated,
        (
            "topic t was created again (partitions: 1, before: 2); read were partitions 0 to offset"
            " 5, 1 to offset 9"
        ),
        {(T, 0): 0},
    ),
    (
        Snapshot({(T, 0): Bounds(0, 99), (T, 1): Bounds(0, 99)}, {T: "other"}),
        TopicRecreated,
        (
            "topic t was created again (partitions: 2, before: 2); read were partitions 0 to offset"
            " 5, 1 to offset 9"
        ),
        {(T, 0): 0, (T, 1): 0},
    ),
    (
        Snapshot({(T, 0): Bounds(0, 9)}, {T: ""}),
        TopicRecreated,
        "topic t has no partition 1 any more; it was read to offset 9",
        {},
    ),
    (
        Snapshot({(T, 0): Bounds(0, 3), (T, 1): Bounds(0, 9)}, {T: "id"}),
        TopicRecreated,
        "t-0 ends at offset 3, but it was read to 5",
        {(T, 0): 3},
    ),
    (
        Snapshot({(T, 0): Bounds(0, 3), (T, 1): Bounds(0, 9)}, {T: ""}),
        TopicRecreated,
        "t-0 ends at offset 3, but it was read to 5",
        {(T, 0): 0},
    ),
    (
        Snapshot({(T, 0): Bounds(0, 5), (T, 1): Bounds(0, 9), (T, 2): Bounds(500, 600)}, {T: "id"}),
        RecordsGone,
        "t-2 is new for this query: offsets 0 to 499 are gone",
        {(T, 2): 500},
    ),
    (
        Snapshot(
            {(T, 0): Bounds(0, 5), (T, 1): Bounds(0, 9), ("u", 0): Bounds(3, 3)},
            {T: "id", "u": "2"},
        ),
        RecordsGone,
        "u-0 is new for this query: offsets 0 to 2 are gone",
        {("u", 0): 3},
    ),
]


@pytest.mark.parametrize(("logs", "error", "what", "since"), LOSSES)
def test_missing_offsets_are_reported_and_skipped(logs, error, what, since):
    start = Offsets(at={(T, 0): 5, (T, 1): 9}, ids={T: "id"})
    (loss,) = find_losses(start, logs)
    assert (loss.error, loss.what) == (error, what)
    assert plan_end(start, logs).since == since


def test_a_first_start_and_a_whole_new_partition_lose_nothing():
    grown = Snapshot({(T, 0): Bounds(0, 5), (T, 1): Bounds(7, 9)}, {T: "id"})
    whole = Snapshot({(T, 0): Bounds(0, 5), (T, 1): Bounds(0, 9)}, {T: "id"})
    begun = Offsets(at={(T, 0): 5}, ids={T: "id"})
    assert find_losses(replace(begun, initial=True), grown) == find_losses(begun, whole) == []


def test_a_batch_that_does_not_say_where_it_begins_is_refused():
    with pytest.raises(StaleCheckpoint, match="t-0"):
        plan_ranges(Offsets(at={(T, 0): 9}), Offsets(at={(T, 0): 5}))


def test_an_empty_first_batch_still_says_where_it_began():
    """Spark runs batch 0 even if it is empty, and asks for another start when it runs it again."""
    begun, logs = (
        Offsets(at={(T, 0): 100}, ids={T: "id"}, initial=True),
        Snapshot({(T, 0): Bounds(0, 100)}, {T: "id"}),
    )
    end = plan_end(begun, logs)
    assert (
        plan_ranges(Offsets(at={(T, 0): 120}, initial=True), end) == []
        and not end.initial
        and plan_end(end, logs) is end
    )


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 60)), max_size=40),
    st.integers(1, 12),
    st.one_of(st.none(), st.integers(1, 80)),
)
def test_packed_tasks_hold_each_range_once(sizes, tasks, most):
    """No task has two ranges of a partition, or more offsets than allowed."""
    whole = [Range(T, p, 0, size) for p, (_, size) in enumerate(sizes)]
    leaders = {(T, p): leader for p, (leader, _) in enumerate(sizes)}
    ranges = cut_ranges(whole, None, most)
    groups = pack_ranges(ranges, tasks, most, leaders)
    assert sorted((r for g in groups for r in g), key=lambda r: (r.part, r.begin)) == ranges
    assert all(len({r.part for r in g}) == len(g) for g in groups)
    assert most is None or all(sum(r.size for r in g) <= most for g in groups)
    if len(ranges) <= tasks:
        assert len(groups) == len(ranges)
    elif most is None:
        assert len(groups) <= tasks


def test_small_ranges_share_tasks_and_large_ones_do_not():
    small = [Range(T, p, 0, 200) for p in range(1_000)]
    assert count_tasks(small, None, cores=2) == 8
    groups = pack_ranges(small, 8)
    assert [len(g) for g in groups] == [125] * 8
    # as many tasks as asked for, and one for each large range
    assert count_tasks(small, 1_000, cores=2) == 1_000
    large = [Range(T, p, 0, 100_000) for p in range(50)]
    assert pack_ranges(large, count_tasks(large, None, cores=2)) == [(r,) for r in large]
    skewed = [*small[:100], Range(T, 100, 0, 20_000)]
    assert (skewed[-1],) in pack_ranges(skewed, 8)


def test_ranges_that_the_same_node_leads_share_tasks():
    ranges = [Range(T, p, 0, 10) for p in range(90)]
    leaders = {r.part: r.partition % 3 for r in ranges}
    groups = pack_ranges(ranges, 9, leaders=leaders)
    assert len(groups) == 9
    assert all(len({leaders[r.part] for r in g}) == 1 for g in groups)


def test_an_open_range_counts_as_it_was_planned():
    assert replace(Range(T, 0, 5, 9), begin=EARLIEST, planned=4).size == 4
