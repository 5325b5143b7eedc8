"""What the package expects of kafka-python's connections, of which `kafka.wire.connection` alone
knows: connect, silence, kill, throttle, log in again. Also with the newest patch release.
"""

import os
import subprocess
import sys
from pathlib import Path
from unittest.mock import patch

import pytest
from kafka.net.connection import KafkaConnection, SaslReauthenticator
from kafka.protocol.admin import AlterClientQuotasRequest
from kafka.protocol.metadata import MetadataRequest
from kafka_fixtures import back_at_work

from kafka2pc.kafka.wire.connection import Connection, NoAnswer, NotSent
from kafka2pc.local.broker import LocalKafka
from kafka2pc.proof.child_process import until
from kafka2pc.protocol.errors import NotAuthorized

pytestmark = pytest.mark.kafka
ROOT = Path(__file__).resolve().parents[2]
# kafka-python logs in again 5 to 15 % earlier, which must be enough on a busy machine
LOGIN_MS = {"connections.max.reauth.ms": "20000"}


@pytest.fixture(scope="module")
def secure():
    with LocalKafka(secure=True, config=LOGIN_MS, progress=None) as kafka:
        yield kafka


@pytest.fixture
def connection(secure):
    with Connection(secure.client_conf_for("alice"), timeout_ms=8000) as connection:
        yield connection


def asked(connection):
    return connection.ask(MetadataRequest(topics=[]))


def test_connect(secure, connection):
    assert asked(connection).brokers and connection.nodes() == [0]
    with pytest.raises(NotAuthorized, match="alice"):
        Connection(secure.client_conf_for("alice") | {"sasl.password": "wrong"})


def test_a_silent_broker_gives_no_answer_and_answers_later(secure, connection):
    asked(connection)
    secure.pause()
    try:
        with pytest.raises((NoAnswer, NotSent)):
            asked(connection)
    finally:
        secure.resume()
        back_at_work(secure)
    until(lambda: connection.persist(lambda: asked(connection)), "the broker answers")


def test_a_connection_outlives_its_broker(secure, connection):
    asked(connection)
    secure.kill()
    with pytest.raises((NoAnswer, NotSent)):
        asked(connection)
    secure.restart()
    assert connection.persist(lambda: asked(connection)).brokers


def throttle(secure, percent):
    """How much of a broker's time the requests of alice may take; None: all of it."""
    what = AlterClientQuotasRequest
    entry = what.EntryData(
        entity=[what.EntryData.EntityData(entity_type="user", entity_name="alice")],
        ops=[
            what.EntryData.OpData(
                key="request_percentage", value=percent or 0.0, remove=percent is None
            )
        ],
    )
    with Connection(secure.client_conf_for("admin"), timeout_ms=8000) as admin:
        answer = admin.ask(what(entries=[entry], validate_only=False))
    assert [e.error_code for e in answer.entries] == [0]


def test_a_throttled_connection_goes_on_after_its_pause(secure, connection):
    pauses, pause = [], KafkaConnection.pause

    def noted(self, reason):
        pauses.append(reason)
        return pause(self, reason)

    throttle(secure, 0.01)
    try:
        with patch.object(KafkaConnection, "pause", noted):
            until(
                lambda: connection.persist(lambda: asked(connection)) and "throttle" in pauses,
                "the broker throttles",
            )
    finally:
        throttle(secure, None)
    assert connection.persist(lambda: asked(connection)).brokers


@pytest.mark.full
def test_a_session_that_ends_is_renewed_between_two_requests(connection):
    logins, login = [], SaslReauthenticator.session_updated
    (opened,) = connection.wire.manager._conns.values()
    with patch.object(
        SaslReauthenticator,
        "session_updated",
        lambda self, ms: (logins.append(self), login(self, ms))[1],
    ):
        again = lambda: asked(connection).brokers and opened._reauth in logins
        until(again, "the same connection logs in again", 60)


@pytest.mark.nightly
@pytest.mark.skipif("KAFKA2PC_NEWEST" in os.environ, reason="it runs the tests above")
def test_the_newest_patch_release_keeps_the_contract(tmp_path):
    wanted = "kafka-python>=3.0.12,<3.1"
    install = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", tmp_path]
    subprocess.run([*install, wanted], check=True)
    if list(tmp_path.glob("kafka_python-3.0.12.*")):
        return  # there is no newer one
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__],
        env=os.environ | {"PYTHONPATH": path, "KAFKA2PC_NEWEST": "1"},
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-4000:]
