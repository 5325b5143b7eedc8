"""The promises of every decision log: in memory, in files, in an object store, in a Kafka topic, in
a PostgreSQL table; and what only one can break.
"""

import errno
import os
import uuid
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from threading import Event
from unittest.mock import patch

import fsspec
import psycopg
import pytest
from confluent_kafka import Producer
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
from fsspec.implementations.local import LocalFileSystem

from kafka2pc.backends import local_files
from kafka2pc.backends.postgres_connection import postgres_place
from kafka2pc.decision_logs.files import FileLog
from kafka2pc.decision_logs.objects import ObjectLog
from kafka2pc.decision_logs.table import TableLog
from kafka2pc.decision_logs.topic import log as topic_log
from kafka2pc.decision_logs.topic.log import TopicLog
from kafka2pc.proof.child_process import until
from kafka2pc.protocol import errors
from kafka2pc.protocol.driver import Driver
from kafka2pc.protocol.log.questions import newest_record
from kafka2pc.protocol.log.slots import MemoryLog
from kafka2pc.protocol.participant import Outcome
from kafka2pc.protocol.phases.restore import restore
from kafka2pc.stores.object_store import ObjectParticipant

DURABLE_LOGS = ["file", "object", pytest.param("topic", marks=pytest.mark.kafka), "table"]


def first_only(fails, real, calls):
    """`fails` in place of `real`, for the first call, which is added to `calls`."""
    return lambda *args, **more: (real if calls else calls.append(1) or fails)(*args, **more)


@contextmanager
def lose(target, name, when, error):
    """The first call of `target.name` raises `error`, before or after it was done."""
    real, calls = getattr(target, name), []

    def fails(*args, **more):
        if when == "after":
            real(*args, **more)
        raise error

    with patch.object(target, name, first_only(fails, real, calls)):
        yield calls


def both(losing):
    return {when: partial(losing, when) for when in ("before", "after")}


def memory(request):
    kept = {}
    return Place(lambda name="a": kept.setdefault(name, MemoryLog()))


def file(request):
    folder = str(request.getfixturevalue("tmp_path"))

    def spoil(name, slot, content):
        os.makedirs(f"{folder}/{name}", exist_ok=True)
        Path(f"{folder}/{name}/{slot.batch_id}.{slot.attempt}.json").write_bytes(content)

    losing = lambda when: lose(os, "link", when, OSError(5, "I/O error"))
    return Place(
        lambda name="a": FileLog(f"{folder}/{name}"),
        steps=["create", "put_file", "create_file"],
        spoil=spoil,
        lost=both(losing),
    )


class ConditionalPut(LocalFileSystem):
    """A store with a conditional put that other processes see, as S3 has it: the object appears
    whole, or the name is taken.
    """

    protocol = "put"

    def pipe_file(self, path, value, mode="overwrite", **more):
        if mode != "create":
            return super().pipe_file(path, value, mode=mode, **more)
        fresh = f"{path}.{uuid.uuid4().hex}"
        super().pipe_file(fresh, value)
        try:
            os.link(fresh, path)
        finally:
            os.unlink(fresh)


def an_object_store(request):
    url = f"put://{request.getfixturevalue('tmp_path')}"

    def open(name="a"):
        fsspec.register_implementation("put", ConditionalPut, clobber=True)
        return ObjectLog(f"{url}/{name}")

    def spoil(name, slot, content):
        log = open(name)
        log.storage.write(log._path(slot), content)

    losing = lambda when: lose(ConditionalPut, "pipe_file", when, OSError(5, "I/O error"))
    return Place(open, steps=["create", "_put", "pipe_file"], spoil=spoil, lost=both(losing))


def topic(request):
    conf, start = request.getfixturevalue("kafka").client_conf, uuid.uuid4().hex
    TopicLog(conf, "decisions", start).close()  # the topic is there, whichever test comes first

    def spoil(name, slot, content):
        producer = Producer(conf)
        producer.produce("decisions", content, key=f"{start}-{name}/{slot.batch_id}.{slot.attempt}")
        producer.flush()

    @contextmanager
    def losing(when):
        real, calls = topic_log.end_txn, []

        def fails(*args, **more):
            if when == "after":
                real(*args, **more)
            return Outcome.UNKNOWN

        with patch.object(topic_log, "end_txn", first_only(fails, real, calls)):
            yield calls

    return Place(
        lambda name="a": TopicLog(conf, "decisions", f"{start}-{name}"),
        steps=["try_once", "end_txn"],
        spoil=spoil,
        lost=both(losing),
    )


def table(request):
    postgres, start = request.getfixturevalue("postgres"), uuid.uuid4().hex
    url = postgres.url

    def spoil(name, slot, content):
        TableLog(url, f"{start}-{name}")
        postgres.execute(
            "insert into kafka2pc_decisions values (%s, %s, %s, %s)",
            f"{start}-{name}",
            *slot,
            content.decode("latin-1"),
        )

    losing = lambda when: lose(psycopg.Connection, "commit", when, psycopg.OperationalError("lost"))
    return Place(
        lambda name="a": TableLog(url, f"{start}-{name}", lock_ms=300),
        steps=["create", "take_slot", "insert"],
        spoil=spoil,
        lost=both(losing),
    )


PLACES = {"memory": memory, "file": file, "object": an_object_store, "topic": topic, "table": table}


@pytest.fixture
def place(request):
    return PLACES[request.param](request)


def promises(*of):
    return pytest.mark.parametrize("promise", of, ids=lambda promise: promise.__name__)


@pytest.mark.never_unsteady
@promises(*PROMISES)
@pytest.mark.parametrize("place", ["memory", *DURABLE_LOGS], indirect=True)
def test_every_log_keeps(promise, place):
    promise(place)


# objects on S3: test_object_stores
@pytest.mark.never_unsteady
@promises(*DURABLE)
@pytest.mark.parametrize("place", ["file", "table"], indirect=True)
def test_a_log_that_outlives_its_driver_keeps(promise, place):
    promise(place)


# half a minute; test_topic_owner has suspended drivers in every order
@pytest.mark.never_unsteady
@pytest.mark.kafka
@pytest.mark.full
@pytest.mark.parametrize("promise", slow_one_nightly(DURABLE))
@pytest.mark.parametrize("place", ["topic"], indirect=True)
def test_a_topic_outlives_its_driver_and_keeps(promise, place):
    promise(place)


@pytest.mark.never_unsteady
@promises(*UNCLEAR)
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("place", DURABLE_LOGS, indirect=True)
def test_when_the_answer_is_lost(promise, when, place):
    promise(place, when)


@pytest.mark.never_unsteady
@promises(*DAMAGED)
@pytest.mark.parametrize("kind", CONTENT)
@pytest.mark.parametrize("place", DURABLE_LOGS, indirect=True)
def test_with_damaged_content(promise, kind, place):
    promise(place, kind)


# -- a deadline --


def test_a_file_whose_draft_took_too_long_gets_no_name(tmp_path):
    log, synced = FileLog(tmp_path), []
    with (
        patch.object(local_files, "sync", synced.append),
        pytest.raises(errors.LogUnwritable, match="too little time"),
    ):
        log.create(record(), lambda: bool(synced))
    assert len(synced) == 1 and list(tmp_path.iterdir()) == []


def test_a_table_that_was_locked_for_too_long_gets_no_record(postgres):
    log, late, done = TableLog(postgres.url, uuid.uuid4().hex, lock_ms=60_000), Event(), []
    log.also = lambda db, decision: done.append(decision)
    with psycopg.connect(postgres.url) as other, ThreadPoolExecutor(1) as pool:
        other.execute("lock table kafka2pc_decisions in exclusive mode")
        answer = pool.submit(log.create, record(), late.is_set)
        waiting = lambda: other.execute("select from pg_locks where not granted").fetchall()
        until(waiting, "the create waits for the lock")
        late.set()
        other.rollback()
        with pytest.raises(errors.LogUnwritable, match="too little time"):
            answer.result()
    assert len(done) == 1 and log.chain(7) == []
    with pytest.raises(errors.LogUnwritable, match="too little time"):
        log.create(record(), late.is_set)
    assert len(done) == 1, "the insert was sent too late"


# -- a table --


def load_fsync(postgres, value, change):
    """Change the server's setting, and wait until new connections have it."""
    postgres.execute(change)
    postgres.execute("select pg_reload_conf()")
    until(lambda: postgres.execute("show fsync") == [(value,)], f"fsync is {value}")


def test_a_server_that_forgets_is_refused(postgres):
    try:
        load_fsync(postgres, "off", "alter system set fsync = off")
        with pytest.raises(errors.BadOption, match="fsync = off"):
            TableLog(postgres.url, "a")
    finally:
        load_fsync(postgres, "on", "alter system reset fsync")


def test_a_decision_is_on_the_disk_whatever_the_user_has_set_and_takes_its_work_with_it(postgres):
    name, done = uuid.uuid4().hex, []

    def also(db, decision):
        done.append((decision.slot.batch_id, *db.execute("show synchronous_commit").fetchone()))

    log = TableLog(
        (
            f"{postgres.url}&options=-csynchronous_commit%3Doff"
            if "?" in postgres.url
            else f"{postgres.url}?options=-csynchronous_commit%3Doff"
        ),
        name,
        also=also,
    )
    first = record()
    log.create(record(6, commit=False))
    assert log.create(first) == log.create(record()) == log.create(first) == first
    assert done == [(7, "on")]
    assert log.decides_more and not TableLog(postgres.url, name).decides_more


def test_a_commit_behind_a_later_batch_is_refused_with_its_work(postgres):
    done = []
    log = TableLog(postgres.url, uuid.uuid4().hex, also=lambda db, d: done.append(d.slot.batch_id))
    log.create(record(8, commit=False))
    with pytest.raises(errors.Superseded, match="the log holds a later batch"):
        log.create(record(7))
    assert (log.chain(7), done) == ([], [])
    closed = record(7, commit=False)
    assert log.create(closed) == closed


def test_a_server_that_does_not_answer_is_reported_without_the_password():
    with pytest.raises(errors.StoreUnreachable, match="Check decisionLog") as e:
        TableLog("postgresql://user:secret@127.0.0.1:1/x", "a")
    assert "secret" not in str(e.value)  # URLs that cannot be read: test_postgres


def with_path(postgres, schemas):
    """A URL whose connections search these schemas."""
    for schema in schemas.split(","):
        postgres.execute(f"create schema if not exists {schema}")
    sign = "&" if "?" in postgres.url else "?"
    return f"{postgres.url}{sign}options=-csearch_path%3D{schemas}"


def test_a_log_whose_records_are_in_another_schema_is_refused(postgres):
    """The search_path of the URL has changed, or that of the role. With a schema that the user has
    named, a log may have the name of another one, unless Spark has made that name.
    """
    spark_id, name = str(uuid.uuid4()), f"orders-{uuid.uuid4()}"
    former, later = with_path(postgres, "former"), with_path(postgres, "later")
    for log in (spark_id, name):
        TableLog(former, log).create(record())
    here = f"it has no record of {spark_id}, and former.kafka2pc_decisions"
    with pytest.raises(errors.MovedLog, match=here) as moved:
        TableLog(later, spark_id).listing()
    assert "?options=-csearch_path=former" in moved.value.action
    assert TableLog(later, name).slots() == []
    postgres.execute("alter role postgres set search_path = later")
    try:
        with pytest.raises(errors.MovedLog, match="has no record"):
            TableLog(postgres.url, name).slots()
        assert TableLog(former, spark_id).slots() == TableLog(former, name).slots() != []
    finally:
        postgres.execute("alter role postgres reset search_path")


def test_the_place_of_a_table_has_its_schema_and_that_of_an_older_version_is_accepted(postgres):
    url, plain = with_path(postgres, "kept"), with_path(postgres, "public")
    log, query_id = TableLog(url, str(uuid.uuid4())), str(uuid.uuid4())
    assert log.place.endswith("#kept.kafka2pc_decisions") and "search_path" not in log.place
    assert TableLog(url, "a", table="kept.kafka2pc_decisions").place == log.place
    [former] = log.former_places
    assert former == f"{postgres_place('', url)}#kafka2pc_decisions"
    driver = Driver(query_id=query_id, log=log, participants={})
    restore(replace(driver, log=Recorded(log, former)), 0)
    plan = restore(driver, 0)
    assert plan.attempt == 2 and newest_record(log).identity.log == log.place
    TableLog(plain, "a")
    postgres.execute("insert into public.kafka2pc_decisions select * from kept.kafka2pc_decisions")
    with pytest.raises(errors.MovedLog, match="#kept.kafka2pc_decisions"):
        restore(replace(driver, log=TableLog(plain, log.name)), 0)


class Recorded:
    """A log that an older version uses: it records its `place` in another form."""

    def __init__(self, log, place):
        self.log, self.place = log, place

    def __getattr__(self, name):
        return getattr(self.log, name)


class Cut(TableLog):
    """The server ends each connection before its first statement."""

    def connect(self):
        db = super().connect()
        with psycopg.connect(self.url, autocommit=True) as other:
            other.execute("select pg_terminate_backend(%s)", (db.info.backend_pid,))
        return db


def test_a_connection_that_breaks_while_the_table_is_opened_is_reported(postgres):
    with pytest.raises(
        errors.StoreUnreachable, match="decision log in PostgreSQL(.|\n)*decisionLog"
    ):
        Cut(postgres.url, "a")


def test_a_right_that_is_missing_is_named(postgres):
    TableLog(postgres.url, "a")
    postgres.execute("create role dave login")
    with pytest.raises(errors.NotAuthorized, match="permission denied(.|\n)*kafka2pc_decisions"):
        TableLog(postgres.url.replace("postgres:@", "dave:@"), "a").slots()


class LooksFirst(LocalFileSystem):
    """fsspec's own way to create an object: look first, then write. Two may do so at once."""

    protocol = "looks"


@pytest.mark.parametrize("code", [errno.EPERM, errno.ENOTSUP, errno.ENOSYS])
def test_a_file_system_without_hard_links_is_named_and_nothing_is_written(tmp_path, code):
    log, wanted = FileLog(tmp_path), record()
    with (
        patch.object(os, "link", side_effect=OSError(code, os.strerror(code))),
        pytest.raises(errors.LogUnwritable, match="no hard links here") as caught,
    ):
        log.create(wanted)
    assert (
        "decisionLog" in caught.value.action
        and log.batches() == []
        and list(tmp_path.iterdir()) == []
    )
    assert log.create(wanted) == wanted


def test_a_store_that_looks_first_and_writes_then_is_refused(tmp_path):
    fsspec.register_implementation("looks", LooksFirst, clobber=True)
    for make in (ObjectLog, ObjectParticipant):
        with pytest.raises(errors.BadOption, match="overwrites an object"):
            make(f"looks://{tmp_path}/log")


# -- many names at one place --


def name_of(log):
    return getattr(log, "name", None) or log.folder.rpartition("/")[2]


@pytest.mark.parametrize("place", DURABLE_LOGS, indirect=True)
def test_a_sibling_is_the_log_of_another_name_at_the_same_place(place):
    a, b = place("a"), place("b")
    first, second = a.create(record(7)), b.create(record(8))
    twin = a.sibling(name_of(b))
    assert (type(twin), twin.place.rpartition("/")[0]) == (type(b), b.place.rpartition("/")[0])
    assert (a.chain(7), a.chain(8), twin.chain(7), twin.chain(8)) == ([first], [], [], [second])
    third = twin.create(record(9))
    assert place("b").chain(9) == [third] and a.batches() == [7]
    assert {name_of(a), name_of(b)} <= set(a.siblings())
    twin.purge(10)
    assert place("b").batches() == [] and place("a").chain(7) == [first]
    # in memory, fsspec keeps folders that an object store does not have
    if not isinstance(a, ObjectLog):
        assert name_of(b) not in a.siblings()
