"""What `format("kafka2pc")` reads through Spark is what Spark's own `format("kafka")` reads: a case
for each kind of place. test_both_places.py asks for all of them without Spark.
"""

import ast
import time
import uuid
from pathlib import Path

import pytest
from both_formats import Answers, add_partition, in_json, recorded, send
from compat import NEWEST, OLDEST
from spark_own import RECORDED

pytestmark = pytest.mark.never_unsteady
AGAIN = "run `make spark-own`"
START_MS = int(time.time() * 1000) - 60_000


def in_spark(test):
    """It needs a Spark session."""
    for mark in (pytest.mark.full, pytest.mark.kafka, pytest.mark.spark):
        test = mark(test)
    return test


@pytest.fixture
def topic(kafka):
    """a, b and c, one in each of three partitions, with the times 1, 2 and 3 s after the start."""
    name = f"both-{uuid.uuid4().hex[:8]}"
    kafka.create_topic(name, partitions=3)
    for partition, value in enumerate("abc"):
        send(kafka, name, [value], partition, timestamp_ms=START_MS + 1000 * (partition + 1))
    return name


@in_spark
def test_each_action_in_spark_reads_to_the_end_of_its_moment(either_format, kafka, topic):
    frame = either_format.load(topic)
    send(kafka, topic, ["d"])
    assert either_format.read(frame) == ["a", "b", "c", "d"]
    add_partition(kafka, topic, 3)
    send(kafka, topic, ["e"], partition=3)
    assert either_format.read(frame) == ["a", "b", "c", "d", "e"]
    assert either_format.read(frame.union(frame)) == sorted("abcde" * 2)
    assert either_format.answers.add(frame.count()) == 5


@in_spark
def test_a_batch_read_begins_and_ends_where_options_say(either_format, topic):
    places = [
        {"startingOffsets": in_json(topic, [1, 0, -2]), "endingOffsets": in_json(topic, [1, 1, 0])},
        {"startingTimestamp": str(START_MS + 2000), "endingTimestamp": str(START_MS + 3000)},
        {"startingOffsetsByTimestamp": in_json(topic, [START_MS] * 3), "minPartitions": "6"},
        {"subscribePattern": f"{topic}.*", "endingOffsets": in_json(topic, [-1, 0, -1])},
    ]
    places[1]["startingOffsetsByTimestampStrategy"] = "latest"
    found = [either_format.values(topic, **more) for more in places]
    assert found == [["b"], ["b"], ["a", "b", "c"], ["a", "c"]]


@in_spark
def test_a_stream_begins_at_a_time_and_goes_on_after_a_restart(
    either_format, kafka, topic, tmp_path
):
    more = {
        "subscribePattern": f"{topic}.*",
        "startingTimestamp": str(START_MS + 1500),
        "startingOffsetsByTimestampStrategy": "latest",
    }
    assert either_format.stream_values(tmp_path, topic, **more) == [["b", "c"]]
    assert either_format.stream_values(tmp_path, topic, **more) == []
    send(kafka, topic, ["d"])
    assert either_format.stream_values(tmp_path, topic, **more) == [["d"]]


@in_spark
@pytest.mark.parametrize("stream", [False, True])
def test_a_schema_cannot_be_chosen(either_format, topic, tmp_path, stream):
    spark = either_format.spark
    reader = (spark.readStream if stream else spark.read).format(either_format.name)
    reader = reader.options(**either_format.options(topic)).schema("name string")
    with either_format.refuses("(?i)schema"):
        if stream:
            writer = reader.load().writeStream.format("noop")
            writer = writer.option("checkpointLocation", str(tmp_path))
            writer.trigger(availableNow=True).start().awaitTermination(60)
        else:
            reader.load().collect()


# -- the record --


def test_the_oldest_and_the_newest_pyspark_are_recorded():
    assert RECORDED.keys() == {OLDEST, NEWEST}, f"choose versions in tools/spark_own.py; {AGAIN}"
    assert recorded().keys() == set(RECORDED.values()), AGAIN


def test_each_recorded_case_is_a_test():
    folder, cases = Path(__file__).parent, {c for cases in recorded().values() for c in cases}
    functions = {
        f"{file.stem}::{node.name}"
        for file in folder.glob("test_*.py")
        for node in ast.parse(file.read_text(encoding="utf-8")).body
        if isinstance(node, ast.FunctionDef)
    }
    assert {case.partition("[")[0] for case in cases} <= functions, AGAIN


def test_an_answer_is_compared_with_each_recorded_version():
    answers = Answers({"1": [["a"], "refused"], "2": [["b"], "refused"]})
    with pytest.raises(AssertionError, match="answers this in PySpark 2: .'b'."):
        answers.add(["a"])


def test_a_difference_by_design_is_stated_and_must_exist():
    answers = Answers({"1": [["a"], "refused"]})
    assert answers.add([], own=["a"]) == []
    with pytest.raises(AssertionError, match="nothing differs here any more"):
        answers.add("refused", own="refused")


def test_as_many_answers_as_sparks_own_gave_are_needed():
    with pytest.raises(AssertionError, match="asked more in PySpark 1: .'refused'."):
        Answers({"1": ["refused"]}).check_all_were_asked()
    with pytest.raises(AssertionError, match="it was not asked"):
        Answers({"1": []}).add("refused")
