"""Codes of errors are the same in every release, and their fields reach the process that asks."""

import pickle
import pkgutil
import re
import subprocess
import sys
import traceback
import uuid
from importlib import import_module

import numpy as np
import pytest

import kafka2pc
from kafka2pc import error_of
from kafka2pc.protocol.error_fields import Affected, Place
from kafka2pc.protocol.errors import (
    DECIDED,
    NOTHING_WRITTEN,
    BadOption,
    LostTransaction,
    OutcomeUnknown,
    Refused,
    TwoPhaseError,
    describe_error,
)
from kafka2pc.protocol.phases.finish import after_the_decision
from kafka2pc.spark.failures import error_classes

# Never change a line: alarms of users search for it. A new class adds one. A class that gets
# another name keeps its code, as the attribute `code`.
CODES = """
BAD_OPTION BAD_ROW BROKER_UNREACHABLE COMPLETE_WRITE CORRUPT_DECISION INVALID_RECORD LOG_UNWRITABLE
LOST_TRANSACTION MISSING_LIBRARY MOVED_LOG NAME_WORN_OUT NOT_AUTHORIZED NO_SUCH_HOST OUTCOME_UNKNOWN
PASSED_OVER PRECOMMIT_FAILED RECORDS_BROKEN RECORDS_GONE REFUSED REOPENED REPLAY_DIFFERS
STALE_CHECKPOINT STORE_UNREACHABLE SUPERSEDED TIMEOUT_TOO_LARGE TOO_OLD TOPIC_GONE TOPIC_RECREATED
UNCLEAR_ANSWER UNFINISHED_BATCH UNKNOWN_FORMAT WRONG_CLUSTER
""".split()
NOT_FOR_USERS = ("kafka2pc.proof", "kafka2pc.local", "kafka2pc.course")

LOST = Affected(
    transactional_id="a-0",
    producer_id=1000,
    epoch=3,
    places=(
        Place(topic="orders", partition=0, records=12, first_offset=100, last_offset=111),
        Place(topic="orders", partition=4, records=1),
    ),
)
FIELDS = {
    "query_id": "q",
    "batch_id": 7,
    "transactions": (LOST, Affected(transactional_id="a-1")),
    "within_ms": 500,
    "causes": ("NOT_ENOUGH_REPLICAS",),
}


def below(kind):
    for each in kind.__subclasses__():
        yield each
        yield from below(each)


def all_classes():
    for found in pkgutil.walk_packages(kafka2pc.__path__, "kafka2pc."):
        if not found.name.startswith(NOT_FOR_USERS):
            import_module(found.name)
    ours = lambda module: module.startswith("kafka2pc.") and not module.startswith(NOT_FOR_USERS)
    return {kind for kind in below(TwoPhaseError) if ours(kind.__module__)}


def test_each_class_has_one_code_and_no_code_changes():
    codes = sorted(kind.code for kind in all_classes())
    assert codes == [f"KAFKA2PC.{code}" for code in sorted(CODES)]


def test_a_class_with_another_name_keeps_its_code():
    class NotAllowed(TwoPhaseError):
        code = "KAFKA2PC.NOT_AUTHORIZED"

    class Below(NotAllowed):
        pass

    try:
        assert str(NotAllowed("x")).startswith("[KAFKA2PC.NOT_AUTHORIZED] x\n")
        assert Below.code == "KAFKA2PC.BELOW"
    finally:
        NotAllowed.code = "KAFKA2PC.ONLY_HERE"


def spoken(error):
    """As the process of Python prints it, in a text of Spark."""
    lines = "".join(traceback.format_exception(error))
    return (
        f"[STREAM_FAILED] Query terminated with exception: {lines} SQLSTATE: 38000\n=== Streaming"
    )


@pytest.mark.parametrize("kind", sorted(all_classes(), key=lambda kind: kind.code))
def test_a_class_and_its_fields_come_back_from_text_and_from_a_pickle(kind):
    error = kind("batch 7: what happened", action="Do this.", **FIELDS)
    assert str(error).startswith(f"[{kind.code}] batch 7: what happened\n  why: ")
    for back in (error_of(spoken(error)), pickle.loads(pickle.dumps(error))):
        assert type(back) is kind and str(back) == str(error)
        assert {name: getattr(back, name) for name in FIELDS} == FIELDS
        assert back.transactional_ids == ("a-0", "a-1") and back.records is None
    assert back.partitions == LOST.places and LOST.records == 13


FRESH = """
from kafka2pc import error_of
codes = "COMPLETE_WRITE", "TOO_OLD", "TIMEOUT_TOO_LARGE", "INVALID_RECORD"
print(*(type(error_of(f"[KAFKA2PC.{code}] x")).__name__ for code in codes))
"""


def test_error_of_knows_the_classes_that_no_module_has_imported():
    done = subprocess.run([sys.executable, "-c", FRESH], capture_output=True, text=True)
    names = done.stdout.split()
    assert names == "CompleteWrite TooOld TimeoutTooLarge InvalidRecord".split(), done.stderr
    assert set(error_classes()) >= {f"KAFKA2PC.{code}" for code in CODES}


def test_an_error_after_the_decision_keeps_its_fields():
    with pytest.raises(Refused) as caught, after_the_decision():
        raise Refused("x", risk=NOTHING_WRITTEN, **FIELDS)
    assert caught.value.risk == DECIDED
    assert {name: getattr(caught.value, name) for name in FIELDS} == FIELDS
    assert error_of(spoken(caught.value)).risk == DECIDED


def test_the_newest_of_several_errors_counts():
    texts = [spoken(kind("x", batch_id=n)) for n, kind in enumerate((BadOption, LostTransaction))]
    assert [error_of("\n".join(order)).batch_id for order in (texts, texts[::-1])] == [1, 0]
    group = spoken(ExceptionGroup("two", [BadOption("a"), OutcomeUnknown("b", batch_id=3)]))
    assert (error_of(group).what, error_of(group).batch_id) == ("b", 3)
    assert error_of(group).action == OutcomeUnknown.action


def test_an_error_that_holds_the_text_of_another_one_is_not_taken_for_it():
    inner = Refused("inside", batch_id=2)
    outer = TwoPhaseError(spoken(inner), code="KAFKA2PC.OUTER", why="w", risk="r", action="a")
    assert type(error_of(str(outer))) is Refused and error_of(str(outer)).batch_id == 2
    quoting = OutcomeUnknown("o", why=f"it could not be ended: {describe_error(inner)}.")
    assert str(error_of(spoken(quoting))) == str(quoting)


def test_a_text_that_was_cut_off_claims_nothing_about_the_data():
    text = spoken(BadOption("acks=1"))
    for end in range(text.index("acks=1") + 7, text.index("Correct the option")):
        found = error_of(text[:end])
        assert type(found) is BadOption and found.what == "acks=1"
        assert found.risk == found.action != BadOption.risk and "cut off" in found.risk
    assert error_of(text[: text.index("[KAFKA2PC") + 5]) is None


def test_no_error_of_ours_is_none():
    for other in (None, "", "[STREAM_FAILED] Query", ValueError("x"), KeyError("KAFKA2PC")):
        assert error_of(other) is None


def test_the_causes_of_an_exception_are_looked_at():
    try:
        try:
            raise BadOption("x", **FIELDS)
        except BadOption as e:
            raise RuntimeError("the job failed") from e
    except RuntimeError as e:
        assert error_of(e).batch_id == 7


def test_an_error_in_one_line_begins_with_its_code():
    assert describe_error(BadOption("acks=1")) == "[KAFKA2PC.BAD_OPTION] acks=1"
    assert describe_error(ValueError("x")) == "ValueError: x"
    assert not re.search(r"\[", str(TwoPhaseError("a warning", why="w", risk="r", action="a")))


def test_a_text_that_is_cut_off_has_the_class_of_its_newest_error():
    """What keeps logs may keep only the beginning of a long one."""
    older, newer = OutcomeUnknown("batch 7: no clear answer"), LostTransaction("batch 7: 12 rows")
    text = f"a.B: {older}\n\nThe above exception was the direct cause of:\n\na.C: {newer}\n"
    for end in range(text.rindex("  why: ") + len("  why: "), len(text)):
        assert type(error_of(text[:end])) is LostTransaction, text[:end]
    mentioned = f"a.C: {newer}\nWARNING: tidying up failed: {describe_error(older)}\n"
    assert type(error_of(mentioned)) is LostTransaction


def test_a_field_of_a_later_version_hides_no_other_one():
    places = '[{"topic": "o", "new": 2}]'
    transactions = f'[{{"transactional_id": "t", "new": 1, "places": {places}}}]'
    line = f'{{"query_id": "q", "new": 0, "transactions": {transactions}}}'
    found = error_of(f"{LostTransaction('x')}\n  fields: {line}\n")
    assert found.query_id == "q"
    assert found.transactions == (Affected(transactional_id="t", places=(Place(topic="o"),)),)


def test_an_exception_in_a_group_is_looked_at():
    lost = LostTransaction("x", **FIELDS)
    assert error_of(ExceptionGroup("two jobs", [ValueError("y"), lost])) is lost


def test_fields_of_any_type_hide_no_error():
    """A store of your own may take its numbers from NumPy, or not know its transactions."""
    one = np.int64(7)
    place = Place(topic="o", records=one)
    given = dict(
        query_id=uuid.UUID(int=1),
        batch_id=one,
        transactions=[Affected(transactional_id="t", producer_id=one, places=(place,))],
    )
    found = error_of(said(OutcomeUnknown("x", **given)))
    assert (found.batch_id, found.records, found.query_id) == (7, 7, str(uuid.UUID(int=1)))
    assert OutcomeUnknown("x", transactions=None, causes=None).transactions == ()


def said(error):
    return "".join(traceback.format_exception(error))
