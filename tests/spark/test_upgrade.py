"""Upgrade and rollback. A query that version 0.1.0 left in any state is finished by this version;
0.1.0 refuses what a newer version wrote.

The checkpoints are kept byte for byte in tests/fixtures/checkpoint-0.1.0. A fresh broker has
another cluster id and hands out other producer ids and epochs, so the test opens the same
transactions again and writes those three into its copy of the records, in 0.1.0's own format.
"""

import json
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pytest
from kafka_fixtures import values
from marks import first_of

from kafka2pc.kafka.participant import KafkaParticipant
from kafka2pc.kafka.wire.cluster import Cluster
from kafka2pc.kafka.wire.descriptions import list_transactions
from kafka2pc.kafka.write.column_producer import ColumnTransaction
from kafka2pc.proof.child_process import until
from kafka2pc.protocol.errors import UnknownFormat
from kafka2pc.protocol.history import Silence
from kafka2pc.protocol.participant import Outcome
from kafka2pc.protocol.policies import retry_unknown

pytestmark = pytest.mark.never_unsteady

TESTS = Path(__file__).parents[1]
sys.path.insert(0, str(TESTS / "fixtures"))
import version_0_1_0 as old  # noqa: E402
from upgrade_query import SIZE  # noqa: E402

KEPT = TESTS / "fixtures" / "checkpoint-0.1.0"
TRANSACTIONS = json.loads((KEPT / "transactions.json").read_text())
STATES = ["planned", "decided", "half"]
TIMEOUT_MS = 600_000
UNFINISHED = ("Ongoing", "PrepareCommit", "PrepareAbort")


# -- the world of a checkpoint, once more --


def records(folder):
    return sorted((Path(folder) / "kafka2pc").glob("*.json"))


def as_written(d):
    """The bytes of a record as 0.1.0 wrote them."""
    d = {k: v for k, v in d.items() if k != "checksum"}
    return json.dumps(d | {"checksum": old._checksum(d)}, indent=1).encode()


def write(cluster, kafka, topic, kept):
    """One of the kept transactions, open again: its Committable."""
    rows = [
        (value, int(partition)) for partition, numbers in kept["rows"].items() for value in numbers
    ]
    batch = {
        "value": [str(value) for value, _ in rows],
        "key": [kept["key"]] * len(rows),
        "partition": pa.array([p for _, p in rows], pa.int32()),
    }
    txn = ColumnTransaction(
        cluster, kafka.client_conf, kept["transactional_id"], TIMEOUT_MS, topic=topic
    ).begin()
    txn.write(pa.record_batch(batch))
    txn.flush()
    return txn.precommit()


def open_again(kafka, topic, state):
    """All kept transactions of `state` on this broker, those of batch 0 first; what was committed
    is committed again.
    """
    participant, found = KafkaParticipant(kafka.client_conf), []
    try:
        for batch in (TRANSACTIONS[state][:2], TRANSACTIONS[state][2:]):
            cs = [write(participant.cluster, kafka, topic, kept) for kept in batch]
            for c, kept in zip(cs, batch, strict=True):
                if kept["committed"]:
                    assert retry_unknown()(lambda c=c: participant.commit(c)) is Outcome.DONE
            until(
                lambda: not in_states(kafka, topic, UNFINISHED[1:]), "what was ended is completed"
            )
            found += cs
    finally:
        participant.close()
    return {c.transactional_id: c for c in found}


def in_states(kafka, topic, states):
    with Cluster(kafka.client_conf) as cluster:
        return {t.transactional_id for t in list_transactions(cluster, topic, states)}


def moved(folder, cluster_id, opened):
    """Let the records name this cluster and its producer ids and epochs."""
    for path in records(folder):
        d = json.loads(path.read_bytes())
        assert as_written(d) == path.read_bytes(), "only what is replaced below changes"
        d["stores"] = {"kafka": cluster_id}
        for kept in d["committables"]:
            c = opened[kept["transactional_id"]]
            there = [(p.partition, p.records, p.first_offset, p.last_offset) for p in c.partitions]
            assert there == [
                (p["partition"], p["records"], p["first_offset"], p["last_offset"])
                for p in kept["partitions"]
            ], "the same offsets"
            kept |= {
                "cluster_id": cluster_id,
                "state": {"producer_id": c.state.producer_id, "epoch": c.state.epoch},
            }
        path.write_bytes(as_written(d))


# -- upgrade --


@pytest.fixture(scope="module")
def query(jobs):
    """Runs the query of the fixtures with this version, in one JVM for all states."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", f"{TESTS.parent}:{TESTS / 'support'}")
        with jobs("upgrade") as job:
            job.start()
            yield lambda options: job.ask("upgrade_query.run", options=options)


@pytest.mark.kafka
@pytest.mark.spark
@pytest.mark.parametrize("state", first_of(["half", "planned", "decided"]))
def test_what_0_1_0_left_is_finished_exactly_once(kafka, query, tmp_path, state):
    topic, checkpoint = f"upgrade-{state}", tmp_path / "checkpoint"
    shutil.copytree(KEPT / state, checkpoint)
    kafka.create_topic(topic, partitions=2)
    opened = open_again(kafka, topic, state)
    left_open = {kept["transactional_id"] for kept in TRANSACTIONS[state] if not kept["committed"]}
    assert (
        in_states(kafka, topic, ("Ongoing",)) == left_open
        and len(left_open) == {"planned": 2, "decided": 2, "half": 1}[state]
    )
    moved(checkpoint, kafka.cluster_id, opened)
    options = {f"kafka.{name}": value for name, value in kafka.client_conf.items()}
    options |= {
        "topic": topic,
        "checkpointLocation": str(checkpoint),
        "transactionalIdPrefix": topic,
        "twoPhaseCommit": "off",
    }
    assert query(options)["batches"][:2] == [1, 2], "the batch in which it died, and the next one"
    until(lambda: not in_states(kafka, topic, UNFINISHED), "nothing stays open")
    assert sorted(map(int, values(kafka, topic))) == list(range(3 * SIZE))
    ended = "CompleteAbort" if state == "planned" else "CompleteCommit"
    assert left_open <= in_states(kafka, topic, (ended,)), (
        "what was decided is committed, and not written again"
    )


# -- rollback --


def newer(folder, format, **more):
    """The newest record of a checkpoint, as a newer version could have written it."""
    path = records(folder)[-1]
    path.write_bytes(
        as_written(
            json.loads(path.read_bytes())
            | {"format": format, "identity": {"log": "file:///x"}}
            | more
        )
    )
    return path


def contents(folder):
    return {
        str(path): path.read_bytes() for path in sorted(Path(folder).rglob("*")) if path.is_file()
    }


def log_of(state, folder):
    shutil.copytree(KEPT / state, folder)
    return old.Log(folder / "kafka2pc")


@pytest.mark.parametrize("state", STATES)
def test_0_1_0_reads_what_it_wrote(tmp_path, state):
    log = log_of(state, tmp_path / "checkpoint")
    assert [[d.kind for d in log.chain(batch)] for batch in log.batches()] == [
        ["ABORT", "COMMIT"],
        ["ABORT"] if state == "planned" else ["ABORT", "COMMIT"],
    ]


@pytest.mark.parametrize("format", [2, 3, 17])
@pytest.mark.parametrize("state", STATES)
def test_0_1_0_refuses_a_record_of_a_newer_format(tmp_path, state, format):
    log = log_of(state, tmp_path / "checkpoint")
    path = newer(tmp_path / "checkpoint", format)
    before = contents(tmp_path)
    with pytest.raises(UnknownFormat, match=f"{path.name}: format {format}, known up to 1"):
        log.chain(1)
    assert contents(tmp_path) == before


class Untouched:
    """A store of a rolled back query: it may only be asked who it is."""

    def __init__(self, cluster_id):
        self.store_id = lambda: cluster_id


def driver_of_0_1_0(folder, log):
    query_id, newest = (
        json.loads((folder / "metadata").read_text())["id"],
        json.loads(records(folder)[-1].read_text()),
    )
    return SimpleNamespace(
        query_id=query_id,
        log=log,
        participants={"kafka": Untouched(newest["stores"]["kafka"])},
        history=Silence(),
    )


@pytest.mark.parametrize(("batch", "state"), [(1, "planned"), (1, "decided"), (2, "decided")])
def test_0_1_0_stops_before_it_claims_commits_or_aborts(tmp_path, state, batch):
    log = log_of(state, tmp_path / "checkpoint")
    newer(tmp_path / "checkpoint", 2)
    before = contents(tmp_path)
    with pytest.raises(UnknownFormat) as caught:
        old.plan(driver_of_0_1_0(tmp_path / "checkpoint", log), batch)
    assert contents(tmp_path) == before
    assert (
        caught.value.risk == "No. Nothing was touched."
        and "Install that version or a newer one" in caught.value.action
    )


def test_without_a_newer_record_0_1_0_goes_on(tmp_path):
    log = log_of("decided", tmp_path / "checkpoint")
    with pytest.raises(AssertionError, match="0.1.0 drains"):
        old.plan(driver_of_0_1_0(tmp_path / "checkpoint", log), 1)
