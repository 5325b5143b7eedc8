"""Source options: what contradicts, or has no such value, is refused without a broker."""

import pytest

from kafka2pc.protocol.errors import BadOption
from kafka2pc.spark.sink.options import SINK_OPTIONS, parse_sink_options
from kafka2pc.spark.source.options import SOURCE_OPTIONS, parse_source_options
from kafka2pc.spark.source.readers import StreamReader


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, "exactly one of subscribe"),
        ({"subscribe": "a", "assign": '{"a": [0]}'}, "exactly one"),
        ({"assign": '{"a": 0}'}, "not understood"),
        ({"subscribePattern": "["}, "subscribePattern"),
        ({"subscribe": "a", "startingOffsets": "newest"}, "choose one of"),
        ({"subscribe": "a", "startingOffsets": '{"a": {"0": "1"}}'}, "not understood"),
        ({"subscribe": "a", "endingOffsets": '{"a": {"0": -2}}'}, "not understood"),
        ({"subscribe": "a", "startingOffsets": "group"}, "kafka.group.id"),
        ({"subscribe": "a", "kafka.auto.offset.reset": "latest"}, "startingOffsets=group"),
        ({"subscribe": "a", "maxOffsetsPerTrigger": "0"}, "whole number"),
        ({"subscribe": "a", "failOnDataLoss": "no"}, "choose one of"),
        ({"subscribe": "a", "kafka.isolation.level": "serializable"}, "choose one of"),
        ({"subscribe": "a", "minOffsetPerTrigger": "5"}, "Did you mean minOffsetsPerTrigger"),
        ({"subscribe": "a", "maxOffsetsPerTrigger": str(2**63)}, "whole number"),
        (
            {"subscribe": "a", "minOffsetsPerTrigger": "5", "maxOffsetsPerTrigger": "4"},
            "minOffsetsPerTrigger=5 is more than maxOffsetsPerTrigger=4",
        ),
        ({"subscribe": "a", "maxTriggerDelay": "5 s"}, "a time such as"),
        ({"subscribe": "a", "maxTriggerDelay": "2.5s"}, "a time such as"),
        ({"subscribe": "a", "maxTriggerDelay": "5sec"}, "a time such as"),
        ({"subscribe": "a", "minPartitions": "a"}, "whole number"),
        ({"subscribe": "a", "minPartitions": "1.0"}, "whole number"),
        ({"subscribe": "a", "minPartitions": "0"}, "whole number"),
        ({"subscribe": "a", "minPartitions": "-1"}, "whole number"),
        ({"subscribe": "a", "maxRecordsPerPartition": "0"}, "whole number"),
        ({"subscribe": "a", "kafka.key.deserializer": "x"}, "cannot be honoured"),
        ({"subscribe": "a", "startingOffsetsByTimestamp": "1"}, "not understood"),
        ({"subscribe": "a", "startingTimestamp": "-1"}, "no time"),
        ({"subscribe": "a", "startingTimestamp": str(2**63)}, "no time"),
        ({"subscribe": "a", "endingOffsetsByTimestamp": '{"a": {"0": -1}}'}, "not understood"),
        ({"subscribe": "a", "startingTimestamp": "1", "startingOffsets": "frist"}, "choose one of"),
        ({"subscribe": "a", "startingOffsets": "latest", "endingTimestamp": "1"}, "read nothing"),
    ],
)
def test_bad_options_are_refused_without_a_broker(options, said):
    with pytest.raises(BadOption, match=said):
        parse_source_options({"kafka.bootstrap.servers": "localhost:1"} | options)


TIMES, OFFSETS = '{"a": {"0": 5}}', '{"a": {"0": 7}}'


@pytest.mark.parametrize("side", ["start", "end"])
def test_a_time_wins_over_times_and_times_over_offsets(side):
    given = {
        f"{side}ingTimestamp": "3",
        f"{side}ingOffsetsByTimestamp": TIMES,
        f"{side}ingOffsets": OFFSETS,
    }
    chosen = []
    for name in list(given):
        o = parse_source_options({"kafka.bootstrap.servers": "x:1", "subscribe": "a"} | given)
        where = getattr(o, side)
        chosen.append((where.kind, where.option, where.time_ms, dict(where.numbers).get(("a", 0))))
        del given[name]
    assert chosen == [
        ("time", f"{side}ingTimestamp", 3, None),
        ("times", f"{side}ingOffsetsByTimestamp", None, 5),
        ("offsets", f"{side}ingOffsets", None, 7),
    ]


def test_names_and_words_have_no_case():
    for change in (str.lower, str.upper):
        given = {
            change("startingOffsets"): "earLiEst",
            change("endingOffsets"): "laTest",
            change("startingOffsetsByTimestampStrategy"): "Latest",
            change("kafkaConsumer.pollTimeoutMs"): "1111",
            change("minPartitions"): "1111",
        }
        o = parse_source_options({"kafka.bootstrap.servers": "x:1", "subscribe": "a"} | given)
        assert (o.start.kind, o.end.kind, o.late_is_error) == ("earliest", "latest", False)
        assert (o.wait_ms, o.min_partitions) == (1111, 1111)


def test_names_of_options_have_no_case():
    given = {name: options[name].example for options, name in SHOWN if options is SOURCE_OPTIONS}
    names = ("maxOffsetsPerTrigger", "maxTriggerDelay", "fetchOffset.numRetries", "includeHeaders")
    one = {"kafka.bootstrap.servers": "localhost:1", "subscribe": "a"}
    one |= {name: given[name] for name in names}
    lower = {name.lower(): value for name, value in one.items()}
    upper = {name.upper(): value for name, value in one.items()}
    assert parse_source_options(one) == parse_source_options(lower) == parse_source_options(upper)


def test_all_wrong_options_are_in_one_error():
    wrong = {
        "kafka.fetch.min.byte": "1",
        "kafka.enable.auto.commit": "true",
        "kafka.enable.partition.eof": "true",
        "kafka.isolation.level": "serializable",
        "startingOffsets": "newest",
        "failOnDataLoss": "no",
        "minOffsetPerTrigger": "5",
    }
    with pytest.raises(BadOption) as caught:
        parse_source_options({"kafka.bootstrap.servers": "localhost:1"} | wrong)
    assert caught.value.what.startswith("8 options cannot be used: (1) ")
    assert [n for n in wrong if n.lower() not in caught.value.what.lower()] == []
    assert "exactly one of subscribe" in caught.value.what


def test_options_of_java_without_effect_are_named_in_one_warning(caplog):
    options = parse_source_options(
        {
            "kafka.bootstrap.servers": "localhost:1",
            "subscribe": "a",
            "kafka.max.poll.records": "500",
            "kafka.partition.assignment.strategy": "x.RangeAssignor",
            "kafka.exclude.internal.topics": "true",
            "kafka.retry.backoff.ms": "100",
            "kafka.receive.buffer.bytes": "65536",
            "kafka.request.timeout.ms": "9000",
            "kafka.default.api.timeout.ms": "9000",
            "kafka.fetch.min.bytes": "1",
        }
    )
    reader = StreamReader(options)
    assert reader._ask is reader._ask
    said = [r.getMessage() for r in caplog.records if "no effect" in r.getMessage()]
    assert said == [
        "these options have no effect on reading: kafka.max.poll.records,"
        " kafka.partition.assignment.strategy, kafka.retry.backoff.ms"
    ]


# Some options need another one.
WITH = {
    "topics": {"visibility": "batch"},
    "visibility": {"topic": "flights"},
    "idempotenceKey": {"decisionLog": "/decisions"},
    "kafka.auto.offset.reset": {"startingOffsets": "group", "kafka.group.id": "g"},
}


def parsed(options, more):
    """The checked options of a sink or a source that needs only `more`."""
    given = {"kafka.bootstrap.servers": "localhost:1"} | more
    if options is SINK_OPTIONS:
        return parse_sink_options(given)
    topics = {} if more.keys() & {"subscribePattern", "assign"} else {"subscribe": "flights"}
    return parse_source_options(topics | given)


SHOWN = [(options, name) for options in (SINK_OPTIONS, SOURCE_OPTIONS) for name in options]


@pytest.mark.parametrize(("options", "name"), SHOWN)
def test_the_example_of_each_option_is_accepted(options, name):
    written = "kafka.bootstrap.servers" if name == "kafka.*" else name
    assert parsed(options, WITH.get(name, {}) | {written: options[name].example})


@pytest.mark.parametrize(("options", "name"), [s for s in SHOWN if s[0][s[1]].default])
def test_the_default_of_each_option_is_its_value_if_it_is_not_given(options, name):
    shown, more = options[name], WITH.get(name, {})
    assert parsed(options, more | {name: shown.default}) == parsed(options, more)
    assert parsed(options, more | {name: shown.example}) != parsed(options, more)
