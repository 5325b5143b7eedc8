#!/usr/bin/env python3
"""Build the site in output/site and check it: no link is broken, and no page loads anything from
another host.

The notebooks are taken as they stand. With --run each one is executed first, on a copy.
"""

import logging
import re
import shutil
import sys
from concurrent.futures import ProcessPoolExecutor, as_completed
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import nbformat
from contents import FOLDERS, NBS, notebooks
from mkdocs.commands.build import build
from mkdocs.config import load_config
from readme import is_solution, plain, visible
from run_notebooks import CELL_SECONDS, execute

ROOT = Path(__file__).resolve().parent.parent
PAGES, SITE = ROOT / "output" / "docs", ROOT / "output" / "site"
TEXTS = ["CONTRIBUTING", "SECURITY"]


def title(notebook: Path) -> str:
    return re.search(
        r"^# (.+)$",
        "\n".join(c.source for c in nbformat.read(notebook, 4).cells if c.cell_type == "markdown"),
        re.M,
    )[1]


def folded(cell):
    """The solution of an exercise, which opens on a click."""
    code = plain(cell).source.strip()
    return nbformat.v4.new_markdown_cell(
        f"<details><summary>A solution</summary>\n\n```python\n{code}\n```\n\n</details>"
    )


def page(notebook: Path, target: Path) -> None:
    """A notebook as a reader wants it, in the folder that it has in nbs/."""
    nb = nbformat.read(notebook, 4)
    nb.cells = [
        folded(cell) if is_solution(cell) else plain(cell)
        for cell in nb.cells
        if visible(cell) or is_solution(cell)
    ]
    for cell in nb.cells:
        if cell.cell_type == "markdown":
            cell.source = moved(cell.source)
    target.parent.mkdir(parents=True, exist_ok=True)
    nbformat.write(nb, target)


def moved(text: str) -> str:
    """Links as the site has them: its top folder holds what nbs/ holds, the pages, and pictures."""
    text = re.sub(r"\]\(\.\./((?:\.\./)*images)", r"](\1", text)
    text = re.sub(r"\]\(\.\./((?:\.\./)*\w+)\.md", lambda page: f"]({page[1].lower()}.html", text)
    return re.sub(r"\]\(([\w./]+)\.ipynb", r"](\1.html", text)


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
    (PAGES / "api").mkdir(parents=True)
    shutil.copytree(ROOT / "images", PAGES / "images")
    for name in TEXTS:
        text = (ROOT / f"{name}.md").read_text(encoding="utf-8")
        (PAGES / f"{name.lower()}.md").write_text(text.replace("](nbs/", "]("), encoding="utf-8")
    contents, reference = {}, {}
    for notebook in notebooks(folder):
        place = notebook.relative_to(folder)
        page(notebook, PAGES / place)
        if notebook.stem != "index":
            contents.setdefault(str(place.parent), []).append({title(notebook): str(place)})
    for part in FOLDERS:
        for module in sorted((ROOT / "kafka2pc" / part).glob("[!_]*.py")):
            name = f"{part}/{module.stem}".replace("/", ".")
            (PAGES / f"api/{name}.md").write_text(f"::: kafka2pc.{name}\n", encoding="utf-8")
            reference.setdefault(part, []).append({module.stem: f"api/{name}.md"})
    return [
        {"kafka2pc": "index.ipynb"},
        *nested(contents),
        *({name.title(): f"{name.lower()}.md"} for name in TEXTS),
        {"Reference": nested(reference)},
    ]


def nested(pages: dict[str, list]) -> list:
    """Folder -> its pages, as a table of contents: a package holds its wings."""
    packages = {}
    for folder, inside in pages.items():
        package, _, wing = folder.partition("/")
        packages.setdefault(package, []).extend([{wing: inside}] if wing else inside)
    return [{package: inside} for package, inside in packages.items()]


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
