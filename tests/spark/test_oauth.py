"""OAUTHBEARER: one function gives the tokens of both engines, control plane, source and decision
log; without a token nothing is written.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import tokens
from every_part import give_rights, open_topic_log, write_and_read, write_properties
from kafka_fixtures import values
from shell import typed

from kafka2pc.kafka.cluster_check import check
from kafka2pc.kafka.login.tokens import TOKEN_PROVIDER, find_provider
from kafka2pc.kafka.participant import KafkaParticipant
from kafka2pc.kafka.wire.cluster import Cluster
from kafka2pc.kafka.wire.topics import describe_topics
from kafka2pc.local.broker import LocalKafka
from kafka2pc.local.nodes import unsigned_tokens
from kafka2pc.operations.access import Access
from kafka2pc.proof.child_process import until
from kafka2pc.protocol.errors import BadOption, NotAuthorized
from kafka2pc.spark.source.cluster import Questions

pytestmark = [pytest.mark.kafka, pytest.mark.never_unsteady]
ROOT = Path(__file__).resolve().parents[2]
ALSO = unsigned_tokens("SASL_PLAINTEXT") | {
    # Clients must log in again before that. kafka-python does so 5 to 15 % earlier, which must be
    # enough on a busy machine.
    "listener.name.sasl_plaintext.oauthbearer.connections.max.reauth.ms": "20000",
}


@pytest.fixture(scope="module")
def oauth():
    with LocalKafka(secure=True, config=ALSO, progress=None) as kafka:
        give_rights(kafka, settings(kafka), "tokens")
        yield kafka


def settings(kafka, provider="tokens:token"):
    return {
        "bootstrap.servers": kafka.bootstrap_servers,
        "security.protocol": "SASL_PLAINTEXT",
        "sasl.mechanisms": "OAUTHBEARER",
        TOKEN_PROVIDER: provider,
    }


@pytest.mark.parametrize("engine", ["columnar", "rows"])
def test_both_engines_write_the_driver_commits_and_the_source_reads(engine, oauth):
    write_and_read(oauth, settings(oauth), "tokens", engine)


def test_a_decision_log_in_a_topic_is_reached_with_a_token(oauth):
    open_topic_log(oauth, settings(oauth), "token-decisions")


def test_all_connections_of_a_process_share_a_token_until_it_ends(oauth):
    before = tokens.CALLS.count
    conf = settings(oauth, "tokens:shared")
    with Cluster(conf) as cluster, Cluster(conf) as other:
        describe_topics(cluster, ["tokens"])
        describe_topics(other, ["tokens"])
        assert tokens.CALLS.count == before + 1


@pytest.mark.full
def test_connections_log_in_again_while_the_function_fails_or_is_slow(oauth, caplog):
    """It runs on no thread of a connection, and a valid token is used until its end."""
    with Cluster(settings(oauth, "tokens:unreliable")) as cluster:
        until(
            lambda: describe_topics(cluster, ["tokens"]) and tokens.SLOW.is_set(),
            "the function has failed, and has been slow",
            120,
        )
    assert set(tokens.THREADS[1:]) == {"kafka2pc-tokens"}
    assert "asking again" in caplog.text and "re-authentication failed" not in caplog.text


JOB = """
import json, sys
from pyspark.sql import SparkSession
import kafka2pc
options = json.loads(sys.argv[1])
spark = SparkSession.builder.master("local[2]").config("spark.ui.enabled", False).getOrCreate()
kafka2pc.register(spark)
rows = spark.range(10).selectExpr("cast(id as string) value")
rows.write.format("kafka2pc").mode("append").options(**options, topic="jobs").save()
print(spark.read.format("kafka2pc").options(**options, subscribe="jobs").load().count())
"""

COMPANY_LOGIN = """
import os
import tokens

def token():
    with open({!r}, "a") as file:
        file.write(str(os.getpid()) + " ")
    return tokens.token()
"""


@pytest.mark.spark
@pytest.mark.full
def test_every_process_of_spark_gets_its_own_token(oauth, tmp_path):
    give_rights(oauth, settings(oauth), "jobs")
    asked = tmp_path / "asked"
    (tmp_path / "company_login.py").write_text(COMPANY_LOGIN.format(str(asked)))
    options = {
        f"kafka.{name}": value for name, value in settings(oauth, "company_login:token").items()
    }
    env = os.environ | {
        "PYTHONPATH": os.pathsep.join(map(str, (tmp_path, ROOT, ROOT / "tests" / "support")))
    }
    done = subprocess.run(
        [sys.executable, "-c", JOB, json.dumps(options)],
        cwd=tmp_path,
        env=env,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout) == (0, "10\n"), done.stderr[-3000:]
    assert sorted(values(oauth, "jobs")) == [str(n) for n in range(10)]
    # planner, committer, tasks: a token is in no message
    assert len(set(asked.read_text().split())) > 2


@pytest.mark.parametrize(
    ("provider", "error", "says"),
    [
        ("", BadOption, "OAUTHBEARER needs something"),
        ("no.such.module:token", BadOption, "ModuleNotFoundError"),
        ("tokens:missing", BadOption, "AttributeError"),
        ("tokens:no_token", NotAuthorized, "RuntimeError"),
        ("tokens:not_a_token", NotAuthorized, "the cluster refused this token"),
    ],
)
@pytest.mark.parametrize("part", ["sink", "source"])
def test_a_problem_with_a_token_is_reported_in_four_parts_and_without_it(
    part, provider, error, says, oauth
):
    conf = settings(oauth, provider)
    with pytest.raises(error) as caught:
        check(conf, topics=["tokens"]) if part == "sink" else Questions(conf).names(".*")
    text = str(caught.value)
    assert says.lower() in text.lower() and "hunter2" not in text
    assert all(words in text for words in ("why: ", "is data at risk: No.", "what to do: "))


def test_the_shell_lists_with_a_token_and_doctor_does_not_guess_a_name(oauth, tmp_path):
    config = write_properties(tmp_path / "alice.properties", settings(oauth))
    door = Access(oauth.bootstrap_servers, config)
    assert typed(door.command("transactions", "list", "--json")) == ("[]\n", 0)
    assert (
        "user: User:SUBJECT-OF-THE-TOKEN" in typed(door.command("doctor", "--topic", "tokens"))[0]
    )


def test_a_name_is_all_that_travels(oauth):
    conf = settings(oauth)
    participant = KafkaParticipant(conf, topic="tokens", timeout_ms=9000)
    assert participant.__getstate__()["conf"] == conf and find_provider(conf)()[0].count(".") == 2
