"""Source options: what contradicts, or has no such value, is refused without a broker."""

import pytest

from kafka2pc.protocol.errors import (
    BadOption,
)
from kafka2pc.spark.source.options import parse_source_options


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
        ({"subscribe": "a", "minOffsetsPerTrigger": "5"}, "unknown option"),
        ({"subscribe": "a", "kafka.key.deserializer": "x"}, "cannot be honoured"),
        ({"subscribe": "a", "startingTimestamp": "1", "startingOffsets": "latest"}, "contradict"),
    ],
)
def test_bad_options_are_refused_without_a_broker(options, said):
    with pytest.raises(BadOption, match=said):
        parse_source_options({"kafka.bootstrap.servers": "localhost:1"} | options)
