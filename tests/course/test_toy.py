"""The toy: what its scenarios show is what the drivers do, and the rules say what goes wrong."""

import json
import re
from collections import Counter

import nbformat
import pytest
from contents import NBS
from toy_page import page

from kafka2pc.course import toy as module
from kafka2pc.course.story import draw
from kafka2pc.course.toy import ANSWERS, CRASHES, FIRST, OFF, PEOPLE, Toy, grown, run, scenario
from kafka2pc.protocol.states import TxnState

ALL = [(off, crash) for off in OFF for crash in CRASHES]
WRONG = {  # rule off -> the crashes after which something is wrong, and what
    "none": {},
    "flush": dict.fromkeys(CRASHES, ("lost",)),
    "first": dict.fromkeys(("undecided", "committed", "fails", "timeout"), ("twice",)),
    "abort": {"fails": ("lost",)},
    "check": {"timeout": ("lost",)},
    "again": dict.fromkeys(("decided", "uncommitted", "committed", "fails"), ("twice",)),
    "look": dict.fromkeys(("decided", "uncommitted", "committed", "fails"), ("lost", "stuck")),
    "sweep": dict.fromkeys(("precommit", "undecided"), ("stuck",)),
}
LINE = re.compile(r"^(.*?) are (charged twice|never charged)", re.M)


@pytest.mark.never_unsteady
@pytest.mark.parametrize("off", OFF)
def test_a_rule_that_is_off_goes_wrong_after_these_crashes_and_no_others(off):
    found = {crash: scenario(off, crash).answers for crash in CRASHES}
    assert found == dict.fromkeys(CRASHES, ("once",)) | WRONG[off]
    assert bool(WRONG[off]) == (off != "none")


@pytest.mark.never_unsteady
@pytest.mark.parametrize(("off", "crash"), ALL)
def test_a_verdict_says_what_is_in_the_store(off, crash):
    store = run(off, crash).store
    times = Counter(store.read())
    verdict = scenario(off, crash).verdict
    lines = {says: names for names, says in LINE.findall(verdict.replace(". ", ".\n"))}
    for says, count in (("charged twice", 2), ("never charged", 0)):
        named = {row for row, name in PEOPLE.items() if name in lines.get(says, "")}
        assert named == {row for row in PEOPLE if times[row] == count}
    assert ("Each customer is charged once" in verdict) == (times == Counter("abcd"))
    still_open = [t for t in store.txns.values() if t.state is TxnState.PRECOMMITTED]
    assert re.findall(r"(\d) transaction", verdict) == [str(len(still_open))] * bool(still_open)


@pytest.mark.parametrize(("off", "crash"), ALL)
def test_each_step_has_a_caption(off, crash):
    one = scenario(off, crash)
    assert len(one.says) == len(one.picture.steps) == len(one.found)
    assert all(says.endswith(".") for says in one.says)
    restarts = [n for n, words in enumerate(one.picture.steps) if "restart" in words]
    assert one.first == (restarts[0] if restarts else len(one.says))
    assert bool(restarts) == (crash != "never")


def test_the_rules_are_those_of_the_protocol():
    table = NBS / "protocol" / "04_participant.ipynb"
    rows = "\n".join(cell.source for cell in nbformat.read(table, 4).cells)
    for choice in OFF.values():
        assert not choice.rule or f"| {choice.rule} | {choice.words} |" in rows


def test_a_picture_grows_in_its_final_size_and_tells_nothing_in_advance():
    final = scenario(*FIRST).picture
    sizes, boxes = set(), []
    for n in range(len(final.steps) + 1):
        picture = grown(final, n)
        svg = draw(picture.title, picture.steps, picture.lanes)
        sizes.add(re.search(r'viewBox="[^"]*"', svg)[0])
        boxes.append(svg.count("<rect") - 1)
        assert ("twice" in svg) == (n == len(final.steps))
    assert len(sizes) == 1
    assert boxes[0] == 0 and boxes == sorted(boxes)
    assert grown(final, len(final.steps)).lanes == final.lanes


def press(toy, name):
    button = toy.buttons[name]
    assert not button.disabled, f"{name} cannot be pressed"
    button.click()


@pytest.mark.never_unsteady
@pytest.mark.parametrize(("off", "crash"), ALL)
def test_the_buttons_lead_from_the_question_to_the_verdict(off, crash):
    pytest.importorskip("ipywidgets")
    toy, one = Toy(), scenario(off, crash)
    toy.off.value, toy.crash.value = off, crash
    assert toy.buttons["Crash"].disabled and "Predict first" in toy.words.value
    toy.guess.value = "lost"
    press(toy, "Crash")
    while not toy.buttons["One step"].disabled:
        assert one.verdict not in toy.words.value
        press(toy, "One step")
    if crash != "never":
        assert toy.play.value == one.first and "Now press Restart" in toy.words.value
        press(toy, "Restart")
    while not toy.buttons["One step"].disabled:
        press(toy, "One step")
    assert one.verdict in toy.words.value
    mark = "✓ You predicted it" if "lost" in one.answers else "✗ You predicted"
    assert f"{mark}: some lost." in toy.words.value
    assert re.search(r"\(Lesson [23]\)", toy.words.value)
    press(toy, "Again")
    assert toy.guess.value is None and "Predict first" in toy.words.value


def test_another_choice_asks_anew():
    pytest.importorskip("ipywidgets")
    toy = Toy()
    toy.guess.value = "twice"
    press(toy, "Crash")
    toy.crash.value = "decided"
    assert (toy.play.value, toy.guess.value) == (0, None)


def test_a_picture_is_shown_where_no_widgets_are(monkeypatch):
    pytest.importorskip("ipywidgets")
    monkeypatch.setattr(module, "has_widgets", lambda: False)
    assert "image/svg+xml" in module.toy()._repr_mimebundle_()
    monkeypatch.setattr(module, "has_widgets", lambda: True)
    assert type(module.toy()).__name__ == "VBox"


def test_the_page_is_small_and_complete():
    text = page()
    assert len(text.encode()) < 400_000
    assert not re.findall(r"@[A-Z]+@|https?:|\bsrc=|<link", text)
    inside = json.loads(re.search(r'id="data">(.*?)</script>', text, re.S)[1])
    for off, crash in ALL:
        shown = inside["pictures"][inside["scenarios"][off][crash]]
        one = scenario(off, crash)
        assert shown["verdict"] == one.verdict and tuple(shown["answers"]) == one.answers
    assert set(inside["answers"]) == set(ANSWERS)
