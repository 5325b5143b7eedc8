"""One prefix owns the log in a topic at any time; in memory, with every order of two drivers."""

import random
from dataclasses import replace

import pytest
from fake_topic_log import (
    FakeBroker,
    FakeTopicLog,
    Turns,
    every_order,
)

from kafka2pc.protocol.driver import Driver
from kafka2pc.protocol.errors import (
    CorruptDecision,
    LogUnwritable,
    MovedLog,
    NotAuthorized,
    OutcomeUnknown,
    StaleCheckpoint,
    Superseded,
    TwoPhaseError,
    UnfinishedBatch,
    UnknownFormat,
)
from kafka2pc.protocol.log.decisions import Decision, Identity, Slot
from kafka2pc.protocol.log.format import dump_decision
from kafka2pc.protocol.memory import MemoryParticipant
from kafka2pc.protocol.messages import Mode
from kafka2pc.protocol.names import new_token
from kafka2pc.protocol.operators.adopt import adopt
from kafka2pc.protocol.phases.commit import commit
from kafka2pc.protocol.phases.precommit import precommit
from kafka2pc.protocol.phases.restore import restore

pytestmark = pytest.mark.never_unsteady

QUERY = "11111111-2222-3333-4444-555555555555"
POINTS = ["read", "fence", "append", "end"]
LOSES = (MovedLog, Superseded, LogUnwritable)


def record(prefix, batch_id, attempt, commit=False, adopts=False):
    """A decision that a driver with this prefix writes."""
    return Decision(
        query_id=QUERY,
        slot=Slot(batch_id, attempt),
        commit=commit,
        adopts=adopts,
        token=new_token(batch_id, attempt + 1),
        identity=Identity(log="kafka:d", prefix=prefix, fence=prefix),
    )


def broker_of(prefix="p1"):
    """A broker whose log holds batch 0, decided under a prefix."""
    broker = FakeBroker()
    FakeTopicLog(broker, QUERY, prefix).create(record(prefix, 0, 0, commit=True))
    return broker


def contents(broker):
    """What a new process finds: slot -> decision. Raises `CorruptDecision`."""
    log = FakeTopicLog(broker, QUERY, "reader")
    return {slot: log.load(slot) for slot in log.slots()}


def check_owners(broker):
    """Each record is written by the owner of that moment; only an ADOPT changes it."""
    log = FakeTopicLog(broker, QUERY, "reader")
    owner = ""
    for at in range(len(broker.log)):
        key, value = broker.log[at]
        log.reader.tail.broker = type("Part", (), {"log": broker.log[: at + 1]})
        log.reader.read()
        slot = Slot(*map(int, key.partition("/")[2].split(".")))
        decision = log.load(slot)
        assert decision.adopts or owner in ("", decision.identity.fence), broker.log
        owner = log.reader.records().owner()
        assert owner == decision.identity.fence


# -- the rule --


def test_the_first_record_makes_its_prefix_the_owner_and_another_prefix_is_refused():
    broker = FakeBroker()
    first, other = FakeTopicLog(broker, QUERY, "p1"), FakeTopicLog(broker, QUERY, "p2")
    assert (first.owner(), other.owner()) == ("", "")
    mine = first.create(record("p1", 0, 0))
    assert (first.owner(), other.owner()) == ("p1", "p1")
    with pytest.raises(MovedLog) as caught:
        other.create(record("p2", 0, 1))
    said = str(caught.value)
    for words in (
        "belongs to the prefix p1 since its newest record, and this run uses p2",
        "transactionalIdPrefix=p1",
        "kafka2pc adopt CHECKPOINT --prefix p2",
        "Nothing was touched",
    ):
        assert words in said
    assert contents(broker) == {(0, 0): mine}


def test_a_record_that_is_there_is_reported_whatever_the_prefix():
    broker = broker_of("p1")
    (there,) = contents(broker).values()
    assert FakeTopicLog(broker, QUERY, "p2").create(record("p2", 0, 0)) == there


def test_an_adoption_hands_the_log_over_once():
    broker = broker_of("p1")
    old, new = FakeTopicLog(broker, QUERY, "p1"), FakeTopicLog(broker, QUERY, "p2")
    adopted = new.create(record("p2", 0, 1, adopts=True))
    assert adopted.adopts and new.owner() == "p2"
    with pytest.raises(MovedLog, match="belongs to the prefix p2"):
        old.create(record("p1", 1, 0, commit=True))
    wanted = record("p2", 1, 0)
    assert new.create(wanted) == wanted
    check_owners(broker)


def test_a_log_whose_newest_record_has_format_1_takes_any_prefix():
    broker = FakeBroker()
    old = replace(record("", 0, 0, commit=True), identity=None)
    broker.log.append((f"{QUERY}/0.0", dump_decision(old)))
    log = FakeTopicLog(broker, QUERY, "p2")
    assert log.owner() == ""
    wanted = record("p2", 1, 0)
    assert log.create(wanted) == wanted and log.owner() == "p2"


@pytest.mark.parametrize(
    ("content", "error"), [(b"x", CorruptDecision), (b'{"format": 99}', UnknownFormat)]
)
def test_nothing_is_written_while_the_newest_record_cannot_be_read(content, error):
    """It may be the ADOPT of another prefix, or of a newer version."""
    broker = broker_of("p1")
    broker.log.append((f"{QUERY}/0.1", content))
    with pytest.raises(error):
        FakeTopicLog(broker, QUERY, "p1").create(record("p1", 1, 0, commit=True))
    assert len(broker.log) == 2


def test_a_right_that_was_revoked_has_its_own_error():
    broker = broker_of("p1")
    broker.revoked.add(f"p1-decisions-{QUERY}")
    log = FakeTopicLog(broker, QUERY, "p2")
    with pytest.raises(NotAuthorized) as caught:
        log.create(record("p2", 0, 1, adopts=True))
    said = str(caught.value)
    assert "was revoked" in said and "Grant WRITE" in said and "transactionalIdPrefix=p1" in said
    with pytest.raises(NotAuthorized) as caught:  # its own id: the usual advice
        FakeTopicLog(broker, QUERY, "p1").create(record("p1", 0, 1))
    assert "was revoked" not in str(caught.value)
    assert len(broker.log) == 1


def test_an_adoption_that_is_not_the_newest_record_is_refused():
    """The query decided the next batch after the operator's command had looked."""
    broker = broker_of("p1")
    FakeTopicLog(broker, QUERY, "p1").create(record("p1", 1, 0, commit=True))
    with pytest.raises(Superseded, match="it went on just now"):
        FakeTopicLog(broker, QUERY, "p2").create(record("p2", 0, 1, adopts=True))
    assert len(broker.log) == 2


# -- too late --


@pytest.mark.parametrize("asked", [0, 1])
def test_nothing_is_sent_once_it_is_too_late(asked):
    """Asked right before the append, and right before the end."""
    broker, seen, answers = broker_of(), [], [False] * asked + [True] * 9
    log = FakeTopicLog(broker, QUERY, "p1", seen.append)
    with pytest.raises(LogUnwritable, match="too little time is left"):
        log.create(record("p1", 1, 0), late=lambda: answers.pop(0))
    assert ("append" in seen, "end" in seen) == (asked == 1, False)
    assert contents(broker).keys() == {(0, 0)}


@pytest.mark.parametrize("deaf", [True, False])
def test_an_unclear_end_stays_unclear_when_it_is_too_late(deaf):
    broker, seen, answers = broker_of(), [], [False, False, True]
    log = FakeTopicLog(broker, QUERY, "p1", seen.append)
    log.lost, log.deaf = 1, deaf
    assert log.create(record("p1", 1, 0), late=lambda: answers.pop(0)) is None
    assert seen.count("end") == 1


def test_after_a_fence_and_a_read_an_unclear_end_is_clear():
    broker, answers = broker_of(), [False, False, False, True]
    log = FakeTopicLog(broker, QUERY, "p1")
    log.lost, log.deaf = 1, True
    with pytest.raises(LogUnwritable, match="too little time is left"):
        log.create(record("p1", 1, 0), late=lambda: answers.pop(0))


@pytest.mark.parametrize("revoked", [True, False])
def test_an_end_stays_unclear_as_long_as_its_id_is_not_fenced(revoked):
    """No owner was known, and the ADOPT was sent under its own id. Then another prefix wrote: the
    ADOPT is refused under the id of that one, but the first may still come.
    """
    broker = FakeBroker()
    log = FakeTopicLog(broker, QUERY, "p2")
    log.lost, log.deaf = 1, True

    def at(point):
        if point == "end":
            FakeTopicLog(broker, QUERY, "p1").create(record("p1", 1, 0))
            broker.revoked |= {f"p1-decisions-{QUERY}"} if revoked else set()

    log.at = at
    assert log.create(record("p2", 0, 0, adopts=True)) is None


# -- every order of two creates, and of three --


def race(broker, wanted, choose, lost=0):
    """Each (prefix, *records) is created by a driver of its own, which stops at an error. Returns
    (record, answer) of each create.
    """
    turns, told = Turns(choose), []

    def driver(who):
        prefix, *decisions = wanted[who]
        log = FakeTopicLog(broker, QUERY, prefix, lambda point: turns.wait(who))
        log.lost = lost
        for decision in decisions:
            answer = outcome(lambda: log.create(decision))  # noqa: B023
            told.append((decision, answer))
            if answer != decision:
                return

    errors = turns.run({who: lambda who=who: driver(who) for who in range(len(wanted))})
    assert set(errors.values()) == {None}, errors
    return told


def outcome(act):
    """What it returns, or its error."""
    try:
        return act()
    except TwoPhaseError as e:
        return e


def check_race(broker, told):
    """Slots are write-once, each writer knows what it wrote, and only the owner writes."""
    there = contents(broker)
    check_owners(broker)
    for decision, answer in told:
        if isinstance(answer, Exception):
            assert isinstance(answer, LOSES), repr(answer)
            assert decision not in there.values(), repr(answer)
        else:
            assert there.get(decision.slot) == answer or (answer is None and decision.adopts)


RACES = {
    "the owner decides, another prefix claims": [
        ("p1", record("p1", 1, 0, commit=True)),
        ("p2", record("p2", 1, 0)),
    ],
    "the owner decides, another prefix adopts its slot": [
        ("p1", record("p1", 0, 1, commit=True)),
        ("p2", record("p2", 0, 1, adopts=True)),
    ],
    "the owner decides the next batch, another prefix adopts": [
        ("p1", record("p1", 1, 0, commit=True)),
        ("p2", record("p2", 0, 1, adopts=True)),
    ],
    "two prefixes adopt the same slot": [
        ("p2", record("p2", 0, 1, adopts=True)),
        ("p3", record("p3", 0, 1, adopts=True)),
    ],
    "two prefixes adopt one after the other": [
        ("p2", record("p2", 0, 1, adopts=True)),
        ("p3", record("p3", 0, 2, adopts=True)),
    ],
    "one adopts and decides, another one adopts": [
        ("p2", record("p2", 0, 1, adopts=True), record("p2", 0, 2, commit=True)),
        ("p3", record("p3", 0, 2, adopts=True)),
    ],
}


@pytest.mark.parametrize("lost", [0, 1])
@pytest.mark.parametrize("name", RACES)
def test_in_every_order_of_two_drivers_one_prefix_writes(name, lost):
    """`lost`: how many answers to EndTxn each of them loses."""

    def run(choose):
        broker = broker_of("p1")
        check_race(broker, race(broker, RACES[name], choose, lost))

    assert every_order(run, 10) > 30


def test_in_every_order_of_three_prefixes_one_writes():
    wanted = [
        ("p1", record("p1", 1, 0, commit=True)),
        ("p2", record("p2", 0, 1, adopts=True), record("p2", 1, 0, commit=True)),
        ("p3", record("p3", 0, 1, adopts=True), record("p3", 0, 2, adopts=True)),
    ]

    def run(choose):
        broker = broker_of("p1")
        check_race(broker, race(broker, wanted, choose))

    assert every_order(run, 6) > 300
    for seed in range(1500):
        run(random.Random(seed).choice)


def test_two_first_writers_with_two_prefixes_do_not_both_win():
    """They have no id in common. The one that ends last finds both records, and stops."""
    wanted = [("p1", record("p1", 0, 0)), ("p2", record("p2", 0, 0))]
    both = []

    def run(choose):
        broker = FakeBroker()
        told = race(broker, wanted, choose)
        assert sum(answer == decision for decision, answer in told) <= 1, told
        if any(isinstance(answer, CorruptDecision) for _, answer in told):
            both.append(told)
        else:
            check_race(broker, told)

    assert every_order(run, 10) > 30 and both, "this test cannot fail"


# -- whole drivers: a batch is decided under p1, and its driver is in line for the next one --


class Query:
    """A query on a broker in memory. `store`: the rows that readers see."""

    def __init__(self):
        self.broker, self.store = FakeBroker(), MemoryParticipant()

    def driver(self, prefix, at=lambda point: None):
        return Driver(
            query_id=QUERY,
            log=FakeTopicLog(self.broker, QUERY, prefix, at),
            participants={"memory": self.store},
            about=Identity(prefix=prefix, topics=("t",), checkpoint="file:///cp"),
        )

    def write(self, driver, batch_id, mine=None):
        """Run a batch as Spark does; returns the token of its run."""
        plan = restore(driver, batch_id, mine=mine)
        if plan.mode is Mode.WRITE:
            message = precommit([self.store], plan, [[f"r{batch_id}"]])
            commit(driver, [message], batch_id)
        return plan.token

    def in_line(self, prefix, at=lambda point: None):
        """A driver that has done batch 0, and a function that runs batch 1 in line."""
        driver = self.driver(prefix, at)
        token = self.write(driver, 0)
        return lambda: self.write(driver, 1, token)

    def adopt(self, prefix, at=lambda point: None):
        """What `kafka2pc adopt --prefix` does."""
        return adopt(self.driver(prefix, at))

    def check(self):
        """No row is there twice, and the log can be read."""
        rows = self.store.read()
        assert len(set(rows)) == len(rows), rows
        for decision in contents(self.broker).values():
            assert decision is not None
        check_owners(self.broker)


def once(point, nth, act, done):
    """A hook that runs `act` when `point` is reached for the nth time."""
    left = [nth]

    def at(reached):
        if reached != point:
            return
        left[0] -= 1
        if left[0] == 0:
            done.append(outcome(act))

    return at


REFUSED = (*LOSES, StaleCheckpoint, OutcomeUnknown, UnfinishedBatch)
MOMENTS = [(point, nth) for point in POINTS for nth in (1, 2, 3)]


@pytest.mark.parametrize(("point", "nth"), MOMENTS)
@pytest.mark.parametrize("suspended", ["new", "old"])
def test_a_restart_with_another_prefix_writes_nothing_while_the_old_driver_decides(
    suspended, point, nth
):
    query, done, hook = Query(), [], []
    delegate = lambda reached: [at(reached) for at in list(hook)]
    old = query.in_line("p1", delegate if suspended == "old" else lambda reached: None)
    driver = query.driver("p2", delegate if suspended == "new" else lambda reached: None)
    new = lambda: query.write(driver, 1)
    first, second = (old, new) if suspended == "old" else (new, old)
    hook.append(once(point, nth, second, done))
    done.append(outcome(first))
    query.check()
    assert {d.identity.fence for d in contents(query.broker).values()} == {"p1"}
    for answer in done:  # a COMMIT that the new one meets is finished, or refused
        assert not isinstance(answer, Exception) or isinstance(answer, REFUSED), repr(answer)
    outcome(old)
    assert query.store.read() == ["r0", "r1"]


@pytest.mark.parametrize(("point", "nth"), MOMENTS)
@pytest.mark.parametrize("suspended", ["adopter", "old"])
def test_whatever_the_order_of_an_adoption_and_the_old_drivers_batch_no_row_is_there_twice(
    suspended, point, nth
):
    query, done, hook = Query(), [], []
    delegate = lambda reached: [at(reached) for at in list(hook)]
    old = query.in_line("p1", delegate if suspended == "old" else lambda reached: None)

    def move():
        """The operator adopts, and starts the query with the new prefix."""
        adopted = query.adopt("p2", delegate if suspended == "adopter" else lambda reached: None)
        return adopted, query.write(query.driver("p2"), 1)

    first, second = (old, move) if suspended == "old" else (move, old)
    hook.append(once(point, nth, second, done))
    done.append(outcome(first))
    query.check()
    for answer in done:
        assert not isinstance(answer, Exception) or isinstance(answer, REFUSED), repr(answer)
    log = query.driver("p2").log
    if log.owner() == "p1":  # the query went on: stop it, and adopt again
        query.adopt("p2")
    query.write(query.driver("p2"), 2 if "r1" in query.store.read() else 1)
    with pytest.raises((MovedLog, StaleCheckpoint, Superseded)):
        query.write(query.driver("p1"), 3)
    query.check()
    assert query.store.read().count("r1") <= 1 and log.owner() == "p2"


def test_after_two_adoptions_only_the_last_prefix_writes():
    query = Query()
    old = query.in_line("p1")
    query.adopt("p2")
    second = query.driver("p2")
    query.adopt("p3")
    for act in (old, lambda: query.write(second, 1)):
        with pytest.raises(MovedLog, match="p3"):
            act()
    query.write(query.driver("p3"), 1)
    query.check()
    assert query.store.read() == ["r0", "r1"]
