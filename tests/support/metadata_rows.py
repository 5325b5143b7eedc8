"""Rows of a Metadata answer, for brokers that tests make up."""

from collections import defaultdict
from types import SimpleNamespace


def metadata_rows(leaders):
    """One row for each topic. `leaders`: the node by (topic, partition). The topics have no ids."""
    parts = defaultdict(list)
    for (topic, partition), node in leaders.items():
        parts[topic].append(SimpleNamespace(partition_index=partition, leader_id=node))
    return [
        SimpleNamespace(name=topic, error_code=0, topic_id=None, partitions=found)
        for topic, found in parts.items()
    ]
