"""Which tests `make test` leaves out, because another one shows the same behaviour."""

import os
import random

import pytest


def first_of(values, ids=str):
    """Parameters of which `make test` takes the first; `make test-all` takes all."""
    return [
        pytest.param(value, id=ids(value), marks=[pytest.mark.full] * (number > 0))
        for number, value in enumerate(values)
    ]


def drawn(point, victims):
    """The victim that `make test` kills at this crash point. KAFKA2PC_SEED draws it."""
    return random.Random(f"{os.environ['KAFKA2PC_SEED']} {point.name}").choice(victims)


def with_victim(victim, points):
    """Crash points as parameters. `points`: the victims of each. `make test` takes the points at
    which `victim` is drawn; `make test-all` takes all that have this victim."""
    return [
        pytest.param(
            point,
            id=point.name.lower(),
            marks=[] if drawn(point, victims) == victim else [pytest.mark.full],
        )
        for point, victims in points.items()
        if victim in victims
    ]
