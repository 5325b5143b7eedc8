#!/usr/bin/env python3
"""Draw images/steps.svg: which notebook implements which step of a micro-batch. --check: write
nothing, exit 1 if the picture is not what this file says.
"""

import sys
from pathlib import Path
from xml.sax.saxutils import escape

ROOT = Path(__file__).resolve().parent.parent
PICTURE = ROOT / "images" / "steps.svg"
PHASES = ["Restore", "Pre-commit", "Commit"]
PLACES = ["driver, before the first row", "every task", "driver, after the last task"]
# Row: what it is about, then for each phase its steps and the notebook that implements them.
ROWS = [
    (
        "Spark calls",
        ("plan the micro-batch", "spark/sink/04_stream_writer"),
        ("write the rows of a task", "spark/sink/04_stream_writer"),
        ("commit the micro-batch", "spark/sink/04_stream_writer"),
    ),
    (
        "phase",
        ("finish, claim, sweep", "protocol/phases/09_restore"),
        ("write, flush, check", "protocol/phases/01_precommit"),
        ("check, decide, commit", "protocol/phases/07_commit"),
    ),
    (
        "decision log",
        ("ABORT in the next free slot", "protocol/phases/08_claim"),
        None,
        ("COMMIT in the claimed slot", "protocol/phases/04_decide"),
    ),
    (
        "Kafka as a store",
        ("list, describe, abort", "kafka/02_participant"),
        ("begin, prepare", "kafka/02_participant"),
        ("describe, commit", "kafka/02_participant"),
    ),
    (
        "rows",
        None,
        ("columns become record batches", "kafka/records/04_encoder"),
        None,
    ),
    (
        "requests",
        ("ListTransactions, EndTxn", "kafka/wire/06_descriptions"),
        ("InitProducerId, Produce", "kafka/write/06_sender"),
        ("EndTxn", "kafka/wire/07_transactions"),
    ),
]
WIDTH, LEFT, HEAD, ROW, GAP = 900, 128, 62, 58, 10
STYLE = """
text{font:13px system-ui,sans-serif;fill:#24292f} .name{font-weight:600;font-size:15px}
.small{font-size:12px;fill:#57606a} .file{font:12px ui-monospace,monospace;fill:#0550ae}
.box{fill:#f6f8fa;stroke:#57606a} .arrow{stroke:#57606a;stroke-width:1.6}
@media(prefers-color-scheme:dark){text{fill:#e6edf3} .small{fill:#adbac7} .file{fill:#79c0ff}
.box{fill:#161b22;stroke:#adbac7} .arrow{stroke:#adbac7}}
"""


def text(x: float, y: float, what: str, look: str = "") -> str:
    return f'<text x="{x:g}" y="{y:g}" class="{look}">{escape(what)}</text>'


def column(n: int) -> tuple[float, float]:
    """Where the column of a phase begins, and how wide it is."""
    width = (WIDTH - LEFT - 2 * GAP) / 3
    return LEFT + n * (width + GAP), width


def heads() -> list[str]:
    parts = []
    for n, (phase, place) in enumerate(zip(PHASES, PLACES)):
        x, width = column(n)
        parts += [text(x + 8, 24, phase, "name"), text(x + 8, 44, place, "small")]
        if n:
            parts.append(f'<path class="arrow" d="M{x - 60:g} 20h44m-7 -5l7 5l-7 5" fill="none"/>')
    return parts


def row(n: int, what: str, *steps: tuple[str, str] | None) -> list[str]:
    y = HEAD + n * ROW
    parts = [text(6, y + 30, what, "name" if n == 1 else "")]
    for phase, step in enumerate(steps):
        if step is None:
            continue
        x, width = column(phase)
        box = f'x="{x:g}" y="{y}" width="{width:g}" height="{ROW - GAP}" rx="5"'
        parts.append(f'<rect class="box" {box}/>')
        parts += [text(x + 8, y + 19, step[0]), text(x + 8, y + 38, step[1], "file")]
    return parts


def picture() -> str:
    rows = [part for n, cells in enumerate(ROWS) for part in row(n, *cells)]
    height = HEAD + ROW * len(ROWS)
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}">'
    title = "<title>Which notebook implements which step of a micro-batch</title>"
    return "\n".join([head, title, f"<style>{STYLE}</style>", *heads(), *rows, "</svg>\n"])


def main() -> int:
    drawn = picture()
    if PICTURE.exists() and PICTURE.read_text(encoding="utf-8") == drawn:
        return 0
    if "--check" in sys.argv[1:]:
        print("images/steps.svg is not what tools/steps.py draws: run `make prepare`")
        return 1
    PICTURE.write_text(drawn, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
