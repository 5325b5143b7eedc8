"""The promises of every participant, asked of each store; and what only one of them can break."""
import pytest
from participant_suite import PROMISES, At

from kafka2pc.protocol import MemoryParticipant

pytestmark = pytest.mark.timeout(180)
NAMED = dict(ids=lambda promise: promise.__name__)


@pytest.mark.parametrize("promise", PROMISES, **NAMED)
def test_memory_keeps(promise):
    store = MemoryParticipant()
    promise(At(store, store.read))
