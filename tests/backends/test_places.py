"""Places of checkpoints and decision logs: which names are one place, and which names are refused
before anything is created.
"""

import os
import sys

import pytest

from kafka2pc.backends.places import DRIVERS, check_place, masked, normal_place
from kafka2pc.decision_logs.files import FileLog
from kafka2pc.decision_logs.objects import ObjectLog
from kafka2pc.decision_logs.opening import open_folder_log, open_log
from kafka2pc.protocol.errors import BadOption, MissingLibrary
from kafka2pc.protocol.memory import MemoryParticipant
from kafka2pc.spark.checkpoint import Checkpoint
from kafka2pc.spark.foreach_batch import exactly_once, open_driver
from kafka2pc.spark.sink.options import parse_sink_options

# -- one place, many names --

SAME = {
    "file:///x": [
        "/x",
        "/x/",
        "//x",
        "///x//",
        "/a/../x",
        "/./x",
        "file:/x",
        "file:///x",
        "file:///x/",
        "FILE:/x",
    ],
    "file:///a b%20c/d": ["/a b%20c/d", "file:/a b%20c//d"],
    "file:///": ["/", "//", "file:///"],
    "file:///dbfs/x": ["/dbfs/x"],
    "s3://bucket/key": [
        "s3://bucket/key",
        "s3a://bucket/key/",
        "s3n://bucket/key",
        "S3://bucket/key",
        "s3n://ID:SECRET@bucket/key",
        "s3n://ID:SEC/RET@bucket/key",
    ],
    "s3://bucket": ["s3://bucket", "s3a://bucket/"],
    "s3://arn:aws:s3:eu-west-1:1:accesspoint/p/key": [
        "s3://arn:aws:s3:eu-west-1:1:accesspoint/p/key"
    ],
    "gs://bucket/key": ["gs://bucket/key", "gcs://bucket/key/", "GS://bucket/key"],
    "abfs://c@a.dfs.core.windows.net/p": [
        "abfs://c@a.dfs.core.windows.net/p",
        "abfss://c@a.dfs.core.windows.net/p/",
        "abfss://c@A.DFS.core.windows.net/p",
        "az://c@a.blob.core.windows.net/p",
        "wasb://c@a.blob.core.windows.net/p",
        "wasbs://c@a.blob.core.windows.net/p",
    ],
    "abfs://c@a.dfs.core.chinacloudapi.cn/p": ["wasbs://c@a.blob.core.chinacloudapi.cn/p"],
    "abfs://c/p": ["az://c/p", "abfs://c/p", "abfss://c/p/"],
    "hdfs://nn:8020/x": [
        "hdfs://nn:8020/x",
        "hdfs://NN:8020/x/",
        "hdfs://nn:8020//x",
        "hdfs://nn:8020/a/../x",
        "hdfs://user@nn:8020/x",
    ],
    "hdfs://nn/x": ["hdfs://nn/x"],
    "hdfs:///x": ["hdfs:///x", "hdfs:/x"],
    "dbfs:///x": ["dbfs:/x", "dbfs:///x", "dbfs:/x/"],
    "memory://x/y": ["memory://x/y", "memory:///x/y", "memory://x/y/"],
    "memory://X": ["memory://X"],
    "kafka:Decisions": ["kafka:Decisions"],
    "oss://Bucket/a//b": ["oss://Bucket/a//b/"],
    "postgresql://host:5432/db": [
        "postgresql://host:5432/db",
        "postgres://host/db",
        "postgresql://user:password@HOST/db",
        "postgresql://user:pass%40word@host:/db",
        "postgresql://user:p@ss:w?rd@host/db",
        "postgresql://host/db?sslmode=require&password=secret&sslpassword=secret&passfile=/secret&user=u",
        "postgresql:///?host=host&dbname=db",
        "postgresql://other:1/else?host=host&port=5432&dbname=db",
        "postgresql:///db?hostaddr=host",
        "postgresql://host/db?application_name=a+b&connect_timeout=3",
        "POSTGRESQL://host/%64b",
    ],
    "postgresql://a:5432,b:5433/db": [
        "postgresql://a,b:5433/db",
        "postgresql://u:s@b:5433,a/db",
        "postgresql:///db?host=a,b&port=5432,5433",
    ],
    "postgresql://[::1]:5432/db": ["postgresql://[::1]/db", "postgresql:///db?host=::1"],
    "postgresql://%2Ftmp%2FSock:5432/db": [
        "postgresql://postgres:@/db?host=/tmp/Sock",
        "postgresql://%2Ftmp%2FSock/db",
    ],
    "postgresql://host:5432/db?options=-csearch_path=mine": [
        "postgresql://host/db?options=-csearch_path%3Dmine",
        "postgresql://host/db?options=-c%20search_path=mine",
    ],
}
NAMES = [(place, normal) for normal, places in SAME.items() for place in places]


@pytest.mark.parametrize(("place", "normal"), NAMES)
def test_a_place_has_one_normal_form_without_a_secret(place, normal):
    assert normal_place(place) == normal
    assert normal_place(normal) == normal, "a normal form is its own normal form"


def test_different_places_have_different_normal_forms():
    assert len({normal_place(place) for place, _ in NAMES}) == len(SAME)


def test_a_relative_path_becomes_absolute_by_text_alone(tmp_path, monkeypatch):
    (tmp_path / "link").symlink_to(tmp_path / "target")
    monkeypatch.chdir(tmp_path)
    assert normal_place("link") == f"file://{tmp_path}/link"


# -- what is refused --

TOPIC, URL = "kafka:TOPIC with the name of one topic", "needs ://"
REFUSED = {
    "": "decisionLog=: it is empty",
    "decisions": "decisionLog=decisions: a relative path",
    "./x": "a relative path",
    "../x": "a relative path",
    "~/x": "a relative path",
    " /x": "a relative path",
    "host=h dbname=d password='s e c r e t'": "a relative path",
    "file:x": "a relative path",
    "file:": "a relative path",
    "file://x": "it names the host x",
    "file://localhost/x": "it names the host localhost",
    "hdfs:/x": f"hdfs: {URL}",
    "s3:/x": f"s3: {URL}",
    "s3:x": f"s3: {URL}",
    "memory:x": f"memory: {URL}",
    "postgresql:/x": f"postgresql: {URL}",
    "simplecache::s3://b/x": f"simplecache: {URL}",
    "dbfs:/x": "Python cannot write decisions to dbfs:",
    "dbfs:///x": "Python cannot write decisions to dbfs:",
    "C:\\x": "a Windows path",
    "C:/x": "a Windows path",
    "S3://b/x": "a scheme has small letters",
    "KAFKA:t": "a scheme has small letters",
    "nosuch://user:secret@host/x": "nosuch:// is no kind of place",
    "nosuch:x": "nosuch:// is no kind of place",
    "s3n://b/x": "Python does not know s3n://",
    "wasbs://c@a.blob.core.windows.net/p": "Python does not know wasbs://",
    "kafka:": TOPIC,
    "kafka:a,b": TOPIC,
    "kafka:.": TOPIC,
    "kafka:..": TOPIC,
    "kafka://t": TOPIC,
    "kafka:" + "t" * 250: TOPIC,
    "postgresql://user:secret@host": "it names no database",
    "postgresql://user:secret@/db": "it names no host",
    "postgresql:///?user=me&password=secret": "it names no host",
    "postgresql://user:secret@host:port/db": "its URL cannot be read",
    "postgresql://user:sec/ret@host/db": "its URL cannot be read",
    "postgresql://host,other/db?port=1,2,3": "its URL cannot be read",
    "postgresql://[::1/db": "its URL cannot be read",
}


def parts(error):
    assert (
        all((error.what, error.why, error.risk, error.action))
        and error.risk == "No. Nothing was written."
    )
    assert "ecret" not in str(error) and "e c r" not in str(error)
    return str(error)


@pytest.mark.parametrize("place", REFUSED, ids=lambda place: place[:40] or "empty")
def test_a_place_that_cannot_be_used_is_refused(place):
    with pytest.raises(BadOption) as caught:
        check_place("decisionLog", place)
    assert REFUSED[place] in parts(caught.value) and caught.value.what.startswith("decisionLog=")


PLACES = {
    **{scheme: f"{scheme}://u:secret@bucket/key" for scheme in DRIVERS},
    "lakefs": "lakefs://repository/key",
}


@pytest.mark.parametrize("scheme", PLACES)
def test_a_missing_driver_names_its_package(scheme, monkeypatch):
    package = DRIVERS.get(scheme, "lakefs")
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingLibrary) as caught:
        check_place("decisionLog", PLACES[scheme])
    text = str(caught.value)
    assert f"decisionLog={scheme}:" in text and package in text and "secret" not in text


GOOD = [
    "/x",
    "//x",
    "/a:b/c",
    "file:/x",
    "file:///x",
    "memory://x",
    "hdfs://nn/x",
    "hdfs:///x",
    "kafka:a.b_c-1",
    "postgresql://u:p@h/db",
    "postgres:///db?host=/tmp",
]


@pytest.mark.parametrize("place", GOOD)
def test_a_place_that_can_be_used_passes(place):
    check_place("decisionLog", place)


@pytest.mark.parametrize("place", ["kafka:t", "postgresql://h/db"])
def test_a_checkpoint_is_in_a_folder(place):
    with pytest.raises(BadOption, match="checkpointLocation=.*no folder"):
        check_place("checkpointLocation", place, folder=True)


# -- asked by the code that opens places, before it creates anything --


@pytest.fixture
def empty(tmp_path, monkeypatch):
    """An empty working directory, which stays empty."""
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    assert os.listdir(tmp_path) == []


BAD = ["decisions", "./x", "dbfs:/x", "hdfs:/x", "file:x", "nosuch://x"]


def job_at(place):
    return exactly_once({"decisionLog": place}, participants=[MemoryParticipant()], name="orders")


ASKED = {
    "parse_options": lambda place: parse_sink_options(
        {"kafka.bootstrap.servers": "h:1", "topic": "t", "decisionLog": place}
    ),
    "open_log": lambda place: open_log(place, "query"),
    "open_folder_log": open_folder_log,
    "exactly_once": lambda place: job_at(place),
}


@pytest.mark.parametrize("place", BAD)
@pytest.mark.parametrize("opens", ASKED)
def test_a_place_is_checked_before_anything_is_created(empty, opens, place):
    with pytest.raises(BadOption) as caught:
        ASKED[opens](place)
    assert place.partition(":")[0] in parts(caught.value)


@pytest.mark.parametrize("place", [p for p in BAD if ":" in p])
def test_so_is_the_place_of_a_checkpoint(empty, place):
    with pytest.raises(BadOption, match="checkpointLocation"):
        Checkpoint(place)


def test_a_relative_checkpoint_is_where_spark_has_it(empty):
    assert Checkpoint("ck/").location == f"{empty}/ck"


@pytest.mark.parametrize("place", ["kafka:decisions", "postgresql://h/db"])
def test_open_log_opens_folders_only(empty, place):
    with pytest.raises(BadOption, match="no folder"):
        open_folder_log(place)


def test_a_dual_write_with_decisions_in_a_topic_names_what_to_write(empty):
    with pytest.raises(BadOption) as caught:
        job_at("kafka:decisions")
    assert "TopicLog(conf, topic, name)" in parts(caught.value)


def test_a_dual_write_opens_folders_urls_and_tables(tmp_path):
    assert isinstance(open_driver(job_at(str(tmp_path)).given).log, FileLog)
    assert isinstance(open_driver(job_at("memory://dual").given).log, ObjectLog)
    with pytest.raises(Exception, match="decision log in PostgreSQL"):
        open_driver(job_at("postgresql://user:secret@127.0.0.1:1/x").given)


# -- what a careless reading would take for one place, or show --


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("s3://b//k", "s3://b/k"),
        ("s3a://K:S@bucket1/x@y/k", "s3a://K:S@bucket2/x@y/k"),
        (
            "postgresql://h/d?options=-c SEARCH_PATH=prod",
            "postgresql://h/d?options=-c SEARCH_PATH=test",
        ),
        (
            "postgresql://h/d?options=--search-path=prod",
            "postgresql://h/d?options=--search-path=test",
        ),
    ],
)
def test_these_are_two_places(one, other):
    assert normal_place(one) != normal_place(other)


@pytest.mark.parametrize(
    "place",
    [
        "kafka://user:hun@ter2@broker/t",
        "u:hun@ter2@h/db",
        "pgsql://u:hun@ter2@h/db",
        "POSTGRESQL://u:hun@ter2@h/db",
        "nosuch://u:hun@ter2@h/db",
        "nosuch://h/x?pwd=hunter2",
        "nosuch://h/x?sig=hunter2",
    ],
)
def test_no_error_shows_a_secret_of_a_place(place):
    with pytest.raises(BadOption) as caught:
        check_place("decisionLog", place)
    assert "hun" not in str(caught.value) and "ter2" not in str(caught.value)


def test_dbfs_is_answered_by_what_helps_there():
    with pytest.raises(BadOption, match="/Volumes/"):
        check_place("checkpointLocation", "dbfs:/x", folder=True)
    with pytest.raises(BadOption, match="kafka:TOPIC"):
        check_place("decisionLog", "dbfs:/x")


@pytest.mark.parametrize(
    ("place", "shown"),
    [
        ("s3://b/k", "s3://b/k"),
        ("s3://ID:hunter2/x@b/k", "s3://ID:***@b/k"),
        ("abfs://c@a/x?sig=hunter2&sp=r", "abfs://c@a/x?sig=***&sp=r"),
        ("postgresql://me:hunter2@h/d?sslmode=require", "postgresql://me:***@h/d?sslmode=require"),
        ("postgresql://h/d?password=hunter2", "postgresql://h/d?password=***"),
        (
            "postgresql://h/d?user=me&password=hunter2&x=y",
            "postgresql://h/d?user=me&password=***&x=y",
        ),
        ("postgresql://h/d?sslpassword=hunter2", "postgresql://h/d?sslpassword=***"),
        ("postgresql://h/d?p%61ssword=hunter2", "postgresql://h/d?p%61ssword=***"),
        ("mysql://h/d?passwd=hunter2", "mysql://h/d?passwd=***"),
        ("nosuch://h/d?PWD=hunter2&api_token=hunter2", "nosuch://h/d?PWD=***&api_token=***"),
        ("nosuch://h/d?client_secret=hunter2", "nosuch://h/d?client_secret=***"),
        # libpq takes this for a password in the options, and that for one before the host
        ("postgresql://h:5432/d?password=hunter2@hunter2&x=y", "postgresql://h:***&x=y"),
        ("postgresql://me:hunter2?token=hunter2@h/d", "postgresql://me:***"),
        ("no answer: GET h?sig=hunter2 (timeout)", "no answer: GET h?sig=*** (timeout)"),
    ],
)
def test_a_masked_place_shows_no_secret(place, shown):
    assert masked(place) == shown
