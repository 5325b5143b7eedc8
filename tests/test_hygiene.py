"""The promises about the code itself: layers, sizes, clean notebooks, generated files that are as
generated, a light package.
"""

import ast
import configparser
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import nbformat
import pytest

ROOT = Path(__file__).resolve().parent.parent
BIN = Path(sys.executable).parent
PACKAGE = ROOT / "kafka2pc"
NBS = ROOT / "nbs"
NOTEBOOKS = sorted(NBS.rglob("*.ipynb"))
MODULES = sorted(p for p in PACKAGE.rglob("*.py") if p.name != "_modidx.py")
GENERATED = [p for p in MODULES if p.name != "__init__.py"]
FUNCTION_LINES_MAX = 40
CELLS_MAX = 100
SENTENCE_MAX = 144  # it becomes the module's docstring, a line of at most 150
WITHOUT_MODULE = {"index", "spark/03_offsets", "stores/06_classic"}
OWN_BROKER = {
    "local/01_broker",
    "kafka/06_requests",
    "protocol/06_commit",
    "proof/04_story",
    "operations/01_operations",
    "proof/11_bench",
}


def name(path):
    return str(path.relative_to(ROOT))


def short(notebook):
    return str(notebook.relative_to(NBS).with_suffix(""))


def run(*command, cwd=ROOT):
    return subprocess.run(
        [str(c) for c in command],
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def every(paths):
    return pytest.mark.parametrize("path", paths, ids=name)


# -- imports and style --


def test_rooms_import_only_what_the_contracts_allow():
    done = run(BIN / "lint-imports", "--no-cache")
    assert done.returncode == 0, done.stdout


def test_ruff_finds_nothing_in_what_is_exported():
    done = run(BIN / "ruff", "check", "--no-cache", "--output-format", "concise", PACKAGE)
    assert done.returncode == 0, done.stdout


def test_ruff_finds_no_mistake_in_tests_and_tools():
    done = run(
        BIN / "ruff",
        "check",
        "--no-cache",
        "--isolated",
        "--select",
        "F,E9,PLE",
        "--output-format",
        "concise",
        ROOT / "tests",
        ROOT / "tools",
    )
    assert done.returncode == 0, done.stdout


# -- sizes --


def too_long(path):
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if (
            isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
            and (lines := node.end_lineno - node.lineno + 1) > FUNCTION_LINES_MAX
        ):
            yield (
                f"{name(path)}:{node.lineno} {node.name} has {lines} lines, at most"
                f" {FUNCTION_LINES_MAX} are allowed"
            )


@every(MODULES)
def test_functions_stay_small(path):
    assert not list(too_long(path))


STORES = re.compile(
    r"kafka|postgres|psycopg|mysql|mariadb|parquet|json|\bfiles?\b|folder|rename|broker|\bxa\b",
    re.I,
)


@pytest.mark.parametrize("act", ["precommit", "commit", "restore"])
def test_the_acts_say_no_word_of_any_store(act):
    lines = [
        line
        for line in (PACKAGE / "protocol" / f"{act}.py").read_text(encoding="utf-8").splitlines()
        if not line.startswith("#")
    ]
    assert [line for line in lines if STORES.search(line)] == []


def test_a_store_of_your_own_takes_under_40_lines():
    cells = [
        cell.source
        for cell in nbformat.read(NBS / "stores" / "01_file.ipynb", 4).cells
        if cell.cell_type == "code"
    ]
    toy, asked = (
        [source for source in cells if words in source]
        for words in ("class Toy:", "check(toy, PROMISES + DURABLE)")
    )
    assert (
        len([line for line in toy[0].splitlines() if line.strip()]) < 40
        and len(toy) == len(asked) == 1
    )


# -- what is generated is as generated --


def exported_name(notebook):
    """The module that a notebook's first cell names, or None."""
    first = nbformat.read(notebook, 4).cells[0].source
    found = re.match(r"#\|\s*default_exp\s+(\S+)", first)
    return found and found[1]


def contents(folder):
    return {
        str(p.relative_to(folder)): p.read_text(encoding="utf-8")
        for p in folder.rglob("*.py")
        if p.name != "_modidx.py"
    }


def different(ours, fresh):
    return sorted(key for key in ours.keys() | fresh.keys() if ours.get(key) != fresh.get(key))


def test_export_leaves_no_difference(tmp_path):
    for folder in ("nbs", "kafka2pc"):
        shutil.copytree(
            ROOT / folder,
            tmp_path / folder,
            ignore=shutil.ignore_patterns("__pycache__", ".ipynb_checkpoints"),
        )
    for file in ("settings.ini", "pyproject.toml"):
        shutil.copy(ROOT / file, tmp_path)
    done = run(BIN / "nbdev_export", cwd=tmp_path)
    assert done.returncode == 0, done.stdout
    assert different(contents(PACKAGE), contents(tmp_path / "kafka2pc")) == [], "run `make prepare`"
    assert (tmp_path / "pyproject.toml").read_text() == (ROOT / "pyproject.toml").read_text(), (
        "nbdev_export rewrites pyproject.toml"
    )


@every(GENERATED)
def test_every_module_comes_from_a_notebook(path):
    source = re.search(
        r"^# AUTOGENERATED! DO NOT EDIT! File to edit: (\S+)\.$",
        path.read_text(encoding="utf-8"),
        re.M,
    )
    assert source, f"{name(path)} names no notebook"
    notebook = (path.parent / source[1]).resolve()
    assert notebook.exists(), f"{name(path)} is an orphan: {source[1]} is gone"
    assert exported_name(notebook) == ".".join(path.relative_to(PACKAGE).with_suffix("").parts)


@every(NOTEBOOKS)
def test_notebooks_are_clean(path, tmp_path):
    (tmp_path / "nbs").mkdir()
    shutil.copy(ROOT / "settings.ini", tmp_path)
    copy = shutil.copy(path, tmp_path / "nbs")
    done = run(BIN / "nbdev_clean", "--fname", copy, cwd=tmp_path)
    assert done.returncode == 0, done.stdout
    assert Path(copy).read_bytes() == path.read_bytes(), "run `make prepare`"


@pytest.mark.parametrize("tool", ["minutes", "readme"])
def test_what_is_made_of_the_notebooks_is_as_they_are(tool):
    assert (ROOT / "nbs" / "index.ipynb").exists()
    done = run(sys.executable, ROOT / "tools" / f"{tool}.py", "--check")
    assert done.returncode == 0, done.stdout


# -- the shape of a notebook --


@every(NOTEBOOKS)
def test_notebook_opens_like_a_room(path):
    cells = nbformat.read(path, 4).cells
    if short(path) not in WITHOUT_MODULE:
        room = path.parent.name + "." + re.sub(r"^\d\d_", "", path.stem)
        assert exported_name(path) == room, f"{name(path)} must begin with #| default_exp {room}"
        cells = cells[1:]
    opening = cells[0]
    assert opening.cell_type == "markdown"
    shape = re.match(
        r"# \S.*\n\n> (.+)\n\n\S",
        opening.source + ("\n\n" + cells[1].source if cells[1].cell_type == "markdown" else ""),
    )
    assert shape, (
        f"{name(path)} must open with `# Noun`, `> one sentence`, and the promise of the room, each"
        " in a paragraph"
    )
    assert len(shape[1]) <= SENTENCE_MAX, (
        f"the sentence has {len(shape[1])} characters, at most {SENTENCE_MAX} are allowed"
    )


@every(NOTEBOOKS)
def test_notebook_stays_a_room(path):
    cells = nbformat.read(path, 4).cells
    assert len(cells) <= CELLS_MAX
    sources = [cell.source for cell in cells if cell.cell_type == "code"]
    assert not [source for source in sources if re.search(r"^\s*from \S+ import \*", source, re.M)]


@every(NOTEBOOKS)
def test_a_lesson_asks_for_a_cluster_of_ones_own_unless_it_stops_its_broker(path):
    sources = [
        cell.source
        for cell in nbformat.read(path, 4).cells
        if cell.cell_type == "code" and not re.search(r"^#\|\s*export\b", cell.source, re.M)
    ]
    assert any("LocalKafka(" in source for source in sources) == (short(path) in OWN_BROKER)


@every([path for path in NOTEBOOKS if path.stem != "index"])
def test_a_room_ends_with_an_exercise_and_its_solution_is_folded_and_tested(path):
    cells = nbformat.read(path, 4).cells
    exercises = [
        n
        for n, cell in enumerate(cells)
        if cell.cell_type == "markdown" and "**Exercise.**" in cell.source
    ]
    assert len(exercises) == 1 and exercises[0] >= len(cells) - 3
    solution = cells[exercises[0] + 1]
    assert (
        solution.cell_type == "code"
        and solution.source.startswith("#| hide")
        and solution.metadata.get("jupyter", {}).get("source_hidden")
    )
    assert re.search(r"\btest_eq\(|\bassert |\bExceptionExpected\(", solution.source)


def shown(output):
    """All the text of one output."""
    return "".join(str(text) for text in [output.get("text", ""), *output.get("data", {}).values()])


@every(NOTEBOOKS)
def test_notebook_was_executed_and_its_outputs_are_stable(path):
    outputs = [
        output
        for cell in nbformat.read(path, 4).cells
        if cell.cell_type == "code"
        for output in cell.outputs
    ]
    assert outputs, f"{name(path)} was never executed: make run ROOM={short(path)}"
    assert not [output.evalue for output in outputs if output.output_type == "error"]
    assert not [shown(output) for output in outputs if re.search(r"/tmp/\w", shown(output))], (
        "a temporary path changes at every run"
    )


# -- what no file may say --


def tracked():
    """Files under version control, and those that could be."""
    listed = run("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard")
    assert listed.returncode == 0, listed.stdout
    return [ROOT / file for file in listed.stdout.split("\0") if file and (ROOT / file).is_file()]


# Written in two halves, so that this file does not say them.
FORBIDDEN = [
    "/" + "work/",
    "/" + "root/",
    "/tmp/" + "kit",
    "/tmp/" + "bash_jobs",
    "pypi" + ".org",
    "pythonhosted" + ".org",
    "maven" + ".org",
    "maven.apache" + ".org",
    "npmjs" + ".org",
    "npmjs" + ".com",
    "crates" + ".io",
    "debian" + ".org",
    "ubuntu" + ".com",
    "conda" + ".org",
    "anaconda" + ".com",
    "docker" + ".io",
]


def test_no_file_names_this_machine_or_a_registry():
    found = []
    for path in tracked():
        text = path.read_text(encoding="utf-8", errors="ignore").lower()
        found += [f"{name(path)}: {word}" for word in FORBIDDEN if word in text]
    assert not found


def test_constraints_are_exact_versions():
    lines = [
        line
        for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
        if line and not line.startswith("#")
    ]
    assert [
        line for line in lines if not re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.+!]+", line)
    ] == []
    assert lines == sorted(set(lines), key=str.lower)


# -- the package --


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel, built from a copy (building leaves files behind) and without asking anybody for a
    build tool.
    """
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for path in tracked():
        target = source / path.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, target)
    done = run(
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "--no-index",
        "--wheel-dir",
        out,
        ".",
        cwd=source,
    )
    assert done.returncode == 0, done.stdout
    return zipfile.ZipFile(next(out.glob("*.whl")))


def metadata(wheel, file):
    return wheel.read(
        next(n for n in wheel.namelist() if ".dist-info/" in n and n.endswith(f"/{file}"))
    ).decode()


def test_wheel_holds_the_package_and_nothing_else(wheel):
    inside = {n for n in wheel.namelist() if ".dist-info/" not in n}
    assert inside == {str(p.relative_to(ROOT)) for p in MODULES} | {"pyspark_kafka2pc.py"}
    assert metadata(wheel, "LICENSE").lstrip().startswith("Apache License")


def test_wheel_needs_little_and_says_what_settings_say(wheel):
    settings = configparser.ConfigParser(delimiters=["="])
    settings.read(ROOT / "settings.ini", encoding="utf-8")
    settings = settings["DEFAULT"]
    said = metadata(wheel, "METADATA").split("\n\n")[0]
    assert f"\nVersion: {settings['version']}\n" in said
    needed = {
        re.match(r"[\w-]+", line)[0]
        for line in re.findall(r"^Requires-Dist: (.*)$", said, re.M)
        if "extra ==" not in line
    }
    assert needed == {
        "confluent-kafka",
        "google-crc32c",
        "kafka-python",
        "tenacity",
        "typer",
        "rich",
        "fsspec",
    }
    assert metadata(wheel, "entry_points.txt").split() == [
        "[console_scripts]",
        "kafka2pc",
        "=",
        "kafka2pc.operations.cli:app",
    ]


def test_what_every_spark_imports_imports_nothing_itself():
    code = (
        "import sys, pyspark.sql.datasource; before = set(sys.modules); import pyspark_kafka2pc;"
        " print(*set(sys.modules) - before)"
    )
    assert run(sys.executable, "-c", code, cwd=ROOT).stdout.split() == ["pyspark_kafka2pc"]


ALONE = """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {names!r}:
            raise ModuleNotFoundError(f"absent in this test: {{name}}", name=name)
sys.meta_path.insert(0, Absent())
sys.path.insert(0, {root!r})
import importlib
for module in {modules!r}:
    importlib.import_module(module)
"""
NOTEBOOK_TOOLS = [
    "nbdev",
    "fastcore",
    "execnb",
    "papermill",
    "nbformat",
    "nbconvert",
    "jupyter_client",
    "IPython",
    "ipywidgets",
    "pytest",
    "hypothesis",
]
SPARK = ["pyspark", "py4j", "pandas", "pyarrow", "numpy"]
KAFKA = ["confluent_kafka", "kafka"]


@pytest.mark.parametrize(
    ("modules", "absent"),
    [
        (["kafka2pc"], NOTEBOOK_TOOLS + SPARK + KAFKA),
        (
            [
                f"kafka2pc.{room}"
                for room in [
                    "protocol.decisions",
                    "protocol.precommit",
                    "protocol.commit",
                    "protocol.restore",
                    "protocol.history",
                    "proof.world",
                    "proof.model",
                    "proof.rules",
                ]
            ],
            NOTEBOOK_TOOLS + SPARK + KAFKA,
        ),
        (
            [
                f"kafka2pc.{room}"
                for room in [
                    "kafka.control",
                    "kafka.row_producer",
                    "kafka.participant",
                    "local.broker",
                    "operations.operations",
                ]
            ],
            NOTEBOOK_TOOLS + SPARK,
        ),
        ([f"kafka2pc.{room}" for room in ["spark.sink", "spark.source"]], NOTEBOOK_TOOLS),
        (
            [
                f"kafka2pc.{room}"
                for room in ["stores.file", "stores.postgres", "stores.mysql", "stores.wal"]
            ],
            NOTEBOOK_TOOLS + KAFKA + ["pyspark", "py4j", "pandas"],
        ),
        (["kafka2pc.proof.timeline"], NOTEBOOK_TOOLS + SPARK),
        (["kafka2pc.stores.wal"], NOTEBOOK_TOOLS + KAFKA + SPARK),
    ],
    ids=["package", "truth", "kafka", "spark", "participants", "timeline", "log"],
)
def test_rooms_can_be_imported_without_what_they_do_not_need(modules, absent):
    done = run(sys.executable, "-c", ALONE.format(names=absent, root=str(ROOT), modules=modules))
    assert done.returncode == 0, done.stdout
