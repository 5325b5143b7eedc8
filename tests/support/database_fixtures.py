"""Real databases on this machine, for the tests of a session: PostgreSQL from a package, MariaDB if
it is installed. And what no error may show.
"""

import traceback

import pytest

from kafka2pc.local.databases import LocalMariaDB as MariaDB
from kafka2pc.local.databases import LocalPostgres as Postgres
from kafka2pc.local.databases import NoMariaDB

NO_MARIADB = f"needs MariaDB: {NoMariaDB.action}"


def shown(verb):
    """The error of a call, and everything that a log would show of it: message, causes, notes."""
    with pytest.raises(Exception) as caught:
        verb()
    return caught.value, "".join(traceback.format_exception(caught.value))


@pytest.fixture(scope="session")
def postgres():
    # in a folder of its own: a second run of pytest closes the folder of the first one to other
    # users, and the server is one
    with Postgres() as server:
        yield server


@pytest.fixture(scope="session")
def mariadb():
    with MariaDB() as server:
        yield server
