"""A streaming query without Spark: this process plans, writes and commits, as the planner, a task
and the committer do, from a checkpoint that holds what Spark writes there.
"""

import json
import re
import uuid

import pyarrow as pa
from kafka_fixtures import values
from pyspark.sql.types import StringType, StructField, StructType

from kafka2pc.kafka.wire.cluster import Cluster
from kafka2pc.kafka.wire.descriptions import list_transactions
from kafka2pc.spark.datasource import Kafka2pc
from kafka2pc.spark.sink.options import parse_sink_options
from kafka2pc.spark.sink.stream_writer import StreamWriter

VALUE = {"value": StringType()}

# at a restart, something decided may be waiting
RISK = {
    "CorruptDecision": "Perhaps",
    "BrokerUnreachable": "At a first start, no",
    "StoreUnreachable": "Not yet",
}
PARTS = re.compile(
    r"kafka2pc\.(?:\w+\.)+(?P<error>\w+): (?P<what>.+)\n +why: (?P<why>.+)\n +is data at risk:"
    r" (?P<risk>.+)\n +what to do: (?P<action>.+)"
)


def told(text, error, *says):
    """Our error with its four parts is in the text, and it says all that."""
    found = PARTS.search(text)
    assert found, f"no error of ours, with four parts, in:\n{text}"
    assert found["error"] == error, found[0]
    assert found["risk"].startswith(RISK.get(error, "No.")), found["risk"]
    for word in says:
        assert word in found[0], f"{word!r} is not in:\n{found[0]}"
    return found


def as_python_prints(error):
    """The last lines of a traceback."""
    kind = type(error)
    return f"{kind.__module__}.{kind.__qualname__}: {error}"


class PlannedQuery:
    """One query, its topic and its checkpoint. `conf`: of its user."""

    def __init__(self, kafka, folder, conf=None):
        self.kafka = kafka
        self.conf = conf or kafka.client_conf
        self.name = kafka.create_topic(f"planned-{uuid.uuid4().hex[:8]}", partitions=2)
        self.checkpoint = folder / "checkpoint"
        self.batches = 0
        self._spark_plans()

    def _spark_plans(self):
        """What Spark writes before it asks for a batch."""
        for name in ("offsets", "commits"):
            (self.checkpoint / name).mkdir(parents=True, exist_ok=True)
        metadata = self.checkpoint / "metadata"
        if not metadata.exists():
            metadata.write_text(json.dumps({"id": str(uuid.uuid4())}))
        (self.checkpoint / "offsets" / str(self.batches)).write_text(f"v1\n{{}}\n{self.batches}")

    def options(self, **more):
        """As `SparkQuery.options`: one of None is left out."""
        ours = {
            "topic": self.name,
            "checkpointLocation": str(self.checkpoint),
            "transactionalIdPrefix": self.name,
        }
        security = {f"kafka.{k}": v for k, v in self.conf.items()}
        return {k: v for k, v in (security | ours | more).items() if v is not None}

    def plan(self, options=None, columns=VALUE, ask="stream", overwrite=False):
        """The writer that the planner ships to the tasks. `ask`: stream, or write for a batch."""
        source = Kafka2pc(self._given(options, ask))
        schema = StructType([StructField(name, kind) for name, kind in columns.items()])
        return (source.streamWriter if ask == "stream" else source.writer)(schema, overwrite)

    def _given(self, options, ask):
        no_checkpoint = {} if ask == "stream" else {"checkpointLocation": None}
        return self.options(**no_checkpoint | (options or {}))

    def run(self, options=None, ask="stream", **what):
        """One batch with one row, its number."""
        writer = self.plan(options, ask=ask, **what)
        message = writer.write(iter([pa.record_batch({"value": [str(self.batches)]})]))
        if ask == "write":
            writer.commit([message])
        else:
            committer = StreamWriter(parse_sink_options(self._given(options, ask)), None, None)
            committer.commit([message], self.batches)
            (self.checkpoint / "commits" / str(self.batches)).write_text("v1\n{}")
        self.batches += 1
        self._spark_plans()

    def refused(self, error, *says, **what):
        """Our error, and the planner has begun no transaction and written nothing."""
        before = self.seen()
        try:
            self.run(**what)
        except Exception as e:
            found = told(as_python_prints(e), error, *says)
        else:
            raise AssertionError(f"nothing was refused: {what}")
        assert (self.seen(), self.open()) == (before, [])
        return found

    def goes_on(self, **what):
        """The fault is removed: the same query writes its batch once, and every batch is there."""
        self.run(**what)
        self.check()

    def check(self):
        """Each batch is there once, and nothing is open."""
        assert self.open() == []
        written = sorted(map(str, range(self.batches)))
        assert self.seen("read_committed") == self.seen() == written

    def seen(self, isolation="read_uncommitted"):
        return sorted(values(self.kafka, self.name, isolation))

    def open(self, states=("Ongoing",)):
        with Cluster(self.kafka.client_conf) as cluster:
            return [t.transactional_id for t in list_transactions(cluster, self.name, states)]
