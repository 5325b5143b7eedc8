"""Commit and abort are sent to a participant that ends many transactions in one call."""

import pytest
from participant_suite import a_plan

from kafka2pc.protocol.driver import Driver, Policy
from kafka2pc.protocol.history import History, requests_of
from kafka2pc.protocol.log.slots import MemoryLog
from kafka2pc.protocol.memory import MemoryParticipant
from kafka2pc.protocol.participant import Outcome
from kafka2pc.protocol.phases.precommit import precommit
from kafka2pc.protocol.phases.requests import send_all
from kafka2pc.protocol.policies import retry_unknown

DONE, REFUSED, UNKNOWN = Outcome.DONE, Outcome.REFUSED, Outcome.UNKNOWN


class Many(MemoryParticipant):
    """Ends many at once; each call loses its last answer. `calls`: how many each was asked for."""

    def __init__(self, name):
        super().__init__(name)
        self.calls = []

    def end_all(self, verb, cs):
        self.calls.append(len(cs))
        found = [getattr(self, verb)(c) for c in cs]
        return found[:-1] + [UNKNOWN] if len(cs) > 1 else found


class Watcher:
    def __init__(self):
        self.seen = []

    def turn(self, op):
        raise NotImplementedError

    def on_event(self, event):
        self.seen.append((event.kind, event.op))


def driver_of(*stores, **more):
    policy = Policy(retry=lambda: retry_unknown(max_tries=5, first_ms=1))
    return Driver(
        query_id="11111111-2222-3333-4444-555555555555",
        log=MemoryLog(),
        participants={store.name: store for store in stores},
        **({"policy": policy} | more),
    )


def precommitted(stores, tasks=3):
    plan = a_plan()
    return [c for _ in range(tasks) for c in precommit(stores, plan, [["a"]]).committables]


def test_only_those_that_are_unclear_are_asked_for_again_and_each_is_in_the_history():
    many, other = Many("many"), MemoryParticipant("other")
    driver = driver_of(many, other, history=History())
    cs = precommitted([many, other])
    other.abort(cs[1])
    assert send_all(driver, "commit", cs, 0) == [DONE, REFUSED, *[DONE] * 4]
    assert many.calls == [3, 1] and len(many.read()) == 3 and len(other.read()) == 2
    times = {r.transactional_id: r.times for r in requests_of(driver.history.events)}
    assert sorted(times.values()) == [1, 1, 1, 1, 1, 2]


def test_what_stays_unclear_is_unknown():
    many = Many("many")
    many.end_all = lambda verb, cs: [UNKNOWN] * len(cs)
    assert send_all(driver_of(many), "commit", precommitted([many]), 0) == [UNKNOWN] * 3


def test_an_error_is_raised_and_is_in_the_history():
    many = Many("many")
    many.end_all = lambda verb, cs: 1 / 0
    driver = driver_of(many, history=History())
    with pytest.raises(ZeroDivisionError):
        send_all(driver, "abort", precommitted([many]), 0)
    assert [e.kind for e in driver.history.events] == ["invoke"] * 3 + ["info"] * 3


def test_a_watched_history_sees_one_after_the_other():
    many, watcher = Many("many"), Watcher()
    watcher.turn = lambda op: History().of(op)
    driver = driver_of(many, history=History(watcher=watcher))
    assert send_all(driver, "commit", precommitted([many]), 0) == [DONE] * 3
    assert watcher.seen == [("invoke", "commit"), ("ok", "commit")] * 3 and many.calls == []
