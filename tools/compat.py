#!/usr/bin/env python3
"""Install the wheel beside a PySpark, in an environment of its own, and run the crash test there.

`tools/compat.py 3.5.9 4.3.0` for some versions, `--quick` for the oldest and the newest, nothing
for all. Needs only the standard library.
"""

import configparser
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# PySpark and the Python that it is tried with.
PYTHONS = {"3.5.9": "3.11", "4.0.5": "3.11", "4.1.4": "3.12", "4.2.1": "3.12", "4.3.0": "3.13"}
OLDEST, NEWEST = list(PYTHONS)[0], list(PYTHONS)[-1]
# The newest PySpark for which Delta Lake and Iceberg have a connector: it reads what ours write.
WITH_TABLES = "4.1.4"
SHOWN = re.compile(r"Collecting pyspark|Building|Installing")
NOT_COPIED = shutil.ignore_patterns(
    ".*", "__pycache__", "*.egg-info", "build", "dist", "images", "nbs", "output", "tests", "tools"
)


class Failed(Exception):
    """A step ended with an error."""


def run(*command: object, **more) -> None:
    """Run a command. Raises `Failed`."""
    if subprocess.run([str(word) for word in command], **more).returncode:
        raise Failed(" ".join(str(word) for word in command))


def say(text: str) -> None:
    print(text, flush=True)


# -- the Python --


def version_of(python: object) -> str:
    """Such as 3.12.1; empty if there is no such program or it cannot make environments."""
    lines = "import venv, ensurepip, platform; print(platform.python_version())"
    try:
        done = subprocess.run([str(python), "-c", lines], capture_output=True, text=True)
    except OSError:
        return ""
    return "" if done.returncode else done.stdout.strip()


def find_python(minor: str) -> str:
    """A Python 3.x: on the PATH, or among those of pyenv. Empty if there is none."""
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
    kept = sorted(pyenv.glob(f"versions/{minor}.*/bin/python"))
    for python in [sys.executable, f"python{minor}", *kept]:
        if version_of(python).startswith(f"{minor}."):
            return str(python)
    return ""


# -- the environment --


def floors() -> dict[str, str]:
    """The lowest versions that settings.ini claims, by package. They are installed beside the
    oldest PySpark.
    """
    settings = configparser.ConfigParser(delimiters=["="])
    settings.read(ROOT / "settings.ini", encoding="utf-8")
    texts = [settings["DEFAULT"][key] for key in ("requirements", "spark_requirements")]
    lowest = dict(re.findall(r"([\w-]+)>=([\w.]+)", " ".join(texts)))
    return {package: version for package, version in lowest.items() if package != "pyspark"}


def constraints(lowest: dict[str, str]) -> str:
    """The tested versions, without those of PySpark, and with `lowest` instead of some."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    left_out = {"pyspark", "py4j", *lowest}
    tested = [line for line in lines if line.split("==")[0] not in left_out]
    return "\n".join([*tested, *(f"{name}=={version}" for name, version in lowest.items()), ""])


def make_environment(folder: Path, python: str) -> Path:
    """An empty environment, or the one that is there if it has this Python: its interpreter."""
    inside = folder / "bin" / "python"
    if version_of(inside) != version_of(python):
        run(python, "-m", "venv", "--clear", folder)
    tools = ["pip", "setuptools", "wheel"]
    run(inside, "-m", "pip", "install", "-q", "-c", ROOT / "constraints.txt", *tools)
    return inside


def build_wheel(inside: Path, folder: Path) -> Path:
    """The wheel, built from a copy, because building leaves files behind."""
    source = folder / "source"
    shutil.copytree(ROOT, source, ignore=NOT_COPIED)
    options = ["-q", "--no-deps", "--no-build-isolation", "--wheel-dir", folder]
    run(inside, "-m", "pip", "wheel", *options, source)
    return next(folder.glob("*.whl"))


def install(inside: Path, version: str, wheel: Path, lowest: dict[str, str]) -> None:
    """The wheel, PySpark, and what both need. An older build of the wheel is replaced."""
    kept = inside.parent.parent / "constraints.txt"
    kept.write_text(constraints(lowest), encoding="utf-8")
    pip = [str(inside), "-m", "pip"]
    run(*pip, "uninstall", "-q", "-y", "kafka2pc", stderr=subprocess.DEVNULL)
    command = [*pip, "install", "--no-build-isolation", "--progress-bar", "off", "-c", str(kept)]
    extras = "[delta,iceberg]" if same_line(version, WITH_TABLES) else ""
    command += [f"pyspark[sql]=={version}", f"{wheel}{extras}"]
    command += ["pyiceberg[sql-sqlite]"] if extras else []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout or ():
            if SHOWN.match(line.strip()):
                say(f"  {line.strip()[:60]}")
    if process.returncode:
        raise Failed(" ".join(command))


# -- all together --


def same_line(one: str, other: str) -> bool:
    """Are they alike but for the last number, such as 3.5.7 and 3.5.9?"""
    return one.rpartition(".")[0] == other.rpartition(".")[0]


def choose_python(version: str) -> tuple[str, bool]:
    """The Python for this PySpark, and whether it is the one that we want. Raises `Failed` if that
    is missing and nothing may be.
    """
    wanted = next((p for known, p in PYTHONS.items() if same_line(known, version)), None)
    found = find_python(wanted) if wanted else sys.executable
    if found:
        return found, True
    missing = f"Python {wanted} with venv is missing, which PySpark {version} is tried with"
    if os.environ.get("KAFKA2PC_REQUIRE") == "all":
        raise Failed(f"{missing}, and KAFKA2PC_REQUIRE=all")
    say(f"  {missing}: it runs with {version_of(sys.executable)}, at the tested versions")
    return sys.executable, False


def prepare(version: str, build: Path) -> Path:
    """The interpreter of the environment with this PySpark. Raises `Failed`."""
    python, wanted = choose_python(version)
    say(f"  1/3 environment .venvs/{version} with Python {version_of(python)}")
    inside = make_environment(ROOT / ".venvs" / version, python)
    say("  2/3 the wheel, PySpark, and what they need (up to 500 MB; a minute or two)")
    wheel = next(build.glob("*.whl"), None) or build_wheel(inside, build)
    install(inside, version, wheel, floors() if same_line(version, OLDEST) and wanted else {})
    return inside


def try_version(version: str, build: Path) -> None:
    """Install and run. Raises `Failed`."""
    inside = prepare(version, build)
    say("  3/3 queries that are killed")
    clean = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "SPARK_HOME")}
    run(inside, "tests/spark/compat_smoke.py", cwd=ROOT, env=clean)
    if same_line(version, WITH_TABLES):
        run(inside, "tests/spark/compat_tables.py", cwd=ROOT, env=clean)


def chosen(words: list[str]) -> list[str]:
    if words == ["--quick"]:
        return [OLDEST, NEWEST]
    return words or list(PYTHONS)


def main() -> int:
    ended = []
    with tempfile.TemporaryDirectory() as build:
        for version in chosen(sys.argv[1:]):
            say(f"PySpark {version}")
            start = time.monotonic()
            try:
                try_version(version, Path(build))
                result = "exactly once"
            except Failed as e:
                result = f"FAILED: {e}"
            ended.append(f"PySpark {version}: {result}, {time.monotonic() - start:.0f} s")
            say(ended[-1])
    say("\n".join(["", *ended]))
    return 1 if any("FAILED" in line for line in ended) else 0


if __name__ == "__main__":
    sys.exit(main())
