"""Simulated brokers beside a real one: the same requests, and the same answers."""

import uuid
from dataclasses import astuple, replace

import pytest
from kafka.protocol.admin import DescribeTransactionsRequest, UpdateFeaturesRequest
from played_requests import MANY, code_of, on_real, on_simulated

from kafka2pc.kafka.read.fetcher import Wanted, fetch
from kafka2pc.kafka.read.settings import FetchSettings
from kafka2pc.kafka.wire.cluster import Cluster
from kafka2pc.kafka.wire.descriptions import describe_transactions, list_transactions
from kafka2pc.kafka.wire.offsets import LATEST, list_offsets
from kafka2pc.kafka.wire.topics import create_topic
from kafka2pc.kafka.wire.transactions import add_partitions, end_txn, init_producer_id
from kafka2pc.kafka.write.sender import Sender
from kafka2pc.local.broker import LocalKafka
from kafka2pc.proof.child_process import until
from kafka2pc.protocol.messages import PreparedTxnState

pytestmark = pytest.mark.never_unsteady

# resource types of DescribeConfigs
TOPIC, BROKER = 2, 4
DOWNGRADE = 2  # the upgrade type of UpdateFeatures that loses nothing


ANOTHER = PreparedTxnState(987_654_321, 0)


def after(state, epochs=1):
    return PreparedTxnState(state.producer_id, state.epoch + epochs)


# -- records of an open transaction --


def sequences(p):
    """In order, repeated up to five batches back, the sixth, a gap, over and over."""
    p.create("t", 2)
    s = p.init("a")
    for sequence in (0, 3, 6, 9, 12, 15):
        p.produce("a", s, sequence, 3)
    for sequence in (15, 12, 9, 6, 3, 0):
        p.produce("a", s, sequence, 3)
    p.produce("a", s, 19, 3)
    p.produce("a", s, 15, 1)  # a part of a batch
    p.produce("a", s, 16, 3)  # begins within the last one
    p.produce("a", s, 18, 1)
    p.produce("a", s, 0, 3, partition=1)
    p.fetch()
    p.end("a", s, True)
    p.fetch()
    p.offsets()


def first_sequence(p):
    """The first batch of a producer, of an epoch, of a transaction."""
    p.create("t", 3)
    s = p.init("a")
    p.produce("a", s, 5)
    p.produce("a", s, 0)
    p.produce("a", s, 7, partition=1)
    n = p.end("a", s, True)
    p.produce("a", n, 1)  # after a marker
    p.produce("a", n, 4, partition=2)
    p.produce("a", n, 0)
    n = p.init("a")
    p.produce("a", n, 2)
    p.produce("a", n, 0)
    p.end("a", n, False)
    p.fetch()
    p.fetch(committed=False)


def newer_epoch_without_marker(p):
    """An epoch whose predecessor wrote nothing."""
    p.create("t")
    s = p.init("a")
    p.produce("a", s, 0)
    n = p.init("a")
    p.produce("a", after(n), 0)
    p.produce("a", after(n), 3)
    p.produce("a", s, 1)
    p.produce("a", s, 0)
    p.produce("a", n, 3)
    p.produce("a", n, 0)
    p.produce("a", after(n), 0)
    p.produce("a", s, 1)
    p.produce("a", after(n), 1)
    p.end("a", n, True)


def late_records(p):
    """Of a transaction that is over."""
    for commit in (True, False):
        word = f"end-{commit}"
        p.create(word)
        s = p.init(word)
        p.produce(word, s, 0, topic=word)
        n = p.end(word, s, commit)
        p.produce(word, s, 1, topic=word)
        p.produce(word, s, 0, topic=word)
        p.describe(word)
        p.produce(word, n, 0, topic=word)
        p.end(word, n, commit)
        p.fetch(topic=word)


def strangers(p):
    """Producer ids, ids, topics and partitions that do not exist."""
    p.create("t")
    p.produce("unknown", ANOTHER, 0)
    s = p.init("a")
    p.produce("a", ANOTHER, 0)
    p.produce("unknown", s, 0)
    p.produce("a", s, 0, topic="missing")
    p.produce("a", s, 0, partition=7)
    p.produce("a", after(s), 0)
    p.describe("a")
    p.produce("a", s, 0)
    other = p.init("b")
    p.produce("b", s, 1)
    p.produce("a", other, 0)
    p.describe("a")
    p.describe("b")
    p.end("a", s, False)


def sizes(p):
    p.create("t", max_message_bytes="1000")
    p.create("segments", segment_bytes="1048576", max_message_bytes="5000000")
    s = p.init("a")
    p.produce("a", s, 0, size=2000)
    p.describe("a")
    p.produce("a", s, 0)
    p.produce("a", s, 1, size=2000)
    p.produce("a", s, 1)
    p.produce("a", s, 0, size=1_500_000, topic="segments")
    p.end("a", s, True)
    p.fetch()


def several_partitions_in_a_request(p):
    """One of them fails."""
    p.create("t", 3)
    s = p.init("a")
    p.produce("a", s, 0)
    request = p.produce_request("a", s, [(0, 5, 1, 1), (1, 0, 1, 1), (2, 0, 1, 1), (9, 0, 1, 1)])
    answer = p.cluster.ask(request, p.node)
    rows = [(r.index, r.error_code, r.base_offset) for r in answer.responses[0].partition_responses]
    p.note(sorted(rows))
    p.describe("a")
    p.end("a", s, True)


# -- ends --


def ends(p):
    """Commit or abort, again, the other way, with each epoch."""
    p.create("t")
    for commit in (True, False):
        for version in p.end_versions:
            word = f"end-{commit}-{version}"
            s = p.init(word)
            p.produce(word, s, 0)
            p.describe(word)
            p.end(word, s, commit, version)
            p.end(word, s, commit, version)
            p.end(word, s, not commit, version)
            p.end(word, after(s), commit, version)
            p.end(word, after(s), not commit, version)
            p.end(word, after(s), not commit, version)
            p.end(word, s, commit, version)
            p.end(word, s, not commit, version)
            p.end(word, after(s, 2), not commit, version)
            p.end(word, after(s, 9), not commit, version)
    p.fetch()


def ends_of_nothing(p):
    """Nothing is open: it was only begun, or it is not known."""
    p.end("unknown", ANOTHER, True)
    for version in p.end_versions:
        for commit in (True, False):
            word = f"empty-{commit}-{version}"
            s = p.init(word)
            p.describe(word)
            p.end(word, s, commit, version)
            p.end(word, s, commit, version)
            p.end(word, s, not commit, version)
            p.end(word, after(s), commit, version)
            p.end(word, ANOTHER, commit, version)
            p.end(word, after(s, -1), commit, version)
            p.end(word, after(s, 5), commit, version)


def ends_of_others(p):
    """Another producer id, older and newer epochs, while it is open."""
    p.create("t")
    for version in p.end_versions:
        word = f"open-{version}"
        p.init(word)
        s = p.init(word)
        p.produce(word, s, 0)
        p.end(word, PreparedTxnState(987_654_321, s.epoch), True, version)
        p.end(word, after(s, -1), True, version)
        p.end(word, after(s, -1), False, version)
        p.end(word, after(s, 1), True, version)
        p.end(word, after(s, 1), False, version)
        p.end(word, s, True, version)


def two_transactions(p):
    """The end of the first, repeated while the second is open or over."""
    p.create("t")
    s = p.init("a")
    p.produce("a", s, 0)
    n = p.end("a", s, True)
    p.produce("a", n, 0)
    for commit in (True, False):
        p.end("a", s, commit)
    m = p.end("a", n, False)
    for commit in (True, False):
        p.end("a", s, commit)
        p.end("a", n, commit)
    p.produce("a", m, 0)
    p.produce("a", n, 1)
    p.end("a", m, True)
    p.fetch()


def struck_by_the_tool(p):
    """Markers that the coordinator does not know of: of the open transaction, an older epoch, an
    unknown producer; and the records and the commit behind them.
    """
    p.create("t", 2)
    p.init("a")
    s = p.init("a")
    p.produce("a", s, 0, 3)
    p.produce("a", s, 0, 2, partition=1)
    p.open_there()
    p.strike(after(s, -1))
    p.strike(ANOTHER)
    p.strike(s)
    p.describe("a")
    p.fetch()
    p.offsets()
    p.produce("a", s, 3, 2)
    p.open_there()
    p.end("a", s, True)
    p.fetch()
    p.fetch(partition=1)
    p.strike(s)
    p.offsets()


def while_markers_are_written(p):
    """Every request of each epoch, and of another producer, before the last marker is written."""
    p.create("t")
    p.create("many", MANY)
    p.while_prepared("init", lambda word, s: p.init_request(word), commit=True)
    p.while_prepared("init", lambda word, s: p.init_request(word), commit=False)
    for which in (0, 1, 2, "another"):

        def state(s, which=which):
            return ANOTHER if which == "another" else after(s, which)

        asked = {
            "commit": lambda word, s: p.end_request(word, state(s), True),
            "abort": lambda word, s: p.end_request(word, state(s), False),
            "commit of protocol 1": lambda word, s: p.end_request(word, state(s), True, 4),
            "add": lambda word, s: p.add_request(word, state(s), [("t", 0)]),
            "record of protocol 1": lambda word, s: p.produce_request(
                word, state(s), [(0, 0, 1, 1)], version=11
            ),
        }
        for name, request in asked.items():
            p.while_prepared(f"{name}-{which}", request, commit=name != "abort")


# -- begins --


def inits(p):
    """Twice, while it is open, after an end; with other timeouts."""
    p.create("t")
    p.init("a", timeout_ms=2_000_000_000)
    p.describe("a")
    p.init("a", timeout_ms=0)
    p.init("a")
    p.describe("a")
    s = p.init("a", timeout_ms=30_000)
    p.describe("a")
    p.produce("a", s, 0)
    p.describe("a")
    n = p.init("a", timeout_ms=40_000)
    p.describe("a")
    p.produce("a", s, 1)
    for commit in (True, False):
        p.end("a", s, commit)
        p.end("a", after(s), commit)
    p.produce("a", n, 0)
    n = p.end("a", n, True)
    n = p.init("a")
    p.end("a", n, False)
    p.init("a")
    p.describe("a")
    p.fetch()


def timeouts(p):
    p.create("t")
    s = p.init("a", timeout_ms=100)
    p.produce("a", s, 0)
    n = p.await_timeout("a")
    p.produce("a", s, 1)
    p.produce("a", s, 0)
    for commit in (True, False):
        p.end("a", s, commit)
    for commit in (True, False):
        p.end("a", n, commit)
    p.init("a")
    p.describe("a")
    p.fetch()


def unknown_ids(p):
    p.describe("unknown")
    p.add("unknown", ANOTHER, ("t", 0))
    p.end("unknown", ANOTHER, False)


def added_partitions(p):
    """AddPartitionsToTxn of each epoch, of missing partitions, after an end."""
    p.create("t", 3)
    s = p.init("a")
    s = p.init("a")
    for e in (after(s, -1), after(s), PreparedTxnState(987_654_321, s.epoch)):
        p.add("a", e, ("t", 0))
    p.add("a", s, ("t", 0), ("missing", 0))
    p.add("a", s, ("t", 0), ("t", 9))
    p.describe("a")
    p.add("a", s, ("t", 0), ("t", 1))
    p.describe("a")
    p.add("a", s, ("t", 1), ("t", 2))
    p.describe("a")
    n = p.end("a", s, True)
    p.add("a", s, ("t", 0))
    p.add("a", n, ("t", 0))
    p.describe("a")
    p.end("a", n, False)
    p.offsets()
    p.fetch()


def protocol_1(p):
    """The client adds the partitions, and an end leaves the epoch."""
    p.create("t", 3)
    p.produce("unknown", ANOTHER, 0, version=11)
    s = p.init("a")
    p.produce("a", ANOTHER, 0, version=11)
    p.produce("a", s, 0, version=11)
    p.describe("a")
    p.add("a", s, ("t", 0), ("t", 2))
    p.produce("a", s, 0, 2, version=11)
    p.produce("a", s, 0, partition=1, version=11)
    p.produce("a", s, 5, partition=2, version=11)
    p.produce("a", s, 6, partition=2, version=11)
    n = p.end("a", s, True, version=4)
    p.produce("a", s, 2, version=11)
    p.add("a", n, ("t", 0))
    p.produce("a", s, 0, 2, version=11)
    p.produce("a", n, 5, version=11)
    p.end("a", n, False, version=4)
    n = p.init("a")
    p.produce("a", s, 2, version=11)
    p.produce("a", after(n), 0, version=11)
    p.add("a", n, ("t", 0))
    p.produce("a", s, 2, version=11)
    p.produce("a", n, 0, version=11)
    p.produce("a", s, 2, version=11)
    p.init("a")
    p.describe("a")
    p.produce("a", n, 1, version=11)
    p.fetch()
    p.fetch(committed=False)


def wrapped_sequences(p):
    """After the largest number comes 0, between two batches and within one."""
    p.create("t", 2)
    s = p.init("a")
    p.add("a", s, ("t", 0), ("t", 1))
    for sequence in (2**31 - 4, 2**31 - 2, 0, 2**31 - 2, 1, 2):
        p.produce("a", s, sequence, 2, version=11)
    for sequence in (2**31 - 5, 2**31 - 2, 1, 2**31 - 2, 0, 2):
        p.produce("a", s, sequence, 3, partition=1, version=11)
    p.end("a", s, True, version=4)


def listed(p):
    p.create("t")
    p.init("empty")
    s = p.init("open")
    p.produce("open", s, 0)
    for commit in (True, False):
        word = f"ended-{commit}"
        n = p.init(word)
        p.produce(word, n, 0)
        p.end(word, n, commit)
    for states in ((), ("Ongoing",), ("CompleteCommit", "Empty"), ("None such", "Ongoing")):
        p.list(*states)
    for pattern in (f"{p.prefix}-.*", f"{p.prefix}-e", f"{p.prefix}-e.*"):
        p.list(transactional_id_pattern=pattern)
    p.list(duration_filter=1_000_000)
    p.end("open", s, False)


# -- reading --


def isolation(p):
    """Open, aborted and committed transactions of two producers."""
    p.create("t")
    a, b = p.init("a"), p.init("b")
    p.fetch()
    p.offsets()
    p.produce("a", a, 0, 2)
    p.produce("b", b, 0, 3)
    p.produce("a", a, 2, 1)
    for at in (0, 2, 6, 7):
        for committed in (True, False):
            p.fetch(at, committed=committed)
    p.offsets()
    p.end("b", b, False)
    p.fetch()
    p.offsets()
    p.end("a", a, True)
    n = p.init("b")
    p.produce("b", n, 0)
    for at in range(10):
        p.fetch(at)
    p.offsets()
    p.end("b", n, False)
    p.fetch(committed=False)
    for at in range(12):
        p.fetch(at)
    p.cut("t", 4)
    for at in (0, 3, 4, 5):
        p.fetch(at)
    p.offsets()
    p.cut("t", 10)
    p.fetch(10)
    p.offsets()


def wrong_places(p):
    """Topics, partitions, ids and leaders' epochs that do not exist."""
    p.create("t")
    s = p.init("a")
    p.produce("a", s, 0)
    p.end("a", s, True)
    p.note(p.fetched(by_id=p.topic_id()).error_code)
    p.note(p.fetched(by_id=p.topic_id(), partition=3).error_code)
    p.note(p.fetched(by_id=uuid.UUID(int=5)).error_code)
    p.fetch(topic="missing")
    p.fetch(partition=3)
    p.offsets("missing")
    p.offsets(partition=3)
    for epoch in (0, 1, -1):
        p.epoch_end(epoch)
    p.epoch_end(0, topic="missing")
    p.epoch_end(0, partition=3)


def topics(p):
    """Names that exist, that do not, and that cannot."""
    p.create("t", 2, max_message_bytes="1000")
    p.metadata(p.named("t"), p.named("missing"), "no name")
    p.ask_to_create(p.named("t"), {})
    p.ask_to_create("no name", {})
    p.ask_to_create(p.named("new"), {"cleanup.policy": "compact", "retention.ms": "604800000"})
    p.settings(TOPIC, p.named("t"), "max.message.bytes")
    p.settings(TOPIC, p.named("new"), "cleanup.policy", "none.such")
    p.settings(TOPIC, p.named("missing"), "max.message.bytes")
    p.find("transaction", "a", "b")
    p.find("group", "a")
    keys = "max.message.bytes", "segment.bytes", "cleanup.policy", "retention.ms", "retention.bytes"
    p.settings(TOPIC, p.named("new"), *keys)
    p.settings(BROKER, str(p.node), "auto.create.topics.enable", "transaction.max.timeout.ms")


def bookmarks(p):
    """The offset that a group keeps of a topic."""
    p.create("t")
    p.committed("t")
    for place in (("t", 0), ("t", 7), ("missing", 0)):
        p.commit_offset(*place, 5, 0, "kept")
        p.committed(*place)
    p.commit_offset("t", 0, 6, 9, "")
    p.committed("t")


def by_client(p):
    """The client's own functions."""
    p.create("t", 2)
    s = init_producer_id(p.cluster, p.named("a"), timeout_ms=60_000)
    sender = Sender(p.cluster, p.named("a"), s, implicit_add=p.protocol == 2)
    p.note(sorted(sender.leaders.learn([p.named("t")]).values()))
    for partition in (0, 1, 0):
        sender.put(p.section("t", [b"x"] * (partition + 2), partition))
    sender.flush()
    lanes = sender.lanes.values()
    p.note([(lane.partition, *astuple(lane.stored)) for lane in lanes])
    found = describe_transactions(p.cluster, [p.named("a"), p.named("missing")])
    p.note([(t.state, t.epoch, len(t.partitions)) for t in found.values()])
    p.note([t.state for t in list_transactions(p.cluster, p.prefix)])
    p.note(list_transactions(p.cluster, p.prefix, longer_ms=60_000))
    p.note(end_txn(p.cluster, p.named("a"), s, commit=True))
    p.describe("a")
    p.note([end_txn(p.cluster, p.named("a"), s, commit=commit) for commit in (True, False)])
    p.note(
        add_partitions(p.cluster, p.named("a"), s, [(p.named("t"), 0)]) == {(p.named("t"), 0): 90}
    )
    leaders = {(p.named("t"), n): p.node for n in range(2)}
    rows = list_offsets(p.cluster, leaders, LATEST, committed=True)
    p.note([(row.error_code, row.offset) for _, row in sorted(rows.items())])
    ranges = [Wanted(p.named("t"), n, 0, row.offset) for (_, n), row in sorted(rows.items())]
    ranges += [replace(r, topic_id=p.topic_id()) for r in ranges]
    for r in ranges:
        pieces = fetch(p.cluster, [r], FetchSettings())
        p.note([rows.offsets.tolist() for _, rows in pieces])
    lost = [replace(ranges[0], begin=77, end=78), replace(ranges[0], topic_id=uuid.UUID(int=5))]
    for r in lost:
        (found,) = fetch(p.cluster, [r], FetchSettings(patience_ms=1))
        p.note(found[1].code)
    p.note(create_topic(p.cluster, p.named("t"), {}))


# -- several nodes --


def other_nodes(p):
    """A node that does not lead, and one that does not coordinate."""
    p.create("t")
    s = p.init("a")
    p.produce("a", s, 0)
    leader, coordinator = p.leader("t"), p.coordinator("a")
    other = min(set(p.cluster.nodes()) - {leader})
    p.produce("a", s, 1, at=other)
    p.produce("a", s, 0, at=other)
    p.note("any replica serves readers", p.fetched(at=other).error_code)
    p.offsets(at=other)
    p.epoch_end(0, at=other)
    b = p.init("b")
    p.produce("b", b, 0, at=other)
    p.describe("b")
    other = min(set(p.cluster.nodes()) - {coordinator})
    asked = [p.init_request("a"), p.end_request("a", s, True), p.add_request("a", s, [("t", 0)])]
    for request in asked:
        p.note(request.name, code_of(p.cluster.ask(request, other)))
    describe = DescribeTransactionsRequest(transactional_ids=[p.named("a")])
    p.note(describe.name, p.cluster.ask(describe, other).transaction_states[0].error_code)
    p.end("a", s, True)
    p.end("b", b, False)
    p.fetch()


def moved_leader(p):
    """Another node leads, and knows what was written before."""
    p.create("t", 3)
    s = p.init("a")
    # its coordinator stays
    place = next(n for n in range(3) if p.leader("t", n) != p.coordinator("a"))
    for sequence in (0, 3, 6):
        p.produce("a", s, sequence, 3, partition=place)
    p.fetch(partition=place)
    p.move("t", place)
    for sequence in (6, 3, 0, 12, 9):
        p.produce("a", s, sequence, 3, partition=place)
    p.end("a", s, True)
    p.offsets(partition=place)
    for epoch in (0, 1, 2):
        p.epoch_end(epoch, partition=place)
    n = p.init("a")
    p.produce("a", s, 12, partition=place)
    p.produce("a", n, 1, partition=place)
    p.produce("a", n, 0, partition=place)
    p.end("a", n, False)
    p.fetch(partition=place)


SCRIPTS = [
    sequences,
    first_sequence,
    newer_epoch_without_marker,
    late_records,
    strangers,
    sizes,
    several_partitions_in_a_request,
    ends,
    ends_of_nothing,
    ends_of_others,
    two_transactions,
    struck_by_the_tool,
    while_markers_are_written,
    inits,
    timeouts,
    unknown_ids,
    added_partitions,
    protocol_1,
    wrapped_sequences,
    listed,
    isolation,
    wrong_places,
    topics,
    bookmarks,
    by_client,
]
# with one epoch for several transactions a broker also looks at batches that it refused
OF_BOTH_PROTOCOLS = [script for script in SCRIPTS if script is not two_transactions]


OF_SEVERAL_NODES = [other_nodes, moved_leader]


def check_same(script, kafka, protocol=2):
    nodes = len(kafka.pids)
    prefix = f"{script.__name__}-{uuid.uuid4().hex[:8]}"
    with Cluster(kafka.client_conf) as cluster:
        real = on_real(kafka, cluster, prefix, protocol)
        simulated = on_simulated(prefix, protocol, nodes)
        for played in (real, simulated):
            script(played)
    assert simulated.answers == real.answers


@pytest.mark.kafka
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda s: s.__name__)
def test_simulated_brokers_answer_as_a_real_one(kafka, script):
    check_same(script, kafka)


@pytest.fixture(scope="module")
def old_protocol():
    """A cluster whose transaction.version is 1."""
    key = UpdateFeaturesRequest.FeatureUpdateKey
    level = key(feature="transaction.version", max_version_level=1, upgrade_type=DOWNGRADE)
    with LocalKafka(progress=None) as kafka:
        with Cluster(kafka.client_conf) as cluster:
            answer = cluster.ask(UpdateFeaturesRequest(feature_updates=[level]), cluster.nodes()[0])
            assert answer.error_code == 0
        until(lambda: transaction_version(kafka) == 1, "transaction.version is 1")
        yield kafka


def transaction_version(kafka):
    with Cluster(kafka.client_conf) as cluster:
        return cluster.feature_level("transaction.version")


@pytest.mark.kafka
@pytest.mark.nightly
@pytest.mark.parametrize("script", OF_BOTH_PROTOCOLS, ids=lambda s: s.__name__)
def test_simulated_brokers_of_the_old_protocol_answer_as_a_real_one(old_protocol, script):
    check_same(script, old_protocol, protocol=1)


@pytest.mark.kafka
@pytest.mark.nightly
@pytest.mark.parametrize("script", OF_SEVERAL_NODES, ids=lambda s: s.__name__)
def test_several_simulated_nodes_answer_as_real_ones(three, script):
    check_same(script, three)
