#!/usr/bin/env python3
"""Print how the exported code is cut into cells, and how much of it no run shows.

Lines are those of code and docstrings: blank lines, directives and imports are not counted. A run
is a cell that is neither exported nor folded, and has an output. With folders or notebooks as
arguments (`tools/cells.py kafka/wire stores/02_file`): also what could be better there.
--check: only report what breaks a rule.
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
ALONE_SHARE = 0.1  # of the exported cells: the others are followed by a run
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
    imports = [node for node in nodes if is_import(node)]
    skipped = {n for node in imports for n in range(node.lineno, node.end_lineno + 1)}
    return sum(bool(text.strip()) and n not in skipped for n, text in numbered(code))


def is_import(node: ast.AST) -> bool:
    """Also those for types only."""
    if isinstance(node, ast.If):
        return not node.orelse and all(map(is_import, node.body))
    return isinstance(node, (ast.Import, ast.ImportFrom))


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
    sizes = [number for one in all_cells for number, _ in one.exported] or [0]
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


def broken_rules(all_cells: list[Cells]) -> list[str]:
    """What breaks a rule."""
    cells = [(one.name, *cell) for one in all_cells for cell in one.exported]
    found = [f"{name}: the cell of {of} has {n} lines" for name, n, of in cells if n > LONGEST]
    found += [
        f"{one.name}: {one.first} exported lines, and nothing is seen"
        for one in all_cells
        if one.first > BEFORE_A_RUN
    ]
    long = [f"{name} ({of}, {n})" for name, n, of in cells if n > LONG]
    if len(long) > LONG_SHARE * len(cells):
        found.append(f"too many cells have more than {LONG} lines: {', '.join(long)}")
    alone = [f"{one.name} ({of})" for one in all_cells for _, of in one.alone]
    if len(alone) > ALONE_SHARE * len(cells):
        found.append(f"too many cells have no run: {', '.join(alone)}")
    hidden = sum(one.hidden for one in all_cells)
    others = hidden + sum(one.visible for one in all_cells)
    if hidden > HIDDEN_SHARE * others:
        found.append(f"too much is folded: {hidden} of {others} lines that are not exported")
    return found


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
    if "--check" in sys.argv:
        found = broken_rules([count(notebook) for notebook in notebooks()])
        print("\n".join(found) or "no cell breaks a rule")
        return 1 if found else 0
    wanted = tuple(sys.argv[1:])
    all_cells = [one for one in map(count, notebooks()) if one.name.startswith(wanted or "")]
    if wanted:
        print("\n".join(text for one in all_cells for text in details(one)))
    print(summary(all_cells))
    return 0


if __name__ == "__main__":
    sys.exit(main())
