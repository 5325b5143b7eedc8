"""The model: green with all rules on, red with each rule off. A model that explores
nothing is red.

`make test` explores each world that takes less than about three seconds, and leaves out each rule;
`make test-nightly` explores the large worlds, and each rule's world with the rule on.
"""

from dataclasses import replace
from functools import cache

import pytest

from kafka2pc.proof.model import explorer, replay
from kafka2pc.proof.model.explorer import SMALL, explore, main
from kafka2pc.proof.model.more_rules import HARMLESS, LIMITS, MORE_RULES
from kafka2pc.proof.model.rules import RULES as FIRST_RULES
from kafka2pc.proof.model.rules import switch_off, without
from kafka2pc.proof.model.world import ANOMALIES, FAULTS, Config
from kafka2pc.protocol.phases import commit, restore

pytestmark = pytest.mark.never_unsteady
RULES = FIRST_RULES | MORE_RULES
NOT_ALLOWED = {"lost_entry"}  # an accident that no rule survives: see RULES

# The worlds are deterministic. A change of the protocol changes the counts a little; a model that
# stops early halves them.
STATES = {
    "one run": 35,
    "two runs": 3_500,
    "two runs, two tasks": 5_800,
    "a run dies, a timeout strikes": 8_800,
    "rows vanish, a run dies": 20_000,
    "rows vanish, a late EndTxn": 10_000,
    "a backup is made": 10_000,
    "a backup is put back": 1_000,
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
    "an early copy, one log": 300,
    "one key, two machines": 2_200,
    "a silent log": 80_000,
    "a participant is left out": 3_000,
    "another prefix": 450,
    "an adopted prefix": 33_000,
    "a former prefix": 2_700,
    "an error is caught": 40_000,
    "an error is caught, a late EndTxn": 45_000,
    "an error is caught, a timeout": 550,
    "an error is caught, the planner goes on": 13_000,
    "one process, a second try": 500,
    "commits/N is written by hand": 13_000,
    "commits/N is written by hand, the planner goes on": 22_000,
    "an operator fences": 3_000,
    "an operator restores": 3_000,
    "an operator restores what has died": 500,
    "an operator gives up a participant": 500,
    "a watcher": 290,
    "a watcher, a run dies": 10_000,
    "a watcher, a late EndTxn": 900,
    "a watcher, EndTxn v4, late": 2_000,
    "a watcher, a repair": 6_500,
    "a watcher, a part is aborted, a run dies": 14_000,
    "a watcher, two runs, a timeout": 70_000,
    "a watcher, rows vanish": 750,
    "a watcher, a gate": 1_100,
    "claims removed, a late create": 450_000,
    "claims and batches removed, break": 100_000,
    "a part of a batch is aborted": 400,
    "a repair is aborted": 500,
    "aborted rows vanish": 1_500,
    "a database keeps its part": 2_000,
    "another program aborts in a partition": 10_000,
    "an id is forgotten": 3_000,
    "an operator salvages": 1_700,
    "commits/N is written by hand, a timeout": 50_000,
    "a gate": 90,
    "a gate, two runs": 12_000,
    "a gate, a second try": 350,
    "a gate, PrepareCommit shows": 200,
    "a gate and its batch time out": 300,
    "a gate, a part times out, rows vanish": 700,
    "a gate, a late EndTxn": 2_500,
    "a gate, a late InitProducerId": 450,
    "a gate, a late create": 140,
    "a gate, commit() breaks off": 250,
    "a gate, the planner forgets": 190,
    "a gate, no partitions": 45,
    "a gate, no rows": 45,
    "a gate, an error is caught": 450,
    "a gate, commits/N is written by hand": 500,
    "a gate, an operator fences": 7_000,
    "a gate, an operator restores": 1_200,
}


LARGE = [
    "a silent log",
    "an adopted prefix",
    "an error is caught",
    "an error is caught, a late EndTxn",
    "an error is caught, the planner goes on",
    "an operator restores",
    "commits/N is written by hand, the planner goes on",
    "commits/N is written by hand, a timeout",
    "claims removed, a late create",
    "claims and batches removed, break",
    "a watcher, a part is aborted, a run dies",
    "a watcher, two runs, a timeout",
]


@cache
def explored(config, only=None):
    """All rules on. In a world that is cut to find one long path, not everything dies as well."""
    return explore(config, only=only, alone=only is None)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.nightly] * (n in LARGE)) for n in SMALL]
)
def test_with_all_rules_on_no_state_shows_an_anomaly(name):
    found = explored(SMALL[name])
    assert (found.anomaly, found.complete) == ("", True), "\n".join(
        " | ".join(line[:3]) for line in found.path
    )
    assert found.states >= STATES[name]


# -- a watcher --

WATCHED = [name for name, c in SMALL.items() if c.operator == "watch" and not c.one_supervisor]


def errors_in(found):
    """The errors that ended a call of a run."""
    return {note for note in found.reached if ": " in note and not note.startswith("operate")}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.nightly] * (n in LARGE)) for n in WATCHED]
)
def test_beside_a_watcher_a_run_meets_no_error_that_it_would_not_meet_without(name):
    config = SMALL[name]
    alone = explored(replace(config, drivers=config.drivers - 1, operator=""))
    assert errors_in(explored(config)) <= errors_in(alone)


def test_beside_a_watcher_a_run_without_accidents_meets_no_error_at_all():
    found = explored(SMALL["a watcher"])
    assert errors_in(found) == set()
    # both send the same commit
    assert found.reached["EndTxn was repeated"] > 10


REACHED = [
    "late EndTxn took effect",
    "late EndTxn was refused",
    "late EndTxn was repeated",
    "late InitProducerId arrived",
    "late COMMIT won",
    "late COMMIT refused",
    "late ABORT won",
    "COMMIT refused",
    "ABORT refused",
    "a decided batch is drained",
    "abort() closed its slot",
    "a timeout struck",
    "rows were removed",
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
    "plan: UnfinishedBatch",
    "Spark passes over a failed batch",
    "refuse: PassedOver",
    "commit: Reopened",
    "LOST won",
    "CLAIM won",
    "REPAIR won",
]
NIGHTLY = {  # what only a large world reaches often
    "plan: PassedOver": "an error is caught",
}


@pytest.mark.parametrize(
    "note", [*REACHED, *(pytest.param(note, marks=pytest.mark.nightly) for note in NIGHTLY)]
)
def test_the_passes_are_not_vacuous(note):
    small = [name for name in SMALL if name not in LARGE]
    worlds = [NIGHTLY[note]] if note in NIGHTLY else small
    assert sum(explored(SMALL[name]).reached[note] for name in worlds) >= 15


def test_two_runs_repair_one_batch():
    """In the small worlds only one does."""
    rule = RULES["compare what is judged again"]
    reached = explored(rule.config, rule.only).reached
    assert reached["REPAIR refused"] > 100 < reached["commit: Superseded"]


def test_every_accident_happens_in_a_small_world():
    assert {
        fault for fault in FAULTS if not any(getattr(config, fault) for config in SMALL.values())
    } <= NOT_ALLOWED


# -- each rule off --


@pytest.mark.parametrize("name", RULES)
def test_without_this_rule_there_is_an_anomaly_with_a_name(name):
    found = without(RULES[name])
    assert found.anomaly == RULES[name].anomaly
    assert f"**{found.anomaly}**" in found.path[-1].reply


SAME_WORLDS = {(rule.config, rule.only): name for name, rule in RULES.items() if rule.change}


@pytest.mark.nightly
@pytest.mark.parametrize("same", SAME_WORLDS, ids=SAME_WORLDS.values())
def test_in_the_same_world_with_the_rule_there_is_none(same):
    found = explored(*same)
    assert (found.anomaly, found.complete) == ("", True)
    assert found.states > 10


def test_every_anomaly_has_a_rule_that_keeps_it_away():
    assert {rule.anomaly for rule in RULES.values()} == set(ANOMALIES)


def test_every_rule_of_the_protocol_can_be_left_out():
    assert {rule.of for rule in RULES.values()} == {
        *map(str, range(1, 12)),
        "13",
        "16",
        "overlap",
        "log",
        "repair",
        "gate",
        "watch",
    }


@pytest.mark.nightly
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
    assert found.reached["commit: Reopened"] > 100 < found.reached["LOST won"]


@pytest.mark.parametrize("name", ["sweep", "names of one life", "one InitProducerId"])
def test_a_rule_is_off_only_inside(name):
    def now():
        return restore.sweep, commit.sweep, replay.worker_name, replay.StepStore.begin

    before = now()
    with switch_off(RULES[name]):
        assert now() != before
    assert now() == before


# -- the exploration itself --


def test_the_same_world_is_explored_in_the_same_way():
    first, again = (explore(Config(batches=1, timeout=1)) for _ in range(2))
    assert first == again
    assert without.__wrapped__(RULES["check"]) == without.__wrapped__(RULES["check"])


def test_a_limit_is_reported():
    found = explore(Config(), limit=500)
    assert not found.complete and 500 <= found.states < 700
    assert "then stopped" in str(found)


def test_the_shell_says_what_was_found_and_fails_if_there_is_an_anomaly(capsys, monkeypatch):
    assert main(["one run"]) == 0
    assert "one run: no anomaly" in capsys.readouterr().out
    monkeypatch.setitem(explorer.SMALL, "one run", Config(batches=1, lost_entry=1))
    assert main(["one run"]) == 1
    assert "loses" in capsys.readouterr().out
