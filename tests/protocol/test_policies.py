"""The policies of the sink: an unclear answer is asked for again within limits, and every call is
made.
"""

import threading
import time
from unittest.mock import patch

import pytest

from kafka2pc.protocol.participant import Outcome
from kafka2pc.protocol.policies import parallel, retry_unknown

REFUSED, UNKNOWN = Outcome.REFUSED, Outcome.UNKNOWN


def test_unknown_is_asked_again_in_limits_and_refused_is_not():
    asked = []
    say = lambda outcome: lambda: asked.append(1) or outcome
    assert (retry_unknown(5, first_ms=1)(say(UNKNOWN)), len(asked)) == (UNKNOWN, 5)
    assert (retry_unknown(5, first_ms=1)(say(REFUSED)), len(asked)) == (REFUSED, 6)
    started = time.monotonic()
    assert retry_unknown(10_000, total_ms=300, longest_ms=50)(say(UNKNOWN)) is UNKNOWN
    assert time.monotonic() - started < 2


@pytest.mark.parametrize("tries", [10, 20, 200])
def test_the_given_number_of_tries_if_answers_come_fast(tries):
    asked, clock = [], [0.0]
    sleep = lambda seconds: clock.append(clock.pop() + seconds)
    with patch.object(time, "sleep", sleep), patch.object(time, "monotonic", lambda: clock[0]):
        retry_unknown(tries)(lambda: asked.append(1) or UNKNOWN)
        assert len(asked) == tries
        retry_unknown(tries)(lambda: sleep(30) or asked.append(1) or UNKNOWN)
        assert len(asked) < 1.2 * tries + 2, "six seconds a try, if each takes thirty"


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
