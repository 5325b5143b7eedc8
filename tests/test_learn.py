"""What a learner sees: folded cells, predictions, and the copies of the lessons."""

import importlib.util
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import nbformat
import pytest
from docs import OPEN_LATER, hide_answers
from fold import derived, fold, is_folded, solution_of, words
from IPython.core.inputtransformer2 import TransformerManager
from learn import ANSWER, LESSONS, ROOT, lay_out
from nbformat.sign import NotebookNotary
from nbformat.v4 import new_code_cell, new_markdown_cell
from predictions import predictions, split

PREDICTIONS = {  # lesson -> how often it asks
    "01_why": 3,
    "02_two_phase_commit": 9,
    "03_two_drivers": 4,
    "04_real_kafka": 5,
    "05_spark": 5,
    "06_timeline": 6,
}
KINDS = {
    "import os\nfrom fastcore.test import test_eq": "imports",
    "def found(topic):\n    assert topic\n\n\nclass Look: ...": "helpers: found, Look",
    "with cluster:\n    test_eq(lost(1), 0)": "checks",
    "def one():\n    return 1\n\n\ntest_eq(one(), 1)": "checks and helpers: one",
    "import shutil\nkafka.stop()\nshutil.rmtree(folder)": "clean-up",
    "kafka = start_kafka()": "set-up",
    "%pip install kafka2pc": "set-up",
}


@pytest.mark.parametrize("code", KINDS)
def test_the_first_line_of_a_folded_cell_says_what_is_in_it(code):
    assert derived(code) == KINDS[code]


def lesson():
    return [
        new_code_cell("#| default_exp course.x"),
        new_code_cell("#| kafka\n#| hide\nkafka = start_kafka()"),
        new_code_cell("#| folded the answer: restore\n#| export\ndef restore(): ..."),
        new_code_cell("#| hide\n" + "".join(f"def {'f' * n}(): ...\n" for n in range(1, 20))),
        new_code_cell("shown()", metadata={"jupyter": {"source_hidden": True}}),
        new_markdown_cell("**Exercise.** Yours."),
        new_code_cell("yours = None"),
        new_code_cell("#| hide\ntest_eq(1, 1)"),
    ]


def test_cells_are_folded_by_their_directives_and_only_once():
    cells = lesson()
    fold(cells)
    assert [cell.metadata.get("jupyter") for cell in cells] == [
        *[{"source_hidden": True}] * 4,
        *[None] * 3,
        {"source_hidden": True},
    ]
    assert cells[1].source == "#| folded set-up\n#| kafka\n#| hide\nkafka = start_kafka()"
    assert [words(cells[n]) for n in (0, 2, 7)] == ["", "the answer: restore", "a solution"]
    assert len(cells[3].source.partition("\n")[0]) <= 100 and words(cells[3]).endswith("f, ...")
    once = [cell.source for cell in cells]
    fold(cells)
    assert [cell.source for cell in cells] == once


def test_a_solution_right_behind_the_exercise_is_not_the_clean_up_after_it():
    exercise, solution, clean = lesson()[5], new_code_cell("#| hide\n1"), lesson()[1]
    assert solution_of([exercise, solution, clean]) == 1


@pytest.mark.parametrize("name", PREDICTIONS)
def test_predictions_of_a_lesson_are_found(name):
    cells = nbformat.read(ROOT / LESSONS / f"{name}.ipynb", 4).cells
    found = predictions(cells)
    assert len(found) == PREDICTIONS[name]
    for prediction in found:
        assert all(cells[number].cell_type == "code" for number in prediction.shows)
        assert cells[prediction.answer].cell_type == "markdown"


@pytest.mark.parametrize(
    ("text", "answer", "rest"),
    [
        ("All.\n\n> **Rule 1.**\n\n## Next\n\nMore.", "All.\n\n> **Rule 1.**", "## Next\n\nMore."),
        ("Twice.\n\nA kill. **What now?**", "Twice.", "A kill. **What now?**"),
        ("And without it?", "", "And without it?"),
        ("Twice.", "Twice.", ""),
    ],
)
def test_an_answer_ends_where_the_lesson_goes_on(text, answer, rest):
    assert split(text) == (answer, rest)


ASKED = [
    new_markdown_cell("Now. **What does A write?** First without rule 9:"),
    new_code_cell("run()", outputs=[nbformat.v4.new_output("stream", text="twice")]),
    new_markdown_cell("Twice.\n\n## Next"),
]


def test_the_site_shows_an_answer_behind_a_click():
    parts = [[(None, "asked")], [(None, "code"), (None, "output")], [(None, "answer")]]
    hide_answers(ASKED, parts)
    assert parts == [
        [(None, "asked")],
        [(None, "code")],
        [(OPEN_LATER, "output"), (OPEN_LATER, "Twice."), (None, "## Next")],
    ]


@pytest.fixture
def copies(tmp_path, monkeypatch):
    """The copies of all lessons, and the folder that holds them."""
    monkeypatch.setenv("JUPYTER_DATA_DIR", str(tmp_path / "data"))
    lay_out(tmp_path / "learn", anew=False)
    return tmp_path / "learn" / LESSONS


def test_a_copy_shows_no_answer_and_is_trusted(copies):
    for name in PREDICTIONS:
        page = nbformat.read(copies / f"{name}.ipynb", 4)
        assert NotebookNotary().check_signature(page)
        code = [cell for cell in page.cells if cell.cell_type == "code"]
        assert not any(cell.outputs or cell.execution_count for cell in code)
        assert all(cell.metadata.get("jupyter") for cell in code if is_folded(cell))
        answers = [cell for cell in page.cells if cell.source.startswith(ANSWER)]
        assert answers and all(cell.metadata.jupyter.source_hidden for cell in answers)
        for prediction in predictions(page.cells):
            first = page.cells[prediction.answer]
            assert first in answers or not split(first.source)[0], first.source


def test_links_of_a_copy_lead_to_files(copies):
    links = []
    for path in copies.glob("*.ipynb"):
        texts = [c.source for c in nbformat.read(path, 4).cells if c.cell_type == "markdown"]
        links += re.findall(r"\]\(([^)#:\s]+)(?:#[^)\s]*)?\)", "\n".join(texts))
    assert links and [link for link in links if not (copies / link).exists()] == []
    pictures = [(copies / link).resolve() for link in links if link.endswith(".svg")]
    assert pictures  # Jupyter serves none from outside of its root
    assert all(picture.is_relative_to(copies.parents[1].resolve()) for picture in pictures)


def test_a_copy_that_exists_is_kept_until_it_is_made_anew(copies):
    learn, mine = copies.parents[1], Path(copies, "01_why.ipynb")
    mine.write_text("my work")
    made, kept = lay_out(learn, anew=False)
    assert made == [] and "01_why" in kept and mine.read_text() == "my work"
    made, kept = lay_out(learn, anew=True)
    assert "01_why" in made and kept == [] and mine.read_text() != "my work"


@pytest.fixture
def install(monkeypatch, tmp_path):
    """Runs the cell that installs the package, below a folder with settings.ini. Returns what it
    installs, or None.
    """
    cells = nbformat.read(ROOT / LESSONS / "02_two_phase_commit.ipynb", 4).cells
    source = next(cell.source for cell in cells if "%pip install" in cell.source)
    (tmp_path / "nbs" / "course").mkdir(parents=True)
    (tmp_path / "settings.ini").touch()
    monkeypatch.chdir(tmp_path / "nbs" / "course")

    def run(spec=None):
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
        asked = []
        shell = SimpleNamespace(run_line_magic=lambda *magic: asked.append(magic))
        names = {"get_ipython": lambda: shell}
        exec(TransformerManager().transform_cell(source), names)
        assert asked in ([], [("pip", 'install --quiet "$package" fastcore')])
        return names["package"] if asked else None

    return run


def test_a_lesson_installs_nothing_where_the_package_is(install):
    assert install(spec="there") is None


def test_a_lesson_installs_the_copy_of_the_project_that_has_it(install, tmp_path):
    assert install() == tmp_path


def test_a_lesson_in_colab_asks_for_the_wheel(install, monkeypatch):
    files = SimpleNamespace(upload=lambda: {"kafka2pc-0.1.0-py3-none-any.whl": b""})
    monkeypatch.setitem(sys.modules, "google.colab", SimpleNamespace(files=files))
    assert install() == Path("/content/kafka2pc-0.1.0-py3-none-any.whl")
