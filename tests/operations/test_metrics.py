"""Metrics of a dead query: what doctor and progress print, and which alerts fire, and when."""

import math
from contextlib import closing

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition
from dead_query_fixtures import write
from prometheus_tools import firing, series
from typer.testing import CliRunner

from kafka2pc.operations.cli.app import app
from kafka2pc.spark.metrics.families import from_text, sample

pytestmark = [pytest.mark.kafka, pytest.mark.never_unsteady]


def run(*words):
    """Status and samples of a command."""
    done = CliRunner().invoke(app, [str(w) for w in (*words, "--openmetrics")])
    return done.exit_code, {
        (s.family.removeprefix("kafka2pc_"), *(text for _, text in s.labels)): s
        for s in from_text(done.stdout)
    }


def doctor(dead, *words):
    servers = ("--bootstrap-servers", dead.kafka.bootstrap_servers, "--prefix", dead.prefix)
    return run("doctor", *servers, "--topic", dead.topic, "--checkpoint", dead.checkpoint, *words)


def test_doctor_says_what_is_open_how_old_it_is_and_how_much_time_is_left(dead):
    status, before = doctor(dead)
    assert status == 3 and before["doctor_status", dead.id].value == 3  # one copy
    assert before["open_transactions", "true", dead.id].value == 0
    assert before["unstable_offsets", dead.id, dead.topic].value == 0
    dead.leave(decided=True)
    status, after = doctor(dead, "--group", "billing")
    assert status == 4 and after["doctor_status", dead.id].value == 4
    assert after["open_transactions", "true", dead.id].value == 2
    assert after["open_transactions", "false", dead.id].value == 0
    assert 0 <= after["open_transaction_age_seconds", "true", dead.id].value < 120
    left = after["open_transaction_time_left_seconds", "true", dead.id].value
    assert 0 < left < math.inf
    assert after["doctor_findings", "decided-and-open", "danger", dead.id].value == 1
    assert after["transactional_ids", dead.prefix, dead.id].value >= 2
    assert after["unstable_offsets", dead.id, dead.topic].value == 4


def test_a_damaged_log_hides_no_open_transaction(dead):
    dead.leave(decided=True)
    for record in (dead.place / "kafka2pc").glob("0.*"):
        record.write_bytes(record.read_bytes()[:10])
    servers = ("--bootstrap-servers", dead.kafka.bootstrap_servers)
    status, seen = run("doctor", *servers, "--checkpoint", dead.checkpoint)
    assert status == 4 and seen["open_transactions", "unknown", dead.id].value == 2


def test_a_group_that_commits_in_a_transaction_has_a_lag_while_that_is_open(dead):
    """As Kafka Streams does: also if it hangs, doctor has to say what else is wrong."""
    name = f"{dead.topic}-streams"
    servers = {"bootstrap.servers": dead.kafka.bootstrap_servers}
    write(dead, "a")
    with closing(Consumer(servers | {"group.id": name, "enable.auto.commit": False})) as consumer:
        consumer.commit(offsets=[TopicPartition(dead.topic, 0, 0)], asynchronous=False)
        producer = Producer(servers | {"transactional.id": name})
        producer.init_transactions()
        producer.begin_transaction()
        end = [TopicPartition(dead.topic, 0, 1)]
        producer.send_offsets_to_transaction(end, consumer.consumer_group_metadata())
        try:
            status, seen = doctor(dead, "--group", name)
        finally:
            producer.abort_transaction()
    assert seen["group_lag_offsets", name, dead.id, dead.topic].value == 1 and status == 3


def test_progress_shows_a_batch_that_is_decided_and_not_committed(dead):
    dead.leave(decided=True)
    status, seen = run("progress", dead.checkpoint)
    assert status == 0
    by_state = {s[2]: x.value for s, x in seen.items() if s[0] == "checkpoint_batch_state"}
    assert by_state == {"writing": 0, "decided": 1, "done": 0}
    assert seen["checkpoint_batch_rows", dead.id].value == 4
    assert 0 < seen["checkpoint_time_left_seconds", dead.id].value


DIED = 20  # minutes: the query is well until then


def timeline(before, after, minutes):
    """The inputs of promtool: the values of a doctor that ran before the death, and those of one
    that ran after it, which go on as the clock does.
    """
    steps = {"open_transaction_age_seconds": 60, "open_transaction_time_left_seconds": -60}
    inputs = []
    for key in {**before, **after}:
        if key[0] == "doctor_timestamp_seconds":
            continue
        well = before.get(key)
        start = f"{well.value:.3f}x{DIED - 1}" if well else f"_x{DIED}"
        dead = after.get(key)
        step = steps.get(key[0], 0)
        rest = f"{dead.value:.3f}{step:+d}x{minutes}" if dead else f"_x{minutes}"
        name = series(well or dead, 0)["series"]
        start = start.replace(f"x{DIED - 1}", f"+0x{DIED - 1}") if well else start
        inputs.append({"series": name, "values": f"{start} {rest}".replace("inf", "Inf")})
    clock = sample("doctor_timestamp_seconds", 0)
    return [*inputs, series(clock, DIED + minutes, 60)]


def test_the_alerts_of_a_query_that_died_after_its_decision_fire_and_not_before(dead, tmp_path):
    before = doctor(dead)[1]
    after = doctor(dead.leave(decided=True))[1]
    left_s = after["open_transaction_time_left_seconds", "true", dead.id].value
    near = DIED + math.ceil((left_s - 300) / 60) + 1  # the first minute below 300 seconds
    inputs = timeline(before, after, 30)
    at = firing(inputs, [DIED - 1, DIED, DIED + 9, DIED + 10, near - 2, near], tmp_path)
    assert at[DIED - 1] == set()
    assert at[DIED] == {"Kafka2pcDataAtRisk"}
    assert "Kafka2pcDecidedAndOpen" not in at[DIED + 9]
    assert "Kafka2pcDecidedAndOpen" in at[DIED + 10]
    assert "Kafka2pcTimeoutNear" not in at[near - 2]
    assert "Kafka2pcTimeoutNear" in at[near]


@pytest.mark.full
def test_a_doctor_that_cannot_look_is_an_alert(tmp_path):
    """Then nothing is printed, and the file of its last answer stays."""
    status, seen = run("doctor", "--bootstrap-servers", "127.0.0.1:1")
    assert status == 1 and seen == {}
    last = series(sample("doctor_timestamp_seconds", 600), 60)  # it looked at minute 10
    at = firing([last], [25, 26], tmp_path)
    assert at == {25: set(), 26: {"Kafka2pcDoctorSilent"}}
