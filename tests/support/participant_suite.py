"""What every participant must do, as plain functions: each takes `at` (`At`, or something like it)
and raises if the store does not do it.

`REQUIRED` is for every store, `DURABLE` also for those that outlive the process that writes.
`SMOKE`: a few of both, for a store that a lesson, or whose code another test, checks as a whole.
`check(make, checks)` runs them on a fresh `make()` each; lessons use it.
"""

import json
import os
import pickle
import subprocess
import sys
import threading
import uuid
from contextlib import suppress
from dataclasses import asdict, replace

import pyarrow as pa
import pytest

from kafka2pc.protocol.driver import Driver
from kafka2pc.protocol.errors import PrecommitFailed, StoreUnreachable, WrongCluster
from kafka2pc.protocol.log.slots import MemoryLog
from kafka2pc.protocol.messages import (
    Committable,
    Mode,
    Plan,
    PreparedTxnState,
    committable_from_dict,
)
from kafka2pc.protocol.names import new_token
from kafka2pc.protocol.participant import Identified, KeepsAborted, OpensGate, Outcome
from kafka2pc.protocol.phases.precommit import precommit
from kafka2pc.protocol.phases.restore import restore
from kafka2pc.protocol.policies import retry_unknown
from kafka2pc.protocol.states import IllegalStep, TxnState

DONE, REFUSED, UNKNOWN = Outcome.DONE, Outcome.REFUSED, Outcome.UNKNOWN
REQUIRED, DURABLE = [], []


def rows(texts):
    """A batch with these texts as its only column."""
    return pa.RecordBatch.from_pydict({"value": pa.array(texts, pa.string())})


class At:
    """A store, how a row (a text) gets in, and what a reader sees that has nothing to do with the
    store's code.

    `remembers`: the store still knows a transaction after its commit. `another()`: from now on
    another store is at this place or name; returns the participant that a restart makes there.
    `half_commit(c)`: does to the store what a process does that dies in `commit` as soon as it has
    committed. A store without the notion leaves them out, and passes these checks.
    """

    def __init__(self, store, seen, rows=list, *, remembers=True, another=None, half_commit=None):
        self.store, self.rows, self._seen, self.remembers = store, rows, seen, remembers
        self.another, self.half_commit = another, half_commit

    def write(self, txn, *texts):
        txn.write(self.rows(texts))

    def seen(self):
        return sorted(self._seen())


def a_plan(batch_id=0, query_id=None, token=None):
    return Plan(
        query_id=query_id or str(uuid.uuid4()),
        batch_id=batch_id,
        attempt=1,
        token=token or new_token(batch_id, 1),
    )


def precommit_rows(at, plan, *texts):
    with at.store.begin(plan) as txn:
        at.write(txn, *texts)
        txn.flush()
        return txn.precommit()


def ask(verb, c):
    return retry_unknown()(lambda: verb(c))


def required(check):
    REQUIRED.append(check)
    return check


def durable(check):
    DURABLE.append(check)
    return check


def check(make, checks):
    """Run each check on a fresh `make()`. Returns their names, or raises the first failure."""
    for one in checks:
        one(make())
    return [one.__name__ for one in checks]


# -- commit and abort --


@required
def precommitted_rows_are_invisible_until_the_commit_and_a_second_commit_is_harmless(at):
    c = precommit_rows(at, a_plan(), "a", "b")
    assert (c.records, c.participant, at.seen()) == (2, at.store.name, [])
    assert ask(at.store.commit, c) is DONE and ask(at.store.commit, c) is DONE
    assert at.seen() == ["a", "b"]
    assert at.store.describe([c])[0].state is TxnState.COMMITTED


@required
def aborted_rows_never_show_and_a_second_abort_is_harmless(at):
    c = precommit_rows(at, a_plan(), "a")
    assert ask(at.store.abort, c) is DONE and ask(at.store.abort, c) is DONE
    assert ask(at.store.commit, c) is REFUSED
    assert at.seen() == [] and at.store.describe([c])[0].state in (TxnState.ABORTED, None)


@required
def what_is_aborted_for_ever_is_written_again_once(at):
    """Of a store that keeps aborted rows: its proof is final, and the copy is a transaction."""
    if not isinstance(at.store, KeepsAborted):
        return
    plan = a_plan()
    lost, kept = precommit_rows(at, plan, "a", "b"), precommit_rows(at, plan, "c")
    assert at.store.final([lost, kept]) == {lost: None, kept: None}, "both are open"
    ask(at.store.abort, lost)
    assert at.store.final([lost, kept]) == {lost: TxnState.ABORTED, kept: None}
    assert ask(at.store.commit, lost) is REFUSED
    again = at.store.write_again([lost], replace(plan, attempt=3, token=new_token(0, 3)))
    assert (again.records, at.seen()) == (2, [])
    ask(at.store.commit, kept)
    ask(at.store.commit, again)
    assert at.seen() == ["a", "b", "c"]
    assert at.store.final([lost, kept, again]) == {
        lost: TxnState.ABORTED,
        kept: TxnState.COMMITTED,
        again: TxnState.COMMITTED,
    }


@required
def rows_that_are_committed_behind_a_gate_show_after_its_abort(at):
    """Of a store that has one, and is set up to open it."""
    plan = a_plan()
    if not isinstance(at.store, OpensGate) or not at.store.gated:
        return
    gate = at.store.open_gate(plan)
    assert (gate.participant, at.store.describe([gate])[0].state) == (
        at.store.name,
        TxnState.PRECOMMITTED,
    )
    assert [c.state for c in at.store.unended(plan.query_id).open] == [gate.state]
    c = precommit_rows(at, plan, "a")
    assert ask(at.store.commit, c) is DONE
    assert at.seen() == []
    assert ask(at.store.abort, gate) is DONE and ask(at.store.commit, gate) is REFUSED
    assert at.seen() == ["a"]
    assert at.store.in_doubt(plan.query_id) == []


@required
def abort_after_commit_is_refused(at):
    c = precommit_rows(at, a_plan(), "a")
    assert ask(at.store.commit, c) is DONE
    assert ask(at.store.abort, c) is REFUSED
    assert at.seen() == ["a"]


@required
def of_a_commit_and_an_abort_at_once_one_wins(at):
    expected, plan = [], a_plan()
    for n in range(5):
        c, answers, both = precommit_rows(at, plan, str(n)), {}, threading.Barrier(2)

        def end(verb, c=c, answers=answers, both=both):
            both.wait()
            answers[verb] = ask(getattr(at.store, verb), c)

        threads = [threading.Thread(target=end, args=(verb,)) for verb in ("commit", "abort")]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        assert sorted(o.value for o in answers.values()) == ["done", "refused"], answers
        expected += [str(n)] * (answers["commit"] is DONE)
    assert at.seen() == expected


@required
def a_precommitted_transaction_can_be_committed_while_its_writer_lives(at):
    with at.store.begin(a_plan()) as txn:
        at.write(txn, "a")
        txn.flush()
        c = txn.precommit()
        assert ask(at.store.commit, c) is DONE
    assert at.seen() == ["a"]


# -- in doubt --


@required
def in_doubt_lists_the_open_transactions_of_this_query_and_each_can_be_ended(at):
    mine, other = a_plan(), a_plan()
    kept, left, foreign = (
        precommit_rows(at, mine, "a"),
        precommit_rows(at, mine, "b"),
        precommit_rows(at, other, "c"),
    )
    identity = lambda cs: {(c.transactional_id, c.state, c.participant) for c in cs}
    assert identity(at.store.in_doubt(mine.query_id)) == identity([kept, left])
    assert ask(at.store.commit, kept) is DONE
    in_doubt = at.store.in_doubt(mine.query_id)
    assert identity(in_doubt) == identity([left])
    assert ask(at.store.abort, in_doubt[0]) is DONE
    assert at.store.in_doubt(mine.query_id) == []
    assert ask(at.store.commit, foreign) is DONE
    assert at.seen() == ["a", "c"]


@required
def describe_answers_in_order_and_never_open_for_an_unknown_transaction(at):
    plan = a_plan()
    one, two = precommit_rows(at, plan, "a"), precommit_rows(at, plan, "b")
    start, count, parity = two.transactional_id.rsplit("-", 2)
    never = Committable(
        transactional_id=f"{start}-{int(count) + 9}-{parity}",
        state=PreparedTxnState(1, 0),
        participant=at.store.name,
    )
    assert ask(at.store.abort, one) is DONE
    said = at.store.describe([two, never, one])
    assert said[0].state is TxnState.PRECOMMITTED
    assert {s.state for s in said[1:]} <= {TxnState.ABORTED, None}
    assert said[0].in_time and at.store.describe([two], margin_ms=1, age_ms=None)[0].in_time
    if two.timeout_ms:
        assert [
            s.in_time for s in at.store.describe([two, two], margin_ms=two.timeout_ms + 1, age_ms=0)
        ] == [False, False]
    assert at.store.describe([]) == []
    assert ask(at.store.commit, never) is REFUSED


@required
def store_id_is_always_the_same(at):
    assert at.store.store_id() == at.store.store_id() != ""


@required
def a_committable_and_a_participant_can_be_pickled(at):
    from pyspark import cloudpickle

    c = precommit_rows(at, a_plan(), "a")
    assert (
        committable_from_dict(json.loads(json.dumps(asdict(c))))
        == pickle.loads(pickle.dumps(c))
        == c
    )
    assert cloudpickle.loads(cloudpickle.dumps(at.store)).store_id() == at.store.store_id()


# -- another store, and a commit of which the store has no note --


def a_driver(store, query_id, log):
    return Driver(query_id=query_id, log=log, participants={store.name: store})


def is_committed(store, c):
    """False also if the store has no clear answer."""
    with suppress(StoreUnreachable):
        return store.describe([c])[0].state is TxnState.COMMITTED
    return False


@required
def another_store_at_the_same_place_is_refused_before_anything_is_written(at):
    if at.another is None:
        return
    plan, log = a_plan(), MemoryLog()
    restore(a_driver(at.store, plan.query_id, log), 0)
    other = at.another()
    with pytest.raises(WrongCluster, match=at.store.name):
        restore(a_driver(other, plan.query_id, log), 0)
    assert other.in_doubt(plan.query_id) == other.traces(plan.query_id) == []


@required
def another_store_at_the_same_place_reports_no_loss(at):
    """It may be there only from the decision on, or for one of the processes."""
    if at.another is None:
        return
    c = precommit_rows(at, a_plan(), "a")
    other = at.another()
    answer = other.commit(c)
    assert answer is UNKNOWN or is_committed(other, c), answer
    if answer is UNKNOWN:
        with pytest.raises(StoreUnreachable):
            other.describe([c])


@required
def a_commit_of_which_the_store_has_no_note_is_done(at):
    if at.half_commit is None:
        return
    plan = a_plan()
    c = precommit_rows(at, plan, "a")
    at.half_commit(c)
    assert ask(at.store.commit, c) is DONE and ask(at.store.abort, c) is REFUSED
    assert (at.seen(), at.store.in_doubt(plan.query_id)) == (["a"], [])
    assert at.store.describe([c])[0].state is TxnState.COMMITTED


# -- names --


@required
def no_id_is_used_twice_within_a_batch(at):
    plan = a_plan()
    assert len({precommit_rows(at, plan, str(n)).transactional_id for n in range(3)}) == 3


@required
def the_tasks_of_two_queries_take_turns_and_keep_their_transactions(at):
    one, two = a_plan(), a_plan()
    cs = [precommit_rows(at, *made) for made in ((one, "a"), (two, "b"), (one, "c"), (two, "d"))]
    assert [ask(at.store.commit, c) for c in cs] == [DONE] * 4
    assert at.seen() == ["a", "b", "c", "d"]


@required
def a_reused_id_aborts_its_open_transaction_and_the_old_committable_is_refused(at):
    plan = a_plan()
    old = precommit_rows(at, plan, "old")
    new = precommit_rows(at, replace(plan, batch_id=2), "new")
    assert old.transactional_id == new.transactional_id and old.state != new.state
    assert [c.state for c in at.store.in_doubt(plan.query_id)] == [new.state]
    assert ask(at.store.commit, old) is REFUSED
    assert ask(at.store.commit, new) is DONE
    assert at.seen() == ["new"]
    assert at.store.describe([old])[0].state is not TxnState.COMMITTED


def does_not_get_through(at, txn):
    """Either the pre-commit fails, or the commit is refused."""
    try:
        at.write(txn, "late")
        txn.flush()
        c = txn.precommit()
    except Exception:
        return
    assert ask(at.store.commit, c) is REFUSED


@required
def a_late_writer_does_not_get_through_after_its_id_was_reused(at):
    plan = a_plan()
    late = at.store.begin(plan)
    at.write(late, "early")
    new = precommit_rows(at, replace(plan, batch_id=2), "new")
    does_not_get_through(at, late)
    assert ask(at.store.commit, new) is DONE
    assert at.seen() == ["new"]


@required
def a_late_writer_does_not_get_through_after_a_sweep(at):
    plan = a_plan()
    late = at.store.begin(plan)
    at.write(late, "early")
    late.flush()
    swept = [ask(at.store.abort, c) for c in at.store.in_doubt(plan.query_id)]
    assert set(swept) <= {DONE}
    if swept:  # a store may list only what is pre-committed
        does_not_get_through(at, late)
    assert at.seen() == []


# -- leaving --


@required
def an_exception_aborts_and_is_raised_unchanged(at):
    plan = a_plan()
    with pytest.raises(ZeroDivisionError), at.store.begin(plan) as txn:
        at.write(txn, "a")
        txn.flush()
        1 / 0  # noqa: B018
    assert (at.store.in_doubt(plan.query_id), at.seen()) == ([], [])


@required
def leaving_without_precommit_shows_nothing_and_the_listed_transactions_can_be_aborted(at):
    plan = a_plan()
    with at.store.begin(plan) as txn:
        at.write(txn, "a")
        txn.flush()
    assert {ask(at.store.abort, c) for c in at.store.in_doubt(plan.query_id)} <= {DONE}
    assert (at.store.in_doubt(plan.query_id), at.seen()) == ([], [])


@required
def a_partition_without_rows_and_a_drain_begin_nothing(at):
    plan = a_plan()
    assert precommit([at.store], plan, [at.rows([]), at.rows([])]).committables == ()
    assert (
        precommit([at.store], replace(plan, mode=Mode.DRAIN), [at.rows(["a"])]).committables == ()
    )
    assert (at.store.in_doubt(plan.query_id), at.seen()) == ([], [])


# -- after the pre-commit --


def precommitted(at, txn, *texts):
    """Writes these texts and pre-commits: the Committable."""
    at.write(txn, *texts)
    txn.flush()
    return txn.precommit()


@required
def a_write_after_precommit_is_refused_and_changes_nothing(at):
    with at.store.begin(a_plan()) as txn:
        c = precommitted(at, txn, "a", "b")
        with pytest.raises(IllegalStep, match=f"{c.transactional_id}.*write is not possible"):
            at.write(txn, "late")
            txn.flush()
    assert ask(at.store.commit, c) is DONE
    assert (c.records, at.seen()) == (2, ["a", "b"])


@required
def a_flush_after_precommit_adds_no_rows(at):
    """A store may refuse to pre-commit rows that are not flushed, or it flushes them itself."""
    with at.store.begin(a_plan()) as txn:
        at.write(txn, "a")
        try:
            c = txn.precommit()
        except PrecommitFailed:
            return
        with suppress(IllegalStep):
            txn.flush()
    assert ask(at.store.commit, c) is DONE
    assert len(at.seen()) == c.records


def left_by_an_exception(at, plan):
    """A transaction that an exception left after its pre-commit: the Committable."""
    with pytest.raises(ZeroDivisionError), at.store.begin(plan) as txn:
        c = precommitted(at, txn, "a")
        1 / 0  # noqa: B018
    return c


@required
def an_exception_after_precommit_leaves_the_transaction_precommitted(at):
    plan = a_plan()
    c = left_by_an_exception(at, plan)
    assert at.store.describe([c])[0].state is TxnState.PRECOMMITTED
    assert [left.transactional_id for left in at.store.in_doubt(plan.query_id)] == [
        c.transactional_id
    ]
    assert ask(at.store.commit, c) is DONE
    assert at.seen() == ["a"]


@durable
def another_process_commits_a_transaction_that_an_exception_left_after_precommit(at):
    assert in_another_process(at, "commit", left_by_an_exception(at, a_plan())) is DONE
    assert at.seen() == ["a"]


# -- traces --


@required
def traces_lists_the_transactions_of_a_query_and_of_no_other(at):
    mine, other = a_plan(), a_plan()
    assert at.store.traces(mine.query_id) == []
    kept, open_, foreign = (
        precommit_rows(at, mine, "a"),
        precommit_rows(at, mine, "b"),
        precommit_rows(at, other, "c"),
    )
    both = sorted([kept.transactional_id, open_.transactional_id])
    assert sorted(at.store.traces(mine.query_id)) == both
    assert at.store.traces(other.query_id) == [foreign.transactional_id]
    assert ask(at.store.commit, kept) is DONE
    assert sorted(at.store.traces(mine.query_id)) == (
        both if at.remembers else [open_.transactional_id]
    )
    assert ask(at.store.abort, open_) is DONE and ask(at.store.abort, foreign) is DONE
    assert set(at.store.traces(mine.query_id)) <= set(both)


BY_SPARK = str(uuid.uuid4())
OF_A_NAME = str(uuid.uuid5(uuid.NAMESPACE_OID, "orders"))  # another application may use it, too


@required
def in_doubt_lists_what_is_open_under_any_prefix_of_the_query(at):
    """If Spark has made its id; else a run with another prefix looks under the former one."""
    for query_id in (BY_SPARK, OF_A_NAME):
        c = precommit_rows(at, a_plan(query_id=query_id), "a")
        if isinstance(at.store, Identified) and at.store.identity().prefix:
            other = at.store.under("other")
            former = other.under(at.store.identity().prefix)
            found = [[d.state for d in store.in_doubt(query_id)] for store in (other, former)]
            assert found == [[c.state] if query_id == BY_SPARK else [], [c.state]]
        assert ask(at.store.abort, c) is DONE


@required
def traces_lists_a_reused_id_once(at):
    plan = a_plan()
    for batch_id in (0, 2):
        c = precommit_rows(at, replace(plan, batch_id=batch_id), str(batch_id))
        assert ask(at.store.commit, c) is DONE
    open_ = precommit_rows(at, replace(plan, batch_id=4), "4")
    assert at.store.traces(plan.query_id) == [open_.transactional_id]


# -- other processes --

OTHER_PROCESS = """
import json, pickle, sys
from kafka2pc.protocol.messages import committable_from_dict
store, verb, committable = pickle.load(sys.stdin.buffer)
from kafka2pc.protocol.policies import retry_unknown
c = committable_from_dict(json.loads(committable))
print(retry_unknown()(lambda: getattr(store, verb)(c)).value)
"""

KILLED_WRITER = """
import json, os, pickle, signal, sys
from dataclasses import asdict
store, plan, rows, last = pickle.load(sys.stdin.buffer)
def reached(verb):
    if verb == last: os.kill(os.getpid(), signal.SIGKILL)
txn = store.begin(plan).__enter__()
reached("begin")
txn.write(rows)
reached("write")
txn.flush()
reached("flush")
c = txn.precommit()
print(json.dumps(asdict(c)), flush=True)
reached("precommit")
getattr(store, last)(c)
reached(last)
"""


# Two processes of one machine that draw the same random bits.
TWINS = """
import os
os.urandom = lambda n: bytes(n)  # before any module keeps it
import json, pickle, sys
from dataclasses import asdict
sent = sys.stdin.buffer.read()
for n in range(2):
    pid = os.fork()  # before a driver has a thread, or a connection
    if pid:
        os.waitpid(pid, 0)
        continue
    try:
        store, plan, *texts = pickle.loads(sent)
        rows = texts[n]
        with store.begin(plan) as txn:
            txn.write(rows)
            txn.flush()
            print(json.dumps(asdict(txn.precommit())), flush=True)
    except Exception as e:
        print(f"{type(e).__name__}: {e}", file=sys.stderr, flush=True)
    os._exit(0)
"""


def run_python(script, *what):
    """What a fresh Python process prints that gets `what`. Classes of a notebook travel by value,
    as Spark sends them.
    """
    from pyspark import cloudpickle

    env = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    done = subprocess.run(
        [sys.executable, "-c", script],
        input=cloudpickle.dumps(what),
        capture_output=True,
        env=env,
        timeout=60,
    )
    assert done.returncode in (0, -9), done.stderr.decode()
    return done.stdout.decode().strip()


def in_another_process(at, verb, c):
    return Outcome(run_python(OTHER_PROCESS, at.store, verb, json.dumps(asdict(c))))


def killed_after(at, plan, last, *texts):
    """A process that writes `texts` and dies by SIGKILL right after the verb `last`: its
    Committable, if it returned one.
    """
    said = run_python(KILLED_WRITER, at.store, plan, at.rows(texts), last)
    return committable_from_dict(json.loads(said)) if said else None


@durable
def another_process_commits_and_aborts_with_only_the_committable(at):
    kept, left = precommit_rows(at, a_plan(), "a"), precommit_rows(at, a_plan(), "b")
    assert (in_another_process(at, "commit", kept), in_another_process(at, "abort", left)) == (
        DONE,
        DONE,
    )
    assert (in_another_process(at, "commit", left), in_another_process(at, "abort", kept)) == (
        REFUSED,
        REFUSED,
    )
    assert at.seen() == ["a"]


@durable
def a_writer_killed_before_precommit_leaves_only_what_a_sweep_ends(at):
    for last in ("begin", "write", "flush"):
        plan = a_plan()
        assert killed_after(at, plan, last, "a") is None
        assert {ask(at.store.abort, c) for c in at.store.in_doubt(plan.query_id)} <= {DONE}
        assert at.store.in_doubt(plan.query_id) == []
    assert at.seen() == []


@durable
def a_writer_killed_after_precommit_leaves_its_transaction_precommitted(at):
    plan = a_plan()
    kept, left = (
        killed_after(at, plan, "precommit", "a", "b"),
        killed_after(at, plan, "precommit", "c"),
    )
    assert len(at.store.in_doubt(plan.query_id)) == 2 and at.seen() == []
    assert ask(at.store.commit, kept) is DONE and ask(at.store.abort, left) is DONE
    assert (at.store.in_doubt(plan.query_id), at.seen()) == ([], ["a", "b"])


@durable
def a_process_killed_after_commit_or_abort_has_done_it_once(at):
    kept, left = killed_after(at, a_plan(), "commit", "a"), killed_after(at, a_plan(), "abort", "b")
    assert (ask(at.store.commit, kept), ask(at.store.abort, left)) == (DONE, DONE)
    assert (ask(at.store.abort, kept), ask(at.store.commit, left)) == (REFUSED, REFUSED)
    assert at.seen() == ["a"]


@durable
def two_processes_that_draw_one_name_do_not_share_a_transaction(at):
    """Either each has its own, or one of them fails, or is refused: no row is lost in silence."""
    texts = ("a", "b")
    said = run_python(TWINS, at.store, a_plan(), *(at.rows([text]) for text in texts))
    cs = [committable_from_dict(json.loads(line)) for line in said.splitlines()]
    assert cs and len({(c.transactional_id, c.state) for c in cs}) == len(cs), cs
    states = [d.state for d in at.store.describe(cs)]
    answers = [ask(at.store.commit, c) for c in cs]
    is_open = [state in (TxnState.OPEN, TxnState.PRECOMMITTED) for state in states]
    assert answers == [DONE if each else REFUSED for each in is_open]
    assert len(at.seen()) == answers.count(DONE) > 0


SMOKE = [
    precommitted_rows_are_invisible_until_the_commit_and_a_second_commit_is_harmless,
    of_a_commit_and_an_abort_at_once_one_wins,
    in_doubt_lists_the_open_transactions_of_this_query_and_each_can_be_ended,
    a_late_writer_does_not_get_through_after_a_sweep,
    a_writer_killed_after_precommit_leaves_its_transaction_precommitted,
]
SMOKE_REQUIRED = [check for check in SMOKE if check in REQUIRED]


def few_of(checks, rest="full"):
    """Parameters of which `make test` takes those of SMOKE. `rest`: the mark of the others."""
    return [
        pytest.param(
            check, id=check.__name__, marks=[getattr(pytest.mark, rest)] * (check not in SMOKE)
        )
        for check in checks
    ]
