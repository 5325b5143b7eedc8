"""Each extra alone, in an environment of its own, runs what it promises."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from compat import ROOT, build_wheel, make_environment
from extras import REQUIREMENTS
from promises import BESIDE, PROMISES


def test_each_extra_of_the_settings_promises_something():
    assert PROMISES.keys() == REQUIREMENTS.keys()


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    return build_wheel(Path(sys.executable), tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def empty(tmp_path_factory):
    """An environment with pip alone. A copy of it is made sooner than another one."""
    folder = tmp_path_factory.mktemp("empty")
    make_environment(folder, sys.executable)
    return folder


@pytest.fixture
def python(empty, tmp_path):
    """Of an environment that is removed: with PySpark it has 800 MB."""
    folder = shutil.copytree(empty, tmp_path / "environment", symlinks=True)
    yield folder / "bin" / "python"
    shutil.rmtree(folder)


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("extra", REQUIREMENTS, ids=lambda extra: extra or "none")
def test_an_extra_alone_runs_what_it_promises(extra, python, wheel, tmp_path):
    wanted = [f"{wheel}[{extra}]" if extra else wheel, *["pyspark"] * (extra in BESIDE)]
    ours = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "PYSPARK", "SPARK"))}
    env = ours | {
        "PIP_CONSTRAINT": str(ROOT / "constraints.txt"),
        "PYSPARK_PYTHON": str(python),
        "SPARK_LOCAL_IP": "127.0.0.1",
    }
    for words in (
        ["-m", "pip", "install", "-q", *wanted],
        [ROOT / "tests/support/promises.py", extra],
    ):
        done = subprocess.run(
            [python, *words], cwd=tmp_path, env=env, capture_output=True, text=True
        )
        assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
