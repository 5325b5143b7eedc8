"""The query of the upgrade tests. It ran with version 0.1.0 to make the fixtures, and it is
restarted from them with the version under test.
"""

SIZE = 20  # rows of a batch
SOURCE = {
    "rowsPerBatch": SIZE,
    "numPartitions": 2,
    "startTimestamp": 1_700_000_000_000,
    "advanceMillisPerBatch": 1000,
}
SELECT = (
    "cast(value as string) value",
    "cast(spark_partition_id() as string) key",
    "cast(value div 2 % 2 as int) partition",
)


def run(spark, options: dict) -> dict:
    """All batches that are not done, and one more. The rows of a batch follow from its number, and
    its checkpoint names no path.
    """
    rows = spark.readStream.format("rate-micro-batch").options(**SOURCE).load().selectExpr(*SELECT)
    query = (
        rows.writeStream.format("kafka2pc").options(**options).trigger(availableNow=True).start()
    )
    try:
        if not query.awaitTermination(120):
            raise TimeoutError("the query was not done after 120 s")
    finally:
        query.stop()
    return {"batches": [p["batchId"] for p in query.recentProgress]}
