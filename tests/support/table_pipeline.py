"""Events in Kafka -> how many of each -> a topic and a table under one decision. A script, so that
it can be killed: `run SERVERS EVENTS COUNTS URL FOLDER` runs the query over all events; `read URL`
prints the rows of a Delta table as Spark's own connector finds them.
"""

import json
import sys

import pyspark
from pyspark.sql import SparkSession

import kafka2pc
from kafka2pc.local.jars import fetch_delta


def session(more=()):
    conf = {"spark.ui.enabled": "false", "spark.sql.shuffle.partitions": "2"} | dict(more)
    return SparkSession.builder.master("local[2]").config(map=conf).getOrCreate()


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
    spark = session(fetch_delta(pyspark.__version__))
    rows = spark.read.format("delta").load(url).collect()
    print(json.dumps([[row["key"], row["count"]] for row in rows]))


if __name__ == "__main__":
    {"run": run, "read": read}[sys.argv[1]](*sys.argv[2:])
