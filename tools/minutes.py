#!/usr/bin/env python3
"""Write into the table of nbs/index.ipynb how long each notebook takes to read. With --check: write
nothing, exit 1 if a number is not right.

A minute for 130 words, and for 8 lines of the code that is shown, rounded to 5 minutes; exercises
are not counted.
"""

import re
import sys
from pathlib import Path

import nbformat
from readme import visible

INDEX = Path(__file__).resolve().parent.parent / "nbs" / "index.ipynb"
WORDS, LINES, STEP = 130, 8, 5
ROW = re.compile(r"^(\| \[[\w/]+\]\(([\w/]+\.ipynb)\) \| .*? \|)(?: \d+ \|)?$", re.M)


def minutes(notebook: Path) -> int:
    words = lines = 0
    for cell in nbformat.read(notebook, 4).cells:
        if cell.cell_type == "markdown":
            words += len(cell.source.split())
        elif visible(cell):
            lines += sum(
                bool(line.strip()) and not line.startswith("#|")
                for line in cell.source.splitlines()
            )
    return max(STEP, STEP * round((words / WORDS + lines / LINES) / STEP))


def main() -> int:
    index = nbformat.read(INDEX, 4)
    before = [cell.source for cell in index.cells]
    for cell in index.cells:
        if cell.cell_type == "markdown":
            cell.source = ROW.sub(
                lambda row: f"{row[1]} {minutes(INDEX.parent / row[2])} |", cell.source
            )
    stale = before != [cell.source for cell in index.cells]
    if stale and "--check" not in sys.argv[1:]:
        nbformat.write(index, INDEX)
        return 0
    if stale:
        print("nbs/index.ipynb is not as it should be: run `make prepare`")
    return int(stale)


if __name__ == "__main__":
    sys.exit(main())
