"""A topic that the brokers create, or refuse to create: what they answer is used at once."""

from types import SimpleNamespace as Answer

import pytest

from kafka2pc.kafka.wire import topics
from kafka2pc.kafka.wire.topics import ask_to_create
from kafka2pc.protocol.errors import NotAuthorized

UNKNOWN, INVALID, REFUSED = 3, 17, 29


class Broker:
    """It answers a Metadata request with these codes, by topic."""

    def __init__(self, codes):
        rows = [Answer(name=name, error_code=code) for name, code in codes.items()]
        self.answer = Answer(topics=rows)

    def persist(self, call):
        return call()

    def ask(self, request):
        assert request.allow_auto_topic_creation
        return self.answer


@pytest.mark.parametrize(
    ("codes", "setting", "expected"),
    [
        ({"t": UNKNOWN}, "true", True),
        ({"t": 5}, "true", True),
        ({"t": 0}, None, True),
        ({"t": UNKNOWN}, "false", False),
        ({"t": INVALID}, "true", False),
        ({"t": UNKNOWN, "no name": INVALID}, "true", True),
    ],
)
def test_topics_are_awaited_only_if_the_brokers_create_one(codes, setting, expected, monkeypatch):
    monkeypatch.setattr(topics, "broker_setting", lambda *_: setting)
    assert ask_to_create(Broker(codes), list(codes)) is expected


def test_a_missing_right_to_create_is_named():
    with pytest.raises(NotAuthorized, match="topic secret: 29") as caught:
        ask_to_create(Broker({"t": UNKNOWN, "secret": REFUSED}), ["t", "secret"])
    assert caught.value.action.startswith("Grant CREATE and DESCRIBE on the resource Topic secret")
