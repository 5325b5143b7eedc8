"""What every participant on a disk must do when another process, or the disk, is in the way."""

import os
from contextlib import ExitStack, contextmanager
from itertools import count
from unittest.mock import patch

from fsspec.implementations.local import LocalFileSystem
from hurried import Hurried
from participant_suite import DONE, REFUSED, a_plan, rows

from kafka2pc.backends.storage import Storage
from kafka2pc.protocol.errors import PrecommitFailed, StoreUnreachable

_ON_DISK = [(LocalFileSystem, call) for call in ("makedirs", "put_file", "pipe_file")]
_ON_DISK += [(os, call) for call in ("open", "rename")]


@contextmanager
def before_step(number, action):
    """`action` runs right before this step on the disk. Yields the steps."""
    steps = []

    def of(real):
        def step(*args, **named):
            steps.append(real)
            if len(steps) == number:
                action()
            return real(*args, **named)

        return step

    with ExitStack() as patches:
        for owner, call in _ON_DISK:
            patches.enter_context(patch.object(owner, call, of(getattr(owner, call))))
        yield steps


def written(store, plan):
    txn = store.begin(plan)
    txn.write(rows(["a"]))
    txn.flush()
    return txn


def ended(call):
    """The error of ours that ends it; None if it returns."""
    try:
        call()
    except (PrecommitFailed, StoreUnreachable) as e:
        return e
    return None


def an_abort_before_any_step_of_a_precommit_is_an_ordinary_error(make, data):
    """`make()`: the participant; `data(store, c)`: what its place holds of the rows."""
    for number in count(1):
        store, other, plan = make(), make(), a_plan()
        with written(store, plan) as txn:
            with before_step(number, lambda c=txn.c: other.abort(c)) as steps:
                error = ended(txn.precommit)
        if len(steps) < number:
            break
        assert isinstance(error, PrecommitFailed) and "has aborted it" in error.why, number
        assert (data(other, txn.c), other.in_doubt(plan.query_id)) == ([], [])
        assert (other.commit(txn.c), other.abort(txn.c)) == (REFUSED, DONE)
    assert error is None and number > 2


def a_disk_that_refuses_any_step_is_an_error_of_ours(make):
    """From `begin` to `precommit`, and at the opening."""

    def full(*_):
        raise OSError(28, "No space left on device")

    def steps_of_a_task():
        with written(make(), a_plan()) as txn:
            txn.precommit()

    make().store_id()
    for number in count(1):
        with patch.object(Storage, "clock", Hurried()), before_step(number, full) as steps:
            error = ended(steps_of_a_task)
        if len(steps) < number:
            break
        assert error is None or "No space left" in str(error), number
    assert error is None and number > 2
