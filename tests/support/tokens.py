"""Functions that the option kafka.sasl.oauthbearer.token.provider names in tests."""

import base64
import json
import threading
import time
from types import SimpleNamespace

CALLS = SimpleNamespace(count=0)


def token(user="alice", seconds=3600):
    """What an authority would sign; Kafka's validator for tests takes it unsigned."""
    CALLS.count += 1
    part = lambda claims: base64.urlsafe_b64encode(json.dumps(claims).encode()).decode().rstrip("=")
    now = time.time()
    return (
        f"{part({'alg': 'none'})}.{part({'sub': user, 'iat': now - 1, 'exp': now + seconds})}.",
        now + seconds,
    )


def shared():
    return token()


THREADS, SLOW = [], threading.Event()


def unreliable():
    """The second call fails, the third one is slow."""
    THREADS.append(threading.current_thread().name)
    if len(THREADS) == 2:
        raise RuntimeError("hunter2")
    if len(THREADS) == 3:
        time.sleep(0.3)
        SLOW.set()
    return token(seconds=40)


def no_token():
    raise RuntimeError("hunter2")


def not_a_token():
    return "hunter2", time.time() + 3600
