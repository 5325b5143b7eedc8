"""The script `kafka2pc`: where its extra is missing, its options, tables, JSON and statuses."""

import json
import os
import re
import signal
import subprocess
import sys
from dataclasses import dataclass

import pytest
from shell import COMMANDS
from shell import run as run_line

from kafka2pc.operations.cli.common import show_rows
from kafka2pc.operations.exit_status import status_table

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
def test_without_the_extra_an_error_says_how_to_install_it(missing):
    done = run([missing], "from kafka2pc.operations.cli.main import main; main()")
    assert done.returncode == 1
    assert done.stderr.startswith("[KAFKA2PC.MISSING_LIBRARY] ") and " -m pip " in done.stderr


def test_another_missing_module_is_not_hidden():
    done = run(
        ["kafka2pc.protocol.errors"], "from kafka2pc.operations.cli.main import main; main()"
    )
    assert done.returncode == 1 and "MISSING_LIBRARY" not in done.stderr


@dataclass
class Line:
    id: str


def test_a_table_never_cuts_an_id(capsys):
    show_rows([Line("x" * 500)], {"id": lambda line: line.id}, as_json=False, nothing="")
    assert capsys.readouterr().out.count("x") == 500


def test_every_command_takes_json():
    without = [
        name
        for name, command in COMMANDS.items()
        if not any("--json" in option.opts for option in command.params)
    ]
    assert without == []


@pytest.mark.parametrize(
    ("ours", "kafkas"),
    [("--bootstrap-servers", "--bootstrap-server"), ("--config", "--command-config")],
)
def test_each_command_that_reaches_a_cluster_takes_kafkas_own_names(ours, kafkas):
    options = {
        name: option.opts
        for name, command in COMMANDS.items()
        for option in command.params
        if ours in option.opts
    }
    assert len(options) > 10 and all(kafkas in names for names in options.values()), options


def test_the_table_of_statuses_names_commands_that_exist():
    named = set(re.findall(r"`([a-z][a-z -]*)`", status_table().replace("`restore --dry-run`", "")))
    assert named <= {*COMMANDS, "--dry-run"} and "doctor" in named


@pytest.mark.parametrize(
    "line",
    [
        "abort an-id",
        "commit an-id",
        "accept /no/checkpoint --batch 0",
        "adopt /no/checkpoint",
        "decisions list /no/checkpoint",
        "decisions show /no/checkpoint 0",
        "doctor",
        "progress /no/checkpoint",
        "restore /no/checkpoint",
        "transactions describe an-id",
        "transactions find-hanging --topic t",
        "transactions hanging t",
        "transactions list",
    ],
)
def test_an_error_is_one_line_of_json_on_standard_error(line, monkeypatch):
    monkeypatch.delenv("KAFKA2PC_BOOTSTRAP_SERVERS", raising=False)
    plain, done = run_line(f"kafka2pc {line}"), run_line(f"kafka2pc {line} --json")
    error = json.loads(done.stderr)
    assert (done.stdout, done.exit_code, error["status"]) == ("", 1, 1)
    assert plain.exit_code == 1
    assert plain.stderr.startswith(f"[{error['code']}] {error['what']}\n"), plain.stderr
    assert all(error[part] in plain.stderr for part in ("why", "risk", "action"))


def test_a_missing_package_is_an_error_in_json_too(monkeypatch):
    def no_s3(*args, **kwargs):
        raise ModuleNotFoundError(name="s3fs")

    monkeypatch.setattr("kafka2pc.operations.query.open_query", no_s3)
    done = run_line("kafka2pc decisions list s3://bucket/checkpoint --json")
    error = json.loads(done.stderr)
    assert (done.stdout, error["error"], error["status"]) == ("", "ImportError", 1)
    assert "s3fs" in error["what"]


@pytest.mark.parametrize(
    "line",
    [
        "transactions describe",
        "transactions describe a --transactional-id b",
        "abort",
        "commit a --transactional-id b",
        "transactions find-hanging",
        "transactions find-hanging --broker-id 1 --partition 0",
        "transactions --bootstrap-server h:1",
        "broker --nodes 2 --json",
        "drill --histories unknown --seeds 1 --json",
    ],
)
def test_words_that_do_not_fit_end_with_status_2(line):
    assert run_line(f"kafka2pc {line}").exit_code == 2


def test_histories_are_one_document_of_json():
    done = run_line("kafka2pc drill --seeds 2 --seed 1 --histories log --json")
    assert json.loads(done.stdout)["histories"] == 2 and done.exit_code == 0


def test_a_shell_completes_the_commands():
    code = "from kafka2pc.operations.cli.main import main; main()"
    asked = {"_KAFKA2PC_COMPLETE": "complete_bash", "COMP_CWORD": "2"}
    asked |= {"COMP_WORDS": "kafka2pc transactions find"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=os.environ | asked
    )
    assert done.stdout.split() == ["find-hanging"]
    assert "--install-completion" in run_line("kafka2pc --help").output


def test_sigterm_ends_simulated_histories_as_ctrl_c_does(monkeypatch):
    acts = []
    play = lambda *arguments: acts.append(signal.getsignal(signal.SIGTERM))
    monkeypatch.setattr("kafka2pc.operations.cli.app._play_seeds", play)
    assert run_line("kafka2pc drill --seeds 1").exit_code == 0
    assert acts == [signal.default_int_handler]


def test_the_table_of_statuses_knows_the_watcher():
    """Its tests see these statuses: 0 after SIGTERM, 3 for what was aborted."""
    lines = [line for line in status_table().splitlines() if "--watch" in line]
    assert [line[:15] for line in lines] == ["| 0 | `restore`", "| 3 | `restore`"]
    assert "SIGTERM" in lines[0] and "aborted after the decision" in lines[1]
