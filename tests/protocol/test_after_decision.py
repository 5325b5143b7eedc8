"""After the decision: what a replay is compared with, what errors say, and how long and in which
order transactions are ended.
"""

import time
import uuid
from contextlib import contextmanager
from dataclasses import replace

import pytest

from kafka2pc.protocol.driver import Driver, Policy
from kafka2pc.protocol.errors import (
    NOTHING_WRITTEN,
    BrokerUnreachable,
    LogUnwritable,
    LostTransaction,
    NotAuthorized,
    OutcomeUnknown,
    Refused,
    Reopened,
    ReplayDiffers,
    Superseded,
)
from kafka2pc.protocol.log.decisions import Slot
from kafka2pc.protocol.log.questions import newest_record
from kafka2pc.protocol.log.slots import MemoryLog
from kafka2pc.protocol.memory import MemoryParticipant
from kafka2pc.protocol.messages import Mode
from kafka2pc.protocol.participant import Description, Gone, Outcome
from kafka2pc.protocol.phases.commit import commit
from kafka2pc.protocol.phases.decide import decide
from kafka2pc.protocol.phases.finish import complete
from kafka2pc.protocol.phases.precommit import precommit
from kafka2pc.protocol.phases.restore import restore
from kafka2pc.protocol.phases.salvage import _claim
from kafka2pc.protocol.phases.sweep import sweep
from kafka2pc.protocol.phases.verify import judge
from kafka2pc.protocol.policies import retry_unknown
from kafka2pc.protocol.states import TxnState


class Moody(MemoryParticipant):
    """`moods`: for each verb what it does first, as a function that may raise or answer; None: as
    usual.
    """

    def __init__(self, name="memory", **moods):
        super().__init__(name)
        self.moods, self.asked = moods, []

    def _do(self, verb, usual):
        self.asked.append(verb)
        mood = self.moods.get(verb)
        answer = mood() if mood else None
        return usual() if answer is None else answer

    def commit(self, c):
        return self._do("commit", lambda: super(Moody, self).commit(c))

    def describe(self, cs, **more):
        return self._do("describe", lambda: super(Moody, self).describe(cs, **more))

    def in_doubt(self, query_id):
        return self._do("in_doubt", lambda: super(Moody, self).in_doubt(query_id))


def driver_of(*stores, **more):
    return Driver(
        query_id=str(uuid.uuid4()),
        log=MemoryLog(),
        participants={s.name: s for s in stores},
        **more,
    )


def run(driver, batch_id=0, *tasks):
    planned = restore(driver, batch_id)
    messages = [
        precommit(
            driver.participants.values(),
            planned,
            iter([rows]),
            measure=lambda rows: sum(map(len, rows)),
        )
        for rows in tasks or (["row"],)
    ]
    commit(driver, messages, batch_id)
    return planned


def refuse():
    raise NotAuthorized("EndTxn: 53")


# -- the replay --


def test_a_commit_keeps_the_rows_and_bytes_that_the_tasks_have_read():
    driver = driver_of(Moody())
    run(driver, 0, ["a", "bc"], ["def"], [])
    found = newest_record(driver.log)
    assert (found.rows, found.bytes) == (3, 6)


@pytest.mark.parametrize(
    ("replayed", "says"),
    [
        ((["a", "b"],), "3 rows with 4 bytes .* the replay has 2 rows with 2 bytes"),
        ((["a", "b", "cde"],), "3 rows with 4 bytes .* the replay has 3 rows with 5 bytes"),
        (([],), "the replay has 0 rows with 0 bytes"),
    ],
)
def test_a_replay_with_other_rows_is_an_error_after_the_decision_is_finished(replayed, says):
    store = Moody()
    driver = driver_of(store)
    run(driver, 0, ["a", "b"], ["cd"])
    for _ in range(2):  # every replay, until an operator decides how to go on
        with pytest.raises(ReplayDiffers, match=says) as e:
            run(driver, 0, *replayed)
        assert "replayCheck=warn" in e.value.action
    assert store.read() == ["a", "b", "cd"]


def test_a_replay_that_is_the_same_in_other_tasks_is_fine():
    driver = driver_of(Moody())
    run(driver, 0, ["a", "b"], ["cd"])
    assert run(driver, 0, ["cd", "b", "a"]).mode is Mode.DRAIN


def test_a_replay_that_differs_can_be_a_warning(caplog):
    driver = driver_of(Moody(), policy=Policy(replay_check="warn"))
    run(driver, 0, ["a"])
    run(driver, 0, ["a", "b"])
    assert "1 rows with 1 bytes" in caplog.text


def test_a_record_without_counts_is_not_checked():
    driver = driver_of(Moody())
    run(driver, 0, ["a"])
    slot = Slot(0, 1)
    driver.log.records[slot] = replace(
        driver.log.records[slot], rows=None, bytes=None, identity=None
    )
    run(driver, 0, ["a", "b"])


# -- errors --


def test_no_error_says_that_nothing_was_written_once_the_batch_is_decided():
    driver = driver_of(Moody(commit=refuse))
    with pytest.raises(NotAuthorized) as e:
        run(driver)
    assert newest_record(driver.log).commit
    assert e.value.risk != NOTHING_WRITTEN and "decided" in e.value.risk
    assert "Nothing was written" not in str(e.value)


def test_before_the_decision_it_may_say_so():
    with pytest.raises(NotAuthorized) as e:
        run(driver_of(Moody(in_doubt=refuse)))
    assert e.value.risk == NOTHING_WRITTEN


def test_what_gave_no_clear_answer_is_described_before_it_is_called_unclear():
    """EndTxn(commit) is repeated on PrepareCommit as long as a partition has no leader; but it
    cannot be taken back any more.
    """
    store = Moody(commit=lambda: Outcome.UNKNOWN)
    driver = driver_of(store)
    store.moods["describe"] = lambda: (
        [Description(TxnState.COMMITTED)] if "commit" in store.asked else None
    )
    run(driver)


def test_what_is_still_open_is_unclear():
    store = Moody(commit=lambda: Outcome.UNKNOWN)
    with pytest.raises(OutcomeUnknown, match="no clear answer"):
        run(driver_of(store))


def test_a_store_that_cannot_be_asked_leaves_it_unclear():
    def gone():
        if "commit" in store.asked:
            raise BrokerUnreachable("gone")

    store = Moody(commit=lambda: Outcome.UNKNOWN, describe=gone)
    with pytest.raises(OutcomeUnknown, match="no clear answer"):
        run(driver_of(store))


@pytest.mark.parametrize("trouble", ["in_doubt", "purge"])
@pytest.mark.parametrize(
    "error",
    [BrokerUnreachable("gone"), NotAuthorized("gone"), RuntimeError("gone")],
    ids=lambda e: type(e).__name__,
)
def test_tidying_up_after_a_complete_batch_is_logged_not_raised(trouble, error, caplog):
    def fails(*_):
        if "commit" in store.asked:
            raise error

    store = Moody(**{trouble: fails} if trouble == "in_doubt" else {})
    driver = driver_of(store)
    if trouble == "purge":
        driver.log.purge = fails
    run(driver)
    assert (
        store.read() == ["row"]
        and "batch 0 is complete" in caplog.text
        and "Nothing was written" not in caplog.text
    )


def test_tidying_up_waits_for_seconds_only(caplog):
    """The next batch sweeps, too."""

    class Patient(MemoryParticipant):
        limit_ms = None

        @contextmanager
        def briefly(self, limit_ms):
            self.limit_ms = limit_ms
            yield self
            self.limit_ms = None

        def in_doubt(self, query_id):
            if self.read() and not (self.limit_ms and self.limit_ms <= 10_000):
                raise BrokerUnreachable("no answer in two minutes")
            return super().in_doubt(query_id)

    run(driver_of(Patient()))
    assert not caplog.text


def test_a_log_that_cannot_be_read_after_the_decision_says_that_the_batch_is_decided(monkeypatch):
    driver = driver_of(Moody())

    def refused(log, batch_id):
        raise NotAuthorized("the log: 29")

    planned = restore(driver, 0)
    message = precommit(driver.participants.values(), planned, iter([["row"]]))
    monkeypatch.setattr("kafka2pc.protocol.phases.finish.overtaken", refused)
    with pytest.raises(NotAuthorized) as e:
        commit(driver, [message], 0)
    assert newest_record(driver.log).commit and "decided" in e.value.risk


def test_a_log_that_gave_no_answer_and_then_refuses_leaves_the_decision_unknown():
    """The first answer was lost on its way; the second try could not even be sent."""

    class Lost(MemoryLog):
        def create(self, decision, *late):
            if not decision.commit:
                return super().create(decision, *late)
            if decision.slot in self.records:
                raise LogUnwritable("the brokers are gone")
            super().create(decision, *late)

    driver = replace(driver_of(Moody()), log=Lost())
    with pytest.raises(OutcomeUnknown):
        run(driver)
    assert newest_record(driver.log).commit


def test_a_replay_without_partitions_is_compared_too():
    driver = driver_of(Moody())
    run(driver, 0, ["a"])
    assert restore(driver, 0).mode is Mode.DRAIN
    with pytest.raises(ReplayDiffers, match="the replay has 0 rows"):
        commit(driver, [], 0)


# -- time that passes while stores answer --


class Aged(MemoryParticipant):
    """It believes the age of the plan, as Kafka does, and says so at once."""

    def describe(self, cs, *, margin_ms=0, age_ms=None):
        return [
            Description(s.state, self.timeout_ms - age_ms >= margin_ms)
            for s in super().describe(cs)
        ]


class Slow(MemoryParticipant):
    def describe(self, cs, **limits):
        time.sleep(0.3)
        return super().describe(cs)


def test_the_margin_is_left_when_the_last_store_has_answered():
    stores = Aged("kafka", timeout_ms=500), Slow("database")
    with pytest.raises(Refused, match="300 ms must be left"):
        run(driver_of(*stores, policy=Policy(margin_ms=300)))
    assert stores[0].read() == []
    run(driver_of(Aged("kafka"), Slow("database"), policy=Policy(margin_ms=300)))


# -- how long, and in which order --


def test_the_time_for_unclear_answers_is_one_for_the_batch():
    retry, asked = retry_unknown(1000, total_ms=300, first_ms=10, longest_ms=50), []
    began = time.monotonic()
    for _ in range(20):
        assert retry(lambda: asked.append(1) or Outcome.UNKNOWN) is Outcome.UNKNOWN
    assert time.monotonic() - began < 3 and len(asked) >= 20


def test_each_phase_has_a_time_of_its_own_for_unclear_answers():
    """A sweep long before, or a slow batch, takes nothing from the time to commit."""
    made = []
    driver = driver_of(Moody(), policy=Policy(retry=lambda: made.append(1) or (lambda ask: ask())))
    run(driver)
    assert len(made) >= 2


def test_participants_are_ended_in_order_where_it_is_asked_for():
    order, unclear = [], []

    def noted(name):
        return lambda: order.append(name) or (Outcome.UNKNOWN if name in unclear else None)

    stores = [Moody(name, commit=noted(name)) for name in ("database", "gate")]
    driver = driver_of(*stores, policy=Policy(in_order=True))
    run(driver, 0, ["a"], ["b"], ["c"])
    assert order == ["database"] * 3 + ["gate"] * 3
    unclear.append("database")
    with pytest.raises(OutcomeUnknown):
        run(driver, 1, ["d"], ["e"])
    assert order[6:] == ["database"] * 2, "the second was not asked"
    assert stores[1].read() == ["a", "b", "c"]


# -- aborted after the decision --


class Keeping(MemoryParticipant):
    """As Kafka: it knows nothing of the names in `forgotten`, and which rows are not there."""

    def __init__(self):
        super().__init__()
        self.forgotten = set()

    def describe(self, cs, **more):
        cs = list(cs)
        known = super().describe(cs, **more)
        forgotten = [c.transactional_id in self.forgotten for c in cs]
        return [Description(None) if f else d for f, d in zip(forgotten, known, strict=True)]

    def final(self, cs):
        return {c: self.txns[c.transactional_id, c.state.epoch].state for c in cs}

    def gone(self, cs, *, open_there=False):
        return [() if self.receipt(*key(c)).records == c.records else (a_gap(c),) for c in cs]


def key(c):
    return c.transactional_id, c.state.epoch


def a_gap(c):
    return Gone(topic=c.participant, partition=0, first_offset=0, last_offset=0, why="retention")


def aborted(driver, *tasks, committed=0):
    """Batch 0 is decided for these tasks; the store commits the first ones, and aborts the rest."""
    [store], plan = driver.participants.values(), restore(driver, 0, offsets_hash="offsets")
    messages = [precommit([store], plan, iter([[*rows]])) for rows in tasks]
    decided = decide(driver, plan, messages)
    for c in decided.committables[:committed]:
        store.commit(c)
    store.expire()
    return decided


def kinds(driver):
    return [d.kind for d in driver.log.chain(0)]


def test_what_is_aborted_and_forgotten_is_written_again_before_the_next_batch():
    """Spark has gone on, because the error of the commit was caught."""
    store = Keeping()
    driver = driver_of(store)
    store.forgotten = {c.transactional_id for c in aborted(driver, "ab", "c").committables}
    restore(driver, 1)
    assert store.read() == ["a", "b", "c"] and kinds(driver)[-1] == "REPAIR"


def test_a_batch_is_not_reopened_if_its_log_has_written_rows_with_the_decision():
    driver = driver_of(Keeping())
    driver.log.decides_more = True
    aborted(driver, "ab")
    assert restore(driver, 0, offsets_hash="offsets").mode is Mode.DRAIN
    assert kinds(driver) == ["ABORT", "COMMIT", "CLAIM", "REPAIR"]


def test_starts_that_find_no_rows_leave_no_claim():
    store = Keeping()
    driver = driver_of(store)
    aborted(driver, "ab", "c", committed=1)
    store.records.pop()
    for _ in range(3):
        with pytest.raises(LostTransaction, match="retention"):
            restore(driver, 0, offsets_hash="offsets")
    assert kinds(driver) == ["ABORT", "COMMIT"] and store.read() == ["a", "b"]


class SlowCopy(MemoryParticipant):
    """Copies no more than one transaction in time."""

    def write_again(self, lost, plan):
        if len(lost) > 1:
            raise Refused("the copy took too long")
        return super().write_again(lost, plan)


def test_what_cannot_be_copied_in_one_transaction_is_copied_in_several():
    store = SlowCopy("memory")
    driver = driver_of(store)
    plan = restore(driver, 0)
    decide(driver, plan, [precommit([store], plan, [[row]]) for row in "abcde"])
    store.expire()
    assert restore(driver, 0).mode is Mode.DRAIN
    assert (store.read(), store.in_doubt(driver.query_id)) == (list("abcde"), [])


class Suspending(Keeping):
    """The driver is suspended, once, at its first call of `verb`: `sleep` is what others do."""

    def __init__(self, verb):
        super().__init__()
        self.verb, self.sleep = verb, None

    def _at(self, verb, answer):
        sleep, self.sleep = self.sleep, self.sleep if verb != self.verb else None
        if sleep and verb == self.verb:
            sleep()
        return answer

    def final(self, cs):
        return self._at("final", super().final(cs))

    def describe(self, cs, **more):
        self._at("describe", None)
        return super().describe(cs, **more)

    def write_again(self, lost, plan):
        return self._at("write_again", super().write_again(lost, plan))


def repaired_by_another(driver, rows):
    """Another run repairs batch 0, then the topic removes `rows` of what was aborted."""

    def sleep():
        restore(driver, 0, offsets_hash="offsets")
        [store] = driver.participants.values()
        store.records = [(name, row) for name, row in store.records if (name, row) not in rows]

    return sleep


def test_a_suspended_salvage_writes_nothing_that_another_run_has_repaired():
    """The other run has ended the copy of the first one, which then would write half of it."""
    store = Suspending("write_again")
    driver = driver_of(store)
    aborted(driver, "a", "b", "c", committed=1)
    store.sleep = repaired_by_another(driver, [])
    assert restore(driver, 0, offsets_hash="offsets").mode is Mode.DRAIN
    assert store.read() == ["a", "b", "c"]
    assert kinds(driver) == ["ABORT", "COMMIT", "CLAIM", "CLAIM", "REPAIR"]


def test_a_suspended_salvage_of_one_transaction_follows_the_repair_of_another_run():
    store = Suspending("write_again")
    driver = driver_of(store)
    aborted(driver, "a", "b", committed=1)
    store.sleep = repaired_by_another(driver, [])
    assert restore(driver, 0, offsets_hash="offsets").mode is Mode.DRAIN
    assert store.read() == ["a", "b"]


def test_rows_that_are_gone_after_another_run_has_repaired_them_are_not_lost():
    store = Suspending("final")
    driver = driver_of(store)
    _, lost, _ = aborted(driver, "a", "b", "c", committed=1).committables
    store.sleep = repaired_by_another(driver, [(key(lost), "b")])
    assert restore(driver, 0, offsets_hash="offsets").mode is Mode.DRAIN
    assert store.read() == ["a", "b", "c"]


def test_a_suspended_repair_asks_again_whether_spark_has_the_batch():
    """Meanwhile an operator has written the rows by hand, and `skip` lets the query go on."""
    done = set()
    store = Suspending("write_again")
    driver = driver_of(store, spark_committed=done.__contains__)
    aborted(driver, "a", "b", "c", committed=1)

    def skipped():
        restore(driver.within(lost_transactions="skip"), 0, offsets_hash="offsets")
        done.add(0)
        store.expire()

    store.sleep = skipped
    with pytest.raises(Superseded, match="another run has finished it"):
        restore(driver, 0, offsets_hash="offsets")
    assert store.read() == ["a"] and kinds(driver)[-1] == "CLAIM"


def test_what_cannot_be_copied_in_time_is_reopened_if_spark_replays_it():
    """An operator repairs the batch: Spark does not replay it at this moment."""

    class TooSlow(MemoryParticipant):
        def write_again(self, lost, plan):
            raise Refused("the copy took too long")

    driver = driver_of(TooSlow())
    decided = aborted(driver, "a", "b")
    with pytest.raises(Reopened):
        complete(driver, decided)
    assert kinds(driver)[-1] == "LOST"


def test_a_planner_that_finishes_the_batch_before_late_claims_the_next_one():
    """An operator has written commits/0 by hand. Between the planner's first look at the log and
    its own repair, another repair claims the batch; its sweep aborts what has an older claim.
    """
    store, tokens = Suspending("describe"), []
    driver = driver_of(store, spark_committed=lambda batch_id: batch_id == 0)
    decided = aborted(driver, "a", "b", committed=1)
    store.sleep = lambda: tokens.append(_claim(driver, judge(driver, decided)).token)
    plan = restore(driver, 1, mine=decided.token)
    message = precommit([store], plan, [["c"]])
    assert sweep(driver, *tokens) == []
    commit(driver, [message], 1)
    assert store.read() == ["a", "b", "c"]


def test_skip_writes_nothing_again():
    """It is the way to go on when the rows were written by hand."""
    store = MemoryParticipant()
    driver = driver_of(store).within(lost_transactions="skip")
    plan = restore(driver, 0)
    decide(driver, plan, [precommit([store], plan, [["a"]])])
    store.expire()
    assert restore(driver, 0).mode is Mode.DRAIN
    assert (store.read(), len(driver.log.slots())) == ([], 2)
