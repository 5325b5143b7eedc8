"""Kafka's own tools, run as an administrator runs them, and its Java clients."""

import shlex
import subprocess
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

from kafka2pc.local.jars import KAFKA_VERSION, fetch_jars, fetch_kafka, find_java

TOOLS = {
    "kafka-acls.sh": "org.apache.kafka.tools.AclCommand",
    "kafka-transactions.sh": "org.apache.kafka.tools.TransactionsCommand",
    "kafka-configs.sh": "kafka.admin.ConfigCommand",
    "kafka-topics.sh": "org.apache.kafka.tools.TopicCommand",
    "kafka-features.sh": "org.apache.kafka.tools.FeatureCommand",
}


def administered(kafka, folder, *lines):
    """Type lines of Kafka's own tools, as an administrator with his admin.properties."""
    (folder / "admin.properties").write_text(
        "".join(f"{k}={v}\n" for k, v in java_conf(kafka).items())
    )
    jars = fetch_jars(
        "kafka-tools-4.3.1",
        [
            ("org.apache.kafka", "kafka-tools", "4.3.1"),
            ("net.sourceforge.argparse4j", "argparse4j", "0.7.0"),
        ],
        transitive=False,
        progress=None,
    )
    java = [
        find_java(),
        "-XX:TieredStopAtLevel=1",
        "-cp",
        f"{jars}/*:{fetch_kafka(progress=None)}/*",
    ]
    for line in lines:
        script, *words = shlex.split(line)
        done = subprocess.run(
            [*java, TOOLS[script], *words],
            cwd=folder,
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            timeout=60,
        )
        assert done.returncode == 0, (line, done.stdout, done.stderr)


def java_conf(kafka):
    if not kafka.secure:
        return {}
    login = (
        'org.apache.kafka.common.security.scram.ScramLoginModule required username="admin"'
        f' password="{kafka.passwords["admin"]}";'
    )
    return {
        "security.protocol": "SASL_PLAINTEXT",
        "sasl.mechanism": "SCRAM-SHA-256",
        "sasl.jaas.config": login,
    }


@contextmanager
def java_clients(version=KAFKA_VERSION):
    """The classes of Kafka's own Java clients, called from here: a JVM of py4j.

    PySpark puts its own reading of Java's exceptions into py4j, and it fails without a session
    of Spark, also where a list of Java merely ends: py4j's own is there meanwhile.
    """
    import pyspark
    from py4j import java_gateway, protocol
    from py4j.java_gateway import GatewayParameters, JavaGateway, launch_gateway

    jars = [
        *Path(pyspark.__path__[0]).glob("jars/py4j-*.jar"),
        *fetch_kafka(version, progress=None).glob("*.jar"),
    ]
    port = launch_gateway(
        jarpath=str(jars[0]), classpath=":".join(map(str, jars)), die_on_exit=True
    )
    gateway = JavaGateway(gateway_parameters=GatewayParameters(port=port))
    try:
        with patch.object(java_gateway, "get_return_value", protocol.get_return_value):
            yield gateway.jvm
    finally:
        gateway.shutdown()
