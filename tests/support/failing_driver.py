"""A driver of fsspec that keeps objects in memory, and whose requests a subclass can let fail."""

from fsspec.implementations.memory import MemoryFileSystem


class FailingDriver(MemoryFileSystem):
    """`fails` is called before each read, look-up, list and write. A subclass has its own
    `protocol` and `store`.
    """

    pseudo_dirs = [""]

    @classmethod
    def _strip_protocol(cls, path):
        return "/" + path.partition("://")[2].strip("/") if "://" in path else "/" + path.strip("/")

    def fails(self):
        """Raises what the request shall raise."""

    def cat_file(self, path, start=None, end=None):
        self.fails()
        return super().cat_file(path, start, end)

    def info(self, path, **more):
        self.fails()
        return super().info(path, **more)

    def ls(self, *args, **more):
        self.fails()
        return super().ls(*args, **more)

    def pipe_file(self, *args, **more):
        self.fails()
        return super().pipe_file(*args, **more)
