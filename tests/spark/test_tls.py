"""TLS: both engines, the control plane, the source and the command line show their certificates,
under librdkafka's names; a certificate that is missing or wrong is an error before anything is
written.
"""

import json
import shlex
import uuid
from dataclasses import asdict
from pathlib import Path

import pyarrow as pa
import pytest
from kafka_fixtures import values
from typer.testing import CliRunner

from kafka2pc.decision_logs.files import FileLog
from kafka2pc.kafka.cluster_check import check
from kafka2pc.kafka.participant import KafkaParticipant
from kafka2pc.kafka.wire.cluster import Cluster
from kafka2pc.kafka.wire.connection import NoSuchHost
from kafka2pc.kafka.wire.settings import client_conf
from kafka2pc.kafka.write.settings import open_producer
from kafka2pc.local.broker import LocalKafka
from kafka2pc.local.certificates import make_certificates
from kafka2pc.operations.access import Access
from kafka2pc.operations.cli.app import app
from kafka2pc.proof.drills.spark_query import SparkQuery
from kafka2pc.protocol.driver import Driver
from kafka2pc.protocol.errors import BadOption, BrokerUnreachable, NotAuthorized
from kafka2pc.protocol.phases.commit import commit
from kafka2pc.protocol.phases.decide import decide
from kafka2pc.protocol.phases.precommit import precommit
from kafka2pc.protocol.phases.restore import restore
from kafka2pc.spark.source.cluster import Questions
from kafka2pc.spark.source.offsets import Range
from kafka2pc.spark.source.options import parse_source_options
from kafka2pc.spark.source.range_reader import read_ranges
from kafka2pc.spark.source.starting_offsets import take_snapshot

pytestmark = [pytest.mark.kafka, pytest.mark.never_unsteady]


@pytest.fixture(scope="module")
def tls():
    with LocalKafka(tls=True, progress=None) as kafka:
        yield kafka


@pytest.fixture(scope="module")
def both():
    with LocalKafka(secure=True, tls=True, progress=None) as kafka:
        yield kafka


def without(conf, *names):
    return {name: value for name, value in conf.items() if name not in names}


class Query:
    """A query of alice whose batch 0 is pre-committed: two tasks, two rows each."""

    def __init__(self, kafka, folder, **how):
        self.conf, self.topic = kafka.client_conf_for("alice"), f"tls-{uuid.uuid4().hex[:8]}"
        self.place, self.id = folder / "checkpoint", str(uuid.uuid4())
        kafka.create_topic(self.topic)
        (self.place / "commits").mkdir(parents=True)
        (self.place / "metadata").write_text(json.dumps({"id": self.id}))
        self.participant = KafkaParticipant(
            self.conf,
            topic=self.topic,
            **asdict(check(self.conf, topics=[self.topic], two_phase="auto")),
            **how,
        )
        self.driver = Driver(
            query_id=self.id,
            log=FileLog(self.place / "kafka2pc"),
            participants={"kafka": self.participant},
        )
        made = restore(self.driver, 0)
        self.messages = [
            precommit([self.participant], made, [pa.record_batch({"value": list(task)})])
            for task in ("ab", "cd")
        ]

    def seen(self, kafka):
        return sorted(values(kafka, self.topic))


@pytest.fixture
def query(tls, tmp_path):
    made = Query(tls, tmp_path)
    yield made
    made.participant.close()


@pytest.mark.parametrize("engine", ["columnar", "rows"])
def test_both_engines_write_and_the_driver_commits(engine, tls, tmp_path):
    query = Query(tls, tmp_path, engine=engine)
    commit(query.driver, query.messages, 0)
    query.participant.close()
    assert query.seen(tls) == list("abcd")


def test_the_source_reads_and_tells_its_group(query, tls):
    commit(query.driver, query.messages, 0)
    query.seen(tls)
    options = parse_source_options(
        {f"kafka.{name}": value for name, value in query.conf.items()} | {"subscribe": query.topic}
    )
    part = (query.topic, 0)
    with Questions(dict(options.conf)) as ask:
        end = take_snapshot(ask, options).parts[part].end
        ask.commit_offsets("tls-group", {part: 3})
        assert ask.group_offsets("tls-group", [part]) == {part: 3}
    assert sorted(
        v.decode()
        for batch in read_ranges(options, [Range(query.topic, 0, 0, end)])
        for v in batch.column("value").to_pylist()
    ) == list("abcd")


def typed(line):
    done = CliRunner().invoke(app, shlex.split(line)[1:])
    assert done.exception is None or isinstance(done.exception, SystemExit), done.output
    return done.output, done.exit_code


def test_a_dead_query_is_found_and_finished_from_the_shell(query, tls, tmp_path):
    decide(query.driver, query.messages[0].plan, query.messages)
    file = tmp_path / "alice.properties"
    file.write_text(
        "".join(
            f"{name}={value}\n" for name, value in without(query.conf, "bootstrap.servers").items()
        )
    )
    door = Access(tls.bootstrap_servers, str(file))
    found, status = typed(
        door.command("doctor", "--checkpoint", str(query.place), "--older-than", "0", "--json")
    )
    lines = next(
        f["commands"] for f in json.loads(found)["findings"] if f["name"] == "decided-and-open"
    )
    said = [typed(line) for line in lines]
    assert (status, [s for _, s in said], query.seen(tls)) == (4, [3, 0], list("abcd"))
    kept = [p.read_text() for p in query.place.rglob("*") if p.is_file()]
    assert not [
        text
        for text in (found, *(text for text, _ in said), *kept)
        if tls.certificates.password in text
    ], "the key's password is nowhere"


@pytest.mark.spark
@pytest.mark.full
def test_a_spark_query_with_certificates(tls, job, tmp_path):
    with SparkQuery(job, tls, tmp_path) as spark_query:
        spark_query.feed(2)
        spark_query.run()
        spark_query.check()
        assert tls.certificates.password not in "".join(
            p.read_text(errors="replace") for p in spark_query.checkpoint.rglob("*") if p.is_file()
        )


@pytest.mark.full
def test_a_login_over_tls_and_a_name_that_is_not_checked(tls, both):
    with Cluster(both.client_conf) as cluster:
        assert cluster.cluster_id == both.cluster_id
    with Cluster(tls.client_conf | {"ssl.endpoint.identification.algorithm": "none"}) as cluster:
        assert cluster.cluster_id == tls.cluster_id


def test_java_stores_of_the_type_pem_are_read(tls, tmp_path):
    """By the connection, and by librdkafka."""
    conf = tls.client_conf_for("alice")
    store = tmp_path / "alice.pem"
    parts = [Path(conf[name]).read_text() for name in KEYS[:2]]
    store.write_text("".join(parts))
    options = {
        "kafka.bootstrap.servers": tls.bootstrap_servers,
        "kafka.security.protocol": "SSL",
        "kafka.ssl.truststore.type": "PEM",
        "kafka.ssl.truststore.location": conf["ssl.ca.location"],
        "kafka.ssl.keystore.type": "PEM",
        "kafka.ssl.keystore.location": str(store),
        "kafka.ssl.key.password": conf["ssl.key.password"],
        "kafka.ssl.enabled.protocols": "TLSv1.2,TLSv1.3",
    }
    made = client_conf(options)
    with Cluster(made) as cluster:
        assert cluster.cluster_id == tls.cluster_id
    assert open_producer(made).list_topics(timeout=20).cluster_id == tls.cluster_id


def as_text(tls, user, chain=None, more=""):
    """Java's options with the contents of the files of `user`."""
    read = lambda name: (tls.certificates.folder / name).read_text()
    return {
        "kafka.bootstrap.servers": tls.bootstrap_servers,
        "kafka.security.protocol": "SSL",
        "kafka.ssl.keystore.type": "PEM",
        "kafka.ssl.truststore.type": "PEM",
        "kafka.ssl.truststore.certificates": more + read("ca.pem"),
        "kafka.ssl.keystore.certificate.chain": chain or read(f"{user}.pem"),
        "kafka.ssl.keystore.key": read(f"{user}.key"),
        "kafka.ssl.key.password": tls.certificates.password,
    }


@pytest.mark.parametrize("user", ["alice", "carol"])
def test_certificates_and_keys_as_text_log_in_by_both_clients(user, tls, tmp_path):
    """An authority between signed carol's certificate; the broker trusts the first one only."""
    other = (make_certificates(tmp_path / "other").folder / "ca.pem").read_text()
    made = client_conf(as_text(tls, user, more=other))
    with Cluster(made) as cluster:
        assert cluster.cluster_id == tls.cluster_id
    assert open_producer(made).list_topics(timeout=20).cluster_id == tls.cluster_id


def test_without_the_authority_between_the_broker_believes_no_certificate(tls):
    end = "-----END CERTIFICATE-----\n"
    alone = (tls.certificates.folder / "carol.pem").read_text().partition(end)[0] + end
    with pytest.raises(NotAuthorized, match="believe"):
        Cluster(client_conf(as_text(tls, "carol", alone)))


# -- a wrong certificate is an error before anything is written --


def other_authority(folder):
    """Certificates of another authority."""
    return make_certificates(folder / "other-authority", ["alice"]).client("alice")


KEYS = ("ssl.certificate.location", "ssl.key.location", "ssl.key.password")
WRONG = {
    "no certificate": (
        lambda conf, folder: without(conf, *KEYS),
        NotAuthorized,
        "kafka.ssl.certificate.location",
    ),
    "a certificate of another authority": (
        lambda conf, folder: conf | without(other_authority(folder), "ssl.ca.location"),
        NotAuthorized,
        "certificate",
    ),
    "another authority": (
        lambda conf, folder: conf | without(other_authority(folder), *KEYS),
        BadOption,
        "kafka.ssl.ca.location",
    ),
    "no authority": (
        lambda conf, folder: without(conf, "ssl.ca.location"),
        BadOption,
        "kafka.ssl.ca.location",
    ),
    "a wrong password": (
        lambda conf, folder: conf | {"ssl.key.password": "hunter2"},
        BadOption,
        "kafka.ssl.key.password",
    ),
    "no password": (
        lambda conf, folder: without(conf, "ssl.key.password"),
        BadOption,
        "kafka.ssl.key.password",
    ),
    "a certificate without its key": (
        lambda conf, folder: without(conf, "ssl.key.location"),
        BadOption,
        "kafka.ssl.",
    ),
    "no such file": (
        lambda conf, folder: conf | {"ssl.certificate.location": "/no/such.pem"},
        BadOption,
        "kafka.ssl.certificate.location=/no",
    ),
}


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("part", ["sink", "source", "shell"])
def test_a_wrong_certificate_is_reported_in_four_parts(part, name, tls, tmp_path):
    change, error, says = WRONG[name]
    conf = change(tls.client_conf_for("alice"), tmp_path)
    ask = {
        "sink": lambda: check(conf, topics=["t"]),
        "source": lambda: Questions(conf).names(".*"),
        "shell": lambda: Cluster(conf),
    }
    with pytest.raises(error) as caught:
        ask[part]()
    text = str(caught.value)
    assert says in text and all(
        words in text for words in ("why: ", "is data at risk: No.", "what to do: ")
    ), text
    assert "hunter2" not in text and tls.certificates.password not in text


# -- one cause, one error, at once --

LOGIN = ("sasl.mechanisms", "sasl.username", "sasl.password")


def no_login(conf):
    protocol = conf["security.protocol"].replace("SASL_", "")
    return without(conf, *LOGIN) | {"security.protocol": protocol}


REFUSED = "The cluster refused this user, password or mechanism."
NO_CONTACT = {
    "wrong password": (lambda conf: conf | {"sasl.password": "hunter2"}, NotAuthorized, REFUSED),
    "wrong mechanism": (
        lambda conf: conf | {"sasl.mechanisms": "SCRAM-SHA-512"},
        NotAuthorized,
        REFUSED,
    ),
    "no login": (no_login, NotAuthorized, "kafka.security.protocol has no login."),
    "no password": (
        lambda conf: without(conf, "sasl.password"),
        BadOption,
        "kafka.sasl.password is missing.",
    ),
    "unknown host": (
        lambda conf: conf | {"bootstrap.servers": "no-such-host.invalid:1,also..not:2"},
        NoSuchHost,
        "None of the names in kafka.bootstrap.servers has an address",
    ),
    "closed port": (
        lambda conf: conf | {"bootstrap.servers": "127.0.0.1:1"},
        BrokerUnreachable,
        "ECONNREFUSED",
    ),
}


@pytest.mark.parametrize("name", NO_CONTACT)
@pytest.mark.parametrize("part", ["sink", "source"])
@pytest.mark.parametrize("listener", ["secure", "both"])
def test_sink_and_source_name_the_cause(listener, part, name, request):
    """At once: a wait would end in `BrokerUnreachable`, which only a closed port is."""
    change, error, why = NO_CONTACT[name]
    conf = change(request.getfixturevalue(listener).client_conf_for("alice"))
    within_ms = 1_500 if name == "closed port" else 60_000
    with pytest.raises(error) as caught:
        if part == "sink":
            check(conf, prefix=None, within_ms=within_ms)
        else:
            Questions(conf, within_ms=within_ms).names(".*")
    assert type(caught.value) is error and why in str(caught.value)
    assert "hunter2" not in str(caught.value)
