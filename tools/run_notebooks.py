#!/usr/bin/env python3
"""Execute notebooks, each in a fresh kernel, and keep their outputs. With --check: rewrite nothing.

Arguments: names below nbs/ without .ipynb; none means all of them.
"""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from unittest import mock

import nbformat
from papermill import execute_notebook

ROOT = Path(__file__).resolve().parent.parent
NBS = ROOT / "nbs"
CELL_SECONDS = 300
NO_WIDGETS = {"KAFKA2PC_WIDGETS": "off"}  # what is recorded are pictures and text
_NEVER_BEGAN = "Kernel died before replying to kernel_info"


def execute(
    notebook: Path,
    output: Path,
    cell_seconds: int,
    parameters: dict | None = None,
    engine: str | None = None,
) -> str:
    """Papermill in this process, and the kernel in another one, in the notebook's folder. Empty if
    all went well, otherwise what failed. A kernel that never began (another process took one of the
    ports that were chosen for it) is started once more. `engine`: of papermill; None: a kernel.
    """
    with mock.patch.dict(os.environ, NO_WIDGETS):
        trouble = _execute_once(notebook, output, cell_seconds, parameters, engine)
        if _NEVER_BEGAN in trouble:
            trouble = _execute_once(notebook, output, cell_seconds, parameters, engine)
    return trouble


def _execute_once(
    notebook: Path, output: Path, cell_seconds: int, parameters: dict | None, engine: str | None
) -> str:
    try:
        execute_notebook(
            notebook,
            output,
            parameters=parameters,
            engine_name=engine,
            kernel_name="python3",
            progress_bar=False,
            execution_timeout=cell_seconds,
            cwd=notebook.parent,
            extra_arguments=["--IPKernelApp.log_level=50"],
        )
    # a cell failed, took too long, or killed its kernel
    except Exception as e:
        return "\n".join(f"{type(e).__name__}: {e}".splitlines()[-60:])
    return ""


def keep_outputs(notebook: Path, executed: Path) -> None:
    """Carry the outputs over, and nothing else of what papermill leaves in a notebook."""
    ours, theirs = nbformat.read(notebook, 4), nbformat.read(executed, 4)
    for cell, new in zip(ours.cells, theirs.cells, strict=True):
        if cell.cell_type == "code":
            cell.outputs = new.outputs
    nbformat.write(ours, notebook)
    subprocess.run(
        [str(Path(sys.executable).parent / "nbdev_clean"), "--fname", str(notebook)],
        cwd=ROOT,
        check=True,
    )


def chosen(names: list[str]) -> list[Path]:
    """The notebooks of these names. Ends the program if there is none of a name."""
    found = sorted(path for path in NBS.rglob("*.ipynb") if "_checkpoints" not in str(path))
    if not names:
        return found
    wanted = [NBS / f"{name.removesuffix('.ipynb')}.ipynb" for name in names]
    if missing := [path for path in wanted if path not in found]:
        there = ", ".join(str(path.relative_to(NBS).with_suffix("")) for path in found)
        sys.exit(f"there is no {missing[0].relative_to(ROOT)}. There are: {there}")
    return wanted


def main(arguments: list[str]) -> int:
    only_check = "--check" in arguments
    for notebook in chosen([word for word in arguments if word != "--check"]):
        started = time.monotonic()
        print(f"{notebook.relative_to(NBS)} ...", flush=True)
        with tempfile.TemporaryDirectory() as folder:
            executed = Path(folder) / notebook.name
            if trouble := execute(notebook, executed, CELL_SECONDS):
                print(trouble)
                return 1
            if not only_check:
                keep_outputs(notebook, executed)
        print(f"{notebook.relative_to(NBS)} done in {time.monotonic() - started:.0f} s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
