"""Make Spark start in a third of the time, in every process that tests start.

`options` sets environment variables that `spark-submit` reads: no second compiler, one thread of
garbage collection, and an archive of loaded classes (AppCDS), which `archive` makes once in ten
seconds. Java starts without an archive that is missing or does not fit, and says nothing.

SPARK_HOME is a folder with PySpark's `bin` and `jars`, and without its `pyspark.zip`: every Python
process that Spark starts (five for a first query) imports PySpark from there if it is there, and
compiles it anew, 0.6 s of a core each. Here they import the same modules from the installed
package, which Python has compiled. `make compat` runs as users do, with the zip.
"""

import os
import subprocess
import sys
import tempfile
from contextlib import contextmanager, suppress
from importlib.metadata import PackageNotFoundError, distribution, version
from pathlib import Path

FLAGS = "-XX:+UseSerialGC -XX:TieredStopAtLevel=1"
SHARED = f"{FLAGS} -Xshare:auto -Xlog:disable"
FOLDER = Path(__file__).resolve().parents[2] / ".test-output"


def home() -> Path:
    """The SPARK_HOME of this PySpark. Raises `PackageNotFoundError`."""
    return FOLDER / f"spark-{version('pyspark')}"


def file() -> Path:
    """The archive of this PySpark: it fits the jars of this home only."""
    return home() / "classes.jsa"


def options() -> dict[str, str]:
    """The environment of every process that starts Spark. Empty without PySpark."""
    with suppress(PackageNotFoundError):
        used = f"{SHARED} -XX:SharedArchiveFile={file()}"
        return {
            "SPARK_HOME": str(linked(home())),
            "SPARK_LAUNCHER_OPTS": FLAGS,
            "SPARK_SUBMIT_OPTS": used,
        }
    return {}


def linked(folder: Path) -> Path:
    """The folder, with a link to each part of the installed PySpark. Several processes may do it at
    once.
    """
    folder.mkdir(parents=True, exist_ok=True)
    installed = Path(str(distribution("pyspark").locate_file("pyspark")))
    for part in ("bin", "jars"):
        link, target = folder / part, installed / part
        if link.is_symlink() and link.readlink() == target:
            continue
        fresh = folder / f"{part}.{os.getpid()}"
        fresh.symlink_to(target)
        fresh.replace(link)
    return folder


def archive() -> None:
    """Run a few queries once, and keep the classes that they loaded. Does nothing if that is done,
    or if another process does it at this moment.
    """
    target = file()
    if target.exists():
        return
    too_slow = subprocess.TimeoutExpired
    with suppress(FileExistsError, too_slow), one_at_a_time(target.with_suffix(".lock")):
        fresh = target.with_suffix(f".{os.getpid()}")
        env = {"SPARK_SUBMIT_OPTS": f"{SHARED} -XX:ArchiveClassesAtExit={fresh}"}
        command = [sys.executable, __file__]
        done = subprocess.run(command, env=os.environ | env, capture_output=True, timeout=300)
        if done.returncode == 0 and fresh.exists():
            fresh.replace(target)


@contextmanager
def one_at_a_time(lock: Path):
    """Raises `FileExistsError` while another process is inside."""
    lock.touch(exist_ok=False)
    try:
        yield
    finally:
        lock.unlink()


def queries(folder: Path) -> None:
    """A stream and a batch that write into a data source in Python."""
    from pyspark.sql import SparkSession
    from pyspark.sql.datasource import (
        DataSource,
        DataSourceArrowWriter,
        DataSourceStreamArrowWriter,
        WriterCommitMessage,
    )

    class Nowhere(DataSource):
        @classmethod
        def name(cls):
            return "nowhere"

        def writer(self, schema, overwrite):
            return Batch()

        def streamWriter(self, schema, overwrite):
            return Stream()

    class Batch(DataSourceArrowWriter):
        def write(self, iterator):
            list(iterator)
            return WriterCommitMessage()

    class Stream(DataSourceStreamArrowWriter):
        def write(self, iterator):
            list(iterator)
            return WriterCommitMessage()

        def commit(self, messages, batchId):
            pass

    settings = {"spark.ui.enabled": "false", "spark.sql.shuffle.partitions": "2"}
    spark = SparkSession.builder.master("local[2]").config(map=settings).getOrCreate()
    spark.dataSource.register(Nowhere)
    (folder / "rows").mkdir()
    (folder / "rows" / "1.json").write_text("".join(f'{{"row": {n}}}\n' for n in range(100)))
    rows = spark.readStream.schema("row long").json(str(folder / "rows"))
    for number, frame in enumerate((rows.repartition(3), rows.dropDuplicates(["row"]))):
        writer = frame.writeStream.format("nowhere")
        writer = writer.option("checkpointLocation", str(folder / f"checkpoint-{number}"))
        writer.trigger(availableNow=True).start().awaitTermination()
    spark.range(100).write.format("nowhere").mode("append").save()
    spark.range(100).groupBy().sum("id").collect()
    spark.stop()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place:
        queries(Path(place))
