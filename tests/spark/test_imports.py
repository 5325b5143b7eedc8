"""What must work where PySpark is not installed (options, checkpoint, planning and questions), and
where it is too old for `format("kafka2pc")`: every import, and an error that says so.
"""

import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

from kafka2pc import spark

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


# What PySpark lacks: 3.5 all data sources in Python, 4.0 one class of them.
LACKING = {
    "3.5": """
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name in ("pyspark.sql.datasource", "pyspark.sql.streaming.datasource"):
            raise ModuleNotFoundError(f"absent in this test: {name}", name=name)
sys.meta_path.insert(0, Absent())
""",
    "4.0": """
import pyspark.sql.datasource
del pyspark.sql.datasource.DataSourceStreamArrowWriter
""",
}
REFUSED = """
import kafka2pc, pyspark_kafka2pc
from kafka2pc.protocol.errors import BadOption
from kafka2pc.spark.datasource import Kafka2pc
for use in (kafka2pc.register, Kafka2pc, pyspark_kafka2pc.DefaultSource):
    try:
        use({})
    except BadOption as e:
        print(e)
"""


def in_old_pyspark(version, code):
    """Run the code in a process whose PySpark lacks what that of this version lacks."""
    code = f"import importlib, sys\n{LACKING[version]}\n{code}"
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)


@pytest.mark.parametrize("version", LACKING)
def test_every_module_is_imported_by_an_old_pyspark(version):
    names = [module.name for module in pkgutil.walk_packages(spark.__path__, "kafka2pc.spark.")]
    assert len(names) > 15
    lines = [f"importlib.import_module({name!r})" for name in names]
    done = in_old_pyspark(version, "\n".join(lines))
    assert done.returncode == 0, done.stderr


def test_old_pyspark_is_refused_by_one_error_that_names_foreach_batch():
    done = in_old_pyspark("4.0", REFUSED)
    assert done.returncode == 0, done.stderr
    by_name = [line for line in done.stdout.splitlines() if "needs Spark 4.1" in line]
    assert len(by_name) == 3
    assert "This PySpark lacks DataSourceStreamArrowWriter." in done.stdout
    assert ".foreachBatch(kafka2pc.exactly_once({...}))" in done.stdout
    assert "kafka2pc.exactly_once({...}, name=...).write(df)" in done.stdout


def test_without_data_sources_register_raises_the_same_error():
    done = in_old_pyspark("3.5", "import kafka2pc; kafka2pc.register(None)")
    assert '[KAFKA2PC.BAD_OPTION] format("kafka2pc") needs Spark 4.1' in done.stderr
    assert "lacks DataSource," in done.stderr


PUBLIC = """DecisionLog KafkaParticipant Participant error_of errors exactly_once metrics progress
    register"""
FACE = """
import sys, kafka2pc
light = {name.partition(".")[0] for name in sys.modules} & {"pyspark", "pyarrow", "confluent_kafka"}
found = [getattr(kafka2pc, name) for name in kafka2pc.__all__]
print(*kafka2pc.__all__, light, "pyspark" in sys.modules, kafka2pc.errors.BadOption.__name__)
"""


def test_what_is_public_is_this_list_and_needs_no_pyspark():
    done = subprocess.run([sys.executable, "-c", FACE], cwd=ROOT, capture_output=True, text=True)
    names = [name for name in done.stdout.split() if name != "__version__"]
    assert names == [*PUBLIC.split(), "set()", "False", "BadOption"], done.stderr
    with pytest.raises(ImportError, match="Kafka2pc"):
        exec("from kafka2pc import Kafka2pc")
