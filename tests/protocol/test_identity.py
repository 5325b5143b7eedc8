"""Whose log is it: a copied, moved, shared or empty decision log is refused before anything is
claimed, swept or written.
"""

import copy
import shutil
import uuid
from dataclasses import replace
from functools import partial

import pytest
from driver_steps import ORDERS, decide_only, orders_driver, prepare, write

from kafka2pc.decision_logs.files import FileLog
from kafka2pc.operations.query import Query
from kafka2pc.operations.repair import adopt_place
from kafka2pc.protocol.errors import (
    MovedLog,
    OutcomeUnknown,
    StaleCheckpoint,
    UnfinishedBatch,
    WrongCluster,
)
from kafka2pc.protocol.log.decisions import Slot
from kafka2pc.protocol.log.format import dump_decision, load_decision
from kafka2pc.protocol.log.questions import commit_of, newest_record
from kafka2pc.protocol.log.slots import MemoryLog
from kafka2pc.protocol.memory import MemoryParticipant
from kafka2pc.protocol.messages import Mode
from kafka2pc.protocol.names import Names, new_token
from kafka2pc.protocol.operators.adopt import adopt
from kafka2pc.protocol.operators.fence import end_all, fence
from kafka2pc.protocol.participant import Outcome, StoreIdentity
from kafka2pc.protocol.phases.claim import claim
from kafka2pc.protocol.phases.commit import commit
from kafka2pc.protocol.phases.finish import finish
from kafka2pc.protocol.phases.precommit import precommit
from kafka2pc.protocol.phases.restore import restore
from kafka2pc.protocol.states import TxnState
from kafka2pc.stores.file import FileParticipant


@pytest.fixture
def store():
    return MemoryParticipant()


@pytest.fixture
def driver(tmp_path, store):
    return orders_driver(tmp_path, store)


def copied(driver, tmp_path):
    """The driver of a query that runs from `cp -r orders copy`."""
    shutil.copytree(tmp_path / "orders", tmp_path / "copy")
    return replace(
        driver,
        log=FileLog(f"{tmp_path}/copy/kafka2pc"),
        about=replace(ORDERS, checkpoint="file:///copy"),
    )


def content(log):
    return {(d.slot, d.kind) for b in log.batches() for d in log.chain(b)}


# -- copied and moved --


def test_a_copied_checkpoint_stops_before_it_claims_sweeps_or_writes(driver, store, tmp_path):
    write(driver, 0)
    decide_only(driver, 1)
    copy = copied(driver, tmp_path)
    before = content(copy.log)
    for batch_id in (1, 2):
        with pytest.raises(
            MovedLog,
            match=(
                "file:///.*/orders/kafka2pc, and this run uses"
                " file:///.*/copy/kafka2pc.*file:///copy"
            ),
        ):
            restore(copy, batch_id)
    assert content(copy.log) == before
    assert finish(driver, commit_of(driver.log, 1)), (
        "the original goes on, and its decided rows are there"
    )
    assert len(store.read()) == 2


def test_a_copied_checkpoint_that_shares_the_log_is_refused(driver):
    write(driver, 0)
    with pytest.raises(
        MovedLog, match="checkpoint is file:///orders, and this run uses file:///copy"
    ):
        restore(replace(driver, about=replace(ORDERS, checkpoint="file:///copy")), 1)
    assert driver.log.batches() == [0]


def test_a_moved_log_is_adopted_by_one_explicit_step_that_is_written_down(driver, store, tmp_path):
    write(driver, 0)
    moved = copied(driver, tmp_path)
    record = adopt_place(
        Query(place="copy", query_id=driver.query_id, log=moved.log, checkpoint="file:///copy")
    )
    assert (record.kind, record.slot) == ("ADOPT", Slot(0, 2))
    assert newest_record(moved.log) == record
    assert record.identity == replace(ORDERS, log=moved.log.place, checkpoint="file:///copy")
    assert adopt(moved) is None, "nothing has changed since"
    write(moved, 1)
    assert len(store.read()) == 2
    assert commit_of(moved.log, 0).identity.checkpoint == "file:///orders", (
        "what was decided stays as it was"
    )


def test_a_decided_batch_is_finished_after_the_adoption(driver, store, tmp_path):
    decide_only(driver, 0)
    moved = copied(driver, tmp_path)
    adopt(moved)
    assert store.read() == []
    assert restore(moved, 0).mode is Mode.DRAIN
    assert store.read() == ["row"]
    write(moved, 1)


def test_an_adoption_fences_a_run_that_has_not_decided(driver, store):
    message = prepare(driver, 0)
    elsewhere = replace(driver, about=replace(ORDERS, checkpoint="file:///elsewhere"))
    adopt(elsewhere)
    with pytest.raises(Exception, match="ADOPT"):
        commit(driver, [message], 0)
    write(elsewhere, 0, ("again",))
    assert store.read() == ["again"]


def test_there_is_nothing_to_adopt_in_an_empty_log_or_in_one_of_another_query(driver):
    with pytest.raises(StaleCheckpoint, match="is empty"):
        adopt(driver)
    claim(driver, 0)
    with pytest.raises(StaleCheckpoint, match="holds decisions of query"):
        adopt(replace(driver, query_id=str(uuid.uuid4())))


def test_a_record_of_the_old_form_says_nothing_about_places(driver):
    write(driver, 0)
    old = replace(newest_record(driver.log), identity=None, rows=None, bytes=None)
    log = MemoryLog("elsewhere")
    log.create(load_decision(dump_decision(old), "here"))
    write(replace(driver, log=log), 1)
    assert newest_record(log).identity.log == "elsewhere", "from the next record on it does"


# -- other options --


CHANGES = {
    "topic": (replace(ORDERS, topics=("other",)), "topic was orders and is other"),
    "column": (replace(ORDERS, topics=()), "topic was orders and is a column"),
    "prefix": (replace(ORDERS, prefix="mine"), "transactionalIdPrefix was kafka2pc and is mine"),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("state", [prepare, decide_only])
def test_other_options_wait_until_the_batch_is_finished(change, state, driver):
    about, says = CHANGES[change]
    state(driver, 0)
    changed = replace(driver, about=about)
    before = content(driver.log)
    with pytest.raises(UnfinishedBatch, match=says):
        restore(changed, 0)
    assert content(driver.log) == before
    commit(driver, [prepare(driver, 0)], 0)
    write(changed, 1)
    assert newest_record(driver.log).identity == changed.identity()


def test_another_set_of_participants_waits_too(driver, store):
    second = MemoryParticipant("second")
    both = replace(driver, participants={store.name: store, second.name: second})
    decide_only(both, 0)
    with pytest.raises(UnfinishedBatch, match="participants was memory, second and is memory"):
        restore(driver, 0)
    restore(both, 0)
    third = MemoryParticipant("third")
    more = {p.name: p for p in (store, second, third)}
    write(replace(driver, participants=more), 1)
    assert store.read() == second.read() == ["row", "row"] and third.read() == ["row"]


class Prefixed(MemoryParticipant):
    """A store that lists what is open under one prefix, as Kafka does. `under`: the same store with
    another one.
    """

    def __init__(self, prefix="kafka2pc"):
        super().__init__()
        self.prefix = prefix

    def begin(self, planned):
        txn = super().begin(planned)
        self.prefixes[txn.name] = self.prefix
        return txn

    prefixes = {}

    def in_doubt(self, query_id):
        return [
            c
            for c in super().in_doubt(query_id)
            if self.prefixes[c.transactional_id, c.state.epoch] == self.prefix
        ]

    def identity(self):
        return StoreIdentity(self.prefix)

    def under(self, prefix):
        twin = copy.copy(self)
        twin.prefix = prefix
        return twin


def with_prefix(driver, store, prefix):
    mine = store.under(prefix)
    return replace(
        driver,
        participants={mine.name: mine},
        about=replace(ORDERS, prefix=prefix),
        former=lambda other: [{mine.name: mine.under(other)}],
    )


def open_ones(store):
    return [t.state for t in store.txns.values()].count(TxnState.OPEN)


def test_what_is_open_under_a_former_prefix_is_swept_even_if_the_first_sweep_fails(driver):
    store = Prefixed()
    old, new = (with_prefix(driver, store, prefix) for prefix in ("kafka2pc", "mine"))
    write(old, 0)
    store.begin(replace(restore(old, 0), batch_id=1))  # a straggler of the old run
    store.begin(replace(restore(old, 0), batch_id=1))

    def fails(fn, items):
        raise ConnectionError("after the claim")

    with pytest.raises(ConnectionError):
        restore(new.within(each=fails), 1)
    assert open_ones(store) == 2
    restore(new, 1)
    assert open_ones(store) == 0


def test_to_end_all_ends_what_is_open_under_a_former_prefix_too(driver, monkeypatch):
    store = Prefixed()
    old, new = (with_prefix(driver, store, prefix) for prefix in ("kafka2pc", "mine"))
    write(old, 0)
    store.begin(replace(restore(old, 0), batch_id=1))
    with monkeypatch.context() as m, pytest.raises(OutcomeUnknown, match="still open: kafka2pc-"):
        m.setattr(Prefixed, "abort", lambda self, c: Outcome.UNKNOWN)
        end_all(new)
    end_all(new)
    assert open_ones(store) == 0 and store.read() == ["row"]


def test_after_an_adoption_with_another_prefix_the_former_one_is_swept(driver):
    store = Prefixed()
    old, new = (with_prefix(driver, store, prefix) for prefix in ("kafka2pc", "mine"))
    store.begin(restore(old, 0))
    adopt(new)
    write(new, 0)
    assert open_ones(store) == 0 and store.read() == ["row"]


def test_a_late_task_under_a_former_prefix_is_ended_with_the_next_batch(driver, tmp_path):
    """It began after the claim of the run with the new prefix, and after the sweep of that run."""
    old = FileParticipant(f"{tmp_path}/out", prefix="old", format="json")
    new = old.under("new")
    old, new = (replace(driver, participants={s.name: s}) for s in (old, new))
    first = restore(old, 0)
    commit(old, [precommit([old.participants["file"]], first, [])], 0)
    late = restore(old, 1, mine=first.token)
    second = restore(new, 1)
    [store] = old.participants.values()
    store.begin(late).flush()
    assert len(store.in_doubt(driver.query_id)) == 1
    commit(new, [precommit(list(new.participants.values()), second, [])], 1)
    assert store.in_doubt(driver.query_id) == []


@pytest.mark.parametrize("prefix", ["kafka2pc", "mine"])
def test_an_empty_log_is_refused_whatever_the_prefix(driver, prefix):
    """The option that names the log and the prefix were changed, perhaps together."""
    store = Prefixed()
    write(with_prefix(driver, store, "kafka2pc"), 0)
    other = replace(with_prefix(driver, store, prefix), log=MemoryLog("elsewhere"))
    with pytest.raises(StaleCheckpoint, match="decision log is empty"):
        restore(other, 0)
    assert other.log.slots() == [] and store.read() == ["row"]


def test_the_folder_that_an_adoption_leaves_is_marked(driver, tmp_path):
    write(driver, 0)
    moved = copied(driver, tmp_path)
    query = Query(place="copy", query_id=driver.query_id, log=moved.log, checkpoint="file:///copy")
    assert adopt_place(query).slot == Slot(0, 2)
    with pytest.raises(MovedLog, match="and this run uses file:///.*/orders/kafka2pc"):
        restore(driver, 1)
    assert adopt_place(query) is None
    write(moved, 1)


def test_an_older_copy_is_not_adopted(driver, tmp_path):
    write(driver, 0)
    moved = copied(driver, tmp_path)
    write(driver, 1)
    query = Query(place="copy", query_id=driver.query_id, log=moved.log, checkpoint="file:///copy")
    with pytest.raises(StaleCheckpoint, match="holds COMMIT 1.1, and its copy"):
        adopt_place(query)
    write(driver, 2)


def test_a_replay_behind_a_later_batch_is_refused(driver):
    """A checkpoint that was turned back, or a new one under an old name, would drain what it has
    never written.
    """
    for batch_id in range(3):
        write(driver, batch_id)
    with pytest.raises(StaleCheckpoint, match="about to replay batch 1, but its log holds batch 2"):
        restore(driver, 1)


def test_a_replay_behind_a_claim_is_drained(driver):
    """A finished job has a claim of batch 1, and `kafka2pc restore` claims the next batch to fence
    a run.
    """
    write(driver, 0)
    claim(driver, 1)
    assert restore(driver, 0).mode is Mode.DRAIN


def test_participants_are_compared_with_a_record_of_the_old_form_too(driver, store):
    second = MemoryParticipant("second")
    both = replace(driver, participants={store.name: store, second.name: second}, log=MemoryLog())
    decide_only(both, 0)
    slot = Slot(0, 1)
    both.log.records[slot] = replace(both.log.records[slot], identity=None, rows=None, bytes=None)
    with pytest.raises(UnfinishedBatch, match="participants was memory, second and is memory"):
        restore(replace(driver, log=both.log), 0)
    assert store.read() == second.read() == []


def test_other_participants_are_adopted_unless_the_batch_is_decided_for_one_that_is_missing(
    driver, store
):
    second = MemoryParticipant("second")
    both = replace(driver, participants={store.name: store, second.name: second})
    prepare(both, 0)
    adopt(driver)
    write(driver, 0)
    decide_only(both, 1)
    with pytest.raises(UnfinishedBatch, match="decided for second") as e:
        adopt(driver)
    assert "The batch is decided" in e.value.risk


# -- empty logs --


@pytest.mark.parametrize("state", ["open", "committed"])
def test_an_empty_log_is_not_the_log_of_a_query_that_has_written(state, driver):
    if state == "open":
        prepare(driver, 0)
    else:
        write(driver, 0)
    lost = replace(driver, log=MemoryLog())
    with pytest.raises(StaleCheckpoint, match="this decision log is empty"):
        restore(lost, 1)
    assert lost.log.records == {}


def test_a_claim_that_comes_while_the_stores_are_asked_is_no_false_alarm(driver, store):
    class Slow(MemoryParticipant):
        def traces(self, query_id):
            prepare(driver, 0)  # another driver is faster
            return store.traces(query_id)

    slow = Slow(store.name)
    assert restore(replace(driver, participants={slow.name: slow}), 0).attempt == 2


# -- put back from a backup --


def backup(driver, tmp_path):
    """A copy of the log; the function that puts it back."""
    kept, place = tmp_path / "backup", tmp_path / "orders" / "kafka2pc"
    shutil.copytree(place, kept)

    def put_back():
        shutil.rmtree(place)
        shutil.copytree(kept, place)

    return put_back


@pytest.mark.parametrize("state", ["open", "committed"])
def test_a_log_that_lacks_the_claim_of_a_later_run_is_refused(state, driver, tmp_path):
    write(driver, 0)
    put_back = backup(driver, tmp_path)
    if state == "open":
        prepare(driver, 1)
    else:
        write(driver, 1)
    put_back()
    before = content(driver.log)
    for _ in range(2):
        with pytest.raises(StaleCheckpoint, match="knows 1 later transactions") as caught:
            restore(driver, 1)
    assert "put back from a backup" in caught.value.why and "written twice" in caught.value.risk
    assert content(driver.log) == before, "nothing was claimed"


def go_on(driver, store, token, batch_id):
    """The next batch of the run with this token."""
    plan = restore(driver, batch_id, mine=token)
    commit(driver, [precommit([store], plan, iter([["row"]]))], batch_id)


@pytest.mark.parametrize("behind", ["claim", "commit 0", "commit 1"])
@pytest.mark.parametrize("workers", ["kept", "new"])
def test_commits_that_no_record_names_are_refused(behind, workers, driver, store, tmp_path):
    """The run had claimed before the backup. A slow trigger has new workers for each batch, and so
    new ids; a fast one uses its ids again.
    """
    first = prepare(driver, 0)
    if behind == "claim":
        put_back = backup(driver, tmp_path)
    commit(driver, [first], 0)
    for batch_id in (1, 2):
        if behind == f"commit {batch_id - 1}":
            put_back = backup(driver, tmp_path)
        if workers == "new":
            store._names = Names()
        go_on(driver, store, first.plan.token, batch_id)
    put_back()
    lost = {"claim": 2 if workers == "kept" else 3, "commit 0": 2, "commit 1": 1}[behind]
    with pytest.raises(StaleCheckpoint, match=f"knows {lost} later transactions"):
        restore(driver, 3)


@pytest.mark.parametrize("command", [fence, end_all])
@pytest.mark.parametrize("left", ["nothing", "a batch"])
def test_no_command_makes_a_log_that_was_put_back_look_right(left, command, driver, tmp_path):
    """Its claim would be newer than all that the store knows, and the next start would go on."""
    (tmp_path / "orders" / "kafka2pc").mkdir(parents=True, exist_ok=True)
    if left == "a batch":
        write(driver, 0)
    put_back = backup(driver, tmp_path)
    write(driver, len(driver.log.batches()))
    put_back()
    before = content(driver.log)
    for ask in (command, command, partial(restore, batch_id=1)):
        with pytest.raises(StaleCheckpoint):
            ask(driver)
    assert content(driver.log) == before, "nothing was claimed"


def test_a_log_that_was_put_back_and_adopted_is_refused_by_the_next_start(driver, store, tmp_path):
    """The commit that its records do not name is of an older run than the newest record."""
    first = prepare(driver, 0)
    commit(driver, [first], 0)
    put_back = backup(driver, tmp_path)
    go_on(driver, store, first.plan.token, 1)
    put_back()
    moved = replace(driver, about=replace(driver.about, topics=("another",)))
    adopt(moved)
    with pytest.raises(StaleCheckpoint, match="knows 1 later transactions"):
        restore(moved, 1)


def test_with_a_store_that_does_not_recall_it_is_not_noticed(driver, store, tmp_path):
    """As the guide says."""

    class Forgetful(MemoryParticipant):
        committed_later = None

    forgetful = Forgetful(store.name)
    driver = replace(driver, participants={store.name: forgetful})
    first = prepare(driver, 0)
    commit(driver, [first], 0)
    put_back = backup(driver, tmp_path)
    go_on(driver, forgetful, first.plan.token, 1)
    put_back()
    write(driver, 1)
    assert len(forgetful.read()) == 3, "batch 1 is there twice"


def test_ids_whose_commits_were_purged_are_no_false_alarm(driver, store):
    """A slow trigger: each batch has new workers."""
    few = driver.within(keep_batches=1)
    first = prepare(few, 0)
    commit(few, [first], 0)
    for batch_id in range(1, 5):
        store._names = Names()
        go_on(few, store, first.plan.token, batch_id)
    assert restore(few, 5).mode is Mode.WRITE


def test_a_commit_by_another_run_meanwhile_is_no_false_alarm(driver, store):
    """It decides and commits after the log was listed."""
    first = prepare(driver, 0)
    ask = store.committed_later

    def after_a_commit(last):
        commit(driver, [first], 0)
        return ask(last)

    store.committed_later = after_a_commit
    assert restore(driver, 0).mode is Mode.DRAIN


def test_after_a_commit_by_hand_an_operator_lets_the_query_go_on(driver, store):
    """The command claims before it commits."""
    first = prepare(driver, 0)
    fence(driver)
    store.commit(first.committables[0])
    assert restore(driver, 0).mode is Mode.WRITE


def test_a_commit_by_hand_without_a_claim_is_refused(driver, store):
    first = prepare(driver, 0)
    store.commit(first.committables[0])
    for ask in (fence, partial(restore, batch_id=0)):
        with pytest.raises(StaleCheckpoint, match="needs --checkpoint"):
            ask(driver)


def test_claims_that_were_removed_and_batches_that_were_purged_are_no_false_alarm(driver):
    """The ids of older runs stay known, and their records go."""
    few = driver.within(keep_claims=0, keep_batches=0)
    for batch_id in range(4):
        for _ in range(3):
            prepare(few, batch_id)
        write(few, batch_id)
    assert restore(few, 4).mode is Mode.WRITE


def test_a_slot_that_was_purged_and_is_won_again_is_no_false_alarm(driver, store):
    """By a run that slept before its create. The claim of the run that wrote is gone."""
    few = driver.within(keep_batches=0)
    first = prepare(few, 0)
    slept = replace(newest_record(few.log), token=new_token(0, 1))
    commit(few, [first], 0)
    go_on(few, store, first.plan.token, 1)
    assert few.log.create(slept) == slept
    assert restore(few, 2).mode is Mode.WRITE


def test_another_cluster_is_still_refused(driver, store):
    write(driver, 0)
    store.store_id = lambda: "other"
    with pytest.raises(WrongCluster):
        restore(driver, 1)


def test_a_store_that_keeps_an_id_says_whether_a_record_is_about_it(driver, store):
    write(driver, 0)
    recorded = store.store_id()
    store.store_id = lambda: "the same store at another path"
    store.differs = lambda kept: "" if kept == recorded else "another one"
    write(driver, 1)
    recorded = "the id of a third store"
    with pytest.raises(WrongCluster, match="connected to another one") as e:
        restore(driver, 2)
    assert "where a link points" in str(e.value)
