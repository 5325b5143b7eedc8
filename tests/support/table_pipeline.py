"""Events in Kafka -> how many of each -> a topic and a table under one decision. A script, so that
it can be killed: `run SERVERS EVENTS COUNTS URL FOLDER` runs the query over all events; `read URL`
prints the rows of a Delta table as Spark's own connector finds them.
"""

import json
import sys

from pyspark.sql import SparkSession

import kafka2pc
from kafka2pc.local.jars import fetch_jars

# For the PySpark of constraints.txt. Of its 30 jars these are not Spark's own.
DELTA = ("io.delta", "delta-spark_4.2_2.13", "4.4.0")
OURS = ("delta-", "antlr4-runtime", "unitycatalog-")


def session(**conf):
    builder = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false")
    builder = builder.config("spark.sql.shuffle.partitions", "2")
    for name, value in conf.items():
        builder = builder.config(name.replace("__", "."), value)
    return builder.getOrCreate()


def run(servers, events, counts, url, folder):
    from kafka2pc.stores.delta import DeltaParticipant

    source = {"kafka.bootstrap.servers": servers, "subscribe": events}
    source |= {"startingOffsets": "earliest", "maxOffsetsPerTrigger": "300"}
    read = session().readStream.format("kafka2pc").options(**source).load()
    found = read.selectExpr("cast(value as string) key").groupBy("key").count()
    table = DeltaParticipant(url, columns=("key", "count"))
    write = kafka2pc.exactly_once(
        {"kafka.bootstrap.servers": servers, "topic": counts}, participants=[table]
    )
    query = (
        found.selectExpr("key", "count", "cast(count as string) value")
        .writeStream.outputMode("update")
        .foreachBatch(write)
        .option("checkpointLocation", f"{folder}/checkpoint")
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()


def read(url):
    folder = fetch_jars("-".join(DELTA[1:]), [DELTA])
    jars = [str(jar) for jar in folder.glob("*.jar") if jar.name.startswith(OURS)]
    spark = session(
        spark__jars=",".join(jars),
        spark__sql__extensions="io.delta.sql.DeltaSparkSessionExtension",
        spark__sql__catalog__spark_catalog="org.apache.spark.sql.delta.catalog.DeltaCatalog",
    )
    rows = spark.read.format("delta").load(url).collect()
    print(json.dumps([[row["key"], row["count"]] for row in rows]))


if __name__ == "__main__":
    {"run": run, "read": read}[sys.argv[1]](*sys.argv[2:])
