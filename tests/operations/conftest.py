"""The fixtures of these tests: a query that dies, and what removes its traces."""

from dead_query_fixtures import closing, dead  # noqa: F401
