"""Each rule is needed: with the rule every story ends well, without it the same story ends in the anomaly that the rule forbids.

No Spark here: a driver with two tasks, played in this process, on the store in memory and on the real broker.
"""
import copy
import re
import uuid
from contextlib import contextmanager
from dataclasses import asdict
from itertools import count

import pyarrow as pa
import pytest
from kafka_fixtures import values

from kafka2pc import commit, kafka as kafka_room, precommit, restore
from kafka2pc.decisions import FileLog
from kafka2pc.errors import TwoPhaseError
from kafka2pc.history import History, Seen, duplicate, early_read, lost
from kafka2pc.kafka import KafkaParticipant, check, retry_unknown
from kafka2pc.protocol import MemoryParticipant, Names, Outcome, Plan
from kafka2pc.story import until

pytestmark = pytest.mark.timeout(120)
TASKS, ROWS = 2, 6  # of a batch
ask_again = retry_unknown()


# -- the stores --


class Memory:
    def __init__(self):
        self.participant = MemoryParticipant()

    def chunk(self, rows):
        return list(rows)

    def read(self):
        return self.participant.read()

    @contextmanager
    def elsewhere(self):
        """The participant as another process has it: the same store, names of its own."""
        other = copy.copy(self.participant)
        other._names = Names()
        yield other


class Broker:
    def __init__(self, kafka, monkeypatch):
        self.kafka, self.topic, self.monkeypatch = kafka, f"rules-{uuid.uuid4().hex[:8]}", monkeypatch
        kafka.create_topic(self.topic, partitions=2)
        facts = check(kafka.client_conf, prefix=self.topic, topics=[self.topic])
        self.participant = KafkaParticipant(kafka.client_conf | {"log_level": 0}, prefix=self.topic, topic=self.topic, **asdict(facts))

    def chunk(self, rows):
        return pa.record_batch({"value": [str(row) for row in rows]})

    def read(self):
        until(lambda: not self.participant.control.list_transactions(self.topic, ("PrepareCommit", "PrepareAbort")), "what was ended is completed")
        return [int(value) for value in values(self.kafka, self.topic)]

    @contextmanager
    def elsewhere(self):
        with self.monkeypatch.context() as patch:
            patch.setattr(kafka_room, "_NAMES", Names())
            yield self.participant


@pytest.fixture(params=["memory", pytest.param("broker", marks=pytest.mark.kafka)])
def store(request, monkeypatch):
    made = Memory() if request.param == "memory" else Broker(request.getfixturevalue("kafka"), monkeypatch)
    yield made
    if request.param == "broker":
        made.participant.close()


# -- Spark's side, in a few lines --


class Killed(Exception):
    """The driver was killed here."""


class Slots(FileLog):
    """A log to which `before_commit` happens once, just before the next COMMIT is written."""

    before_commit = None

    def create(self, decision):
        if decision.commit and self.before_commit:
            happens, self.before_commit = self.before_commit, None
            happens()
        return super().create(decision)


class World:
    """A query of some batches with two tasks each. An operator before the sink makes its state anew whenever a task has read all its input."""

    def __init__(self, store, folder, batches=1):
        self.store, self.log, self.history, self.query_id, self.batches = store, Slots(folder), History(), str(uuid.uuid4()), batches
        self.done, self.state, self.stopped_by = set(), set(), []

    def driver(self, **more):
        p = self.store.participant
        return commit.Driver(query_id=self.query_id, log=self.log, participants={p.name: p}, history=self.history, **{"retry": ask_again} | more)

    def input(self, batch_id, task):
        rows = range(batch_id * ROWS, (batch_id + 1) * ROWS)[task::TASKS]
        yield self.store.chunk(rows[:1])
        yield self.store.chunk(rows[1:])
        self.state.add((batch_id, task))

    def tasks(self, plan):
        self.state -= {(plan.batch_id, task) for task in range(TASKS)}
        return [precommit.precommit([self.store.participant], plan, self.input(plan.batch_id, task), self.history) for task in range(TASKS)]

    def live(self, **driver):
        """One life of the driver, to the last batch."""
        driver, mine = self.driver(**driver), None
        for batch_id in (b for b in range(self.batches) if b not in self.done):
            plan = restore.plan(driver, batch_id, mine=mine)
            messages = self.tasks(plan)
            try:
                commit.commit(driver, messages, batch_id)
            except TwoPhaseError:  # as Spark does
                commit.abort(driver, messages, batch_id)
                raise
            self.done.add(batch_id)
            mine = plan.token if plan.mode.value == "write" else mine

    def go_on(self, lives=3, **driver):
        """Lives of the driver, until all is done; `driver` is for the first one."""
        for _ in range(lives):
            try:
                return self.live(**driver)
            except (Killed, TwoPhaseError) as e:
                self.stopped_by.append(type(e).__name__)
                driver = {}

    def anomalies(self):
        """What must not be, each by its name. What is still open ends by its timeout before the reader comes."""
        p = self.store.participant
        hanging = p.in_doubt(self.query_id)
        for c in hanging:
            p.abort(c)
        seen = [Seen(row=row) for row in self.store.read()]
        self.history.append("ok", "read", batch_ids=sorted({s.row // ROWS for s in seen}))
        found = dict(lost=lost(range(self.batches * ROWS), seen), duplicate=duplicate(seen), hanging=[c.transactional_id for c in hanging],
                     early=early_read(self.history.events), stateless={(b, t) for b in self.done for t in range(TASKS)} - self.state,
                     unfinished=[b for b in range(self.batches) if b not in self.done])
        return {name: what for name, what in found.items() if what}


# -- the stories --


def killed_between_two_commits(world):
    """The decision is durable and one of two transactions is committed, when the driver dies."""
    def first_then_killed(fn, items):
        for item in items:
            fn(item)
            raise Killed
    world.go_on(each=first_then_killed)


def second_commit_unclear(world):
    """The store gives no answer to the second commit. The driver stops, and Spark calls abort()."""
    asked = []
    def retry(ask):
        asked.append(ask)
        return Outcome.UNKNOWN if len(asked) == 2 else ask_again(ask)
    world.go_on(retry=retry)


def killed_before_the_decision(world):
    """All is pre-committed, nothing decided, when the driver dies."""
    def killed():
        raise Killed
    world.log.before_commit = killed
    world.go_on()


def overtaken(world):
    """A driver stops for a while just before it decides. Meanwhile another one runs the batch to its end. Then the first one goes on."""
    world.log.before_commit = world.live
    world.go_on()


def overtaken_by_one_that_dies(world):
    """The same, but the second driver dies after it has restored."""
    world.log.before_commit = lambda: restore.plan(world.driver(), 0)
    world.go_on()


def zombie_begins_late(world):
    """A task of batch 0 that everybody has given up wakes in another process, just before batch 2 is decided, and begins."""
    def wakes():
        with world.store.elsewhere() as participant:
            participant.begin(first)
    plan, world.batches = restore.plan, 3
    first = None
    def remembered(*args, **kw):
        nonlocal first
        made = plan(*args, **kw)
        first = first or made
        if made.batch_id == 2 and first is not made:
            world.log.before_commit = wakes
        return made
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(restore, "plan", remembered)
        world.go_on()


STORIES = [killed_between_two_commits, second_commit_unclear, killed_before_the_decision, overtaken, overtaken_by_one_that_dies, zombie_begins_late]


@pytest.mark.parametrize("story", STORIES, ids=lambda s: s.__name__)
def test_with_all_rules_every_story_ends_well(story, store, tmp_path):
    world = World(store, tmp_path)
    story(world)
    assert world.stopped_by or story is zombie_begins_late, "nothing happened in this story"
    assert world.anomalies() == {}, world.stopped_by


# -- the rules, each one taken away --


def a_replay_writes_again(patch):
    """Rule 5, first half: restore does not look whether the batch is decided, and takes the slot after all others."""
    def claim(driver, batch_id):
        attempt = len(driver.log.chain(batch_id))
        plan = Plan(query_id=driver.query_id, batch_id=batch_id, attempt=attempt, token=driver.new_token(batch_id, attempt + 1))
        return driver.log.create(driver.decision(plan, commit=False))
    patch.setattr(restore, "commit_of", lambda log, batch_id: None)
    patch.setattr(restore, "claim", claim)


def a_replay_does_not_drain(patch):
    """Rule 5, second half."""
    patch.setattr(precommit, "_read_to_the_end", lambda chunks: None)


def the_log_forgets(patch):
    patch.setattr(Slots, "create", lambda log, decision: decision)


def the_log_lets_everybody_win(patch):
    for room in (commit, restore):
        patch.setattr(room, "win", lambda log, decision: log.create(decision) and decision)


def no_decision_before_the_first_commit(patch):
    """Rule 2."""
    decide = commit.decide
    def too_late(driver, plan, messages, offsets_hash):
        for m in messages:
            for c in m.committables:
                commit.tell(driver, "commit", c, plan.batch_id)
        return decide(driver, plan, messages, offsets_hash)
    patch.setattr(commit, "decide", too_late)


def abort_whatever_was_decided(patch):
    """Rule 3: abort() ends the transactions of its messages, and asks nobody."""
    def naive(driver, messages, batch_id):
        for m in messages:
            for c in m.committables:
                commit.tell(driver, "abort", c, batch_id)
    patch.setattr(commit, "abort", naive)


def no_claim(patch):
    """Rule 8: a run takes the next attempt without winning a slot, and sweeps."""
    attempts = count()
    def claim(driver, batch_id):
        attempt = next(attempts)
        plan = Plan(query_id=driver.query_id, batch_id=batch_id, attempt=attempt, token=driver.new_token(batch_id, attempt + 1))
        return driver.decision(plan, commit=False)
    patch.setattr(restore, "claim", claim)


def ids_that_two_processes_share(patch):
    """The process is not in the id, as in a pool of ids for each task slot."""
    own = Names.next
    patch.setattr(Names, "next", lambda names, prefix, plan: re.sub(r"-[0-9a-f]{8}-(\d+-[01])$", r"-00000000-\1", own(names, prefix, plan)))


def no_sweep(patch):
    """Rule 6."""
    for room in (commit, restore):
        patch.setattr(room, "sweep", lambda driver, token, own_parity=None: [])


WITHOUT = [
    (a_replay_writes_again, killed_between_two_commits, "duplicate"),
    (a_replay_does_not_drain, killed_between_two_commits, "stateless"),
    (the_log_forgets, killed_between_two_commits, "duplicate"),
    (the_log_lets_everybody_win, overtaken, "duplicate"),
    (no_decision_before_the_first_commit, killed_before_the_decision, "duplicate"),
    (abort_whatever_was_decided, second_commit_unclear, "lost"),
    (no_claim, overtaken_by_one_that_dies, "lost"),
    (ids_that_two_processes_share, zombie_begins_late, "lost"),
    (no_sweep, killed_before_the_decision, "hanging"),
]


@pytest.mark.parametrize(("rule", "story", "anomaly"), WITHOUT, ids=[f"{rule.__name__}-{anomaly}" for rule, _, anomaly in WITHOUT])
def test_without_the_rule_the_story_ends_badly(rule, story, anomaly, store, tmp_path, monkeypatch):
    world = World(store, tmp_path)
    rule(monkeypatch)
    story(world)
    assert anomaly in world.anomalies(), f"{world.anomalies()}, stopped by {world.stopped_by}"
