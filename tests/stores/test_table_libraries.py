"""What deltalake and pyiceberg do with a commit that comes twice. Each case is small, and says what
the participants do about it. A case that fails shows that a new version has mended it.
"""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import CommitProperties, DeltaTable, TableFeatures, Transaction, write_deltalake
from deltalake.exceptions import CommitFailedError
from pyiceberg.catalog import load_catalog
from pyiceberg.exceptions import CommitFailedException

pytestmark = pytest.mark.never_unsteady
ROWS = pa.table({"n": [1, 2]})
NOTE = CommitProperties(app_transactions=[Transaction("query", 7)], max_commit_retries=0)


@pytest.fixture
def delta(tmp_path):
    write_deltalake(str(tmp_path / "table"), ROWS.slice(0, 0))
    return str(tmp_path / "table")


def test_delta_refuses_the_transaction_of_a_stale_handle(delta):
    one, other = DeltaTable(delta), DeltaTable(delta)
    write_deltalake(one, ROWS, mode="append", commit_properties=NOTE)
    with pytest.raises(CommitFailedError):
        write_deltalake(other, ROWS, mode="append", commit_properties=NOTE)
    assert DeltaTable(delta).count() == 2


def test_delta_does_not_refuse_the_same_transaction_of_a_fresh_handle(delta):
    """So the participant asks `transaction_version` of the handle with which it commits."""
    for _ in range(2):
        write_deltalake(DeltaTable(delta), ROWS, mode="append", commit_properties=NOTE)
    assert DeltaTable(delta).transaction_version("query") == 7
    assert DeltaTable(delta).count() == 4, "twice"


def test_delta_refuses_a_feature_as_it_refuses_a_conflict(delta):
    """This one asks nothing of rows. So the participant knows the features that deltalake writes,
    and does not try again.
    """
    more = {"allow_protocol_versions_increase": True}
    DeltaTable(delta).alter.add_feature(TableFeatures.DomainMetadata, **more)
    with pytest.raises(CommitFailedError, match="Unsupported table features"):
        write_deltalake(DeltaTable(delta), ROWS, mode="append", commit_properties=NOTE)


@pytest.fixture
def iceberg(tmp_path):
    place = {"uri": f"sqlite:///{tmp_path}/catalog.db", "warehouse": f"file://{tmp_path}"}
    catalog = load_catalog("default", type="sql", **place)
    catalog.create_namespace("db")
    catalog.create_table("db.t", ROWS.schema)
    return catalog


def added(table, path):
    """Add the file, with a note that it is there."""
    with table.transaction() as changes:
        changes.set_properties({"noted": "yes"})
        changes.add_files([path], check_duplicate_files=False)


def file_of(table, tmp_path):
    pq.write_table(ROWS, tmp_path / "rows.parquet")
    return f"file://{tmp_path}/rows.parquet"


def test_iceberg_adds_the_file_of_a_stale_handle_again(iceberg, tmp_path):
    """Its own repetition loads the table, and does not look at the note. So the participant allows
    none.
    """
    one, stale = iceberg.load_table("db.t"), iceberg.load_table("db.t")
    path = file_of(one, tmp_path)
    added(one, path)
    added(stale, path)
    assert len(iceberg.load_table("db.t").scan().to_arrow()) == 4, "twice"


def test_iceberg_refuses_a_stale_handle_that_may_not_repeat(iceberg, tmp_path):
    one, stale = iceberg.load_table("db.t"), iceberg.load_table("db.t")
    path = file_of(one, tmp_path)
    added(one, path)
    stale.metadata.properties["commit.retry.num-retries"] = "0"
    with pytest.raises(CommitFailedException):
        added(stale, path)
    assert len(iceberg.load_table("db.t").scan().to_arrow()) == 2
