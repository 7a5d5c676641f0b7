"""Models of rows, and tables for them."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.core.datatypes import Datatype
from tests.models.onnx_graphs import add_sub, identity, write_model


def write_table_models(root: Path) -> None:
    """Write `numbers` and `texts` with one column, `two` with two, and one that does not batch."""
    write_model(root, "numbers", identity(Datatype.FP32, ["rows", 4]), "max_batch_size: 8")
    write_model(root, "texts", identity(Datatype.BYTES, ["rows", 1]), "max_batch_size: 8")
    write_model(root, "two", add_sub(Datatype.INT32, 16), "max_batch_size: 8")
    write_model(root, "unbatched", add_sub(width=3), "max_batch_size: 0")


def numbers(rows: int, first: int = 0) -> Any:
    """A record batch for `numbers` that counts on from row `first`; skips without pyarrow."""
    pa = pytest.importorskip("pyarrow")
    values = pa.array(np.arange(first * 4, (first + rows) * 4, dtype=np.float32))
    return pa.record_batch({"INPUT0": pa.FixedSizeListArray.from_arrays(values, 4)})
