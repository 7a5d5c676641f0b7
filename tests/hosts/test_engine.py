"""`headrace.Engine` inside the processes of other engines."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tests.docs.pages import ROOT

REPOSITORY = str(ROOT / "model_repository")
ROWS = 500


class Digits:
    """Labels of images by an engine that a process opens once."""

    def __init__(self) -> None:
        import headrace

        self.engine = headrace.Engine(
            REPOSITORY, model_control_mode="explicit", load_model="digits"
        )

    def labels(self, ids: Any) -> Any:
        images = np.repeat(np.asarray(ids, np.float32) % 16, 64).reshape(-1, 8, 8)
        return self.engine.model("digits")(image=images)["label"].reshape(-1)


@pytest.fixture(scope="module")
def expected() -> list[int]:
    digits = Digits()
    with digits.engine:
        return [int(digits.labels([n])[0]) for n in range(ROWS)]


def test_ray_actors(ray: Any, expected: list[int]) -> None:
    class Scored(Digits):
        def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
            return {"id": batch["id"], "label": self.labels(batch["id"])}

    found = ray.data.range(ROWS).map_batches(Scored, batch_size=64, concurrency=2).take_all()
    assert [row["label"] for row in sorted(found, key=lambda row: row["id"])] == expected


def test_spark_executors(spark: Any, expected: list[int]) -> None:
    def scored(batches: Iterator[Any]) -> Iterator[Any]:
        import pyarrow as pa

        digits = Digits()
        with digits.engine:
            for batch in batches:
                for start in range(0, batch.num_rows, 64):
                    ids = batch.column("id").slice(start, 64)
                    labels = pa.array(digits.labels(ids.to_numpy()))
                    yield pa.RecordBatch.from_arrays([ids, labels], ["id", "label"])

    found = spark.range(ROWS).mapInArrow(scored, "id long, label long").orderBy("id").collect()
    assert [row.label for row in found] == expected
