"""Draws what is in images/ but for the demonstration: one batch, the three phases, a gate, the
record format, and the timeline after a crash.

`python tools/pictures.py`. The phases run in memory, the timeline runs on a local Kafka; both are
drawn by `proof.drawing`, and all colours of states come from its table. The bytes of the record
format are those that the columnar engine sends.
"""

import struct
import sys
from contextlib import suppress
from pathlib import Path
from xml.sax.saxutils import escape

import numpy as np
import pyarrow as pa

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from kafka2pc.kafka.records.encoder import BATCH_HEAD, Section, record_batch, records
from kafka2pc.kafka.records.rows import rows_of
from kafka2pc.kafka.records.varints import varints  # noqa: E402
from kafka2pc.local.broker import LocalKafka  # noqa: E402
from kafka2pc.proof.crash_points import CrashPoint
from kafka2pc.proof.model.world import QUERY  # noqa: E402
from kafka2pc.proof.timeline.drawing import LOOKS, draw
from kafka2pc.proof.timeline.timeline import Timeline  # noqa: E402
from kafka2pc.protocol.driver import Driver
from kafka2pc.protocol.errors import Superseded
from kafka2pc.protocol.history import History  # noqa: E402
from kafka2pc.protocol.log.slots import MemoryLog  # noqa: E402
from kafka2pc.protocol.memory import MemoryParticipant
from kafka2pc.protocol.messages import PreparedTxnState
from kafka2pc.protocol.phases.commit import commit
from kafka2pc.protocol.phases.decide import decide
from kafka2pc.protocol.phases.finish import finish
from kafka2pc.protocol.phases.precommit import precommit  # noqa: E402
from kafka2pc.protocol.phases.requests import send
from kafka2pc.protocol.phases.restore import restore
from kafka2pc.protocol.phases.sweep import sweep
from kafka2pc.protocol.states import TxnState

# -- one batch, with its own words --

WIDTH, LANE, LEFT = 860, 62, 118
LANES = ["task 1", "task 2", "driver", "reader"]
# lane, from, to, class, text: what is in a lane and for how long (x in percent of the width)
BARS = [
    ("task 1", 10, 31, "open", "begin · write · flush"),
    ("task 1", 31, 54, "pre", "pre-committed"),
    ("task 1", 54, 100, "done", "committed"),
    ("task 2", 13, 34, "open", "begin · write · flush"),
    ("task 2", 34, 54, "pre", "pre-committed"),
    ("task 2", 54, 82, "pre", "in doubt"),
    ("task 2", 82, 100, "done", "committed"),
    ("reader", 0, 54, "none", "sees nothing"),
    ("reader", 54, 82, "half", "sees task 1's rows"),
    ("reader", 82, 100, "done", "all rows, once"),
]
# x, class, text: what the driver does
STEPS = [
    (3, "step", "claim"),
    (45, "decision", "COMMIT"),
    (54, "step", "EndTxn"),
    (63, "crash", "SIGKILL"),
    (73, "step", "restart"),
    (82, "step", "EndTxn"),
]
ARROWS = [(54, "task 1"), (82, "task 2")]
STYLE = (
    "".join(
        f".{kind}{{fill:{LOOKS[state].colour}}}"
        for kind, state in (
            ("open", TxnState.OPEN),
            ("pre", TxnState.PRECOMMITTED),
            ("done", TxnState.COMMITTED),
        )
    )
    + """
text{font:13px system-ui,sans-serif;fill:#24292f} .lane{font-weight:600}
.in{fill:#111;text-anchor:middle;font-size:12px} .say{text-anchor:middle;font-size:12px}
.line{stroke:#8c959f} .none{fill:#d9dde2} .half{fill:#f3b49a}
.step{fill:#57606a} .decision{fill:#0072b2} .crash{fill:none;stroke:#d55e00;stroke-width:3.5}
.arrow{stroke:#57606a;stroke-width:1.6;marker-end:url(#a)}
@media(prefers-color-scheme:dark){text{fill:#e6edf3} .in{fill:#111} .step{fill:#adbac7}
.arrow{stroke:#adbac7} .decision{fill:#56b4e9} .head{fill:#adbac7}}
"""
)


def x(percent):
    return round(LEFT + percent * (WIDTH - LEFT - 12) / 100, 1)


def top(lane, lanes):
    return 20 + lanes.index(lane) * LANE


def bar(lanes, lane, start, end, kind, text):
    middle = (x(start) + x(end)) / 2
    return (
        f'<rect x="{x(start)}" y="{top(lane, lanes)}" width="{round(x(end) - x(start) - 1.5, 1)}"'
        f' height="32" rx="4" class="{kind}"/><text x="{middle}" y="{top(lane, lanes) + 20}"'
        f' class="in">{escape(text)}</text>'
    )


def step(lanes, at, kind, text):
    cx, cy = x(at), top("driver", lanes) + 16
    mark = {
        "step": f'<circle cx="{cx}" cy="{cy}" r="6" class="step"/>',
        "decision": f'<path d="M{cx} {cy - 13}l13 13l-13 13l-13 -13z" class="decision"/>',
        "crash": f'<path d="M{cx - 9} {cy - 9}l18 18M{cx + 9} {cy - 9}l-18 18" class="crash"/>',
    }[kind]
    return mark + f'<text x="{cx}" y="{cy + 31}" class="say">{escape(text)}</text>'


def arrow(lanes, at, lane):
    begin, end = top("driver", lanes) + 8, top(lane, lanes) + 38
    return f'<line x1="{x(at)}" y1="{begin}" x2="{x(at)}" y2="{end}" class="arrow"/>'


def in_lanes(title, lanes, bars, steps, arrows):
    """The SVG text."""
    below = 56 if lanes[-1] == "driver" else 44  # its steps have names below the line
    height = top(lanes[-1], lanes) + below
    names = "".join(
        f'<text x="8" y="{top(lane, lanes) + 21}" class="lane">{lane}</text>' for lane in lanes
    )
    y = top("driver", lanes) + 16
    line = f'<line x1="{x(0)}" y1="{y}" x2="{x(100)}" y2="{y}" class="line"/>'
    head = (
        '<defs><marker id="a" viewBox="0 0 8 8" refX="6" refY="4" markerWidth="7" markerHeight="7"'
        ' orient="auto"><path d="M0 0L8 4L0 8z" class="step head"/></marker></defs>'
    )
    parts = [bar(lanes, *b) for b in bars] + [arrow(lanes, *a) for a in arrows]
    parts += [step(lanes, *s) for s in steps]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}"'
        f' role="img"><title>{title}</title><style>{STYLE}</style>{head}'
        + names
        + line
        + "".join(parts)
        + "</svg>\n"
    )


def one_batch():
    """The SVG text."""
    title = (
        "Two tasks pre-commit, the driver decides, ends one transaction and dies; the next"
        " start finds the decision and ends the other"
    )
    return in_lanes(title, LANES, BARS, STEPS, ARROWS)


# -- source, state and sink in one micro-batch --


def dataflow():
    """The SVG text: what of a batch is where, from the plan to Spark's own record of its end."""
    title = (
        "A micro-batch N: the driver writes the offsets of the source, claims, and sweeps; tasks"
        " read the source, change the state and pre-commit; the driver writes COMMIT, ends all"
        " transactions, and Spark writes commits/N"
    )
    lanes = ["source", "state", "sink", "driver"]
    bars = [
        ("source", 2, 22, "none", "which offsets are new?"),
        ("source", 22, 45, "open", "tasks read these offsets"),
        ("state", 22, 45, "open", "state of N-1, changed"),
        ("state", 45, 100, "pre", "state of N is written"),
        ("sink", 22, 45, "open", "begin · write · flush"),
        ("sink", 45, 76, "pre", "pre-committed"),
        ("sink", 76, 100, "done", "committed"),
    ]
    steps = [
        (4, "step", "offsets/N"),
        (17, "step", "claim · sweep"),
        (60, "decision", "COMMIT"),
        (76, "step", "EndTxn"),
        (94, "step", "commits/N"),
    ]
    return in_lanes(title, lanes, bars, steps, [(76, "sink")])


# -- the three phases, run by the code that does them --


class Batch:
    """A batch of two tasks, in memory, up to the end of the pre-commit phase."""

    def __init__(self):
        self.history, self.store = History(), MemoryParticipant("store")
        self.driver = Driver(
            query_id=QUERY,
            log=MemoryLog(),
            participants={"store": self.store},
            history=self.history,
        )
        self.press("pre-commit phase")
        self.plan = restore(self.driver, 0)
        self.messages = [self.task(self.plan) for _ in range(2)]

    def task(self, plan):
        return precommit([self.store], plan, [["row"]], self.history)

    def press(self, text):
        self.history.append("invoke", "press", text=text)

    def crash(self, text):
        pid = self.history.events[-1].process
        self.history.append("info", "crash", batch_id=0, pid=pid, text=text)

    def decide(self):
        return decide(self.driver, self.plan, self.messages)

    def drawn(self):
        return draw(self.history.events)


def precommitted():
    return Batch().drawn()


def committed():
    batch = Batch()
    batch.press("commit phase")
    commit(batch.driver, batch.messages, 0)
    batch.history.append("ok", "commit log", batch_id=0)
    return batch.drawn()


def decided():
    batch = Batch()
    batch.press("decide")
    batch.decide()
    return batch.drawn()


def finished():
    batch = Batch()
    batch.press("decide, and finish")
    decision = batch.decide()
    send(batch.driver, "commit", decision.committables[0], 0)
    batch.crash("between two commits")
    batch.press("finish, by the next start")
    finish(batch.driver, decision)
    return batch.drawn()


def swept():
    batch = Batch()
    batch.task(batch.plan)
    batch.press("decide, and finish")
    finish(batch.driver, batch.decide())
    batch.press("sweep")
    sweep(batch.driver, batch.plan.token, own_parity=0)
    return batch.drawn()


def claimed():
    """Run 2 claims and sweeps; run 1 then meets the claim in its own slot."""
    batch = Batch()
    batch.press("run 2 claims, and sweeps")
    restore(batch.driver, 0)
    batch.press("run 1 wants to decide")
    with suppress(Superseded):
        batch.decide()
    return batch.drawn()


def restored():
    batch = Batch()
    batch.press("commit phase")
    batch.decide()
    batch.crash("after the decision")
    batch.press("restore phase")
    again = restore(batch.driver, 0)
    commit(batch.driver, [batch.task(again) for _ in range(2)], 0)
    batch.history.append("ok", "commit log", batch_id=0)
    return batch.drawn()


def phases():
    """Name -> SVG, for the phases and their steps."""
    return {
        "precommit": precommitted(),
        "decide": decided(),
        "finish": finished(),
        "sweep": swept(),
        "commit": committed(),
        "claim": claimed(),
        "restore": restored(),
    }


# -- the record format: a batch of one record, field by field --

HEAD = [
    "first offset",
    "bytes that follow",
    "leader epoch",
    "format",
    "checksum",
    "attributes",
    "last offset, relative",
    "first timestamp",
    "last timestamp",
    "producer id",
    "producer epoch",
    "first sequence number",
    "records",
]
RECORD = [
    ("bytes that follow", 12),
    ("attributes", 0),
    ("timestamp, relative", 0),
    ("offset, relative", 0),
    ("key: its length, and k", 1),
    ("value: its length, and hello", 5),
    ("headers", 0),
]
CELL, ROW, ACROSS = 40, 50, 21


def fields():
    """Every field of the batch: its name, its bytes, and whether it belongs to the record. The
    bytes are those of the columnar engine.
    """
    rows = rows_of(
        pa.RecordBatch.from_pydict({"key": ["k"], "value": ["hello"]}), now_ms=1_700_000_000_000
    )
    _, content = records(rows, np.arange(1))
    section = Section("events", 0, 1, rows.timestamps_ms, rows.timestamps_ms, content)
    batch, at = record_batch(section, PreparedTxnState(4000, 7), 0), 0
    sizes = [struct.calcsize(">" + kind) for kind in BATCH_HEAD.format[1:]]
    # a varint, and what it announces: of the key and the value, their bytes
    sizes += [
        len(varints(np.array([number]))[0].as_py()) + (number if "its length" in name else 0)
        for name, number in RECORD
    ]
    for n, (name, size) in enumerate(zip(HEAD + [name for name, _ in RECORD], sizes, strict=True)):
        yield name, batch[at : at + size], n >= len(HEAD)
        at += size
    assert at == len(batch), "a field is missing"


def record_format():
    """The SVG text: a line of boxes as wide as their bytes, the name of each field above them."""
    drawn, column, row = [], 0, 0
    for name, content, of_record in fields():
        lines = wrapped(name, len(content))
        if column + max(len(content), 2) > ACROSS or (of_record and name == RECORD[0][0]):
            column, row = 0, row + 1
        left, low = 8 + column * CELL, 40 + row * (ROW + 40)
        kind = "done" if of_record else "pre"
        drawn.append(
            f'<rect x="{left}" y="{low}" width="{len(content) * CELL - 3}" height="26" rx="4"'
            f' class="{kind}"/>'
        )
        drawn += [
            f'<text x="{left + n * CELL + 18}" y="{low + 18}" class="in">{byte:02x}</text>'
            for n, byte in enumerate(content)
        ]
        drawn += [
            f'<text x="{left}" y="{low - 6 - 14 * n}" class="name">{escape(line)}</text>'
            for n, line in enumerate(reversed(lines))
        ]
        column += max(len(content), 2)
    size = (
        f'viewBox="0 0 {16 + ACROSS * CELL} {74 + row * (ROW + 40)}" width="{16 + ACROSS * CELL}"'
    )
    title = (
        "<title>The bytes of a record batch: a head of 61 bytes, then the records; here one, with"
        " the key k and the value hello</title>"
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size}'
        f' role="img">{title}<style>{STYLE}.name{{font-size:11px}}</style>{"".join(drawn)}</svg>\n'
    )


def wrapped(name, count):
    """The words of a name, in lines that fit over so many bytes."""
    lines, width = [""], max(count, 2) * CELL // 6
    for word in name.split():
        if lines[-1] and len(lines[-1]) + 1 + len(word) > width:
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}".strip()
    return lines


# -- a partition with a gate, offset by offset --

BOX = 72
SLOTS = [
    "gate",
    *(f"task {n}" for n in range(1, 5)),
    *(f"commit {n}" for n in range(1, 5)),
    "abort",
]


def partition(low, name, kinds, stable, found):
    """A line of boxes, one for each offset, their class by `kinds`; below it what a reader finds in
    front of its last stable offset.
    """
    drawn = [
        f'<rect x="{LEFT + n * BOX}" y="{low}" width="{BOX - 3}" height="32" rx="4"'
        f' class="{kind}"/>'
        f'<text x="{LEFT + n * BOX + 34}" y="{low + 20}" class="in">{SLOTS[n]}</text>'
        f'<text x="{LEFT + n * BOX + 34}" y="{low - 7}" class="say">{n}</text>'
        for n, kind in enumerate(kinds)
    ]
    at, end = LEFT + stable * BOX - 1.5, LEFT + len(SLOTS) * BOX - 1.5
    side, beside = ("start", at + 8) if at < end else ("end", at - 8)
    return "".join(drawn) + (
        f'<text x="8" y="{low + 20}" class="lane">{name}</text>'
        f'<path d="M{at} {low - 8}V{low + 62}" class="stable"/>'
        f'<text x="{beside}" y="{low + 58}" text-anchor="{side}">last stable offset: {stable}.'
        f" A read_committed reader finds {found}</text>"
    )


def gate():
    """The SVG text: before and after the end of the gate, as in the lesson on it."""
    title = (
        "A partition before and after the end of the gate: the gate at offset 0, the rows of four"
        " tasks, their four commit markers, and the abort marker; the last stable offset moves from"
        " 0 to 10"
    )
    style = (
        f".gone{{fill:{LOOKS[TxnState.ABORTED].colour}}} .stable{{stroke:#d55e00;stroke-width:3;"
        "fill:none}"
    )
    before = partition(26, "before", ["open", *["none"] * 8], 0, "nothing")
    kinds = ["gone", *["done"] * 4, *["none"] * 4, "gone"]
    after = partition(134, "after", kinds, 10, "the rows of all four")
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} 204" width="{WIDTH}"'
        f' role="img"><title>{title}</title><style>{STYLE}{style}</style>{before}{after}</svg>\n'
    )


# -- the timeline after a crash, on a real broker --


def crash():
    """Name -> SVG: a batch, a crash between two commits, and the restart."""
    with LocalKafka(progress=None) as kafka:
        timeline = Timeline(kafka.client_conf)
        timeline.write().crash(CrashPoint.AFTER_FIRST_COMMIT)
        drawn = {"timeline-crash": draw(timeline.events)}
        timeline.restart()
        drawn["timeline-restart"] = draw(timeline.events)
        timeline.close()
    return drawn


if __name__ == "__main__":
    for name, svg in (
        {"one-batch": one_batch(), "dataflow": dataflow(), "record-format": record_format()}
        | {"gate": gate()}
        | phases()
        | crash()
    ).items():
        (ROOT / "images" / f"{name}.svg").write_text(svg, encoding="utf-8")
        print(f"images/{name}.svg, {len(svg)} characters")
