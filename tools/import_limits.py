#!/usr/bin/env python3
"""What a Databricks workspace would refuse in notebooks: too large, one name twice, and in those
that claim to run there, calls that do not exist there.
"""

import ast
import sys
from collections import Counter
from pathlib import Path

import nbformat
from IPython.core.inputtransformer2 import TransformerManager

NBS = Path(__file__).resolve().parent.parent / "nbs"
# an import, and what one cell may hold
NOTEBOOK_BYTES_MAX, CELL_BYTES_MAX = 10 * 1024**2, 6 * 1024**2
CLAIM = "DATABRICKS_RUNTIME_VERSION"  # who asks for it, claims to run there
NOT_THERE = {"sparkContext", "_sc", "_jvm", "_jsc", "_jdf", "rdd", "toJavaRDD"}
ENDLESS = {"processingTime", "continuous", "realTime"}


def problems(folder: Path) -> list[str]:
    """Everything that is wrong with the notebooks of `folder`, a line each."""
    notebooks = sorted(folder.rglob("*.ipynb"))
    named = Counter(in_workspace(path) for path in [*notebooks, *folder.rglob("*.py")])
    found = [
        f"{path.name}: its name is there twice"
        for path in notebooks
        if named[in_workspace(path)] > 1
    ]
    for path in notebooks:
        if path.stat().st_size > NOTEBOOK_BYTES_MAX:
            found.append(
                f"{path.name}: {path.stat().st_size} bytes, at most {NOTEBOOK_BYTES_MAX} can be"
                " imported"
            )
        found += [f"{path.name}: {problem}" for problem in of_cells(nbformat.read(path, 4).cells)]
    return found


def in_workspace(path: Path) -> str:
    """The name under which a workspace would keep it: without its suffix, and without regard to
    case.
    """
    return str(path.with_suffix("")).lower()


def of_cells(cells: list) -> list[str]:
    """What is wrong with the cells of one notebook."""
    found = [
        f"a cell of {len(cell.source)} characters"
        for cell in cells
        if len(cell.source.encode()) > CELL_BYTES_MAX
    ]
    sources = [cell.source for cell in cells if cell.cell_type == "code"]
    if not any(CLAIM in source for source in sources):
        return found
    nodes = [
        node
        for source in sources
        for node in ast.walk(ast.parse(TransformerManager().transform_cell(source)))
    ]
    attributes = Counter(node.attr for node in nodes if isinstance(node, ast.Attribute))
    found += [f"{name} is not there" for name in sorted(NOT_THERE & attributes.keys())]
    triggers = [
        {k.arg for k in node.keywords}
        for node in nodes
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "trigger"
    ]
    found += [
        f"trigger({name}=...) never ends" for name in sorted(set().union(*triggers) & ENDLESS)
    ]
    if attributes["writeStream"] > sum("availableNow" in names for names in triggers):
        found.append("a stream without trigger(availableNow=True)")
    return found


if __name__ == "__main__":
    sys.exit("\n".join(problems(NBS)))
