"""The site: built from the committed notebooks, every link checked, no page loads another host. The
test of sizes and links (test_hygiene) looks at the links between files in every run.
"""

import os
import shutil
import subprocess
import sys
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from itertools import groupby
from pathlib import Path

import pytest
from markdown import markdown

ROOT = Path(__file__).resolve().parent.parent
from docs import GUIDE, NBS, SITE, TEXTS, TOY, grouped, moved, on_page_content, problems  # noqa: E402
from toy_page import page as toy_page  # noqa: E402

from kafka2pc.course.toy import CRASHES, FIRST, OFF, PEOPLE, scenario  # noqa: E402

PACKAGE = ROOT / "kafka2pc"
NO_BROWSER = "needs a browser (Debian: chromium) and playwright (the extra browser)"
SMALLEST, ENTRIES = 12.5, 29  # pixels of a letter of code; lines at the side of a page
WIDTHS = [420, 1000, 1680]  # beside 1280; for the pages of the tab Guide, the widest tables


@pytest.fixture(scope="module")
def site():
    done = subprocess.run(
        [sys.executable, ROOT / "tools" / "docs.py"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"PYTHONWARNINGS": "ignore"},
    )
    assert done.returncode == 0, done.stdout[-4000:]
    return SITE


@pytest.mark.nightly
def test_the_site_is_built_and_whole(site):
    reference = site / "api" / "kafka.participant.html"
    assert "KafkaParticipant" in reference.read_text(encoding="utf-8")
    assert expected() - pages() == set()


@pytest.fixture(scope="module")
def address(site):
    """The site on loopback."""

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *args):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=site)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture(scope="module")
def chromium():
    """A headless Chromium of the system, without any download. Skips, with the reason, where there
    is none.
    """
    found = (
        shutil.which("chromium")
        or shutil.which("chromium-browser")
        or shutil.which("google-chrome")
    )
    if not found:
        pytest.skip(NO_BROWSER)
    playwright = pytest.importorskip("playwright.sync_api", reason=NO_BROWSER)
    with playwright.sync_playwright() as session:
        window = session.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield window
        window.close()


LOOK = """([smallest, entries]) => {
  document.querySelectorAll("details").forEach(d => d.open = true);
  const found = [], shown = e => e.checkVisibility({visibilityProperty: true});
  const wide = e => e.scrollWidth > e.clientWidth;
  const text = e => e.innerText.split("\\n")[0];
  for (const e of document.querySelectorAll(".md-content pre, .md-content pre code"))
    if (wide(e)) found.push(`code is cut: ${e.scrollWidth} of ${e.clientWidth}: ${text(e)}`);
  for (const e of document.querySelectorAll(".md-content pre code"))
    if (parseFloat(getComputedStyle(e).fontSize) < smallest) found.push(`small: ${text(e)}`);
  if (wide(document.documentElement)) found.push("the page scrolls sideways");
  for (const e of document.querySelectorAll(".md-content img"))
    if (!e.naturalWidth && e.loading != "lazy") found.push(`no picture: ${e.src}`);
  for (const e of document.querySelectorAll("td:first-child code, code.whole"))
    if (e.getClientRects().length > 1) found.push(`a name is broken: ${text(e)}`);
  const side = [...document.querySelectorAll(".md-nav--primary .md-nav__link")].filter(
    e => !e.classList.contains("md-nav__container") && shown(e) && e.offsetHeight);
  if (side.length > entries) found.push(`${side.length} entries at the side`);
  if (!side.length) found.push("nothing at the side");
  if (/^(In|Out) ?\\[/m.test(document.querySelector(".md-content").innerText))
    found.push("a prompt");
  return [found, side.map(text), [...document.querySelectorAll("a[href]")].map(a => a.href)];
}"""
RESIZED = """width => {
  const found = [], all = what => [...document.querySelectorAll(".md-content " + what)];
  const contents = document.querySelector(".md-sidebar--secondary").checkVisibility();
  if (contents != width >= 1400) found.push(contents ? "contents" : "no contents");
  if (document.documentElement.scrollWidth > width) found.push("the page scrolls sideways");
  if (all("td:first-child code, code.whole").some(e => e.getClientRects().length > 1))
    found.push("a name is broken");
  if (width >= 1280 && all("pre code").some(e => e.scrollWidth > e.clientWidth))
    found.push("code is cut");
  if (all("img[src$='.svg']").some(e => e.width < 800)) found.push("a small picture");
  const list = width < 600, cell = e => getComputedStyle(e).display == "table-cell";
  if (all("[data-column]").some(e => cell(e) == list)) found.push(list ? "no list" : "a list");
  return found.map(what => `${what} at ${width}`);
}"""


def resized(page):
    """What is wrong with a page in windows of other widths."""
    wrong = []
    for width in WIDTHS:
        page.set_viewport_size({"width": width, "height": 800})
        wrong += page.evaluate(RESIZED, width)
    return wrong


def visit(window, address, names, width, entries):
    """What is wrong with the pages at this width, and every link in them."""
    page = window.new_page(viewport={"width": width, "height": 800})
    # each page would read it, which takes longer than all the rest
    page.route("**/search/search_index.json", lambda route: route.abort())
    wrong, links = [], set()
    for name in sorted(names):
        page.goto(f"{address}/{name}")
        found, side, hrefs = page.evaluate(LOOK, [SMALLEST, entries])
        if "/" not in name or name.startswith("guide/"):
            found += [f"no group {group}" for group in GUIDE if group not in side] + resized(page)
            page.set_viewport_size({"width": width, "height": 800})
        wrong += [f"{name}: {what}" for what in found]
        links |= {href.partition("#")[0] for href in hrefs if href.startswith(address)}
    page.close()
    return wrong, links


@pytest.mark.nightly
def test_no_code_is_cut_few_entries_are_at_the_side_and_every_link_answers(chromium, address):
    wrong, links = visit(chromium, address, pages() - {"404.html", TOY}, 1280, ENTRIES)
    assert wrong == []
    with chromium.new_context() as client:
        answers = {link: client.request.get(link).status for link in sorted(links)}
    assert {link: status for link, status in answers.items() if status != 200} == {}
    assert {f"{address}/{name}" for name in expected()} <= links


# Chooses, predicts, presses through to the end, and reads the verdict and the marks of customers.
PLAY = """([off, crash, guess]) => {
  const $ = id => document.getElementById(id), choose = (id, value) => {
    $(id).value = value;
    $(id).dispatchEvent(new Event("change"));
  };
  choose("off", off);
  choose("crash", crash);
  if (!$("go").disabled) return ["nothing was asked"];
  document.querySelector(`[name=guess][value=${guess}]`).click();
  for (const id of ["go", "restart"]) {
    if ($(id).disabled) continue;
    $(id).click();
    while (!$("step").disabled) {
      if (!$("verdict").hidden || $("caption").textContent.length < 9) return ["too early"];
      $("step").click();
    }
  }
  return [$("words").textContent, $("mark").textContent, $("verdict").className,
    [...document.querySelectorAll("[data-row]")].map(
      e => [e.className, e.querySelector("span").textContent]),
    $("stage").querySelectorAll("rect[rx='3']").length, $("lesson").getAttribute("href")];
}"""


@pytest.fixture
def toy(chromium, tmp_path):
    """The page of the toy, from a file, at a width; and what went wrong in it."""
    (tmp_path / "toy.html").write_text(toy_page(), encoding="utf-8")
    opened = []

    def at(width):
        tab = chromium.new_page(viewport={"width": width, "height": 900})
        tab.on("pageerror", lambda error: opened.append(str(error)))
        tab.on(
            "request",
            lambda r: None if r.url.startswith("file:") else opened.append(r.url),
        )
        tab.goto((tmp_path / "toy.html").as_uri())
        return tab

    yield at
    assert opened == []


@pytest.mark.nightly
@pytest.mark.parametrize("width", [1280, 420])
def test_the_toy_says_of_every_scenario_what_python_computed(toy, width):
    tab = toy(width)
    for off in OFF:
        for crash in CRASHES:
            one, guess = scenario(off, crash), "twice"
            words, mark, kind, bill, boxes, lesson = tab.evaluate(PLAY, [off, crash, guess])
            assert words == one.verdict
            assert mark.startswith("✓" if guess in one.answers else "✗")
            assert kind == ("fine" if one.answers == ("once",) else "bad")
            times = [one.found[-1].count(row) for row in PEOPLE]
            says = [["bad", "never charged"], ["fine", "charged once"], ["bad", "charged twice"]]
            assert bill == [says[n] for n in times]
            lanes = one.picture.lanes.values()
            assert boxes == sum(bool(c.look) for cells in lanes for c, _ in groupby(cells))
            assert lesson == f"../course/{OFF[off].lesson}.html"
            assert tab.evaluate("document.documentElement.scrollWidth") <= width


@pytest.mark.nightly
def test_the_toy_is_played_with_the_keyboard_alone(toy):
    tab = toy(1280)
    for key in ["Tab", "Tab", "Tab", "Tab", "Space", "Tab"]:  # a link, two menus, the question
        tab.keyboard.press(key)
    assert tab.evaluate("document.activeElement.id") == "go"
    tab.keyboard.press("Enter")
    for _ in range(20):
        if tab.is_visible("#verdict"):
            break
        tab.keyboard.press("Enter")  # one step, then Restart, then one step
    assert tab.inner_text("#words") == scenario(*FIRST).verdict
    assert tab.inner_text("#mark").startswith("✗ You predicted: each charge once")


@pytest.mark.nightly
def test_the_toy_plays_by_itself_and_can_be_stopped(toy):
    tab = toy(1280)
    tab.check("[name=guess][value=twice]", force=True)
    tab.click("#go")
    tab.wait_for_function("!document.getElementById('restart').disabled")
    assert tab.inner_text("#caption") == "The driver is killed. Now restart it."
    tab.click("#restart")
    tab.click("#play")
    before = tab.inner_text("#caption")
    tab.wait_for_timeout(1500)
    assert (tab.inner_text("#play"), tab.inner_text("#caption")) == ("Play", before)


@pytest.mark.nightly
def test_a_link_to_the_toy_can_name_a_scenario(toy):
    tab = toy(1280)
    tab.select_option("#off", "sweep")
    link = tab.url
    assert link.endswith("#sweep-committed")
    tab.goto(link.replace("committed", "undecided"))
    assert [tab.input_value("#off"), tab.input_value("#crash")] == ["sweep", "undecided"]
    tab.goto("about:blank")
    tab.goto(link)
    assert [tab.input_value("#off"), tab.input_value("#crash")] == ["sweep", "committed"]


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
        ("[a](../SECURITY.md)", "[a](security.md)"),
        ("[a](../../../SECURITY.md)", "[a](../../security.md)"),
        ("[a](../wire/01_settings.ipynb)", "[a](../wire/01_settings.md)"),
    ],
)
def test_links_of_a_notebook_lead_to_the_same_place_on_the_site(link, on_the_site):
    assert moved(link) == on_the_site


def test_what_a_notebook_folds_is_markdown_on_the_site():
    folded = "<details><summary>Why?</summary>\n\n**Rule 5.**\n\n</details>"
    assert "<strong>Rule 5.</strong>" in markdown(moved(folded), extensions=["md_in_html"])


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


def names_of_the_guide():
    return [
        "index",
        *(page.stem for page in (NBS / "guide").glob("*.ipynb")),
        *map(str.lower, TEXTS),
    ]


def test_every_page_of_the_guide_is_in_a_group_of_its_menu():
    names = names_of_the_guide()
    menu = grouped({name: name for name in names})
    assert sorted(name for part in menu for group in part.values() for name in group) == sorted(
        names
    )


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda names: names | {"new"}, "GUIDE has no group for the page new"),
        (lambda names: names - {"02_options"}, "GUIDE names 02_options, which is not a page"),
    ],
)
def test_a_page_without_a_group_and_a_group_without_its_page_end_the_build(change, says):
    with pytest.raises(SystemExit, match=says):
        grouped({name: name for name in change(set(names_of_the_guide()))})


def test_the_cells_of_a_wide_table_name_their_columns():
    head = "<table><tr><th>option</th><th>its <b>default</b></th></tr><tr><td>"
    wide, small = (
        f"{head}a</td><td>{'b ' * 40}</td></tr></table>",
        f"{head}a</td><td>b</td></tr></table>",
    )
    page = on_page_content(small + wide + small.replace(">b<", "><code>b</code><"))
    assert '<td><code class="whole">b</code></td>' in page
    assert page.startswith(small)
    assert '<td data-column="option">a</td><td data-column="its default">b' in page


def test_a_paragraph_of_bold_links_is_a_row_of_buttons():
    bold, plain = '<strong><a href="a.html">A</a></strong>', '<a href="b.html">B</a>'
    assert on_page_content(f"<p>{bold} · {bold}</p>") == (
        '<p><a class="md-button md-button--primary" href="a.html">A</a> '
        '<a class="md-button" href="a.html">A</a></p>'
    )
    for text in (f"<p>{bold}</p>", f"<p>{bold} · {plain}</p>", f"<p>{bold} · {bold} or else</p>"):
        assert on_page_content(text) == text
