#!/usr/bin/env python3
"""Carry the seconds of the last run's tests over into tests/seconds.csv: the next run begins with
what takes longest.

A run of some tests renews theirs. Left out are tests of less than half a second, and those that are
gone. A number that is right within a third stays, so that few lines change.
"""

import ast
import sys
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests" / "support"))
from longest_first import DURATIONS, SECONDS, read, write  # noqa: E402

LEAST_S = 0.5


@cache
def functions(file: Path) -> set[str]:
    """The functions that a file defines."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def exists(test: str, root: Path = ROOT) -> bool:
    """Is there a test of this id, parameters apart? It may be one of a suite in tests/support."""
    file, _, rest = test.partition("[")[0].partition("::")
    suites = (root / "tests" / "support").glob("*_suite.py")
    name = rest.rpartition("::")[2]
    return (root / file).is_file() and any(name in functions(f) for f in [root / file, *suites])


def merge(old: dict[str, float], new: dict[str, float]) -> dict[str, float]:
    """The old seconds with those of a new run, as they shall be kept."""
    changed = {t: s for t, s in new.items() if abs(s - old.get(t, 0)) > old.get(t, 0) / 3}
    kept = {t: s for t, s in (old | changed).items() if s >= LEAST_S and exists(t)}
    return {test: round(2 * s) / 2 for test, s in kept.items()}


def main() -> int:
    if not DURATIONS.exists():
        print(f"{DURATIONS} is missing: run `make test-all` first")
        return 1
    kept = merge(read(SECONDS), read(DURATIONS))
    write(SECONDS, kept)
    print(f"{len(kept)} tests of at least {LEAST_S:g} s: {sum(kept.values()):,.0f} s in all")
    return 0


if __name__ == "__main__":
    sys.exit(main())
