"""The rights of one user on a secured broker."""

from kafka.protocol.admin import CreateAclsRequest, DeleteAclsRequest

from kafka2pc.kafka.wire.cluster import Cluster
from kafka2pc.protocol.errors import BadOption, NotAuthorized

CODES = {"Read": 3, "Write": 4, "DescribeConfigs": 10, "TwoPhaseCommit": 15}
ANYTHING = {
    "resource_type_filter": 1,
    "pattern_type_filter": 1,
    "operation": 1,
    "permission_type": 1,
}


class Rights:
    """The ACLs of alice, given and taken by an administrator."""

    def __init__(self, kafka, topic, prefix, group="kafka2pc-source"):
        self.kafka, self.words = kafka, {"topic": topic, "prefix": prefix, "group": group}

    def _resource(self, right):
        kind, *rest = right.resource.format(**self.words).split()
        number, pattern = {
            "--topic": (2, 3),
            "--group": (3, 3),
            "--cluster": (4, 3),
            "--transactional-id": (5, 4),
        }[kind]
        return number, rest[0] if rest else "kafka-cluster", pattern

    def give(self, *rights):
        made = [
            CreateAclsRequest.AclCreation(
                resource_type=kind,
                resource_name=name,
                resource_pattern_type=pattern,
                principal="User:alice",
                host="*",
                operation=CODES[r.operation],
                permission_type=3,
            )
            for r in rights
            for kind, name, pattern in [self._resource(r)]
        ]
        self._ask(CreateAclsRequest(creations=made, max_version=3))

    def take(self, right):
        kind, name, pattern = self._resource(right)
        one = DeleteAclsRequest.DeleteAclsFilter(
            resource_type_filter=kind,
            resource_name_filter=name,
            pattern_type_filter=pattern,
            principal_filter="User:alice",
            host_filter="*",
            operation=CODES[right.operation],
            permission_type=3,
        )
        self._ask(DeleteAclsRequest(filters=[one], max_version=3))

    def _ask(self, request):
        with Cluster(self.kafka.client_conf) as admin:
            admin.ask(request)


def error_of(attempt):
    """Class and first words of the error, or None."""
    try:
        attempt()
    except (BadOption, NotAuthorized) as e:
        return type(e).__name__, e.what + e.why
