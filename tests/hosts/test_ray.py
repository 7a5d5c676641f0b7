"""Runners in actors of Ray Data."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import headrace
from tests.hosts.labelled import REPOSITORY, die_once, engines, image_of, labels
from tests.models.python_models import tensors, write_python_model
from tests.support.wheels import write_wheel

ROWS = 4000
SHADED = """
    import numpy as np
    import shades
    import triton_python_backend_utils as pb_utils


    class TritonPythonModel:
        def execute(self, requests):
            return [self.answer(request) for request in requests]

        def answer(self, request):
            rows = len(pb_utils.get_input_tensor_by_name(request, "image").as_numpy())
            label = np.full((rows, 1), float(shades.VERSION), np.float32)
            return pb_utils.InferenceResponse([pb_utils.Tensor("label", label)])
    """


@pytest.fixture(scope="module")
def dataset(ray: Any) -> Any:
    def images(batch: dict[str, Any]) -> dict[str, Any]:
        return {"id": batch["id"], "image": np.stack([image_of(n) for n in batch["id"]])}

    ray.data.DataContext.get_current().enable_progress_bars = False
    return ray.data.range(ROWS, override_num_blocks=8).map_batches(images)


def check(frame: Any) -> None:
    """Every row is there once, with its label."""
    ordered = frame.sort_values("id")
    assert ordered.id.tolist() == list(range(ROWS))
    assert ordered.label.tolist() == labels(ROWS)


@pytest.mark.parametrize("batch_format", ["numpy", "pandas", "pyarrow"])
def test_batches_of_each_format(dataset: Any, batch_format: str) -> None:
    check(
        dataset.map_batches(
            headrace.Runner, fn_constructor_args=(REPOSITORY, "digits"),
            fn_constructor_kwargs={"keep": ["id"], "outputs": ["label"]}, concurrency=2,
            batch_format=batch_format,
        ).to_pandas()
    )  # fmt: skip


class Told(headrace.Runner):
    """Results with the process, its engines and its cores."""

    def __call__(self, *args: Any, **inputs: Any) -> Any:
        found = super().__call__(*args, **inputs)
        rows = len(found["label"])
        told = {
            "process": os.getpid(),
            "engines": engines(),
            "cores": os.environ["OMP_NUM_THREADS"],
        }
        return found | {name: np.array([value] * rows) for name, value in told.items()}


def test_an_actor_has_one_engine_and_its_share_of_the_cores(dataset: Any) -> None:
    found = dataset.map_batches(
        Told, fn_constructor_args=(REPOSITORY, "digits"),
        fn_constructor_kwargs={"keep": ["id"], "outputs": ["label"]}, concurrency=2, batch_size=100,
    ).to_pandas()  # fmt: skip
    check(found)
    assert 1 <= found.process.nunique() <= 2
    assert set(found.engines) == {1}
    assert set(found.cores) == {"1"}


class DiesOnce(headrace.Runner):
    """An actor killed when it has scored a batch that Ray has not got yet."""

    def __init__(self, *args: Any, death: str, **options: Any) -> None:
        super().__init__(*args, **options)
        self.death = death

    def __call__(self, *args: Any, **inputs: Any) -> Any:
        found = super().__call__(*args, **inputs)
        if ROWS // 2 in args[0]["id"]:
            die_once(self.death, os.getpid())
        return found


def test_rows_of_a_killed_actor_are_scored_once(dataset: Any, tmp_path: Path) -> None:
    death = tmp_path / "death"
    options = {"keep": ["id"], "outputs": ["label"], "death": str(death)}
    check(
        dataset.map_batches(
            DiesOnce, fn_constructor_args=(REPOSITORY, "digits"), fn_constructor_kwargs=options,
            concurrency=2, batch_size=100,
        ).to_pandas()
    )  # fmt: skip
    assert death.exists()


def test_an_environment_is_built_once_for_all_actors(dataset: Any, tmp_path: Path) -> None:
    write_wheel(tmp_path / "wheels", "shades", "1.5")
    declared = tensors("input", ("image", "FP32", "8, 8")) + tensors(
        "output", ("label", "FP32", "1")
    )
    write_python_model(tmp_path / "models", "shaded", SHADED, f"max_batch_size: 64\n{declared}")
    (tmp_path / "models" / "shaded" / "requirements.txt").write_text("shades\n")
    places = {"environment_cache": tmp_path / "cache", "wheelhouse": tmp_path / "wheels"}
    options = {"keep": ["id"], **{name: str(path) for name, path in places.items()}}
    found = dataset.map_batches(
        headrace.Runner, fn_constructor_args=(str(tmp_path / "models"), "shaded"),
        fn_constructor_kwargs=options, concurrency=2, batch_size=100,
    ).to_pandas()  # fmt: skip
    assert sorted(found.id) == list(range(ROWS))
    assert set(found.label) == {1.5}
    assert len([path for path in places["environment_cache"].iterdir() if path.is_dir()]) == 1
