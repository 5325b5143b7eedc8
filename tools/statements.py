#!/usr/bin/env python3
"""Print the number of statements of the phases: how much a reader has to read.

Docstrings and imports are not counted.
"""

import ast
import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parent.parent / "kafka2pc" / "protocol"
WINGS = ["phases", "phases/gate", "operators"]


def is_docstring(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def statements(module: Path) -> int:
    nodes = ast.walk(ast.parse(module.read_text(encoding="utf-8")))
    skipped = (ast.Import, ast.ImportFrom)
    return sum(
        isinstance(node, ast.stmt) and not isinstance(node, skipped) and not is_docstring(node)
        for node in nodes
    )


def main() -> int:
    modules = [path for wing in WINGS for path in sorted((FOLDER / wing).glob("[!_]*.py"))]
    counts = {path.stem: statements(path) for path in modules}
    words = ", ".join(f"{name} {count}" for name, count in counts.items())
    print(f"statements: {words}; together {sum(counts.values())}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
