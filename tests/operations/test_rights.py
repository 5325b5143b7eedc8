"""A secured cluster: each missing right has its own error, and no output holds a password."""

from pathlib import Path

import pytest
from dead_query_fixtures import ROWS, DeadQuery, find_open, finding_of, names
from kafka_fixtures import values
from kafka_tools import administered
from shell import typed

from kafka2pc.kafka.cluster_check import check
from kafka2pc.operations.access import Access
from kafka2pc.operations.doctor.doctor import doctor
from kafka2pc.operations.doctor.rights import RIGHTS
from kafka2pc.proof.child_process import until
from kafka2pc.proof.missing_rights import Rights, error_of, hold
from kafka2pc.spark.source.cluster import Questions
from kafka2pc.spark.source.offsets import Range
from kafka2pc.spark.source.options import parse_source_options
from kafka2pc.spark.source.range_reader import read_ranges

pytestmark = [pytest.mark.kafka, pytest.mark.never_unsteady]


def as_alice(kafka, folder):
    """Her settings, and the file that holds them."""
    file = folder / "client.properties"
    conf = kafka.client_conf_for("alice")
    file.write_text("".join(f"{k}={v}\n" for k, v in conf.items() if k != "bootstrap.servers"))
    return conf, Access(kafka.bootstrap_servers, str(file))


def symptoms(conf, access, topic, prefix, topic_id):
    """For each right: a question whose answer changes without it, and what is then said."""
    sink = lambda **how: error_of(lambda: check(conf, topics=[topic], prefix=prefix, **how))
    found = lambda: names(doctor(access, topics=[topic], prefix=prefix, older_ms=0))
    source = parse_source_options({f"kafka.{k}": v for k, v in conf.items()} | {"subscribe": topic})
    first = Range(topic, 0, 0, 1, topic_id=topic_id)
    denied = lambda name: lambda: name in found()
    return {
        ("sink", "Write", "--topic"): (
            lambda: (
                (sink() or ("", ""))[0] == "NotAuthorized"
                and f"topic {topic}" in sink()[1]
                and "topic-not-allowed" in found()
            )
        ),
        ("sink", "Write", "--transactional-id"): (
            lambda: (
                (sink() or ("", ""))[0] == "NotAuthorized"
                and f"{prefix}-probe" in sink()[1]
                and "ids-not-allowed" in found()
            )
        ),
        ("sink", "TwoPhaseCommit", "--transactional-id"): (
            lambda: (
                sink() is None
                and "TWO_PHASE_COMMIT is not granted" in (sink(two_phase="required") or ("", ""))[1]
                and "two-phase-not-allowed" in found()
            )
        ),
        ("sink", "DescribeConfigs", "--topic"): (
            lambda: (
                "settings-not-allowed" in found()
                and check(conf, topics=[topic], prefix=prefix).batch_bytes is None
            )
        ),
        ("sink", "DescribeConfigs", "--cluster"): (
            lambda: "settings-not-allowed" in found() and sink() is None
        ),
        ("sink", "Read", "--topic"): denied("read-not-allowed"),
        ("source", "Read", "--topic"): (
            lambda: (
                (error_of(lambda: list(read_ranges(source, [first]))) or ("", ""))[1].count(topic)
                > 0
            )
        ),
        ("source", "Read", "--group"): lambda: (
            not may_use_group(conf, topic)
            and (offsets_of_group(conf, topic) or ("", ""))[0] == "NotAuthorized"
            and "group kafka2pc-source: 30" in offsets_of_group(conf, topic)[1]
        ),
        ("operator", "Write", "--transactional-id"): denied("ids-not-allowed"),
        ("operator", "Read", "--topic"): denied("readers-held-back-by-whom"),
    }


def offsets_of_group(conf, topic):
    """The error of a read from the group that the source would use."""
    with Questions(conf) as ask:
        return error_of(lambda: ask.group_offsets("kafka2pc-source", [(topic, 0)]))


def may_use_group(conf, topic):
    with Questions(conf) as ask:
        commit = lambda: ask.commit_offsets("kafka2pc-source", {(topic, 0): 0})
        return error_of(commit) is None


def test_each_right_that_is_taken_away_has_its_own_clear_error_before_anything_is_written(
    secure, tmp_path, request
):
    topic, prefix = "least", "least-"
    secure.create_topic(topic)
    conf, access = as_alice(secure, tmp_path)
    with Questions(secure.client_conf) as ask:
        topic_id, _ = ask.topics([topic])[topic]
    rights = Rights(secure, topic, prefix)
    asked = symptoms(conf, access, topic, prefix, topic_id)
    assert {(r.part, r.operation, r.resource.split()[0]) for r in RIGHTS} == set(asked), (
        "the table and the test name the same rights"
    )
    hold(secure, topic)
    rights.give(*RIGHTS)
    request.addfinalizer(lambda: [rights.take(r) for r in RIGHTS])
    for r in RIGHTS:
        missing = asked[r.part, r.operation, r.resource.split()[0]]
        until(lambda: not missing(), f"{r} is in force", 20)  # noqa: B023
        rights.take(r)
        until(missing, f"without {r} it is reported", 20)
        rights.give(r)
    assert find_open(secure, prefix) == []
    assert values(secure, topic, "read_uncommitted") == [
        "seen",
        "held",
    ], "nothing of hers was written"


@pytest.mark.full
def test_the_printed_commands_repair_a_dead_query_on_a_secured_cluster(secure, tmp_path):
    topic, prefix = "secured", "kafka2pc"
    secure.create_topic(topic)
    conf, access = as_alice(secure, tmp_path)
    Rights(secure, topic, prefix).give(*(r for r in RIGHTS if r.part == "sink" and r.needed))
    until(
        lambda: error_of(lambda: check(conf, topics=[topic])) is None, "her rights are in force", 20
    )
    dead = DeadQuery(secure, tmp_path, topic, conf, prefix=prefix).leave(decided=True)
    ask = lambda: doctor(access, checkpoint=str(dead.place), older_ms=0)
    found = ask()
    assert {
        "decided-and-open",
        "readers-held-back-by-whom",
        "settings-not-allowed",
        "two-phase-refused",
    } <= names(found)
    administered(
        secure,
        tmp_path,
        *[line for f in found.findings for line in f.commands if line.startswith("kafka-acls.sh")],
    )
    until(
        lambda: (
            not names(ask())
            & {"readers-held-back-by-whom", "settings-not-allowed", "two-phase-refused"}
        ),
        "the rights are in force",
        20,
    )
    found = ask()
    finding_of(found, "readers-held-back", f"2 of query {dead.id}, the oldest for ")
    assert not [f for f in found.findings if f.name.startswith("two-phase")], (
        "TWO_PHASE_COMMIT was granted by the printed line"
    )
    assert dead.seen(still_open=True) == []
    assert [typed(line)[1] for line in finding_of(found, "decided-and-open").commands] == [3, 0]
    assert dead.seen() == ROWS
    assert not names(ask()) & {"readers-held-back", "decided-and-open"}
    assert_no_secret(secure, access, dead, str(found), repr(access))


def test_without_read_no_row_is_read_back_and_doctor_says_so_before(secure, tmp_path, request):
    topic, prefix = "read-back", "read-back-"
    secure.create_topic(topic)
    conf, access = as_alice(secure, tmp_path)
    rights = Rights(secure, topic, prefix)
    rights.give(*(r for r in RIGHTS if r.part == "sink" and r.needed))
    allowed = lambda: error_of(lambda: check(conf, topics=[topic], prefix=prefix)) is None
    until(allowed, "her rights are in force", 20)
    dead = DeadQuery(secure, tmp_path, topic, conf, prefix=prefix).leave(decided=True)
    dead.abort_all()
    ask = lambda: doctor(access, checkpoint=str(dead.place), older_ms=0)
    found = finding_of(ask(), "decided-and-aborted", "User:alice may not read read-back")
    assert "--operation Read --topic read-back" in found.commands[0]
    said, status = typed(found.commands[2])
    assert status == 1 and "NOT_AUTHORIZED" in said and find_open(secure, prefix) == []
    [read] = [r for r in RIGHTS if (r.part, r.operation) == ("sink", "Read")]
    rights.give(read)
    request.addfinalizer(lambda: rights.take(read))
    until(lambda: "read-not-allowed" not in names(ask()), "she may read", 20)
    assert typed(found.commands[2])[1] == 0 and dead.seen() == ROWS


def assert_no_secret(secure, access, dead, *texts):
    """The planted password is in the named file, and nowhere else: not in the output, not in the
    checkpoint.
    """
    said = [
        typed(access.command(*words))[0]
        for words in (
            ["doctor", "--checkpoint", str(dead.place)],
            ["doctor", "--checkpoint", str(dead.place), "--json"],
            ["transactions", "list"],
            ["decisions", "show", str(dead.place), "0"],
            ["restore", str(dead.place), "--dry-run"],
            ["abort", "unused"],
        )
    ]
    kept = [p.read_text() for p in dead.place.rglob("*") if p.is_file()]
    assert not [t for t in (*said, *kept, *texts) if secure.passwords["alice"] in t]


def test_the_error_about_a_wrong_password_does_not_show_it(secure, tmp_path):
    _, access = as_alice(secure, tmp_path)
    file = Path(access.config)
    file.write_text(file.read_text().replace(secure.passwords["alice"], "hunter2"))
    said, status = typed(access.command("transactions", "list"))
    assert status == 1 and "NOT_AUTHORIZED" in said and "hunter2" not in said
