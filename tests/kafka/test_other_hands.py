"""Other programs end a transaction of ours in a partition, and its coordinator does not know it:
refused before the decision, written again after it.
"""

import logging
from dataclasses import replace

import pytest
from confluent_kafka import Producer
from one_task_query import ROWS, abort_there, new_query  # noqa: F401  (the fixture)

from kafka2pc.kafka import aborted_rows
from kafka2pc.kafka.participant import KafkaParticipant
from kafka2pc.kafka.read.whole_topic import read_topic
from kafka2pc.kafka.wire.cluster import Cluster
from kafka2pc.kafka.wire.connection import NoAnswer
from kafka2pc.protocol.errors import LostTransaction, PrecommitFailed, Refused
from kafka2pc.protocol.log.decisions import Slot
from kafka2pc.protocol.log.questions import later_batch
from kafka2pc.protocol.messages import CommitMessage, Mode
from kafka2pc.protocol.names import known_name
from kafka2pc.protocol.operators.watch import finish_decided
from kafka2pc.protocol.participant import Outcome
from kafka2pc.protocol.phases import finish
from kafka2pc.protocol.phases import restore as restore_phase
from kafka2pc.protocol.phases.commit import commit
from kafka2pc.protocol.phases.decide import decide
from kafka2pc.protocol.phases.finish import complete
from kafka2pc.protocol.phases.restore import restore

pytestmark = [pytest.mark.kafka, pytest.mark.never_unsteady]
ENGINES = pytest.mark.parametrize("engine", ["columnar", "rows"])
# in how many of the two partitions that have rows
ENDED = pytest.mark.parametrize("ended", [1, 2])


@pytest.fixture
def query(new_query):  # noqa: F811
    made = new_query(partitions=2)
    made.columns = {"partition": [0, 1] * 3}
    return made


def hand(query, c, ended=2):
    abort_there(query.kafka.bootstrap_servers, c, *[(query.topic, n) for n in range(ended)])


# -- before the decision --


@ENGINES
@ENDED
def test_ended_before_the_decision_is_refused_and_the_replay_writes_it_again(
    new_query,  # noqa: F811
    engine,
    ended,
):
    query = new_query(engine=engine, partitions=2)
    query.columns = {"partition": [0, 1] * 3}
    driver, message = query.precommitted()
    [c] = message.committables
    hand(query, c, ended)
    with pytest.raises(Refused, match=f"not open at .*{query.topic}-0(.|\n)*coordinator") as caught:
        commit(driver, [message], 0)
    places = [(p.partition, p.first_offset) for p in caught.value.transactions[0].places]
    assert sorted(places) == [(n, 0) for n in range(ended)]
    assert query.run() is Mode.WRITE
    assert sorted(query.seen()) == ROWS


def test_a_row_that_is_written_after_the_end_opens_another_transaction(query):
    """It is open in the partition, and begins behind the first row."""
    driver = query.start()
    plan = restore(driver, 0)
    with query.store.begin(plan) as txn:
        txn.write(query.batch(["a"]))
        txn.flush()
        hand(query, query.store.in_doubt(query.id)[0], 1)
        txn.write(query.batch(["b"]))
        txn.flush()
        c = txn.precommit()
    [[gone]] = query.store.gone([c], open_there=True)
    assert (gone.ended, gone.first_offset) == (True, 0)


def test_open_transactions_are_decided_and_committed(query):
    driver, message = query.precommitted()
    for _ in range(2):  # the second time the leaders are known
        assert query.store.gone(message.committables, open_there=True) == [()]
    commit(driver, [message], 0)
    assert sorted(query.seen()) == ROWS


def test_without_read_the_last_stable_offset_proves_the_end(query, monkeypatch):
    driver, message = query.precommitted()
    monkeypatch.setattr("kafka2pc.kafka.rows_gone.may_read", lambda row: False)
    for _ in range(2):
        assert query.store.gone(message.committables, open_there=True) == [()]
    hand(query, message.committables[0], 1)
    with pytest.raises(Refused, match=f"not open at .*{query.topic}-0"):
        commit(driver, [message], 0)
    assert query.store.cluster.unreadable == {query.topic}


def test_without_read_nothing_is_proven_behind_an_older_transaction(query, monkeypatch):
    plan = restore(query.start(), 0)
    with query.store.begin(plan) as older:
        older.write(query.batch(ROWS))
        older.flush()
        message = query.task(plan)
        monkeypatch.setattr("kafka2pc.kafka.rows_gone.may_read", lambda row: False)
        hand(query, message.committables[0])
        assert query.store.gone(message.committables, open_there=True) == [()]


@pytest.mark.parametrize("answer", [6, 29, None])
def test_a_leader_that_does_not_say_what_is_open_is_asked_again(query, monkeypatch, answer):
    """An error, READ that was taken away just now, or no answer at all, once."""
    driver, message = query.precommitted()
    hand(query, message.committables[0], 1)
    real, left = Cluster.ask_each, [True]

    def ask(self, requests):
        found = real(self, requests)
        for n, (request, _) in enumerate(requests):
            if request.name == "DescribeProducersRequest" and left:
                left.clear()
                found[n] = refused(found[n], answer) if answer else NoAnswer("patched")
        return found

    monkeypatch.setattr(Cluster, "ask_each", ask)
    with pytest.raises(Refused, match=f"not open at .*{query.topic}-0"):
        commit(driver, [message], 0)
    assert not left


def refused(answer, code):
    for topic in answer.topics:
        for row in topic.partitions:
            row.error_code, row.active_producers = code, []
    return answer


def test_brokers_that_do_not_know_the_question_are_asked_for_the_last_stable_offset(
    query, monkeypatch
):
    driver, message = query.precommitted()
    hand(query, message.committables[0], 1)
    known = Cluster.highest
    new = "DescribeProducersRequest"
    old = lambda self, request: -1 if request.__name__ == new else known(self, request)
    monkeypatch.setattr(Cluster, "highest", old)
    with pytest.raises(Refused, match=f"not open at .*{query.topic}-0"):
        commit(driver, [message], 0)


# -- after it --


@ENDED
@pytest.mark.parametrize("told", ["open", "committed"])
@pytest.mark.parametrize("spark", ["replays it", "goes on"])
def test_ended_after_the_decision_is_written_again_and_the_rest_is_not(query, ended, told, spark):
    [c] = query.decided().committables
    hand(query, c, ended)
    if told == "committed":
        assert query.store.commit(c) is Outcome.DONE
    if spark == "replays it":
        # a restart may find that nothing of it is visible, and then Spark writes it again
        query.run()
    else:
        restore(query.start(), 1)
    assert sorted(query.seen()) == ROWS
    restore(query.start(), 1)
    assert sorted(query.seen()) == ROWS


def test_a_batch_that_is_reopened_is_planned_although_its_store_took_the_commit(query):
    """Nothing of it is visible, so Spark writes it again; that its transactions count as committed
    is no sign of a log that was put back.
    """
    driver = query.start()
    plan = restore(driver, 0, offsets_hash="offsets 0")
    message = query.task(plan)
    decide(driver, message.plan, [message])
    hand(query, message.committables[0])
    driver = query.start()
    plan = restore(driver, 0, offsets_hash="offsets 0")
    assert plan.mode is Mode.WRITE
    commit(driver, [query.task(plan)], 0)
    assert sorted(query.seen()) == ROWS


def test_what_was_proven_aborted_is_written_again_although_it_cannot_be_read_any_more(
    query, monkeypatch
):
    """A leader that is away for a moment is no reason to call rows lost."""
    [c] = query.decided().committables
    hand(query, c)
    real, asked = aborted_rows._proven, []

    def proven(cluster, cs, patience_s):
        asked.append(patience_s)
        return {} if len(asked) == 3 else real(cluster, cs, patience_s)

    monkeypatch.setattr(aborted_rows, "_proven", proven)
    query.run()
    assert len(asked) > 3 and sorted(query.seen()) == ROWS


def test_a_loss_that_a_start_has_seen_is_reported_although_another_run_goes_on(query, monkeypatch):
    """The run that is ahead may not have looked."""
    [c] = query.decided().committables
    hand(query, c)
    driver = query.start()
    real = finish.aborted_parts

    def aborted_parts(driver, cs):
        found = real(driver, cs)
        if not later_batch(query.log, 0):
            plan = restore_phase._plan(driver, Slot(1, 0), c_token, "")
            decide(driver, query.task(plan).plan, [])
        return found

    c_token = known_name(c.transactional_id).token
    monkeypatch.setattr(finish, "aborted_parts", aborted_parts)
    with pytest.raises(LostTransaction, match="offsets 0 to"):
        restore(driver, 0)


def test_an_open_transaction_of_a_task_in_front_hides_nothing_from_a_start(query):
    """Spark has begun a task twice. What the first attempt has left open is aborted, and then what
    is behind it can be read.
    """
    driver = query.start()
    plan = restore(driver, 0)
    left, message = query.task(plan), query.task(plan)
    decide(driver, message.plan, [message])
    hand(query, message.committables[0])
    assert left.committables[0].partitions[0].first_offset == 0
    query.run()
    assert sorted(query.seen()) == ROWS


def take_its_id(query, c):
    """A producer with our id: InitProducerId aborts what is open."""
    Producer(query.kafka.client_conf | {"transactional.id": c.transactional_id}).init_transactions(
        30
    )


@pytest.mark.parametrize("end", [take_its_id, lambda query, c: query.store.abort(c)])
@pytest.mark.parametrize("decided", [False, True])
def test_an_end_through_the_coordinator_is_refused_or_written_again(query, decided, end):
    driver, message = query.precommitted()
    if decided:
        decide(driver, message.plan, [message])
    end(query, message.committables[0])
    if not decided:
        with pytest.raises(Refused, match="before the decision"):
            commit(driver, [message], 0)
    query.run()
    assert sorted(query.seen()) == ROWS


@pytest.mark.parametrize("policy", ["fail", "skip"])
def test_what_is_not_to_be_repaired_is_reported(query, policy, caplog):
    hand(query, query.decided().committables[0], 1)
    if policy == "skip":
        restore(query.start(lost_transactions="skip"), 0)
        assert "given up" in caplog.text and f"{query.topic}-0: 3 at offsets 0 to 2" in caplog.text
        return
    with pytest.raises(LostTransaction) as caught:
        restore(query.start(lost_transactions="fail"), 0)
    [lost] = caught.value.transactions
    assert [(p.partition, p.records) for p in lost.places] == [(0, 3)]


def test_of_rows_that_are_gone_the_loss_is_named(query):
    [c] = query.decided().committables
    hand(query, c, 1)
    query.remove(2)
    with pytest.raises(LostTransaction, match=f"gone are offsets 0 to 1 of {query.topic}-0"):
        complete(query.start(), query.log.chain(0)[-1])
    # nothing was committed: the rest is when the operator gives the loss up
    assert read_topic(query.kafka.client_conf, query.topic) == []
    restore(query.start(lost_transactions="skip"), 0)
    assert sorted(query.seen()) == ["b", "d", "f"]


def test_a_transaction_that_is_given_up_is_named_with_all_that_is_lost(query):
    """Rows are removed in one partition, and another program has ended it in the other one."""
    [c] = query.decided().committables
    abort_there(query.kafka.bootstrap_servers, c, (query.topic, 1))
    query.remove(2)
    with pytest.raises(LostTransaction) as caught:
        restore(query.start(), 0)
    [lost] = caught.value.transactions
    assert sorted((p.partition, p.first_offset, p.last_offset) for p in lost.places) == [
        (0, 0, 1),
        (1, 0, 2),
    ]
    assert "another program" in caught.value.why


def test_rows_that_are_gone_do_not_keep_others_from_being_written_again(query):
    """Two transactions are aborted; the rows of one of them are removed since."""
    driver = query.start()
    plan = restore(driver, 0)
    messages = []
    for task, rows in enumerate((["a"], ["b"], ["c"])):
        query.columns = {"partition": [task % 2]}
        messages.append(query.task(replace(plan, task=task), rows))
    decided = decide(driver, plan, messages)
    for c in decided.committables[:2]:
        assert query.store.abort(c) is Outcome.DONE
    assert query.store.commit(decided.committables[2]) is Outcome.DONE
    query.settle()
    query.remove(1)
    with pytest.raises(LostTransaction, match=f"gone are offsets 0 to 0 of {query.topic}-0") as e:
        restore(query.start(), 0)
    assert [t.transactional_id for t in e.value.transactions] == [
        decided.committables[0].transactional_id
    ]
    assert sorted(query.seen()) == ["b", "c"]
    restore(query.start(lost_transactions="skip"), 0)
    assert sorted(query.seen()) == ["b", "c"]


def test_a_watcher_commits_the_rest_and_says_what_was_aborted(query):
    decided = query.decided()
    hand(query, decided.committables[0], 1)
    found = finish_decided(query.start(), decided)
    assert found.committed == decided.committables
    [aborted] = found.aborted
    assert [p.partition for p in aborted.partitions] == [0]
    assert sorted(query.seen()) == ["b", "d", "f"]


def test_many_transactions_in_one_partition_are_each_judged(query):
    driver = query.start()
    plan = restore(driver, 0)
    messages = [query.task(replace(plan, task=n)) for n in range(5)]
    decided = decide(driver, plan, messages)
    for c in decided.committables[1::2]:
        hand(query, c, 1)
    restore(query.start(), 0)
    assert sorted(query.seen()) == sorted(ROWS * 5)


def test_what_a_repair_leaves_because_its_copy_takes_too_long_is_written_next(query, monkeypatch):
    driver = query.start()
    plan = restore(driver, 0)
    messages = [query.task(replace(plan, task=n)) for n in range(3)]
    decided = decide(driver, plan, messages)
    for c in decided.committables:
        hand(query, c, 1)
        assert query.store.commit(c) is Outcome.DONE
    real = KafkaParticipant.write_again

    def slow(self, lost, plan):
        if len(lost) > 1:
            raise PrecommitFailed("it takes too long")
        return real(self, lost, plan)

    monkeypatch.setattr(KafkaParticipant, "write_again", slow)
    restore(query.start(), 1)
    assert sorted(query.seen()) == sorted(ROWS * 3)


def test_a_copy_whose_transaction_is_ended_too_is_written_again(query, monkeypatch):
    hand(query, query.decided().committables[0], 1)
    real, left = finish.repair, [True]

    def repair(*given, **more):
        repaired = real(*given, **more)
        if left:
            left.clear()
            hand(query, repaired.committables[-1], 1)
        return repaired

    monkeypatch.setattr(finish, "repair", repair)
    restore(query.start(), 1)
    assert (sorted(query.seen()), left) == (ROWS, [])


def test_a_partition_that_can_be_read_only_then_is_written_again_with_the_others(
    new_query,  # noqa: F811
    monkeypatch,
):
    query = new_query(partitions=3)
    query.columns = {"partition": [0, 1, 2] * 2}
    other = Producer(query.kafka.client_conf | {"transactional.id": query.topic + "-other"})
    other.init_transactions(30)
    other.begin_transaction()
    other.produce(query.topic, b"of another program", partition=2)
    other.flush()
    [c] = query.decided().committables
    abort_there(query.kafka.bootstrap_servers, c, (query.topic, 0), (query.topic, 2))
    query.store.commit(c)
    real, left = finish.repair, [True]

    def repair(*given, **more):
        if left:
            left.clear()
            other.abort_transaction(30)
        return real(*given, **more)

    monkeypatch.setattr(finish, "repair", repair)
    restore(query.start(), 1)
    assert sorted(query.seen()) == ROWS


def test_rows_of_which_a_part_is_committed_are_never_written_twice(query, monkeypatch):
    """Another program has ended the transaction while the task wrote, and READ was missing before
    the decision.
    """
    with monkeypatch.context() as without_read:
        without_read.setattr("kafka2pc.kafka.rows_gone.may_read", lambda row: False)
        without_read.setattr(KafkaParticipant, "gone", lambda self, cs, **_: [()] * len(cs))
        driver = query.start()
        plan = restore(driver, 0)
        with query.store.begin(plan) as txn:
            txn.write(query.batch(["a"]))
            txn.flush()
            hand(query, query.store.in_doubt(query.id)[0], 1)
            txn.write(query.batch(["b"]))
            txn.flush()
            c = txn.precommit()
        commit(driver, [CommitMessage(plan=plan, committables=(c,), rows=2, bytes=2)], 0)
    for batch_id in (0, 1):
        with pytest.raises(LostTransaction, match=f"{query.topic}-0, .* a part is committed"):
            restore(query.start(), batch_id)
    restore(query.start(lost_transactions="skip"), 1)
    assert query.seen() == ["b"]


# -- the gate --


def test_a_gate_that_is_ended_before_the_decision_is_not_decided(new_query, caplog):  # noqa: F811
    query = new_query(gated=True)
    driver, message = query.precommitted()
    [gate] = message.plan.gates
    hand(query, replace(gate, partitions=message.committables[0].partitions), 1)
    with caplog.at_level(logging.WARNING, "kafka2pc"):
        commit(driver, [message], 0)
    assert "its gate has ended already" in caplog.text
    assert query.log.chain(0)[-1].gates == ()
    assert (sorted(query.seen()), query.store.in_doubt(query.id)) == (ROWS, [])


def test_a_gate_that_is_ended_after_the_decision_is_reported(new_query, caplog):  # noqa: F811
    query = new_query(gated=True)
    decided = query.decided()
    [gate] = decided.gates
    hand(query, replace(gate, partitions=decided.committables[0].partitions), 1)
    with caplog.at_level(logging.WARNING, "kafka2pc"):
        restore(query.start(), 0)
    assert "its gate has ended already" in caplog.text
    assert (sorted(query.seen()), query.store.in_doubt(query.id)) == (ROWS, [])


def test_rows_that_are_ended_behind_a_gate_are_written_again(new_query):  # noqa: F811
    query = new_query(gated=True)
    [c] = query.decided().committables
    hand(query, c, 1)
    query.run()
    assert (sorted(query.seen()), query.store.in_doubt(query.id)) == (ROWS, [])
