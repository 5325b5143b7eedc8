#!/usr/bin/env python3
"""Build the site in output/site and check it: no link is broken, and no page loads anything from
another host.

The notebooks are taken as they stand. With --run each one is executed first, on a copy.
"""

import ast
import logging
import re
import shutil
import sys
from concurrent.futures import ProcessPoolExecutor, as_completed
from html.parser import HTMLParser
from itertools import chain, cycle, groupby
from pathlib import Path
from urllib.parse import unquote, urlsplit

import nbformat
from contents import FOLDERS, NBS, is_import, notebooks, parsed
from fold import is_solution, words
from mkdocs.commands.build import build
from mkdocs.config import load_config
from predictions import predictions, split
from readme import visible
from run_notebooks import CELL_SECONDS, execute
from toy_page import page as toy_page

ROOT = Path(__file__).resolve().parent.parent
PAGES, SITE = ROOT / "output" / "docs", ROOT / "output" / "site"
TABS = {  # the tabs of the site, and the folders of nbs/ below each
    "Guide": ["guide"],
    "Course": ["course"],
    "Protocol": ["protocol", "backends", "decision_logs"],
    "Kafka": ["kafka"],
    "Spark": ["spark"],
    "Stores": ["stores"],
    "Operations": ["operations", "local"],
    "Proof": ["proof"],
}
GUIDE = {  # the groups of the guide's menu: notebooks of nbs/guide, and texts
    "Start": ["index", "01_quickstart", "15_moving_over", "18_log_in", "16_run_it"],
    "Write": [
        "02_options",
        "03_guarantees",
        "07_older_spark",
        "17_database",
        "21_tables",
        "19_avro_protobuf",
    ],
    "Operate": [
        "04_places",
        "10_sizing",
        "11_monitoring",
        "20_metrics",
        "12_runbook",
        "05_errors",
        "09_security",
    ],
    "Platforms": ["14_databricks", "08_compatibility"],
    "Background": ["13_from_flink", "06_notebooks", "contributing", "security"],
}
TOY = "toy/index.html"  # a page of its own, below the tab Course: it needs none of the others
TEXTS = {"CONTRIBUTING": "Contributing", "SECURITY": "Security policy"}
OPEN_LATER = "Predict first, then open this"
OUTPUT = '<div class="output" markdown>'
COLOUR = re.compile(r"\x1b\[[0-9;]*m")
BUTTONS = re.compile(r"<p><strong><a [^<]*</a></strong>( · <strong><a [^<]*</a></strong>)+</p>")
NARROW = 80  # letters of a row: a telephone shows a longer one as a list


def tab_of(folder: str) -> str:
    """The tab that shows a folder. KeyError: it is below none."""
    package = folder.partition("/")[0]
    return {name: tab for tab, names in TABS.items() for name in names}[package]


def title(text: str) -> str:
    return re.search(r"^# (.+)$", text, re.M)[1]


def purpose(code: str) -> str | None:
    """What a cell prepares, if it does nothing else: "Imports", or the "Set-up" of Kafka or Spark.
    A cell that reads or writes a stream is a lesson.
    """
    tree = parsed(code)
    if tree is None:
        return None
    imports = [node for node in tree.body if is_import(node)]
    others = [node for node in tree.body if node not in imports]
    if not all(isinstance(node, (ast.Assign, ast.AugAssign)) for node in others):
        return None
    if imports and all(isinstance(node.value, ast.Constant) for node in others):
        return "Imports"
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    used |= {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    prepares = used & {"start_kafka", "SparkSession"}
    return "Set-up" if prepares and not used & {"readStream", "writeStream"} else None


def fenced(code: str, kind: str) -> str:
    return f"~~~~~~ {{ {kind} }}\n{code.strip(chr(10))}\n~~~~~~"


def folded(summary: str, inside: str) -> str:
    """A part of a page that opens on a click."""
    return f"<details markdown>\n<summary>{summary}</summary>\n\n{inside}\n\n</details>"


def shown(output, picture: Path) -> str:
    """An output: a picture (kept in a file), a table, or text."""
    data = output.get("data", {})
    if drawn := data.get("image/svg+xml"):
        picture.write_text(drawn, encoding="utf-8")
        says = re.search(r"<title>(.*?)</title>", drawn, re.S)
        return f"![{' '.join(says[1].split()) if says else ''}]({picture.name})"
    if "text/markdown" in data:
        return data["text/markdown"]
    if "<table" in data.get("text/html", ""):
        return re.sub(r"<style.*?</style>\s*", "", data["text/html"], flags=re.S)
    text = output.get("text") or data.get("text/plain") or "\n".join(output.get("traceback", []))
    return fenced(COLOUR.sub("", text), ".text .no-copy")


def code_cell(cell, picture: Path) -> list[tuple[str | None, str]]:
    """The code, and what it gave. For each: under which name it is folded, if it is."""
    code = fenced(re.sub(r"^#\|.*\n?", "", cell.source, flags=re.M), ".python")
    if name := words(cell):
        return [(name[0].upper() + name[1:], code)]
    outputs = [
        shown(output, picture.with_stem(f"{picture.stem}-{n}"))
        for n, output in enumerate(cell.outputs)
    ]
    if re.search(r"^#\|\s*echo:\s*false\b", cell.source, re.M):
        return [(None, ""), (None, "\n\n".join(map(moved, outputs)))]
    if not outputs:
        return [(purpose(cell.source), code)]
    return [(None, code), (None, "\n\n".join(f"{OUTPUT}\n\n{o}\n\n</div>" for o in outputs))]


def parts_of(cells: list, target: Path) -> list[list[tuple[str | None, str]]]:
    """For each cell its parts, as `code_cell` returns them."""
    parts = []
    for n, cell in enumerate(cells):
        if cell.cell_type == "markdown":
            parts.append([(None, moved(cell.source))] if visible(cell) else [])
        elif visible(cell) or is_solution(cell):
            parts.append(code_cell(cell, target.with_name(f"{target.stem}-{n}.svg")))
        else:
            parts.append([])
    return parts


def hide_answers(cells: list, parts: list) -> None:
    """Put what the code after a question gave, and the answer, behind a click: at the place of the
    answer, so that all code comes before it.
    """
    for prediction in predictions(cells):
        answer, rest = split(cells[prediction.answer].source)
        hidden = []
        for number in prediction.shows:
            hidden += [(OPEN_LATER, text) for _, text in parts[number][1:]]
            parts[number] = parts[number][:1]
        if answer:
            hidden.append((OPEN_LATER, moved(answer)))
        parts[prediction.answer] = [*hidden, (None, moved(rest))]


def page(notebook: Path, target: Path) -> str:
    """Write a notebook as a page of the site. Answers with its title. Parts under the same name
    that follow each other are folded together. In the course, answers are behind a click.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    cells = nbformat.read(notebook, 4).cells
    parts = parts_of(cells, target)
    if notebook.parent.name == "course":
        hide_answers(cells, parts)
    text = ""
    for summary, group in groupby(chain.from_iterable(parts), lambda part: part[0]):
        inside = "\n\n".join(part for _, part in group)
        text += (folded(summary, inside) if summary else inside) + "\n\n"
    target.write_text(text, encoding="utf-8")
    return title(text)


def moved(text: str) -> str:
    """Links as the site has them: its top folder holds what nbs/ holds, the pages, and pictures.
    What a notebook folds is Markdown here, too. The toy is a page of its own.
    """
    text = text.replace("<details><summary>", "<details markdown><summary>")
    text = re.sub(r"\]\(\.\./((?:\.\./)*images)", r"](\1", text)
    text = re.sub(r"\]\(\.\./((?:\.\./)*\w+)\.md", lambda page: f"]({page[1].lower()}.md", text)
    text = text.replace("](course/12_toy.ipynb)", f"]({TOY})")
    text = text.replace("](12_toy.ipynb)", f"](../{TOY})")
    return re.sub(r"\]\(([\w./]+)\.ipynb", r"](\1.md", text)


def copy(notebook: Path, folder: Path) -> Path:
    target = folder / notebook.relative_to(NBS)
    target.parent.mkdir(parents=True, exist_ok=True)
    return target


def executed(sources: list[Path], folder: Path) -> Path:
    """Copies of the notebooks, as they come out of a fresh kernel, two at a time. Ends the program
    if one fails.
    """
    with ProcessPoolExecutor(2) as pool:
        running = {
            pool.submit(execute, notebook, copy(notebook, folder), CELL_SECONDS): notebook
            for notebook in sources
        }
        for n, done in enumerate(as_completed(running), 1):
            if trouble := done.result():
                pool.shutdown(cancel_futures=True)
                sys.exit(f"{running[done].stem}: {trouble}")
            print(f"{n} of {len(sources)}: {running[done].stem}", flush=True)
    return folder


def assemble(folder: Path) -> list:
    """Everything that the site shows, in one folder. Answers with its table of contents."""
    shutil.rmtree(PAGES, ignore_errors=True)
    shutil.copytree(ROOT / "images", PAGES / "images")
    shutil.copy(ROOT / "tools" / "site.css", PAGES)
    for name in TEXTS:
        text = (ROOT / f"{name}.md").read_text(encoding="utf-8").replace("](nbs/", "](")
        (PAGES / f"{name.lower()}.md").write_text(moved(text), encoding="utf-8")
    front, *lessons = notebooks(folder)
    page(front, PAGES / "index.md")
    contents = {folder: [] for folder in FOLDERS}
    for notebook in lessons:
        place = notebook.relative_to(folder).with_suffix(".md")
        contents[str(place.parent)].append({page(notebook, PAGES / place): str(place)})
    (PAGES / TOY).parent.mkdir()
    (PAGES / TOY).write_text(toy_page(), encoding="utf-8")
    contents["course"].append({"Crash it yourself": TOY})
    guide, *tabs = by_tab(contents).values()
    texts = [{name: f"{text.lower()}.md"} for text, name in TEXTS.items()]
    guide = [{"kafka2pc": "index.md"}, *guide, *texts]
    return [
        {"Guide": grouped({Path(*entry.values()).stem: entry for entry in guide})},
        *({tab: inside} for tab, inside in zip(list(TABS)[1:], tabs)),
        {"API": [{"All modules": "api/index.md"}, *as_list(by_tab(reference()))]},
    ]


def grouped(pages: dict[str, dict]) -> list:
    """The guide's menu, from name -> entry. Ends the program if names and GUIDE do not agree."""
    named = [name for names in GUIDE.values() for name in names]
    wrong = [f"GUIDE has no group for the page {name}" for name in pages if name not in named]
    wrong += [f"GUIDE names {name}, which is not a page" for name in named if name not in pages]
    if wrong:
        sys.exit("\n".join(f"tools/docs.py: {line}" for line in wrong))
    return [{group: [pages[name] for name in names]} for group, names in GUIDE.items()]


def by_tab(pages: dict[str, list]) -> dict[str, list]:
    """Folder -> its pages, as tab -> its sections, one for each folder. A folder in a folder that
    has pages is a part of its section.
    """
    tabs = {tab: {} for tab in TABS}
    for folder, inside in pages.items():
        tab = tab_of(folder)
        name = folder.removeprefix(f"{tab.lower()}/").replace("_", " ").capitalize()
        outer, _, inner = name.partition("/")
        if inside and inner:
            tabs[tab][outer].append({inner.capitalize(): inside})
        elif inside:
            tabs[tab][name] = inside
    return {
        tab: next(iter(parts.values())) if len(parts) == 1 else as_list(parts)
        for tab, parts in tabs.items()
    }


def as_list(parts: dict[str, list]) -> list:
    return [{name: inside} for name, inside in parts.items() if inside]


def reference() -> dict[str, list]:
    """Write a page for each module, and one that lists them all. Answers with folder -> pages."""
    (PAGES / "api").mkdir()
    pages, lines = {}, ["# All modules"]
    for folder in FOLDERS:
        modules = sorted((ROOT / "kafka2pc" / folder).glob("[!_]*.py"))
        if modules:
            lines += [f"\n## {folder.replace('/', '.')}\n", "| module | |", "|---|---|"]
        for module in modules:
            name = f"{folder}/{module.stem}".replace("/", ".")
            (PAGES / f"api/{name}.md").write_text(f"::: kafka2pc.{name}\n", encoding="utf-8")
            pages.setdefault(folder, []).append({module.stem: f"api/{name}.md"})
            says = ast.get_docstring(ast.parse(module.read_text(encoding="utf-8"))) or ""
            lines.append(f"| [{module.stem}]({name}.md) | {says.partition(chr(10))[0]} |")
    (PAGES / "api/index.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return pages


def on_page_content(html: str, **_) -> str:
    """mkdocs calls this with each page (hooks, in mkdocs.yml)."""
    html = re.sub(r"<table>.*?</table>", lambda table: labelled(table[0]), html, flags=re.S)
    return BUTTONS.sub(lambda links: buttons(links[0]), html)


def labelled(table: str) -> str:
    """Marks short values: they are not broken. If a row is long, each cell gets the name of its
    column: a list on a telephone shows it.
    """
    table = re.sub(r"<code>([^<\s]{1,16})</code>", r'<code class="whole">\1</code>', table)
    rows = [re.sub(r"<.*?>|\n", "", row) for row in table.split("</tr>")]
    if max(map(len, rows)) <= NARROW:
        return table
    heads = re.findall(r"<th\b[^>]*>(.*?)</th>", table, re.S)
    names = cycle(re.sub(r"<.*?>", "", head).replace('"', "&quot;") for head in heads)
    return re.sub(r"<td\b", lambda _: f'<td data-column="{next(names)}"', table)


def buttons(links: str) -> str:
    """A paragraph of nothing but bold links with " · " between them, as a row of buttons."""
    links = links.replace("<strong><a", '<a class="md-button md-button--primary"', 1)
    links = links.replace("<strong><a", '<a class="md-button"').replace("</strong>", "")
    return links.replace(" · ", " ")


class Links(HTMLParser):
    """What a page links to, what it loads, and the places in it that a link may name."""

    def __init__(self, text: str):
        super().__init__()
        self.links, self.loads, self.anchors = set(), set(), set()
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        self.anchors |= {attrs[k] for k in ("id", "name") if attrs.get(k)}
        if tag == "a" and attrs.get("href"):
            self.links.add(attrs["href"])
        loaded = attrs.get("src") or (
            attrs.get("href")
            if tag == "link" and attrs.get("rel") not in ("canonical", "next", "prev", "edit")
            else None
        )
        if loaded:
            self.loads.add(loaded)


def problems(site: Path) -> list[str]:
    """Broken links, and whatever would be loaded from another host. One line for each."""
    pages = {path: Links(path.read_text(encoding="utf-8")) for path in site.rglob("*.html")}
    found = []
    for path, has in sorted(pages.items()):
        where = path.relative_to(site)
        found += [f"{where}: loads {url}" for url in sorted(has.loads) if urlsplit(url).netloc]
        for url in sorted(has.links | has.loads):
            parts = urlsplit(url)
            if parts.scheme or parts.netloc:
                continue
            target = (
                (
                    site / unquote(parts.path).lstrip("/")
                    if parts.path.startswith("/")
                    else path.parent / unquote(parts.path)
                ).resolve()
                if parts.path
                else path
            )
            target = target / "index.html" if target.is_dir() else target
            if not target.exists():
                found.append(f"{where}: {url} is not there")
            elif (
                parts.fragment
                and target in pages
                and unquote(parts.fragment) not in pages[target].anchors
            ):
                found.append(f"{where}: {url} names a place that is not there")
    for style in sorted(site.rglob("*.css")):
        found += [
            f"{style.relative_to(site)}: loads {url}"
            for url in re.findall(
                r"url\(['\"]?((?:https?:)?//[^)'\"]+)", style.read_text(encoding="utf-8")
            )
        ]
    return found


def main() -> int:
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    folder = (
        executed(notebooks(NBS), ROOT / "output" / "executed") if "--run" in sys.argv[1:] else NBS
    )
    build(load_config(str(ROOT / "tools" / "mkdocs.yml"), nav=assemble(folder)))
    wrong = problems(SITE.resolve())
    pages = len(list(SITE.rglob("*.html")))
    print(f"{pages} pages, {len(wrong)} problems: {SITE / 'index.html'}")
    print("\n".join(wrong[:40]))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
