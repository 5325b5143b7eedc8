"""Exactly-once writes from Spark into Kafka by two-phase commit, in pure Python."""

__version__ = "0.1.0"
__all__ = ["__version__", "register"]


def register(spark) -> None:
    """Teach this Spark session `format("kafka2pc")`. PySpark is needed from here on, and not before."""
    from kafka2pc.source import register as register_formats

    register_formats(spark)
