"""A Delta and an Iceberg table, each with a reader that has nothing to do with the participants."""

import os
from pathlib import Path

import pyarrow as pa
from deltalake import DeltaTable, write_deltalake
from participant_suite import At, rows
from pyiceberg.catalog import load_catalog

from kafka2pc.stores.delta import DeltaParticipant
from kafka2pc.stores.iceberg import IcebergParticipant

TEXTS = pa.schema([("value", pa.string())])


class OneTable:
    """A table in a folder. `store()`: a participant for it; `read()`: its rows, as Arrow; `append`:
    as another writer does; `compact`: all files become one; `clean`: files that no version names
    and all former versions go; `another`: the table is dropped, and there is a new one.
    """

    def __init__(self, folder, schema=TEXTS, keys=()):
        self.folder, self.schema, self.keys = Path(folder), schema, keys
        self.create()

    def at(self):
        """What the suite of participants asks."""
        store = self.store()

        def half_commit(c):
            store.storage.write(store.path(c, "manifest"), b"committed")
            store.add(store.load(), {c: store.files(c).listed().files})

        def another():
            self.drop()
            self.create()
            return self.store()

        return At(store, self.texts, rows, another=another, half_commit=half_commit)

    def texts(self):
        return self.read()["value"].to_pylist()


class Delta(OneTable):
    def create(self, **settings):
        url = f"{self.folder}/table"
        DeltaTable.create(url, self.schema, partition_by=self.keys, configuration=settings)

    def drop(self):
        os.rename(f"{self.folder}/table", f"{self.folder}/former")

    def store(self, **more):
        return DeltaParticipant(f"{self.folder}/table", **more)

    def load(self):
        return DeltaTable(f"{self.folder}/table")

    def read(self):
        return pa.table(self.load().to_pyarrow_table())

    def append(self, texts):
        write_deltalake(self.load(), pa.table({"value": texts}), mode="append")

    def compact(self):
        self.load().optimize.compact()

    def clean(self):
        clean = self.load()
        clean.create_checkpoint()
        clean.vacuum(0, dry_run=False, enforce_retention_duration=False, full=True)
        clean.cleanup_metadata()

    def files(self):
        return [path.removeprefix("file://") for path in self.load().file_uris()]

    def versions(self):
        return self.load().version()


class Iceberg(OneTable):
    warehouse = ""  # another place than in the folder

    @property
    def catalog(self):
        return {
            "type": "sql",
            "uri": f"sqlite:///{self.folder}/catalog.db",
            "warehouse": self.warehouse or f"file://{self.folder}/warehouse",
        }

    def create(self, **settings):
        catalog = load_catalog("default", **self.catalog)
        catalog.create_namespace_if_not_exists("db")
        table = catalog.create_table("db.t", self.schema, properties=settings)
        with table.update_spec() as spec:
            for key in self.keys:
                spec.add_identity(key)

    def drop(self):
        load_catalog("default", **self.catalog).drop_table("db.t")
        os.rename(f"{self.folder}/warehouse", f"{self.folder}/former")

    def store(self, **more):
        return IcebergParticipant("db.t", catalog=self.catalog, **more)

    def load(self):
        return load_catalog("default", **self.catalog).load_table("db.t")

    def read(self):
        return self.load().scan().to_arrow()

    def append(self, texts):
        self.load().append(pa.table({"value": texts}))

    def compact(self):
        table = self.load()
        table.overwrite(table.scan().to_arrow())

    def clean(self):
        table = self.load()
        newest = table.current_snapshot().snapshot_id
        old = [s.snapshot_id for s in table.snapshots() if s.snapshot_id != newest]
        table.maintenance.expire_snapshots().by_ids(old).commit()
        # what remove_orphan_files of Spark does: pyiceberg has no such procedure
        named = set(self.files())
        for path in Path(f"{self.folder}/warehouse").rglob("*.parquet"):
            if str(path) not in named:
                path.unlink()

    def files(self):
        found = self.load().inspect.files()["file_path"].to_pylist()
        return [path.removeprefix("file://") for path in found]

    def versions(self):
        return len(self.load().snapshots())


TABLES = {"delta": Delta, "iceberg": Iceberg}
