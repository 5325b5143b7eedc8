"""A query that dies: pre-committed, decided or not, as a new run or an operator finds it."""

import pytest
from kafka_fixtures import values

from kafka2pc.kafka.wire.cluster import Cluster
from kafka2pc.kafka.wire.descriptions import list_transactions
from kafka2pc.operations.access import Access
from kafka2pc.operations.doctor.doctor import doctor
from kafka2pc.proof import dead_query


class DeadQuery(dead_query.DeadQuery):
    """A dead query as the tests ask for it. What it leaves open ends with its test."""

    def __init__(self, *arguments, **how):
        super().__init__(*arguments, **how)
        QUERIES.append(self)

    @property
    def access(self):
        return Access(self.kafka.bootstrap_servers)

    def seen(self, **how):
        """What a `read_committed` consumer sees; `how`: see `records`."""
        return sorted(values(self.kafka, self.topic, **how))

    def doctor(self, **how):
        defaults = dict(checkpoint=self.checkpoint, older_ms=0, prefix=self.prefix)
        return doctor(self.access, **defaults | how)

    def close(self):
        """Leave nothing open on the shared broker."""
        if self.kafka.started and not self.kafka.down:
            self.abort_all()
        super().close()


QUERIES = []


@pytest.fixture(autouse=True)
def closing():
    """Ends what the queries of a test left open."""
    yield
    while QUERIES:
        QUERIES.pop().close()


@pytest.fixture
def dead(kafka, tmp_path):
    return DeadQuery(kafka, tmp_path)


ROWS = ["0a", "0b", "0c", "0d"]


def finding_of(diagnosis, name, *words):
    """The finding of this name. It is there once, has all its parts, and contains these words."""
    found = [f for f in diagnosis.findings if f.name == name]
    assert len(found) == 1, [(f.name, f.what) for f in diagnosis.findings]
    parts = (found[0].what, found[0].why, found[0].risk, found[0].action)
    assert all(parts)
    items = [f"{name}\n{text}" for name, text in found[0].items]
    text = "\n".join((*parts, *items, *found[0].commands))
    assert [word for word in words if word not in text] == []
    return found[0]


def names(diagnosis):
    return {f.name for f in diagnosis.findings}


def write(dead, text):
    """A record of another producer, without a transaction."""
    dead_query.write(dead.kafka, dead.topic, text)


def find_open(kafka, prefix, states=("Ongoing",)):
    with Cluster(kafka.client_conf) as cluster:
        return list_transactions(cluster, prefix, states)


def newest_file(dead):
    """The file of the newest record of its decision log."""
    files = (dead.place / "kafka2pc").glob("*.json")
    return max(files, key=lambda file: [int(n) for n in file.name.split(".")[:2]])
