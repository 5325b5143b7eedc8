#!/usr/bin/env python3
"""Fold the cells that a reader of a lesson skips: set-up, checks, solutions. --check: only report.

Folded is a code cell with `#| hide`, `#| default_exp` or `#| folded`. JupyterLab then shows only
its first line, so that line says what is in it: `#| folded imports`, `checks`, `a solution`,
`helpers: found, look`, `set-up` or `clean-up`. Words of your own after `#| folded` are kept. To
fold an exported cell, write `#| folded` above its `#| export`. (The line is not `#| hide imports`,
because nbdev passes words behind a directive to the function of that name: `hide_` takes none, and
those behind `export` are the name of a module.)
"""

import ast
import re
import sys
from pathlib import Path

import nbformat
from contents import NBS, is_import, notebooks, parsed

FOLDED = re.compile(r"^#\|\s*(hide|default_exp|folded)\b", re.M)
LINE = re.compile(r"^#\| *folded\b(.*)\n?", re.M)
DERIVED = re.compile(r"imports|checks|set-up|clean-up|a solution|(checks and )?helpers: .*|")
CHECKS = re.compile(r"\b(test_\w+\(|assert |ExceptionExpected\()")
CLEANS = re.compile(r"\.(stop|close|cleanup)\(\)|\brmtree\(|^del ")
COLUMNS = 100
IMPORTS, SOLUTION = "imports", "a solution"


def is_folded(cell) -> bool:
    return cell.cell_type == "code" and bool(FOLDED.search(cell.source))


def words(cell) -> str:
    """What the first line says. Empty: it has no such line."""
    found = LINE.search(cell.source)
    return found[1].strip() if found else ""


def is_solution(cell) -> bool:
    return cell.cell_type == "code" and words(cell) == SOLUTION


def derived(code: str) -> str:
    """What is in a cell, by its statements. A check inside a function is not one."""
    tree = parsed(code)
    if tree is None:
        return "set-up"
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    names = [node.name for node in tree.body if isinstance(node, kinds)]
    others = [node for node in tree.body if not isinstance(node, kinds)]
    checks = any(CHECKS.search(ast.unparse(node)) for node in others)
    if names:
        return ("checks and " if checks else "") + f"helpers: {', '.join(names)}"
    if checks:
        return "checks"
    rest = [ast.unparse(node) for node in others if not is_import(node)]
    if not rest:
        return IMPORTS
    return "clean-up" if all(map(CLEANS.search, rest)) else "set-up"


def shortened(line: str) -> str:
    """At most COLUMNS columns: the last names are left out."""
    while len(line) > COLUMNS:
        line = line.removesuffix(", ...").rpartition(", ")[0] + ", ..."
    return line


def solution_of(cells: list) -> int | None:
    """The solution of the exercise: the cell behind it if that is folded, otherwise the last folded
    one.
    """
    texts = [cell.source if cell.cell_type == "markdown" else "" for cell in cells]
    places = [n for n, text in enumerate(texts) if "**Exercise.**" in text]
    behind = [n for n in range(places[0] + 1, len(cells)) if is_folded(cells[n])] if places else []
    if not behind:
        return None
    return behind[0] if behind[0] == places[0] + 1 else behind[-1]


def fold(cells: list) -> None:
    solution = solution_of(cells)
    for number, cell in enumerate(cells):
        if cell.cell_type != "code":
            continue
        jupyter = cell.metadata.setdefault("jupyter", {})
        jupyter.pop("source_hidden", None)
        if is_folded(cell):
            jupyter["source_hidden"] = True
            name(cell, SOLUTION if number == solution else derived(cell.source))
        if not jupyter:
            del cell.metadata["jupyter"]


def name(cell, content: str) -> None:
    """Write the first line, unless it has words of its own, or is `#| default_exp`."""
    if re.match(r"#\|\s*default_exp\b", cell.source):
        return
    old = words(cell)
    kept = content if DERIVED.fullmatch(old) else old
    cell.source = shortened(f"#| folded {kept}") + "\n" + LINE.sub("", cell.source)


def renew(notebook: Path) -> bool:
    """False: it is as it should be."""
    page = nbformat.read(notebook, 4)
    before = nbformat.writes(page)
    fold(page.cells)
    if nbformat.writes(page) == before:
        return False
    if "--check" not in sys.argv[1:]:
        nbformat.write(page, notebook)
    return True


def main() -> int:
    old = [notebook for notebook in notebooks() if renew(notebook)]
    if "--check" not in sys.argv[1:]:
        return 0
    for notebook in old:
        print(f"{notebook.relative_to(NBS)}: a cell is not folded as it should be: `make prepare`")
    return 1 if old else 0


if __name__ == "__main__":
    sys.exit(main())
