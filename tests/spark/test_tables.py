"""A topic and a table of Delta Lake or Iceberg under one decision, by Spark: each row once in both,
and Spark's own connector reads the table.
"""

import pytest

pytestmark = [pytest.mark.kafka, pytest.mark.spark, pytest.mark.never_unsteady]
