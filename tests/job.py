"""The job under test: a process with a Spark driver that reads commands from stdin, one JSON object a line, and answers with one line on stdout.

So one JVM serves many queries, a crash of a Python process needs no new JVM, and the test survives whatever dies here. story.py is the other end.
Its first argument is a JSON object, the same as the command `session`.
"""
import json
import os
import sys
import time
from pathlib import Path

from pyspark.sql import SparkSession, functions as F
from pyspark.sql.datasource import DataSourceStreamArrowWriter

import kafka2pc
from kafka2pc.sink import Kafka2pc

COLUMNS = "row long, key string"
# Many short lives: a JVM that starts fast is better here than one that gets fast.
FAST_START = ("-XX:+IgnoreUnrecognizedVMOptions -XX:+UseSerialGC -XX:TieredStopAtLevel=1 "
              "-XX:+UnlockDiagnosticVMOptions -XX:-BytecodeVerificationRemote")
SELECT = ["cast(row as string) value", "key"]


# -- faults: the same sink, with something that goes wrong in its tasks --


def this_partition():
    from pyspark import TaskContext

    return TaskContext.get().partitionId()


def once(path):
    """True for the first who asks, in whatever process. The file holds its pid."""
    try:
        with open(path, "x") as sign:
            sign.write(f"{os.getpid()}\n")
    except FileExistsError:
        return False
    return True


def stall(batches, partition, sign, until, rows=1):
    """The task of `partition` stops after its first `rows` rows, shows `sign`, and goes on when the file `until` appears. Once."""
    for n, batch in enumerate(batches):
        if n == 0 and this_partition() == partition and once(sign):
            if rows:
                yield batch.slice(0, rows)
            while not os.path.exists(until):
                time.sleep(0.05)
            batch = batch.slice(rows)
        yield batch


def fail(batches, partition, sign, after=None):
    """The task of `partition` raises after its last row: once, and not before the file `after` exists."""
    yield from batches
    if this_partition() == partition and once(sign):
        while after and not os.path.exists(after):
            time.sleep(0.05)
        raise RuntimeError("a fault on purpose")


FAULTS = {"stall": stall, "fail": fail}


class Faulty(Kafka2pc):
    """`format("faulty")`: kafka2pc with one more option, the faults as JSON."""

    @classmethod
    def name(cls):
        return "faulty"

    def __init__(self, options):
        options = {k: v for k, v in options.items()}
        self.faults = json.loads(options.pop("faults"))
        super().__init__(options)

    def streamWriter(self, schema, overwrite):
        return FaultyWriter(super().streamWriter(schema, overwrite), self.faults)


class FaultyWriter(DataSourceStreamArrowWriter):
    def __init__(self, writer, faults):
        self.writer, self.faults = writer, faults

    def write(self, iterator):
        if "return early" in self.faults:
            return self.return_early(iterator)
        for name, arguments in self.faults.items():
            iterator = FAULTS[name](iterator, **arguments)
        return self.writer.write(iterator)

    def return_early(self, iterator):
        """Rule 5 switched off: a batch that is to be drained is not read. The wait is as long as a look into a log could take."""
        if self.writer.plan.mode.value == "write":
            return self.writer.write(iterator)
        time.sleep(self.faults["return early"])
        return self.writer.write(iter(()))

    def commit(self, messages, batch_id):
        self.writer.commit(messages, batch_id)

    def abort(self, messages, batch_id):
        self.writer.abort(messages, batch_id)


# -- commands --


def session(master="local[2]", remote=None, conf=None):
    """A new session; the old one, if any, ends. The JVM stays the same."""
    old = None if remote else SparkSession.getActiveSession()
    if old:
        old.stop()
    builder = SparkSession.builder.remote(remote) if remote else SparkSession.builder.master(master)
    ours = {"spark.ui.enabled": "false", "spark.sql.shuffle.partitions": "2", "spark.sql.session.timeZone": "UTC",
            "spark.sql.streaming.stopTimeout": "20s", "spark.driver.memory": "2g", "spark.driver.extraJavaOptions": FAST_START,
            "spark.python.task.killTimeout": "60s"}  # Spark gives up a worker of a failed job after 2 s: here zombies live on
    for name, value in (ours | (conf or {})).items():
        builder = builder.config(name, value)
    spark = builder.getOrCreate()
    kafka2pc.register(spark)
    spark.dataSource.register(Faulty)
    return spark


def jvm_pid(spark):
    """0 over Spark Connect: its client sees no JVM."""
    return 0 if spark.__module__.startswith("pyspark.sql.connect") else spark._jvm.java.lang.ProcessHandle.current().pid()


def shaped(df, shape):
    """What happens to the rows between source and sink."""
    at = F.timestamp_seconds("row")
    return {"plain": lambda: df,
            "rows": lambda: df.where("row is not null"),
            "dedup": lambda: df.dropDuplicates(["key"]),
            "count": lambda: df.groupBy("key").count(),
            "window": lambda: df.withColumn("at", at).withWatermark("at", "0 seconds").groupBy(F.window("at", "10 seconds")).count()}[shape]()


def rows(df, what):
    df = shaped(df.selectExpr(*what.get("before", ["*"])), what.get("shape", "plain"))
    if what.get("partitions"):
        df = df.repartition(what["partitions"])
    return df.selectExpr(*what.get("select", SELECT))


def stream(spark, source, options, seconds=120, mode="append", conf=None, stop_at=None, **what):
    """Run a query over a folder of files, one file a batch, until all are done or the file `stop_at` appears. Answers with the batches that ended."""
    for name, value in (conf or {}).items():
        spark.conf.set(name, value)
    try:
        files = spark.readStream.schema(COLUMNS).option("maxFilesPerTrigger", 1).csv(source)
        writer = rows(files, what).writeStream.format("faulty" if "faults" in options else "kafka2pc").outputMode(mode).options(**options)
        query = writer.trigger(availableNow=True).start()
        try:
            wait(query, stop_at, seconds)
        finally:
            query.stop()
    finally:
        for name in conf or {}:
            spark.conf.unset(name)
    return {"batches": [p["batchId"] for p in query.recentProgress]}


def wait(query, stop_at, seconds):
    if stop_at is None:
        if not query.awaitTermination(seconds):
            raise TimeoutError(f"the query was not done after {seconds} s")
        return
    end = time.monotonic() + seconds
    while not Path(stop_at).exists():
        if time.monotonic() > end or not query.isActive:
            raise TimeoutError(f"{stop_at} did not appear while the query ran: {query.exception()}")
        time.sleep(0.05)


def write(spark, source, options, mode="append", **what):
    """One batch write of all files of a folder."""
    rows(spark.read.schema(COLUMNS).csv(source), what).write.format("kafka2pc").mode(mode).options(**options).save()
    return {}


def answer(spark, command):
    do = command.pop("do")
    if do == "session":
        spark = session(**command)
        return spark, {"jvm": jvm_pid(spark)}
    return spark, {"stream": stream, "write": write}[do](spark, **command)


def serve(commands, answers):
    spark = None
    for line in commands:
        try:
            spark, said = answer(spark, json.loads(line))
        except Exception as e:  # whatever it is: the test reads it
            said = {"error": f"{type(e).__name__}: {e}"}
        print(json.dumps(said), file=answers, flush=True)


if __name__ == "__main__":
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what others print must not look like an answer
    serve(sys.stdin, answers)
