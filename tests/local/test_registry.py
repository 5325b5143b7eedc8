"""The local schema registry, asked by Confluent's client: ids, versions, and what it refuses."""

import json

import pytest
from confluent_kafka.schema_registry import Schema, SchemaRegistryClient, SchemaRegistryError
from confluent_kafka.schema_registry.avro import AvroDeserializer, AvroSerializer
from confluent_kafka.serialization import SerializationContext

from kafka2pc.local.registry import LocalRegistry

ID, NOTE = {"name": "id", "type": "long"}, {"name": "note", "type": "string"}
AT = SerializationContext("orders", "value")


def avro(*fields):
    return Schema(json.dumps({"type": "record", "name": "Order", "fields": fields}), "AVRO")


@pytest.fixture
def registry():
    with LocalRegistry() as registry:
        yield registry


def client_of(registry):
    """A client with an empty cache, that tries once."""
    return SchemaRegistryClient({"url": registry.url, "max.retries": 0})


@pytest.fixture
def client(registry):
    return client_of(registry)


def refusal(question, *args):
    with pytest.raises(SchemaRegistryError) as e:
        question(*args)
    return e.value.http_status_code, e.value.error_code


def test_one_schema_has_one_id_in_all_subjects(registry, client):
    assert client.register_schema("a", avro(ID)) == client.register_schema("b", avro(ID)) == 1
    spaces = Schema(avro(ID).schema_str.replace(":", " : "), "AVRO")
    assert client.register_schema("a", spaces) == 1
    assert (registry.registered, client.get_subjects()) == (3, ["a", "b"])
    assert client.register_schema("c", avro(NOTE)) == 2


def test_versions_count_within_their_subject(client):
    client.register_schema("other", avro(NOTE))
    client.register_schema("a", avro(ID))
    assert client.register_schema("a", avro(ID, NOTE | {"default": ""})) == 3
    first, latest = client.get_version("a", 1), client.get_latest_version("a")
    assert [(v.version, v.schema_id) for v in (first, latest)] == [(1, 2), (2, 3)]
    assert client.lookup_schema("a", avro(ID)).version == 1
    assert json.loads(client.get_schema(3).schema_str)["fields"][1]["default"] == ""


def test_a_schema_that_cannot_read_the_latest_one_is_refused(client):
    client.register_schema("a", avro(ID))
    client.register_schema("b", avro(ID, NOTE))
    assert refusal(client.register_schema, "a", avro(ID, NOTE)) == (409, 40901)
    assert client.register_schema("c", avro(ID, NOTE)) == 2


def test_what_does_not_exist_has_the_codes_of_the_real_registry(client):
    client.register_schema("a", avro(ID))
    assert refusal(client.get_schema, 2) == (404, 40403)
    assert refusal(client.lookup_schema, "b", avro(ID)) == (404, 40401)
    assert refusal(client.lookup_schema, "a", avro(NOTE)) == (404, 40403)
    assert refusal(client.get_version, "a", 2) == (404, 40402)
    assert refusal(client.register_schema, "a", Schema('{"type": "no"}', "AVRO")) == (422, 42201)
    assert refusal(client.delete_subject, "a") == (404, 404)


def test_a_serializer_and_a_deserializer_ask_for_what_they_need(registry, client):
    client.register_schema("orders-value", avro(ID))
    start = len(registry.asked)
    other = client_of(registry)
    to_bytes = AvroSerializer(other, avro(ID), conf={"auto.register.schemas": False})
    from_bytes = AvroDeserializer(client_of(registry))
    values = [to_bytes({"id": n}, AT) for n in range(3)]
    assert values[1] == b"\0\0\0\0\1\2"
    assert [from_bytes(value, AT) for value in values] == [{"id": n} for n in range(3)]
    associations = "GET /associations/resources/-/orders"
    look_up, by_id = "POST /subjects/orders-value", "GET /schemas/ids/1"
    assert registry.asked[start:] == [associations, look_up, associations, by_id]


def test_after_a_stop_it_goes_on_at_its_port_with_its_schemas(registry, client):
    client.register_schema("a", avro(ID))
    registry.stop()
    with pytest.raises(Exception, match="Connection refused"):
        client_of(registry).get_schema(1)
    registry.start()
    assert client_of(registry).get_schema(1).schema_type == "AVRO"
