"""Doctor on clusters that lack something: settings, versions, a coordinator that knows."""

import time
from functools import partial
from unittest.mock import patch

import pyarrow as pa
import pytest
from dead_query_fixtures import finding_of, names
from kafka_tools import administered
from shell import typed

from kafka2pc.kafka.records import rows as rows_module
from kafka2pc.kafka.records.rows import rows_of
from kafka2pc.kafka.wire.cluster import Cluster
from kafka2pc.kafka.write import sender
from kafka2pc.kafka.write.column_producer import ColumnTransaction
from kafka2pc.local.broker import LocalKafka
from kafka2pc.operations.access import Access
from kafka2pc.operations.doctor.doctor import doctor
from kafka2pc.operations.survey import Survey, find_hanging
from kafka2pc.proof.child_process import until

pytestmark = pytest.mark.kafka


def test_a_cluster_without_kip_939_with_a_short_timeout_and_a_hanging_transaction(
    tmp_path, monkeypatch
):
    config = {
        "transaction.max.timeout.ms": 120_000,
        "transaction.partition.verification.enable": False,
    }
    with LocalKafka(two_phase_commit=False, config=config, progress=None) as kafka:
        kafka.create_topic("t")
        access = Access(kafka.bootstrap_servers)
        monkeypatch.setattr(
            rows_module, "rows_of", partial(rows_of, now_ms=int(time.time() * 1000) - 121_000)
        )
        hang(kafka, "t")
        with Survey(kafka.client_conf) as survey:
            assert find_hanging(survey, ["t"], idle_ms=200_000) == [], (
                "a producer with a recent timestamp may have begun or ended just now"
            )
        found = doctor(access, topics=["t"], older_ms=0, timeout_ms=120_001)
        finding_of(found, "two-phase-no-version", "unstable.api.versions.enable=true")
        finding_of(found, "timeout-too-large", "=120001", "transaction.max.timeout.ms=120000")
        finding_of(found, "readers-held-back", "no coordinator knows")
        assert typed(access.command("transactions", "hanging", "t"))[1] == 3
        with Survey(kafka.client_conf) as survey:
            (leader,) = {p.leader for p in survey.layout(["t"])}
        as_kafka = (
            f"kafka2pc transactions --bootstrap-server {kafka.bootstrap_servers} find-hanging"
        )
        for options, status in {
            "--topic t --max-transaction-timeout 2": 3,
            f"--broker-id {leader} --max-transaction-timeout 2": 3,
            "--topic t --partition 0 --max-transaction-timeout 2": 3,
            "--topic t --partition 1 --max-transaction-timeout 2": 0,
            f"--broker-id {leader + 1} --max-transaction-timeout 2": 0,
            "--topic t": 0,
        }.items():
            said, found_status = typed(f"{as_kafka} {options}")
            assert (found_status, "t-0" in said) == (status, status == 3), (options, said)
        administered(
            kafka, tmp_path, *finding_of(found, "hanging", "t-0", "from offset 0").commands
        )
        until(
            lambda: (
                not names(doctor(access, topics=["t"], older_ms=0))
                & {"hanging", "readers-held-back"}
            ),
            "its end is written",
            20,
        )


def hang(kafka, topic):
    """Leave a record in a transaction that no coordinator knows, as a client with a bug does: it
    never tells the coordinator where it writes.
    """
    with (
        Cluster(kafka.client_conf) as cluster,
        patch.object(sender, "add_partitions", lambda *_: dict.fromkeys(_[-1], 0)),
    ):
        txn = ColumnTransaction(
            cluster, kafka.client_conf, "forgetful", 60_000, topic=topic, end_txn_version=4
        ).begin()
        txn.write(pa.RecordBatch.from_pydict({"value": ["a"]}))
        txn.flush()


@pytest.mark.nightly
def test_an_old_cluster():
    with LocalKafka(version="3.9.1", two_phase_commit=False, progress=None) as kafka:
        found = doctor(Access(kafka.bootstrap_servers))
        finding_of(found, "two-phase-too-old", "Kafka 4.1")
        finding_of(found, "old-transactions", "kafka-features.sh", "transaction.version=2")
        assert found.status == 3, "one copy"
