"""The judge of the soak finds leaks: in made series, and in a real query that leaks."""

import json

import pytest

from kafka2pc.proof.drills.setups import Setup
from kafka2pc.proof.drills.soak import (
    BROKER,
    DECISION_LOG,
    IDS,
    JVM,
    LIMITS,
    Grows,
    Sample,
    judge,
    row_anomalies,
    soak_query,
    trends,
)

pytestmark = pytest.mark.never_unsteady
WORKERS = "task workers"


def series(kind, quantity, of_sample, count=60):
    """Samples of one quantity; `of_sample(n)` is its value in sample n."""
    return [
        Sample(at_s=n, values={(kind, quantity): 100 + of_sample(n), (BROKER, "threads"): 99})
        for n in range(count)
    ]


@pytest.mark.parametrize("quantity", LIMITS)
def test_a_leak_in_a_made_series_is_found_and_named(quantity):
    # half a run is 30 samples
    grows = LIMITS[quantity] / 30 + 0.01
    with pytest.raises(Grows, match=f"{WORKERS}: {quantity} grew by") as error:
        judge(trends(series(WORKERS, quantity, lambda n: grows * n)))
    assert BROKER not in error.value.what


@pytest.mark.parametrize("quantity", LIMITS)
@pytest.mark.parametrize(
    "of_sample",
    [
        lambda n: 0,
        lambda n: 1000 * (n % 7 == 0),
        lambda n: min(n, 20) * 50,
        lambda n: -n,
    ],
    ids=["constant", "peaks", "warm-up", "shrinks"],
)
def test_what_does_not_grow_is_not_found(quantity, of_sample):
    judge(trends(series(WORKERS, quantity, of_sample)))


def test_a_worker_that_is_replaced_all_the_time_hides_no_leak():
    one_in_three_samples = series(WORKERS, "started", lambda n: n // 3)
    with pytest.raises(Grows, match="task workers: started grew by 10.0"):
        judge(trends(one_in_three_samples))


def test_a_kind_of_process_that_appears_late_and_multiplies_is_found():
    samples = [Sample(at_s=n, values={("x", "count"): n}) for n in range(40)]
    late = [Sample(at_s=n, values={}) for n in range(40)] + samples
    with pytest.raises(Grows, match="x: count grew by 33.0"):
        judge(trends(late))


@pytest.mark.parametrize(
    ("kind", "quantity", "most"),
    [
        (JVM, "memory", 1e6),
        (BROKER, "memory", 1e6),
        (JVM, "threads", 236),
        (DECISION_LOG, "count", 108),
        (IDS, "count", 8),
    ],
)
def test_what_has_a_bound_of_its_own_may_grow_to_it(kind, quantity, most):
    judge(trends(series(kind, quantity, lambda n: n / 30 * most)))
    if most < 1e6:
        with pytest.raises(Grows):
            judge(trends(series(kind, quantity, lambda n: n / 30 * (most + 1))))


def test_too_few_samples_are_no_verdict():
    with pytest.raises(ValueError, match="5 samples"):
        trends(series(WORKERS, "memory", lambda n: n, count=5))


@pytest.mark.parametrize(
    ("found", "anomalies"),
    [
        ([3, 0, 2, 1], {}),
        ([0, 1, 3], {"lost": [2]}),
        ([0, 1, 2, 3, 1], {"duplicate": [1]}),
        ([0, 1, 2, 3, 4], {"never sent": [4]}),
        ([], {"lost": [0, 1, 2, 3]}),
    ],
)
def test_each_row_must_be_there_once(found, anomalies):
    assert row_anomalies(found, 4) == anomalies


@pytest.mark.nightly
@pytest.mark.kafka
@pytest.mark.spark
def test_a_query_whose_tasks_keep_files_and_memory_is_found(tmp_path):
    leak = {"faults": json.dumps({"leak": {"files": 8, "size": 4 * 2**20}})}
    with Setup(tmp_path, progress=None) as setup, pytest.raises(Grows) as error:
        soak_query(setup, 40, options=leak)
    for quantity in ("memory", "descriptors"):
        assert f"{WORKERS}: {quantity} grew by" in error.value.what
    assert "committer" not in error.value.what and "planner" not in error.value.what
