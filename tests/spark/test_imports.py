"""What must work where PySpark is not installed: options, checkpoint, planning and questions."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
WITHOUT_PYSPARK = [
    "sink.options",
    "sink.columns",
    "checkpoint",
    "sink.batch_line",
    "sink.opening",
    "running_query",
    "foreach_batch",
    "source.options",
    "source.offsets",
    "source.cluster",
    "source.starting_offsets",
    "source.lag",
]
# the command line reads checkpoints on machines that have none of these
WITHOUT_ARROW = [
    "sink.options",
    "sink.columns",
    "checkpoint",
    "sink.batch_line",
    "source.options",
    "source.offsets",
]
ALONE = """
import importlib, sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {absent!r}:
            raise ModuleNotFoundError(f"absent in this test: {{name}}", name=name)
sys.meta_path.insert(0, Absent())
for module in {modules!r}:
    importlib.import_module(module)
"""


def imports(modules, absent):
    """Import the modules of kafka2pc.spark in a process where `absent` cannot be imported."""
    names = ["kafka2pc.spark", *(f"kafka2pc.spark.{module}" for module in modules)]
    code = ALONE.format(absent=absent, modules=names)
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)


def test_planning_needs_no_pyspark():
    done = imports(WITHOUT_PYSPARK, ["pyspark", "py4j"])
    assert done.returncode == 0, done.stderr


def test_options_and_checkpoint_need_no_arrow():
    done = imports(WITHOUT_ARROW, ["pyspark", "py4j", "pyarrow", "numpy", "pandas"])
    assert done.returncode == 0, done.stderr
