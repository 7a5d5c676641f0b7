"""A loader's model, run as in a worker, without the worker."""

import importlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from headrace.core.tensors import Array
from headrace.workers import triton_api as pb

Config = dict[str, Any]


class Served:
    """A loaded, completed and started model.

    `config` is its completed configuration, `columns` are those that it was trained with.
    """

    def __init__(
        self,
        loader: str,
        file: Path,
        config: Config | None = None,
        *,
        trusted: bool = False,
        default_rows: int = 64,
        gpu: int | None = None,
        **parameters: str,
    ) -> None:
        module = importlib.import_module(f"headrace.plugins.loaders.{loader}")
        document = {
            "file": str(file), "trusted": trusted, "parameters": parameters,
            "default_max_batch_size": default_rows,
        }  # fmt: skip
        kind = module.load(document)
        self.columns = list(kind.trained_columns)
        self.config: Config = kind.auto_complete_config(pb.ModelConfig(config or {})).as_dict()
        self._model = kind()
        self._model.initialize(
            {
                "model_config": json.dumps(self.config),
                "model_instance_kind": "CPU" if gpu is None else "GPU",
                "model_instance_device_id": str(gpu or 0),
            }
        )

    def signature(self) -> dict[str, tuple[str, list[int]]]:
        """Type and dims of declared tensors by name."""
        declared = [*self.config["input"], *self.config["output"]]
        return {t["name"]: (t["data_type"].removeprefix("TYPE_"), t["dims"]) for t in declared}

    def ask(self, inputs: Mapping[str, Array], *outputs: str) -> dict[str, Any]:
        """Outputs of one request, all unless named."""
        (answer,) = self.ask_all([inputs], *outputs)
        return answer

    def ask_all(self, batch: Sequence[Mapping[str, Array]], *outputs: str) -> list[dict[str, Any]]:
        """Outputs of several requests that share a batch; an error is under `error`."""
        names = outputs or tuple(tensor["name"] for tensor in self.config["output"])
        requests = [
            pb.InferenceRequest(
                inputs=[pb.Tensor(n, _sent(a)) for n, a in inputs.items()],
                requested_output_names=names,
                model_name="m",
            )
            for inputs in batch
        ]
        answers = []
        for response in self._model.execute(requests):
            if (error := response.error()) is not None:
                answers.append({"error": error.message(), "code": error.code()})
            else:
                answers.append({t.name(): t.as_numpy() for t in response.output_tensors()})
        return answers


def _sent(array: Array) -> Array:
    """An array as the server sends it: read-only, texts as bytes."""
    if array.dtype.kind in "OU":
        result = np.empty(array.shape, object)
        result.ravel()[:] = [
            value if isinstance(value, bytes) else str(value).encode()
            for value in array.ravel().tolist()
        ]
        return result
    copy = array.copy()
    copy.flags.writeable = False
    return copy


def texts(*values: str | bytes) -> Array:
    """A BYTES tensor with a text in each row."""
    array = np.empty((len(values), 1), object)
    array[:, 0] = values
    return array
