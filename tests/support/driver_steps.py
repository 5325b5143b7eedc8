"""Batches of a driver, step by step, without Spark."""

import uuid

import pytest

from kafka2pc.decision_logs.files import FileLog
from kafka2pc.protocol.driver import Driver
from kafka2pc.protocol.log.decisions import Identity
from kafka2pc.protocol.log.slots import MemoryLog
from kafka2pc.protocol.phases.commit import commit
from kafka2pc.protocol.phases.decide import decide
from kafka2pc.protocol.phases.precommit import precommit
from kafka2pc.protocol.phases.restore import restore

ORDERS = Identity(checkpoint="file:///orders", topics=("orders",), prefix="kafka2pc")


def orders_driver(folder, store):
    """The driver of a query whose log is in the folder of its checkpoint."""
    return Driver(
        query_id=str(uuid.uuid4()),
        log=FileLog(f"{folder}/orders/kafka2pc"),
        participants={store.name: store},
        about=ORDERS,
    )


def prepare(driver, batch_id, rows=("row",)):
    """Claim the batch and pre-commit `rows`. Returns the message of the task."""
    planned = restore(driver, batch_id)
    return precommit(driver.participants.values(), planned, iter([rows]))


def write(driver, batch_id, rows=("row",)):
    """The whole batch, with `rows` in one task."""
    commit(driver, [prepare(driver, batch_id, rows)], batch_id)


def decide_only(driver, batch_id, rows=("row",)):
    """The batch is decided, and its driver dies before it ends the first transaction."""

    def die(fn, items):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        commit(driver.within(each=die), [prepare(driver, batch_id, rows)], batch_id)


class Sleepy(MemoryLog):
    """A run that sleeps once, after its listing and before its claim. `meanwhile`: what other runs
    do.
    """

    meanwhile = None

    def create(self, decision, *late):
        if self.meanwhile and not decision.commit:
            others, self.meanwhile = self.meanwhile, None
            others()
        return super().create(decision, *late)


def sleeps_before_its_claim(driver):
    """A run decides in slot 1 after that was removed, and the next claim comes from a run that
    listed the log before.
    """
    first = restore(driver, 0)
    messages = [precommit(driver.participants.values(), first, iter([["row"]]))]

    def others():
        for _ in range(20):
            restore(driver, 0)
        decide(driver, first, messages)

    driver.log.meanwhile = others
