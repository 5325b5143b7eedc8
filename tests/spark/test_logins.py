"""Each login of "Log in" against a real broker: every part of a query uses it, a wrong one is one
clear error at once, and no secret is in a log, a plan, an error or a checkpoint.
"""

import json
import os
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

import pytest
from every_part import give_rights, open_topic_log, write, write_and_read, write_properties
from kafka_fixtures import values
from shell import typed

from kafka2pc.kafka.cluster_check import check
from kafka2pc.kafka.login import tokens
from kafka2pc.kafka.wire.cluster import Cluster
from kafka2pc.kafka.wire.settings import client_conf
from kafka2pc.kafka.wire.topics import describe_topics
from kafka2pc.local.broker import LocalKafka
from kafka2pc.local.certificates import make_certificates
from kafka2pc.local.oidc import LocalOidc
from kafka2pc.operations.access import Access
from kafka2pc.proof.child_process import until
from kafka2pc.protocol.errors import BadOption, NotAuthorized
from kafka2pc.spark.source.cluster import Questions

pytestmark = [pytest.mark.kafka, pytest.mark.never_unsteady]
ROOT = Path(__file__).resolve().parents[2]
LISTENER = "listener.name.sasl_plaintext.oauthbearer"
SECRET = "hunter2: ü&="


@pytest.fixture(scope="module")
def oidc():
    with LocalOidc({"alice": SECRET}) as server:
        yield server


@pytest.fixture(scope="module")
def broker(oidc):
    config = oidc.broker_settings("SASL_PLAINTEXT") | {
        f"{LISTENER}.connections.max.reauth.ms": 20_000
    }
    options = {"config": config, "java_options": oidc.java_options}
    with LocalKafka(secure=True, progress=None, **options) as kafka:
        give_rights(kafka, of_kind(kafka, oidc, "oidc"), "logins")
        yield kafka


def java(kafka, oidc, kind):
    """The options as users of Spark write them."""
    base = {"bootstrap.servers": kafka.bootstrap_servers, "security.protocol": "SASL_PLAINTEXT"}
    kafkas = "org.apache.kafka.common.security"
    if kind == "oidc":
        module = f"{kafkas}.oauthbearer.OAuthBearerLoginModule"
        more = {
            "sasl.mechanism": "OAUTHBEARER",
            "sasl.login.callback.handler.class": (
                f"{kafkas}.oauthbearer.OAuthBearerLoginCallbackHandler"
            ),
            "sasl.oauthbearer.token.endpoint.url": oidc.token_url,
            "sasl.oauthbearer.header.urlencode": "true",
            "sasl.jaas.config": (
                f'{module} required clientId="alice" clientSecret="{SECRET}" scope="kafka"'
                ' extension_logicalCluster="lkc-1";'
            ),
        }
        return base | more
    name = "plain.Plain" if kind == "PLAIN" else "scram.Scram"
    login = f'username="alice" password="{kafka.passwords["alice"]}"'
    line = f"{kafkas}.{name}LoginModule required {login};"
    return base | {"sasl.mechanism": kind, "sasl.jaas.config": line}


def of_kind(kafka, oidc, kind):
    """The settings that those options stand for."""
    return client_conf({f"kafka.{n}": value for n, value in java(kafka, oidc, kind).items()})


KINDS = ["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512", "oidc"]


@pytest.mark.parametrize("kind", KINDS)
def test_every_part_of_a_query_logs_in(kind, broker, oidc, tmp_path):
    conf = of_kind(broker, oidc, kind)
    write_and_read(broker, conf, "logins", "columnar")
    write_and_read(broker, conf, "logins", "rows")
    open_topic_log(broker, conf, f"decisions-{kind}")
    config = write_properties(tmp_path / "alice.properties", java(broker, oidc, kind))
    door = Access(broker.bootstrap_servers, config)
    assert typed(door.command("transactions", "list", "--json")) == ("[]\n", 0)


@pytest.mark.full
def test_all_connections_share_a_token_and_get_new_ones(broker, oidc):
    """A session lives as long as its token, at most."""
    oidc.life_s = 12
    conf = of_kind(broker, oidc, "oidc") | {"sasl.oauthbearer.extensions": "a=shared"}
    before = len(tokens.shared_tokens.kept)
    seen = set()

    def works():
        with suppress(tokens.TokenEnded):  # on a machine that is too busy to ask in time
            seen.add(tokens.shared_tokens(conf).current().text)
        return all(describe_topics(c, ["logins"]) for c in clusters) and len(seen) == 3

    try:
        with Cluster(conf) as cluster, Cluster(conf) as other:
            clusters = [cluster, other]
            assert len(tokens.shared_tokens.kept) == before + 1
            until(works, "they work with the third token", 120)
    finally:
        oidc.life_s = 300


# -- one cause, one error, at once --


def of_life(seconds):
    return lambda oidc: setattr(oidc, "life_s", seconds)


def with_answer(answer):
    return lambda oidc: setattr(oidc, "answer", answer)


URL = "sasl.oauthbearer.token.endpoint.url"
WRONG = {
    "secret": ({"sasl.oauthbearer.client.secret": "hunter3"}, None, "HTTP 401 invalid_client"),
    "client": ({"sasl.oauthbearer.client.id": "bob"}, None, "HTTP 401 invalid_client"),
    "scope": ({"sasl.oauthbearer.scope": "admin"}, None, "HTTP 400 invalid_scope"),
    "path": ({URL: "{issuer}/tokens"}, None, "/tokens: HTTP 404"),
    "page": ({}, with_answer("not json"), "/token: HTTP 200"),
    "server busy": ({}, with_answer(503), "/token: HTTP 503"),
    "server away": ({URL: "http://127.0.0.1:1/token"}, None, ":1/token: no connection"),
    "server that hangs": ({}, with_answer("hang"), "no answer in 1"),
    "server that drips": ({}, with_answer("drip"), "no answer in 1"),
    "audience": ({}, lambda oidc: setattr(oidc, "audience", "payroll"), "aud=payroll"),
    "token that has ended": ({}, of_life(-60), "that it gave ended"),
    "clock behind": ({}, lambda oidc: setattr(oidc, "clock_off_s", -3600), "It ended 3"),
}


@pytest.fixture
def changed(oidc):
    kept = {name: getattr(oidc, name) for name in ("life_s", "clock_off_s", "audience", "answer")}
    yield oidc
    for name, value in kept.items():
        setattr(oidc, name, value)


in_time = tokens.Tokens._wait_first


def wait_first(self, first_s):
    """The same, however busy this machine is: it begins with the first answer."""
    until(lambda: self._held.token or self._held.failed, "the first answer", 60)
    in_time(self, first_s)


@pytest.mark.parametrize(
    ("part", "what"),
    [("sink", what) for what in WRONG] + [("source", what) for what in ("secret", "audience")],
)
def test_a_wrong_login_is_named(part, what, broker, changed, monkeypatch):
    options, change, says = WRONG[what]
    if "server" in what:
        monkeypatch.setattr(tokens, "FIRST_S", 1)
    if "no answer" not in says:
        monkeypatch.setattr(tokens.Tokens, "_wait_first", wait_first)
    conf = of_kind(broker, changed, "oidc") | {"sasl.oauthbearer.extensions": f"a={part} {what}"}
    conf |= {name: value.format(issuer=changed.issuer) for name, value in options.items()}
    if change:
        change(changed)
    with pytest.raises(NotAuthorized) as caught:
        if part == "sink":
            check(conf, topics=["logins"])
        else:
            Questions(conf).names(".*")
    text = str(caught.value)
    assert says in text and "hunter" not in text, text
    assert all(words in text for words in ("why: ", "is data at risk: No.", "what to do: "))


def test_a_missing_right_is_no_wrong_login(broker, oidc):
    broker.create_topic("of-others")
    with pytest.raises(NotAuthorized, match="of-others"):
        check(of_kind(broker, oidc, "oidc"), topics=["of-others"])


def test_a_server_of_tokens_that_comes_back_is_waited_for(broker, changed):
    changed.answer = 503
    conf = of_kind(broker, changed, "oidc") | {"sasl.oauthbearer.extensions": "a=back"}
    before = changed.asked

    def well_again():
        until(lambda: changed.asked > before, "it was asked")
        changed.answer = None

    thread = threading.Thread(target=well_again)
    thread.start()
    with Cluster(conf) as cluster:
        assert cluster.cluster_id == broker.cluster_id
    thread.join()


def test_https_wants_an_authority_that_is_named(broker):
    with LocalOidc({"alice": SECRET}, tls=True) as server:
        conf = of_kind(broker, server, "oidc")
        with pytest.raises(BadOption, match="kafka.https.ca.location"):
            check(conf)
        named = tokens.find_provider(conf | {"https.ca.location": str(server.ca)})
        assert tokens.claims_of(named()[0])["sub"] == "alice"


# -- no secret is written anywhere --


@pytest.mark.parametrize("kind", KINDS)
def test_no_secret_is_in_the_logs_of_the_connection(kind, broker, oidc, caplog):
    """kafka-python writes each request at DEBUG."""
    caplog.set_level("DEBUG")
    conf = of_kind(broker, oidc, kind)
    with Cluster(conf) as cluster:
        describe_topics(cluster, ["logins"])
    assert "(a login)" in caplog.text and broker.passwords["alice"] not in caplog.text
    if kind == "oidc":
        text = tokens.shared_tokens(conf).current().text
        assert text[-40:] not in caplog.text and SECRET not in caplog.text


JOB = """
import json, logging, sys
logging.basicConfig(level=logging.DEBUG)
logging.getLogger("py4j").setLevel(logging.INFO)  # it logs each call, with its arguments
from pyspark.sql import SparkSession
import kafka2pc
folder, writes, reads = sys.argv[1], json.loads(sys.argv[2]), json.loads(sys.argv[3])
spark = (
    SparkSession.builder.master("local[2]").config("spark.ui.enabled", False)
    .config("spark.eventLog.enabled", True).config("spark.eventLog.dir", folder + "/events")
    .getOrCreate()
)
spark.sparkContext.setLogLevel("DEBUG")
kafka2pc.register(spark)
rows = spark.readStream.format("kafka2pc").options(**reads).load().selectExpr("value")
query = (
    rows.writeStream.format("kafka2pc").options(**writes)
    .option("checkpointLocation", folder + "/checkpoint").trigger(availableNow=True).start()
)
query.awaitTermination()
query.explain(True)
print(query.lastProgress)
frame = spark.read.format("kafka2pc").options(**(reads | {"startingOffsets": "earliest"})).load()
frame.explain(True)
print(frame.count())
forbidden = writes | {"topic": "of-others"}
try:
    frame.write.format("kafka2pc").mode("append").options(**forbidden).save()
except Exception as e:
    print(e)
"""


def folded(text):
    """Without what a log may put between the letters: line ends, quotes, escapes."""
    return "".join(text.split()).replace("\\n", "").replace("\\", "")


@pytest.mark.spark
@pytest.mark.full
@pytest.mark.parametrize(("engine", "kind"), [("columnar", "oidc"), ("confluent", "SCRAM-SHA-512")])
def test_no_secret_is_in_a_log_a_plan_an_error_or_a_checkpoint(
    engine, kind, broker, oidc, tmp_path
):
    write(of_kind(broker, oidc, kind), "logins", "columnar")
    given, issued = [], oidc.token
    oidc.token = lambda **claims: given.append(issued(**claims)) or given[-1]
    (tmp_path / "events").mkdir()
    options = {f"kafka.{name}": value for name, value in java(broker, oidc, kind).items()}
    key = make_certificates(tmp_path / "key", ["alice"]).folder / "alice.key"
    options["kafka.ssl.keystore.key"] = key.read_text()  # without TLS no client uses it
    debug = {"kafka.debug": "all"} if engine == "confluent" else {}
    writes = options | debug | {"topic": "logins", "engine": engine}
    reads = options | {"subscribe": "logins", "startingOffsets": "earliest"}
    env = os.environ | {"PYTHONPATH": str(ROOT), "PYSPARK_PYTHON": sys.executable}
    done = subprocess.run(
        [sys.executable, "-c", JOB, str(tmp_path), json.dumps(writes), json.dumps(reads)],
        cwd=tmp_path,
        env=env,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    del oidc.token
    assert done.returncode == 0, done.stderr[-3000:]
    assert "of-others" in done.stdout and values(broker, "logins")
    files = [path for path in tmp_path.rglob("*") if path.is_file() and path.parent != key.parent]
    found = {str(path): path.read_bytes().decode(errors="replace") for path in files}
    found |= {"stdout": done.stdout, "stderr": done.stderr}
    assert any("checkpoint" in name for name in found) and any("events" in name for name in found)
    password = broker.passwords["alice"]
    secrets = {SECRET if kind == "oidc" else password, key.read_text().splitlines()[1], *given}
    leaks = [
        (name, line[:300])
        for name, text in found.items()
        for line in text.splitlines()
        if any(folded(secret)[-40:] in folded(line) for secret in secrets)
    ]
    assert not leaks, leaks[:5]
