"""Real databases on this machine, for the tests of a session: PostgreSQL from a package, MariaDB if
it is installed. And what no error may show.
"""

import traceback

import pytest

NO_MARIADB = "needs MariaDB: install it (Debian: mariadb-server)"


def shown(verb):
    """The error of a call, and everything that a log would show of it: message, causes, notes."""
    with pytest.raises(Exception) as caught:
        verb()
    return caught.value, "".join(traceback.format_exception(caught.value))


@pytest.fixture(scope="session")
def postgres():
    from kafka2pc.local.databases import LocalPostgres

    # in a folder of its own: a second run of pytest closes the folder of the first one to other
    # users, and the server is one
    with LocalPostgres() as server:
        yield server


@pytest.fixture(scope="session")
def mariadb():
    from kafka2pc.local.databases import LocalMariaDB

    with LocalMariaDB() as server:
        yield server
