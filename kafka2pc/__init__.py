"""Exactly-once writes from Spark into Kafka by two-phase commit, in pure Python."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from kafka2pc.protocol.libraries import OWN, need

if TYPE_CHECKING:
    import os
    from typing import Iterable, Mapping

    from pandas import DataFrame
    from pyspark.sql import SparkSession

    from kafka2pc.kafka.participant import KafkaParticipant
    from kafka2pc.protocol import errors
    from kafka2pc.protocol.errors import TwoPhaseError
    from kafka2pc.protocol.log.slots import DecisionLog
    from kafka2pc.protocol.participant import Participant
    from kafka2pc.spark import prometheus as metrics
    from kafka2pc.spark.foreach_batch import ExactlyOnce

__version__ = "0.1.0"
# Public, with the options, the columns and the command line. Everything else may change.
__all__ = [
    "DecisionLog",
    "KafkaParticipant",
    "Participant",
    "__version__",
    "error_of",
    "errors",
    "exactly_once",
    "metrics",
    "progress",
    "register",
]
_WHERE = {
    "DecisionLog": "kafka2pc.protocol.log.slots",
    "KafkaParticipant": "kafka2pc.kafka.participant",
    "Participant": "kafka2pc.protocol.participant",
    "errors": "kafka2pc.protocol.errors",
    "metrics": "kafka2pc.spark.prometheus",
}
_MODULES = ("errors", "metrics")


def __getattr__(name: str) -> Any:
    """A public name, imported when it is asked for: `import kafka2pc` needs no other package."""
    if name not in _WHERE:
        raise AttributeError(f"module 'kafka2pc' has no attribute {name!r}")
    module = import_module(_WHERE[name])
    return module if name in _MODULES else getattr(module, name)


def register(spark: SparkSession) -> None:
    """Make `format("kafka2pc")` known to this Spark session, for writing and reading. Needed only
    where Spark does not find the package by itself: after `pip install -e`, or if it was installed
    after the session had looked for formats. The class is `kafka2pc.spark.datasource.Kafka2pc`. It
    needs PySpark.
    """
    need(*OWN)
    from kafka2pc.spark.datasource import register as register_formats

    register_formats(spark)


def exactly_once(
    options: Mapping[str, Any] | None = None,
    *,
    participants: Iterable[Participant] = (),
    name: str | None = None,
    checkpoint: str | os.PathLike | None = None,
    in_order: bool = False,
) -> ExactlyOnce:
    """A function for `foreachBatch` that writes every micro-batch once, from Spark 3.5 on and in
    every output mode: `df.writeStream.foreachBatch(kafka2pc.exactly_once({...}))`. Arguments and
    errors are those of `kafka2pc.spark.foreach_batch.exactly_once`.
    """
    need(*OWN)
    from kafka2pc.spark.foreach_batch import exactly_once as make

    return make(
        options,
        participants=participants,
        name=name,
        checkpoint=checkpoint,
        in_order=in_order,
    )


def progress(checkpoint: str, decision_log: str | None = None, **more: Any) -> DataFrame:
    """The last batches of a query as a pandas.DataFrame: rows, transactions, times, and the share
    of the transaction timeout that was used. Arguments, columns and errors are those of
    `kafka2pc.operations.progress.progress`. It reads the checkpoint, and contacts neither Spark
    nor Kafka.
    """
    from kafka2pc.operations.progress import progress as read_progress

    return read_progress(checkpoint, decision_log, **more)


def error_of(failure: BaseException | str | None) -> TwoPhaseError | None:
    """The error of kafka2pc in a `StreamingQueryException` or another exception, or in a text of
    Spark, such as that of a listener: of its class, with its parts and fields. None: there is none.
    """
    from kafka2pc.spark.failures import error_of as find

    return find(failure)
