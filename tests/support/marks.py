"""Which tests `make test` leaves out, because another one shows the same behaviour."""

import os
import random

import pytest


def first_of(values, ids=str, rest="full"):
    """Parameters of which `make test` takes the first. `rest`: the mark of the others; `make
    test-all` takes what is `full`, `make test-nightly` what is `nightly`.
    """
    return [
        pytest.param(value, id=ids(value), marks=[getattr(pytest.mark, rest)] * (number > 0))
        for number, value in enumerate(values)
    ]


def drawn(points, seldom=("driver", "broker"), each=2):
    """The victim that `make test` kills at each crash point. The driver's JVM and the broker take
    longer to start than a Python process: each of them is killed at `each` points, which
    KAFKA2PC_SEED draws. At the other points the first victim is killed.
    """
    dice, left, chosen = random.Random(os.environ["KAFKA2PC_SEED"]), dict(points), {}
    for victim in seldom:
        possible = [point for point, victims in left.items() if victim in victims]
        for point in dice.sample(possible, each):
            chosen[point] = victim
            del left[point]
    return chosen | {point: victims[0] for point, victims in left.items()}


def with_victim(victim, points):
    """Crash points as parameters. `points`: the victims of each. `make test` takes the points at
    which `victim` is drawn; `make test-all` takes all that have this victim."""
    chosen = drawn(points)
    return [
        pytest.param(
            point,
            id=point.name.lower(),
            marks=[] if chosen[point] == victim else [pytest.mark.full],
        )
        for point, victims in points.items()
        if victim in victims
    ]
