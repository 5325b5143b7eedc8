"""The checker: a run that keeps the rules shows no anomaly, one fault in it shows the anomaly by
its name, and what is tolerated is tolerated.
"""

import json
from collections import Counter, defaultdict
from dataclasses import asdict, dataclass, field, replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from kafka2pc.proof.checker import (
    ANOMALIES,
    TOLERATED,
    Seen,
    aborted_read,
    anomalies,
    decided,
    duplicate,
    early_read,
    inconsistent_offsets,
    lost,
    reordered,
    torn,
)
from kafka2pc.protocol.history import Event, History, read_history

pytestmark = pytest.mark.never_unsteady
PARTITIONS = 2
quick = settings(deadline=None, database=None, max_examples=150)


def at(*rows, topic="t", partition=0, key=None, first=0, batch_id=None):
    """Records of one partition: the place in the list is the offset. None is a gap."""
    return [
        Seen(row=row, topic=topic, partition=partition, offset=offset, key=key, batch_id=batch_id)
        for offset, row in enumerate(rows, first)
        if row is not None
    ]


def decide(kind, batch_id=0, attempt=0, *ranges):
    return Event(
        kind=kind,
        op="decide",
        at_ms=0,
        process=1,
        ids={"batch_id": batch_id, "attempt": attempt, "ranges": [("t", *r) for r in ranges]},
    )


def read(*batch_ids):
    return Event(kind="ok", op="read", at_ms=0, process=1, ids={"batch_ids": list(batch_ids)})


# -- a run that keeps the rules, made by chance --


@dataclass
class Run:
    """Batches of rows, each after some attempts that were given up. `committed` and `uncommitted`:
    what the two readers find.
    """

    batch_of: dict = field(default_factory=dict)
    uncommitted: list = field(default_factory=list)
    events: list = field(default_factory=list)
    # places of the rows of attempts that were not decided
    given_up: set = field(default_factory=set)
    ends: Counter = field(default_factory=Counter)

    @property
    def committed(self):
        return [s for s in self.uncommitted if (s.partition, s.offset) not in self.given_up]

    def attempt(self, batch_id, attempt, tasks, kind):
        """Each task has one transaction and one key; `tasks` names the writer of each row."""
        ranges, counts = {}, Counter()
        for number, task in enumerate(tasks):
            partition, row = task % PARTITIONS, batch_id * 100 + number
            offset = self.take(partition)
            self.batch_of[row] = batch_id
            self.uncommitted.append(
                Seen(
                    row=row,
                    topic="t",
                    partition=partition,
                    offset=offset,
                    key=b"%d" % task,
                    batch_id=batch_id,
                )
            )
            ranges[task] = partition, ranges.get(task, (0, offset))[1], offset
            counts[task] += 1
            if kind != "ok":
                self.given_up.add((partition, offset))
        if kind is not None:
            self.events += [
                decide("invoke", batch_id, attempt, *ranges.values()),
                decide(kind, batch_id, attempt, *ranges.values()),
            ]
        if kind == "ok":
            self.events.append(read(batch_id))
        for partition, _, _ in ranges.values():
            self.take(partition)  # the marker

    def take(self, partition):
        self.ends[partition] += 1
        return self.ends[partition] - 1

    def anomalies(self, **other):
        by_partition = dict(
            seen=sorted(self.committed, key=lambda s: s.partition),
            uncommitted=sorted(self.uncommitted, key=lambda s: s.partition),
        )
        return anomalies(self.batch_of, **by_partition | dict(events=self.events) | other)


@st.composite
def runs(draw):
    run = Run()
    for batch_id in range(draw(st.integers(1, 3))):
        tasks = draw(st.lists(st.integers(0, 3), min_size=2, max_size=8))
        outcomes = [*draw(st.lists(st.sampled_from(["fail", "info", None]), max_size=2)), "ok"]
        for attempt, kind in enumerate(outcomes):
            run.attempt(batch_id, attempt, tasks, kind)
    return run


@given(runs())
@quick
def test_a_run_that_keeps_the_rules_shows_nothing(run):
    assert run.anomalies() == {}
    from_a_file = [Event(**json.loads(json.dumps(asdict(e)))) for e in run.events]
    assert run.anomalies(events=from_a_file) == {}


@given(runs(), st.data())
@quick
def test_a_row_that_is_missing_is_lost_and_its_batch_torn(run, data):
    gone = data.draw(st.sampled_from(run.committed))
    found = run.anomalies(seen=[s for s in run.committed if s != gone])
    assert found == {"lost": [gone.row], "torn batch": {gone.batch_id: [gone.row]}}


@given(runs(), st.data())
@quick
def test_a_whole_batch_that_is_missing_is_lost_but_not_torn(run, data):
    batch_id = data.draw(st.sampled_from(sorted(set(run.batch_of.values()))))
    found = run.anomalies(seen=[s for s in run.committed if s.batch_id != batch_id])
    assert found == {"lost": sorted(row for row in run.batch_of if run.batch_of[row] == batch_id)}


@given(runs(), st.data())
@quick
def test_a_row_of_an_attempt_that_was_given_up_is_an_aborted_read(run, data):
    aborted = [s for s in run.uncommitted if (s.partition, s.offset) in run.given_up]
    assume(aborted)
    wrong = data.draw(st.sampled_from(aborted))
    found = run.anomalies(
        seen=sorted([*run.committed, wrong], key=lambda s: (s.partition, s.offset))
    )
    assert found["aborted read"] == [wrong] and found["duplicate"] == {wrong.row: 2}
    assert found.keys() <= {"aborted read", "duplicate", "reordered"}


@given(runs())
@quick
def test_a_reader_that_takes_uncommitted_for_committed_reads_what_was_aborted(run):
    assert len(
        run.anomalies(seen=run.uncommitted, uncommitted=None).get("aborted read", [])
    ) == len(run.given_up)


@given(runs(), st.data())
@quick
def test_a_batch_seen_before_its_decision_is_an_early_read(run, data):
    first = next(i for i, e in enumerate(run.events) if e.op == "decide")
    early = read(data.draw(st.sampled_from(sorted(set(run.batch_of.values())))))
    run.events.insert(data.draw(st.integers(0, first)), early)
    assert run.anomalies() == {"early read": [early]}


@given(runs(), st.data())
@quick
def test_another_row_at_the_same_offset_is_inconsistent(run, data):
    s = data.draw(st.sampled_from(run.committed))
    other = replace(s, row=s.row + 1000)
    found = run.anomalies(
        uncommitted=sorted(
            (other if u == s else u for u in run.uncommitted), key=lambda s: s.partition
        )
    )
    assert found == {"inconsistent offsets": [s, other]}


@given(runs(), st.data())
@quick
def test_two_rows_of_a_key_that_changed_places_are_reordered(run, data):
    lanes = defaultdict(list)
    for s in run.committed:
        lanes[s.key, s.batch_id].append(s)
    assume(any(len(lane) > 1 for lane in lanes.values()))
    a, b = data.draw(st.sampled_from([lane for lane in lanes.values() if len(lane) > 1]))[:2]
    swapped = {a: replace(a, row=b.row), b: replace(b, row=a.row)}
    assert run.anomalies(
        seen=sorted((swapped.get(s, s) for s in run.committed), key=lambda s: s.partition),
        uncommitted=None,
    )["reordered"]


# -- one by one: the evidence --


@pytest.mark.parametrize(
    ("judge", "evidence"),
    [
        (lambda: lost([3, 1, 2, 1], at(2)), [1, 3]),
        (lambda: lost([], at(2)), []),
        (lambda: duplicate(at(1, 2, 1, 1)), {1: 3}),
        (lambda: torn({1: 0, 2: 0, 3: 1, 4: 1, 5: 2}, at(1, 3, 4)), {0: [2]}),
        (lambda: aborted_read(at(1, 2, 3), []), at(1, 2, 3)),
        (
            lambda: aborted_read(at(1, 2, 3), [decide("ok", 0, 0, (0, 1, 1))]),
            [at(1, 2, 3)[0], at(1, 2, 3)[2]],
        ),
        (
            lambda: aborted_read(at(1, partition=1), [decide("ok", 0, 0, (0, 0, 0))]),
            at(1, partition=1),
        ),
        (lambda: aborted_read(at(1, topic="u"), [decide("ok", 0, 0, (0, 0, 0))]), at(1, topic="u")),
        (
            lambda: aborted_read(at(1, batch_id=1), [decide("ok", 0, 0, (0, 0, 0))]),
            at(1, batch_id=1),
        ),
        (lambda: aborted_read(at(1, 2), [decide("ok", 0, 0, (0, -1, -1))]), []),
        (lambda: aborted_read([Seen(row=1)], []), []),
        (
            lambda: early_read([decide("invoke", 0), read(0, 1), decide("invoke", 1), read(0, 1)]),
            [read(0, 1)],
        ),
        (lambda: inconsistent_offsets(at(1, 2) + at(2, first=1)), at(2, first=1)),
        (lambda: inconsistent_offsets(list(reversed(at(1, 2)))), at(1)),
        (lambda: inconsistent_offsets(at(1) + at(2, partition=1) + at(3, topic="u")), []),
        (lambda: inconsistent_offsets(at(1, 2), at(1)), at(2, first=1)),
        (lambda: inconsistent_offsets(at(1), at(1), at(2)), at(1) + at(2)),
        (lambda: inconsistent_offsets([Seen(row=1), Seen(row=1)], []), []),
        (lambda: reordered(at(2, 1, 3, key=b"k")), at(1, first=1, key=b"k")),
        (lambda: reordered(at(3, 1, 2, key=b"k")), at(1, 2, first=1, key=b"k")),
        (lambda: reordered(list(reversed(at(1, 2, key=b"k")))), []),
    ],
)
def test_the_evidence_is_what_offends(judge, evidence):
    assert judge() == evidence


@pytest.mark.parametrize(
    ("attempts", "winner"),
    [
        ([("invoke", 0), ("ok", 0)], [0]),
        ([("invoke", 0), ("fail", 0)], []),
        ([("invoke", 0), ("info", 0)], [0]),
        ([("invoke", 0)], [0]),
        ([("invoke", 0), ("invoke", 1), ("ok", 1)], [1]),
        ([("invoke", 0), ("info", 0), ("invoke", 1), ("ok", 1)], [1]),
        ([("invoke", 0), ("invoke", 1), ("fail", 1)], [0]),
    ],
)
def test_an_unclear_decision_counts_until_another_attempt_wins(attempts, winner):
    assert [
        e.ids["attempt"] for e in decided(decide(kind, 0, attempt) for kind, attempt in attempts)
    ] == winner


def test_two_runs_that_both_won_the_same_slot_are_both_decided():
    events = [decide("ok", 0, 1, (0, 0, 0)), decide("ok", 0, 1, (0, 2, 2))]
    assert aborted_read(at(1, None, 1), events) == []


# -- what is tolerated --


def two_attempts():
    return [
        decide("invoke", 0, 0, (0, 0, 1)),
        decide("fail", 0, 0, (0, 0, 1)),
        decide("invoke", 0, 1, (0, 3, 4)),
        decide("ok", 0, 1, (0, 3, 4)),
    ]


ALLOWED = {
    "a batch in parts": lambda: anomalies(
        {1: 0, 2: 0}, at(1, 2), at(1, 2), [decide("invoke", 0, 0, (0, 0, 1)), read(0), read(0)]
    ),
    "gaps in offsets": lambda: anomalies(
        {1: 0, 2: 0}, at(None, None, None, 1, 2), at(None, None, None, 1, 2), two_attempts()
    ),
    "aborted rows in a read_uncommitted read": lambda: anomalies(
        {1: 0, 2: 0}, at(None, None, None, 1, 2), at(1, 2, None, 1, 2), two_attempts()
    ),
    "order between keys or partitions": lambda: anomalies(
        range(1, 7),
        at(6, key=b"a")
        + at(5, first=1, key=b"b")
        + at(4, first=2)
        + at(3, first=3)
        + at(2, partition=1, key=b"a")
        + at(1, topic="u", key=b"a"),
    ),
    "an open transaction while its query is down": lambda: anomalies(
        {1: 0}, at(1), at(1, 2), [decide("ok", 0, 0, (0, 0, 0))]
    ),
    "a decision without an answer": lambda: anomalies(
        {1: 0}, at(1), at(1), [decide("invoke", 0, 0, (0, 0, 0))]
    ),
}


@pytest.mark.parametrize("name", TOLERATED)
def test_what_is_tolerated_is_no_anomaly(name):
    assert ALLOWED[name]() == {}


# -- all at once --


def test_every_name_can_be_found_in_one_history():
    seen = at(1, 1, 3, 2, key=b"k")
    found = anomalies({1: 0, 2: 0, 3: 0, 4: 0}, seen, at(1, 1, 3), [read(0)])
    assert found.keys() == ANOMALIES.keys()
    assert (found["lost"], found["duplicate"], found["torn batch"], found["reordered"]) == (
        [4],
        {1: 2},
        {0: [4]},
        seen[3:],
    )
    assert (found["aborted read"], found["inconsistent offsets"], found["early read"]) == (
        seen,
        seen[3:],
        [read(0)],
    )


def test_what_was_not_looked_at_is_not_judged_but_what_was_empty_is():
    assert anomalies([1], at(1)) == {}
    assert anomalies([1], at(1), [], []).keys() == {"aborted read", "inconsistent offsets"}
    assert anomalies(iter([1, 2]), iter(at(1)), events=iter([])).keys() == {"lost", "aborted read"}


def test_a_history_in_a_file_is_judged_as_one_in_memory(tmp_path):
    history = History(str(tmp_path / "history"))
    with history.of("decide", batch_id=0, attempt=0, ranges=[("t", 0, 0, 0)]):
        pass
    events = read_history(tmp_path / "history")
    assert anomalies([1], at(1), events=events) == {}
    assert anomalies([1, 2], at(1, 2), events=events) == {"aborted read": at(2, first=1)}
