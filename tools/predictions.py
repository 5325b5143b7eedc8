"""The predictions of a lesson: a question, the code cells that show what happens, and the answer.

A question is in the last paragraph of a markdown cell: it says "**Before you run the next cell:**",
or it is bold and ends the paragraph (one more sentence that ends in a colon may follow). A code
cell with `prediction = None` asks, too. The answer is the first markdown cell behind the code.
"""

import re
from dataclasses import dataclass

BEFORE = re.compile(r"\*\*Before you run the next cells?\b")
BOLD = re.compile(r"\*\*[^*]+\?\*\*(\s[^.?!]*:)?$")
TO_FILL_IN = re.compile(r"^prediction = None\b", re.M)
HEADING = re.compile(r"^##+ ", re.M)


@dataclass(frozen=True)
class Prediction:
    """Numbers of cells. `shows`: the code cells."""

    question: int
    shows: range
    answer: int


def asks(paragraph: str) -> bool:
    return bool(BEFORE.search(paragraph) or BOLD.search(paragraph.strip()))


def is_question(cell) -> bool:
    if cell.cell_type == "code":
        return bool(TO_FILL_IN.search(cell.source))
    return asks(cell.source.strip().rpartition("\n\n")[2])


def predictions(cells: list) -> list[Prediction]:
    """In the order of the lesson. A markdown question with a cell to fill in is one prediction."""
    found = []
    for question, cell in enumerate(cells):
        texts = (n for n in range(question + 1, len(cells)) if cells[n].cell_type == "markdown")
        answer = next(texts, 0)
        shows = range(question + 1, answer)
        if is_question(cell) and shows and not is_question(cells[shows[0]]):
            found.append(Prediction(question, shows, answer))
    return found


def split(answer: str) -> tuple[str, str]:
    """What answers, and what comes behind it: all from the first heading on, or the paragraph of
    the next question. One that is nothing but a question answers nothing.
    """
    if heading := HEADING.search(answer):
        return answer[: heading.start()].strip(), answer[heading.start() :].strip()
    text, _, last = answer.strip().rpartition("\n\n")
    if asks(last) or last.endswith("?"):
        return text.strip(), last
    return answer.strip(), ""
