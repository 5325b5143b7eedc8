"""Databricks without a workspace: a stand-in for dbutils, a Spark Connect server of its own, a
broker that wants a password. And guests on a cluster.
"""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import nbformat
import pyspark
import pytest
import yaml
from confluent_kafka.admin import AdminClient
from kafka_fixtures import owned, state

from kafka2pc.local.broker import LocalKafka
from kafka2pc.local.nodes import free_ports
from kafka2pc.local.your_cluster import start_kafka

ROOT = Path(__file__).resolve().parents[2]
NBS = ROOT / "nbs"
sys.path.insert(0, str(ROOT / "tools"))
import import_limits  # noqa: E402
from run_notebooks import CELL_SECONDS, execute  # noqa: E402

# What a workspace puts into every notebook. `%pip` asks nobody: it writes down what it was to
# install.
WORKSPACE = """
import json, os
from pathlib import Path
from types import SimpleNamespace
from IPython.core.magic import register_line_magic

_job, _asked = json.loads(os.environ["STAND_IN"]), Path(os.environ["STAND_IN_ASKED"])

def _note(what):
    with _asked.open("a") as file: file.write(what + "\\n")

class _Widgets:
    values = dict(_job["widgets"])
    def text(self, name, default, label=None): self.values.setdefault(name, default)
    def get(self, name): return self.values[name]

class _Secrets:
    def get(self, scope, key):
        _note(f"secret {scope}/{key}")
        return _job["secrets"][scope][key]

@register_line_magic
def pip(line): _note(f"pip {line}")

from pyspark.sql import SparkSession
library = SimpleNamespace(restartPython=lambda: _note("restart"))
dbutils = SimpleNamespace(widgets=_Widgets(), secrets=_Secrets(), library=library)
spark = SparkSession.builder.remote(_job["spark"]).getOrCreate()
"""


@pytest.fixture(scope="module")
def host():
    """A cluster of somebody else: it asks for a password, and has topics with the names that the
    rooms use.
    """
    with LocalKafka(secure=True) as cluster:
        yield owned(cluster)


@pytest.fixture(scope="module")
def connect_server(tmp_path_factory):
    """The address of a Spark Connect server in a process of its own, which serves nobody else."""
    folder, port = tmp_path_factory.mktemp("connect"), free_ports(1)[0]
    home = Path(pyspark.__file__).parent
    conf = {
        "spark.connect.grpc.binding.address": "127.0.0.1",
        "spark.connect.grpc.binding.port": port,
        "spark.ui.enabled": "false",
        "spark.sql.shuffle.partitions": 2,
        "spark.sql.warehouse.dir": folder / "warehouse",
    }
    command = [
        home / "bin" / "spark-submit",
        "--master",
        "local[2]",
        "--class",
        "org.apache.spark.sql.connect.service.SparkConnectServer",
    ]
    command += [word for key, value in conf.items() for word in ("--conf", f"{key}={value}")] + [
        "spark-internal"
    ]
    env = os.environ | {
        "SPARK_HOME": str(home),
        "PYSPARK_PYTHON": sys.executable,
        "SPARK_LOCAL_IP": "127.0.0.1",
        "PYTHONPATH": str(ROOT),
    }
    with open(folder / "log", "w") as log:
        server = subprocess.Popen(
            [str(word) for word in command],
            cwd=folder,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        end = time.monotonic() + 120
        while not listens(port):
            assert server.poll() is None and time.monotonic() < end, (folder / "log").read_text()[
                -3000:
            ]
            time.sleep(0.2)
        yield f"sc://127.0.0.1:{port}"
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()


def listens(port):
    with socket.socket() as s:
        return s.connect_ex(("127.0.0.1", port)) == 0


@pytest.fixture
def workspace(own_folders, monkeypatch):
    """Calls a notebook as a job of a workspace would; answers with what went wrong, and what was
    asked of the workspace.
    """
    startup = own_folders / "ipythondir" / "profile_default" / "startup"
    startup.mkdir(parents=True)
    (startup / "workspace.py").write_text(WORKSPACE)
    asked = own_folders / "asked"

    def run(notebook, output, **job):
        monkeypatch.setenv("STAND_IN", json.dumps(job))
        monkeypatch.setenv("STAND_IN_ASKED", str(asked))
        monkeypatch.setenv("DATABRICKS_RUNTIME_VERSION", "18.2")
        return execute(notebook, output, CELL_SECONDS), asked.read_text().splitlines()

    return run


def shown(path):
    """All that an executed notebook shows."""
    return json.dumps(
        [cell.outputs for cell in nbformat.read(path, 4).cells if cell.cell_type == "code"]
    )


@pytest.mark.kafka
@pytest.mark.spark
@pytest.mark.timeout(400)
@pytest.mark.full
def test_the_room_runs_as_a_job_of_a_workspace(host, connect_server, workspace, tmp_path):
    password, before, volume = (
        host.passwords["admin"],
        state(host),
        tmp_path / "Volumes" / "main" / "default" / "kafka2pc",
    )
    widgets = {
        "bootstrap_servers": host.bootstrap_servers,
        "folder": str(volume),
        "sasl_username": "admin",
        "security_protocol": "SASL_PLAINTEXT",
        "sasl_mechanism": "SCRAM-SHA-256",
        "secret_scope": "kafka",
        "rows": "300",
    }
    trouble, asked = workspace(
        NBS / "spark/06_databricks.ipynb",
        tmp_path / "done.ipynb",
        spark=connect_server,
        widgets=widgets,
        secrets={"kafka": {"sasl_password": password}},
    )
    assert not trouble, trouble
    assert asked == [
        "pip install --quiet /Volumes/main/default/files/kafka2pc-0.1.0-py3-none-any.whl",
        "restart",
        "secret kafka/sasl_password",
    ]
    assert (
        re.search(r'"300"', shown(tmp_path / "done.ipynb"))
        and password not in (tmp_path / "done.ipynb").read_text()
    )
    assert [path.name for path in volume.iterdir() if path.name.endswith("-checkpoint")], (
        "the checkpoint is in the Volume"
    )
    assert state(host) == before, "the guest left something, or touched what is not its own"


@pytest.mark.kafka
@pytest.mark.full
def test_a_guest_deletes_only_what_it_made(open_host, monkeypatch):
    before = state(open_host)
    monkeypatch.setenv("KAFKA2PC_BOOTSTRAP_SERVERS", open_host.bootstrap_servers)
    guest = start_kafka()
    again = guest.create_topic("mine", partitions=2)
    admin = AdminClient(open_host.client_conf)
    admin.delete_topics([again])[again].result()
    while again in state(open_host):
        time.sleep(0.1)
    guest.create_topic("mine", partitions=2)
    assert state(open_host).keys() == before.keys() | {guest.name("mine")}
    guest.stop()
    assert state(open_host) == before


# -- what a workspace would refuse --


def written(folder, *sources, name="room.ipynb"):
    cells = [nbformat.v4.new_code_cell(source) for source in sources]
    nbformat.write(nbformat.v4.new_notebook(cells=cells), folder / name)


def test_our_notebooks_can_be_imported():
    assert import_limits.problems(NBS) == []
    assert any(
        import_limits.CLAIM in path.read_text(encoding="utf-8") for path in NBS.rglob("*.ipynb")
    ), "no notebook claims to run there"


CLAIM = "import os\nif 'DATABRICKS_RUNTIME_VERSION' in os.environ:\n    %pip install kafka2pc"


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("spark.sparkContext.setLogLevel('ERROR')", "sparkContext is not there"),
        ("df.rdd.getNumPartitions()", "rdd is not there"),
        ("spark._jvm.System", "_jvm is not there"),
        (
            "df.writeStream.trigger(processingTime='1 second').start()",
            "trigger(processingTime=...) never ends",
        ),
        ("df.writeStream.start()", "a stream without trigger(availableNow=True)"),
        ("df.writeStream.trigger(availableNow=True).start()", None),
        ("'sparkContext'  # a word is no call", None),
    ],
)
def test_a_call_that_is_not_there_is_found(tmp_path, source, says):
    written(tmp_path, CLAIM, source)
    found = import_limits.problems(tmp_path)
    assert any(says in f for f in found) if says else found == []
    written(tmp_path, source)  # this one does not claim to run there
    assert import_limits.problems(tmp_path) == []


def test_what_is_too_large_and_what_has_one_name_is_found(tmp_path, monkeypatch):
    (tmp_path / "deeper").mkdir()
    for name in ("room.ipynb", "Room.ipynb", "deeper/room.ipynb"):
        written(tmp_path, "1", name=name)
    assert import_limits.problems(tmp_path) == [
        "Room.ipynb: its name is there twice",
        "room.ipynb: its name is there twice",
    ]
    (tmp_path / "Room.ipynb").unlink()
    (tmp_path / "deeper" / "room.ipynb").unlink()
    written(tmp_path, "x" * 2000)
    monkeypatch.setattr(import_limits, "NOTEBOOK_BYTES_MAX", 1000)
    monkeypatch.setattr(import_limits, "CELL_BYTES_MAX", 1999)
    size = (tmp_path / "room.ipynb").stat().st_size
    assert import_limits.problems(tmp_path) == [
        f"room.ipynb: {size} bytes, at most 1000 can be imported",
        "room.ipynb: a cell of 2000 characters",
    ]


# -- the bundle --


def paths(node):
    """Every path that a bundle names."""
    if isinstance(node, dict):
        return [
            p
            for key, value in node.items()
            for p in ([value] if key.endswith("_path") else paths(value))
        ]
    return [p for value in node for p in paths(value)] if isinstance(node, list) else []


def test_the_bundle_names_what_is_there():
    text = (NBS / "databricks.yml").read_text(encoding="utf-8")
    bundle = yaml.safe_load(text)
    assert paths(bundle["resources"]) == ["./spark/06_databricks.ipynb"]
    assert all((NBS / path).is_file() for path in paths(bundle["resources"]))
    assert all(list(NBS.glob(pattern)) for pattern in bundle["sync"]["include"])
    assert set(re.findall(r"\$\{var\.(\w+)\}", text)) == bundle["variables"].keys()


def test_the_bundles_parameters_are_those_of_the_room():
    bundle = yaml.safe_load((NBS / "databricks.yml").read_text(encoding="utf-8"))
    given = bundle["resources"]["jobs"]["course"]["tasks"][0]["notebook_task"][
        "base_parameters"
    ].keys()
    tagged = [
        cell.source
        for cell in nbformat.read(NBS / "spark/06_databricks.ipynb", 4).cells
        if "parameters" in cell.metadata.get("tags", [])
    ]
    assert given == {"package", *re.findall(r"^(\w+) = ", tagged[0], re.M)}
