#!/usr/bin/env python3
"""Write the toy of the course as one page of HTML: tools/toy.html with all scenarios in it.

`python tools/toy_page.py FILE`. The page loads nothing. Colours are those of `course.story`.
"""

import json
import sys
from collections.abc import Mapping
from html import escape
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from kafka2pc.course import story  # noqa: E402
from kafka2pc.course.story import Cell  # noqa: E402
from kafka2pc.course.toy import (  # noqa: E402
    ANSWERS,
    CRASHES,
    FIRST,
    OFF,
    PEOPLE,
    Scenario,
    about,
    named,
    scenario,
)
from kafka2pc.proof.timeline.drawing import LOOKS  # noqa: E402
from kafka2pc.protocol.states import TxnState  # noqa: E402

TEMPLATE = ROOT / "tools" / "toy.html"


def _colours() -> str:
    """The colours of a story as variables, and its own style sheet."""

    def variables(ink: Mapping[str, str]) -> str:
        return "".join(f"--{name}:{colour};" for name, colour in ink.items())

    light = variables(story.LIGHT | story.MARKS | {"focus": LOOKS[TxnState.OPEN].colour})
    dark = variables(story.DARK)
    return f":root{{{light}}}@media(prefers-color-scheme:dark){{:root{{{dark}}}}}{story.style()}"


def _short(cell: Cell) -> str:
    """What a box shows that is too narrow for its words: the letter of a state, or the rows."""
    letters = {state.value: look.letter for state, look in LOOKS.items()}
    return letters.get(cell.look) or ("" if cell.text == "nothing" else cell.text.replace(" ", ""))


def _shown(one: Scenario, cells: dict[Cell, int]) -> dict:
    """A scenario as the script reads it. Cells are numbers; new ones are added to `cells`."""
    lanes = {
        name: [cells.setdefault(cell, len(cells)) for cell in lane]
        for name, lane in one.picture.lanes.items()
    }
    return {
        "steps": one.picture.steps,
        "says": one.says,
        "found": one.found,
        "first": one.first,
        "answers": one.answers,
        "verdict": one.verdict,
        "lanes": lanes,
    }


def data() -> dict:
    """All scenarios. Those that look the same share a picture."""
    cells: dict[Cell, int] = {}
    pictures: dict[str, int] = {}
    scenarios: dict[str, dict[str, int]] = {off: {} for off in OFF}
    for off in OFF:
        for crash in CRASHES:
            text = json.dumps(_shown(scenario(off, crash), cells))
            scenarios[off][crash] = pictures.setdefault(text, len(pictures))
    names = ("left", "lane", "top", "widest", "letter")
    return {
        "sizes": {name: getattr(story, name.upper()) for name in names},
        "cells": [[*cell, _short(cell)] for cell in cells],
        "pictures": [json.loads(text) for text in pictures],
        "scenarios": scenarios,
        "killed": [crash for crash, m in CRASHES.items() if m.when and not m.happens],
        "answers": ANSWERS,
        "off": {off: _rule(off) for off in OFF},
    }


def _rule(off: str) -> dict:
    """What the verdict says about the rule, if something went wrong and if not, and its lesson."""
    lesson = OFF[off].lesson
    link = [f"Lesson {int(lesson[:2])}", f"../course/{lesson}.html"]
    return {"about": [about(off, False), about(off, True)], "lesson": link}


def page() -> str:
    """The page, complete: it loads nothing."""

    def options(labels: Mapping[str, str], chosen: str) -> str:
        return "".join(
            f"<option value={name}{' selected' if name == chosen else ''}>{escape(words)}</option>"
            for name, words in labels.items()
        )

    guesses = "".join(
        f'<label><input type="radio" name="guess" value="{answer}"><span>{words}</span></label>'
        for answer, words in ANSWERS.items()
    )
    people_of = "".join(
        f'<li data-row="{row}"><b>{name} <small>row {row}</small></b><span></span></li>'
        for row, name in PEOPLE.items()
    )
    parts = {
        "COLOURS": _colours(),
        "RULES": options({off: named(off) for off in OFF}, FIRST[0]),
        "CRASHES": options({crash: m.label for crash, m in CRASHES.items()}, FIRST[1]),
        "GUESSES": guesses,
        "PEOPLE": people_of,
        "LETTERS": ", ".join(f"{look.letter} {look.word}" for look in LOOKS.values()),
        "DATA": json.dumps(data(), separators=(",", ":")).replace("<", "\\u003c"),
    }
    text = TEMPLATE.read_text(encoding="utf-8")
    for name, part in parts.items():
        text = text.replace(f"@{name}@", part)
    return text


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(page(), encoding="utf-8")
