#!/usr/bin/env python3
"""Print how the exported code is cut into cells, and how much of it no run shows.

Lines are those of code and docstrings: blank lines, directives and imports are not counted. A run
is a cell that is neither exported nor folded, and has an output. With folders or notebooks as
arguments (`tools/cells.py kafka/wire stores/02_file`): also what is above a limit there.
"""

import ast
import re
import statistics
import sys
from dataclasses import dataclass, field
from pathlib import Path

import nbformat
from contents import NBS, notebooks

LONG, LONGEST = 40, 80  # lines of an exported cell: nearly all have at most the first
LONG_SHARE = 0.05
BEFORE_A_RUN = 80  # exported lines above the first run
HIDDEN_SHARE = 1 / 3  # of the code that is not exported
EXPORTED = re.compile(r"^#\|\s*export\b", re.M)
FOLDED = re.compile(r"^#\|\s*(hide|folded)\b", re.M)
NO_CODE = re.compile(r"^(#\||%|!).*", re.M)


@dataclass
class Cells:
    """What is counted of one notebook, in lines. `exported`: of each cell, in order, with its first
    definition; `alone`: those that no run follows before the next one; `gap`: the most exported
    lines between two runs.
    """

    name: str
    exported: list = field(default_factory=list)
    alone: list = field(default_factory=list)
    first: int = 0
    gap: int = 0
    hidden: int = 0
    visible: int = 0


def lines(source: str) -> int:
    """Of a cell, without blank lines, directives and imports."""
    code = NO_CODE.sub("", source)
    try:
        nodes = list(ast.walk(ast.parse(code)))
    except SyntaxError:  # a magic inside a statement
        nodes = []
    imports = [node for node in nodes if isinstance(node, (ast.Import, ast.ImportFrom))]
    skipped = {n for node in imports for n in range(node.lineno, node.end_lineno + 1)}
    return sum(bool(text.strip()) and n not in skipped for n, text in numbered(code))


def numbered(code: str) -> enumerate:
    return enumerate(code.splitlines(), start=1)


def first_definition(source: str) -> str:
    found = re.search(r"^(?:async )?(?:def|class) (\w+)|^(\w+)[^\n(]* = ", source, re.M)
    return (found[1] or found[2]) if found else "?"


def count(notebook: Path) -> Cells:
    counted = Cells(notebook.relative_to(NBS).with_suffix("").as_posix())
    waiting, unseen, shown = [], 0, False
    for cell in nbformat.read(notebook, as_version=4).cells:
        if cell.cell_type != "code":
            continue
        number = lines(cell.source)
        if EXPORTED.search(cell.source) and number:
            counted.alone += waiting
            waiting = [(number, first_definition(cell.source))]
            counted.exported += waiting
            unseen += number
            counted.gap = max(counted.gap, unseen)
            counted.first += 0 if shown else number
        elif FOLDED.search(cell.source):
            counted.hidden += number
        elif number:
            counted.visible += number
            if cell.outputs:
                waiting, unseen, shown = [], 0, True
    counted.alone += waiting
    return counted


def summary(all_cells: list[Cells]) -> str:
    sizes = [number for one in all_cells for number, _ in one.exported]
    alone = sum(len(one.alone) for one in all_cells)
    hidden = sum(one.hidden for one in all_cells)
    others = hidden + sum(one.visible for one in all_cells)
    return (
        f"cells: {len(sizes)} exported, {statistics.mean(sizes):.1f} lines on average,"
        f" median {statistics.median(sizes):g}, largest {max(sizes)};"
        f" {share(sum(n > LONG for n in sizes), len(sizes))} above {LONG},"
        f" {sum(n > LONGEST for n in sizes)} above {LONGEST};"
        f" a run follows {share(len(sizes) - alone, len(sizes))};"
        f" {sum(one.first > BEFORE_A_RUN for one in all_cells)} notebooks show nothing before"
        f" {BEFORE_A_RUN} lines; of {others} lines that are not exported,"
        f" {share(hidden, others)} are folded"
    )


def share(part: int, whole: int) -> str:
    return f"{100 * part / max(whole, 1):.1f} %"


def details(one: Cells) -> list[str]:
    found = [f"cell of {n}: {name}" for n, name in one.exported if n > LONG]
    if one.first > BEFORE_A_RUN:
        found.append(f"{one.first} exported lines before the first run")
    if one.gap > BEFORE_A_RUN:
        found.append(f"{one.gap} exported lines between two runs")
    if one.alone:
        found.append("no run behind " + ", ".join(f"{name} ({n})" for n, name in one.alone))
    if one.hidden > HIDDEN_SHARE * (one.hidden + one.visible):
        found.append(f"{one.hidden} of {one.hidden + one.visible} lines are folded")
    return [f"{one.name}: {text}" for text in found]


def main() -> int:
    wanted = tuple(sys.argv[1:])
    all_cells = [one for one in map(count, notebooks()) if one.name.startswith(wanted or "")]
    if wanted:
        print("\n".join(text for one in all_cells for text in details(one)))
    print(summary(all_cells))
    return 0


if __name__ == "__main__":
    sys.exit(main())
