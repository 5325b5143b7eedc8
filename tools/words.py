#!/usr/bin/env python3
"""Find words of our own where English has a standard term. Prints a line for each, with what to
write instead, and exits with 1 if there is one.

Searched are Markdown, comments, strings and names of tests: in notebooks (without their outputs),
in Python files, and in texts such as the Makefile. `kafka2pc/` is exported from the notebooks.
"""

import io
import json
import re
import sys
import tokenize
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ["nbs", "tests", "tools"]
SUFFIXES = {".ipynb", ".py", ".md", ".yml", ".yaml", ".toml", ".ini"}


class Rule(NamedTuple):
    pattern: str
    instead: str  # what to write


RULES = {
    "room": Rule(r"\brooms?\b(?! for)", "notebook, module"),
    "act": Rule(r"\bacts? (?:one|two|three)\b|\b(?:the|three) acts\b", "phase"),
    "stranger": Rule(r"\bstrangers?\b", "another process, an independent consumer"),
    "guest": Rule(r"\bguests?\b", "on a cluster of your own"),
    "told": Rule(
        r"\b(?:is|are|was|were|be|been|being) (?:told|said)\b|\b(?:hears?|heard)\b",
        "send and receive, with a subject; report, log, raise",
    ),
    "stands": Rule(r"\b(?:stands(?! for)|stood)\b", "exist, be in, hold, win"),
    "nobody": Rule(r"\b(?:nobody|somebody|anybody|whoever)\b", "the process, the person; no one"),
    "headless": Rule(
        r"(?:^|[.;:] )(?-i:Who|What) (?!(?:is|are|if|does|do|can|was|to|the|it|we|you|a|each)\b)"
        r"(?!happen)[a-z](?!(?:[^.?]|\.\S)*\?)",
        "a noun as the subject of the sentence",
    ),
    "aloud": Rule(r"\b(?:aloud|loudly)\b", "report, log, raise"),
    "receipt": Rule(r"\breceipts?\b", "Committable"),
    "sleeper": Rule(r"\bsleepers?\b", "suspended driver"),
    "engine": Rule(r"\bengine=rows\b", "engine=confluent, as the option has it"),
    "settle": Rule(r"\bsettle[sd]?\b", "write ABORT or COMMIT, end, finish"),
}


class Exempt(NamedTuple):
    """Hits of a rule that are allowed in one file."""

    file: str
    rule: str
    why: str


COPY = "a copy of the code of version 0.1.0, which never changes"
EXEMPT = (
    Exempt("tests/fixtures/version_0_1_0.py", "act", COPY),
    Exempt("tests/fixtures/version_0_1_0.py", "nobody", COPY),
    Exempt("tests/fixtures/version_0_1_0.py", "stands", COPY),
)


class Hit(NamedTuple):
    file: str
    place: str
    rule: str
    text: str

    def __str__(self) -> str:
        instead = RULES[self.rule].instead
        return f"{self.file}{self.place}: {self.text!r} ({self.rule}); instead: {instead}"


def of_python(source: str) -> Iterator[tuple[int, str]]:
    """(line, text) of comments, strings and names of tests."""
    plain = re.sub(r"(?m)^ *[%!].*", "", source)  # lines for IPython
    for token in tokenize.generate_tokens(io.StringIO(plain).readline):
        if token.type in (tokenize.COMMENT, tokenize.STRING):
            yield token.start[0], token.string
        elif token.type == tokenize.NAME and token.string.startswith("test_"):
            yield token.start[0], token.string.replace("_", " ")


def of_notebook(source: str) -> Iterator[tuple[str, str]]:
    for n, cell in enumerate(json.loads(source)["cells"]):
        text = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            yield f"[{n}]", text
        elif cell["cell_type"] == "code":
            yield from ((f"[{n}]:{line}", part) for line, part in of_python(text))


def texts(path: Path) -> Iterator[tuple[str, str]]:
    """(place, text) of everything in a file that is written for people."""
    source = path.read_text(encoding="utf-8")
    if path.suffix == ".ipynb":
        yield from of_notebook(source)
    elif path.suffix == ".py":
        yield from ((f":{line}", part) for line, part in of_python(source))
    else:
        yield from ((f":{n}", line) for n, line in enumerate(source.splitlines(), 1))


def hits_in(file: str, place: str, text: str) -> Iterator[Hit]:
    for name, rule in RULES.items():
        for found in re.finditer(rule.pattern, text, re.M | re.I):
            around = text[max(0, found.start() - 30) : found.end() + 30]
            yield Hit(file, place, name, " ".join(around.split()))


def files(root: Path) -> list[Path]:
    """The files that people write. This one lists the words, so it is left out."""
    inside = [path for name in FOLDERS for path in (root / name).rglob("*")]
    return sorted(
        path
        for path in [*root.glob("*"), *inside]
        if path.suffix in SUFFIXES or path.name == "Makefile"
        if ".ipynb_checkpoints" not in path.parts and path != Path(__file__).resolve()
    )


def problems(root: Path = ROOT, exempt: Sequence[Exempt] = EXEMPT) -> list[str]:
    """A line for each hit that no exception covers, and for each exception without a hit."""
    hits = [
        hit
        for path in files(root)
        for place, text in texts(path)
        for hit in hits_in(str(path.relative_to(root)), place, text)
    ]
    found = {(hit.file, hit.rule) for hit in hits}
    excused = {(e.file, e.rule) for e in exempt}
    return [
        *(str(hit) for hit in hits if (hit.file, hit.rule) not in excused),
        *(
            f"{e.file}: nothing in it needs the exception for {e.rule!r}; remove it"
            for e in exempt
            if (e.file, e.rule) not in found
        ),
    ]


def main() -> int:
    lines = problems()
    print("\n".join(lines))
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
