"""The site: built from the committed notebooks, every link checked, no page loads another host."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
from docs import NBS, SITE, moved, problems  # noqa: E402

PACKAGE = ROOT / "kafka2pc"


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
    reference = SITE / "api" / "kafka.participant.html"
    assert "KafkaParticipant" in reference.read_text(encoding="utf-8")
    assert expected() - pages() == set()


def pages():
    return {str(page.relative_to(SITE)) for page in SITE.rglob("*.html")}


def expected():
    """One page for each notebook, where the notebook is, and one for each module."""
    notebooks = {path.relative_to(NBS).with_suffix(".html") for path in NBS.rglob("*.ipynb")}
    modules = (path.relative_to(PACKAGE).with_suffix("") for path in PACKAGE.rglob("[!_]*.py"))
    return {*map(str, notebooks), *(f"api/{'.'.join(place.parts)}.html" for place in modules)}


@pytest.mark.parametrize(
    ("link", "on_the_site"),
    [
        ("[a](../images/a.svg)", "[a](images/a.svg)"),
        ("[a](../../../images/a.svg)", "[a](../../images/a.svg)"),
        ("[a](../SECURITY.md)", "[a](security.html)"),
        ("[a](../../../SECURITY.md)", "[a](../../security.html)"),
        ("[a](../wire/01_settings.ipynb)", "[a](../wire/01_settings.html)"),
    ],
)
def test_links_of_a_notebook_lead_to_the_same_place_on_the_site(link, on_the_site):
    assert moved(link) == on_the_site


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
