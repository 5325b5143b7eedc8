"""Draws images/one-batch.svg: one micro-batch, a crash between two EndTxns, and the restart that finishes it. `python tools/picture.py`"""
from pathlib import Path
from xml.sax.saxutils import escape

WIDTH, LANE, LEFT = 860, 62, 118
LANES = ["task 1", "task 2", "driver", "reader"]
# lane, from, to, class, text: what stands in a lane and for how long (x in percent of the story)
BARS = [
    ("task 1", 10, 31, "open", "begin · write · flush"), ("task 1", 31, 54, "pre", "pre-committed"), ("task 1", 54, 100, "done", "committed"),
    ("task 2", 13, 34, "open", "begin · write · flush"), ("task 2", 34, 54, "pre", "pre-committed"), ("task 2", 54, 82, "pre", "in doubt"), ("task 2", 82, 100, "done", "committed"),
    ("reader", 0, 54, "none", "sees nothing"), ("reader", 54, 82, "half", "sees task 1's rows"), ("reader", 82, 100, "done", "all rows, once"),
]
# x, class, text: what the driver does
STEPS = [(3, "step", "claim"), (45, "decision", "COMMIT"), (54, "step", "EndTxn"), (63, "crash", "SIGKILL"), (73, "step", "restart"), (82, "step", "EndTxn")]
ARROWS = [(54, "task 1"), (82, "task 2")]
STYLE = """
text{font:13px system-ui,sans-serif;fill:#24292f} .lane{font-weight:600} .in{fill:#111;text-anchor:middle;font-size:12px} .say{text-anchor:middle;font-size:12px}
.line{stroke:#8c959f} .open{fill:#cfe3f5} .pre{fill:#f3cf7a} .done{fill:#8fd0b4} .none{fill:#d9dde2} .half{fill:#f3b49a}
.step{fill:#57606a} .decision{fill:#0072b2} .crash{fill:none;stroke:#d55e00;stroke-width:3.5} .arrow{stroke:#57606a;stroke-width:1.6;marker-end:url(#a)}
@media(prefers-color-scheme:dark){text{fill:#e6edf3} .in{fill:#111} .step{fill:#adbac7} .arrow{stroke:#adbac7} .decision{fill:#56b4e9} .head{fill:#adbac7}}
"""


def x(percent):
    return round(LEFT + percent * (WIDTH - LEFT - 12) / 100, 1)


def top(lane):
    return 20 + LANES.index(lane) * LANE


def bar(lane, start, end, kind, text):
    middle = (x(start) + x(end)) / 2
    return (f'<rect x="{x(start)}" y="{top(lane)}" width="{round(x(end) - x(start) - 1.5, 1)}" height="32" rx="4" class="{kind}"/>'
            f'<text x="{middle}" y="{top(lane) + 20}" class="in">{escape(text)}</text>')


def step(at, kind, text):
    cx, cy = x(at), top("driver") + 16
    mark = {"step": f'<circle cx="{cx}" cy="{cy}" r="6" class="step"/>',
            "decision": f'<path d="M{cx} {cy - 13}l13 13l-13 13l-13 -13z" class="decision"/>',
            "crash": f'<path d="M{cx - 9} {cy - 9}l18 18M{cx + 9} {cy - 9}l-18 18" class="crash"/>'}[kind]
    return mark + f'<text x="{cx}" y="{cy + 31}" class="say">{escape(text)}</text>'


def arrow(at, lane):
    return f'<line x1="{x(at)}" y1="{top("driver") + 8}" x2="{x(at)}" y2="{top(lane) + 38}" class="arrow"/>'


def picture():
    """The SVG text."""
    height = top(LANES[-1]) + 44
    lanes = "".join(f'<text x="8" y="{top(lane) + 21}" class="lane">{lane}</text>' for lane in LANES)
    line = f'<line x1="{x(0)}" y1="{top("driver") + 16}" x2="{x(100)}" y2="{top("driver") + 16}" class="line"/>'
    head = '<defs><marker id="a" viewBox="0 0 8 8" refX="6" refY="4" markerWidth="7" markerHeight="7" orient="auto"><path d="M0 0L8 4L0 8z" class="step head"/></marker></defs>'
    title = "<title>Two tasks pre-commit, the driver decides, ends one transaction and dies; the next start finds the decision and ends the other</title>"
    parts = [bar(*b) for b in BARS] + [arrow(*a) for a in ARROWS] + [step(*s) for s in STEPS]
    return (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" role="img">{title}<style>{STYLE}</style>{head}'
            + lanes + line + "".join(parts) + "</svg>\n")


if __name__ == "__main__":
    (Path(__file__).resolve().parent.parent / "images" / "one-batch.svg").write_text(picture(), encoding="utf-8")
