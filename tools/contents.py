#!/usr/bin/env python3
"""Write the table of notebooks into nbs/index.ipynb: name, sentence, minutes. --check: only report.

The sentence is the one that opens the notebook. A minute is 130 words, or 8 lines of the code that
is shown, rounded to 5 minutes; exercises are not counted.
"""

import re
import sys
from pathlib import Path

import nbformat
from readme import visible

NBS = Path(__file__).resolve().parent.parent / "nbs"
INDEX = NBS / "index.ipynb"
FOLDERS = [  # in reading order
    "course",
    "protocol",
    "protocol/log",
    "protocol/phases",
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
WORDS, LINES, STEP = 130, 8, 5
HEAD = "| notebook | in one sentence | minutes |\n|---|---|---|\n"
TABLE = re.compile(re.escape(HEAD) + r"(?:\|.*\n)*")


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
        if cell.cell_type == "markdown":
            words += len(cell.source.split())
        elif visible(cell):
            code = [line for line in cell.source.splitlines() if line.strip()]
            lines += sum(not line.startswith("#|") for line in code)
    return max(STEP, STEP * round((words / WORDS + lines / LINES) / STEP))


def row(notebook: Path) -> str:
    cells = nbformat.read(notebook, 4).cells
    text = "\n".join(cell.source for cell in cells if cell.cell_type == "markdown")
    sentence = re.search(r"^> (.+)$", text, re.M)[1].rstrip(".")
    place = notebook.relative_to(NBS).with_suffix("")
    return f"| [{place}]({place}.ipynb) | {sentence} | {minutes(cells)} |\n"


def main() -> int:
    index = nbformat.read(INDEX, 4)
    table = HEAD + "".join(row(notebook) for notebook in notebooks()[1:])
    before = [cell.source for cell in index.cells]
    for cell in index.cells:
        if cell.cell_type == "markdown":
            cell.source = TABLE.sub(lambda _: table, cell.source)
    if before == [cell.source for cell in index.cells]:
        return 0
    if "--check" in sys.argv[1:]:
        print("nbs/index.ipynb does not list the notebooks as they are: run `make prepare`")
        return 1
    nbformat.write(index, INDEX)
    return 0


if __name__ == "__main__":
    sys.exit(main())
