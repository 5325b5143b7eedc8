"""Hostile input: for any bytes in a decision file, a Committable, an option or a name, the answer
is one of our errors or a sound value; and nothing that is not this query's is ever committed or
aborted.
"""

import json
import string
from contextlib import suppress

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kafka2pc.decision_logs.files import FileLog
from kafka2pc.operations.access import Access
from kafka2pc.protocol.driver import Driver
from kafka2pc.protocol.errors import CorruptDecision, StaleCheckpoint, TwoPhaseError, UnknownFormat
from kafka2pc.protocol.log.decisions import Decision, Slot
from kafka2pc.protocol.log.format import _checksum, dump_decision, load_decision
from kafka2pc.protocol.log.questions import commit_of
from kafka2pc.protocol.memory import MemoryParticipant
from kafka2pc.protocol.messages import (
    Committable,
    PartitionRange,
    Plan,
    PreparedTxnState,
    committable_from_dict,
)
from kafka2pc.protocol.names import Names, Token, new_token, parse_name
from kafka2pc.protocol.phases.precommit import precommit
from kafka2pc.protocol.phases.restore import restore
from kafka2pc.protocol.states import TxnState
from kafka2pc.spark.sink.options import SinkOptions, parse_sink_options

QUERY, OTHER = "11111111-2222-3333-4444-555555555555", "99999999-2222-3333-4444-555555555555"
pytestmark = pytest.mark.timeout(120)
often = settings(
    max_examples=200,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 2**70) | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=6,
)


def name_of(query):
    return f"kafka2pc-{query}-{new_token(0, 1)}-0badcafe-0-0"


def decision(query=QUERY, name=None, **more):
    c = Committable(
        transactional_id=name or name_of(query),
        state=PreparedTxnState(0, 0),
        participant="memory",
        cluster_id="memory-store",
        partitions=(PartitionRange(topic="t", partition=0, records=1),),
    )
    return Decision(
        **dict(
            query_id=query,
            slot=Slot(0, 1),
            commit=True,
            token=Token(0, 1, "5f3a09c1"),
            stores=(("memory", "memory-store"),),
            committables=(c,),
        )
        | more
    )


def loaded(content):
    """What the file says, or None if it is refused in our words."""
    try:
        return load_decision(content, "here")
    except (CorruptDecision, UnknownFormat) as e:
        assert e.what.startswith("here: ") or e.what.startswith("Committable ")


@often
@given(st.binary(max_size=400))
def test_no_bytes_are_a_decision_by_chance(content):
    assert loaded(content) is None


@often
@given(st.data())
def test_a_file_that_lost_or_changed_bytes_is_refused(data):
    whole = dump_decision(decision())
    at = data.draw(st.integers(0, len(whole) - 1))
    if data.draw(st.booleans()):
        damaged = whole[:at]
    else:
        damaged = (
            whole[:at]
            + bytes([data.draw(st.integers(0, 255).filter(lambda b: b != whole[at]))])
            + whole[at + 1 :]
        )
    found = loaded(damaged)
    assert found is None or json.loads(damaged) == json.loads(whole), "only white space may differ"


def forged(change):
    """A decision that says something else, with a checksum that fits."""
    d = json.loads(dump_decision(decision()))
    change(d)
    return json.dumps(d | {"checksum": _checksum(d)}).encode()


PLACES = [
    ("query_id",),
    ("batch_id",),
    ("attempt",),
    ("kind",),
    ("token",),
    ("stores",),
    ("offsets_hash",),
    ("committables",),
    ("committables", 0),
    *(
        ("committables", 0, k)
        for k in (
            "transactional_id",
            "state",
            "participant",
            "partitions",
            "version",
            "end_txn_version",
            "timeout_ms",
        )
    ),
    ("committables", 0, "state", "producer_id"),
    ("committables", 0, "state", "epoch"),
    ("committables", 0, "partitions", 0),
]


@often
@given(st.sampled_from(PLACES), JSON)
def test_a_forged_file_with_a_fitting_checksum_ends_nothing_that_is_not_this_querys(place, value):
    def change(d):
        for step in place[:-1]:
            d = d[step]
        d[place[-1]] = value

    theirs, log = store_of_others()
    log.files = {"0.1.json": forged(change)}
    driver = Driver(query_id=QUERY, log=log, participants={"memory": theirs})
    # a record with a valid checksum can make the query stop, in any way
    with suppress(Exception):
        restore(driver, 0)
    assert {t.state for t in theirs.txns.values()} == {TxnState.PRECOMMITTED}, (
        "no store received a commit or an abort"
    )


class InMemory(FileLog):
    """Files without a disk."""

    def __init__(self):
        self.folder, self.files = "memory", {}

    def _put(self, slot, content):
        if (path := self._path(slot).rpartition("/")[2]) in self.files:
            raise FileExistsError
        self.files[path] = content

    def _get(self, path):
        return self.files[path.rpartition("/")[2]]

    def _names(self):
        return list(self.files)


def store_of_others():
    """A store where another query has something pre-committed, and a log of ours."""
    store = MemoryParticipant("memory")
    precommit(
        [store], Plan(query_id=OTHER, batch_id=0, attempt=1, token=new_token(0, 1)), [["row"]]
    )
    return store, InMemory()


def foreign_files(store):
    """Whole files with fitting checksums: of another query, and of ours with its transactions."""
    ((name, epoch),) = store.txns
    c = store.receipt(name, epoch)
    yield "of another query", dump_decision(decision(OTHER, committables=(c,)))
    yield "with its transaction", dump_decision(decision(QUERY, committables=(c,)))
    yield "with a name that is no name of ours", dump_decision(decision(QUERY, name="flink-3-17"))


@pytest.mark.parametrize("number", range(3))
def test_a_whole_file_about_another_query_commits_nothing(number):
    store, log = store_of_others()
    what, content = list(foreign_files(store))[number]
    log.files = {"0.1.json": content}
    assert commit_of(log, 0) is not None, what
    with pytest.raises(
        (CorruptDecision, StaleCheckpoint), match="about another query|decisions of query"
    ):
        restore(Driver(query_id=QUERY, log=log, participants={"memory": store}), 0)
    assert store.read() == [] and len(store.in_doubt(OTHER)) == 1


@often
@given(JSON)
def test_a_committable_is_one_or_is_refused(value):
    try:
        found = committable_from_dict(value)
    except (UnknownFormat, ValueError, TypeError, KeyError, AttributeError):
        return
    assert isinstance(found, Committable)


@often
@given(st.text(max_size=60) | st.from_regex(r"kafka2pc-.*-[0-9.]+-.*", fullmatch=True))
def test_a_name_that_is_not_ours_is_nobodys(text):
    found = parse_name(text)
    assert found is None or text.startswith(f"{found.prefix}-{found.query_id}-{found.token}-")


@often
@given(st.text(max_size=20) | st.sampled_from(["", "two\nlines"]))
def test_a_name_is_parsed_whatever_its_prefix(prefix):
    token = new_token(0, 1)
    found = parse_name(Names().next(prefix, QUERY, token, 1))
    assert (found.prefix, found.query_id, found.token, found.parity) == (
        prefix,
        QUERY,
        token,
        1,
    )


NAMES = st.sampled_from(
    [
        "topic",
        "transactionalIdPrefix",
        "twoPhaseCommit",
        "engine",
        "maxCommitRetries",
        "kafka.acks",
        "kafka.sasl.jaas.config",
        "kafka.bootstrap.servers",
        "kafka.transaction.timeout.ms",
        "kafka.security.protocol",
        "decisionLog",
        "idempotenceKey",
    ]
)


@often
@given(
    st.dictionaries(
        NAMES | st.text(string.ascii_letters + ".", max_size=12), st.text(max_size=12), max_size=5
    )
)
def test_options_are_sound_or_refused_in_our_words(options):
    try:
        found = parse_sink_options(
            {"kafka.bootstrap.servers": "h:1", "kafka.sasl.password": "hunter2"} | options
        )
    except TwoPhaseError as e:
        assert e.risk and e.action and "hunter2" not in str(e)
        return
    assert isinstance(found, SinkOptions) and "hunter2" not in repr(found)


@often
@given(st.binary(max_size=80))
def test_a_settings_file_is_read_or_refused_and_never_quoted(tmp_path, content):
    file = tmp_path / "client.properties"
    file.write_bytes(content + b"\nhunter2\n")
    with pytest.raises(TwoPhaseError) as caught:
        Access("h:1", str(file)).conf()
    assert "hunter2" not in str(caught.value)
