"""Every name that Java's clients know is obeyed, without effect, or refused; the table agrees with
Kafka's own jar."""

import pytest
from kafka_tools import java_clients

from kafka2pc.kafka.options.java_client import CLIENT, NO_EFFECT, OBEYED, REFUSED
from kafka2pc.kafka.options.java_options import (
    CONSUMER,
    FORMER,
    PRODUCER,
    SINK,
    SOURCE,
    java_option,
    option_rows,
)
from kafka2pc.kafka.options.librdkafka import is_setting
from kafka2pc.kafka.options.problems import Problems
from kafka2pc.kafka.wire.settings import client_conf, read_client
from kafka2pc.protocol.errors import BadOption

SERVERS = {"kafka.bootstrap.servers": "a:9092"}
TABLES = {SINK: PRODUCER, SOURCE: CONSUMER}


def known_to_java(jvm):
    """Side -> name -> type and valid values, as the clients in this JVM have them."""
    clients = jvm.org.apache.kafka.clients
    configs = {SINK: clients.producer.ProducerConfig, SOURCE: clients.consumer.ConsumerConfig}
    return {side: dict(map(form, keys(config))) for side, config in configs.items()}


def keys(config):
    # by index: PySpark changes how py4j reports the end of an iteration, once it is loaded
    known = config.configDef().configKeys()
    return [known[name] for name in config.configNames().toArray()]


def form(key):
    from py4j.java_gateway import get_field

    kind, validator = get_field(key, "type").toString(), get_field(key, "validator")
    # the text of a Java object that has none of its own ends in its address
    valid = validator.toString() if validator and kind not in ("LIST", "CLASS") else ""
    return get_field(key, "name"), f"{kind} {valid}".strip()


@pytest.fixture(scope="module")
def java():
    with java_clients() as jvm:
        yield known_to_java(jvm)


@pytest.mark.kafka
@pytest.mark.parametrize("side", TABLES)
def test_the_table_has_every_name_of_java_and_no_other(java, side):
    assert sorted(java[side]) == sorted(TABLES[side].keys() - set(FORMER))


@pytest.mark.kafka
@pytest.mark.parametrize("side", TABLES)
def test_values_are_those_that_java_takes(java, side):
    checked = {n: o.form for n, o in TABLES[side].items() if o.form and n not in FORMER}
    assert checked == {name: java[side][name] for name in checked}
    assert {o.kind for o in TABLES[side].values() if o.form} == {OBEYED}


@pytest.mark.kafka
@pytest.mark.full
def test_former_names_are_those_that_kafka_3_knew():
    with java_clients("3.9.1") as jvm:
        known = {name for names in known_to_java(jvm).values() for name in names}
    assert known - (PRODUCER.keys() | CONSUMER.keys()) == set()
    assert set(FORMER) <= known


# -- what becomes of them --

SHARED = [(side, name) for side, table in TABLES.items() for name in table]
# A value that Java takes, of each kind; some rules want another one.
VALUES = {"BOOLEAN": "true", "INT": "5000", "LONG": "5000"}
PEM_TEXT = "-----BEGIN ANY-----\nx\n-----END ANY-----\n"
WANTED = {
    "acks": "all",
    "max.in.flight.requests.per.connection": "5",
    "partitioner.class": "",
    "partitioner.ignore.keys": "false",
    "sasl.jaas.config": 'a.PlainLoginModule required username="u" password="p";',
    "sasl.client.callback.handler.class": "software.amazon.msk.auth.iam.IAMClientCallbackHandler",
    "sasl.login.callback.handler.class": "a.OAuthBearerLoginCallbackHandler",
    "sasl.oauthbearer.jwt.retriever.class": "a.DefaultJwtRetriever",
    "sasl.mechanism": "PLAIN",
    "ssl.enabled.protocols": "TLSv1.2,TLSv1.3",
    "ssl.keystore.certificate.chain": PEM_TEXT,
    "ssl.keystore.key": PEM_TEXT,
    "ssl.truststore.certificates": PEM_TEXT,
    "ssl.endpoint.identification.algorithm": "https",
    "ssl.protocol": "TLSv1.3",
    "ssl.trustmanager.algorithm": "PKIX",
}
PEM = {f"kafka.ssl.{kind}.type": "PEM" for kind in ("truststore", "keystore")}


def value_of(name, form):
    """A value that Java and librdkafka take."""
    if name in WANTED:
        return WANTED[name]
    kind, _, valid = form.partition(" ")
    if kind == "STRING" and "[" in valid:
        return valid.partition("[")[2].rstrip("]").split(", ")[0]
    return VALUES.get(kind, "x")


def read(side, options):
    problems = Problems()
    return read_client(SERVERS | options, side, problems), problems.found


@pytest.mark.parametrize(("side", "name"), [s for s in SHARED if s[1] not in FORMER])
def test_each_option_becomes_what_the_table_says(side, name):
    option = TABLES[side][name]
    value = value_of(name, option.form)
    more = PEM if name.endswith("store.location") else {}
    client, found = read(side, more | {f"kafka.{name}": value})
    if option.kind == REFUSED:
        (problem,) = found
        assert problem.action.startswith(f"Instead, {option.note}") and name in problem.what
        return
    assert found == []
    assert client.idle == ((f"kafka.{name}",) if option.kind == NO_EFFECT else ())
    if option.target:
        assert client.conf[option.target] == value
    if option.kind == OBEYED:
        assert all(is_setting(setting) for setting in client.conf)


def has_rules(form):
    """Is there a text that Java refuses?"""
    kind, _, valid = form.partition(" ")
    return kind not in ("", "LIST", "CLASS", "PASSWORD", "STRING") or bool(valid)


@pytest.mark.parametrize(
    ("side", "name"), [s for s in SHARED if has_rules(TABLES[s[0]][s[1]].form)]
)
def test_a_value_that_java_refuses_is_refused(side, name):
    _, found = read(side, {f"kafka.{name}": "wrong"})
    assert len(found) == 1 and f"kafka.{name}" in found[0].what


def test_names_of_the_other_client_have_no_effect():
    source, found = read(SOURCE, {"kafka.acks": "1", "kafka.transactional.id": "x"})
    assert source.idle == ("kafka.acks", "kafka.transactional.id") and found == []
    sink, found = read(SINK, {"kafka.max.poll.records": "9", "kafka.key.deserializer": "x"})
    assert sink.idle == ("kafka.key.deserializer", "kafka.max.poll.records") and found == []
    assert sink.conf == source.conf == {"bootstrap.servers": "a:9092"}


def test_no_name_has_two_meanings():
    assert not CLIENT.keys() - (PRODUCER.keys() & CONSUMER.keys())
    assert len(option_rows()) == len({name for name, *_ in option_rows()})
    assert java_option("no.such", SINK) is None


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("linger.mss", "Did you mean kafka.linger.ms?"),
        ("max.pol.records", "Did you mean kafka.max.poll.records?"),
        ("ssl.ca.locaton", "Did you mean kafka.ssl.ca.location?"),
        ("zzz", "Correct the name"),
        ("error_cb", "Correct the name"),
    ],
)
def test_a_name_that_no_client_knows_is_answered_with_the_nearest(name, near):
    with pytest.raises(BadOption, match=f"unknown option kafka.{name}") as caught:
        client_conf(SERVERS | {f"kafka.{name}": "1"})
    assert caught.value.action.startswith(near)


@pytest.mark.parametrize(
    "name",
    ["ssl.sigalgs.list", "ssl.curves.list", "ssl.providers", "sasl.kerberos.principal"]
    + ["sasl.oauthbearer.grant.type", "enable.sasl.oauthbearer.unsecure.jwt", "https.ca.pem"],
)
def test_security_that_one_connection_would_ignore_is_refused(name):
    assert is_setting(name)
    with pytest.raises(BadOption, match="concerns security"):
        client_conf(SERVERS | {f"kafka.{name}": "x"})


def test_all_that_is_wrong_is_in_one_error():
    wrong = {
        "kafka.acks": "1",
        "kafka.linger.mss": "5",
        "kafka.batch.size": "large",
        "kafka.ssl.cipher.suites": "TLS_AES_256_GCM_SHA384",
        "kafka.socket.timeout.ms": "5",
    }
    with pytest.raises(BadOption) as caught:
        client_conf(wrong)
    assert caught.value.what.startswith("6 options cannot be used: (1) ")
    assert all(name in caught.value.what for name in wrong)
    assert "kafka.bootstrap.servers is missing" in caught.value.what
    assert "Did you mean kafka.linger.ms?" in caught.value.action
