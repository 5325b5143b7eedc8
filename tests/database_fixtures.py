"""Real databases on this machine, for the tests of a session: PostgreSQL from a package, MariaDB if it is installed."""
import pytest

from kafka2pc.databases import LocalMariaDB as MariaDB
from kafka2pc.databases import LocalPostgres as Postgres
from kafka2pc.databases import NoMariaDB

NO_MARIADB = f"needs MariaDB: {NoMariaDB.action}"


@pytest.fixture(scope="session")
def postgres():
    with Postgres() as server:  # in a folder of its own: a second run of pytest closes the folder of the first one to other users, and the server is one
        yield server


@pytest.fixture(scope="session")
def mariadb():
    with MariaDB() as server:
        yield server
