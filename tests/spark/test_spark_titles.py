"""The table of Spark's own tests: each title names the test here that shows the same, or says why
none does. Suites that test only Spark's own Scala classes (pools of consumers and producers,
tokens, JSON, exceptions) have no title here.
"""

import ast
import csv
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ROWS = list(csv.DictReader((Path(__file__).parent / "spark_titles.csv").open(encoding="utf-8")))


@cache
def names_in(file):
    """The functions of a file; none if there is no such file."""
    path = ROOT / file
    tree = ast.parse(path.read_text(encoding="utf-8") if path.exists() else "")
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def mistakes(row):
    """What is wrong in a row of the table."""
    outcome, test, reason = row["outcome"], row["test"], row["reason"]
    file, _, name = test.partition("::")
    if outcome not in ("same", "different", "gap"):
        yield f"there is no outcome {outcome}"
    if not test and outcome == "same":
        yield "no test is named"
    if not reason and outcome != "same":
        yield "no reason is given"
    if test and name not in names_in(file):
        yield f"there is no {test}"


def test_each_title_names_its_test_or_a_reason():
    wrong = [f"{row['suite']}: {row['title']}: {m}" for row in ROWS for m in mistakes(row)]
    assert not wrong, "\n".join(wrong)


def test_each_mistake_in_a_row_is_found():
    right = {"outcome": "same", "test": "tests/spark/test_spark_titles.py::mistakes", "reason": ""}
    assert list(mistakes(right)) == []
    assert list(mistakes(right | {"outcome": "alike"})) == [
        "there is no outcome alike",
        "no reason is given",
    ]
    assert list(mistakes(right | {"test": ""})) == ["no test is named"]
    assert list(mistakes(right | {"test": "nowhere.py::x"})) == ["there is no nowhere.py::x"]


def test_the_titles_are_in_order_and_each_is_there_once():
    titles = [(row["suite"], row["title"]) for row in ROWS]
    assert titles == sorted(set(titles))
