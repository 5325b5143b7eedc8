"""Which query a place is, without Spark and without Kafka."""

import json
import uuid

import pytest

from kafka2pc.decision_logs.table import TableLog
from kafka2pc.operations.query import open_query
from kafka2pc.protocol.errors import BadOption, StaleCheckpoint


def checkpoint(folder, metadata):
    """A checkpoint in a folder whose name is a UUID, as that of a batch write is."""
    place = folder / str(uuid.uuid4())
    (place / "offsets").mkdir(parents=True)
    if metadata is not None:
        (place / "metadata").write_text(metadata)
    return place


@pytest.mark.parametrize("metadata", ["", "{", '{"id"', "{}", "[]", "\0\0"])
def test_a_damaged_checkpoint_is_no_batch_write_whatever_its_name(tmp_path, metadata):
    place = checkpoint(tmp_path, metadata)
    with pytest.raises(StaleCheckpoint, match="metadata holds no query id"):
        open_query(str(place))


def test_a_folder_without_metadata_is_a_batch_write_if_its_name_is_an_id(tmp_path):
    place = checkpoint(tmp_path, None)
    query = open_query(str(place))
    assert (query.query_id, query.checkpoint) == (place.name, "")
    with pytest.raises(BadOption):
        open_query(str(tmp_path))


def test_a_checkpoint_whose_name_is_an_id_is_that_of_its_own_query(tmp_path):
    place = checkpoint(tmp_path, json.dumps({"id": "another"}))
    assert open_query(str(place)).query_id == "another"


def test_to_look_at_a_table_that_is_not_there_creates_none(tmp_path, postgres):
    """A wrong URL, as an operator may type it."""
    place = checkpoint(tmp_path, json.dumps({"id": str(uuid.uuid4())}))
    postgres.execute("create schema if not exists elsewhere")
    url = f"{postgres.url}{'&' if '?' in postgres.url else '?'}options=-csearch_path%3Delsewhere"
    tables = "select count(*) from information_schema.tables where table_schema = 'elsewhere'"
    with pytest.raises(BadOption, match="no table kafka2pc_decisions"):
        open_query(str(place), url)
    assert postgres.execute(tables) == [(0,)]
    TableLog(url, "a")
    assert postgres.execute(tables) == [(1,)]
    assert open_query(str(place), url).log.slots() == []
