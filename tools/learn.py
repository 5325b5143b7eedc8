#!/usr/bin/env python3
"""Open the course in JupyterLab, on copies of its lessons that show no answer before you ask.

A copy has no outputs, and it is trusted. Helper cells and the answers to predictions are folded.
Copies are in output/learn/nbs/course; all that they link to is beside them. A copy that exists is
kept. --anew: make all of them again. --no-open: make the copies, and start nothing.
"""

import os
import re
import secrets
import shutil
import socket
import sys
from pathlib import Path

import nbformat
from contents import only_imports
from fold import IMPORTS, fold, is_folded, words
from nbformat.sign import NotebookNotary
from predictions import predictions, split

ROOT = Path(__file__).resolve().parent.parent
LEARN = ROOT / "output" / "learn"
LESSONS = Path("nbs", "course")
FIRST = LESSONS / "01_why.ipynb"
ANSWER = "<!-- The answer. Predict, run the cell above, then run this one: it opens -->"


def without_answers(page) -> None:
    """Remove outputs and the name of the module, and fold what a learner skips or opens later."""
    cells = [cell for cell in page.cells if not cell.source.startswith("#| default_exp")]
    for cell in cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
            if not is_folded(cell) and only_imports(cell.source):
                cell.source = f"#| folded\n{cell.source}"
    fold(cells)
    cells = joined(cells)
    answers = {prediction.answer for prediction in predictions(cells)}
    page.cells = []
    for number, cell in enumerate(cells):
        page.cells += divided(cell) if number in answers else [cell]


def joined(cells: list) -> list:
    """Cells with imports that follow each other are one cell."""
    kept = []
    for cell in cells:
        if kept and words(cell) == words(kept[-1]) == IMPORTS:
            kept[-1].source += "\n" + re.sub(r"^#\|.*\n", "", cell.source, flags=re.M)
        else:
            kept.append(cell)
    return kept


def divided(cell) -> list:
    """The answer, folded, and in a cell of its own what comes behind it."""
    answer, rest = split(cell.source)
    if not answer:
        return [cell]
    cell.source = f"{ANSWER}\n\n{answer}"
    cell.metadata["jupyter"] = {"source_hidden": True}
    behind = nbformat.v4.new_markdown_cell(rest, id=f"{cell.id}-rest")
    return [cell, behind] if rest else [cell]


def copy(lesson: Path, target: Path) -> None:
    page = nbformat.read(lesson, 4)
    without_answers(page)
    nbformat.write(page, target)
    NotebookNotary().sign(page)


def link(source: Path, target: Path) -> None:
    if not target.is_symlink():
        target.symlink_to(os.path.relpath(source, target.parent))


def lay_out(learn: Path, anew: bool) -> tuple[list[str], list[str]]:
    """Make the copies, and links to what they name. Answers with the new ones and those kept."""
    course = learn / LESSONS
    course.mkdir(parents=True, exist_ok=True)
    # not a link: Jupyter serves no picture from outside of its root
    shutil.copytree(ROOT / "images", learn / "images", dirs_exist_ok=True)
    for source in ROOT.glob("*.md"):
        link(source, learn / source.name)
    for source in sorted((ROOT / "nbs").iterdir()):
        if source.name != "course" and not source.name.startswith("."):
            link(source, learn / "nbs" / source.name)
    for source in filter(Path.is_dir, (ROOT / LESSONS).glob("[a-z]*")):
        link(source, course / source.name)
    made, kept = [], []
    for lesson in sorted((ROOT / LESSONS).glob("*.ipynb")):
        target = course / lesson.name
        if target.exists() and not anew:
            kept.append(lesson.stem)
        else:
            copy(lesson, target)
            made.append(lesson.stem)
    return made, kept


def free_port() -> int:
    """8888 if it is free, as JupyterLab would take, or another one."""
    for port in (8888, 0):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return probe.getsockname()[1]
    raise OSError("no port is free")


def open_lab(learn: Path) -> None:
    """JupyterLab takes the place of this process. Its kernel is this Python."""
    port, token = free_port(), secrets.token_hex(16)
    print(f"JupyterLab: http://127.0.0.1:{port}/lab/tree/{FIRST.as_posix()}?token={token}")
    print("Ctrl-C twice ends it. Your work stays in these copies.", flush=True)
    os.environ |= {"JUPYTER_TOKEN": token, "JUPYTER_PREFER_ENV_PATH": "1"}
    options = [
        "--ip=127.0.0.1",
        f"--port={port}",
        f"--ServerApp.root_dir={learn}",
        "--log-level=WARN",
        *(["--allow-root"] if os.geteuid() == 0 else []),
    ]
    command = [sys.executable, "-m", "jupyterlab", *options, str(learn / FIRST)]
    os.execv(sys.executable, command)


def main() -> None:
    made, kept = lay_out(LEARN, "--anew" in sys.argv[1:])
    place = (LEARN / LESSONS).relative_to(ROOT)
    if made:
        print(f"{len(made)} lessons copied to {place}, without outputs: {', '.join(made)}")
    if kept:
        print(f"{len(kept)} kept as you left them in {place} (anew: make course-anew)")
    if "--no-open" not in sys.argv[1:]:
        open_lab(LEARN)


if __name__ == "__main__":
    main()
