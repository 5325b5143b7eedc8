"""A batch is open while twoPhaseCommit is changed, or while brokers cease to offer KIP-939."""

from dataclasses import replace

import pytest
from dead_query_fixtures import ROWS, DeadQuery, find_open

from kafka2pc.kafka.wire.cluster import Cluster
from kafka2pc.kafka.wire.descriptions import describe_transactions
from kafka2pc.local.broker import LocalKafka
from kafka2pc.local.nodes import TWO_PHASE, write_node_settings
from kafka2pc.protocol.driver import Policy
from kafka2pc.protocol.errors import BadOption
from kafka2pc.protocol.phases.commit import commit
from kafka2pc.protocol.policies import retry_unknown

pytestmark = pytest.mark.never_unsteady

NEVER = 2**31 - 1  # the timeout in ms that DescribeTransactions names where there is none
ENDED = ("CompleteCommit", "CompleteAbort")


def fates(dead, states):
    """(state, can time out) of the query's transactions that are in `states`, sorted."""
    found = [t.transactional_id for t in find_open(dead.kafka, dead.prefix, states)]
    with Cluster(dead.conf) as cluster:
        described = describe_transactions(cluster, found).values()
    return sorted(
        (d.state, d.timeout_ms != NEVER)
        for d in described
        if not d.transactional_id.endswith("-probe")
    )


@pytest.mark.kafka
@pytest.mark.parametrize("decided", [True, False], ids=["decided", "not decided"])
@pytest.mark.parametrize(("before", "after"), [("off", "required"), ("required", "off")])
def test_two_phase_commit_is_switched_while_a_batch_is_open(
    kafka, tmp_path, before, after, decided
):
    dead = DeadQuery(kafka, tmp_path, two_phase=before).leave(decided)
    times_out = before == "off"
    assert fates(dead, ("Ongoing",)) == [("Ongoing", times_out)] * 2
    dead.how["two_phase"] = after
    for batch_id in (0, 1):
        driver = dead.run()
        commit(driver, dead.write(driver, batch_id), batch_id)
        (dead.place / "commits" / str(batch_id)).write_text("v1")
    assert dead.seen() == [*ROWS, "1a", "1b", "1c", "1d"]
    left, new = ("CompleteCommit" if decided else "CompleteAbort", times_out), not times_out
    written_anew = 2 if decided else 4
    wanted = [left] * 2 + [("CompleteCommit", new)] * written_anew
    assert fates(dead, ENDED) == sorted(wanted)


@pytest.mark.kafka
@pytest.mark.full
def test_a_decided_batch_is_committed_after_the_brokers_ceased_to_offer_kip_939(tmp_path):
    with LocalKafka(progress=None) as kafka:
        dead = DeadQuery(kafka, tmp_path, two_phase="required").leave(decided=True)
        kafka.kill()
        settings = kafka.config | dict.fromkeys(TWO_PHASE, "false")
        write_node_settings(kafka.nodes, kafka.ports, kafka.scheme, settings)
        kafka.restart()
        with pytest.raises(BadOption, match="the brokers do not offer it"):
            dead.run()
        dead.how["two_phase"] = "auto"
        # the coordinator may still be loading
        driver = replace(dead.run(), policy=Policy(retry=retry_unknown))
        commit(driver, dead.write(driver), 0)
        assert dead.seen() == ROWS
        assert fates(dead, ENDED) == [("CompleteCommit", False)] * 2
