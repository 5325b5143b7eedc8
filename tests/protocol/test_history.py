"""The history: what is written, what is read back, and what the environment can switch on."""

import subprocess
import sys

import pytest

from kafka2pc.proof.crash_points import watched
from kafka2pc.protocol.history import (
    History,
    Silence,
    from_environment,
    read_history,
    requests_of,
    watcher,
)
from kafka2pc.protocol.participant import Outcome


@pytest.fixture
def environment(monkeypatch):
    for name in ("KAFKA2PC_HISTORY", "KAFKA2PC_WATCHER"):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


@pytest.mark.parametrize(
    ("outcome", "kind"),
    [(Outcome.DONE, "ok"), (Outcome.REFUSED, "fail"), (Outcome.UNKNOWN, "info")],
)
def test_an_outcome_is_written_as_the_kind_of_the_last_event(outcome, kind):
    history = History()
    with history.of("commit", batch_id=1) as noted:
        noted |= {"outcome": outcome, "attempt": 2}
    first, last = history.events
    assert (first.kind, first.ids) == ("invoke", {"batch_id": 1})
    assert (last.kind, last.ids) == (kind, {"batch_id": 1, "attempt": 2})


def test_a_block_that_raises_is_unclear():
    history = History()
    with pytest.raises(KeyError), history.of("flush"):
        raise KeyError
    assert [(e.kind, e.ids) for e in history.events] == [
        ("invoke", {}),
        ("info", {"error": "KeyError"}),
    ]


def test_a_file_is_read_back_without_a_last_line_that_was_cut_short(tmp_path):
    history = History(str(tmp_path / "history"))
    events = [history.append("ok", "write", rows=rows) for rows in (1, 2)]
    with open(tmp_path / "history", "ab") as f:
        f.write(b'{"kind": "ok"')
    assert read_history(tmp_path / "history") == events
    assert history.events == []


def test_without_the_variables_nothing_is_written_and_nothing_is_loaded(environment):
    assert isinstance(from_environment(), Silence)
    environment.setenv("KAFKA2PC_WATCHER", "no_such_module:watch")
    assert (type(from_environment()), watcher()) == (Silence, None)


@pytest.mark.parametrize("watched_by_proof", [False, True])
def test_the_crash_points_are_loaded_only_if_the_variable_names_them(
    environment, tmp_path, watched_by_proof
):
    environment.setenv("KAFKA2PC_HISTORY", str(tmp_path / "history"))
    for name, value in watched(tmp_path / "order").items() if watched_by_proof else ():
        environment.setenv(name, value)
    code = (
        "import sys; from kafka2pc.protocol.history import from_environment;"
        " history = from_environment(); print(history.watched,"
        " [m for m in sys.modules if m.startswith('kafka2pc.proof.')])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = "True ['kafka2pc.proof.crash_points']" if watched_by_proof else "False []"
    assert out.stdout.strip() == loaded


def test_the_variable_names_no_code_of_another_package(environment, tmp_path):
    environment.setenv("KAFKA2PC_HISTORY", str(tmp_path / "history"))
    environment.setenv("KAFKA2PC_WATCHER", "os:getcwd")
    with pytest.raises(ModuleNotFoundError, match="kafka2pc.os"):
        from_environment()


def test_a_request_is_counted_for_each_transaction_verb_and_phase():
    history = History()

    def send(verb, name, outcome):
        with history.of(verb, batch_id=1, transactional_id=name) as noted:
            noted["outcome"] = outcome

    send("commit", "a", Outcome.UNKNOWN)
    send("commit", "a", Outcome.DONE)
    with history.of("plan", batch_id=2):
        send("abort", "b", Outcome.REFUSED)
    send("abort", "b", Outcome.DONE)
    assert [
        (r.transactional_id, r.verb, r.restored, r.answer, r.times)
        for r in requests_of(history.events)
    ] == [
        ("a", "commit", False, "ok", 2),
        ("b", "abort", True, "fail", 1),
        ("b", "abort", False, "ok", 1),
    ]
