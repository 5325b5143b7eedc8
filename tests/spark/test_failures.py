"""What a failed query of Spark says, and what `error_of` makes of it."""

import os
import subprocess
import sys
import traceback
from pathlib import Path

import nbformat
import pytest
from failed_query import BEFORE, LOST, failure, in_foreach_batch, in_sink, rows

import kafka2pc
from kafka2pc import error_of
from kafka2pc.protocol.error_fields import FIELDS
from kafka2pc.protocol.errors import BadOption, LostTransaction, OutcomeUnknown

ROOT = Path(__file__).parents[2]
RECORDED = sorted((ROOT / "tests/fixtures/failed-queries").glob("*.txt"))
GREP = "grep -B 2 -A 1 'is data at risk' | tail -n 4"  # of the page Errors


def is_lost(error):
    assert type(error) is LostTransaction and str(error) == str(LOST)
    assert [getattr(error, name) for name in FIELDS] == [getattr(LOST, name) for name in FIELDS]
    assert error.records == 12 and error.partitions[0].last_offset == 111
    return True


def test_five_releases_are_recorded():
    assert len({path.name.partition("-")[0] for path in RECORDED}) == 5


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.stem)
def test_the_text_of_each_release_is_read(path):
    text = path.read_text("utf-8")
    assert is_lost(error_of(text)) and is_lost(error_of(f"{text}\n{text}"))
    four = subprocess.run(GREP, shell=True, input=text, text=True, capture_output=True).stdout
    assert four.partition("[")[2] == str(LOST).partition("[")[2] + "\n"


@pytest.fixture(scope="module")
def spark():
    from pyspark.sql import SparkSession

    session = (
        SparkSession.builder.master("local[2]").config("spark.ui.enabled", False).getOrCreate()
    )
    kafka2pc.register(session)
    yield session
    session.stop()


@pytest.mark.spark
@pytest.mark.parametrize("start", [in_foreach_batch, in_sink])
def test_an_error_and_its_fields_come_back_from_a_failed_query(spark, start, tmp_path):
    e = failure(start(spark), tmp_path)
    assert type(e).__name__ == "StreamingQueryException"
    assert is_lost(error_of(e)) and is_lost(error_of(str(e)))
    assert is_lost(error_of("".join(traceback.format_exception(e))))


@pytest.mark.spark
def test_the_java_stack_has_the_error_if_the_abort_fails_too(spark, tmp_path):
    e = failure(in_sink(spark, abort_fails=True), tmp_path)
    assert error_of(str(e)) is None
    assert type(error_of(e)) is OutcomeUnknown and error_of(e).what == BEFORE.what


@pytest.mark.spark
def test_an_option_is_refused_with_its_code(spark, tmp_path):
    options = {"kafka.bootstrap.servers": "127.0.0.1:1", "topic": "t", "kafka.acks": "1"}
    values = rows(spark).selectExpr("cast(value as string) value")
    e = failure(values.writeStream.format("kafka2pc").options(**options), tmp_path)
    found = error_of(e)
    assert type(found) is BadOption and found.what.startswith("kafka.acks=1: ")
    assert found.risk == BadOption.risk and "Moving over" in found.action
    assert error_of(e.__context__).what == found.what, "the exception of Py4J has it, too"
    with pytest.raises(Exception) as caught:
        batch = spark.range(1).selectExpr("cast(id as string) value").write.mode("append")
        batch.format("kafka2pc").options(**options).save()
    assert str(error_of(caught.value)) == str(found)


DYING = """
import sys
import kafka2pc
from failed_query import in_sink
from pyspark.sql import SparkSession

spark = SparkSession.builder.master("local[1]").config("spark.ui.enabled", False).getOrCreate()
query = in_sink(spark).option("checkpointLocation", sys.argv[1]).start()
"""
END = """
try:
    query.awaitTermination()
except Exception as e:
    if error := kafka2pc.error_of(e):
        e.add_note(str(error))
    raise
"""


@pytest.mark.spark
def test_a_script_can_end_with_the_four_lines(tmp_path):
    """The page Errors shows END."""
    page = nbformat.read(ROOT / "nbs/guide/05_errors.ipynb", 4)
    assert any(END.strip() in cell.source for cell in page.cells)
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests/support")])
    done = subprocess.run(
        [sys.executable, "-c", DYING + END, str(tmp_path)],
        env=os.environ | {"PYTHONPATH": paths, "PYSPARK_PYTHON": sys.executable},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1 and done.stderr.endswith(f"\n{LOST}\n"), done.stderr[-4000:]
    assert "StreamingQueryException: [STREAM_FAILED]" in done.stderr
    found = subprocess.run(GREP, shell=True, input=done.stderr, text=True, capture_output=True)
    assert found.stdout == f"{LOST}\n"
