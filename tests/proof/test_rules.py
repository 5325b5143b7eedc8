"""Each rule is needed: with the rule every drill ends well, without it the same drill ends in an
anomaly, and the checker names it.

No Spark here: a driver with two tasks, run in this process, on the store in memory. One drill
and one rule run on a real broker, too; test_drills.py runs the others there.
"""

import copy
import re
import uuid
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict
from itertools import count

import pyarrow as pa
import pytest

from kafka2pc.decision_logs.files import FileLog
from kafka2pc.kafka.cluster_check import check
from kafka2pc.kafka.participant import KafkaParticipant
from kafka2pc.proof.both_levels import read_both
from kafka2pc.proof.checker import ANOMALIES, TOLERATED, Seen, anomalies
from kafka2pc.protocol.driver import Driver, Policy
from kafka2pc.protocol.errors import LostTransaction, PrecommitFailed, TwoPhaseError
from kafka2pc.protocol.history import History
from kafka2pc.protocol.log.slots import never_late
from kafka2pc.protocol.memory import MemoryParticipant, MemoryTransaction
from kafka2pc.protocol.messages import Plan
from kafka2pc.protocol.names import Names
from kafka2pc.protocol.participant import Outcome
from kafka2pc.protocol.phases import claim as claim_phase
from kafka2pc.protocol.phases import commit, decide, finish, identity, precommit, requests, restore
from kafka2pc.protocol.policies import retry_unknown
from kafka2pc.protocol.states import TxnState
from kafka2pc.spark.sink.opening import plan_batch

pytestmark = pytest.mark.never_unsteady
TASKS, ROWS = 2, 6  # of a batch


def ask_again(ask):
    return retry_unknown()(ask)


def key_of(row):
    """Rows of a key are all written by one task, so their order means something."""
    return f"k{row % TASKS}"


# -- the stores --


class Memory:
    def __init__(self, monkeypatch):
        self.participant, self.monkeypatch, self.refused = MemoryParticipant(), monkeypatch, set()

    def chunk(self, rows):
        return list(rows)

    def read(self):
        """What a read_committed consumer finds, and then a read_uncommitted one."""
        p = self.participant
        found = [
            (
                Seen(row=row, topic=p.name, offset=offset, key=key_of(row), batch_id=row // ROWS),
                p.txns[txn].state,
            )
            for offset, (txn, row) in enumerate(p.records)
        ]
        return [s for s, state in found if state is TxnState.COMMITTED], [s for s, _ in found]

    def look(self):
        """The rows that a read_committed reader finds now."""
        return self.participant.read()

    def refuse(self, rows):
        """From now on the store refuses these rows."""
        self.refused, flush = rows, MemoryTransaction.flush

        def picky(txn):
            refused, txn._rows = (
                self.refused.intersection(txn._rows),
                [row for row in txn._rows if row not in self.refused],
            )
            flush(txn)
            if refused:
                raise PrecommitFailed(f"{refused} refused")

        self.monkeypatch.setattr(MemoryTransaction, "flush", picky)

    def expire(self):
        self.participant.expire()

    @contextmanager
    def elsewhere(self):
        """The participant as another process has it: the same store, names of its own."""
        other = copy.copy(self.participant)
        other._names = Names()
        yield other


class Broker:
    def __init__(self, kafka):
        self.kafka, self.topic = kafka, f"rules-{uuid.uuid4().hex[:8]}"
        kafka.create_topic(self.topic, partitions=2)
        facts = check(kafka.client_conf, prefix=self.topic, topics=[self.topic])
        self.participant = KafkaParticipant(
            kafka.client_conf, prefix=self.topic, topic=self.topic, **asdict(facts)
        )

    def chunk(self, rows):
        keys, values = [key_of(row) for row in rows], [str(row) for row in rows]
        return pa.record_batch({"key": keys, "value": values})

    def read(self):
        return read_both(
            self.kafka.client_conf, self.topic, lambda r: int(r.value), lambda row: row // ROWS
        )


@pytest.fixture
def store(monkeypatch):
    return Memory(monkeypatch)


@pytest.fixture
def broker(kafka):
    made = Broker(kafka)
    yield made
    made.participant.close()


# -- Spark's side, in a few lines --


class Killed(Exception):
    """The driver was killed here."""


class Slots(FileLog):
    """A log to which `before_commit` happens once, just before the next COMMIT is written, and
    `before_claim` before the next claim.
    """

    before_commit = before_claim = None

    def create(self, decision, *late):
        hook = "before_commit" if decision.commit else "before_claim"
        happens = getattr(self, hook)
        setattr(self, hook, None)
        if happens:
            happens()
        return super().create(decision, *late)


class OneByOne:
    """A watcher that does nothing. With one, the driver ends one transaction after the other."""

    def turn(self, op):
        return nullcontext()

    def on_event(self, event):
        pass


class World:
    """A query of some batches with two tasks each. An operator before the sink makes its state anew
    whenever a task has read all its input.
    """

    def __init__(self, store, folder, batches=1):
        self.store, self.log, self.history, self.query_id, self.batches = (
            store,
            Slots(folder),
            History(watcher=OneByOne()),
            str(uuid.uuid4()),
            batches,
        )
        self.done, self.state, self.stopped_by, self.looks = set(), set(), [], []
        self.before_commit = self.before_next_life = lambda: None
        self.lost_transactions = "repair"

    def driver(self, **limits):
        p = self.store.participant
        return Driver(
            query_id=self.query_id,
            log=self.log,
            participants={p.name: p},
            history=self.history,
            policy=Policy(
                lost_transactions=self.lost_transactions, **{"retry": retry_unknown} | limits
            ),
        )

    def input(self, batch_id, task):
        rows = range(batch_id * ROWS, (batch_id + 1) * ROWS)[task::TASKS]
        yield self.store.chunk(rows[:1])
        yield self.store.chunk(rows[1:])
        self.state.add((batch_id, task))

    def tasks(self, plan):
        self.state -= {(plan.batch_id, task) for task in range(TASKS)}
        return [
            precommit.precommit(
                [self.store.participant], plan, self.input(plan.batch_id, task), self.history
            )
            for task in range(TASKS)
        ]

    def live(self, **limits):
        """One life of the driver, to the last batch."""
        driver, mine = self.driver(**limits), None
        for batch_id in (b for b in range(self.batches) if b not in self.done):
            plan = restore.restore(driver, batch_id, mine=mine)
            messages = self.tasks(plan)
            self.before_commit()
            try:
                commit.commit(driver, messages, batch_id)
            except TwoPhaseError:  # as Spark does
                decide.abort(driver, messages, batch_id)
                raise
            self.done.add(batch_id)
            mine = plan.token if plan.mode.value == "write" else None

    def go_on(self, lives=3, **limits):
        """Lives of the driver, until all is done; `limits` are for the first one."""
        for _ in range(lives):
            try:
                return self.live(**limits)
            except (Killed, TwoPhaseError) as e:
                self.stopped_by.append(e)
                self.before_next_life()
                limits = {}

    @property
    def batch_of(self):
        return {row: row // ROWS for row in range(self.batches * ROWS)}

    def look(self):
        """A read_committed reader that watches: what it sees goes into the history."""
        self.looks.append(self.store.look())
        self.history.append("ok", "read", batch_ids=sorted({row // ROWS for row in self.looks[-1]}))

    def anomalies(self):
        """What must not be, each by its name. What is still open ends by its timeout before the
        readers come.
        """
        p = self.store.participant
        hanging = p.in_doubt(self.query_id)
        for c in hanging:
            p.abort(c)
        more = dict(
            hanging=[c.transactional_id for c in hanging],
            unfinished=[b for b in range(self.batches) if b not in self.done],
            stateless={(b, t) for b in self.done for t in range(TASKS)} - self.state,
        )
        return anomalies(self.batch_of, *self.store.read(), self.history.events) | {
            name: what for name, what in more.items() if what
        }


# -- the drills --


def a_reader_watches(world):
    """After every answer of the store a reader looks."""

    def retry(ask):
        outcome = ask_again(ask)
        world.look()
        return outcome

    world.go_on(retry=lambda: retry)


def nothing_happens(world):
    """Rows wait in the client until a flush, and nothing fails."""
    world.go_on()


def a_row_is_refused(world):
    """The store refuses the last row of the batch, until the row is corrected."""
    world.store.refuse({ROWS - 1})
    world.before_next_life = lambda: world.store.refused.clear()
    world.go_on()


class FirstThenKilled(OneByOne):
    """A watcher that kills the driver once, after its first commit."""

    killed = False

    def on_event(self, event):
        if (event.kind, event.op) == ("ok", "commit") and not self.killed:
            self.killed = True
            raise Killed


def killed_between_two_commits(world):
    """The decision is durable and one of two transactions is committed, when the driver dies."""
    world.history = History(watcher=FirstThenKilled())
    world.go_on()


def timed_out_between_two_commits(world):
    """The same, and no restart comes in time: the other transaction is aborted by its timeout."""
    world.batches = 2
    world.before_next_life = lambda: world.store.expire()
    world.history = History(watcher=FirstThenKilled())
    world.go_on()


def timed_out_and_not_repaired(world):
    """The same, and what was lost is not written again."""
    world.lost_transactions = "fail"
    timed_out_between_two_commits(world)


def timed_out_before_the_decision(world):
    """All is pre-committed, and then the driver is so slow that the timeout strikes."""

    def slow():
        world.before_commit = lambda: None
        world.store.expire()

    world.before_commit = slow
    world.go_on()


def second_commit_unclear(world):
    """The store gives no answer to the second commit. The driver stops, and Spark calls abort()."""
    asked = []

    def retry(ask):
        asked.append(ask)
        return Outcome.UNKNOWN if len(asked) == 2 else ask_again(ask)

    world.go_on(retry=lambda: retry)


def killed_before_the_decision(world):
    """All is pre-committed, nothing decided, when the driver dies."""

    def killed():
        raise Killed

    world.log.before_commit = killed
    world.go_on()


def overtaken(world):
    """A driver stops for a while just before it decides. Meanwhile another one runs the batch to
    its end. Then the first one goes on.
    """
    world.log.before_commit = world.live
    world.go_on()


def two_begin_at_once(world):
    """A driver stops just before it claims. Meanwhile another one runs the batch to its end. Then
    the first one goes on.
    """
    world.log.before_claim = world.live
    world.go_on()


def overtaken_by_one_that_dies(world):
    """The same, but the second driver dies after it has restored."""
    world.log.before_commit = lambda: restore.restore(world.driver(), 0)
    world.go_on()


def zombie_begins_late(world):
    """A task of batch 0 that everybody has given up wakes in another process, just before batch 2
    is decided, and begins.
    """

    def wakes():
        with world.store.elsewhere() as participant:
            participant.begin(first)

    plan, world.batches = restore.restore, 3
    first = None

    def remembered(*args, **kw):
        nonlocal first
        made = plan(*args, **kw)
        first = first or made
        if made.batch_id == 2 and first is not made:
            world.log.before_commit = wakes
        return made

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(restore, "restore", remembered)
        world.go_on()


DRILLS = [
    a_reader_watches,
    nothing_happens,
    a_row_is_refused,
    killed_between_two_commits,
    timed_out_between_two_commits,
    timed_out_before_the_decision,
    second_commit_unclear,
    killed_before_the_decision,
    overtaken,
    overtaken_by_one_that_dies,
    two_begin_at_once,
    zombie_begins_late,
]
# no process is stopped
QUIET = [a_reader_watches, nothing_happens, two_begin_at_once, zombie_begins_late]


@pytest.mark.parametrize("drill", DRILLS, ids=lambda s: s.__name__)
def test_with_all_rules_every_drill_ends_well(drill, store, tmp_path):
    world = World(store, tmp_path)
    drill(world)
    assert bool(world.stopped_by) == (drill not in QUIET), world.stopped_by
    assert world.anomalies() == {}, world.stopped_by


def test_a_batch_becomes_visible_transaction_by_transaction(store, tmp_path):
    """No rule: between two commits of one decision a reader sees a part of the batch.
    That is tolerated; the end counts.
    """
    world = World(store, tmp_path)
    a_reader_watches(world)
    assert [sorted(rows) for rows in world.looks] == [
        list(range(0, ROWS, TASKS)),
        list(range(ROWS)),
    ]
    assert world.anomalies() == {} and "a batch in parts" in TOLERATED


def test_a_decided_transaction_that_is_lost_is_named_and_the_query_stops(store, tmp_path):
    """Rule 7: the rows cannot be recovered, so the error must name them."""
    world = World(store, tmp_path)
    timed_out_and_not_repaired(world)
    killed, *errors = world.stopped_by
    assert [type(e) for e in (killed, *errors)] == [Killed, LostTransaction, LostTransaction]
    committed, lost = world.log.chain(0)[-1].committables
    for e in errors:
        assert (
            f"batch 0 of query {world.query_id}" in e.what
            and committed.transactional_id not in e.what
        )
        assert (
            f"{lost.transactional_id} (producer id {lost.state.producer_id}, epoch"
            f" {lost.state.epoch}): {ROWS // TASKS} records" in e.what
        )
        assert all(
            f"{p.topic}-{p.partition}: {p.records} at offsets {p.first_offset} to {p.last_offset}"
            in e.what
            for p in lost.partitions
        )
        assert (
            e.risk.startswith("YES")
            and "write again what is not there" in e.action
            and "lostTransactions=skip" in e.action
            and e.action in str(e)
        )
    assert (
        sum(p.records for p in lost.partitions) == ROWS // TASKS
        and min(p.first_offset for p in lost.partitions) >= 0
    )
    assert (world.log.batches(), world.done) == ([0], set()), "the query goes on"
    gone = [*range(1, ROWS, TASKS)]
    assert world.anomalies() == {
        "lost": [*gone, *range(ROWS, 2 * ROWS)],
        "torn batch": {0: gone},
        "unfinished": [0, 1],
    }
    assert {s.batch_id for s in store.read()[1]} == {0}, "something of the next batch was written"


def test_a_reader_that_takes_uncommitted_for_committed_reads_what_was_aborted(store, tmp_path):
    world = World(store, tmp_path)
    killed_before_the_decision(world)
    committed, uncommitted = store.read()
    found = anomalies(world.batch_of, uncommitted, events=world.history.events)
    assert sorted(s.row for s in found["aborted read"]) == list(range(ROWS)) and not set(
        found["aborted read"]
    ) & set(committed)


# -- the rules, each one taken away --


def flush_before_the_last_rows(patch):
    """Rule 1, first half: what is written last is not flushed."""

    def write(txns, chunk):
        for txn in txns:
            txn.flush()
            txn.write(chunk)

    patch.setattr(precommit, "_write", write)
    patch.setattr(precommit, "flush_and_precommit", lambda txn, history, **ids: txn.precommit())


def nobody_checks_deliveries(patch):
    """Rule 1, second half."""

    def promise(txn, history, **ids):
        with suppress(TwoPhaseError):
            txn.flush()
        return txn.precommit()

    patch.setattr(precommit, "flush_and_precommit", promise)


def decision_without_the_last_task(patch):
    """Rule 2: it is decided before all have pre-committed."""
    as_before = commit.decide
    patch.setattr(
        commit,
        "decide",
        lambda driver, plan, messages, late: as_before(driver, plan, messages[:-1], late),
    )


def no_look_before_the_decision(patch):
    """Rule 4."""
    patch.setattr(commit, "check_open", lambda *about: never_late)


def decided_is_as_good_as_committed(patch):
    """Rule 6, first half: a restart does not finish what was decided."""
    patch.setattr(restore, "finish", lambda *_, **__: True)
    patch.setattr(commit, "_finish_again", lambda driver, messages, batch_id: None)


def losses_are_silent(patch):
    """Rule 7."""
    patch.setattr(finish, "report_loss", lambda *about: None)


def a_replay_writes_again(patch):
    """Rule 5, first half: restore does not look whether the batch is decided, and takes the slot
    after all others.
    """

    def claim(driver, batch_id, seen):
        attempt = len(driver.log.chain(batch_id))
        plan = Plan(
            query_id=driver.query_id,
            batch_id=batch_id,
            attempt=attempt,
            token=driver.new_token(batch_id, attempt + 1),
        )
        return driver.log.create(driver.decision(plan, commit=False))

    patch.setattr(restore, "commit_of", lambda log, batch_id: None)
    patch.setattr(restore, "claim", claim)


def a_replay_does_not_drain(patch):
    """Rule 5, second half. (Its count would be zero, and differ.)"""
    patch.setattr(precommit, "_read_to_the_end", lambda chunks: None)
    patch.setattr(commit, "check_replay", lambda driver, decided, messages: None)


def the_log_forgets(patch):
    """Rule 2: the decision is not durable. (An empty log would be refused, because the store knows
    the query.)
    """
    patch.setattr(Slots, "create", lambda log, decision, late: decision)
    patch.setattr(identity, "check_empty", lambda driver, known: None)


def the_log_lets_everybody_win(patch):
    """Rule 8: who comes second has won as well."""
    for module in (decide, claim_phase):
        patch.setattr(
            module, "win", lambda log, decision, late=never_late: log.create(decision) and decision
        )


def no_decision_before_the_first_commit(patch):
    """Rule 2: commit first, decide then. (A commit that no record names is refused, later.)"""
    as_before = commit.decide
    patch.setattr(identity, "check_not_put_back", lambda driver, seen, newest, known: None)

    def too_late(driver, plan, messages, late):
        for m in messages:
            for c in m.committables:
                requests.send(driver, "commit", c, plan.batch_id)
        return as_before(driver, plan, messages, late)

    patch.setattr(commit, "decide", too_late)


def abort_whatever_was_decided(patch):
    """Rule 3: abort() ends the transactions of its messages without reading the log."""

    def naive(driver, messages, batch_id):
        for m in messages:
            for c in m.committables:
                requests.send(driver, "abort", c, batch_id)

    for module in (decide, commit):
        patch.setattr(module, "abort", naive)


def no_claim(patch):
    """Rule 8: a run takes the next attempt without winning a slot, and sweeps. (The log stays
    empty, which would be refused.)
    """
    attempts = count()
    patch.setattr(identity, "check_empty", lambda driver, known: None)

    def claim(driver, batch_id, seen):
        attempt = next(attempts)
        plan = Plan(
            query_id=driver.query_id,
            batch_id=batch_id,
            attempt=attempt,
            token=driver.new_token(batch_id, attempt + 1),
        )
        return driver.decision(plan, commit=False)

    patch.setattr(restore, "claim", claim)


def ids_that_two_processes_share(patch):
    """Rule 8, for those who come too late to ask: the process is not in the id, as in a pool of ids
    for each task slot.
    """
    own = Names.next
    patch.setattr(
        Names,
        "next",
        lambda *of_a_batch: re.sub(
            r"-[0-9a-f]{16}-(\d+-[01])$", r"-0000000000000000-\1", own(*of_a_batch)
        ),
    )


def no_sweep(patch):
    """Rule 6, second half."""
    for module in (commit, restore):
        patch.setattr(module, "sweep", lambda driver, token, own_parity=None, after_win=None: [])


WITHOUT = [
    (1, flush_before_the_last_rows, nothing_happens, "torn batch"),
    (1, nobody_checks_deliveries, a_row_is_refused, "lost"),
    (2, decision_without_the_last_task, a_reader_watches, "torn batch"),
    (2, no_decision_before_the_first_commit, a_reader_watches, "early read"),
    (2, no_decision_before_the_first_commit, killed_before_the_decision, "aborted read"),
    (2, the_log_forgets, killed_between_two_commits, "duplicate"),
    (3, abort_whatever_was_decided, second_commit_unclear, "torn batch"),
    (4, no_look_before_the_decision, timed_out_before_the_decision, "lost"),
    (5, a_replay_writes_again, killed_between_two_commits, "duplicate"),
    (5, a_replay_writes_again, killed_between_two_commits, "reordered"),
    (5, a_replay_does_not_drain, killed_between_two_commits, "stateless"),
    (6, decided_is_as_good_as_committed, killed_between_two_commits, "torn batch"),
    (6, no_sweep, killed_before_the_decision, "hanging"),
    (8, the_log_lets_everybody_win, two_begin_at_once, "duplicate"),
    (8, no_claim, overtaken_by_one_that_dies, "lost"),
    (8, ids_that_two_processes_share, zombie_begins_late, "lost"),
]
# no rule of ours prevents it: test_kafka_participant.py shows it to a real reader
STORES_FAULT = {"inconsistent offsets"}


@pytest.mark.parametrize(
    ("rule", "off", "drill", "anomaly"),
    WITHOUT,
    ids=[f"{rule}-{off.__name__}-{anomaly}" for rule, off, _, anomaly in WITHOUT],
)
def test_without_the_rule_the_drill_ends_badly(
    rule, off, drill, anomaly, store, tmp_path, monkeypatch
):
    world = World(store, tmp_path)
    world.lost_transactions = "fail"  # a repair would hide what the rule prevents
    off(monkeypatch)
    drill(world)
    assert anomaly in world.anomalies(), f"{world.anomalies()}, stopped by {world.stopped_by}"


def test_without_rule_7_the_query_goes_on_and_only_the_checker_knows(store, tmp_path, monkeypatch):
    """The rows are lost with the rule as well; without it no error reports them."""
    world = World(store, tmp_path)
    losses_are_silent(monkeypatch)
    timed_out_and_not_repaired(world)
    gone = [*range(1, ROWS, TASKS)]
    assert [type(e) for e in world.stopped_by] == [Killed] and world.done == {0, 1}
    assert world.anomalies() == {"lost": gone, "torn batch": {0: gone}}


# -- one drill on a real broker --


@pytest.mark.kafka
@pytest.mark.parametrize("off", [None, a_replay_writes_again], ids=["all rules", "without rule 5"])
def test_on_a_broker_a_batch_is_there_twice_only_without_the_rule(
    off, broker, tmp_path, monkeypatch
):
    """The decision is durable and one of two transactions is committed, when the driver dies."""
    world = World(broker, tmp_path)
    if off:
        off(monkeypatch)
    killed_between_two_commits(world)
    assert [type(e) for e in world.stopped_by] == [Killed]
    found = world.anomalies()
    assert ("duplicate" in found) if off else found == {}, found


def test_every_rule_and_every_anomaly_has_a_witness():
    named = [(rule, anomaly) for rule, _, _, anomaly in WITHOUT if anomaly in ANOMALIES]
    # these two have tests of their own
    assert {rule for rule, _ in named} == set(range(1, 10)) - {7, 9}
    assert {anomaly for _, anomaly in named} | STORES_FAULT == ANOMALIES.keys()


# -- what the planner remembers --


@pytest.fixture
def planner(tmp_path):
    """A driver on the store in memory, as one planner process has it."""
    p = MemoryParticipant()
    return Driver(
        query_id=str(uuid.uuid4()),
        log=FileLog(tmp_path),
        participants={p.name: p},
        history=History(),
    )


def written(planner, plan):
    commit.commit(
        planner,
        [
            precommit.precommit(
                planner.participants.values(), plan, iter([[plan.batch_id]]), planner.history
            )
        ],
        plan.batch_id,
    )


def test_the_decision_names_the_rows_that_were_planned(planner):
    written(planner, plan_batch(planner, 0, "rows as planned"))
    assert planner.log.chain(0)[-1].offsets_hash == "rows as planned"


def test_a_run_that_only_finished_a_batch_again_claims_the_next_one(planner):
    mine = plan_batch(planner, 0, "")
    written(planner, mine)
    goes_on = plan_batch(planner, 1, "")
    assert (goes_on.attempt, goes_on.token) == (0, mine.token)
    written(planner, goes_on)
    again = plan_batch(planner, 1, "")
    assert again.mode.value == "drain"
    claims = plan_batch(planner, 2, "")
    assert claims.attempt == 1 and claims.token != mine.token
