"""What an older version wrote, a newer one restores: every format of Committables and decisions is
kept in tests/fixtures. Those files never change.
"""

import json
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest
from kafka_fixtures import values

from kafka2pc.decision_logs.files import FileLog
from kafka2pc.kafka.participant import KafkaParticipant
from kafka2pc.kafka.wire.cluster import Cluster
from kafka2pc.kafka.write.column_producer import ColumnTransaction
from kafka2pc.proof.child_process import until
from kafka2pc.protocol.driver import Driver
from kafka2pc.protocol.errors import CorruptDecision
from kafka2pc.protocol.log.decisions import (
    ACCEPTED,
    FAILED,
    FORMAT,
    GATE_FORMAT,
    REPAIR_FORMAT,
    Identity,
    Slot,
)
from kafka2pc.protocol.log.format import dump_decision, load_decision
from kafka2pc.protocol.log.slots import MemoryLog
from kafka2pc.protocol.memory import MemoryParticipant
from kafka2pc.protocol.messages import (
    Committable,
    Mode,
    PartitionRange,
    Plan,
    PreparedTxnState,
    committable_from_dict,
    committable_to_dict,
)
from kafka2pc.protocol.names import Token, known_name
from kafka2pc.protocol.participant import Outcome
from kafka2pc.protocol.phases.restore import restore
from kafka2pc.protocol.policies import retry_unknown
from kafka2pc.protocol.states import TxnState

pytestmark = pytest.mark.never_unsteady


def plan():
    return Plan(query_id=QUERY, batch_id=7, attempt=1, token=Token(7, 1, "5f3a09c1"))


FIXTURES = Path(__file__).parents[1] / "fixtures"
QUERY = "0f8fad5b-d9cb-469f-a165-70867728950e"
NAME = f"kafka2pc-{QUERY}-7.1.5f3a09c1-0badcafe-0-1"
COMMITTABLES = {
    0: Committable(transactional_id="flink-sink-3-17", state=PreparedTxnState(4000, 5)),
    1: Committable(
        transactional_id=NAME,
        state=PreparedTxnState(4000, 3),
        end_txn_version=5,
        cluster_id="kafka-store",
        started_ms=1700000000000,
        timeout_ms=900000,
        partitions=(
            PartitionRange(topic="orders", partition=0, records=2, first_offset=10, last_offset=11),
        ),
        version=1,
    ),
}
COMMITTABLES[2] = replace(
    COMMITTABLES[1],
    topic_ids=(("orders", "3b2c0f7e-7d0a-4b44-9a6c-9f2f4c0b8d11"),),
    oldest_ms=1546300800000,
    version=2,
)


def fixture(name):
    return (FIXTURES / name).read_bytes()


@pytest.mark.parametrize("version", COMMITTABLES)
def test_a_committable_of_every_version_is_read(version):
    assert (
        committable_from_dict(json.loads(fixture(f"committable-{version}.json")))
        == COMMITTABLES[version]
    )
    if version:
        written = json.dumps(committable_to_dict(COMMITTABLES[version]), indent=1)
        assert written.encode() == fixture(f"committable-{version}.json").strip()


def test_every_version_has_its_fixture():
    newest = Committable(transactional_id="x", state=PreparedTxnState(1, 0)).version
    assert sorted(p.name for p in FIXTURES.glob("*-*.json")) == sorted(
        [f"committable-{n}.json" for n in range(newest + 1)]
        + [f"decision-{n}-{kind}.json" for n, kinds in KINDS.items() for kind in kinds]
    )


KINDS = {
    1: ("abort", "commit"),
    2: ("abort", "adopt", "commit"),
    3: ("accepted", "failed"),
    4: ("abort", "commit"),
    5: ("claim", "lost", "repair"),
    6: ("commit",),
}


@pytest.mark.parametrize("kind", KINDS[1])
def test_a_decision_is_read_and_written_byte_by_byte_as_it_was(kind):
    content = fixture(f"decision-1-{kind}.json")
    found = load_decision(content, "here")
    assert (found.query_id, found.slot, found.kind, found.token) == (
        QUERY,
        Slot(7, kind == "commit"),
        kind.upper(),
        Token(7, 1, "5f3a09c1"),
    )
    assert found.committables == ((COMMITTABLES[1],) if kind == "commit" else ())
    assert (found.identity, found.rows, found.bytes, found.expires_ms) == (None,) * 4
    assert dump_decision(found) == content


WHERE = Identity(
    log="file:///data/orders/kafka2pc",
    checkpoint="file:///data/orders",
    topics=("orders",),
    prefix="kafka2pc",
    fence="kafka2pc",
)
ELSEWHERE = Identity(
    log="s3://bucket/orders/kafka2pc", checkpoint="s3://bucket/orders", prefix="kafka2pc"
)


@pytest.mark.parametrize(
    ("kind", "slot", "identity", "counts"),
    [
        ("abort", 0, WHERE, (None, None, 1700000000000)),
        ("commit", 1, WHERE, (2, 17, None)),
        ("adopt", 2, ELSEWHERE, (None, None, None)),
    ],
)
def test_a_decision_of_format_2_says_whose_it_is_and_what_it_holds(kind, slot, identity, counts):
    content = fixture(f"decision-2-{kind}.json")
    found = load_decision(content, "here")
    assert (found.query_id, found.slot, found.kind, found.token) == (
        QUERY,
        Slot(7, slot),
        kind.upper(),
        Token(7, 1, "5f3a09c1"),
    )
    assert (found.identity, (found.rows, found.bytes, found.expires_ms)) == (identity, counts)
    assert found.committables == ((COMMITTABLES[1],) if kind == "commit" else ())
    assert dump_decision(found) == content


@pytest.mark.parametrize(("kind", "note"), [("failed", FAILED), ("accepted", ACCEPTED)])
def test_a_note_has_format_3(kind, note):
    content = fixture(f"decision-3-{kind}.json")
    found = load_decision(content, "here", Slot(7, note))
    assert (found.query_id, found.kind, found.commit, found.adopts) == (
        QUERY,
        kind.upper(),
        False,
        False,
    )
    assert (found.identity, found.token) == (WHERE, Token(7, 0, "5f3a09c1"))
    assert dump_decision(found) == content


@pytest.mark.parametrize("kind", KINDS[4])
def test_since_format_4_names_are_longer_and_an_older_version_refuses_even_a_claim(kind):
    """It would not know the names of the transactions, and so would leave them open."""
    content = fixture(f"decision-4-{kind}.json")
    found = load_decision(content, "here")
    assert (found.kind, found.identity, found.format) == (kind.upper(), WHERE, FORMAT)
    assert [known_name(c.transactional_id) for c in found.committables] == (
        [known_name(NAME)] if kind == "commit" else []
    )
    assert dump_decision(found) == content
    new = Driver(query_id=QUERY, log=MemoryLog(), participants={}).decision(plan(), commit=False)
    assert json.loads(dump_decision(new))["format"] == 4, "version 3 is the newest that it knows"


@pytest.mark.parametrize(
    ("kind", "slot", "token"), [("claim", 2, 3), ("repair", 3, 3), ("lost", 2, 1)]
)
def test_a_record_of_a_repair_has_format_5_which_older_versions_refuse(kind, slot, token):
    """They would take LOST and CLAIM for an ABORT, which makes a COMMIT void, and not see who has
    the rows.
    """
    content = fixture(f"decision-5-{kind}.json")
    found = load_decision(content, "here", Slot(7, slot))
    assert (found.kind, found.repair, found.commit) == (kind.upper(), kind.upper(), False)
    assert (found.identity, found.token) == (WHERE, Token(7, token, "5f3a09c1"))
    assert found.lost == (() if kind == "claim" else (COMMITTABLES[2],))
    assert [c.records for c in found.committables] == ([2] if kind == "repair" else [])
    assert dump_decision(found) == content and json.loads(content)["format"] == REPAIR_FORMAT


def test_a_commit_with_a_gate_has_format_6_which_older_versions_refuse():
    """They would leave the gate open, or take it for a transaction that no run decided."""
    content = fixture("decision-6-commit.json")
    found = load_decision(content, "here")
    (gate,) = found.gates
    assert (gate.records, gate in found.committables) == (0, False)
    assert found.committables == load_decision(fixture("decision-4-commit.json"), "").committables
    assert dump_decision(found) == content and json.loads(content)["format"] == GATE_FORMAT


def test_a_record_of_a_kind_that_is_not_known_is_refused():
    found = load_decision(fixture("decision-5-lost.json"), "here")
    with pytest.raises(CorruptDecision, match="FOUND is not known"):
        load_decision(dump_decision(replace(found, repair="FOUND")), "here")


def old_checkpoint(folder, commit=None):
    """The decisions as the old version left them. `commit`: other bytes for its COMMIT."""
    folder.mkdir(parents=True)
    (folder / "7.0.json").write_bytes(fixture("decision-1-abort.json"))
    (folder / "7.1.json").write_bytes(commit or fixture("decision-1-commit.json"))
    return FileLog(folder)


def test_the_old_version_decided_and_the_new_one_finishes(tmp_path):
    store = MemoryParticipant("kafka")
    store.epochs[NAME] = 3
    store.txns[NAME, 3] = type("Txn", (), {"state": TxnState.PRECOMMITTED, "began_ms": 0})()
    store.records = [((NAME, 3), "row")]
    driver = Driver(
        query_id=QUERY, log=old_checkpoint(tmp_path / "log"), participants={"kafka": store}
    )
    assert restore(driver, 7, offsets_hash="a" * 64).mode is Mode.DRAIN and store.read() == ["row"]
    assert restore(driver, 8).mode is Mode.WRITE, "and goes on"


def precommitted(cluster, kafka, topic, name):
    """Write a transaction, leave it open, and return its state."""
    txn = ColumnTransaction(cluster, kafka.client_conf, name, 60_000, topic=topic).begin()
    txn.write(pa.RecordBatch.from_pydict({"value": ["a", "b"]}))
    txn.flush()
    return txn.precommit().state


@pytest.mark.kafka
def test_the_old_version_decided_on_a_real_broker_and_the_new_one_finishes(kafka, tmp_path):
    kafka.create_topic("old-decision")
    with Cluster(kafka.client_conf) as cluster:
        state = precommitted(cluster, kafka, "old-decision", NAME)
    old = load_decision(fixture("decision-1-commit.json"), "here")
    stores = (("kafka", kafka.cluster_id),)
    log = old_checkpoint(
        tmp_path / "log",
        dump_decision(
            replace(old, stores=stores, committables=(replace(old.committables[0], state=state),))
        ),
    )
    participant = KafkaParticipant(kafka.client_conf)
    try:
        assert (
            restore(
                Driver(query_id=QUERY, log=log, participants={"kafka": participant}),
                7,
                offsets_hash="a" * 64,
            ).mode
            is Mode.DRAIN
        )
    finally:
        participant.close()
    assert sorted(values(kafka, "old-decision")) == ["a", "b"]


@pytest.mark.kafka
def test_flinks_legacy_form_is_committed_on_a_real_broker(kafka):
    """Producer id, epoch and transactional id, and nothing else: what Flink's sinks kept before
    FLIP-319.
    """
    kafka.create_topic("legacy")
    with Cluster(kafka.client_conf) as cluster:
        state = precommitted(cluster, kafka, "legacy", "flink-sink-3-17")
    legacy = json.loads(fixture("committable-0.json")) | {
        "producer_id": state.producer_id,
        "epoch": state.epoch,
    }
    participant = KafkaParticipant(kafka.client_conf)
    try:
        c = committable_from_dict(legacy)
        assert participant.describe([c])[0].state is TxnState.PRECOMMITTED
        assert [retry_unknown()(lambda: participant.commit(c)) for _ in range(2)] == [
            Outcome.DONE
        ] * 2, "and asked again"
        until(lambda: participant.describe([c])[0].state is TxnState.COMMITTED, "committed", 10)
        assert sorted(values(kafka, "legacy")) == ["a", "b"]
        assert (
            participant.commit(
                replace(c, state=PreparedTxnState(state.producer_id, state.epoch + 7))
            )
            is Outcome.REFUSED
        )
    finally:
        participant.close()
