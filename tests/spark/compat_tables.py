"""Do Spark's own connectors read what the participants write? A plain script for `make compat`: it
needs a PySpark for which both Delta Lake and Iceberg have a connector.

A query writes micro-batches into a topic and a table, is killed with its JVM between the two
commits, and started again. Then Spark reads the table, compacts it, and reads it again.
"""

import os
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

import pyarrow as pa
import pyspark
from pyspark.sql import SparkSession

import kafka2pc
from kafka2pc.kafka.read.whole_topic import read_ended
from kafka2pc.local.broker import LocalKafka
from kafka2pc.local.jars import fetch_delta, fetch_jars
from kafka2pc.proof.crash_points import Crash, CrashPoint, arm, watched

SPARK = ".".join(pyspark.__version__.split(".")[:2])
ICEBERG = ("org.apache.iceberg", f"iceberg-spark-runtime-{SPARK}_2.13", "1.11.0")
ROWS = 60  # of a micro-batch
SCHEMA = pa.schema(
    {
        "id": pa.int64(),
        "day": pa.date32(),
        "at": pa.timestamp("us", "UTC"),
        "price": pa.decimal128(12, 2),
        "ratio": pa.float64(),
        "tags": pa.list_(pa.string()),
    }
)
COLUMNS = (
    "id",
    "date_add(date'1969-12-30', cast(id % 5 as int)) day",
    "timestamp_micros(id * 1000001 - 5) at",
    "cast(id / 3 as decimal(12, 2)) price",
    "if(id % 7 = 0, double('NaN'), id / 7) ratio",
    "array(cast(id as string), null) tags",
)


def catalog_of(folder):
    place = f"sqlite:///{folder}/catalog.db"
    return {"type": "sql", "uri": place, "warehouse": f"file://{folder}/warehouse"}


def create(kind, folder):
    if kind == "delta":
        from deltalake import DeltaTable

        DeltaTable.create(f"{folder}/table", SCHEMA, partition_by=["day"])
        return
    from pyiceberg.catalog import load_catalog
    from pyiceberg.transforms import DayTransform

    (Path(folder) / "warehouse").mkdir()
    catalog = load_catalog("default", **catalog_of(folder))
    catalog.create_namespace("db")
    with catalog.create_table("db.t", SCHEMA).update_spec() as spec:
        spec.add_identity("day")
        spec.add_field("at", DayTransform())


def participant(kind, folder):
    columns = tuple(SCHEMA.names)
    if kind == "delta":
        from kafka2pc.stores.delta import DeltaParticipant

        return DeltaParticipant(f"{folder}/table", columns=columns)
    from kafka2pc.stores.iceberg import IcebergParticipant

    return IcebergParticipant("db.t", catalog=catalog_of(folder), columns=columns)


# -- in the process that is killed --


def write(kind, folder, servers, topic):
    spark = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false")
    spark = spark.getOrCreate()
    ids = spark.readStream.schema("id long").option("maxFilesPerTrigger", 1)
    rows = ids.csv(f"{folder}/source").repartition(2)
    options = {"kafka.bootstrap.servers": servers, "topic": topic}
    both = kafka2pc.exactly_once(options, participants=[participant(kind, folder)], in_order=True)
    query = (
        rows.selectExpr(*COLUMNS, "cast(id as string) value")
        .writeStream.foreachBatch(both)
        .option("checkpointLocation", f"{folder}/checkpoint")
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()


# -- in a process with the connectors --


def read(kind, folder):
    conf = fetch_delta(pyspark.__version__)
    if kind == "iceberg":
        jars = fetch_jars("-".join(ICEBERG[1:]), [ICEBERG]).glob("*.jar")
        conf = {"spark.jars": ",".join(map(str, jars))}
    conf |= {"spark.ui.enabled": "false", "spark.sql.session.timeZone": "UTC"}
    spark = SparkSession.builder.master("local[2]").config(map=conf).getOrCreate()
    if kind == "delta":
        table = lambda: spark.read.format("delta").load(f"{folder}/table")
    else:
        from pyiceberg.catalog import load_catalog

        place = load_catalog("default", **catalog_of(folder)).load_table("db.t").metadata_location
        table = lambda: spark.read.format("iceberg").load(place)
    check(spark, table())
    if kind == "delta":
        spark.sql(f"optimize delta.`{folder}/table`")
        check(spark, table())


def check(spark, table):
    """Each row once, with all of its values; and no filter misses one by wrong statistics."""
    wanted = spark.range(3 * ROWS).selectExpr(*COLUMNS)
    for one, other in ((table, wanted), (wanted, table)):
        left = one.select(wanted.columns).exceptAll(other.select(wanted.columns)).collect()
        assert not left, left[:3]
    for where in (
        "id = 119",
        "day = date'1970-01-01'",
        "at >= timestamp_micros(178 * 1000001 - 5)",
        "at <= timestamp_micros(-5)",
        "price > 59",
        "ratio > 1000",
        "isnan(ratio)",
    ):
        assert table.filter(where).count() == wanted.filter(where).count() > 0, where


# -- in the process that kills and counts --


def run(*words, **env):
    """This script in another process: the number of the signal that ended it, or 0."""
    command = [sys.executable, __file__, *map(str, words)]
    env |= {"PYSPARK_PYTHON": sys.executable}
    done = subprocess.run(command, env=os.environ | env, capture_output=True, text=True)
    if done.returncode > 0:
        raise AssertionError(f"{words[0]}: {done.stderr[-3000:]}")
    return -done.returncode


def main():
    for kind in ("delta", "iceberg"):
        with tempfile.TemporaryDirectory() as folder, LocalKafka(progress=None) as kafka:
            (Path(folder) / "source").mkdir()
            for n in range(3):
                ids = "".join(f"{i}\n" for i in range(n * ROWS, (n + 1) * ROWS))
                Path(f"{folder}/source/{n}.csv").write_text(ids)
            create(kind, folder)
            topic = kafka.create_topic("rows", partitions=2)
            point = CrashPoint.BEFORE_FIRST_COMMIT
            arm(f"{folder}/crash", Crash(point=point, batch_id=1, participant=kind))
            env = watched(f"{folder}/crash") | {"KAFKA2PC_HISTORY": f"{folder}/history"}
            words = ("write", kind, folder, kafka.bootstrap_servers, topic)
            assert (run(*words, **env), run(*words)) == (signal.SIGKILL, 0)
            sent = Counter(int(r.value) for r in read_ended(kafka.client_conf, topic))
            assert sent == Counter(range(3 * ROWS)), sent
            run("read", kind, folder)
            print(f"    {kind}: killed, each row once in topic and table, by Spark's own reader")


if __name__ == "__main__":
    {"write": write, "read": read}[sys.argv[1]](*sys.argv[2:]) if sys.argv[1:] else main()
