"""What every decision log promises, as plain functions: each takes `open`, which gives one more
driver's log of the same decisions (`open("b")`: of others).

`PROMISES` holds for every log, `DURABLE` also for those that outlive the process that writes (both
lists: raise if the promise is broken). `UNCLEAR` and `DAMAGED` need a `Place` that can lose an
answer, or put something into a slot past the log. `check(make, promises)`: lessons use it.
"""

import json
import os
import pickle
import subprocess
import sys
import threading
from dataclasses import replace

import pytest

from kafka2pc.protocol.errors import (
    CorruptDecision,
    LogUnwritable,
    TwoPhaseError,
    UnknownFormat,
)
from kafka2pc.protocol.log.decisions import FAILED, Decision, Identity, Slot
from kafka2pc.protocol.log.format import dump_decision, load_decision
from kafka2pc.protocol.log.questions import (
    commit_of,
    failed_batches,
    later_batch,
    newest_commit,
    newest_record,
    overtaken,
)
from kafka2pc.protocol.log.slots import win
from kafka2pc.protocol.messages import Committable, PartitionRange, PreparedTxnState
from kafka2pc.protocol.names import new_token

PROMISES, DURABLE, UNCLEAR, DAMAGED = [], [], [], []
QUERY = "11111111-2222-3333-4444-555555555555"


class Place:
    """Where a kind of log keeps its decisions. `steps`: the functions between whose lines a driver
    may die. `spoil(name, slot, content)`: put bytes into a slot past the log. `lost`: context
    managers inside which the first answer to a write is lost, "before" or "after" it was done;
    their value is a list, which is empty until then.
    """

    def __init__(self, open, *, steps=(), spoil=None, lost=None):
        self.open, self.steps, self.spoil, self.lost = open, steps, spoil, lost

    def __call__(self, name="a"):
        return self.open(name)


def record(batch_id=7, attempt=0, commit=True, n=1, **more):
    """A decision with `n` Committables, unlike any other."""
    part = PartitionRange(
        topic='späte "1"\n', partition=3, records=5, first_offset=2**40, last_offset=2**40 + 4
    )
    cs = tuple(
        Committable(
            transactional_id=f"t{i}", state=PreparedTxnState(4000 + i, 1), partitions=(part,)
        )
        for i in range(n if commit else 0)
    )
    return Decision(
        query_id=QUERY,
        slot=Slot(batch_id, attempt),
        commit=commit,
        token=new_token(batch_id, attempt),
        committables=cs,
        stores=(("kafka", "cluster"), ("a table", "ünd")),
        offsets_hash="ab" * 32,
        rows=5 * n,
        bytes=2**40,
        identity=Identity(
            log="file:///späte", checkpoint="s3://b/ünd", topics=("t",), prefix="kafka2pc"
        ),
        **more,
    )


def into(to):
    """A decorator that adds a promise to a list."""
    return lambda promise: to.append(promise) or promise


def check(make, promises):
    """Ask each promise of a fresh `make()`; the list of their names, or the error of the first that
    is broken.
    """
    return [promise.__name__ for promise in promises if promise(make()) is None]


# -- write-once --


@into(PROMISES)
def the_first_record_of_a_slot_never_changes(open):
    first, second = record(commit=False), record()
    log = open()
    assert (log.create(first), log.create(second), log.create(first), open().create(second)) == (
        first,
    ) * 4
    assert log.chain(7) == open().chain(7) == [first]


@into(PROMISES)
def of_many_writers_at_once_one_wins_and_all_get_its_record(open):
    for batch_id in range(3):
        records = [record(batch_id, commit=n % 2 == 0) for n in range(6)]
        got, start = [None] * 6, threading.Barrier(6)

        def fight(n, log, records=records, got=got, start=start):
            start.wait()
            got[n] = win(log, records[n])

        threads = [threading.Thread(target=fight, args=(n, open())) for n in range(6)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        assert got[0] in records and got == [got[0]] * 6 and open().chain(batch_id) == [got[0]]


@into(PROMISES)
def slots_are_independent(open):
    log, other = open(), open("b")
    written = [record(7, 0, commit=False), record(7, 1), record(8, 0), record(70, 0, commit=False)]
    assert [log.create(d) for d in written] == written
    assert (log.chain(7), log.chain(8), log.chain(70), log.chain(0)) == (
        written[:2],
        [written[2]],
        [written[3]],
        [],
    )
    elsewhere = record(7, 0)
    assert (other.chain(7), other.batches(), other.create(elsewhere)) == ([], [], elsewhere)
    assert (log.chain(7), open("b").chain(7)) == (written[:2], [elsewhere])


@into(PROMISES)
def a_create_that_is_too_late_writes_nothing_and_raises(open):
    log, first = open(), record()
    with pytest.raises(LogUnwritable, match=r"7\.0.*too little time"):
        log.create(first, lambda: True)
    assert log.chain(7) == open().chain(7) == []
    assert open().create(first) == first


# -- reading --


@into(PROMISES)
def a_decision_of_any_length_is_read_back_unchanged(open):
    long, empty = record(1, n=2000), record(2, n=0)
    assert (open().create(long), open().create(empty)) == (long, empty)
    assert (open().chain(1), open().chain(2)) == ([long], [empty])


@into(PROMISES)
def chains_and_batches_are_in_numeric_order(open):
    log = open()
    for batch_id in (2, 10, 1):
        for attempt in (1, 10, 2, 0):
            log.create(record(batch_id, attempt, commit=False))
    assert [d.slot.attempt for d in log.chain(10)] == [0, 1, 2, 10] and log.batches() == [1, 2, 10]


@into(PROMISES)
def the_next_read_of_any_driver_shows_what_another_wrote(open):
    reader = open()
    assert (reader.chain(7), reader.batches(), newest_commit(reader), later_batch(reader, 0)) == (
        [],
        [],
        None,
        False,
    )
    for n in range(3):
        d = record(n)
        open().create(d)
        assert (
            reader.chain(n),
            newest_commit(reader),
            commit_of(reader, n),
            later_batch(reader, n),
            later_batch(reader, n - 1),
        ) == ([d], d, d, False, True)


# -- purge --


@into(PROMISES)
def a_purge_removes_older_batches_and_nothing_else(open):
    log, other = open(), open("b")
    kept = {
        b: [log.create(record(b, 0, commit=False)), log.create(record(b, 1))] for b in (3, 4, 5)
    }
    foreign = other.create(record(3))
    log.purge(5)
    log.purge(5)
    for reader in (log, open()):
        assert (
            reader.batches(),
            reader.chain(3),
            reader.chain(4),
            reader.chain(5),
            newest_commit(reader),
        ) == ([5], [], [], kept[5], kept[5][1])
    assert other.chain(3) == [foreign]
    assert open().create(record(5, 0)) == kept[5][0]
    log.purge(0)
    assert open().batches() == [5]


@into(PROMISES)
def a_note_is_no_record_of_a_chain(open):
    """It stops no run: neither one that decides the batch before, nor one that decides its own."""
    log = open()
    log.create(record(7, 0, commit=False))
    note = record(8, FAILED, commit=False)
    assert [writer.create(note) for writer in (log, open())] == [note, note]
    assert log.create(replace(note, rows=1)) == note
    decided = record(7, 1)
    assert win(open(), decided) == decided
    for reader in (log, open()):
        seen = reader.listing()
        assert (seen.batches(), seen.notes, newest_record(seen)) == ([7], (note.slot,), decided)
        assert failed_batches(seen) == [8] and not overtaken(seen, decided)
    adopted = record(7, 2, commit=False, adopts=True)
    assert open().create(adopted) == adopted
    log.purge(8)
    assert open().listing().notes == (note.slot,)
    log.purge(9)
    assert open().slots() == []


# -- other processes --

READER = """
import pickle, sys
log = pickle.load(sys.stdin.buffer)
from kafka2pc.protocol.log.format import dump_decision
print(dump_decision(log.chain(7)[0]).decode())
"""

# Forks a driver for each line of the functions in `steps`. It stops there (SIGKILL or SIGSTOP);
# then a rival asks for the same slot; then it goes on.
DRIVERS = """
import json, os, pickle, signal, sys
open_log, steps, pairs, how = pickle.load(sys.stdin.buffer)

def driver(work):
    read, write = os.pipe()
    pid = os.fork()
    if pid:
        os.close(write)
        return pid, os.fdopen(read)
    try: answer = work()
    except BaseException as e: answer = f"{type(e).__name__}: {e}"
    os.write(write, json.dumps(answer).encode())
    os._exit(0)

def create(d, stop=None):
    log, seen = open_log(), set()
    def trace(frame, event, _):
        if event == "call": return trace if frame.f_code.co_name in steps else None
        at = frame.f_code.co_name, frame.f_lineno
        if event == "line" and at not in seen:
            seen.add(at)
            if len(seen) == stop: os.kill(os.getpid(), how)
        return trace
    sys.settrace(trace)
    winner = log.create(d)
    sys.settrace(None)
    return winner and str(winner.token)

for n, (mine, rivals) in enumerate(pairs, 1):
    pid, answer = driver(lambda: create(mine, n))
    status = os.waitpid(pid, os.WUNTRACED)[1]
    rival = None
    if os.WIFSTOPPED(status):
        rival = json.loads(driver(lambda: create(rivals))[1].read())
        os.kill(pid, signal.SIGCONT)
        os.waitpid(pid, 0)
    said = answer.read()
    print(json.dumps([json.loads(said) if said else None, rival]), flush=True)
    if os.WIFEXITED(status): break
"""


def elsewhere(script, what):
    """The lines that a fresh Python process prints that gets `what`."""
    from pyspark import cloudpickle

    env = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    done = subprocess.run(
        [sys.executable, "-c", script],
        input=cloudpickle.dumps(what),
        capture_output=True,
        env=env,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout.decode()


def stopped_at_every_line(place, how):
    """[(slot, records of the driver and of its rival, what each got)] for a driver that was
    stopped at each line of `place.steps` in turn.
    """
    pairs = [(record(n, commit=True), record(n, commit=False)) for n in range(100)]
    said = [
        json.loads(line)
        for line in elsewhere(DRIVERS, (place.open, place.steps, pairs, how)).splitlines()
    ]
    assert 3 < len(said) < len(pairs)
    return list(zip(pairs, said[:-1]))  # the last one came to its end


@into(DURABLE)
def another_process_reads_the_record(place):
    d = record()
    place().create(d)
    assert (
        load_decision(
            elsewhere(READER, pickle.loads(pickle.dumps(place()))).encode(), "another process"
        )
        == d
    )


@into(DURABLE)
def a_driver_killed_between_any_two_lines_leaves_all_or_nothing(place):
    left = []
    for (mine, rivals), _ in stopped_at_every_line(place, 9):
        log, batch_id = place(), mine.slot.batch_id
        left += [len(log.chain(batch_id))]
        assert log.chain(batch_id) in ([], [mine])
        winner = win(log, rivals)
        assert winner == (mine if left[-1] else rivals), (left, winner)
        assert log.chain(batch_id) == [winner] and place().create(mine) == winner
    assert 0 in left and left == sorted(left)


@into(DURABLE)
def a_driver_suspended_between_any_two_lines_gets_the_winning_record(place):
    winners = []
    for (mine, rivals), (got, rival_got) in stopped_at_every_line(place, 19):
        (winner,) = place().chain(mine.slot.batch_id)
        assert {got, rival_got} <= {str(winner.token), None}, (got, rival_got, winner)
        assert place().create(mine) == place().create(rivals) == winner
        winners.append(winner == mine)
    assert False in winners and winners == sorted(winners)


# -- an unclear answer --


@into(UNCLEAR)
def a_lost_answer_gives_unknown_or_the_record(place, when):
    log, first, second = place(), record(), record(commit=False)
    with place.lost[when]():
        got = log.create(first)
    assert got in (None, first)
    winner = win(place(), second)
    assert winner == (first if got or when == "after" else second) and place().chain(7) == [winner]


@into(UNCLEAR)
def asked_again_after_a_lost_answer_the_same_record_wins(place, when):
    log, first = place(), record()
    with place.lost[when]():
        assert win(log, first) == first
    assert place().chain(7) == [first] and win(place(), record(commit=False)) == first


@into(UNCLEAR)
def nothing_is_sent_after_a_lost_answer_if_it_is_too_late(place, when):
    log, first, second, asked = place(), record(), record(commit=False), []

    def late():
        asked.append(bool(lost))
        return asked[-1]

    with place.lost[when]() as lost:
        got = log.create(first, late)
    # a client of HTTP may have sent it again on a new connection, at once
    assert lost and asked and got in ((None,) if asked[-1] else (None, first))
    assert win(place(), second) == (first if got or when == "after" else second)


# -- what is no decision --

CONTENT = {
    "cut off": (lambda d: dump_decision(d)[:-40], CorruptDecision),
    "empty": (lambda d: b"", CorruptDecision),
    "no json": (lambda d: b"\xff\x01 no json", CorruptDecision),
    "a list": (lambda d: b"[]", CorruptDecision),
    "one digit": (lambda d: dump_decision(d).replace(b"4000", b"4001"), CorruptDecision),
    "another slot": (lambda d: dump_decision(replace(d, slot=Slot(8, 0))), CorruptDecision),
    "newer": (lambda d: dump_decision(d).replace(b'"format": 4', b'"format": 99'), UnknownFormat),
}


@into(DAMAGED)
def what_is_no_decision_of_this_slot_is_refused_and_never_overwritten(place, kind):
    make, error = CONTENT[kind]
    d = record()
    assert make(d) != dump_decision(d)
    place().create(record(8))  # a log in a topic needs its newest record: it names the owner
    place.spoil("a", d.slot, make(d))
    for ask in (
        lambda: place().chain(7),
        lambda: place().create(d),
        lambda: place().create(record(commit=False)),
    ):
        with pytest.raises(error) as e:
            ask()
        assert "7.0" in str(e.value) and isinstance(e.value, TwoPhaseError)
    good = record(9)
    assert place().create(good) == good and place().chain(9) == [good]


def slow_one_nightly(promises):
    """Parameters of which only `make test-nightly` takes the driver suspended between any two
    lines, where a log is slow.
    """
    slow = a_driver_suspended_between_any_two_lines_gets_the_winning_record
    return [
        pytest.param(p, id=p.__name__, marks=[pytest.mark.nightly] * (p is slow)) for p in promises
    ]
