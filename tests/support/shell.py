"""A line of the command line, run in this process."""

import shlex

from typer.testing import CliRunner

from kafka2pc.operations.cli.app import app


def typed(line, **env):
    """What a kafka2pc line says, and its status."""
    program, *words = shlex.split(line)
    assert program == "kafka2pc"
    done = CliRunner().invoke(app, words, env=env)
    assert done.exception is None or isinstance(done.exception, SystemExit), done.output
    return done.output, done.exit_code
