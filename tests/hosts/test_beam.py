"""Runners in pipelines of Apache Beam."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest

import headrace
from tests.hosts.labelled import REPOSITORY, image_of, labels

beam = pytest.importorskip("apache_beam", reason="Beam is not here; see `make test-hosts`")
inference = pytest.importorskip("apache_beam.ml.inference.base")
headrace_beam = pytest.importorskip("headrace.plugins.beam")
testing = pytest.importorskip("apache_beam.testing.util")

ROWS = 1000


class Image(NamedTuple):
    """An element with names."""

    image: Any
    id: int


def digits(*keep: str) -> headrace.Runner:
    return headrace.Runner(REPOSITORY, "digits", keep=keep, outputs=["label"])


def check(elements: list[Any], handler: Any, expected: list[Any]) -> None:
    def told(found: Any) -> Any:
        assert found.model_id == "digits"
        return tuple(found.inference.items())

    with beam.Pipeline() as pipeline:
        results = pipeline | beam.Create(elements) | inference.RunInference(handler)
        testing.assert_that(results | beam.Map(told), testing.equal_to(expected))


@pytest.mark.parametrize("kind", ["mapping", "row", "named"])
def test_elements_with_names(kind: str) -> None:
    makes: dict[str, Callable[[int], Any]] = {
        "mapping": lambda n: {"image": image_of(n), "id": n},
        "row": lambda n: beam.Row(image=image_of(n), id=n),
        "named": lambda n: Image(image_of(n), n),
    }
    expected = [(("id", n), ("label", label)) for n, label in enumerate(labels(ROWS))]
    handler = headrace_beam.BeamHandler(digits("id"), min_batch_size=10, max_batch_size=128)
    check([makes[kind](n) for n in range(ROWS)], handler, expected)


def test_elements_of_the_only_input() -> None:
    expected = [(("label", label),) for label in labels(ROWS)]
    check([image_of(n) for n in range(ROWS)], headrace_beam.BeamHandler(digits()), expected)


def test_elements_with_keys() -> None:
    handler = inference.KeyedModelHandler(headrace_beam.BeamHandler(digits()))
    with beam.Pipeline() as pipeline:
        found = (
            pipeline
            | beam.Create([(f"key {n}", image_of(n)) for n in range(50)])
            | inference.RunInference(handler)
            | beam.MapTuple(lambda key, result: (key, result.inference["label"]))
        )
        expected = [(f"key {n}", label) for n, label in enumerate(labels(50))]
        testing.assert_that(found, testing.equal_to(expected))


def test_several_dimensions_are_arrays() -> None:
    handler = headrace_beam.BeamHandler(headrace.Runner(REPOSITORY, "digits"))
    [found] = handler.run_inference([image_of(1)], handler.load_model())
    assert found.inference["probabilities"].shape == (10,)
    assert found.inference["label"] == labels(2)[1]


@pytest.mark.parametrize(("elements", "message"), [
    ([{"image": image_of(0)}, {"picture": image_of(0)}], "one has image, another picture"),
    ([{"image": image_of(0)}, image_of(0)], "one has image, another ndarray"),
    ([np.zeros(3, np.float32)], "expected FP32"),
])  # fmt: skip
def test_elements_that_do_not_fit(elements: list[Any], message: str) -> None:
    handler = headrace_beam.BeamHandler(digits())
    with pytest.raises(headrace.ClientError, match=message):
        list(handler.run_inference(elements, handler.load_model()))


def test_arguments_that_models_have_not() -> None:
    handler = headrace_beam.BeamHandler(digits())
    with pytest.raises(ValueError, match="no inference_args, got top_k"):
        handler.validate_inference_args({"top_k": 3})
    with pytest.raises(ValueError, match="side input: gs://models/2"):
        handler.update_model_path("gs://models/2")


def test_bytes_of_a_batch() -> None:
    handler = headrace_beam.BeamHandler(digits())
    assert handler.get_num_bytes([image_of(0)] * 3) == 3 * 256
    assert handler.get_num_bytes([{"image": image_of(0), "id": np.int64(1)}]) == 264
