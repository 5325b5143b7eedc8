"""The model: green with all rules on, red with each rule off, and itself held against the real
coordinator. A model that explores nothing is red.
"""

import time
import uuid
from dataclasses import replace
from functools import cache
from itertools import count

import pyarrow as pa
import pytest
from kafka_fixtures import values

from kafka2pc.kafka import participant as kafka
from kafka2pc.kafka.control import Control
from kafka2pc.kafka.coordinators import DescribedTransaction
from kafka2pc.kafka.participant import NEVER_MS
from kafka2pc.kafka.row_producer import RowTransaction
from kafka2pc.proof import model, world
from kafka2pc.proof.model import SMALL, explore, main
from kafka2pc.proof.rules import HARMLESS, LIMITS, RULES, switched_off, without
from kafka2pc.proof.world import ANOMALIES, FAULTS, Config, Scene, Txn, Worker, World
from kafka2pc.protocol import commit, precommit, restore
from kafka2pc.protocol.transactions import (
    TRANSITIONS,
    Committable,
    IllegalStep,
    Plan,
    PreparedTxnState,
    Token,
    TxnState,
)

NOT_ALLOWED = {"lost_entry", "expire"}  # accidents that no rule survives: see RULES and LIMITS

# The worlds are deterministic. A change of the acts changes the counts a little; a model that stops
# early halves them.
STATES = {
    "one run": 35,
    "two runs": 3_500,
    "two runs, two tasks": 5_800,
    "a run dies, a timeout strikes": 8_800,
    "a second try of a task": 13_300,
    "commit() breaks off": 7_800,
    "a late EndTxn": 17_300,
    "a late EndTxn, two batches later": 650,
    "a late InitProducerId": 4_900,
    "a late create": 11_500,
    "the planner forgets": 7_200,
    "the planner outlives its query": 8_000,
    "only the newest batch is kept": 11_400,
    "PrepareCommit shows": 8_400,
    "EndTxn v4, late": 4_800,
    "batches overlap": 14_300,
    "commits/N is deleted": 6_800,
    "offsets/N is written anew": 12_300,
    "fewer tasks after the restart": 8_700,
    "a batch without rows": 1_800,
    "a batch without partitions": 2_400,
    "a copied checkpoint": 180,
    "a copied checkpoint, one log": 120,
}


@cache
def explored(config, only=None):
    """All rules on. A world that is cut to find one long story is not let die as well."""
    return explore(config, only=only, alone=only is None)


@pytest.mark.parametrize("name", SMALL)
def test_with_all_rules_on_no_state_shows_an_anomaly(name):
    found = explored(SMALL[name])
    assert (found.anomaly, found.complete) == ("", True), "\n".join(
        " | ".join(line[:3]) for line in found.story
    )
    assert found.states >= STATES[name]


REACHED = [
    "late EndTxn took effect",
    "late EndTxn was refused",
    "late EndTxn said the same again",
    "late InitProducerId arrived",
    "late COMMIT won",
    "late COMMIT refused",
    "late ABORT won",
    "COMMIT refused",
    "ABORT refused",
    "a decided batch is drained",
    "abort() settled its slot",
    "a timeout struck",
    "commit: LostTransaction",
    "plan: LostTransaction",
    "commit: Refused",
    "commit: Superseded",
    "plan: StaleCheckpoint",
    "commit: OutcomeUnknown",
    "a planner was inherited",
    "the planner was replaced",
    "records were purged",
    "a job failed",
    "init unclear",
    "end unclear",
    "create unclear",
    "commit: BrokerUnreachable",
    "commit: LogUnwritable",
    "a checkpoint was copied",
    "plan: MovedLog",
]


@pytest.mark.parametrize("note", REACHED)
def test_the_passes_are_not_vacuous(note):
    assert sum(explored(config).reached[note] for config in SMALL.values()) >= 15


def test_every_accident_happens_in_a_small_world():
    assert {
        fault for fault in FAULTS if not any(getattr(config, fault) for config in SMALL.values())
    } <= NOT_ALLOWED


# -- each rule off --


@pytest.mark.parametrize("name", RULES)
def test_without_this_rule_there_is_an_anomaly_with_a_name(name):
    found = without(RULES[name])
    assert found.anomaly == RULES[name].anomaly
    assert f"**{found.anomaly}**" in found.story[-1].said


SAME_WORLDS = {(rule.config, rule.only): name for name, rule in RULES.items() if rule.change}


@pytest.mark.parametrize("same", SAME_WORLDS, ids=SAME_WORLDS.values())
def test_in_the_same_world_with_the_rule_there_is_none(same):
    found = explored(*same)
    assert (found.anomaly, found.complete) == ("", True)
    assert found.states > 10


def test_every_anomaly_has_a_rule_that_keeps_it_away():
    assert {rule.anomaly for rule in RULES.values()} == set(ANOMALIES)


def test_every_hole_of_the_review_and_every_rule_that_is_a_mechanism_is_there():
    assert {rule.hole for rule in RULES.values()} == {"", "new"} | {f"H{n}" for n in range(1, 18)}
    assert {rule.of for rule in RULES.values()} == {*"12345678", "names", "overlap", "log"}


@pytest.mark.parametrize("name", HARMLESS)
def test_these_precautions_are_not_needed_in_these_worlds(name):
    found = without(HARMLESS[name])
    assert (found.anomaly, found.complete) == ("", True)
    assert found.states > 1_000


@pytest.mark.parametrize("name", LIMITS)
def test_what_no_rule_covers_is_named(name):
    assert without(LIMITS[name]).anomaly == LIMITS[name].anomaly


def test_the_check_notices_that_a_sweep_took_the_next_batch():
    rule = RULES["sweep this batch's losers"]
    found = without(replace(rule, anomaly="", change=rule.change[:1]))
    assert (found.anomaly, found.complete) == ("", True)
    assert found.reached["commit: Refused"] > 0 == explored(rule.config).reached["commit: Refused"]


def test_a_driver_that_oversleeps_loses_nothing_silently():
    found = explore(
        Config(batches=1, timeout=1, stall=True, broken=1),
        hunt=[a for a in ANOMALIES if a != "DECIDED-A-DEAD-TXN"],
    )
    assert (found.anomaly, found.complete) == ("", True)
    assert (
        found.reached["commit: LostTransaction"] > 100
        and found.reached["plan: LostTransaction"] > 100
    )


@pytest.mark.parametrize("name", ["sweep", "names of one life", "one InitProducerId"])
def test_a_rule_is_off_only_inside(name):
    def now():
        return restore.sweep, commit.sweep, world.worker_name, world.StepStore.begin

    before = now()
    with switched_off(RULES[name]):
        assert now() != before
    assert now() == before


# -- the model plays the code that runs --


class Played(Exception):
    pass


@pytest.mark.parametrize(
    ("room", "act"),
    [(restore, "plan"), (precommit, "precommit"), (commit, "commit"), (commit, "abort")],
)
def test_the_acts_are_those_of_the_package(room, act, monkeypatch):
    def refuse(*args, **kwargs):
        raise Played(act)

    monkeypatch.setattr(room, act, refuse)
    with pytest.raises(Played, match=act):
        explore(Config(drivers=1, broken=1))


def test_the_coordinator_asks_the_transition_table(monkeypatch):
    monkeypatch.delitem(TRANSITIONS, (TxnState.PRECOMMITTED, "commit"))
    with pytest.raises(IllegalStep):
        explore(Config(drivers=1))


def test_an_act_that_draws_lots_is_noticed(monkeypatch):
    lots = count()
    monkeypatch.setitem(
        model.ACTS, "plan", lambda m, tape, *args: [tape.ask("spark", next(lots)) for _ in range(3)]
    )
    with pytest.raises(RuntimeError, match="not deterministic"):
        explore(Config(drivers=1), alone=False)


def test_the_same_world_is_explored_in_the_same_way():
    first, again = (explore(Config(batches=1, timeout=1)) for _ in range(2))
    assert first == again
    assert without.__wrapped__(RULES["check"]) == without.__wrapped__(RULES["check"])


def test_a_limit_is_told():
    found = explore(Config(), limit=500)
    assert not found.complete and 500 <= found.states < 700
    assert "then stopped" in str(found)


def test_the_shell_says_what_was_found_and_fails_if_there_is_an_anomaly(capsys, monkeypatch):
    assert main(["one run"]) == 0
    assert "one run: no anomaly" in capsys.readouterr().out
    monkeypatch.setitem(model.SMALL, "one run", Config(batches=1, lost_entry=1))
    assert main(["one run"]) == 1
    assert "loses" in capsys.readouterr().out


# -- Kafka's coordinator, beside the real one --


def txns():
    for epoch, state, rows, marking in [
        (0, TxnState.OPEN, (), False),
        (0, TxnState.OPEN, (1,), False),
        (1, TxnState.COMMITTED, (), True),
        (1, TxnState.COMMITTED, (), False),
        (0, TxnState.COMMITTED, (), False),
        (1, TxnState.ABORTED, (), False),
        (2, TxnState.ABORTED, (), False),
        (3, TxnState.OPEN, (1,), False),
    ]:
        yield Txn("id", epoch, state, rows, marking=marking)


def word(txn):
    if txn.state is TxnState.OPEN:
        return "Ongoing" if txn.rows else "Empty"
    return {
        TxnState.COMMITTED: "PrepareCommit" if txn.marking else "CompleteCommit",
        TxnState.ABORTED: "CompleteAbort",
    }[txn.state]


@pytest.mark.parametrize("end_txn", [4, 5])
@pytest.mark.parametrize("epoch", range(4))
def test_describe_says_what_the_room_kafka_says(end_txn, epoch):
    for txn in txns():
        c = Committable(
            transactional_id="id", state=PreparedTxnState(0, epoch), end_txn_version=end_txn
        )
        d = DescribedTransaction(
            transactional_id="id",
            producer_id=0,
            epoch=txn.epoch,
            state=word(txn),
            timeout_ms=NEVER_MS,
            started_ms=0,
            partitions=(),
        )
        assert world.standing(txn, epoch, end_txn) == kafka.standing(c, d).state, (txn, epoch)


STORIES = [
    ("commit 0",),
    ("abort 0",),
    ("write", "commit 0"),
    ("write", "abort 0"),
    ("write", "commit 0", "commit 0"),
    ("write", "abort 0", "abort 0"),
    ("write", "commit 0", "abort 0"),
    ("write", "abort 0", "commit 0"),
    ("write", "commit 0", "commit 1"),
    ("write", "commit 0", "abort 1"),
    ("write", "commit 0", "abort 1", "commit 0"),
    ("write", "timeout", "commit 0"),
    ("write", "init", "commit 0"),
    ("write", "commit 0", "init", "commit 0"),
]


def in_the_model(story):
    """The last answer, and how many rows a reader sees."""
    scene = Scene(Config())
    name = world.worker_name(
        Plan(query_id=world.QUERY, batch_id=0, attempt=1, token=Token(0, 1, "00000001")),
        Worker(1, 0, 0),
        0,
        0,
    )
    now, said = world.on_init(scene, World(owed=((name, 0),)), 1, name).world, None
    for event in story:
        verb, _, epoch = event.partition(" ")
        if verb == "timeout":
            now = world.end_ongoing(scene, now, world.find(now, name), "timeout")[0]
        elif verb == "write":
            now, said, *_ = world.on_produce(scene, now, 1, name, 0, ((0, 0, 0),))
        elif verb == "init":
            now, said, *_ = world.on_init(scene, now, 1, name)
        else:
            now, said, *_ = world.on_end(scene, now, 1, name, int(epoch), verb == "commit")
    return said, len(now.seen)


def settle(control, name):
    """Until then the coordinator says CONCURRENT_TRANSACTIONS, which is no answer; the model's
    client asks again too.
    """
    while control.list_transactions(name, ("PrepareCommit", "PrepareAbort")):
        time.sleep(0.02)


def on_a_broker(cluster, control, topic, story):
    name, state, said, txn = f"model-{uuid.uuid4().hex}", None, None, None
    if story[0] != "write":
        state = control.init_producer_id(name, timeout_ms=60_000)
    for event in story:
        verb, _, epoch = event.partition(" ")
        if verb == "write":
            txn = RowTransaction(
                cluster.client_conf, name, 1_000 if "timeout" in story else 60_000, topic=topic
            ).begin()
            txn.write(pa.record_batch({"value": pa.array([name])}))
            txn.flush()
            state = txn.precommit().state
        elif verb == "timeout":
            while control.describe_transactions([name])[name].state != "CompleteAbort":
                time.sleep(0.1)
        elif verb == "init":
            control.init_producer_id(name, timeout_ms=60_000)
        else:
            now = PreparedTxnState(state.producer_id, state.epoch + int(epoch))
            said = control.end_txn(name, now, commit=verb == "commit", version=5).value
            settle(control, name)
    return said, values(cluster, topic).count(name)


@pytest.mark.kafka
def test_the_coordinator_of_the_model_answers_like_a_real_one(kafka):
    topic = f"model-{uuid.uuid4().hex[:8]}"
    kafka.create_topic(topic, partitions=1)
    with Control(kafka.client_conf) as control:
        real = {story: on_a_broker(kafka, control, topic, story) for story in STORIES}
    assert real == {story: in_the_model(story) for story in STORIES}
