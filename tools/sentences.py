#!/usr/bin/env python3
"""Put each sentence of the prose on a line of its own, so that a diff shows one sentence.

Markdown shows such lines as one paragraph. Headings, tables, quotes, HTML and code stay as they
are, and so does a sentence in brackets. --check: only report.
"""

import re
import sys

import nbformat
from contents import NBS, notebooks

FENCE = re.compile(r"^\s*(```|~~~)")
AS_IT_IS = re.compile(r"^(#|\||<|>|    |\$\$|\[\^?[^\]]+\]:)|(  |\\)$", re.M)
ITEM = re.compile(r"^(\s*)([-*+]|\d+[.)])( +)")
# what must not be cut: code, links, text in brackets
WHOLE = re.compile(r"``.+?``|`[^`]*`|\]\([^)]*\)|\([^()]*\)|<[^<>]*>")
END = re.compile(r"(?<=[.!?])(?:[\"”’)]|\*{1,2})? (?=[A-Z0-9*\"“\[(_\0])")
NO_END = re.compile(r"(\b(e\.g|i\.e|vs|etc|cf|No|[A-Z])\.|\.\.\.|(^|[.!?] )\*\*[^*]{1,30}\*\*)$")
BEGINS_ANOTHER = re.compile(r"^([-+*>#|]|\d+[.)]|[-=]{3,})(\s|$)")


def sentences(text: str) -> list[str]:
    """Of one paragraph without line breaks."""
    hidden = WHOLE.sub(lambda found: "\0" * len(found[0]), text)
    ends = [found.end() for found in END.finditer(hidden)]
    ends = [end for end in ends if is_an_end(text, end)]
    return [text[a:b].rstrip() for a, b in zip([0, *ends], [*ends, len(text)])]


def is_an_end(text: str, at: int) -> bool:
    return not NO_END.search(text[:at].rstrip()) and not BEGINS_ANOTHER.match(text[at:])


def in_lines(lines: list[str], first: str, others: str) -> list[str]:
    """The sentences of the lines of one paragraph, behind `first` and then `others`."""
    parts = sentences(" ".join(line.strip() for line in lines))
    return [(others if n else first) + part for n, part in enumerate(parts)]


def paragraph(lines: list[str]) -> list[str]:
    """A paragraph or a list, which is lines without a blank one between them."""
    if AS_IT_IS.search("\n".join(lines)):
        return lines
    found, at = [], 0
    for stop in [n for n, line in enumerate(lines) if n and ITEM.match(line)] + [len(lines)]:
        item = ITEM.match(lines[at])
        head = item[0] if item else re.match(r"\s*", lines[at])[0]
        rest = [lines[at][len(head) :], *lines[at + 1 : stop]]
        found += in_lines(rest, head, " " * len(head))
        at = stop
    return found


def rewritten(markdown: str) -> str:
    done, waiting, fenced = [], [], False
    for line in [*markdown.split("\n"), ""]:
        if waiting and (not line.strip() or FENCE.match(line)) and not fenced:
            done += paragraph(waiting)
            waiting = []
        if FENCE.match(line):
            fenced = not fenced
            done.append(line)
        elif fenced or not line.strip():
            done.append(line)
        else:
            waiting.append(line)
    return "\n".join(done[:-1])


def main() -> int:
    others = []
    for path in notebooks():
        notebook = nbformat.read(path, as_version=4)
        before = [cell.source for cell in notebook.cells]
        for cell in notebook.cells:
            if cell.cell_type == "markdown":
                cell.source = rewritten(cell.source)
        if before != [cell.source for cell in notebook.cells]:
            others.append(path.relative_to(NBS).as_posix())
            if "--check" not in sys.argv:
                nbformat.write(notebook, path)
    for name in others:
        print(f"{name}: sentences share a line")
    return 1 if others and "--check" in sys.argv else 0


if __name__ == "__main__":
    sys.exit(main())
