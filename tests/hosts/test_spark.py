"""Runners in executors of Spark."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

import headrace
from tests.hosts.labelled import REPOSITORY, die_once, engines, labels

ROWS = 4000
PARTS = 8


@pytest.fixture(scope="module")
def frame(spark: Any) -> Any:
    image = "transform(sequence(0, 63), n -> cast(id % 16 as float)) AS image"
    return spark.range(0, ROWS, 1, PARTS).selectExpr("id", image)


@pytest.fixture(scope="module")
def digits() -> headrace.Runner:
    return headrace.Runner(REPOSITORY, "digits", keep={"id": "int64"}, outputs=["label"])


def check(rows: list[Any]) -> None:
    """Every row is there once, with its label."""
    ordered = sorted(rows, key=lambda row: int(row.id))
    assert [row.id for row in ordered] == list(range(ROWS))
    assert [row.label for row in ordered] == labels(ROWS)


def test_map_in_arrow(frame: Any, digits: headrace.Runner) -> None:
    check(frame.mapInArrow(digits.tables, digits.ddl).collect())


def test_map_in_pandas(frame: Any, digits: headrace.Runner) -> None:
    check(frame.mapInPandas(digits.tables, digits.ddl).collect())


def test_predict_batch_udf(frame: Any) -> None:
    from pyspark.ml.functions import predict_batch_udf
    from pyspark.sql.types import StructType

    digits = headrace.Runner(REPOSITORY, "digits")
    label_of = predict_batch_udf(
        lambda: lambda image: digits({"image": image}),
        return_type=StructType.fromDDL(digits.ddl), batch_size=300, input_tensor_shapes=[[8, 8]],
    )  # fmt: skip
    found = frame.select("id", label_of("image").alias("found")).select("id", "found.*").collect()
    check(found)
    assert [row.probabilities.index(max(row.probabilities)) for row in found] == [
        row.label for row in found
    ]


def test_a_process_has_one_engine_for_all_its_tasks(frame: Any, digits: headrace.Runner) -> None:
    def told(batches: Iterator[Any]) -> Iterator[Any]:
        import pyarrow as pa

        rows = sum(table.num_rows for table in digits.tables(batches))
        cores = os.environ["OMP_NUM_THREADS"]
        row = {"process": os.getpid(), "engines": engines(), "cores": cores, "count": rows}
        yield pa.RecordBatch.from_pylist([row])

    found = frame.mapInArrow(told, "process long, engines long, cores string, count long").collect()
    assert sum(row["count"] for row in found) == ROWS
    assert len(found) == PARTS
    assert 1 <= len({row.process for row in found}) <= 2
    assert {(row.engines, row.cores) for row in found} == {(1, "1")}


@pytest.mark.parametrize("program", ["python", "java"])
def test_rows_of_a_killed_executor_are_scored_once(
    frame: Any, digits: headrace.Runner, program: str, tmp_path: Path
) -> None:
    death = str(tmp_path / "death")

    def dies_once(batches: Iterator[Any]) -> Iterator[Any]:
        for found in digits.tables(batches):
            yield found
            if ROWS // 2 in found.column("id").to_pylist():
                above = [psutil.Process(), *psutil.Process().parents()]
                die_once(death, next(one.pid for one in above if one.name().startswith(program)))

    check(frame.mapInArrow(dies_once, digits.ddl).collect())
    assert os.path.exists(death)
