"""The same case on `format("kafka2pc")` and on Spark's own `format("kafka")`, which is the oracle.

A test that asks for the fixture `either_format` runs on ours: in a Spark session if it is marked
`spark`, otherwise without Spark, by the calls that Spark makes. Each answer is compared with those
of Spark's own format, which `make spark-own` records in tests/fixtures/spark_own.json: there the
same test runs on Spark's own.

conftest.py imports the fixtures before every test, so each function imports what it needs.
"""

import json
import pickle
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import Any, Callable

import pytest

OURS, SPARKS_OWN = "kafka2pc", "kafka"
# Spark gives a Python worker ten seconds to start, which a busy machine may not do
LATE_WORKER = "Python worker failed to connect back"
RECORDED = Path(__file__).resolve().parents[1] / "fixtures" / "spark_own.json"
SAME = object()


# -- answers --


@cache
def recorded():
    """The answers of Spark's own format: PySpark's version -> case -> answers; None: not asked."""
    return json.loads(RECORDED.read_text(encoding="utf-8")) if RECORDED.exists() else {}


@dataclass
class Answers:
    """What one test was answered, in order: the values of a read, the batches of a stream, or
    "refused". `own`: the answers of Spark's own format, for each PySpark.
    """

    own: dict[str, list] = field(default_factory=dict)
    given: list | None = field(default_factory=list)

    def add(self, answer, own=SAME):
        """Compare an answer with Spark's own, and return it. `own`: what Spark's own answers
        instead, where the two differ by design.
        """
        answer = json.loads(json.dumps(answer))
        assert own is SAME or own != answer, "nothing differs here any more"
        expected, number = (answer if own is SAME else own), len(self.given)
        self.given.append(answer)
        for version, answers in self.own.items():
            said = answers[number] if number < len(answers) else "(it was not asked)"
            assert expected == said, f"Spark's own answers this in PySpark {version}: {said}"
        return answer

    def check_all_were_asked(self):
        for version, answers in self.own.items():
            more = answers[len(self.given) :]
            assert not more, f"Spark's own was asked more in PySpark {version}: {more}"


def case_of(nodeid):
    """The name of a test in the record."""
    file, _, name = nodeid.partition("::")
    return f"{Path(file).stem}::{name}"


def answers_to(case):
    """The recorded answers to a case. A version that lacks what the case needs is left out."""
    missing = [version for version, cases in recorded().items() if case not in cases]
    if missing or not recorded():
        known = ", ".join(missing) or "any PySpark"
        pytest.fail(f"{case} was not recorded with {known}: run `make spark-own`", pytrace=False)
    found = {version: cases[case] for version, cases in recorded().items()}
    return Answers({version: answers for version, answers in found.items() if answers is not None})


# -- formats --


@dataclass(frozen=True)
class Format:
    """One of the two formats, in a Spark session, beside the shared broker. Both read only what is
    committed, unless the options say otherwise.
    """

    name: str
    spark: Any
    kafka: Any
    answers: Answers = field(default_factory=Answers)

    def needs(self, version):
        """Skip the test, and record so, if Spark's own is older than this PySpark."""
        from pyspark import __version__ as installed

        numbers = lambda text: [int(n) for n in text.split(".")[:2]]
        if self.name == SPARKS_OWN and numbers(installed) < numbers(version):
            self.answers.given = None
            pytest.skip(f"needs PySpark {version}")

    def options(self, topic, **more):
        """The options of a source: `subscribe`, unless `more` names topics in another way."""
        named = {name.lower() for name in more} & {"assign", "subscribepattern"}
        return (
            {"kafka.bootstrap.servers": self.kafka.bootstrap_servers}
            | {"kafka.isolation.level": "read_committed"}
            | ({} if named else {"subscribe": topic})
            | more
        )

    def load(self, topic, **more):
        """The frame of a batch read."""
        return self.spark.read.format(self.name).options(**self.options(topic, **more)).load()

    def load_stream(self, topic, **more):
        """The frame of a stream."""
        reader = self.spark.readStream.format(self.name)
        return reader.options(**self.options(topic, **more)).load()

    def count_tasks(self, frame):
        return frame.rdd.getNumPartitions()

    def read(self, frame, own=SAME):
        """The values of a frame as text, sorted."""
        return self.answers.add(values(frame), own)

    def values(self, topic, own=SAME, **more):
        """The values of a batch read as text, sorted."""
        return self.read(self.load(topic, **more), own)

    @contextmanager
    def refuses(self, said, error="BadOption", own=SAME):
        """The block raises an error with a text that fits `said`; kafka2pc raises `error`."""
        with pytest.raises(Exception, match=said) as e:
            yield
        assert self.name != OURS or error in f"{type(e.value).__name__}: {e.value}", e.value
        self.answers.add("refused", own)

    def run(self, topic, checkpoint, each, **more):
        """Run a stream until it has read all that exists now. `each` is called with the rows and
        the number of each micro-batch.
        """
        run(self.load_stream(topic, **more), checkpoint, each)

    def stream_values(self, checkpoint, topic, **more):
        """What a stream reads until it has all that exists now: the values as text, one list for
        each micro-batch that has rows, each sorted.
        """
        batches = []
        self.run(topic, checkpoint, lambda rows, _: batches.append(values(rows)), **more)
        return self.answers.add([batch for batch in batches if batch])


class Direct(Format):
    """Ours without Spark: the calls that Spark makes, in this process."""

    def _source(self, topic, more):
        from kafka2pc.spark.datasource import Kafka2pc

        given = self.options(topic, **more)
        return Kafka2pc({name.lower(): value for name, value in given.items()})

    def load(self, topic, **more):
        source = self._source(topic, more)
        schema = source.schema()

        def plan():
            reader = source.reader(schema)
            return reader, reader.partitions()

        return Rows(plan, schema.names)

    def load_stream(self, topic, **more):
        source = self._source(topic, more)
        return source.streamReader(source.schema())

    def count_tasks(self, frame):
        return len(frame.planned[1])

    def run(self, topic, checkpoint, each, **more):
        """As Spark does with `availableNow`, with the offsets in a file of `checkpoint`."""
        reader, place = self.load_stream(topic, **more), checkpoint / "offset.json"
        reader.prepareForTriggerAvailableNow()
        if not place.exists():
            place.write_text(json.dumps(reader.initialOffset()))
        start, number = json.loads(place.read_text()), 0
        limit = reader.getDefaultReadLimit()
        while (end := json.loads(json.dumps(reader.latestOffset(start, limit)))) != start:
            tasks = reader.partitions(start, end)
            each(Rows(lambda: (reader, tasks)), number)
            place.write_text(json.dumps(end))
            start, number = end, number + 1


@dataclass
class Rows:
    """A frame without Spark. It is planned once, and each action runs the tasks again."""

    plan: Callable
    columns: list[str] = field(default_factory=list)

    @cached_property
    def planned(self):
        """The reader and its tasks."""
        return self.plan()

    def collect(self):
        """Run the tasks, each with copies, as a worker gets them: dictionaries, one a row."""
        found = []
        for task in self.planned[1]:
            reader, copy = pickle.loads(pickle.dumps((self.planned[0], task)))
            found += [row for batch in reader.read(copy) for row in batch.to_pylist()]
        return found


def run(frame, checkpoint, each, mode="append"):
    """Run a stream until it has read all that exists now. `each` is called with the rows and the
    number of each micro-batch. Returns the query. If a Python worker was late, the stream goes on
    from its checkpoint, once.
    """
    from pyspark.errors import StreamingQueryException

    try:
        return _run_once(frame, checkpoint, each, mode)
    except StreamingQueryException as e:
        if LATE_WORKER not in str(e):
            raise
    return _run_once(frame, checkpoint, each, mode)


def _run_once(frame, checkpoint, each, mode):
    writer = frame.writeStream.foreachBatch(each).outputMode(mode)
    writer = writer.option("checkpointLocation", str(checkpoint)).trigger(availableNow=True)
    query = writer.start()
    try:
        assert query.awaitTermination(300), "the stream did not end"
    finally:
        query.stop()
    return query


def dicts(rows):
    """The rows of a frame as dictionaries. In Spark each call plans the frame anew, as each action
    of a user does who selects from it.
    """
    if isinstance(rows, Rows):
        return rows.collect()
    return [row.asDict(recursive=True) for row in rows.select("*").collect()]


def values(rows):
    """The column `value` as text, sorted."""
    return sorted(row["value"].decode() for row in dicts(rows))


def in_json(topic, numbers):
    """Numbers of partitions 0, 1, and so on."""
    return json.dumps({topic: {str(p): n for p, n in enumerate(numbers)}})


def send(kafka, topic, values, partition=0, timestamp_ms=None):
    """Write values without a transaction. `timestamp_ms`: of all of them; None: now."""
    from confluent_kafka import Producer

    producer = Producer(kafka.client_conf)
    when = {} if timestamp_ms is None else {"timestamp": timestamp_ms}
    for value in values:
        producer.produce(topic, str(value).encode(), partition=partition, **when)
    assert producer.flush(30) == 0


def add_partition(kafka, topic, number):
    """Add the partition of this number, and wait until it has a leader."""
    import time

    from confluent_kafka.admin import AdminClient, NewPartitions

    admin, parts = AdminClient(kafka.client_conf), []
    admin.create_partitions([NewPartitions(topic, number + 1)])[topic].result(60)
    while len(parts) <= number or any(part.leader < 0 for part in parts):
        time.sleep(0.05)
        parts = list(admin.list_topics(topic).topics[topic].partitions.values())


# -- sessions --


def _connector():
    """The jars of Spark's own format, for spark.jars. PySpark 3.5 comes with an older Scala."""
    from pyspark import __version__ as spark

    from kafka2pc.local.jars import fetch_jars
    from kafka2pc.proof.demo.job import fetch_connector

    if not spark.startswith("3."):
        return fetch_connector()
    wanted = [
        ("org.apache.spark", "spark-sql-kafka-0-10_2.12", spark),
        ("org.apache.spark", "spark-token-provider-kafka-0-10_2.12", spark),
        ("org.apache.kafka", "kafka-clients", "3.4.1"),
        ("org.apache.commons", "commons-pool2", "2.11.1"),
    ]
    folder = fetch_jars(f"spark-kafka-{spark}", wanted, transitive=False)
    return ",".join(str(jar) for jar in sorted(folder.glob("*.jar")))


_JVMS_WITH_JARS = []


def _restart_jvm_without(jars):
    """Stop this process's JVM, unless it was started with these jars: Spark looks at `spark.jars`
    when it starts one, and an earlier test may have started one without.
    """
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

    session = SparkSession.getActiveSession()
    if session is not None:
        session.stop()
    if SparkContext._gateway is not None and (SparkContext._jvm, jars) not in _JVMS_WITH_JARS:
        SparkContext._gateway.shutdown()
        SparkContext._gateway = SparkContext._jvm = None


def _recorder(request):
    """The plugin that records, tools/spark_own.py; None if nothing is recorded."""
    return request.config.pluginmanager.get_plugin("spark_own")


@pytest.fixture(scope="module")
def both_formats(request, tmp_path_factory):
    """A Spark session with both formats. While Spark's own is recorded, it has no other. Its JVM is
    left to the next file: a fresh one takes 10 s of a core until its first query is done.
    """
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

    import kafka2pc

    jars = _connector()
    _restart_jvm_without(jars)
    settings = {
        "spark.ui.enabled": False,
        "spark.jars": jars,
        "spark.sql.shuffle.partitions": 2,
        "spark.sql.warehouse.dir": str(tmp_path_factory.mktemp("warehouse")),
    }
    session = SparkSession.builder.master("local[2]").config(map=settings).getOrCreate()
    _JVMS_WITH_JARS.append((SparkContext._jvm, jars))
    if not _recorder(request):
        kafka2pc.register(session)
    yield session
    session.stop()


@pytest.fixture
def either_format(request, kafka):
    """Ours, in Spark or without; Spark's own while it is recorded."""
    case, recorder = case_of(request.node.nodeid), _recorder(request)
    if recorder:
        answers = recorder.ANSWERS[case] = Answers()
        yield Format(SPARKS_OWN, request.getfixturevalue("both_formats"), kafka, answers)
        return
    answers, failed = answers_to(case), request.session.testsfailed
    if request.node.get_closest_marker("spark"):
        yield Format(OURS, request.getfixturevalue("both_formats"), kafka, answers)
    else:
        yield Direct(OURS, None, kafka, answers)
    if request.session.testsfailed == failed:
        answers.check_all_were_asked()
