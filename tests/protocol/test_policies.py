"""The policies of the sink: an unclear answer is asked for again within limits, and every call is
made.
"""

import threading

import pytest
from hurried import Hurried

from kafka2pc.protocol.participant import Outcome
from kafka2pc.protocol.policies import Stopped, parallel, retry_unknown, stop_when

REFUSED, UNKNOWN = Outcome.REFUSED, Outcome.UNKNOWN


@pytest.fixture
def clock():
    return Hurried()


def test_unknown_is_asked_again_in_limits_and_refused_is_not(clock):
    asked = []
    say = lambda outcome: lambda: asked.append(1) or outcome
    assert (retry_unknown(5, first_ms=1, clock=clock)(say(UNKNOWN)), len(asked)) == (UNKNOWN, 5)
    assert (retry_unknown(5, first_ms=1, clock=clock)(say(REFUSED)), len(asked)) == (REFUSED, 6)
    started = clock.monotonic()
    assert retry_unknown(10_000, total_ms=300, longest_ms=50, clock=clock)(say(UNKNOWN)) is UNKNOWN
    assert 0.3 <= clock.monotonic() - started <= 0.4, "at most one more pause"


@pytest.mark.parametrize("tries", [10, 20, 200])
def test_the_given_number_of_tries_if_answers_come_fast(tries, clock):
    asked = []
    retry_unknown(tries, clock=clock)(lambda: asked.append(1) or UNKNOWN)
    assert len(asked) == tries
    retry_unknown(tries, clock=clock)(lambda: clock.sleep(30) or asked.append(1) or UNKNOWN)
    assert len(asked) < 1.2 * tries + 2, "six seconds a try, if each takes thirty"


def test_a_wait_ends_within_a_second_of_the_stop_also_in_threads(clock):
    unclear = lambda _: retry_unknown(20, clock=clock)(lambda: UNKNOWN)
    with stop_when(lambda: clock.monotonic() > 30), pytest.raises(Stopped):
        unclear(0)
    assert 30 < clock.monotonic() <= 31
    with stop_when(lambda: True):
        with pytest.raises(Stopped):
            parallel()(unclear, range(2))
        with stop_when(lambda: False):
            assert unclear(0) is UNKNOWN
    assert unclear(0) is UNKNOWN


def test_parallel_keeps_order_makes_every_call_and_raises_the_first_error():
    made, lock = [], threading.Lock()

    def call(n):
        with lock:
            made.append(n)
        if n in (3, 5):
            raise ValueError(n)
        return -n

    with pytest.raises(ValueError, match="3"):
        parallel(4)(call, range(20))
    assert sorted(made) == list(range(20))
    assert parallel(4)(lambda n: -n, range(20)) == [-n for n in range(20)]
    assert parallel()(lambda n: n, []) == []
