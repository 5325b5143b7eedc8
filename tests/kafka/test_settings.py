"""The kafka.* options: what both clients get, what is refused, and that no error holds a secret."""

import pytest
from confluent_kafka import KafkaException, Producer

from kafka2pc.kafka.wire.cluster import Cluster
from kafka2pc.kafka.wire.settings import REFUSED_OPTIONS, client_conf
from kafka2pc.protocol.errors import BadOption

PASSWORD = "correct horse battery staple"
SERVERS = {"kafka.bootstrap.servers": "a:9092"}


@pytest.mark.parametrize(
    ("given", "made"),
    [
        ({"KAFKA.Linger.MS": "5", "topic": "x", "transactionalidprefix": "y"}, {"linger.ms": "5"}),
        (
            {"kafka.max.request.size": "9", "kafka.send.buffer.bytes": "8"},
            {"message.max.bytes": "9", "socket.send.buffer.bytes": "8"},
        ),
        ({"kafka.sasl.mechanism": "PLAIN"}, {"sasl.mechanisms": "PLAIN"}),
        ({"kafka.enable.idempotence": "true", "kafka.acks": "all"}, {"acks": "all"}),
        (
            {"kafka.ssl.endpoint.identification.algorithm": ""},
            {"ssl.endpoint.identification.algorithm": "none"},
        ),
        ({"kafka.ssl.truststore.certificates": "-----BEGIN"}, {"ssl.ca.pem": "-----BEGIN"}),
        ({"kafka.queue.buffering.max.kbytes": "7"}, {"queue.buffering.max.kbytes": "7"}),
    ],
)
def test_options_become_librdkafka_settings(given, made):
    assert client_conf(SERVERS | given) == {"bootstrap.servers": "a:9092"} | made


@pytest.mark.parametrize(
    ("mechanism", "module", "expected"),
    [
        (None, "org.apache.kafka.common.security.plain.PlainLoginModule", "PLAIN"),
        ("plain", "kafkashaded.org.apache.kafka.common.security.plain.PlainLoginModule", "PLAIN"),
        (
            "SCRAM-SHA-512",
            "org.apache.kafka.common.security.scram.ScramLoginModule",
            "SCRAM-SHA-512",
        ),
    ],
)
def test_a_jaas_line_gives_user_and_password(mechanism, module, expected):
    options = SERVERS | {
        "kafka.sasl.jaas.config": (
            f' {module} required\n username="al=ice"  password="a;b=\\"c\\"" ;\n'
        )
    }
    conf = client_conf(options | ({"kafka.sasl.mechanism": mechanism} if mechanism else {}))
    assert (conf["sasl.mechanisms"], conf["sasl.username"], conf["sasl.password"]) == (
        expected,
        "al=ice",
        'a;b="c"',
    )
    assert "sasl.jaas.config" not in conf


@pytest.mark.parametrize(
    "options",
    [
        {
            "kafka.sasl.jaas.config": (
                f'com.example.LoginModule required username="u" password="{PASSWORD}";'
            )
        },
        {
            "kafka.sasl.jaas.config": (
                f'a.ScramLoginModule required username="u" password="{PASSWORD}" tokenauth="true";'
            )
        },
        {"kafka.sasl.jaas.config": f'a.PlainLoginModule required user="u" password="{PASSWORD}";'},
        {
            "kafka.sasl.jaas.config": (
                f'a.PlainLoginModule required username="u" password="{PASSWORD};'
            )
        },
        {
            "kafka.sasl.jaas.config": (
                f'a.PlainLoginModule required username="u" password="{PASSWORD}";'
            ),
            "kafka.sasl.mechanism": "SCRAM-SHA-256",
        },
        {"kafka.ssl.keystore.key": PASSWORD},
    ],
)
def test_a_refused_option_keeps_the_secret(options):
    with pytest.raises(BadOption) as caught:
        client_conf(SERVERS | options)
    assert PASSWORD not in str(caught.value) and not caught.value.__cause__


@pytest.mark.parametrize("name", sorted(REFUSED_OPTIONS))
def test_what_cannot_be_honoured_says_what_to_do(name):
    with pytest.raises(BadOption, match="what to do: Instead, ") as caught:
        client_conf(SERVERS | {f"kafka.{name}": "x"})
    assert f"kafka.{name}" in caught.value.what


@pytest.mark.parametrize(
    ("option", "value", "says"),
    [
        ("kafka.enable.idempotence", "False", "need it to be true"),
        ("kafka.acks", "1", "acks must be all"),
        ("kafka.bootstrap.servers", "", "missing"),
    ],
)
def test_contradictions_are_refused(option, value, says):
    with pytest.raises(BadOption, match=says):
        client_conf(SERVERS | {option: value})


def test_librdkafka_takes_what_we_make_and_refuses_what_nobody_knows():
    jaas = (
        'org.apache.kafka.common.security.scram.ScramLoginModule required username="u"'
        ' password="p";'
    )
    made = client_conf(
        {
            "kafka.bootstrap.servers": "127.0.0.1:1",
            "kafka.security.protocol": "SASL_PLAINTEXT",
            "kafka.sasl.jaas.config": jaas,
            "kafka.compression.type": "lz4",
            "kafka.delivery.timeout.ms": "1000",
            "kafka.max.request.size": "2000000",
        }
    )
    Producer(made | {"log_level": 0})
    with pytest.raises(KafkaException, match="no.such.thing"):
        Producer(client_conf(SERVERS | {"kafka.no.such.thing": "1"}) | {"log_level": 0})


@pytest.mark.parametrize(
    "conf",
    [
        {"ssl.key.pem": "x"},
        {"security.protocol": "SSL", "ssl.ca.location": "/no/such.pem"},
        {"security.protocol": "SSL", "ssl.ca.pem": "x"},
        {"security.protocol": "SSL", "ssl.certificate.location": __file__},
        {"security.protocol": "SASL_SSL", "sasl.mechanisms": "OAUTHBEARER"},
    ],
)
def test_security_that_only_one_client_could_do_is_refused_before_connecting(conf):
    with pytest.raises(BadOption):
        Cluster({"bootstrap.servers": "127.0.0.1:1"} | conf)
