"""Decision logs and participants on real servers of S3, GCS and ADLS, with the real drivers: every promise, and what only an object store can break.

Each request passes a proxy (`store_proxy`). It loses answers as a network does, and it counts."""
import json
from functools import partial

import pytest
from decision_log_suite import CONTENT, DAMAGED, DURABLE, PROMISES, UNCLEAR, Place, record
from participant_suite import DURABLE as KEPT_BY_DURABLE_STORES
from participant_suite import PROMISES as KEPT_BY_STORES
from participant_suite import At, rows

from kafka2pc.decisions import dump_decision, open_log
from kafka2pc.file import ObjectParticipant

pytestmark = pytest.mark.timeout(180)
STORES = ["s3", "gcs", "azure"]


@pytest.fixture(params=STORES)
def server(request):
    return request.getfixturevalue(request.param)


@pytest.fixture
def url(server):
    """A bucket of its own for each test."""
    return server.fresh()


def bucket_of(url):
    return url.partition("://")[2]


def promises(*of):
    return pytest.mark.parametrize("promise", of, ids=lambda promise: promise.__name__)


# -- decision logs --


@pytest.fixture
def place(server, url):
    fs = server.driver()

    def open(name="a"):
        return open_log(f"{url}/decisions/{name}")

    def spoil(name, slot, content):
        fs.pipe_file(f"{bucket_of(url)}/decisions/{name}/{slot.batch_id}.{slot.attempt}.json", content)
    lost = {when: partial(server.proxy.loses, when) for when in ("before", "after")}
    return Place(open, steps=["create", "_put"], spoil=spoil, lost=lost)


@promises(*PROMISES)
def test_every_log_keeps(promise, place):
    promise(place)


@promises(*DURABLE)
def test_a_log_that_outlives_its_driver_keeps(promise, place):
    promise(place)


@promises(*UNCLEAR)
@pytest.mark.parametrize("when", ["before", "after"])
def test_when_the_answer_is_lost(promise, when, place):
    promise(place, when)


@promises(*DAMAGED)
@pytest.mark.parametrize("kind", CONTENT)
def test_with_damaged_content(promise, kind, place):
    promise(place, kind)


# -- participants --


def seen(server, url):
    """The rows of the files that a manifest calls committed, read past the code under test."""
    fs, root = server.driver(), f"{bucket_of(url)}/out"
    for manifest in fs.find(f"{root}/manifest"):
        if fs.cat_file(manifest) == b"committed":
            yield from (json.loads(line)["value"] for line in fs.cat_file(manifest.replace("/manifest/", "/data/")).splitlines())


@promises(*KEPT_BY_STORES, *KEPT_BY_DURABLE_STORES)
def test_a_participant_keeps(promise, server, url):
    promise(At(ObjectParticipant(f"{url}/out", format="json"), partial(seen, server, url), rows))
