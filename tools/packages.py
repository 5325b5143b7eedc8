#!/usr/bin/env python3
"""Draw images/packages.svg: the packages, their modules, and which package imports which.

All of it is read from the imports of the code. With --check: write nothing, exit 1 if the picture
is not what the code says.
"""

import ast
import sys
from pathlib import Path
from xml.sax.saxutils import escape

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "kafka2pc"
PICTURE = ROOT / "images" / "packages.svg"
ROWS = [
    ["proof", "course"],
    ["operations"],
    ["spark"],
    ["decision_logs", "local"],
    ["kafka", "stores"],
    ["backends"],
    ["protocol"],
]
WIDTH, LINE, PAD, GAP = 860, 17, 10, 34
LETTERS = 7.1  # pixels of a letter
STYLE = """
text{font:13px system-ui,sans-serif;fill:#24292f} .name{font-weight:600;font-size:14px}
.box{fill:#f6f8fa;stroke:#57606a} .arrow{stroke:#57606a;stroke-width:1.4;marker-end:url(#a)}
.head{fill:#57606a}
@media(prefers-color-scheme:dark){text{fill:#e6edf3} .box{fill:#161b22;stroke:#adbac7}
.arrow{stroke:#adbac7} .head{fill:#adbac7}}
"""


def modules(package: str) -> list[str]:
    return sorted(p.stem for p in (PACKAGE / package).glob("[!_]*.py"))


def imported(path: Path) -> set[str]:
    """The packages that a module imports when it is imported itself, its own left out."""
    found = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if not isinstance(node, ast.ImportFrom):
            continue
        module = node.module or ""
        if node.level == 2:
            found.add(module.split(".")[0])
        elif node.level == 0 and module.startswith("kafka2pc."):
            found.add(module.split(".")[1])
    return found - {path.parent.name}


def edges() -> dict[str, set[str]]:
    """Package -> the packages that it imports."""
    return {
        package: set().union(set(), *(imported(p) for p in (PACKAGE / package).glob("[!_]*.py")))
        for row in ROWS
        for package in row
        if modules(package)
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


def wrapped(words: list[str], width: float) -> list[str]:
    lines = [""]
    for word in words:
        if lines[-1] and (len(lines[-1]) + len(word) + 2) * LETTERS > width - 2 * PAD:
            lines.append("")
        lines[-1] += (", " if lines[-1] else "") + word
    return lines


def boxes(graph: dict[str, set[str]]) -> dict[str, tuple[float, float, float, float, list[str]]]:
    """Package -> left, top, width, height, lines of its box."""
    placed, top = {}, PAD
    for row in ROWS:
        row = [package for package in row if package in graph]
        width = (WIDTH - PAD) / len(row) - PAD
        texts = {package: wrapped(modules(package), width) for package in row}
        height = 2 * PAD + LINE * (1 + max(map(len, texts.values())))
        for n, package in enumerate(row):
            placed[package] = PAD + n * (width + PAD), top, width, height, texts[package]
        top += height + GAP
    return placed


def box(package: str, left: float, top: float, width: float, height: float, lines: list[str]):
    yield f'<rect x="{left}" y="{top}" width="{width}" height="{height}" rx="5" class="box"/>'
    yield f'<text x="{left + PAD}" y="{top + LINE + 4}" class="name">{package}</text>'
    for n, line in enumerate(lines):
        yield f'<text x="{left + PAD}" y="{top + LINE * (n + 2) + 6}">{escape(line)}</text>'


def arrows(graph: dict[str, set[str]], placed: dict):
    """One for each direct edge, from the lower rim of a box to the upper rim of the other."""
    wanted = direct(graph)
    for package, other in wanted:
        left, top, width, height, _ = placed[package]
        others = [o for p, o in wanted if p == package]
        at = left + width * (others.index(other) + 1) / (len(others) + 1)
        o_left, o_top, o_width, *_ = placed[other]
        sources = [p for p, o in wanted if o == other]
        to = o_left + o_width * (sources.index(package) + 1) / (len(sources) + 1)
        yield (
            f'<line x1="{at:.0f}" y1="{top + height}" x2="{to:.0f}" y2="{o_top - 3}"'
            ' class="arrow"/>'
        )


def draw() -> str:
    graph = edges()
    placed = boxes(graph)
    bottom = max(top + height for _, top, _, height, _ in placed.values()) + PAD
    title = "The packages of kafka2pc and their modules; an arrow points to what is imported"
    head = (
        '<defs><marker id="a" viewBox="0 0 8 8" refX="6" refY="4" markerWidth="7"'
        ' markerHeight="7" orient="auto"><path d="M0 0L8 4L0 8z" class="head"/></marker></defs>'
    )
    parts = [*arrows(graph, placed), *(line for p in placed for line in box(p, *placed[p]))]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {bottom}" width="{WIDTH}"'
        f' role="img"><title>{title}</title><style>{STYLE}</style>{head}'
        + "\n".join(parts)
        + "</svg>\n"
    )


def main() -> int:
    drawn = draw()
    if "--check" not in sys.argv[1:]:
        PICTURE.write_text(drawn, encoding="utf-8")
        return 0
    if PICTURE.exists() and PICTURE.read_text(encoding="utf-8") == drawn:
        return 0
    print("images/packages.svg is not what the imports say: run `make prepare`.")
    return 1


if __name__ == "__main__":
    sys.exit(main())
