"""Apache Beam: a model for `RunInference`."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from headrace.client import InputError
from headrace.runner.runner import Runner

try:
    from apache_beam import Row
    from apache_beam.ml.inference.base import ModelHandler, PredictionResult
except ImportError:
    raise ImportError(
        "headrace.plugins.beam needs Apache Beam: pip install 'headrace[beam]'"
    ) from None


class BeamHandler(ModelHandler):  # type: ignore[misc]
    """A `ModelHandler` that asks a runner, with a batch of elements as one table.

    An element has a row of each input by name, in a mapping, a `beam.Row` or a named tuple; or it
    is the row itself, for a model with one input. Each gives a `PredictionResult` whose `inference`
    has by name the kept columns and the outputs of that row, numbers as Python's.
    """

    def __init__(self, runner: Runner, **batching: Any) -> None:
        """`batching` are those of Beam's `ModelHandler`, such as `max_batch_size`."""
        super().__init__(**batching)
        self._runner = runner

    def load_model(self) -> Runner:
        """The runner, with the engine or connection of this process open; raises its errors."""
        _ = self._runner.signature
        return self._runner

    def run_inference(
        self, batch: Sequence[Any], model: Runner, inference_args: Mapping[str, Any] | None = None
    ) -> Iterator[Any]:
        """A result for each element, in order; raises `InputError` for elements that do not fit."""
        found = model(_columns(batch, model))
        names = list(found)
        for element, *row in zip(batch, *map(_values, found.values()), strict=True):
            yield PredictionResult(element, dict(zip(names, row, strict=True)), model.wanted.model)

    def validate_inference_args(self, inference_args: Mapping[str, Any] | None) -> None:
        """Raise `ValueError` for any, since models have none."""
        if inference_args:
            raise ValueError(f"a runner takes no inference_args, got {', '.join(inference_args)}")

    def update_model_path(self, model_path: str | None = None) -> None:
        """Raise `ValueError` for a path: a runner's place does not change."""
        if model_path:
            raise ValueError(f"a runner's model cannot be replaced by a side input: {model_path}")

    def get_num_bytes(self, batch: Sequence[Any]) -> int:
        """Bytes of a batch for Beam's metrics, without serializing it."""
        rows = [_named(element) or {"": element} for element in batch]
        return sum(np.asarray(value).nbytes for row in rows for value in row.values())


def _named(element: Any) -> Mapping[str, Any] | None:
    """The values of an element by name; None for a value without."""
    if isinstance(element, Mapping):
        return element
    named: Mapping[str, Any] | None = None
    if isinstance(element, Row):
        named = element.as_dict()
    elif isinstance(element, tuple) and hasattr(element, "_asdict"):
        named = element._asdict()
    return named


def _values(column: Any) -> Iterable[Any]:
    """The rows of a column; numbers are Python's, by which Beam can group."""
    found: Iterable[Any] = column
    if isinstance(column, np.ndarray) and column.ndim == 1:
        found = column.tolist()
    return found


def _columns(batch: Sequence[Any], model: Runner) -> Mapping[str, Any]:
    """The elements as a table."""
    first = _named(batch[0])
    if first is None:
        names = list(model.signature.inputs)
        if len(names) != 1:
            raise InputError(
                f"model '{model.wanted.model}' has several inputs: elements are mappings with"
                f" {', '.join(names)}, got {type(batch[0]).__name__}"
            )
        return {names[0]: batch}
    rows = [_named(element) for element in batch]
    for row in rows:
        if row is None or row.keys() != first.keys():
            got = type(batch[rows.index(row)]).__name__ if row is None else ", ".join(row)
            raise InputError(f"the elements differ: one has {', '.join(first)}, another {got}")
    return {name: [row[name] for row in rows if row] for name in first}
