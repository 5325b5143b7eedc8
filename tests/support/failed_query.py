"""Queries that fail with a known error of kafka2pc, and what Spark makes of it.

`python tests/support/failed_query.py FOLDER` writes the message of each into a file: once for each
PySpark, tests/fixtures/failed-queries has them.
"""

import re
import sys
import tempfile
from pathlib import Path

from kafka2pc.protocol.error_fields import Affected, Place
from kafka2pc.protocol.errors import LostTransaction, OutcomeUnknown

LOST = LostTransaction(
    "batch 0 of query q: kafka2pc-q-0 (producer id 1000, epoch 3): 12 records in orders-0: 12 at"
    " offsets 100 to 111",
    query_id="q",
    batch_id=0,
    transactions=(
        Affected(
            transactional_id="kafka2pc-q-0",
            producer_id=1000,
            epoch=3,
            places=(
                Place(topic="orders", partition=0, records=12, first_offset=100, last_offset=111),
            ),
        ),
    ),
)
BEFORE = OutcomeUnknown("batch 0 of query q: no clear answer", query_id="q", batch_id=0)


def rows(spark):
    return spark.readStream.format("rate").option("rowsPerSecond", 5).load()


def lose(before=BEFORE, lost=LOST):
    """An error whose cause is another one of ours."""
    try:
        raise before
    except OutcomeUnknown as e:
        raise lost from e


def in_foreach_batch(spark):
    return rows(spark).writeStream.foreachBatch(lambda df, batch_id: lose())


def in_sink(spark, abort_fails=False):
    """In `commit` of a sink in Python, and then in its `abort`."""
    from pyspark.sql.datasource import DataSource, DataSourceStreamWriter, WriterCommitMessage

    before, lost = BEFORE, LOST

    class Writer(DataSourceStreamWriter):
        def write(self, iterator):
            return WriterCommitMessage()

        def commit(self, messages, batchId):
            try:
                raise before
            except Exception as e:
                raise lost from e

        def abort(self, messages, batchId):
            if abort_fails:
                raise before

    class Failing(DataSource):
        @classmethod
        def name(cls):
            return "failing"

        def streamWriter(self, schema, overwrite):
            return Writer()

    spark.dataSource.register(Failing)
    return rows(spark).writeStream.format("failing")


def failure(writer, checkpoint):
    """The exception of a query that fails."""
    query = writer.option("checkpointLocation", str(checkpoint)).start()
    try:
        query.awaitTermination(120)
    except Exception as e:
        return e
    raise AssertionError("the query did not fail")


def steady(text):
    """Without what is another one in each run, and the folders of this machine."""
    text = re.sub(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", "ID", text)
    text = re.sub(r'"/\S*/site-packages/', '"/site-packages/', text)
    text = re.sub(r'"/\S*/(tests|kafka2pc)/', r'"/\1/', text)
    return re.sub(r"checkpointLocation=[^],]*", "checkpointLocation=/checkpoint", text)


def main(folder):
    import pyspark
    from pyspark.sql import SparkSession

    spark = SparkSession.builder.master("local[1]").config("spark.ui.enabled", False).getOrCreate()
    kinds = {"foreachBatch": in_foreach_batch}
    if pyspark.__version__ >= "4":
        kinds["sink"] = in_sink
    for name, start in kinds.items():
        with tempfile.TemporaryDirectory() as place:
            text = str(failure(start(spark), place))
        Path(folder, f"{pyspark.__version__}-{name}.txt").write_text(steady(text), "utf-8")


if __name__ == "__main__":
    main(sys.argv[1])
