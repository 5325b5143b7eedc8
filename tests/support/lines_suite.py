"""What a database with a table of transactions keeps, beside the checks of every participant: it is
known by what is in it, what is prepared counts without a line, and a name has one transaction.
"""

import re
import uuid
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Callable

import pytest
from driver_steps import decide_only, write
from participant_suite import DONE, REFUSED, At, a_plan, ask, precommit_rows, rows

from kafka2pc.operations.repair import decided_steps
from kafka2pc.protocol.driver import Driver
from kafka2pc.protocol.errors import LostTransaction, OutcomeUnknown, PrecommitFailed, WrongCluster
from kafka2pc.protocol.log.questions import newest_record
from kafka2pc.protocol.log.slots import MemoryLog
from kafka2pc.protocol.messages import Mode
from kafka2pc.protocol.operators.adopt import adopt
from kafka2pc.protocol.phases.passed_over import refuse_after
from kafka2pc.protocol.phases.restore import restore
from kafka2pc.protocol.states import TxnState

RECORD = "kafka2pc_transactions"


@dataclass
class Database:
    """`make(**more)`: a participant for the table of this test. `execute`: a statement on a
    separate connection. `seen`: the texts in the table. `prepare_by_hand(tid, epoch, statements)`:
    what the statements do is prepared under this name. `cut(transaction)`: the server ends its
    connection.
    """

    make: Callable[..., Any]
    execute: Callable[..., Any]
    seen: Callable[[], list]
    prepare_by_hand: Callable[..., None]
    cut: Callable[[Any], None]

    def at(self, store=None):
        return At(store or self.make(), self.seen, rows)

    def driver(self, log=None, query_id=None, **more):
        store = self.make(**more)
        query_id = query_id or a_plan().query_id
        return Driver(query_id=query_id, log=log or MemoryLog(), participants={store.name: store})


def database_of(at, server, prepare_by_hand, kill):
    """The database of a participant's table. `kill(transaction)`: the statement that ends its
    connection.
    """
    make = partial(type(at.store), server.url, at.store.table, name="db")
    cut = lambda txn: server.execute(kill(txn))
    return Database(make, server.execute, at.seen, prepare_by_hand, cut)


def a_store_of_an_older_version_goes_on(db, former, lines, store_id):
    """`former`: the statement that made the table. `store_id`: as its decisions name the store. The
    older version can go on with the table, too: its columns are the same.
    """
    columns = (
        "select column_name, data_type, column_default from information_schema.columns"
        " where table_name = '{}' order by ordinal_position"
    )
    db.execute(former)
    driver = db.driver(record="former_record")
    old = replace(a_plan(), query_id=driver.query_id)
    tid = f"kafka2pc-{old.query_id}-{old.token}-0badcafe-0-0"
    db.execute(lines.format(tid, old.query_id))
    db.prepare_by_hand(
        tid,
        0,
        f"insert into {driver.participants['db'].table} values ('a')",
        f"update former_record set outcome = 'committed' where transactional_id = '{tid}'",
    )
    c = driver.participants["db"].names.committable(tid, 0, 1)
    decision = driver.decision(old, commit=True, committables=(c,))
    driver.log.create(replace(decision, stores=(("db", store_id),)))
    assert driver.participants["db"].store_id() != store_id
    assert restore(driver, 0).mode is Mode.DRAIN and db.seen() == ["a"]
    write(driver, 1, rows(["b"]))
    assert db.seen() == ["a", "b"]
    assert dict(newest_record(driver.log).stores)["db"] == driver.participants["db"].store_id()
    db.make().store_id()
    assert db.execute(columns.format("former_record")) == db.execute(columns.format(RECORD))


def what_is_prepared_counts_without_a_line(db):
    """It is listed, described and ended by a participant with another table of lines. It is
    not listed if another application may use the same query id.
    """
    plan, other = a_plan(), db.make(record="another_record")
    kept, left = (precommit_rows(db.at(), plan, text) for text in "ab")
    foreign = precommit_rows(db.at(), a_plan(), "c")
    ids = {c.transactional_id for c in (kept, left)}
    assert {c.transactional_id for c in other.in_doubt(plan.query_id)} == ids
    assert set(other.traces(plan.query_id)) == ids
    assert {d.state for d in other.describe([kept, left])} == {TxnState.PRECOMMITTED}
    assert ask(other.commit, kept) is DONE and ask(other.abort, left) is DONE
    assert ask(other.commit, kept) is DONE and ask(other.abort, kept) is REFUSED
    assert other.in_doubt(plan.query_id) == [] and db.seen() == ["a"]
    named = a_plan(query_id=str(uuid.uuid5(uuid.NAMESPACE_OID, kept.transactional_id)))
    of_name = precommit_rows(db.at(), named, "d")
    assert other.in_doubt(named.query_id) == other.traces(named.query_id) == []
    assert [ask(db.make().abort, c) for c in (foreign, of_name)] == [DONE, DONE]


def a_record_that_was_made_anew_is_adopted(db):
    driver = db.driver()
    write(driver, 0, rows(["a"]))
    other = db.driver(driver.log, driver.query_id, record="made_anew")
    with pytest.raises(WrongCluster, match="made anew(.|\n)*adopt"):
        restore(other, 1)
    adopt(other)
    write(other, 1, rows(["b"]))
    assert db.seen() == ["a", "b"]


def rows_whose_line_was_deleted_are_not_reported_as_lost(db):
    """The error has the line that is missing, and then the same rows are not written again."""
    driver = db.driver()
    decide_only(driver, 0, rows(["a"]))
    [c] = newest_record(driver.log).committables
    assert ask(driver.participants["db"].commit, c) is DONE
    db.execute(f"delete from {RECORD} where query_id = '{driver.query_id}'")
    with pytest.raises(OutcomeUnknown, match="write again only what is not there") as e:
        restore(driver, 0)
    db.execute(re.search("insert into .*'committed'[)]", e.value.action)[0])
    assert restore(driver, 0).mode is Mode.DRAIN and db.seen() == ["a"]


def what_an_operator_rolled_back_is_reported_as_lost(db):
    """Whether Spark replays the batch, or goes on, or the call for it has failed in this run."""
    driver = db.driver()
    decide_only(driver, 0, rows(["a"]))
    store, cs = driver.participants["db"], newest_record(driver.log).committables
    [beside] = [t for t in store.open_beside("another") if t.query_id == driver.query_id]
    db.execute(beside.abort_with)
    assert [d.state for d in store.describe(cs)] == [TxnState.ABORTED]
    assert [step.do for step in decided_steps(driver)] == ["lost"]
    assert store.commit(*cs) is REFUSED
    for asks in (
        partial(restore, batch_id=0),
        partial(restore, batch_id=1),
        refuses_after_the_first,
    ):
        with pytest.raises(LostTransaction, match=re.escape(cs[0].transactional_id)):
            asks(db.driver(driver.log, driver.query_id))
    assert [ask(store.abort, c) for c in store.in_doubt(driver.query_id)] == [DONE]


def refuses_after_the_first(driver):
    return refuse_after(driver, 0, 1)


def two_workers_that_draw_one_name_keep_their_rows(db):
    """The second one takes its next name, at a later batch the first."""
    plan, at = a_plan(), db.at()
    first = precommit_rows(at, plan, "a").transactional_id
    start, count, parity = first.rsplit("-", 2)
    drawn = f"{start}-{int(count) + 1}-{parity}"
    db.execute(
        f"insert into {RECORD} (transactional_id, epoch, query_id) values ('{drawn}', 0,"
        f" '{plan.query_id}')"
    )
    db.prepare_by_hand(
        drawn,
        0,
        f"insert into {at.store.table} values ('other')",
        f"update {RECORD} set outcome = 'committed' where transactional_id = '{drawn}'",
    )
    second = precommit_rows(at, plan, "b").transactional_id
    assert second == f"{start}-{int(count) + 2}-{parity}"
    open_ = at.store.in_doubt(plan.query_id)
    assert {c.transactional_id for c in open_} == {first, drawn, second}
    assert [ask(at.store.commit, c) for c in open_] == [DONE] * 3
    assert at.seen() == ["a", "b", "other"]
    later = replace(plan, batch_id=2)
    assert precommit_rows(at, later, "c").transactional_id == first
    assert [ask(at.store.abort, c) for c in at.store.in_doubt(plan.query_id)] == [DONE]


def later_commits_of_a_name_are_recalled(db):
    plan, at = a_plan(), db.at()
    c = precommit_rows(at, plan, "a")
    tid = c.transactional_id
    assert at.store.committed_later({tid: None}) == []
    assert ask(at.store.commit, c) is DONE
    recall = lambda last: at.store.committed_later({tid: last, f"{tid}0": None})
    assert (recall(None), recall(c), at.store.committed_later({})) == ([tid], [], [])
    d = precommit_rows(at, replace(plan, batch_id=2), "b")
    assert recall(c) == []
    assert ask(at.store.commit, d) is DONE
    assert (recall(c), recall(d)) == ([tid], [])


def a_prepare_whose_answer_is_lost_is_looked_up(db, arrived):
    """`arrived`: did the server get it before it ended the connection?"""
    plan, at = a_plan(), db.at()

    class Cut(type(at.store.begin(plan))):
        def _prepare(self, *cursor):
            if arrived:
                super()._prepare(*cursor)
            db.cut(self)
            super()._prepare(*cursor)  # nothing reaches the server any more

    def written():
        with at.store.begin(plan) as txn:
            txn.__class__ = Cut
            at.write(txn, "a")
            return txn.precommit()

    if not arrived:
        with pytest.raises(PrecommitFailed):
            written()
        assert at.store.committed_later({}) == []
        return
    c = written()
    assert (c.records, ask(at.store.commit, c), at.seen()) == (1, DONE, ["a"])
    assert ask(at.store.abort, c) is REFUSED


RECORD_CHECKS = [
    what_is_prepared_counts_without_a_line,
    a_record_that_was_made_anew_is_adopted,
    rows_whose_line_was_deleted_are_not_reported_as_lost,
    what_an_operator_rolled_back_is_reported_as_lost,
    two_workers_that_draw_one_name_keep_their_rows,
    later_commits_of_a_name_are_recalled,
]
