"""The site: built from the committed notebooks, every link checked, no page loads another host."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
from docs import SITE, problems  # noqa: E402


@pytest.mark.full
def test_the_site_is_built_and_whole():
    done = subprocess.run(
        [sys.executable, ROOT / "tools" / "docs.py"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"PYTHONWARNINGS": "ignore"},
    )
    assert done.returncode == 0, done.stdout[-4000:]
    assert "KafkaParticipant" in (SITE / "api" / "kafka.participant.html").read_text(
        encoding="utf-8"
    )
    assert {page.stem for page in SITE.rglob("*.html")} >= {
        notebook.stem for notebook in (ROOT / "nbs").rglob("*.ipynb")
    }


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ('<a href="there.html">', None),
        ('<a href="there.html#part">', None),
        ('<a href="#here">', None),
        ('<a href="https://example.org">', None),
        ('<a href="gone.html">', "gone.html is not there"),
        ('<a href="there.html#else">', "there.html#else names a place that is not there"),
        ('<a href="#nowhere">', "#nowhere names a place"),
        ('<img src="gone.svg">', "gone.svg is not there"),
        ('<script src="https://cdn.example/x.js"></script>', "loads https://cdn.example/x.js"),
        ('<link rel="stylesheet" href="//fonts.example/f.css">', "loads //fonts.example/f.css"),
    ],
)
def test_a_broken_link_and_a_foreign_host_are_found(tmp_path, line, says):
    (tmp_path / "there.html").write_text('<p id="part">')
    (tmp_path / "page.html").write_text(f'<p id="here">{line}')
    found = problems(tmp_path)
    assert [says in f for f in found] == [True] if says else found == []


def test_a_style_sheet_that_asks_another_host_is_found(tmp_path):
    (tmp_path / "style.css").write_text(
        '@font-face { src: url("https://fonts.example/f.woff2") } .a { background: url(mine.svg) }'
    )
    assert problems(tmp_path) == ["style.css: loads https://fonts.example/f.woff2"]
