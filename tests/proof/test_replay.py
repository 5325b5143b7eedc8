"""The model runs the code of the package, one request at a time, and notices what is not
deterministic.
"""

from itertools import count

import pytest

from kafka2pc.proof.model import replay
from kafka2pc.proof.model.explorer import explore
from kafka2pc.proof.model.world import Bounds, Config
from kafka2pc.protocol.participant import KeepsAborted
from kafka2pc.protocol.phases import commit, decide, precommit, restore
from kafka2pc.protocol.states import TRANSITIONS, IllegalStep, TxnState


class Called(Exception):
    pass


@pytest.mark.parametrize(
    ("module", "function"),
    [(restore, "restore"), (precommit, "precommit"), (commit, "commit"), (decide, "abort")],
)
def test_the_functions_are_those_of_the_package(module, function, monkeypatch):
    def refuse(*args, **kwargs):
        raise Called(function)

    monkeypatch.setattr(module, function, refuse)
    with pytest.raises(Called, match=function):
        explore(Config(drivers=1, broken=1))


def test_the_coordinator_asks_the_transition_table(monkeypatch):
    monkeypatch.delitem(TRANSITIONS, (TxnState.PRECOMMITTED, "commit"))
    with pytest.raises(IllegalStep):
        explore(Config(drivers=1))


def test_a_function_that_is_random_is_noticed(monkeypatch):
    lots = count()
    monkeypatch.setitem(
        replay.CALLS,
        "plan",
        lambda m, transcript, *args: [transcript.ask("spark", next(lots)) for _ in range(3)],
    )
    with pytest.raises(RuntimeError, match="not deterministic"):
        explore(Config(drivers=1), alone=False)


def test_a_database_gives_nothing_back_of_what_it_has_aborted():
    bounds = Bounds(Config(database=True, timeout=1))
    stores = replay.make_driver(bounds, replay.Transcript(), 1).participants
    keeps = {name: isinstance(store, KeepsAborted) for name, store in stores.items()}
    assert keeps == {"kafka": True, "second": False}
