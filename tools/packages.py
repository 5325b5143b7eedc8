#!/usr/bin/env python3
"""Draw images/packages.svg: the packages, their modules, and which package imports which.

All of it is read from the imports of the code. With --check: write nothing, exit 1 if the picture
is not what the code says.
"""

import ast
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Iterator
from xml.sax.saxutils import escape

from contents import FOLDERS, NBS, PACKAGES, module_of

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "kafka2pc"
PICTURE = ROOT / "images" / "packages.svg"
# Package -> its first and last row, and its part of the width: every arrow goes to the row below.
PLACES = {
    "course": (0, 0, 0.5, 1),
    "operations": (0, 1, 0, 0.5),
    "proof": (1, 1, 0.5, 1),
    "spark": (2, 2, 0, 0.5),
    "stores": (2, 3, 0.5, 0.75),
    "local": (2, 4, 0.75, 1),
    "decision_logs": (3, 3, 0, 0.5),
    "kafka": (4, 4, 0, 0.5),
    "backends": (4, 4, 0.5, 0.75),
    "protocol": (5, 5, 0, 1),
}
WIDTH, LINE, PAD, GAP = 860, 17, 10, 34
LETTERS = 7.1  # pixels of a letter
ASIDE = 40  # pixels from the side of a box to an arrow that goes to a box beside the one below
STYLE = """
text{font:13px system-ui,sans-serif;fill:#24292f} .name{font-weight:600;font-size:14px}
.box{fill:#f6f8fa;stroke:#57606a} .arrow{stroke:#57606a;stroke-width:1.4;marker-end:url(#a)}
.head{fill:#57606a}
@media(prefers-color-scheme:dark){text{fill:#e6edf3} .box{fill:#161b22;stroke:#adbac7}
.arrow{stroke:#adbac7} .head{fill:#adbac7}}
"""


def modules(folder: str) -> list[str]:
    """Of a package or a wing, in the order of the notebooks."""
    exported = {p.stem for p in (PACKAGE / folder).glob("[!_]*.py")}
    names = (module_of(p).rpartition(".")[2] for p in sorted((NBS / folder).glob("*.ipynb")))
    return [name for name in names if name in exported]


def absolute(node: ast.ImportFrom, path: Path) -> list[str]:
    """The parts of the name of the module or package that `from` names in the module at `path`."""
    start = path.relative_to(ROOT).parts[: -node.level] if node.level else ()
    return [*start, *(node.module.split(".") if node.module else ())]


def imported(path: Path) -> set[str]:
    """The packages that a module imports when it is imported itself, its own left out."""
    body = ast.parse(path.read_text(encoding="utf-8")).body
    names = [absolute(node, path) for node in body if isinstance(node, ast.ImportFrom)]
    found = {parts[1] for parts in names if parts[0] == "kafka2pc" and len(parts) > 1}
    return found - {path.relative_to(PACKAGE).parts[0]}


def edges() -> dict[str, set[str]]:
    """Package -> the packages that it imports."""
    files = {package: sorted((PACKAGE / package).rglob("[!_]*.py")) for package in PACKAGES}
    return {
        package: set().union(*(imported(path) for path in paths))
        for package, paths in files.items()
        if paths
    }


def reachable(graph: dict[str, set[str]], start: str) -> set[str]:
    seen, waiting = set(), list(graph.get(start, ()))
    while waiting:
        package = waiting.pop()
        if package not in seen:
            seen.add(package)
            waiting += graph.get(package, ())
    return seen


def direct(graph: dict[str, set[str]]) -> list[tuple[str, str]]:
    """The edges that no longer way replaces."""
    return [
        (package, other)
        for package, others in graph.items()
        for other in sorted(others)
        if not any(other in reachable(graph, third) for third in others - {other})
    ]


def listed(package: str, width: float) -> list[str]:
    """The lines of a box: the modules of the package, then each wing with its own."""
    lines = []
    for folder in FOLDERS:
        owner, _, wing = folder.partition("/")
        if owner == package and (inside := modules(folder)):
            lines += wrapped(inside, width, f"{wing}/ " if wing else "")
    return lines


def wrapped(words: list[str], width: float, start: str) -> list[str]:
    lines = [start]
    for word in words:
        if (len(lines[-1]) + len(word) + 2) * LETTERS > width - 2 * PAD:
            lines.append("")
        lines[-1] += (", " if lines[-1] not in ("", start) else "") + word
    return lines


@dataclass(frozen=True)
class Box:
    """A package in the picture, in pixels."""

    package: str
    left: float
    top: float
    width: float
    height: float
    lines: tuple[str, ...]

    @property
    def right(self) -> float:
        return self.left + self.width

    @property
    def bottom(self) -> float:
        return self.top + self.height


def boxes(graph: dict[str, set[str]]) -> dict[str, Box]:
    sides, texts, heights = {}, {}, {}
    for package in graph:
        first, last, begin, end = PLACES[package]
        sides[package] = PAD + begin * (WIDTH - PAD), (end - begin) * (WIDTH - PAD) - PAD
        texts[package] = listed(package, sides[package][1])
        if first == last:
            needed = 2 * PAD + LINE * (1 + len(texts[package]))
            heights[first] = max(heights.get(first, 0), needed)
    tops = {row: PAD + sum(heights[r] + GAP for r in range(row)) for row in heights}
    placed = {}
    for package, (left, width) in sides.items():
        first, last, *_ = PLACES[package]
        height = tops[last] + heights[last] - tops[first]
        placed[package] = Box(package, left, tops[first], width, height, tuple(texts[package]))
    return placed


def drawn(box: Box) -> Iterator[str]:
    yield (
        f'<rect x="{box.left}" y="{box.top}" width="{box.width}" height="{box.height}" rx="5"'
        ' class="box"/>'
    )
    left = box.left + PAD
    yield f'<text x="{left}" y="{box.top + LINE + 4}" class="name">{box.package}</text>'
    for n, line in enumerate(box.lines):
        yield f'<text x="{left}" y="{box.top + LINE * (n + 2) + 6}">{escape(line)}</text>'


def arrow(above: Box, below: Box) -> str:
    """From the lower rim of a box to the upper rim of another, straight down where they overlap."""
    begin, end = max(above.left, below.left), min(above.right, below.right)
    if begin < end:
        start = goal = (begin + end) / 2
    elif above.left > below.left:
        start, goal = above.left + ASIDE, below.right - ASIDE
    else:
        start, goal = above.right - ASIDE, below.left + ASIDE
    return (
        f'<line x1="{start:.0f}" y1="{above.bottom}" x2="{goal:.0f}" y2="{below.top - 3}"'
        ' class="arrow"/>'
    )


def draw() -> str:
    graph = edges()
    placed = boxes(graph)
    bottom = max(box.bottom for box in placed.values()) + PAD
    title = "The packages of kafka2pc and their modules; an arrow points to what is imported"
    head = (
        '<defs><marker id="a" viewBox="0 0 8 8" refX="6" refY="4" markerWidth="7"'
        ' markerHeight="7" orient="auto"><path d="M0 0L8 4L0 8z" class="head"/></marker></defs>'
    )
    parts = [
        *(arrow(placed[package], placed[other]) for package, other in direct(graph)),
        *(line for box in placed.values() for line in drawn(box)),
    ]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {bottom}" width="{WIDTH}"'
        f' role="img"><title>{title}</title><style>{STYLE}</style>{head}'
        + "\n".join(parts)
        + "</svg>\n"
    )


def main() -> int:
    picture = draw()
    if "--check" not in sys.argv[1:]:
        PICTURE.write_text(picture, encoding="utf-8")
        return 0
    if PICTURE.exists() and PICTURE.read_text(encoding="utf-8") == picture:
        return 0
    print("images/packages.svg is not what the imports say: run `make prepare`.")
    return 1


if __name__ == "__main__":
    sys.exit(main())
