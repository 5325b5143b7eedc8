"""The connection that a process shares: opened once for each set of settings, while no query waits
for the cluster of another one, and anew in a forked process.
"""

import os
import threading
import uuid
from types import SimpleNamespace

import pytest
from forked import ended_after

from kafka2pc.kafka import client


class Opening:
    """In place of `Cluster`. To connect to a cluster that is down takes until `end`."""

    def __init__(self):
        self.pid, self.opened = os.getpid(), []
        self.begun, self.end = threading.Event(), threading.Event()

    def __call__(self, conf, **limits):
        if conf["down"] and os.getpid() == self.pid:
            self.begun.set()
            self.end.wait()
        self.opened.append(conf)
        return SimpleNamespace(close=lambda: None)


@pytest.fixture
def down():
    return {"bootstrap.servers": f"{uuid.uuid4()}:1", "down": True}


@pytest.fixture
def opening(monkeypatch, down):
    """A thread opens a connection to a cluster that is down."""
    made = Opening()
    monkeypatch.setattr(client, "Cluster", made)
    thread = threading.Thread(target=client.shared_cluster, args=[down])
    thread.start()
    made.begun.wait()
    yield made
    made.end.set()
    thread.join()


def test_a_cluster_that_is_down_keeps_no_other_waiting(opening, down):
    done = threading.Event()

    def other():
        conf = down | {"down": False}
        assert client.shared_cluster(conf) is client.shared_cluster(conf)
        done.set()

    threading.Thread(target=other, daemon=True).start()
    assert done.wait(20)


def test_a_connection_is_opened_once(opening, down):
    second = threading.Thread(target=client.shared_cluster, args=[down])
    second.start()
    opening.end.set()
    second.join()
    client.shared_cluster(down)
    assert opening.opened == [down]


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_process_that_is_forked_meanwhile_opens_its_own(opening, down):
    pid = os.fork()
    if pid == 0:
        with ended_after(20):
            client.shared_cluster(down)
    assert os.waitpid(pid, 0)[1] == 0
