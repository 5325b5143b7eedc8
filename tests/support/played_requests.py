"""Requests that are played to a cluster. Its answers are kept in a form that is the same on every
cluster with the same rules: producer ids by their order, no times, topics and ids by their words.
"""

from functools import partial

import numpy as np
import pyarrow as pa
from confluent_kafka import TopicPartition
from confluent_kafka.admin import AdminClient
from kafka.protocol.admin import (
    CreateTopicsRequest,
    DescribeConfigsRequest,
    DescribeTransactionsRequest,
    ListTransactionsRequest,
)
from kafka.protocol.consumer import (
    OffsetCommitRequest,
    OffsetFetchRequest,
    OffsetForLeaderEpochRequest,
)
from kafka.protocol.consumer.fetch import FetchRequest
from kafka.protocol.metadata import FindCoordinatorRequest, MetadataRequest
from kafka.protocol.producer.produce import ProduceRequest
from kafka.protocol.producer.transaction import (
    AddPartitionsToTxnRequest,
    EndTxnRequest,
    InitProducerIdRequest,
)

from kafka2pc.kafka.open_there import open_in, producers_requests
from kafka2pc.kafka.records.decoder import split
from kafka2pc.kafka.records.encoder import record_batch, sections
from kafka2pc.kafka.records.rows import rows_of
from kafka2pc.kafka.wire import error_codes as codes
from kafka2pc.kafka.wire.cluster import ask_coordinators
from kafka2pc.kafka.wire.connection import NotYet
from kafka2pc.kafka.wire.descriptions import describe_transactions
from kafka2pc.kafka.wire.offsets import EARLIEST, LATEST, offsets_request
from kafka2pc.kafka.wire.topics import find_leaders, topic_id_in, topic_rows
from kafka2pc.proof.child_process import until
from kafka2pc.proof.simulation.brokers import Brokers, move_leader
from kafka2pc.proof.simulation.network import Network, SimulatedCluster
from kafka2pc.proof.simulation.other_hands import markers_request
from kafka2pc.proof.simulation.partition_log import remove_before
from kafka2pc.proof.simulation.virtual_clock import VirtualClock
from kafka2pc.protocol.messages import PreparedTxnState

MANY = 100  # partitions, so that the markers of all take some milliseconds
WAITS = codes.COORDINATOR_MOVES | {codes.CONCURRENT_TRANSACTIONS}


class Played:
    """A cluster to which requests are played. `answers`: what it answered, in order. Topics and ids
    get the prefix of this play. `create(name, partitions, config)` makes a topic; `cut(name,
    offset)` removes what is before an offset; `moved(name, partition)` lets another node lead;
    `marks_s`: markers are written in this time, as a
    rule; `scan_s`: a coordinator looks for old transactions in it, as a rule. `protocol`: of
    transactions; with 1 each Produce comes after an AddPartitionsToTxn.
    """

    def __init__(self, cluster, prefix, create, cut, moved, *, marks_s, scan_s, protocol):
        self.cluster = cluster
        self.prefix = prefix
        self.protocol = protocol
        self.end_versions = (5, 4) if protocol == 2 else (4,)  # versions of EndTxn
        self.marks_s = marks_s
        self.scan_s = scan_s
        self.answers = []
        self._create = create
        self._cut = cut
        self._moved = moved
        self._producers = {}

    def named(self, word):
        return f"{self.prefix}-{word}"

    def word(self, name):
        return name.removeprefix(f"{self.prefix}-")

    def note(self, *what):
        self.answers.append(what)

    def producer(self, producer_id):
        """A producer id as its number in the order in which it was met."""
        if producer_id < 0:
            return producer_id
        return f"producer {self._producers.setdefault(producer_id, len(self._producers))}"

    def create(self, word, partitions=1, **config):
        config = {key.replace("_", "."): value for key, value in config.items()}
        self._create(self.named(word), partitions, config)
        until(lambda: self._leads(word, partitions), f"the partitions of {word}")

    def _leads(self, word, partitions):
        """Metadata can name a leader before it leads."""
        rows = [self._offset_row(word, n, EARLIEST, False) for n in range(partitions)]
        return all(row.error_code == 0 for row in rows)

    @property
    def node(self):
        """Any node."""
        return self.cluster.nodes()[0]

    def leader(self, topic, partition=0):
        """The node that leads; any, if there is no such partition."""
        found = find_leaders(self.cluster, [self.named(topic)]).get((self.named(topic), partition))
        return self.node if found is None or found < 0 else found

    def coordinator(self, word):
        (node,) = self.cluster.persist(
            lambda: self.cluster.coordinators([self.named(word)])
        ).values()
        return node

    def cut(self, word, offset):
        self._cut(self.named(word), offset)

    def move(self, word, partition):
        before = self.leader(word, partition)
        self._moved(self.named(word), partition)
        until(lambda: self.leader(word, partition) != before, "another node leads")
        until(lambda: self._offset_row(word, partition, LATEST, False).error_code == 0, "it leads")

    # -- transactions --

    def _ask_coordinator(self, word, request):
        self.coordinator(word)
        (answer,) = ask_coordinators(self.cluster, [self.named(word)], lambda _: request)
        return answer

    def init_request(self, word, timeout_ms=60_000):
        return InitProducerIdRequest(
            transactional_id=self.named(word),
            transaction_timeout_ms=timeout_ms,
            producer_id=-1,
            producer_epoch=-1,
            max_version=5,
        )

    def init(self, word, timeout_ms=60_000):
        """InitProducerId. Both the first answer and the last are kept: the coordinator may abort
        what is open before it gives an epoch.
        """

        def ask():
            return self._ask_coordinator(word, self.init_request(word, timeout_ms))

        def last():
            self.cluster.clock.sleep(self.marks_s)
            answer = ask()
            return answer.error_code not in WAITS and answer

        first = ask()
        # a node has no producer id left, and has just asked for more
        if first.error_code in codes.COORDINATOR_MOVES:
            first = until(last, "InitProducerId")
        answer = until(last, "InitProducerId") if first.error_code in WAITS else first
        self.note(
            "InitProducerId",
            word,
            first.error_code,
            answer.error_code,
            self.producer(answer.producer_id),
            answer.producer_epoch,
        )
        return PreparedTxnState(answer.producer_id, answer.producer_epoch)

    def add_request(self, word, state, places):
        by_topic = {}
        for topic, partition in places:
            by_topic.setdefault(topic, []).append(partition)
        topic = AddPartitionsToTxnRequest.AddPartitionsToTxnTopic
        return AddPartitionsToTxnRequest(
            v3_and_below_transactional_id=self.named(word),
            v3_and_below_producer_id=state.producer_id,
            v3_and_below_producer_epoch=state.epoch,
            v3_and_below_topics=[
                topic(name=self.named(t), partitions=numbers) for t, numbers in by_topic.items()
            ],
            max_version=3,
        )

    def add(self, word, state, *places):
        answer = self._ask_coordinator(word, self.add_request(word, state, places))
        rows = sorted(
            (self.word(t.name), p.partition_index, p.partition_error_code)
            for t in answer.results_by_topic_v3_and_below
            for p in t.results_by_partition
        )
        self.note("AddPartitionsToTxn", word, rows)

    def end_request(self, word, state, commit, version=None):
        return EndTxnRequest(
            transactional_id=self.named(word),
            producer_id=state.producer_id,
            producer_epoch=state.epoch,
            committed=commit,
            max_version=version or self.end_versions[0],
        )

    def end(self, word, state, commit, version=None):
        """EndTxn, and a description when its markers are written."""
        answer = self._ask_coordinator(word, self.end_request(word, state, commit, version))
        self.note(
            "EndTxn",
            word,
            "commit" if commit else "abort",
            answer.error_code,
            self.producer(answer.producer_id),
            answer.producer_epoch,
        )
        return self.describe(word)

    def strike(self, state, *, topic="t", partition=0):
        """What Kafka's tool does to a transaction in a partition, and what is open there then."""
        place = self.named(topic), partition
        node = self.leader(topic, partition)
        request = markers_request(place, state.producer_id, state.epoch)
        [marker] = self.cluster.ask(request, node).markers
        self.note("WriteTxnMarkers", marker.topics[0].partitions[0].error_code)
        self.open_there(topic, partition)

    def open_there(self, topic="t", partition=0):
        """What its leader says of open transactions."""
        node = self.leader(topic, partition)
        [(request, _)] = producers_requests({(self.named(topic), partition): node})
        [row] = self.cluster.ask(request, node).topics[0].partitions
        found = open_in(topic, row)
        rows = sorted((self.producer(f.producer_id), f.epoch, f.first_offset) for f in found)
        self.note("DescribeProducers", row.error_code, rows)

    def described(self, word):
        (row,) = self._ask_coordinator(
            word, DescribeTransactionsRequest(transactional_ids=[self.named(word)])
        ).transaction_states
        return row

    def describe(self, word):
        """Wait until no markers are to be written, and keep the description."""

        def ended():
            self.cluster.clock.sleep(self.marks_s)
            row = self.described(word)
            return not row.transaction_state.startswith("Prepare") and row

        return self._note_described(word, until(ended, f"{word} has ended"))

    def await_timeout(self, word):
        """Wait until the coordinator has aborted what is too old, and keep the description."""

        def ended():
            self.cluster.clock.sleep(self.scan_s)
            row = self.described(word)
            return row.transaction_state == "CompleteAbort" and row

        return self._note_described(word, until(ended, f"{word} is aborted"))

    def _note_described(self, word, row):
        places = sorted((self.word(t.topic), p) for t in row.topics for p in t.partitions)
        self.note(
            "DescribeTransactions",
            word,
            row.error_code,
            row.transaction_state,
            self.producer(row.producer_id),
            row.producer_epoch,
            row.transaction_timeout_ms,
            row.transaction_start_time_ms > 0,
            places,
        )
        return PreparedTxnState(row.producer_id, row.producer_epoch)

    def list(self, *states, **more):
        request = ListTransactionsRequest(
            state_filters=list(states), producer_id_filters=[], **more
        )
        answer = self.cluster.ask(request, self.node)
        rows = sorted(
            (self.word(t.transactional_id), t.transaction_state)
            for t in answer.transaction_states
            if t.transactional_id.startswith(self.prefix)
        )
        self.note("ListTransactions", states, answer.error_code, answer.unknown_state_filters, rows)

    def while_prepared(self, word, request, commit, tries=200):
        """The code of the answer to `request(id, state)` while the markers of that transaction are
        to be written: between two descriptions that say so. Another id is taken until it succeeds.
        """
        found = (self._try_prepared(f"{word}-{n}", request, commit) for n in range(tries))
        answer = next((a for a in found if a), None)
        assert answer, f"the markers were always written before the answer to {word}"
        self.note(word, commit, code_of(answer))

    def _try_prepared(self, word, request, commit):
        first = self._ask_coordinator(word, self.init_request(word))
        state = PreparedTxnState(first.producer_id, first.producer_epoch)
        places = [("many", n) for n in range(MANY)]
        self._ask_coordinator(word, self.add_request(word, state, places))
        node = self.coordinator(word)
        ids = [self.named(word)]
        asked = [
            self.end_request(word, state, commit),
            DescribeTransactionsRequest(transactional_ids=ids),
            request(word, state),
            DescribeTransactionsRequest(transactional_ids=ids),
        ]
        end, before, answer, behind = self.cluster.ask_each([(r, node) for r in asked])
        rows = [d.transaction_states[0] for d in (before, behind)]
        prepared = "PrepareCommit" if commit else "PrepareAbort"
        found = {(row.transaction_state, row.producer_epoch) for row in rows}
        return (
            end.error_code == 0
            and found == {(prepared, state.epoch + self.protocol - 1)}
            and answer
        )

    # -- records --

    def produce_request(self, word, state, batches, topic="t", version=None):
        """`batches`: (partition, first sequence, rows, bytes of each)."""
        parts = [
            ProduceRequest.TopicProduceData.PartitionProduceData(
                index=partition,
                records=record_batch(self.section(topic, [b"x" * size] * rows), state, sequence),
            )
            for partition, sequence, rows, size in batches
        ]
        return ProduceRequest(
            transactional_id=self.named(word),
            acks=-1,
            timeout_ms=10_000,
            topic_data=[
                ProduceRequest.TopicProduceData(name=self.named(topic), partition_data=parts)
            ],
            max_version=version or 10 + self.protocol,
        )

    def section(self, topic, values, partition=0):
        columns = rows_of(pa.RecordBatch.from_pydict({"value": pa.array(values, pa.binary())}))
        (section,) = sections(columns, np.full(len(values), partition), self.named(topic), 1 << 30)
        return section

    def produce(self, word, state, sequence, rows=1, *, partition=0, size=1, at=None, **more):
        if self.protocol == 1 and "version" not in more:
            self.add(word, state, (more.get("topic", "t"), partition))
        request = self.produce_request(word, state, [(partition, sequence, rows, size)], **more)
        leader = self.leader(more.get("topic", "t"), partition)
        answer = self.cluster.ask(request, leader if at is None else at)
        (row,) = answer.responses[0].partition_responses
        found = row.error_code, row.base_offset, hint_in(row, leader)
        self.note("Produce", word, state.epoch, sequence, *found)

    def fetched(self, offset=0, *, committed=True, topic="t", partition=0, by_id=None, at=None):
        """The row of a Fetch. `by_id`: the id of the topic instead of its name."""
        place = {"topic": self.named(topic)} if by_id is None else {"topic_id": by_id}
        part = FetchRequest.FetchTopic.FetchPartition(
            partition=partition, fetch_offset=offset, partition_max_bytes=1 << 20
        )
        request = FetchRequest(
            max_wait_ms=1,
            min_bytes=1,
            max_bytes=1 << 20,
            isolation_level=int(committed),
            topics=[FetchRequest.FetchTopic(**place, partitions=[part])],
            min_version=4,
            max_version=12 if by_id is None else 16,
        )
        node = self.leader(topic, partition) if at is None else at
        (row,) = self.cluster.ask(request, node).responses[0].partitions
        return row

    def fetch(self, offset=0, **more):
        row = self.fetched(offset, **more)
        aborted = row.aborted_transactions or ()
        batches = split(bytes(row.records or b""))
        self.note(
            "Fetch",
            (offset, more.get("committed", True)),
            row.error_code,
            (row.log_start_offset, row.last_stable_offset, row.high_watermark),
            [(self.producer(a.producer_id), a.first_offset) for a in aborted],
            [(b.offset, b.next_offset, self.producer(b.producer_id), b.control) for b in batches],
        )

    def offsets(self, topic="t", partition=0, at=None):
        """ListOffsets: the beginning, and the end for both kinds of readers."""
        for where, committed in ((EARLIEST, False), (LATEST, False), (LATEST, True)):
            row = self._offset_row(topic, partition, where, committed, at)
            self.note("ListOffsets", where, committed, row.error_code, row.offset, row.leader_epoch)

    def _offset_row(self, topic, partition, where, committed, at=None):
        request = offsets_request({(self.named(topic), partition): where}, committed, 1_000, 4)
        node = self.leader(topic, partition) if at is None else at
        (row,) = self.cluster.ask(request, node).topics[0].partitions
        return row

    def epoch_end(self, epoch, topic="t", partition=0, at=None):
        topics = OffsetForLeaderEpochRequest.OffsetForLeaderTopic
        row = topics.OffsetForLeaderPartition(
            partition=partition, current_leader_epoch=-1, leader_epoch=epoch
        )
        request = OffsetForLeaderEpochRequest(
            replica_id=-1, topics=[topics(topic=self.named(topic), partitions=[row])]
        )
        node = self.leader(topic, partition) if at is None else at
        (row,) = self.cluster.ask(request, node).topics[0].partitions
        self.note("OffsetForLeaderEpoch", epoch, row.error_code, row.leader_epoch, row.end_offset)

    # -- groups --

    def _ask_group(self, request):
        find = dict(key_type=0, key=self.named("group"), max_version=3)

        def once():
            found = self.cluster.ask(FindCoordinatorRequest(**find))
            answer = self.cluster.ask(request, found.node_id)
            if found.error_code or getattr(answer, "error_code", 0):
                raise NotYet("the group has no coordinator yet")
            return answer

        (topic,) = self.cluster.persist(once).topics
        return topic.partitions[0]

    def commit_offset(self, topic, partition, offset, epoch, text):
        topics = OffsetCommitRequest.OffsetCommitRequestTopic
        row = topics.OffsetCommitRequestPartition(
            partition_index=partition,
            committed_offset=offset,
            committed_leader_epoch=epoch,
            committed_metadata=text,
        )
        request = OffsetCommitRequest(
            group_id=self.named("group"),
            generation_id_or_member_epoch=-1,
            member_id="",
            topics=[topics(name=self.named(topic), partitions=[row])],
            min_version=6,
            max_version=8,
        )
        self.note("OffsetCommit", topic, partition, self._ask_group(request).error_code)

    def committed(self, topic, partition=0):
        topics = OffsetFetchRequest.OffsetFetchRequestTopic
        request = OffsetFetchRequest(
            group_id=self.named("group"),
            topics=[topics(name=self.named(topic), partition_indexes=[partition])],
            min_version=5,
            max_version=7,
        )
        row = self._ask_group(request)
        kept = row.committed_offset, row.committed_leader_epoch, row.metadata
        self.note("OffsetFetch", topic, partition, row.error_code, kept)

    # -- topics --

    def metadata(self, *names):
        request = MetadataRequest(
            topics=[MetadataRequest.MetadataRequestTopic(name=n) for n in names],
            allow_auto_topic_creation=False,
        )
        for t in self.cluster.ask(request).topics:
            parts = sorted((p.partition_index, p.error_code, p.leader_epoch) for p in t.partitions)
            self.note("Metadata", self.word(t.name), t.error_code, bool(topic_id_in(t)), parts)

    def topic_id(self, topic="t"):
        (row,) = topic_rows(self.cluster, [self.named(topic)])
        return row.topic_id

    def ask_to_create(self, name, config):
        """CreateTopics."""
        topics = CreateTopicsRequest.CreatableTopic
        configs = [topics.CreatableTopicConfig(name=k, value=v) for k, v in config.items()]
        topic = topics(
            name=name, num_partitions=1, replication_factor=-1, assignments=[], configs=configs
        )
        request = CreateTopicsRequest(topics=[topic], timeout_ms=4_000, min_version=4)
        for row in self.cluster.ask(request, self.node).topics:
            self.note("CreateTopics", self.word(row.name), row.error_code)

    def find(self, kind, *words):
        """FindCoordinator: of several transactional ids, or of one group."""
        names = [self.named(word) for word in words]

        def found():
            if kind == "group":
                request = FindCoordinatorRequest(key_type=0, key=names[0], max_version=3)
                rows = [self.cluster.ask(request)]
            else:
                request = FindCoordinatorRequest(key_type=1, coordinator_keys=names, min_version=4)
                rows = self.cluster.ask(request).coordinators
            # the first question makes the topic where groups are kept
            return not {r.error_code for r in rows} & codes.COORDINATOR_MOVES and rows

        rows = until(found, f"the coordinators of {words}")
        self.note("FindCoordinator", kind, [(r.error_code, r.node_id == self.node) for r in rows])

    def settings(self, kind, name, *keys):
        """DescribeConfigs."""
        resource = DescribeConfigsRequest.DescribeConfigsResource(
            resource_type=kind, resource_name=name, configuration_keys=list(keys)
        )
        request = DescribeConfigsRequest(resources=[resource])
        for row in self.cluster.ask(request, self.node).results:
            found = sorted((c.name, c.value) for c in row.configs)
            self.note("DescribeConfigs", keys, row.error_code, found)


def on_simulated(prefix, protocol=2, nodes=1):
    """Simulated brokers to play to, whose transaction.version is this one."""
    brokers = Brokers(VirtualClock(seed=1), nodes, bumps=protocol == 2)
    brokers.weather.markers_s = 0.1

    def create(name, partitions, config):
        brokers.create(name, partitions, **config)

    def cut(name, offset):
        remove_before(brokers.topics[name].partitions[0], offset)

    move = partial(move_leader, brokers)
    cluster = SimulatedCluster(Network(brokers))
    return Played(cluster, prefix, create, cut, move, marks_s=0.2, scan_s=11, protocol=protocol)


def on_real(kafka, cluster, prefix, protocol=2):
    """A real cluster to play to."""

    def create(name, partitions, config):
        kafka.create_topic(name, partitions, config=config)

    def cut(name, offset):
        admin = AdminClient(kafka.client_conf)
        for future in admin.delete_records([TopicPartition(name, 0, offset)]).values():
            future.result(30)

    def moved(name, partition):
        kafka.kill(find_leaders(cluster, [name])[name, partition])

    # every coordinator has loaded its part
    describe_transactions(cluster, [f"{prefix}-{n}" for n in range(20)])
    return Played(cluster, prefix, create, cut, moved, marks_s=0.005, scan_s=0.2, protocol=protocol)


def hint_in(row, leader):
    """Where a broker that does not lead sends a client."""
    found = row.current_leader
    if found is None or found.leader_id < 0:
        return ""
    return "the leader" if found.leader_id == leader else f"node {found.leader_id}"


def code_of(answer):
    """The code of an answer that has one place for it."""
    if isinstance(answer, Exception):
        return type(answer).__name__
    if hasattr(answer, "results_by_topic_v3_and_below"):
        rows = [p for t in answer.results_by_topic_v3_and_below for p in t.results_by_partition]
        return [p.partition_error_code for p in rows]
    if hasattr(answer, "responses"):
        return [p.error_code for t in answer.responses for p in t.partition_responses]
    return answer.error_code
