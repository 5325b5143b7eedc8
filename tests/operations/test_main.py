"""The script `kafka2pc`: where the extra of the command line is missing, and its tables."""

import subprocess
import sys
from dataclasses import dataclass

import pytest

from kafka2pc.operations.cli.common import show_rows

HIDDEN = """
import sys
for name in {names!r}:
    sys.modules[name] = None
{then}
"""


def run(names, then):
    """The code in a new process, in which these modules cannot be imported."""
    code = HIDDEN.format(names=names, then=then)
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)


@pytest.mark.parametrize("missing", ["typer", "rich"])
def test_without_the_extra_one_line_says_how_to_install_it(missing):
    done = run([missing], "from kafka2pc.operations.cli.main import main; main()")
    assert done.returncode == 1
    assert done.stderr == (
        "The command line needs two more packages: pip install 'kafka2pc[cli]'\n"
    )


def test_another_missing_module_is_not_hidden():
    done = run(
        ["kafka2pc.protocol.errors"], "from kafka2pc.operations.cli.main import main; main()"
    )
    assert done.returncode == 1 and "pip install 'kafka2pc[cli]'" not in done.stderr


@dataclass
class Line:
    id: str


def test_a_table_never_cuts_an_id(capsys):
    show_rows([Line("x" * 500)], {"id": lambda line: line.id}, as_json=False, nothing="")
    assert capsys.readouterr().out.count("x") == 500
