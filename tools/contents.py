#!/usr/bin/env python3
"""Write the tables of notebooks into the guide's page "All notebooks": name, sentence, minutes; and
the book, the reading path of the source, into its first notebook. --check: only report.

The sentence is the one that opens the notebook. A minute is 130 words, or 8 lines of the code that
is shown, rounded to 5 minutes; imports and exercises are not counted. In the six lessons they are:
a minute for each statement of the answer, half a minute for each prediction.
"""

import ast
import os
import re
import sys
from pathlib import Path

import nbformat
from predictions import predictions
from readme import visible

NBS = Path(__file__).resolve().parent.parent / "nbs"
PAGE = NBS / "guide" / "06_notebooks.ipynb"
FOLDERS = [  # in reading order
    "guide",
    "course",
    "course/explorer",
    "protocol",
    "protocol/log",
    "protocol/phases",
    "protocol/phases/gate",
    "protocol/operators",
    "backends",
    "kafka/options",
    "kafka/login",
    "kafka/wire",
    "kafka/records",
    "kafka/write",
    "kafka/read",
    "kafka",
    "stores",
    "decision_logs",
    "decision_logs/topic",
    "spark/sink",
    "spark/source",
    "spark/metrics",
    "spark",
    "operations",
    "operations/doctor",
    "operations/cli",
    "local",
    "proof",
    "proof/model",
    "proof/timeline",
    "proof/demo",
    "proof/drills",
    "proof/bench",
    "proof/simulation",
]
PACKAGES = list(dict.fromkeys(folder.partition("/")[0] for folder in FOLDERS))
PURPOSES = {
    "guide": "Pages for users, without exercises.",
    "course": "Six lessons, half a day, the small implementation that grows in them, and extras.",
    "protocol": "The three phases, the decision log, and what travels between processes.",
    "backends": "Disks, object stores and PostgreSQL connections.",
    "kafka": "Requests, record batches, transactions, readers, and Kafka as a participant.",
    "stores": "Files, objects, tables, PostgreSQL, MariaDB and a write-ahead log as participants.",
    "decision_logs": "The places where decisions are kept.",
    "spark": "The sink, the source, and `foreachBatch`.",
    "operations": "Doctor, repair, and the command line.",
    "local": "A real Kafka and real databases on this machine.",
    "proof": "Checker, model, simulation, drills, timeline, demonstration and benchmark.",
}
BOOK = NBS / "protocol" / "01_states.ipynb"
PATH = [  # the book, in reading order
    "protocol/01_states",
    "protocol/03_messages",
    "protocol/04_participant",
    "protocol/05_memory",
    "protocol/log/01_decisions",
    "protocol/log/02_slots",
    "protocol/log/03_questions",
    "protocol/10_driver",
    "protocol/phases/01_precommit",
    "protocol/phases/02_requests",
    "protocol/phases/03_describe",
    "protocol/phases/04_decide",
    "protocol/phases/05_finish",
    "protocol/phases/06_sweep",
    "protocol/phases/07_commit",
    "protocol/phases/08_claim",
    "protocol/phases/09_restore",
    "kafka/02_participant",
    "kafka/03_real_broker",
    "spark/sink/04_stream_writer",
]
IN_DEPTH = "## In depth"  # begins the part of a notebook for a second reading
BOOK_HEAD = "| notebook | minutes | in depth |\n|---|---|---|\n"
WORDS, LINES, STEP = 130, 8, 5
ANSWER = re.compile(r"#\| folded (?:a solution|the answer: (.+))\n")  # the second names functions
HEAD = "| notebook | in one sentence | minutes |\n|---|---|---|\n"


def notebooks(folder: Path = NBS) -> list[Path]:
    """The front page, then folder by folder in reading order."""
    inside = (path for name in FOLDERS for path in sorted((folder / name).glob("*.ipynb")))
    return [folder / "index.ipynb", *inside]


def module_of(notebook: Path) -> str:
    """What the notebook exports, if it exports: the module's name below kafka2pc."""
    place = notebook.relative_to(NBS).with_suffix("")
    return ".".join([*place.parent.parts, re.sub(r"^\d\d_", "", place.name)])


def minutes(cells: list, lesson: bool = False) -> int:
    exact = exact_minutes(cells) + (work_minutes(cells) if lesson else 0)
    return max(STEP, STEP * round(exact / STEP))


def is_lesson(notebook: Path) -> bool:
    """One of the six."""
    return notebook.parent.name == "course" and notebook.stem[:2] <= "06"


def work_minutes(cells: list) -> float:
    """Of a lesson: to write the answers, and to think before the predictions."""
    answers = {cell.source: ANSWER.match(cell.source) for cell in cells}
    written = sum(statements(source, found[1]) for source, found in answers.items() if found)
    return written + len(predictions(cells)) / 2


def statements(code: str, names: str | None) -> int:
    """Of the functions in a folded answer; only of those that its first line names, if it does."""
    functions = [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.FunctionDef)]
    wanted = [f for f in functions if names is None or re.search(rf"\b{f.name}\b", names)]
    inside = [node for f in wanted for node in ast.walk(f) if isinstance(node, ast.stmt)]
    return sum(not isinstance(getattr(node, "value", None), ast.Constant) for node in inside)


def exact_minutes(cells: list) -> float:
    words = lines = 0
    for cell in cells:
        text, exercise, _ = cell.source.partition("**Exercise.**")
        if cell.cell_type == "markdown":
            words += len(text.split())
        elif visible(cell) and not ANSWER.match(text) and not only_imports(text):
            code = [line for line in text.splitlines() if line.strip()]
            lines += sum(not line.startswith("#|") for line in code)
        if exercise:
            break
    return words / WORDS + lines / LINES


def parsed(code: str) -> ast.Module | None:
    """None for a cell that is not plain Python: with an await, or a line for the shell."""
    try:
        return ast.parse(code)
    except SyntaxError:
        return None


def is_import(node: ast.stmt) -> bool:
    return isinstance(node, (ast.Import, ast.ImportFrom))


def only_imports(code: str) -> bool:
    tree = parsed(code)
    return tree is not None and all(map(is_import, tree.body))


def row(notebook: Path) -> str:
    cells = nbformat.read(notebook, 4).cells
    text = "\n".join(cell.source for cell in cells if cell.cell_type == "markdown")
    sentence = re.search(r"^> (.+)$", text, re.M)[1].rstrip(".")
    place = notebook.relative_to(NBS).with_suffix("")
    return f"| [{place}](../{place}.ipynb) | {sentence} | {minutes(cells, is_lesson(notebook))} |\n"


def tables() -> str:
    """A heading, a sentence and a table for each package that has notebooks."""
    parts = []
    for package in PACKAGES:
        rows = [row(n) for n in notebooks()[1:] if n.relative_to(NBS).parts[0] == package]
        if rows:
            parts.append(f"## {package}\n\n{PURPOSES[package]}\n\n{HEAD}{''.join(rows)}")
    return "\n".join(parts).strip()


def path_minutes(place: str) -> tuple[float, float]:
    """Of a notebook of the book: its path, and its second part."""
    cells = nbformat.read(NBS / f"{place}.ipynb", 4).cells
    starts = [cell.source.startswith(IN_DEPTH) for cell in cells]
    whole = exact_minutes(cells)
    upper = exact_minutes(cells[: starts.index(True)]) if True in starts else whole
    return upper, whole - upper


def book() -> str:
    """A row for each notebook of the path, and one for all together, in hours."""
    times = [path_minutes(place) for place in PATH]
    rows = [
        f"| [{module_of(NBS / f'{place}.ipynb').removeprefix('protocol.')}]"
        f"({os.path.relpath(NBS / place, BOOK.parent)}.ipynb) | {upper:.0f} | {depth:.0f} |\n"
        for place, (upper, depth) in zip(PATH, times, strict=True)
    ]
    hours = [sum(column) / 60 for column in zip(*times, strict=True)]
    total = f"| all, in hours | {hours[0]:.1f} | {hours[1]:.1f} |"
    return f"{BOOK_HEAD}{''.join(rows)}{total}"


def renew(notebook: Path, head: str, text: str) -> bool:
    """Put the text into the cell that has this head of a table. False: it is there."""
    page = nbformat.read(notebook, 4)
    cell = next(c for c in page.cells if c.cell_type == "markdown" and head in c.source + "\n")
    if cell.source == text:
        return False
    if "--check" not in sys.argv[1:]:
        cell.source = text
        nbformat.write(page, notebook)
    return True


def main() -> int:
    tables_of = {PAGE: (HEAD, tables()), BOOK: (BOOK_HEAD, book())}
    old = [page for page, (head, text) in tables_of.items() if renew(page, head, text)]
    if "--check" not in sys.argv[1:]:
        return 0
    for page in old:
        print(
            f"{page.relative_to(NBS)} does not list the notebooks as they are: run `make prepare`"
        )
    return 1 if old else 0


if __name__ == "__main__":
    sys.exit(main())
