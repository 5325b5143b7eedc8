"""A store without transactions, and the log that is put before it."""

import os
import signal
from pathlib import Path

from participant_suite import At, rows

from kafka2pc.stores.object_store import ObjectParticipant
from kafka2pc.stores.wal import WalParticipant


class KeyValue:
    """A store in a folder, which ignores a key that it has seen. `dies_at`: the row at which the
    process that sends dies, or the error it gets.
    """

    def __init__(self, path, dies_at=None, error=None):
        self.path, self.dies_at, self.error = str(path), dies_at, error

    def __call__(self, items):
        os.makedirs(self.path, exist_ok=True)
        for key, row in items:
            if row["value"] == self.dies_at:
                if self.error:
                    raise self.error
                os.kill(os.getpid(), signal.SIGKILL)
            try:
                with open(f"{self.path}/{key.replace('/', '_')}", "x") as file:
                    file.write(row["value"])
            except FileExistsError:
                continue

    def values(self):
        return (
            [file.read_text() for file in Path(self.path).iterdir()]
            if Path(self.path).exists()
            else []
        )


def wal(path, **trouble):
    kv = KeyValue(path / "kv", **trouble)
    return At(
        WalParticipant(ObjectParticipant(f"file://{path}/log", name="kv"), kv, chunk=2),
        kv.values,
        rows,
    )
