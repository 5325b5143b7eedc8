"""Does the installed package work beside this PySpark, and survive crashes? A plain script for
`make compat`: it imports only what the wheel and PySpark bring.

For each way to write, a query is killed at three points, each time together with its JVM, and
started again from its checkpoint; then an independent consumer counts. The query of `foreachBatch`
keeps state: each micro-batch adds one to the count of every key. From Spark 4.3 on the format is
tried once more with pipelined workers, Unix sockets and speculation.
"""

import os
import platform
import signal
import sys
import tempfile
import time
from collections import Counter
from importlib.metadata import version
from pathlib import Path

import pyspark
from pyspark.sql import SparkSession

import kafka2pc
from kafka2pc.kafka.read.whole_topic import read_ended
from kafka2pc.local.broker import LocalKafka
from kafka2pc.proof.child_process import ChildProcess, until
from kafka2pc.proof.crash_points import Crash, CrashPoint, arm
from kafka2pc.protocol.errors import TwoPhaseError

KEYS = 40  # rows of a micro-batch
KILLS = {
    CrashPoint.BEFORE_DECISION: "after the pre-commit, before the decision",
    CrashPoint.AFTER_FIRST_COMMIT: "between the two commits",
    CrashPoint.BEFORE_COMMIT_LOG: "after both commits, before Spark records the batch",
}
FORMAT, DOOR, PIPELINED = "format", "foreachBatch", "pipelined-workers"
# Many short runs: a JVM that starts fast is better here than one that gets fast.
FAST_START = "-XX:+UseSerialGC -XX:TieredStopAtLevel=1 -Xshare:auto"
VERSION = tuple(map(int, pyspark.__version__.split(".")[:2]))
HAS_FORMAT = VERSION >= (4, 1)
# What Spark 4.3 has new between JVM and worker, and copies of tasks, which need two executors.
NEW_WORKERS = {
    "spark.master": "local-cluster[2,1,1024]",
    "spark.executor.memory": "1g",
    "spark.executor.extraJavaOptions": FAST_START,
    "spark.python.udf.pipelined.enabled": "true",
    "spark.python.unix.domain.socket.enabled": "true",
    "spark.speculation": "true",
    "spark.speculation.interval": "10ms",
    "spark.speculation.multiplier": "1.01",
    "spark.speculation.quantile": "0.1",
    "spark.speculation.minTaskRuntime": "0ms",
}


# -- in the process that is killed --


def session(folder, way=FORMAT):
    conf = {
        "spark.master": "local[2]",
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.driver.extraJavaOptions": FAST_START,
        "spark.sql.shuffle.partitions": "2",
        "spark.sql.warehouse.dir": f"{folder}/warehouse",
    }
    builder = SparkSession.builder
    for name, value in (conf | (NEW_WORKERS if way == PIPELINED else {})).items():
        builder = builder.config(name, value)
    return builder.getOrCreate()


def by_format(lines, options):
    """Plain rows: key and number of the micro-batch."""
    values = lines.repartition(2).selectExpr("concat(key, ' ', batch) value")
    return values.writeStream.format("kafka2pc").options(**options)


def by_door(lines, options):
    """Key and count so far, which is the number of the micro-batch, if no state is lost."""
    counts = lines.groupBy("key").count().selectExpr("concat(key, ' ', count) value")
    return counts.writeStream.outputMode("update").foreachBatch(kafka2pc.exactly_once(options))


def stream(way, folder, options, point, batch):
    """Run the query until all files are written, or until it is killed at `point` of `batch`."""
    spark = session(folder, way)
    if point:
        order = Crash(point=CrashPoint[point], batch_id=batch, pid=os.getpid())
        arm(os.environ["KAFKA2PC_CRASH"], order)
    lines = spark.readStream.schema("key int, batch int").option("maxFilesPerTrigger", 1)
    writer = (by_door if way == DOOR else by_format)(lines.csv(f"{folder}/source"), options)
    place = f"{folder}/checkpoint"
    query = writer.option("checkpointLocation", place).trigger(availableNow=True).start()
    if not query.awaitTermination(120):
        raise TimeoutError("the query was not done in two minutes")
    write_twice(spark, way, folder, options)


def write_twice(spark, way, folder, options):
    """A batch job runs twice under one key."""
    rows = spark.range(KEYS).selectExpr("concat(id, ' 1') value")
    options = options | {"topic": f"{way}-job", "decisionLog": f"{folder}/decisions"}
    if way != DOOR:
        kafka2pc.register(spark)  # not needed here, and does no harm
        for _ in range(2):
            writer = rows.write.format("kafka2pc").mode("append").options(**options)
            writer.option("idempotenceKey", f"{way} job").save()
        return
    wrote = [kafka2pc.exactly_once(options, name=f"{way} job").write(rows) for _ in range(2)]
    if wrote != [True, False]:
        raise AssertionError(f"write() answered {wrote}")
    if not HAS_FORMAT:
        check_refusal(spark)


def check_refusal(spark):
    """Where there is no format("kafka2pc"), the error names the way that works."""
    try:
        kafka2pc.register(spark)
    except TwoPhaseError as e:
        if "exactly_once" in str(e):
            return
        raise
    raise AssertionError("kafka2pc.register(spark) raised nothing")


# -- in the process that kills and counts --


def say(text):
    print(f"    {text}", flush=True)


def feed(folder, number):
    """The file of micro-batch `number`, counted from 1: a row for each key."""
    rows = "".join(f"{key},{number}\n" for key in range(KEYS))
    (folder / "source" / f"{number}.csv").write_text(rows)


def end_jvm(child):
    """Kill what a killed driver leaves behind in its process group, its JVM above all."""
    try:
        os.killpg(child.process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass


def ask(child, point=None, **arguments):
    """Start the query and wait for its end. Raises `AssertionError` if it was not killed at
    `point`, or without one, if it failed.
    """
    start = time.monotonic()
    child.start(folder=str(child.folder), point=point and point.name, **arguments)
    try:
        until(lambda: not child.alive, "the query ends", 180)
    finally:
        end_jvm(child)
    wanted = (-signal.SIGKILL, True) if point else (0, False)
    if (child.process.returncode, child.done.exists()) != wanted:
        found = f"exit code {child.process.returncode}, kill {child.done.exists()}, not {wanted}"
        raise AssertionError(f"{found}:\n{child.log_end()}")
    child.done.unlink(missing_ok=True)
    said = f"killed {KILLS[point]}" if point else "started again, and a batch job twice"
    say(f"{arguments['way']}: {said} ({time.monotonic() - start:.0f} s)")


def count(kafka, topic, batches):
    """Numbers of lost, duplicated and foreign rows."""
    seen = Counter(r.value.decode() for r in read_ended(kafka.client_conf, topic))
    expected = {f"{key} {batch + 1}" for key in range(KEYS) for batch in range(batches)}
    duplicated = sum(seen.values()) - len(seen)
    return len(expected - set(seen)), duplicated, len(set(seen) - expected)


def try_way(kafka, way, folder):
    """What is not exactly once, in numbers: of the stream and of the batch job."""
    folder.joinpath("source").mkdir(parents=True)
    for topic in (f"{way}-stream", f"{way}-job"):
        kafka.create_topic(topic, partitions=2)
    options = {f"kafka.{name}": value for name, value in kafka.client_conf.items()}
    arguments = dict(way=way, options=options | {"topic": f"{way}-stream"})
    paths = {"PYTHONPATH": str(Path(__file__).resolve().parent)}
    child = ChildProcess(folder, "compat_smoke.stream", environment=paths)
    # each start finishes the micro-batch in which the last one died, and goes on into the next
    for batch, point in enumerate([*KILLS, None]):
        feed(folder, batch + 1)
        ask(child, point, batch=batch, **arguments)
    return count(kafka, f"{way}-stream", batch + 1), count(kafka, f"{way}-job", 1)


def result(counts):
    """Counts of the stream and of the batch job, in words."""
    lost, duplicated, foreign = map(sum, zip(*counts, strict=True))
    words = f"{len(KILLS)} kills, {lost} lost, {duplicated} duplicated"
    return f"{words}, {foreign} that nothing wrote" if foreign else words


def main():
    if not Path(kafka2pc.__file__).is_relative_to(sys.prefix):
        raise AssertionError(f"{kafka2pc.__file__} is not the installed package")
    packages = [f"{name} {version(name)}" for name in ("pyarrow", "numpy", "pandas")]
    python = f"PySpark {pyspark.__version__} on Python {platform.python_version()}"
    wrong = 0
    temporary = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)  # Spark may be ending
    with temporary as folder, LocalKafka(progress=say) as kafka:
        for way in [DOOR, *[FORMAT] * HAS_FORMAT, *[PIPELINED] * (VERSION >= (4, 3))]:
            counts = try_way(kafka, way, Path(folder, way))
            wrong += sum(map(sum, counts))
            print(", ".join([python, *packages]) + f": through {way}: {result(counts)}", flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
