"""Bad input: a clear error before anything is written. The user reads what, why, whether data is at
risk, and what to do.

With the fault removed the same query, from the same checkpoint, loses nothing and writes nothing
twice.
"""

import re
import socket
import time
from dataclasses import replace

import pytest
from confluent_kafka.admin import (
    AclBinding,
    AclOperation,
    AclPermissionType,
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    ResourcePatternType,
    ResourceType,
)
from kafka_fixtures import records
from marks import first_of
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    IntegerType,
    LongType,
    MapType,
    StringType,
    StructField,
    StructType,
)
from story_fixtures import check_untouched

from kafka2pc.kafka.cluster_check import check
from kafka2pc.kafka.wire.cluster import Cluster
from kafka2pc.kafka.wire.timeouts import choose_timeout_ms
from kafka2pc.kafka.wire.topics import describe_topics
from kafka2pc.local.broker import LocalKafka
from kafka2pc.proof.child_process import Failed, until
from kafka2pc.proof.drills.scenario import Scenario
from kafka2pc.protocol.errors import BadOption, NotAuthorized
from kafka2pc.protocol.log.format import dump_decision, load_decision
from kafka2pc.spark.sink.columns import check_columns
from kafka2pc.spark.sink.options import parse_sink_options

# at a restart, something decided may be waiting
RISK = {
    "CorruptDecision": "Perhaps",
    "BrokerUnreachable": "At a first start, no",
    "StoreUnreachable": "Not yet",
}
PARTS = re.compile(
    r"kafka2pc\.(?:\w+\.)+(?P<error>\w+): (?P<what>.+)\n +why: (?P<why>.+)\n +is data at risk:"
    r" (?P<risk>.+)\n +what to do: (?P<action>.+)"
)


def on_spark(test):
    return pytest.mark.kafka(pytest.mark.spark(test))


def dashed(name):
    return name.replace(" ", "-")


# -- helpers --


def stopped(story, ask="stream", **what):
    """Run into the error; returns what the user reads, without Spark's own text (which repeats the
    options).
    """
    with pytest.raises(Failed) as caught:
        run(story, ask, **what)
    return str(caught.value)


def run(story, ask="stream", options=None, **what):
    if ask == "stream":
        return story.run(options=options, **what)
    return story.job.ask(
        "write",
        source=str(story.source),
        options=story.options(**{"checkpointLocation": None, **(options or {})}),
        **what,
    )


def told(text, error, *says):
    """Our error with its four parts is in the text, and it says all that."""
    found = PARTS.search(text)
    assert found, f"no error of ours, with four parts, in:\n{text}"
    assert found["error"] == error, found[0]
    assert found["risk"].startswith(RISK.get(error, "No.")), found["risk"]
    for word in says:
        assert word in found[0], f"{word!r} is not in:\n{found[0]}"
    return found


def refused(story, error, *says, **what):
    """Our error, and nothing was written: no transaction was even begun."""
    found = told(stopped(story, **what), error, *says)
    check_untouched(story)
    return found


def goes_on(story, **what):
    """The fault is removed. The same query, from the same checkpoint, writes everything exactly
    once.
    """
    run(story, **what)
    story.check()


@pytest.fixture
def story(story):
    return story.feed() or story


# -- options, without Spark --

GIVEN = {"kafka.bootstrap.servers": "h:1", "topic": "t", "checkpointLocation": "/c"}
OPTIONS = {
    "unknown": ({"acks": "all"}, "unknown option acks"),
    "misspelt": ({"transactionIdPrefix": "x"}, "unknown option transactionidprefix"),
    "without kafka.": ({"bootstrap.servers": "h:1"}, "unknown option bootstrap.servers"),
    "no servers": ({"kafka.bootstrap.servers": None}, "kafka.bootstrap.servers is missing"),
    "no such value": (
        {"deliveryGuarantee": "sometimes"},
        "deliveryGuarantee=sometimes: choose one of exactly_once, at_least_once",
    ),
    "no such answer": (
        {"lostTransactions": "ignore"},
        "lostTransactions=ignore: choose one of fail, skip",
    ),
    "no retries": ({"maxCommitRetries": "0"}, "maxCommitRetries=0: a whole number"),
    "no number": ({"maxCommitRetries": "²"}, "maxCommitRetries=²: a whole number"),
    "no timeout": (
        {"kafka.transaction.timeout.ms": "5 minutes"},
        "kafka.transaction.timeout.ms=5 minutes: a whole number",
    ),
    "endless timeout": (
        {"kafka.transaction.timeout.ms": "99999999999"},
        "kafka.transaction.timeout.ms=99999999999: ",
    ),
    "no prefix": ({"transactionalIdPrefix": ""}, "transactionalIdPrefix is empty"),
    "no topic": ({"topic": ""}, "topic is empty"),
    "no key": ({"idempotenceKey": "", "decisionLog": "/l"}, "idempotenceKey is empty"),
    "no log": ({"decisionLog": ""}, "decisionLog is empty"),
    "decisions in no topic": (
        {"decisionLog": "kafka:"},
        "decisionLog=kafka:: kafka:TOPIC with the name of one topic is needed",
    ),
    "decisions in two topics": ({"decisionLog": "kafka:a,b"}, "decisionLog=kafka:a,b: kafka:TOPIC"),
    "decisions among the rows": (
        {"decisionLog": "kafka:t"},
        "decisionLog=kafka:t: rows are written to this topic",
    ),
    "key without its guarantee": (
        {"deliveryGuarantee": "at_least_once", "idempotenceKey": "k"},
        "idempotenceKey needs deliveryGuarantee=",
    ),
    "neither true nor false": (
        {"includeTimestamp": "yes"},
        "includeTimestamp=yes: choose one of false, true",
    ),
    "no such engine": ({"engine": "java"}, "engine=java: choose one of auto, columnar, confluent"),
    "a partitioner that columns do not have": (
        {"engine": "columnar", "kafka.partitioner": "random"},
        "engine=columnar and kafka.partitioner=random",
    ),
    "a partitioner with another place for rows without a key": (
        {"engine": "columnar", "kafka.partitioner": "murmur2"},
        "engine=columnar and kafka.partitioner=murmur2",
    ),
    "no timeout and a timeout": (
        {"twoPhaseCommit": "required", "kafka.transaction.timeout.ms": "9000"},
        "twoPhaseCommit=required and kafka.transaction",
    ),
    "no timeout without columns": (
        {"twoPhaseCommit": "required", "engine": "confluent"},
        "twoPhaseCommit=required needs the columnar engine",
    ),
    "both names of it": (
        {"twoPhaseCommit": "off", "kafka.transaction.two.phase.commit.enable": "true"},
        "twoPhaseCommit=off and kafka.transaction.two.phase.commit.enable=true",
    ),
    "not true and not false": (
        {"kafka.transaction.two.phase.commit.enable": "perhaps"},
        "kafka.transaction.two.phase.commit.enable=perhaps: true or false",
    ),
    "an id of one's own": (
        {"kafka.transactional.id": "x"},
        "kafka.transactional.id cannot be honoured",
    ),
    "fewer acks": ({"kafka.acks": "1"}, "kafka.acks=1: "),
    "not idempotent": ({"kafka.enable.idempotence": "false"}, "kafka.enable.idempotence=false: "),
    "a class of Java's": (
        {"kafka.value.serializer": "x.Y"},
        "kafka.value.serializer cannot be honoured",
    ),
}


def given(**more):
    return {k: v for k, v in (GIVEN | more).items() if v is not None}


def cases(table):
    return pytest.mark.parametrize("case", table.values(), ids=map(dashed, table))


@cases(OPTIONS)
def test_an_impossible_option_is_refused(case):
    wrong, says = case
    with pytest.raises(BadOption) as caught:
        parse_sink_options(given(**wrong))
    assert (
        str(caught.value).startswith(says)
        and "Nothing was written" in caught.value.risk
        and caught.value.action
    )


def test_all_wrong_options_are_in_one_error():
    alone = [case for case, _ in OPTIONS.values() if len(case) == 1]
    together = {name: value for case in reversed(alone) for name, value in case.items()}
    with pytest.raises(BadOption) as caught:
        parse_sink_options(given(**together))
    said = caught.value.what.lower()
    assert len(together) > 12 and [n for n in together if n.lower() not in said] == []


@pytest.mark.parametrize(
    ("partitioner", "engine"),
    [("murmur2_random", "columnar"), ("murmur2", "rows"), ("consistent", "rows")],
)
def test_a_partitioner_of_librdkafka_only_selects_its_engine(partitioner, engine):
    """murmur2 sends all rows without a key to one partition; the columnar engine deals them out."""
    assert parse_sink_options(given(**{"kafka.partitioner": partitioner})).engine == engine


def test_options_have_no_case_and_defaults_are_safe():
    made = parse_sink_options(given(TOPIC="t", DeliveryGuarantee="exactly_once"))
    assert (
        made == parse_sink_options(GIVEN)
        and made.exactly_once
        and not made.skip_lost
        and made.prefix == "kafka2pc"
    )


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("bootstrap.servers", "Did you mean kafka.bootstrap.servers? Known are: kafka.*, topic, "),
        ("topics", "Did you mean topic? Known are: "),
        ("transactionIdPrefix", "Did you mean transactionalIdPrefix? Known are: "),
        ("acks", "Known are: "),
    ],
)
def test_an_unknown_option_is_answered_with_the_nearest_name(name, near):
    with pytest.raises(BadOption) as caught:
        parse_sink_options(given(**{name: "x"}))
    assert "Options of the Kafka client begin with kafka." in caught.value.why
    assert caught.value.action.startswith(near)


CLIENT = {
    "unknown": ({"no.such": "1"}, 'No such configuration property: "no.such"'),
    "size": ({"message.max.bytes": "big"}, "message.max.bytes"),
    "batch": ({"batch.size": "big"}, "batch.size"),
    "wait": ({"linger.ms": "long"}, "Invalid value"),
    "port": ({"bootstrap.servers": "127.0.0.1:kafka"}, "127.0.0.1:kafka"),
    "short": ({}, "kafka.transaction.timeout.ms=999: at least 1000"),
}


@pytest.mark.kafka
@cases(CLIENT)
def test_a_client_setting_that_cannot_be_is_refused_before_the_first_connection(kafka, case):
    wrong, says = case
    with pytest.raises(BadOption, match=re.escape(says)):
        check(kafka.client_conf | wrong, timeout_ms=None if wrong else 999)


# -- columns, without Spark --

TEXT, BYTES, INT, LONG = StringType(), BinaryType(), IntegerType(), LongType()


def headers(value):
    return ArrayType(StructType([StructField("key", TEXT), StructField("value", value)]))


COLUMNS = {
    "no value": (
        {"key": TEXT, "content": TEXT},
        "column value is missing among ['key', 'content']",
    ),
    "value is a number": ({"value": INT}, "column value is int: it must be binary or string"),
    "value is a row": (
        {"value": StructType([StructField("a", INT)])},
        "column value is struct<a:int>: ",
    ),
    "key is a number": ({"key": LONG}, "column key is bigint: it must be binary or string"),
    "topic is bytes": ({"topic": BYTES}, "column topic is binary: it must be string"),
    "partition is long": ({"partition": LONG}, "column partition is bigint: it must be int"),
    "headers are a map": (
        {"headers": MapType(TEXT, BYTES)},
        "column headers is map<string,binary>: it must be array<struct<",
    ),
    "headers of text": (
        {"headers": headers(TEXT)},
        "column headers is array<struct<key:string,value:string>>: ",
    ),
    "one name twice": ({"value": TEXT, "VALUE": TEXT}, "column value is there twice"),
}


def schema(columns):
    return [(name, kind.simpleString()) for name, kind in columns.items()]


@cases(COLUMNS)
def test_a_column_that_kafka_cannot_hold_is_refused(case):
    columns, says = case
    with pytest.raises(BadOption, match=f"^{re.escape(says)}"):
        check_columns(schema(columns if "content" in columns else {"value": TEXT} | columns), "t")


def test_without_topic_there_is_nowhere_to_write():
    with pytest.raises(BadOption, match="^no option topic and no column topic"):
        check_columns(schema({"value": TEXT}), None)


def test_a_time_that_is_asked_for_must_be_there():
    check_columns(schema({"value": TEXT, "timestamp": TEXT}), "t")
    for columns, says in (
        ({}, "no column timestamp"),
        ({"timestamp": TEXT}, "column timestamp is string: it must be timestamp"),
    ):
        with pytest.raises(BadOption, match=says):
            check_columns(schema({"value": TEXT} | columns), "t", timestamps=True)


def test_columns_of_sparks_own_sink_are_taken_whatever_their_case():
    check_columns(
        schema(
            {
                "Value": BYTES,
                "KEY": TEXT,
                "topic": TEXT,
                "Partition": INT,
                "headers": headers(BYTES),
                "more": LONG,
            }
        ),
        None,
    )


# -- refused before anything is written --

# One error of the parser, whose cases are above, and those that the sink, the broker or the
# decision log raises.
WRONG_OPTIONS = {
    "many at once": (
        {
            "engine": "java",
            "topics": "x",
            "kafka.acks": "1",
            "kafka.linger.mss": "5",
            "kafka.batch.size": "large",
            "kafka.ssl.cipher.suites": "TLS_AES_256_GCM_SHA384",
        },
        [
            "6 options cannot be used",
            "engine=java",
            "unknown option topics",
            "kafka.acks=1",
            "unknown option kafka.linger.mss",
            "kafka.batch.size=large",
            "kafka.ssl.cipher.suites",
            "Did you mean kafka.linger.ms?",
        ],
    ),
    "timeout too long": (
        {"kafka.transaction.timeout.ms": "900001"},
        ["kafka.transaction.timeout.ms=900001", "at most 900000"],
    ),
    "topic not on the broker": (
        {"topic": "nowhere"},
        [
            "topic nowhere does not exist",
            "why: The brokers create no topics (auto.create.topics.enable), or none of this name.",
            "Create it (kafka-topics.sh --bootstrap-server ",
            " --create --topic nowhere), or correct",
        ],
    ),
    "key of a batch write": (
        {"idempotenceKey": "k", "decisionLog": "/nowhere"},
        ["idempotenceKey is for batch writes"],
    ),
    "decisions in no known kind of place": (
        {"decisionLog": "nosuch://user:secret@host/x"},
        ["decisionLog=nosuch:", "kafka:TOPIC or postgresql://"],
    ),
    "decisions in a table without a server": (
        {"decisionLog": "postgresql://user:secret@127.0.0.1:1/x"},
        ["decision log in PostgreSQL", "Check decisionLog"],
    ),
}
ERROR_OF = {
    "timeout too long": "TimeoutTooLarge",
    "decisions in a table without a server": "StoreUnreachable",
}


@on_spark
@pytest.mark.parametrize("name", WRONG_OPTIONS, ids=dashed)
def test_a_wrong_option_stops_the_query_before_it_writes(story, name):
    options, says = WRONG_OPTIONS[name]
    found = refused(story, ERROR_OF.get(name, "BadOption"), *says, options=options)
    assert "secret" not in found[0]


@on_spark
def test_an_option_put_right_loses_nothing(story):
    refused(story, "BadOption", "maxCommitRetries=none", options={"maxCommitRetries": "none"})
    goes_on(story.feed() or story)


WRONG_COLUMNS = {
    "no value": (["key", "row content"], ["column value is missing", "['key', 'content']"]),
    "headers of text": (
        ["key value", "array(struct('k' as key, 'v' as value)) headers"],
        ["headers is array<struct<key:string,value:string>>"],
    ),
}


@on_spark
@pytest.mark.parametrize("name", WRONG_COLUMNS, ids=dashed)
def test_a_wrong_column_stops_the_query_before_it_writes(story, name):
    select, says = WRONG_COLUMNS[name]
    refused(story, "BadOption", *says, select=select)


@on_spark
@pytest.mark.full
def test_a_column_put_right_loses_nothing(story):
    refused(story, "BadOption", "column value is bigint", select=["row value"])
    goes_on(story.feed() or story)


@on_spark
def test_output_mode_update_is_refused_by_spark_itself(story):
    assert (
        "update"
        in stopped(
            story, shape="count", select=["cast(count as string) value"], mode="update"
        ).lower()
    )
    check_untouched(story)


@on_spark
def test_a_checkpoint_that_only_sparks_conf_names_is_refused(story):
    conf = {"spark.sql.streaming.checkpointLocation": str(story.folder / "by-conf")}
    refused(
        story,
        "BadOption",
        "checkpointLocation is missing",
        "Spark's conf never reaches a Python sink",
        '.option("checkpointLocation"',
        options={"checkpointLocation": None},
        conf=conf,
    )


@on_spark
def test_no_checkpoint_at_all_is_refused_by_spark_itself(story):
    assert "checkpointLocation" in stopped(story, options={"checkpointLocation": None})
    check_untouched(story)


@on_spark
@pytest.mark.full
def test_an_unreachable_broker_is_reported_in_the_stated_time(story):
    if not story.job.alive:
        story.job.start()
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # without listening
        server, began = f"127.0.0.1:{closed.getsockname()[1]}", time.monotonic()
        found = refused(
            story,
            "BrokerUnreachable",
            server,
            "ECONNREFUSED",
            "bootstrap.servers",
            options={"kafka.bootstrap.servers": server},
        )
    stated_s = int(re.search(r"within (\d+) ms", found["what"])[1]) / 1000
    # Spark needs some of it on a busy machine
    assert stated_s <= 20 and time.monotonic() - began < stated_s + 60
    goes_on(story)


# -- batch writes --

BATCH = {
    "overwrite": (
        {"mode": "overwrite"},
        ["mode overwrite: a topic cannot be overwritten", 'mode("append")'],
    ),
    "key without a log": (
        {"options": {"idempotenceKey": "k"}},
        ["idempotenceKey without decisionLog", '.option("decisionLog"'],
    ),
    "unknown option": ({"options": {"acks": "all"}}, ["unknown option acks"]),
    "topic not on the broker": (
        {"options": {"topic": "nowhere"}},
        ["topic nowhere does not exist"],
    ),
    "wrong column": ({"select": ["row value"]}, ["column value is bigint"]),
}


@on_spark
@pytest.mark.parametrize("name", BATCH, ids=dashed)
def test_a_wrong_batch_write_is_refused_before_it_writes(story, name):
    what, says = BATCH[name]
    refused(story, "BadOption", *says, ask="write", **what)


@on_spark
def test_a_batch_write_in_sparks_default_mode_is_refused_by_spark_itself(story):
    assert "append" in stopped(story, ask="write", mode="errorifexists").lower()
    check_untouched(story)
    goes_on(story, ask="write")


# -- a row that Kafka cannot hold: found in a task, nothing of the batch becomes visible --


def check_held_back(story, visible):
    """The earlier batches are there, and nothing of the broken one."""
    assert sorted(s.row for s in story.rows()) == list(range(visible))


def row_broken(story, error, *says, **what):
    """Batch 0 is good, batch 1 has one bad row: batch 0 stays, nothing of batch 1 shows."""
    told(stopped(story.feed() or story, **what), error, *says)
    check_held_back(story, visible=story.size)


VALUE = "cast(row as string) value"
BAD_ROW = 55


@on_spark
def test_a_row_without_topic_is_reported_and_once_corrected_loses_nothing(story):
    to = {"options": {"topic": None}}
    row_broken(
        story,
        "BadRow",
        "topic is null",
        "fill the column topic",
        select=[VALUE, f"if(row = {BAD_ROW}, null, '{story.name}') topic"],
        **to,
    )
    goes_on(story, select=[VALUE, f"'{story.name}' topic"], **to)


@on_spark
@pytest.mark.full
def test_a_row_for_a_missing_topic_is_reported_and_once_corrected_loses_nothing(story):
    to = {"options": {"topic": None}}
    row_broken(
        story,
        "BadRow",
        "topic nowhere",
        "Create it",
        select=[VALUE, f"if(row = {BAD_ROW}, 'nowhere', '{story.name}') topic"],
        **to,
    )
    goes_on(story, select=[VALUE, f"'{story.name}' topic"], **to)


@on_spark
@pytest.mark.full
def test_a_row_for_a_missing_partition_is_reported_and_once_corrected_loses_nothing(story):
    row_broken(
        story,
        "BadRow",
        "There is no such topic or partition",
        select=[VALUE, f"cast(if(row = {BAD_ROW}, 99, null) as int) partition"],
    )
    goes_on(story, select=[VALUE, "cast(null as int) partition"])


LONG_KEY = f"if(row = {BAD_ROW}, repeat('k', 60000), 'k') key"


@on_spark
def test_a_record_too_large_for_the_topic_is_reported_and_once_corrected_loses_nothing(story):
    limit(story, 20_000)
    row_broken(
        story, "BadRow", story.name, "60002 bytes", "max.message.bytes", select=[VALUE, LONG_KEY]
    )
    limit(story, 100_000)
    goes_on(story, select=[VALUE, LONG_KEY])


@on_spark
@pytest.mark.full
def test_a_record_too_large_for_the_client_is_reported_and_once_corrected_loses_nothing(story):
    narrow = {"kafka.max.request.size": "20000"}
    row_broken(
        story,
        "BadRow",
        "60002 bytes",
        "kafka.max.request.size is 20000",
        select=[VALUE, LONG_KEY],
        options=narrow,
    )
    goes_on(story, select=[VALUE, LONG_KEY])


def limit(story, size):
    """Set the topic's max.message.bytes."""
    entry = ConfigEntry("max.message.bytes", str(size), incremental_operation=AlterConfigOpType.SET)
    resource = ConfigResource(ConfigResource.Type.TOPIC, story.name, incremental_configs=[entry])
    admin = AdminClient(story.kafka.client_conf)
    for done in admin.incremental_alter_configs([resource]).values():
        done.result(30)


# -- the checkpoint --


@pytest.fixture
def begun(story):
    """A query with one batch done and one to come."""
    story.run()
    return story.feed() or story


def newest(story):
    """The file of the newest decision."""
    return max(
        (story.checkpoint / "kafka2pc").glob("*.json"),
        key=lambda p: [int(n) for n in p.name.split(".")[:2]],
    )


def check_stopped(story, error, *says, batches=1, **what):
    """Our error; the rows in the topic and the decisions are unchanged, and no transaction was
    begun.
    """
    before, kept = len(story.events("begin")), decisions(story)
    told(stopped(story, **what), error, *says)
    check_held_back(story, visible=batches * story.size)
    assert len(story.events("begin")) == before and decisions(story) == kept


def decisions(story):
    return {p.name: p.read_bytes() for p in (story.checkpoint / "kafka2pc").iterdir()}


DAMAGE = {
    "cut off": (lambda content: content[:-40], "CorruptDecision", "no decision"),
    "empty": (lambda content: b"", "CorruptDecision", "0 bytes"),
    "one digit": (
        lambda content: content.replace(b'"epoch": ', b'"epoch": 1', 1),
        "CorruptDecision",
        "the checksum does not fit the content",
    ),
    "no json": (lambda content: b"\xff\x00" * 100, "CorruptDecision", "200 bytes"),
    "newer": (
        lambda content: content.replace(b'"format": 2', b'"format": 4', 1),
        "UnknownFormat",
        "format 4, known up to 3",
    ),
}


@on_spark
@pytest.mark.parametrize("name", first_of(DAMAGE, ids=dashed))
def test_a_damaged_or_newer_decision_stops_the_query_and_restored_it_loses_nothing(begun, name):
    damage, error, says = DAMAGE[name]
    file = newest(begun)
    whole = file.read_bytes()
    assert damage(whole) != whole
    file.write_bytes(damage(whole))
    check_stopped(begun, error, str(file), says)
    file.write_bytes(whole)
    goes_on(begun)


@on_spark
def test_a_decision_about_another_cluster_stops_the_query(begun):
    file = newest(begun)
    whole = file.read_bytes()
    file.write_bytes(
        dump_decision(replace(load_decision(whole, "here"), stores=(("kafka", "another-cluster"),)))
    )
    check_stopped(
        begun, "WrongCluster", "another-cluster", begun.kafka.cluster_id, "new checkpointLocation"
    )
    file.write_bytes(whole)
    goes_on(begun)


@on_spark
@pytest.mark.full
def test_a_checkpoint_used_against_another_cluster_stops_the_query(begun, secure):
    secure.create_topic(begun.name)
    check_stopped(
        begun,
        "WrongCluster",
        begun.kafka.cluster_id,
        secure.cluster_id,
        "Point the query at the old cluster",
        options={f"kafka.{k}": v for k, v in secure.client_conf.items()},
    )
    assert records(secure, begun.name, "read_uncommitted") == []
    goes_on(begun)


@on_spark
def test_a_place_for_decisions_that_cannot_be_written_stops_the_query(story):
    story.checkpoint.mkdir()
    place = story.checkpoint / "kafka2pc"
    place.write_text("a file where the folder should be")
    refused(story, "LogUnwritable", str(place), "Make the place writable")
    place.unlink()
    goes_on(story)


@on_spark
@pytest.mark.parametrize("ask", first_of(["stream", "write"]))
def test_a_decision_log_that_cannot_be_written_stops_it(story, ask):
    file = story.folder / "file"
    file.write_text("")
    refused(
        story,
        "LogUnwritable",
        f"{file}/log/",
        "Not a directory",
        ask=ask,
        options={"decisionLog": f"{file}/log"},
    )
    file.unlink()
    goes_on(story, ask=ask, options={"decisionLog": f"{file}/log"})


# -- rights --


@pytest.fixture(scope="module")
def secure():
    with LocalKafka(secure=True, progress=None) as cluster:
        yield cluster


@pytest.fixture
def alice(job, secure, tmp_path):
    """A query of the user alice, who has no right at all."""
    told = Scenario(job, secure, tmp_path)
    told.feed()
    yield told
    told.close()


def as_alice(story, **more):
    return {f"kafka.{k}": v for k, v in story.kafka.client_conf_for("alice").items()} | more


def grant(story, kind, operation=AclOperation.WRITE):
    """Give alice a right to the story's topic or prefix, which have the same name, and wait until
    it is in force.
    """
    acl = AclBinding(
        kind,
        story.name,
        ResourcePatternType.LITERAL if kind is ResourceType.TOPIC else ResourcePatternType.PREFIXED,
        "User:alice",
        "*",
        operation,
        AclPermissionType.ALLOW,
    )
    admin = AdminClient(story.kafka.client_conf)
    for made in admin.create_acls([acl]).values():
        made.result(30)
    with Cluster(story.kafka.client_conf_for("alice")) as cluster:
        until(lambda: in_force(cluster, story.name, kind, operation), "the right is in force")


def in_force(cluster, name, kind, operation):
    try:
        if kind is ResourceType.TOPIC:
            return (
                describe_topics(cluster, [name])[name].may_write
                is (operation is AclOperation.WRITE)
                and describe_topics(cluster, [name])[name].partitions
            )
        return choose_timeout_ms(cluster, f"{name}-look")
    except NotAuthorized:
        return False


@on_spark
def test_rights_are_named_one_after_the_other_and_all_given_nothing_is_lost(alice):
    topic, prefix = f"topic {alice.name}", f"{alice.name}-probe"
    refused(alice, "NotAuthorized", topic, "Grant WRITE", options=as_alice(alice))
    grant(alice, ResourceType.TOPIC, AclOperation.DESCRIBE)
    refused(alice, "NotAuthorized", topic, "Grant WRITE", options=as_alice(alice))
    grant(alice, ResourceType.TOPIC)
    refused(
        alice,
        "NotAuthorized",
        prefix,
        "Grant WRITE on the resource TransactionalId, PREFIXED",
        options=as_alice(alice),
    )
    grant(alice, ResourceType.TRANSACTIONAL_ID)
    goes_on(alice, options=as_alice(alice))


@on_spark
def test_a_prefix_that_is_not_allowed_is_reported(alice):
    grant(alice, ResourceType.TOPIC)
    grant(alice, ResourceType.TRANSACTIONAL_ID)
    refused(
        alice,
        "NotAuthorized",
        "not-hers",
        "TransactionalId, PREFIXED",
        options=as_alice(alice, transactionalIdPrefix="not-hers"),
    )
    goes_on(alice, options=as_alice(alice))


@on_spark
def test_a_topic_of_a_row_that_is_not_allowed_is_reported_and_once_granted_nothing_is_lost(alice):
    grant(alice, ResourceType.TRANSACTIONAL_ID)
    what = {"select": [VALUE, f"'{alice.name}' topic"], "options": as_alice(alice, topic=None)}
    told(stopped(alice, **what), "NotAuthorized", f"topic {alice.name}", "Grant WRITE")
    check_held_back(alice, visible=0)
    grant(alice, ResourceType.TOPIC)
    goes_on(alice, **what)


@on_spark
def test_a_wrong_password_is_reported_and_not_shown(alice):
    text = stopped(alice, options=as_alice(alice, **{"kafka.sasl.password": "hunter2"}))
    told(text, "NotAuthorized", "user alice", "password")
    assert "hunter2" not in text
    check_untouched(alice)
