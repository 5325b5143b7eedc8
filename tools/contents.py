#!/usr/bin/env python3
"""Write the tables of notebooks into the guide's page "All notebooks": name, sentence, minutes.
--check: only report.

The sentence is the one that opens the notebook. A minute is 130 words, or 8 lines of the code that
is shown, rounded to 5 minutes; imports and exercises are not counted.
"""

import ast
import re
import sys
from pathlib import Path

import nbformat
from readme import visible

NBS = Path(__file__).resolve().parent.parent / "nbs"
PAGE = NBS / "guide" / "06_notebooks.ipynb"
FOLDERS = [  # in reading order
    "guide",
    "course",
    "protocol",
    "protocol/log",
    "protocol/phases",
    "protocol/rare",
    "protocol/operators",
    "backends",
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
]
PACKAGES = list(dict.fromkeys(folder.partition("/")[0] for folder in FOLDERS))
PURPOSES = {
    "guide": "Pages for users, without exercises.",
    "course": "Six lessons, two hours, and the small implementation that grows in them.",
    "protocol": "The three phases, the decision log, and what travels between processes.",
    "backends": "Disks, object stores and PostgreSQL connections.",
    "kafka": "Requests, record batches, transactions, readers, and Kafka as a participant.",
    "stores": "Files, objects, PostgreSQL, MariaDB and a write-ahead log as participants.",
    "decision_logs": "The places where decisions are kept.",
    "spark": "The sink, the source, and `foreachBatch`.",
    "operations": "Doctor, repair, and the command line.",
    "local": "A real Kafka and real databases on this machine.",
    "proof": "The checker, the model, drills, the timeline, the demonstration and the benchmark.",
}
WORDS, LINES, STEP = 130, 8, 5
HEAD = "| notebook | in one sentence | minutes |\n|---|---|---|\n"


def notebooks(folder: Path = NBS) -> list[Path]:
    """The front page, then folder by folder in reading order."""
    inside = (path for name in FOLDERS for path in sorted((folder / name).glob("*.ipynb")))
    return [folder / "index.ipynb", *inside]


def module_of(notebook: Path) -> str:
    """What the notebook exports, if it exports: the module's name below kafka2pc."""
    place = notebook.relative_to(NBS).with_suffix("")
    return ".".join([*place.parent.parts, re.sub(r"^\d\d_", "", place.name)])


def minutes(cells: list) -> int:
    words = lines = 0
    for cell in cells:
        text, exercise, _ = cell.source.partition("**Exercise.**")
        if cell.cell_type == "markdown":
            words += len(text.split())
        elif visible(cell) and not only_imports(text):
            code = [line for line in text.splitlines() if line.strip()]
            lines += sum(not line.startswith("#|") for line in code)
        if exercise:
            break
    return max(STEP, STEP * round((words / WORDS + lines / LINES) / STEP))


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
    return f"| [{place}](../{place}.ipynb) | {sentence} | {minutes(cells)} |\n"


def tables() -> str:
    """A heading, a sentence and a table for each package that has notebooks."""
    parts = []
    for package in PACKAGES:
        rows = [row(n) for n in notebooks()[1:] if n.relative_to(NBS).parts[0] == package]
        if rows:
            parts.append(f"## {package}\n\n{PURPOSES[package]}\n\n{HEAD}{''.join(rows)}")
    return "\n".join(parts).strip()


def main() -> int:
    page = nbformat.read(PAGE, 4)
    cell = next(c for c in page.cells if c.cell_type == "markdown" and HEAD in c.source + "\n")
    if cell.source == tables():
        return 0
    if "--check" in sys.argv[1:]:
        print(
            f"{PAGE.relative_to(NBS)} does not list the notebooks as they are: run `make prepare`"
        )
        return 1
    cell.source = tables()
    nbformat.write(page, PAGE)
    return 0


if __name__ == "__main__":
    sys.exit(main())
