"""Plays the mutants of the query histories until a seed finds each, and writes the first seeds into
their notebook: `make first-seeds`, when the generator has changed.
"""

import argparse
import json
import logging
import re
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path

from kafka2pc.proof.simulation.mutants import found_by
from kafka2pc.proof.simulation.query_histories import query_history
from kafka2pc.proof.simulation.rules_off import FIRST_SEEDS, QUERY_MUTANTS

NOTEBOOK = Path("nbs/proof/simulation/17_rules_off.ipynb")
CELL = re.compile(r"FIRST_SEEDS: dict\[str, int\] = \{.*?\}", re.DOTALL)


def first_seed(name: str, most: int) -> int | None:
    """The first seed that finds this mutant, of so many."""
    logging.disable(logging.WARNING)
    for seed in range(most):
        # a switch of the model may not know all that a log or a store answers
        with suppress(TypeError, AttributeError):
            if found_by(QUERY_MUTANTS[name], seed, query_history):
                return seed
    return None


def write(seeds: dict[str, int]) -> None:
    """Put them into the notebook."""
    notebook = json.loads(NOTEBOOK.read_text())
    lines = "".join(f"    {json.dumps(name)}: {seed},\n" for name, seed in seeds.items())
    for cell in notebook["cells"]:
        text = "".join(cell["source"])
        if CELL.search(text):
            text = CELL.sub(f"FIRST_SEEDS: dict[str, int] = {{\n{lines}}}", text)
            cell["source"] = text.splitlines(keepends=True)
    NOTEBOOK.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n")


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--most", type=int, default=1_000, help="seeds for each mutant")
    options.add_argument("--only", nargs="*", help="names; the others keep their seeds")
    given = options.parse_args()
    names = given.only or list(QUERY_MUTANTS)
    seeds = {name: seed for name, seed in FIRST_SEEDS.items() if name not in names}
    with ProcessPoolExecutor() as pool:
        played = pool.map(partial(first_seed, most=given.most), names)
        for name, seed in zip(names, played, strict=True):
            print(f"{name:40} {'not found' if seed is None else seed}", flush=True)
            if seed is not None:
                seeds[name] = seed
    write({name: seeds[name] for name in QUERY_MUTANTS if name in seeds})


if __name__ == "__main__":
    main()
