"""The table of Spark's own tests: each title names the test here that shows the same, or says why
none does. Suites that test only Spark's own Scala classes (pools of consumers and producers,
tokens, JSON, exceptions) have no title here.
"""

import ast
import csv
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ROWS = list(csv.DictReader((Path(__file__).parent / "spark_titles.csv").open(encoding="utf-8")))


def names_in(file):
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row['suite']}: {row['title']}")
def test_a_title_names_its_test_or_a_reason(row):
    assert row["outcome"] in ("same", "different", "gap")
    assert row["test"] or row["outcome"] != "same"
    assert row["reason"] or row["outcome"] == "same"
    if row["test"]:
        file, _, name = row["test"].partition("::")
        assert name in names_in(file)


def test_the_titles_are_in_order_and_each_is_there_once():
    titles = [(row["suite"], row["title"]) for row in ROWS]
    assert titles == sorted(set(titles))
