"""The kafka.* options: what both clients get, what is refused, and that no error holds a secret."""

import json
import socket
import ssl
import time
from pathlib import Path

import pytest
from confluent_kafka import Producer

from kafka2pc.kafka.login.tokens import TokenEnded, shared_tokens
from kafka2pc.kafka.options.librdkafka import TOKEN_PROVIDER
from kafka2pc.kafka.options.rules import plain_servers
from kafka2pc.kafka.wire.cluster import Cluster
from kafka2pc.kafka.wire.login import connection_settings
from kafka2pc.kafka.wire.settings import client_conf
from kafka2pc.kafka.write.settings import open_producer
from kafka2pc.proof.child_process import until
from kafka2pc.protocol.errors import BadOption, NotAuthorized

PEM_TEXT = "-----BEGIN ANY-----\nx\n-----END ANY-----\n"
PASSWORD = "correct horse battery staple"
SERVERS = {"kafka.bootstrap.servers": "a:9092"}
FIXTURES = Path(__file__).parents[1] / "fixtures"
JAAS = json.loads((FIXTURES / "jaas" / "answers.json").read_text())


@pytest.mark.parametrize(
    ("given", "made"),
    [
        ({"KAFKA.Linger.MS": "5", "topic": "x", "transactionalidprefix": "y"}, {"linger.ms": "5"}),
        (
            {"kafka.max.request.size": "9000", "kafka.send.buffer.bytes": "8"},
            {"message.max.bytes": "9000", "socket.send.buffer.bytes": "8"},
        ),
        ({"kafka.sasl.mechanism": "PLAIN"}, {"sasl.mechanisms": "PLAIN"}),
        ({"kafka.enable.idempotence": "true", "kafka.acks": "all"}, {"acks": "all"}),
        (
            {"kafka.ssl.endpoint.identification.algorithm": ""},
            {"ssl.endpoint.identification.algorithm": "none"},
        ),
        ({"kafka.ssl.truststore.certificates": PEM_TEXT}, {"ssl.ca.pem": PEM_TEXT}),
        (
            {"kafka.ssl.truststore.type": "PEM", "kafka.ssl.truststore.location": "/ca.pem"},
            {"ssl.ca.location": "/ca.pem"},
        ),
        (
            {"kafka.ssl.keystore.type": "pem", "kafka.ssl.keystore.location": "/me.pem"},
            {"ssl.certificate.location": "/me.pem", "ssl.key.location": "/me.pem"},
        ),
        ({"kafka.request.timeout.ms": " 9000 "}, {"socket.timeout.ms": "9000"}),
        ({"kafka.buffer.memory": "33554432"}, {"queue.buffering.max.kbytes": "32768"}),
        ({"kafka.connections.max.idle.ms": "-1"}, {"connections.max.idle.ms": "0"}),
        ({"kafka.max.in.flight.requests.per.connection": "10"}, {}),
        ({"kafka.request.required.acks": "-1"}, {"acks": "-1"}),
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


@pytest.mark.parametrize("case", JAAS, ids=lambda case: case["name"])
def test_a_jaas_line_is_read_as_java_reads_it(case):
    """The answers are those of Kafka's own client."""
    if case["java"] is None:
        with pytest.raises(BadOption, match="cannot be read"):
            client_conf(SERVERS | {"kafka.sasl.jaas.config": case["line"]})
        return
    conf = client_conf(SERVERS | {"kafka.sasl.jaas.config": case["line"]})
    assert [conf["sasl.username"], conf["sasl.password"]] == case["java"][1:]


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
        {"kafka.sasl.jaas.config": f'password="{PASSWORD}" username="u";'},
        {"kafka.sasl.jaas.config": f'"{PASSWORD}" x username="u";'},
        {"kafka.sasl.jaas.config": f'"{PASSWORD} a.PlainLoginModule" x username="u";'},
        {"kafka.sasl.jaas.config": ""},
    ],
)
def test_a_refused_option_keeps_the_secret(options):
    with pytest.raises(BadOption) as caught:
        client_conf(SERVERS | options)
    assert PASSWORD not in str(caught.value) and not caught.value.__cause__


@pytest.mark.parametrize(
    ("option", "value", "says"),
    [
        ("kafka.enable.idempotence", "False", "it must be true"),
        (
            "kafka.acks",
            "1",
            'acks must be all(.|\n)*Leave the option out .guide, Moving over, "Opt',
        ),
        ("kafka.request.required.acks", "1", "acks must be all"),
        ("kafka.retries", "0", "at least 1"),
        ("kafka.partitioner.class", "x.RoundRobinPartitioner", "what to do: Instead, "),
        ("kafka.partitioner.ignore.keys", "true", "other partitions"),
        ("kafka.ssl.enabled.protocols", "TLSv1.3", "cannot be honoured"),
        ("kafka.ssl.protocol", "TLSv1.2", "cannot be honoured"),
        ("kafka.ssl.cipher.suites", "TLS_AES_256_GCM_SHA384", "cannot be honoured"),
        ("kafka.ssl.trustmanager.algorithm", "TrustAll", "cannot be honoured"),
        ("kafka.ssl.truststore.location", "/ca.jks", "what to do: Instead, use kafka.ssl.ca"),
        ("kafka.ssl.endpoint.identification.algorithm", "ldaps", "https, or empty"),
        ("kafka.sasl.mechanism", "NTLM", "possible are PLAIN"),
        ("kafka.bootstrap.servers", "a:kafka", "not host:port"),
        ("kafka.bootstrap.servers", "a:b:c", "not host:port"),
        ("kafka.bootstrap.servers", "a:1,b:2:3", "b:2:3 is not host:port"),
        ("kafka.bootstrap.servers", "a:70000", "not host:port"),
        ("kafka.bootstrap.servers", "[::1:9092", "not host:port"),
        ("kafka.bootstrap.servers", "[::1]:b", "not host:port"),
        ("kafka.bootstrap.servers", "", "missing"),
    ],
)
def test_contradictions_are_refused(option, value, says):
    with pytest.raises(BadOption, match=says):
        client_conf(SERVERS | {option: value})


def test_two_options_for_one_setting_must_agree():
    given = {"kafka.max.request.size": "5000", "kafka.message.max.bytes": "5000"}
    assert client_conf(SERVERS | given)["message.max.bytes"] == "5000"
    with pytest.raises(BadOption, match="kafka.message.max.bytes are one setting here"):
        client_conf(SERVERS | given | {"kafka.message.max.bytes": "6000"})


def test_librdkafka_takes_what_we_make():
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


@pytest.mark.parametrize(
    "conf",
    [
        {"security.protocol": "SSL", "ssl.key.pem": "x"},
        {"security.protocol": "SSL", "ssl.cipher.suites": "ECDHE-RSA-AES256-GCM-SHA384"},
        {"security.protocol": "SSL", "ssl.sigalgs.list": "RSA+SHA256"},
        {"security.protocol": "SSL", "ssl.ca.location": "/no/such.pem"},
        {"security.protocol": "SSL", "ssl.ca.pem": "x"},
        {"security.protocol": "SSL", "ssl.certificate.location": __file__},
        {"security.protocol": "SASL_SSL", "sasl.mechanisms": "OAUTHBEARER"},
    ],
)
def test_security_that_only_one_client_could_do_is_refused_before_connecting(conf):
    with pytest.raises(BadOption):
        Cluster({"bootstrap.servers": "127.0.0.1:1"} | conf)


@pytest.mark.parametrize(
    ("text", "servers"),
    [
        ("SSL://a:1, b , [::1]:9, ::1", "a:1,b,[::1]:9,::1"),
        ("a_b.example:9092,,", "a_b.example:9092"),
    ],
)
def test_servers_are_named_in_each_usual_form(text, servers):
    assert plain_servers(text) == servers


# -- sockets --


def test_buffers_and_the_wait_for_a_connection_are_as_given():
    sizes = {"kafka.receive.buffer.bytes": "70000", "kafka.send.buffer.bytes": "-1"}
    wait = {"kafka.socket.connection.setup.timeout.ms": "2000"}
    made = connection_settings(client_conf(SERVERS | sizes | wait), 1000)
    buffers = [o for o in made["socket_options"] if o[1] in (socket.SO_RCVBUF, socket.SO_SNDBUF)]
    assert buffers == [(socket.SOL_SOCKET, socket.SO_RCVBUF, 70_000)]
    assert made["socket_connection_setup_timeout_ms"] == 2_000


# -- words that librdkafka takes for true and false --


def verification(word):
    conf = {"bootstrap.servers": "a:1", "security.protocol": "SSL"}
    conf["enable.ssl.certificate.verification"] = word
    context = connection_settings(conf, 1000)["ssl_context"]
    return context.verify_mode, context.check_hostname


@pytest.mark.parametrize("word", ["true", "True", "t", "T", "1", True])
def test_certificates_are_verified_with_each_word_for_true(word):
    assert verification(word) == (ssl.CERT_REQUIRED, True)


@pytest.mark.parametrize("word", ["false", "False", "f", "F", "0", False])
def test_certificates_are_not_verified_with_each_word_for_false(word):
    assert verification(word) == (ssl.CERT_NONE, False)


@pytest.mark.parametrize("word", ["yes", "2", "", " true", "on"])
def test_another_word_for_a_switch_is_refused(word):
    name = "enable.ssl.certificate.verification"
    with pytest.raises(BadOption, match=name):
        verification(word)
    with pytest.raises(BadOption, match=name):
        client_conf(SERVERS | {f"kafka.{name}": word})


def no_token():
    raise RuntimeError(PASSWORD)


LIVES_S = [0.2]


def one_token():
    return "token", time.time() + LIVES_S.pop()


def with_tokens(provider):
    return {
        "bootstrap.servers": "127.0.0.1:1",
        "security.protocol": "SASL_PLAINTEXT",
        "sasl.mechanisms": "OAUTHBEARER",
        TOKEN_PROVIDER: f"{__name__}:{provider}",
    }


def test_a_function_that_gives_no_token_is_no_wrong_option():
    """On an executor librdkafka is the first that asks for a token."""
    with pytest.raises(NotAuthorized, match="no_token: RuntimeError") as caught:
        open_producer(with_tokens("no_token"))
    assert PASSWORD not in str(caught.value)


def test_a_function_that_gives_no_second_token_is_no_wrong_option():
    conf = with_tokens("one_token")
    tokens = shared_tokens(conf)

    def failed():
        try:
            tokens.current()
        except TokenEnded:
            return False
        except NotAuthorized:
            return True
        return False

    until(failed, "the token has ended, and the function has failed", 20)
    with pytest.raises(NotAuthorized, match="one_token: IndexError"):
        open_producer(conf)
    LIVES_S.append(3600)  # the thread that asks for tokens now sleeps
    # what no connection asks for is asked for once a minute only
    until(lambda: failed() is False and not LIVES_S, "it has asked once more", 20)
