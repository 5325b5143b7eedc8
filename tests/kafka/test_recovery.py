"""KIP-939's way back after a crash: what is open is kept, and ended by its raised epoch."""

from types import SimpleNamespace

import pytest

from kafka2pc.kafka.wire import recovery
from kafka2pc.kafka.wire.recovery import complete_transaction
from kafka2pc.protocol.messages import PreparedTxnState
from kafka2pc.protocol.participant import Outcome


@pytest.mark.parametrize(
    ("ongoing", "stored", "ended"),
    [
        ((7, 5), PreparedTxnState(7, 5), [(PreparedTxnState(7, 6), True)]),
        ((7, 5), PreparedTxnState(7, 4), [(PreparedTxnState(7, 6), False)]),
        ((7, 5), None, [(PreparedTxnState(7, 6), False)]),
        ((-1, -1), PreparedTxnState(7, 5), []),
    ],
    ids=["the stored one", "another one", "nothing stored", "nothing open"],
)
@pytest.mark.never_unsteady
def test_a_kept_transaction_is_ended_by_its_raised_epoch(monkeypatch, ongoing, stored, ended):
    """A coordinator of the day when keepPreparedTxn is accepted: it keeps what is open, under a
    raised epoch.
    """
    calls = []

    def init(coordinators, transactional_id, *, timeout_ms, enable_2pc, keep_prepared):
        assert enable_2pc and keep_prepared
        return SimpleNamespace(
            producer_id=7,
            producer_epoch=6,
            ongoing_txn_producer_id=ongoing[0],
            ongoing_txn_producer_epoch=ongoing[1],
        )

    def end(coordinators, transactional_id, state, *, commit):
        calls.append((state, commit))
        return Outcome.DONE

    monkeypatch.setattr(recovery, "ask_init_producer_id", init)
    monkeypatch.setattr(recovery, "end_txn", end)
    assert complete_transaction(None, "x", stored) is (Outcome.DONE if ended else None)
    assert calls == ended
