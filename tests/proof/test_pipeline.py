"""The pipeline: its events are the flights, its oracle knows nothing of its query, and each
difference is named. (The notebook proof/drills/09_end_to_end and test_drills crash it.)
"""

import json
from collections import Counter
from datetime import date, datetime, timedelta

import pytest

from kafka2pc.local.flights import flights
from kafka2pc.proof.drills.pipeline import WATERMARK, closing_event, differences, events, oracle

pytestmark = pytest.mark.never_unsteady
FIRST, DAYS = date(2013, 6, 14), 3  # with a flight that left 1137 minutes late


@pytest.fixture(scope="module")
def happened():
    return events(flights(), FIRST, DAYS)


def minutes_late(event):
    return event["delay"] or 0


def at(event):
    return datetime.strptime(event["at"], "%Y-%m-%dT%H:%M:%SZ")


def test_events_come_as_they_happened_and_no_flight_is_missing(happened):
    when = [at(e) + timedelta(minutes=minutes_late(e)) for e in happened]
    assert when == sorted(when) and max(map(minutes_late, happened)) == 1137
    assert (
        sum(len(events(flights(), FIRST + timedelta(n), 1)) for n in range(DAYS))
        == len(happened)
        > 2500
    )


def test_the_oracle_counts_each_departure_once(happened):
    departed = Counter((e["origin"], e["at"][:13]) for e in happened if e["delay"] is not None)
    rows = oracle(flights(), FIRST, DAYS)
    assert {(r["origin"], r["hour"][:13]): r["departures"] for r in rows} == departed
    assert all(json.loads(json.dumps(r)) == r for r in rows)


def test_an_event_that_closes_does_so_and_stays_open():
    closes, last = (
        at(closing_event(FIRST + timedelta(DAYS))),
        max(at(e) for e in events(flights(), FIRST, DAYS)),
    )
    delay = timedelta(hours=int(WATERMARK.split()[0]))
    assert last + timedelta(hours=1) < closes - delay


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (lambda rows: rows[1:], ["lost"]),
        (lambda rows: rows + rows[:1], ["duplicate"]),
        (lambda rows: [rows[0] | {"delay_minutes": 0}, *rows[1:]], ["wrong"]),
        (lambda rows: [*rows, rows[0] | {"hour": "2013-01-01T00:00:00Z"}], ["wrong"]),
        (lambda rows: rows[::-1], []),
    ],
)
def test_each_difference_has_a_name(change, found):
    rows = oracle(flights(), FIRST, 1)
    assert list(differences(change(rows), rows)) == found
