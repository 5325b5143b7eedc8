"""Spark looks for modules whose name begins with `pyspark_`: where kafka2pc is installed,
`format("kafka2pc")` is there without `kafka2pc.register`.

Every Spark session of this Python imports this file when it looks up its first format, so it
imports nothing that Spark has not imported by then.
"""

from pyspark.sql.datasource import DataSource


class DefaultSource(DataSource):
    """`format("kafka2pc")`, fetched when it is used."""

    @classmethod
    def name(cls):
        return "kafka2pc"

    def __new__(cls, options):
        from kafka2pc.protocol.libraries import OWN, need

        need(*OWN)
        from kafka2pc.spark.datasource import Kafka2pc

        return Kafka2pc(options)
