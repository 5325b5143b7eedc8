"""Decision logs and participants on real servers of S3, GCS and ADLS, with the real drivers: every
promise, and what only an object store can break.

Each request passes a proxy (`store_proxy`). It loses answers as a network does, and it counts.
"""

import asyncio
import json
import pickle
import time
import uuid
from functools import partial
from unittest.mock import patch

import pytest
from decision_log_suite import (
    CONTENT,
    DAMAGED,
    DURABLE,
    PROMISES,
    UNCLEAR,
    Place,
    record,
    slow_one_nightly,
)
from marks import first_of
from participant_suite import DURABLE as KEPT_BY_DURABLE_STORES
from participant_suite import REQUIRED as KEPT_BY_STORES
from participant_suite import SMOKE, At, few_of, rows
from store_proxy import Answer
from tenacity import stop_after_attempt

from kafka2pc.backends import file_systems, storage
from kafka2pc.decision_logs.opening import open_folder_log
from kafka2pc.protocol.driver import Driver, Policy
from kafka2pc.protocol.errors import BadOption, LogUnwritable, StoreUnreachable
from kafka2pc.protocol.log.format import dump_decision
from kafka2pc.protocol.memory import MemoryParticipant
from kafka2pc.protocol.phases.commit import commit
from kafka2pc.protocol.phases.precommit import precommit
from kafka2pc.protocol.phases.restore import restore
from kafka2pc.stores.object_store import ObjectParticipant

STORES = ["s3", "gcs", "azure"]


@pytest.fixture(params=first_of(STORES, rest="nightly"))
def server(request):
    return request.getfixturevalue(request.param)


@pytest.fixture
def url(server):
    """A bucket of its own for each test."""
    return server.fresh()


def bucket_of(url):
    return url.partition("://")[2]


def name_of(promise):
    return getattr(promise, "__name__", None)


def promises(*of):
    return pytest.mark.parametrize("promise", of, ids=name_of)


# -- decision logs --


@pytest.fixture
def place(server, url):
    fs = server.driver()

    # a process that gets this function imports the driver once, for all that it forks
    def open(name="a", driver=type(fs)):
        return open_folder_log(f"{url}/decisions/{name}")

    def spoil(name, slot, content):
        fs.pipe_file(
            f"{bucket_of(url)}/decisions/{name}/{slot.batch_id}.{slot.attempt}.json", content
        )

    lost = {when: partial(server.proxy.loses, when) for when in ("before", "after")}
    return Place(open, steps=["create", "_create_once"], spoil=spoil, lost=lost)


@pytest.mark.never_unsteady
@promises(*PROMISES)
def test_every_log_keeps(promise, place):
    promise(place)


@pytest.mark.never_unsteady
@pytest.mark.full  # files and a table keep all of them in `make test`
@pytest.mark.parametrize("promise", slow_one_nightly(DURABLE))
def test_a_log_that_outlives_its_driver_keeps(promise, place):
    promise(place)


@pytest.mark.never_unsteady
@promises(*UNCLEAR)
@pytest.mark.parametrize("when", ["before", "after"])
def test_when_the_answer_is_lost(promise, when, place):
    promise(place, when)


# What is in an object is judged by the log, whatever the store: test_decision_logs tries all kinds.
@pytest.mark.never_unsteady
@promises(*DAMAGED)
@pytest.mark.parametrize("kind", list(CONTENT)[:1])
@pytest.mark.parametrize("server", ["s3"], indirect=True)
def test_with_damaged_content(promise, kind, place):
    promise(place, kind)


# -- participants --


def seen(server, url):
    """The rows of the files that a manifest calls committed, read past the code under test."""
    fs, root = server.driver(), f"{bucket_of(url)}/out"
    for manifest in fs.find(f"{root}/manifest"):
        if fs.cat_file(manifest) == b"committed":
            yield from (
                json.loads(line)["value"]
                for line in fs.cat_file(manifest.replace("/manifest/", "/data/")).splitlines()
            )


def participant(server, url):
    store = ObjectParticipant(f"{url}/out", format="json")
    return At(store, partial(seen, server, url), rows)


# The lesson stores/03_object_store asks the same code of all.
@pytest.mark.never_unsteady
@promises(*few_of(KEPT_BY_STORES + KEPT_BY_DURABLE_STORES, rest="nightly"))
def test_a_participant_in_s3_keeps(promise, s3):
    promise(participant(s3, s3.fresh()))


@pytest.mark.never_unsteady
@promises(*SMOKE)
@pytest.mark.nightly
@pytest.mark.parametrize("server", STORES[1:], indirect=True)
def test_a_participant_in_another_store_keeps(promise, server, url):
    promise(participant(server, url))


# -- what a store answers --

SAYS = {
    "s3": "<Error><Code>{code}</Code><Message>no</Message></Error>",
    "gcs": '{{"error": {{"code": {status}, "message": "{code}"}}}}',
    "azure": (
        '<?xml version="1.0"'
        ' encoding="utf-8"?><Error><Code>{code}</Code><Message>no</Message></Error>'
    ),
}


@pytest.fixture
def says(request, server):
    """Makes the answer of this kind of store with a status and a code."""
    kind = request.node.callspec.params["server"]

    def make(status, code):
        kinds = {"s3": "application/xml", "gcs": "application/json", "azure": "application/xml"}
        headers = (("Content-Type", kinds[kind]), ("x-ms-error-code", code))
        return Answer(status, SAYS[kind].format(status=status, code=code).encode(), headers)

    return make


@pytest.fixture
def hurry():
    """Drivers wait between their tries, for a minute and more in all. Here they do not."""
    wait, nap = asyncio.sleep, time.sleep
    with (
        patch.object(asyncio, "sleep", lambda s, *more: wait(min(s, 0.01), *more)),
        patch.object(time, "sleep", lambda s: nap(min(s, 0.01))),
    ):
        yield


def to_slots(request):
    """Is this a request that writes a decision?"""
    return request.writes and "7.0.json" in request.path + request.body[:2000].decode(
        errors="replace"
    )


def answered(server, answer, times):
    """The first `times` writes of a decision get this answer, and are not done."""
    left = [answer] * times
    return server.proxy.faults(lambda request: left.pop() if to_slots(request) and left else None)


@pytest.mark.parametrize("server", ["s3"], indirect=True)
@pytest.mark.parametrize(("status", "code"), [(412, "PreconditionFailed"), (412, "SomethingElse")])
def test_a_412_in_other_words_than_aws_uses_means_taken(status, code, place, says, server):
    log, other = place(), place()
    first = other.create(record())
    with answered(server, says(status, code), 1):
        assert log.create(record(commit=False)) == first


# there: it exists
UNCLEAR_ANSWERS = [
    pytest.param(name, status, marks=[pytest.mark.nightly] * (name != "s3"))
    for name in STORES
    for status in (409, 429, 500, 503)
    if (name, status) != ("azure", 409)
]


@pytest.mark.parametrize(("server", "status"), UNCLEAR_ANSWERS, indirect=["server"])
def test_an_unclear_answer_is_asked_again(status, place, says, server, hurry):
    log, first = place(), record()
    with answered(
        server, says(status, "ConditionalRequestConflict" if status == 409 else "SlowDown"), 1
    ):
        assert log.create(first) == first
    assert place().chain(7) == [first]


@pytest.mark.parametrize("when", ["before", "after"])
def test_if_no_answer_comes_at_all_the_outcome_is_unknown_and_known_later(
    when, place, server, hurry
):
    log, first = place(), record()
    with server.proxy.loses(when, first_only=False, of=lambda request: True):
        assert log.create(first) is None
        with pytest.raises(StoreUnreachable, match="no clear answer"):
            log.chain(7)
    assert log.chain(7) == place().chain(7) == ([first] if when == "after" else [])


@pytest.fixture
def impatient():
    """Drivers give a silent store up after a second, a write after four, and two tries are made."""
    with (
        patch.multiple(file_systems, CONNECT_S=3, SILENCE_S=1),
        patch.object(storage, "stop_after_attempt", lambda tries: stop_after_attempt(2)),
    ):
        yield


def test_a_driver_sends_each_request_once_to_a_silent_store(place, server, impatient):
    log, first = pickle.loads(pickle.dumps(place())), record()
    path = log._path(first.slot)
    for ask in (log.slots, lambda: log.load(first.slot), lambda: log.storage.remove(path)):
        with server.proxy.silent(), server.proxy.counted(least=2) as requests:
            with pytest.raises(StoreUnreachable, match="no clear answer"):
                ask()
        assert len(requests) == 2, requests
    with server.proxy.silent(), server.proxy.counted(least=2) as requests:
        assert log.create(first) is None
    assert len(requests) == 2, requests


def test_a_driver_sends_each_request_once_to_a_store_that_is_busy(place, says, server, impatient):
    log, busy = place(), says(503, "SlowDown")
    with server.proxy.faults(lambda request: busy), server.proxy.counted(least=2) as requests:
        assert log.create(record()) is None
    assert len(requests) == 2, requests


def test_no_create_is_sent_to_a_silent_store_once_it_is_too_late(place, server, impatient):
    log, first, asked = place(), record(), []
    late = lambda: asked.append("is it late?") or len(asked) > 1
    with server.proxy.silent(), server.proxy.counted(least=1) as requests:
        assert log.create(first, late) is None
        with pytest.raises(LogUnwritable, match="too little time"):
            log.create(first, late)
    assert len(requests) == 1, requests
    assert log.chain(7) == place().chain(7) == []
    assert log.create(first) == first


@pytest.mark.parametrize("when", ["before", "after"])
def test_an_answer_that_is_lost_while_a_log_is_opened_is_no_reason_to_refuse_the_store(
    when, url, server
):
    with server.proxy.loses(when) as lost:
        log = open_folder_log(f"{url}/decisions/a")
    first = record()
    assert lost and log.create(first) == first


# ADLS signs the condition: it cannot be lost on the way
@pytest.mark.parametrize("server", first_of(["s3", "gcs"], rest="nightly"), indirect=True)
@pytest.mark.parametrize("make", [open_folder_log, ObjectParticipant], ids=["log", "participant"])
def test_a_store_that_ignores_the_condition_is_refused(make, url, server):
    with server.proxy.without_conditions(), pytest.raises(BadOption, match="overwrites an object"):
        make(f"{url}/out")


@pytest.mark.parametrize("make", [open_folder_log, ObjectParticipant], ids=["log", "participant"])
def test_a_bucket_that_is_not_there_is_named_and_not_made(make, url, server):
    missing = f"{url}x"
    with pytest.raises(StoreUnreachable, match=missing) as e:
        make(f"{missing}/out")
    assert "bucket" in str(e.value)
    with pytest.raises(FileNotFoundError):
        server.driver().ls(f"{bucket_of(missing)}/nothing")


def test_a_store_that_refuses_is_reported_at_once(place, url, says, server):
    log, asked = place(), says(403, "AccessDenied")
    with server.proxy.faults(lambda request: asked), server.proxy.counted() as requests:
        with pytest.raises(LogUnwritable, match="refused"):
            log.create(record())
        with pytest.raises(StoreUnreachable, match="refused"):
            log.chain(7)
        with pytest.raises(StoreUnreachable, match="refused"):
            open_folder_log(f"{url}/decisions/b").chain(7)
    assert len(requests) < 10
    assert log.chain(7) == []


def test_what_another_driver_wrote_since_the_last_listing_is_seen(place, url, server):
    """Drivers answer from cached listings, unless the cache is switched off."""
    log, first, second = place(), record(7, 0, commit=False), record(7, 1)
    log.create(first)
    assert log.chain(7) == [first]
    server.driver().pipe_file(f"{bucket_of(url)}/decisions/a/7.1.json", dump_decision(second))
    assert log.load(second.slot) == second and log.chain(7) == [first, second]


@pytest.mark.parametrize("server", first_of(["s3", "gcs"], rest="nightly"), indirect=True)
def test_objects_that_stand_for_folders_are_no_decisions(place, url, server):
    """Consoles and Hadoop write them."""
    for folder in ("decisions/", "decisions/a/", "decisions/a/8/"):
        server.driver().pipe_file(f"{bucket_of(url)}/{folder}", b"")
    log, first = place(), record()
    assert log.slots() == [] and log.create(first) == first
    assert log.chain(7) == [first] and log.batches() == [7]


def test_a_decision_takes_one_request_and_two_if_the_slot_is_taken(place, server):
    log, second = place(), place()
    with server.proxy.counted() as won:
        first = log.create(record())
    with server.proxy.counted() as lost:
        assert second.create(record(commit=False)) == first
    assert (len(won), len(lost)) == (1, 2), (won, lost)


@pytest.mark.never_unsteady
@pytest.mark.parametrize("server", first_of(["s3", "gcs"], rest="nightly"), indirect=True)
def test_a_micro_batch_asks_its_log_five_times(place, server):
    """The planner: the list, and the COMMIT of the batch before. The committer: create, the list,
    and remove the oldest COMMIT.
    """
    store = MemoryParticipant()
    driver = Driver(
        query_id=str(uuid.uuid4()),
        log=place(),
        participants={store.name: store},
        policy=Policy(keep_batches=1),
    )
    mine = None
    for batch_id in range(5):
        with server.proxy.counted() as requests:
            planned = restore(driver, batch_id, mine=mine)
            commit(driver, [precommit([store], planned, [["row"]])], batch_id)
        mine = planned.token
    assert len(requests) == 5, requests
    assert driver.log.batches() == [3, 4] and store.read() == ["row"] * 5


def test_a_start_after_many_failed_ones_asks_no_more_than_after_twenty(place, server):
    store = MemoryParticipant()
    driver = Driver(query_id=str(uuid.uuid4()), log=place(), participants={store.name: store})
    asked = []
    for _ in range(24):
        with server.proxy.counted() as requests:
            restore(driver, 0)
        asked.append(len(requests))
    assert asked[23] == asked[19] <= 24, asked
