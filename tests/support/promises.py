"""What each extra promises, in its smallest use: `python promises.py EXTRA` runs in an environment
with nothing but the wheel, this extra and, where the extra is for those who have one, a PySpark.
"""

import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDER = tempfile.mkdtemp()
NOWHERE = "127.0.0.1:1"  # no server is there


def run(*words, **more):
    subprocess.run([str(word) for word in words], check=True, **more)


def command(*words):
    """The command line, which the extra has installed."""
    run(Path(sys.executable).with_name("kafka2pc"), *words)


def unreachable(call, *args):
    """The library gets as far as the network."""
    from kafka2pc.protocol.errors import StoreUnreachable

    try:
        call(*args)
    except StoreUnreachable:
        return
    raise AssertionError("it was reached")


def written_once(store, master="master"):
    """A batch job writes three rows into this store, and another run of it none."""
    from pyspark.sql import SparkSession

    import kafka2pc

    spark = getattr(SparkSession.builder, master)("local[1]").getOrCreate()
    job = kafka2pc.exactly_once({"decisionLog": f"{FOLDER}/log"}, participants=[store], name="job")
    rows = spark.createDataFrame([("a",), ("b",), ("c",)], "value string")
    assert job.write(rows) and not job.write(rows)


def files():
    from kafka2pc.stores.file import FileParticipant

    return FileParticipant(f"{FOLDER}/out")


def may_write(store):
    """`exactly_once` finds all that Spark needs for this store, which is not reached."""
    import kafka2pc

    kafka2pc.exactly_once(participants=[store])
    unreachable(store.store_id)


def driver(url, **env):
    """The driver of this URL opens it. Nothing is asked."""
    from kafka2pc.backends.places import check_place
    from kafka2pc.backends.storage import check_file_system, open_folder

    os.environ.update(env)
    check_place("decisionLog", url)
    check_file_system(url, "decision log")
    open_folder(url, "decision log")


def itself():
    """A reader needs no pandas. `exactly_once` names it, with a line that can be typed."""
    import kafka2pc
    from kafka2pc.spark.datasource import Kafka2pc

    Kafka2pc({"kafka.bootstrap.servers": NOWHERE, "subscribe": "t"}).schema()
    try:
        kafka2pc.exactly_once(participants=[files()])
    except kafka2pc.errors.MissingLibrary as missing:
        assert "pandas" in missing.what
        run(*shlex.split(missing.action), "--quiet")
    written_once(files())
    try:
        kafka2pc.metrics.serve(0, FOLDER)
    except kafka2pc.errors.MissingLibrary as missing:
        assert ".whl[metrics]" in missing.action
        run(*shlex.split(missing.action), "--quiet")
    metrics()


def cli():
    checkpoint = Path(FOLDER) / "checkpoint"
    (checkpoint / "kafka2pc").mkdir(parents=True)
    (checkpoint / "metadata").write_text('{"id": "00000005-2222-3333-4444-555555555555"}')
    command("decisions", "list", checkpoint, "--json")
    command("progress", checkpoint)


def delta():
    import pyarrow as pa
    from deltalake import DeltaTable

    from kafka2pc.stores.delta import DeltaParticipant

    table = DeltaTable.create(f"{FOLDER}/t", pa.schema([("value", pa.string())]))
    written_once(DeltaParticipant(f"{FOLDER}/t"))
    table.update_incremental()
    assert table.count() == 3


def iceberg():
    """Its catalogs are servers, or need another library."""
    import pyarrow as pa
    from pyiceberg.io.pyarrow import _pyarrow_to_schema_without_ids

    from kafka2pc.spark.arguments import check_libraries
    from kafka2pc.stores.iceberg import IcebergParticipant

    check_libraries("pandas", "pyarrow")
    assert _pyarrow_to_schema_without_ids(pa.schema([("value", pa.string())]))
    catalog = {"type": "rest", "uri": f"http://{NOWHERE}"}
    unreachable(lambda: IcebergParticipant("db.t", catalog=catalog))


def postgres():
    from kafka2pc.stores.postgres import PostgresParticipant

    may_write(PostgresParticipant(f"postgresql://u:p@{NOWHERE}/d", "t"))


def mysql():
    from kafka2pc.stores.mysql import MysqlParticipant

    may_write(MysqlParticipant(f"mysql://u:p@{NOWHERE}/d", "t"))


def oidc():
    from kafka2pc.kafka.login.oidc import NoTokenNow, oidc_tokens

    conf = {
        "sasl.oauthbearer.token.endpoint.url": f"http://{NOWHERE}/token",
        "sasl.oauthbearer.client.id": "alice",
        "sasl.oauthbearer.client.secret": "secret",
    }
    try:
        oidc_tokens(conf)()
    except NoTokenNow:
        return
    raise AssertionError("it was reached")


def msk():
    from kafka2pc.kafka.login.msk_iam import msk_iam_tokens

    os.environ |= {"AWS_ACCESS_KEY_ID": "id", "AWS_SECRET_ACCESS_KEY": "secret"}
    conf = {"bootstrap.servers": "b-1.x.c1.kafka.eu-central-1.amazonaws.com:9098"}
    token, ends = msk_iam_tokens(conf)()
    assert token and ends > 0


def metrics():
    from kafka2pc.spark.metrics.families import METRICS, sample, to_text

    name, metric = next(iter(METRICS.items()))
    labels = dict.fromkeys(metric.labels, "x")
    assert name in to_text([sample(name.removeprefix("kafka2pc_"), 1, **labels)])


def local():
    from kafka2pc.local.broker import LocalKafka
    from kafka2pc.local.oidc import LocalOidc

    with LocalOidc() as server, LocalKafka(tls=True) as kafka:
        assert server.issuer and kafka.ready


def demo():
    command("demo", "--rows", "1000", "--skip-spark-sink", "--images", FOLDER)


def drill():
    command("drill", "--seeds", "2")
    command("drill", "--only", "gets there dies before begin", "--output", FOLDER)


def course():
    from papermill import execute_notebook

    lesson = "02_two_phase_commit.ipynb"
    folder = ROOT / "nbs" / "course"
    execute_notebook(folder / lesson, f"{FOLDER}/{lesson}", cwd=folder, kernel_name="python3")


def browser():
    from playwright.sync_api import sync_playwright

    with sync_playwright() as session:
        options = {"executable_path": shutil.which("chromium"), "args": ["--no-sandbox"]}
        page = session.chromium.launch(**options).new_page()
        page.set_content("<h1>here</h1>")
        assert page.inner_text("h1") == "here"


def docs():
    """A page from a notebook, and one of the reference."""
    pages = Path(FOLDER) / "docs"
    pages.mkdir()
    (pages / "index.md").write_text("# Here\n\n::: kafka2pc.protocol.kept\n")
    shutil.copy(ROOT / "nbs" / "protocol" / "11_kept.ipynb", pages)
    config = "site_name: s\ntheme: {name: material}\nplugins: [mkdocs-jupyter, mkdocstrings]\n"
    (Path(FOLDER) / "mkdocs.yml").write_text(config)
    run(sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", cwd=FOLDER)


def dev():
    run(sys.executable, "-m", "pytest", "-q", "tests/protocol/test_names.py", cwd=ROOT)
    run(sys.executable, "-m", "ruff", "check", "-q", "tools", cwd=ROOT)


PROMISES = {
    "": itself,
    "spark": lambda: written_once(files()),
    "connect": lambda: written_once(files(), master="remote"),
    "cli": cli,
    "s3": lambda: driver("s3://bucket/x"),
    "gcs": lambda: driver("gs://bucket/x", STORAGE_EMULATOR_HOST=f"http://{NOWHERE}"),
    "azure": lambda: driver(
        "abfs://c@account.dfs.core.windows.net/x", AZURE_STORAGE_ACCOUNT_KEY="a2V5"
    ),
    "postgres": postgres,
    "mysql": mysql,
    "delta": delta,
    "iceberg": iceberg,
    "oidc": oidc,
    "msk": msk,
    "metrics": metrics,
    "local": local,
    "demo": demo,
    "drill": drill,
    "course": course,
    "browser": browser,
    "docs": docs,
    "dev": dev,
}
# these are for those who have a PySpark
BESIDE = ("", "postgres", "mysql", "delta", "iceberg")

if __name__ == "__main__":
    PROMISES[sys.argv[1]]()
