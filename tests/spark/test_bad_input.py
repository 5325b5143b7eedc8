"""Bad input: a clear error before anything is written. The user reads what, why, whether data is at
risk, and what to do.

With the fault removed the same query, from the same checkpoint, loses nothing and writes nothing
twice.
"""

import re
from dataclasses import replace

import pytest
from confluent_kafka.admin import (
    AclBinding,
    AclOperation,
    AclPermissionType,
    AdminClient,
    ResourcePatternType,
    ResourceType,
)
from kafka_fixtures import records
from planned_query import PlannedQuery, told
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
from query_fixtures import check_untouched

from kafka2pc.kafka.cluster_check import check
from kafka2pc.kafka.read.whole_topic import read_topic
from kafka2pc.kafka.wire.cluster import Cluster
from kafka2pc.kafka.wire.timeouts import choose_timeout_ms
from kafka2pc.kafka.wire.topics import describe_topics
from kafka2pc.proof.child_process import Failed, until
from kafka2pc.proof.crash_points import CrashPoint
from kafka2pc.proof.drills.spark_query import SparkQuery, Stop, interrupt
from kafka2pc.protocol.errors import BadOption, NotAuthorized
from kafka2pc.protocol.log.format import dump_decision, load_decision
from kafka2pc.spark.sink.columns import check_columns
from kafka2pc.spark.sink.options import parse_sink_options

pytestmark = pytest.mark.never_unsteady


def on_spark(test):
    return pytest.mark.kafka(pytest.mark.spark(test))


def dashed(name):
    return name.replace(" ", "-")


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
        "lostTransactions=ignore: choose one of repair, fail, skip",
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
    "a prefix that is longer than an id": (
        {"transactionalIdPrefix": "ü" * 16_322},
        "transactionalIdPrefix has 32644 bytes: at most 32642",
    ),
    "no topic": ({"topic": ""}, "topic is empty"),
    "a path": ({"path": "/tmp/x"}, "a path: rows are in topics"),
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
    "no such visibility": (
        {"visibility": "all"},
        "visibility=all: choose one of transaction, batch",
    ),
    "a gate without transactions": (
        {"visibility": "batch", "deliveryGuarantee": "at_least_once"},
        "visibility=batch needs deliveryGuarantee=exactly_once",
    ),
    "a gate in no topic": (
        {"visibility": "batch", "topic": None},
        "visibility=batch needs topic or topics",
    ),
    "topics without a gate": (
        {"topics": "a,b", "topic": None},
        "topics=a,b without visibility=batch",
    ),
    "topic and topics": (
        {"visibility": "batch", "topics": "t"},
        "topic=t and topics=t contradict each other",
    ),
    "a topic without a name": (
        {"visibility": "batch", "topics": "a, ,b", "topic": None},
        "topics=a, ,b: a name is empty",
    ),
    "no topics": ({"topics": " "}, "topics is empty"),
    "decisions in one of the topics": (
        {"visibility": "batch", "topics": "a,b", "topic": None, "decisionLog": "kafka:b"},
        "decisionLog=kafka:b: rows are written to this topic",
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
    "the other name of KIP-939": (
        {"kafka.transaction.two.phase.commit.enable": "true"},
        "kafka.transaction.two.phase.commit.enable cannot be honoured",
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
        caught.value.what.startswith(says)
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
    assert parse_sink_options(given(**{"kafka.partitioner": partitioner})).target.engine == engine


def test_options_have_no_case_and_defaults_are_safe():
    made = parse_sink_options(given(TOPIC="t", DeliveryGuarantee="exactly_once"))
    assert (
        made == parse_sink_options(GIVEN)
        and made.target.exactly_once
        and made.query.lost_transactions == "repair"
        and made.target.prefix == "kafka2pc"
    )


@pytest.mark.parametrize(
    ("more", "gated"),
    [
        ({}, ()),
        ({"visibility": "batch"}, ("t",)),
        ({"visibility": "batch", "topics": " a ,b,a", "topic": None}, ("a", "b")),
    ],
)
def test_the_topics_with_a_gate(more, gated):
    assert parse_sink_options(given(**more)).target.gated == gated


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("bootstrap.servers", "Did you mean kafka.bootstrap.servers? Known are: kafka.*, topic, "),
        ("topc", "Did you mean topic? Known are: "),
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
    with pytest.raises(BadOption, match=rf"^\[KAFKA2PC\.BAD_OPTION\] {re.escape(says)}"):
        check_columns(schema(columns if "content" in columns else {"value": TEXT} | columns), "t")


def test_without_topic_there_is_nowhere_to_write():
    with pytest.raises(
        BadOption, match="^.KAFKA2PC.BAD_OPTION. no option topic and no column topic"
    ):
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


# -- refused by the planner before anything is written, without Spark --


@pytest.fixture
def query(kafka, tmp_path):
    return PlannedQuery(kafka, tmp_path)


# Errors that the format, the broker or the decision log raises; the cases of the parsers are above.
PLANNED = {
    "timeout too long": (
        {"kafka.transaction.timeout.ms": "900001"},
        "TimeoutTooLarge",
        ["kafka.transaction.timeout.ms=900001", "at most 900000"],
    ),
    "topic not on the broker": (
        {"topic": "nowhere"},
        "BadOption",
        [
            "topic nowhere does not exist",
            "why: The brokers create no topics (auto.create.topics.enable), or none of this name.",
            "Create it (kafka-topics.sh --bootstrap-server ",
            " --create --topic nowhere), or correct",
        ],
    ),
    "key of a batch write": (
        {"idempotenceKey": "k", "decisionLog": "/nowhere"},
        "BadOption",
        ["idempotenceKey is for batch writes"],
    ),
    "decisions in no known kind of place": (
        {"decisionLog": "nosuch://user:secret@host/x"},
        "BadOption",
        ["decisionLog=nosuch:", "kafka:TOPIC or postgresql://"],
    ),
    "decisions in a table without a server": (
        {"decisionLog": "postgresql://user:secret@127.0.0.1:1/x"},
        "StoreUnreachable",
        ["decision log in PostgreSQL", "Check decisionLog"],
    ),
}


@pytest.mark.kafka
@cases(PLANNED)
def test_the_planner_refuses_before_a_transaction_begins(query, case):
    options, error, says = case
    found = query.refused(error, *says, options=options)
    assert "secret" not in found[0]
    query.goes_on()


WRONG_COLUMNS = {
    "no value": (
        {"key": TEXT, "content": TEXT},
        ["column value is missing", "['key', 'content']"],
    ),
    "headers of text": (
        {"value": TEXT, "headers": headers(TEXT)},
        ["headers is array<struct<key:string,value:string>>"],
    ),
}


@pytest.mark.kafka
@cases(WRONG_COLUMNS)
def test_the_planner_refuses_a_wrong_column(query, case):
    columns, says = case
    query.refused("BadOption", *says, columns=columns)


BATCH = {
    "key without a log": (
        {"idempotenceKey": "k"},
        ["idempotenceKey without decisionLog", '.option("decisionLog"'],
    ),
    "unknown option": ({"acks": "all"}, ["unknown option acks"]),
}


@pytest.mark.kafka
@cases(BATCH)
def test_the_planner_of_a_batch_write_refuses(query, case):
    options, says = case
    query.refused("BadOption", *says, ask="write", options=options)


@pytest.mark.kafka
@pytest.mark.parametrize("ask", ["stream", "write"])
def test_a_decision_log_that_cannot_be_written_stops_it(query, ask, tmp_path):
    file = tmp_path / "file"
    file.write_text("")
    here = {"decisionLog": f"{file}/log"}
    query.refused("LogUnwritable", f"{file}/log/", "Not a directory", ask=ask, options=here)
    file.unlink()
    query.goes_on(ask=ask, options=here)


@pytest.mark.kafka
def test_a_place_for_decisions_that_cannot_be_written_stops_the_query(query):
    place = query.checkpoint / "kafka2pc"
    place.write_text("a file where the folder should be")
    query.refused("LogUnwritable", str(place), "Make the place writable")
    place.unlink()
    query.goes_on()


def newest(query):
    """The file of the newest decision."""
    return max(
        (query.checkpoint / "kafka2pc").glob("*.json"),
        key=lambda p: [int(n) for n in p.name.split(".")[:2]],
    )


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
        lambda content: content.replace(b'"format": 4', b'"format": 99', 1),
        "UnknownFormat",
        "format 99, known up to 6",
    ),
}


@pytest.mark.kafka
@cases(DAMAGE)
def test_a_damaged_or_newer_decision_is_refused_and_restored_it_loses_nothing(query, case):
    damage, error, says = case
    query.run()
    file = newest(query)
    whole = file.read_bytes()
    assert damage(whole) != whole
    file.write_bytes(damage(whole))
    query.refused(error, str(file), says)
    assert file.read_bytes() == damage(whole)
    file.write_bytes(whole)
    query.goes_on()


@pytest.mark.kafka
def test_a_decision_about_another_cluster_is_refused(query):
    query.run()
    file = newest(query)
    whole = file.read_bytes()
    file.write_bytes(
        dump_decision(replace(load_decision(whole, "here"), stores=(("kafka", "another-cluster"),)))
    )
    ids = "another-cluster", query.kafka.cluster_id
    query.refused("WrongCluster", *ids, "new checkpointLocation")
    file.write_bytes(whole)
    query.goes_on()


@pytest.mark.kafka
def test_a_checkpoint_used_against_another_cluster_is_refused(query, secure):
    query.run()
    secure.create_topic(query.name)
    query.refused(
        "WrongCluster",
        query.kafka.cluster_id,
        secure.cluster_id,
        "Point the query at the old cluster",
        options={f"kafka.{k}": v for k, v in secure.client_conf.items()},
    )
    assert records(secure, query.name, "read_uncommitted") == []
    query.goes_on()


# -- rights --


@pytest.fixture
def hers(secure, tmp_path):
    """A query of the user alice, who has no right at all."""
    return PlannedQuery(secure, tmp_path, secure.client_conf_for("alice"))


def grant(query, kind, operation=AclOperation.WRITE):
    """Give alice a right to the query's topic or prefix, which have the same name, and wait until
    it is in force.
    """
    acl = AclBinding(
        kind,
        query.name,
        ResourcePatternType.LITERAL if kind is ResourceType.TOPIC else ResourcePatternType.PREFIXED,
        "User:alice",
        "*",
        operation,
        AclPermissionType.ALLOW,
    )
    admin = AdminClient(query.kafka.client_conf)
    for made in admin.create_acls([acl]).values():
        made.result(30)
    with Cluster(query.kafka.client_conf_for("alice")) as cluster:
        until(lambda: in_force(cluster, query.name, kind, operation), "the right is in force")


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


@pytest.mark.kafka
def test_rights_are_named_one_after_the_other_and_all_given_nothing_is_lost(hers):
    topic, prefix = f"topic {hers.name}", f"{hers.name}-probe"
    pattern = "Grant WRITE on the resource TransactionalId, PREFIXED"
    hers.refused("NotAuthorized", topic, "Grant WRITE")
    grant(hers, ResourceType.TOPIC, AclOperation.DESCRIBE)
    hers.refused("NotAuthorized", topic, "Grant WRITE")
    grant(hers, ResourceType.TOPIC)
    hers.refused("NotAuthorized", prefix, pattern)
    grant(hers, ResourceType.TRANSACTIONAL_ID)
    foreign = {"transactionalIdPrefix": "not-hers"}
    hers.refused("NotAuthorized", "not-hers", pattern, options=foreign)
    hers.goes_on()


# -- what Spark makes of it: once for each place in which an error can be raised --


def stopped(spark_query, ask="stream", **what):
    """Run into the error; returns what the user reads, without Spark's own text (which repeats the
    options).
    """
    with pytest.raises(Failed) as caught:
        run(spark_query, ask, **what)
    return str(caught.value)


def run(spark_query, ask="stream", options=None, **what):
    if ask == "stream":
        return spark_query.run(options=options, **what)
    return spark_query.job.ask(
        "write",
        source=str(spark_query.source),
        options=spark_query.options(**{"checkpointLocation": None, **(options or {})}),
        **what,
    )


def refused(spark_query, error, *says, **what):
    """Our error, and nothing was written: no transaction was even begun."""
    found = told(stopped(spark_query, **what), error, *says)
    check_untouched(spark_query)
    return found


def goes_on(spark_query, **what):
    """The fault is removed. The same query, from the same checkpoint, writes everything exactly
    once.
    """
    run(spark_query, **what)
    spark_query.check()


def check_held_back(spark_query, visible):
    """The earlier batches are there, and nothing of the broken one, which may be open."""
    found = lambda: read_topic(spark_query.kafka.client_conf, spark_query.name)
    until(lambda: sorted(int(r.value) for r in found()) == list(range(visible)), "only these")


@pytest.fixture
def spark_query(spark_query):
    return spark_query.feed() or spark_query


MANY_WRONG = {
    "engine": "java",
    "topc": "x",
    "kafka.acks": "1",
    "kafka.linger.mss": "5",
    "kafka.batch.size": "large",
    "kafka.ssl.cipher.suites": "TLS_AES_256_GCM_SHA384",
}
MANY_SAID = [
    "6 options cannot be used",
    "engine=java",
    "unknown option topc",
    "kafka.acks=1",
    "unknown option kafka.linger.mss",
    "kafka.batch.size=large",
    "kafka.ssl.cipher.suites",
    "Did you mean kafka.linger.ms?",
]


@on_spark
def test_in_the_planner_wrong_options_and_columns_stop_the_query_and_put_right_lose_nothing(
    spark_query,
):
    refused(spark_query, "BadOption", *MANY_SAID, options=MANY_WRONG)
    refused(spark_query, "BadOption", "column value is bigint", select=["row value"])
    goes_on(spark_query.feed() or spark_query)


@on_spark
def test_what_spark_itself_refuses_is_refused_before_a_transaction_begins(spark_query):
    counted = {"shape": "count", "select": ["cast(count as string) value"]}
    # the guide quotes it, Moving over, "Output mode"
    assert "kafka2pc does not support Update mode" in stopped(spark_query, mode="update", **counted)
    assert "checkpointLocation" in stopped(spark_query, options={"checkpointLocation": None})
    check_untouched(spark_query)


@on_spark
def test_a_checkpoint_that_only_sparks_conf_names_is_refused(spark_query):
    conf = {"spark.sql.streaming.checkpointLocation": str(spark_query.folder / "by-conf")}
    refused(
        spark_query,
        "BadOption",
        "checkpointLocation is missing",
        "Spark's conf never reaches a Python sink",
        '.option("checkpointLocation"',
        options={"checkpointLocation": None},
        conf=conf,
    )


@on_spark
def test_a_batch_write_in_another_mode_than_append_is_refused(spark_query):
    says = "mode overwrite: a topic cannot be overwritten", 'mode("append")'
    refused(spark_query, "BadOption", *says, ask="write", mode="overwrite")
    assert "append" in stopped(spark_query, ask="write", mode="errorifexists").lower()
    check_untouched(spark_query)
    goes_on(spark_query, ask="write")


VALUE = "cast(row as string) value"
BAD_ROW = 55


@on_spark
def test_in_a_task_a_bad_row_holds_its_batch_back_and_corrected_loses_nothing(spark_query):
    """Batch 0 is good, batch 1 has one row without a topic."""
    to = {"options": {"topic": None}}
    bad = [VALUE, f"if(row = {BAD_ROW}, null, '{spark_query.name}') topic"]
    text = stopped(spark_query.feed() or spark_query, select=bad, **to)
    told(text, "BadRow", "topic is null", "fill the column topic")
    check_held_back(spark_query, visible=spark_query.size)
    goes_on(spark_query, select=[VALUE, f"'{spark_query.name}' topic"], **to)


@on_spark
def test_in_the_commit_phase_a_decision_that_cannot_be_written_holds_its_batch_back(spark_query):
    place, away = spark_query.folder / "log", spark_query.folder / "away"
    here = {"decisionLog": str(place)}

    def spoil(event):
        place.rename(away)
        place.write_text("a file where the folder was")
        return True

    error = interrupt(
        spark_query, Stop(point=CrashPoint.BEFORE_DECISION, inject=spoil), options=here
    )
    told(str(error), "LogUnwritable", str(place), "Make the place writable")
    check_held_back(spark_query, visible=0)
    place.unlink()
    away.rename(place)
    goes_on(spark_query, options=here)


@on_spark
def test_in_the_restore_phase_a_damaged_decision_stops_the_query_and_restored_it_loses_nothing(
    spark_query,
):
    spark_query.run()
    spark_query.feed()
    file = newest(spark_query)
    whole, before = file.read_bytes(), len(spark_query.events("begin"))
    file.write_bytes(whole[:-40])
    told(stopped(spark_query), "CorruptDecision", str(file), "no decision")
    check_held_back(spark_query, visible=spark_query.size)
    assert len(spark_query.events("begin")) == before and file.read_bytes() == whole[:-40]
    file.write_bytes(whole)
    goes_on(spark_query)


@on_spark
@pytest.mark.full
def test_a_topic_of_a_row_that_is_not_allowed_is_reported_and_once_granted_nothing_is_lost(
    job, secure, tmp_path
):
    with SparkQuery(job, secure, tmp_path) as spark_query:
        spark_query.feed()
        grant(spark_query, ResourceType.TRANSACTIONAL_ID)
        alice = {f"kafka.{k}": v for k, v in secure.client_conf_for("alice").items()}
        what = {
            "select": [VALUE, f"'{spark_query.name}' topic"],
            "options": alice | {"topic": None},
        }
        told(
            stopped(spark_query, **what),
            "NotAuthorized",
            f"topic {spark_query.name}",
            "Grant WRITE",
        )
        check_held_back(spark_query, visible=0)
        grant(spark_query, ResourceType.TOPIC)
        goes_on(spark_query, **what)
