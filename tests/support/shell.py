"""A line of the command line, run in this process."""

import shlex

import typer
from typer.testing import CliRunner

from kafka2pc.operations.cli.app import app
from kafka2pc.operations.exit_status import statuses_of


def commands_of(group, before=()):
    """The words of each command below a group, with the command itself."""
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands_of(command, (*before, name))
        else:
            yield " ".join((*before, name)), command


COMMANDS = dict(commands_of(typer.main.get_command(app)))


def command_of(words):
    """The words that name the command of a line."""
    if words[0] in COMMANDS:
        return words[0]
    found = [f"{words[0]} {word}" for word in words[1:] if f"{words[0]} {word}" in COMMANDS]
    return [*found, f"{words[0]} list"][0]


def run(line, **env):
    """What came of a kafka2pc line: its `stdout`, its `stderr`, both as `output`, its status."""
    program, *words = shlex.split(line)
    assert program == "kafka2pc"
    done = CliRunner().invoke(app, words, env=env)
    assert done.exception is None or isinstance(done.exception, SystemExit), done.output
    assert done.exit_code in statuses_of(command_of(words)), (line, done.exit_code)
    return done


def typed(line, **env):
    """What a kafka2pc line says, and its status."""
    done = run(line, **env)
    return done.output, done.exit_code
