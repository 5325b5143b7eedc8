"""Certificates of users, as files and as texts, for a broker that trusts one authority only."""

import pytest
from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient

from kafka2pc.local.broker import LocalKafka
from kafka2pc.local.certificates import make_certificates

pytestmark = pytest.mark.kafka
SECONDS = 30  # for anything that should take one; a busy machine may need more
END = "-----END CERTIFICATE-----\n"


@pytest.fixture(scope="module")
def tls():
    with LocalKafka(tls=True, progress=None) as kafka:
        yield kafka


def logs_in(kafka, user, without=(), wait_s=SECONDS, **more):
    """Does the broker answer a client with the files of `user`, less some settings and with more?
    Settings are written with _ for the dot.
    """
    own = {"bootstrap.servers": kafka.bootstrap_servers} | kafka.certificates.client(user)
    conf = {name: value for name, value in own.items() if name not in without}
    conf |= {name.replace("_", "."): value for name, value in more.items()}
    try:
        client = AdminClient(conf | {"log_level": 0})
        return client.list_topics(timeout=wait_s).cluster_id == kafka.cluster_id
    except KafkaException as e:
        assert e.args[0].name() in ("_TRANSPORT", "_TIMED_OUT")
        return False


def test_the_certificate_of_an_intermediate_authority_is_sent_from_a_file_and_from_a_text(tls):
    assert logs_in(tls, "carol")
    chain = (tls.certificates.folder / "carol.pem").read_text()
    assert chain.count(END) == 2
    file = ("ssl.certificate.location",)
    assert logs_in(tls, "carol", file, ssl_certificate_pem=chain)
    alone = chain.partition(END)[0] + END
    assert not logs_in(tls, "carol", file, 1, ssl_certificate_pem=alone)


def test_an_encrypted_key_is_read_from_a_text(tls):
    key = (tls.certificates.folder / "alice.key").read_text()
    assert key.startswith("-----BEGIN ENCRYPTED PRIVATE KEY-----")
    assert logs_in(tls, "alice", ("ssl.key.location",), ssl_key_pem=key)


def test_each_authority_in_a_text_is_trusted(tls, tmp_path):
    own = (tls.certificates.folder / "ca.pem").read_text()
    other = (make_certificates(tmp_path / "other").folder / "ca.pem").read_text()
    file = ("ssl.ca.location",)
    assert logs_in(tls, "alice", file, ssl_ca_pem=own + other)
    assert logs_in(tls, "alice", file, ssl_ca_pem=other + own)
    assert not logs_in(tls, "alice", file, 1, ssl_ca_pem=other)
