#!/usr/bin/env python3
"""Render README.md from nbs/index.ipynb with its recorded outputs (nothing is executed). With
--check: write nothing, exit 1 if README.md differs.
"""

import re
import sys
from pathlib import Path

import nbformat
from nbconvert import MarkdownExporter
from traitlets.config import Config

ROOT = Path(__file__).resolve().parent.parent
PICTURES = "images/readme"
HEADER = "<!-- Generated from nbs/index.ipynb by `make readme`: edit the notebook. -->\n\n"


def visible(cell):
    return not re.search(r"^#\|\s*(hide|default_exp)\b", cell.source, re.M)


def plain(cell):
    """The cell as a reader wants it: no `#|` lines, no HTML tables (their style sheet would be
    printed as text), no terminal colours. Of a cell with `#| echo: false` only the output is left.
    """
    if re.search(r"^#\|\s*echo:\s*false\b", cell.source, re.M):
        shown = [o.get("data", {}).get("text/markdown", "") for o in cell.get("outputs", [])]
        return nbformat.v4.new_markdown_cell("\n\n".join(map("".join, shown)))
    cell.source = re.sub(r"^#\|.*\n?", "", cell.source, flags=re.M)
    for output in cell.get("outputs", []):
        output.get("data", {}).pop("text/html", None)
        if "text" in output:
            output["text"] = re.sub(r"\x1b\[[0-9;]*m", "", output["text"])
    return cell


def render(notebook: Path) -> tuple[str, dict[str, bytes]]:
    """The text of README.md, and the pictures that it shows: name -> content."""
    nb = nbformat.read(notebook, 4)
    nb.cells = [plain(cell) for cell in nb.cells if visible(cell)]
    nb.metadata["language_info"] = {"name": "python"}
    config = Config()
    config.NbConvertBase.display_data_priority = [
        "text/markdown",
        "image/svg+xml",
        "image/png",
        "text/plain",
    ]
    body, resources = MarkdownExporter(config=config).from_notebook_node(
        nb, {"output_files_dir": PICTURES, "unique_key": "index"}
    )
    body = body.replace("](../", "](")  # links are seen from the root now, no longer from nbs/
    body = re.sub(r"\]\((?!https?:|#|/)([\w/]+\.ipynb)", r"](nbs/\1", body)
    body = re.sub(r"\n{3,}", "\n\n", body).strip()
    return HEADER + body + "\n", {
        name: data if isinstance(data, bytes) else data.encode()
        for name, data in resources["outputs"].items()
    }


def stale(text: str, pictures: dict[str, bytes]) -> list[str]:
    """The files that are not as they should be."""
    there = {f"{PICTURES}/{p.name}": p.read_bytes() for p in (ROOT / PICTURES).glob("*")}
    readme = ROOT / "README.md"
    wrong = [] if readme.exists() and readme.read_text(encoding="utf-8") == text else ["README.md"]
    return wrong + sorted(
        name for name in there.keys() | pictures.keys() if there.get(name) != pictures.get(name)
    )


def write(text: str, pictures: dict[str, bytes]) -> None:
    (ROOT / "README.md").write_text(text, encoding="utf-8")
    for old in (ROOT / PICTURES).glob("*"):
        old.unlink()
    for name, data in pictures.items():
        path = ROOT / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


def main() -> int:
    text, pictures = render(ROOT / "nbs" / "index.ipynb")
    wrong = stale(text, pictures)
    if "--check" in sys.argv[1:]:
        for name in wrong:
            print(f"{name} is not what nbs/index.ipynb says: run `make readme`.")
        return 1 if wrong else 0
    write(text, pictures)
    print(f"README.md {'renewed' if wrong else 'unchanged'}.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
