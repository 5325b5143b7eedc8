"""Does the installed package work beside this PySpark, and survive a crash? A plain script for
`make compat`: it imports only what `pip install .` and PySpark bring.
"""

import os
import sys
import tempfile
from pathlib import Path

import pyspark
from pyspark.errors import StreamingQueryException
from pyspark.sql import SparkSession

import kafka2pc
from kafka2pc.kafka.read.readers import read_topic
from kafka2pc.local.broker import LocalKafka
from kafka2pc.proof.crash_points import Crash, CrashPoint, arm

ROWS, FILES = 50, 3


def options(kafka, topic, **more):
    return {f"kafka.{k}": v for k, v in kafka.client_conf.items()} | {"topic": topic} | more


def stream(spark, kafka, folder, files):
    """Add files of numbered rows, each one a batch, and run the query until all are done."""
    source = folder / "source"
    source.mkdir(exist_ok=True)
    for n in files:
        (source / f"{n}.csv").write_text(
            "".join(f"{row}\n" for row in range(n * ROWS, (n + 1) * ROWS))
        )
    lines = (
        spark.readStream.schema("row long")
        .option("maxFilesPerTrigger", 1)
        .csv(str(source))
        .repartition(2)
    )
    writer = (
        lines.selectExpr("cast(row as string) value")
        .writeStream.format("kafka2pc")
        .trigger(availableNow=True)
    )
    query = writer.options(
        **options(kafka, "streamed", checkpointLocation=str(folder / "checkpoint"))
    ).start()
    if not query.awaitTermination(120):
        raise TimeoutError("the query was not done in two minutes")


def crash_in_stream(spark, kafka, folder, files):
    """The same, but the Python process of the driver is killed between two commits of a batch."""
    order = Crash(point=CrashPoint.AFTER_FIRST_COMMIT)
    arm(folder / "crash", order)
    try:
        stream(spark, kafka, folder, files)
    except StreamingQueryException:
        return
    raise AssertionError("the process was not killed")


def write(spark, kafka, folder):
    rows = spark.range(ROWS).selectExpr("cast(id as string) value")
    rows.write.format("kafka2pc").mode("append").options(
        **options(kafka, "written", idempotenceKey="one", decisionLog=str(folder / "log"))
    ).save()


def session(folder):
    os.environ |= {
        "PYSPARK_PYTHON": sys.executable,
        "SPARK_LOCAL_IP": "127.0.0.1",
        "KAFKA2PC_HISTORY": str(folder / "history"),
        "KAFKA2PC_CRASH": str(folder / "crash"),
    }
    builder = (
        SparkSession.builder.master("local[2]")
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
    )
    spark = builder.config("spark.sql.warehouse.dir", str(folder / "warehouse")).getOrCreate()
    spark.sparkContext.setLogLevel("OFF")  # the crash is intended
    return spark


def wrong(kafka, topic, rows):
    """What is not exactly once in `topic`, in words; empty if all is well."""
    seen = sorted(int(r.value) for r in read_topic(kafka.client_conf, topic))
    if seen == list(range(rows)):
        return ""
    return f"{topic}: {rows} rows expected, {len(seen)} seen, {len(set(seen))} of them different"


def main():
    with tempfile.TemporaryDirectory() as name, LocalKafka(progress=None) as kafka:
        folder, spark = Path(name), None
        for topic in ("streamed", "written"):
            kafka.create_topic(topic, partitions=2)
        try:
            spark = session(folder)
            # found by its name; register does no harm, and is needed where only the notebook knows
            # the package
            stream(spark, kafka, folder, range(FILES))
            kafka2pc.register(spark)
            crash_in_stream(spark, kafka, folder, range(FILES, FILES + 1))
            stream(spark, kafka, folder, range(FILES + 1, FILES + 2))  # the same checkpoint goes on
            for _ in range(2):  # the same key: the second time writes nothing
                write(spark, kafka, folder)
            found = wrong(kafka, "streamed", (FILES + 2) * ROWS) or wrong(kafka, "written", ROWS)
        finally:
            if spark:
                spark.stop()
    print(
        f"PySpark {pyspark.__version__}, kafka2pc {kafka2pc.__version__}: {found or 'exactly once'}"
    )
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
