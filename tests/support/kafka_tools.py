"""Kafka's own tools, run as an administrator runs them, and its Java clients."""

import os
import subprocess
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

from kafka2pc.local.jars import KAFKA_VERSION, fetch_kafka
from kafka2pc.local.tools import write_settings, write_tools


def administered(kafka, folder, *lines):
    """Type lines of Kafka's own tools, as an administrator with his admin.properties."""
    write_settings(kafka, "admin", folder)
    env = os.environ | {"PATH": f"{write_tools(folder / 'tools')}:{os.environ['PATH']}"}
    for line in lines:
        done = subprocess.run(
            ["bash", "-c", line],
            cwd=folder,
            env=env,
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            timeout=60,
        )
        assert done.returncode == 0, (line, done.stdout, done.stderr)


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
