"""A batch write whose committer dies when all is done, and before Spark has its answer."""

import os

from pyspark.sql import SparkSession

from kafka2pc.spark.datasource import Kafka2pc
from kafka2pc.spark.sink.batch_writer import BatchWriter


class Dying(Kafka2pc):
    """`format("dying")`."""

    @classmethod
    def name(cls) -> str:
        return "dying"

    def writer(self, schema, overwrite):
        return DyingWriter(**vars(super().writer(schema, overwrite)))


class DyingWriter(BatchWriter):
    """Spark's committer calls `commit`, and reads the answer when it returns."""

    def commit(self, messages: list):
        super().commit(messages)
        os._exit(1)


def write(spark: SparkSession, rows: int, options: dict) -> dict:
    """A command of `proof.spark_job`."""
    spark.dataSource.register(Dying)
    frame = spark.range(rows, numPartitions=2).selectExpr("cast(id as string) value")
    frame.write.format("dying").mode("append").options(**options).save()
    return {}
