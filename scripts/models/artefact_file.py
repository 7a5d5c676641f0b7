"""Writing and running of models of other libraries, as in the server's workers."""

import importlib
import json
import re
import zipfile
from collections.abc import Mapping
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import skops.io

from headrace.workers import triton_api as pb

_EPOCH = (1980, 1, 1, 0, 0, 0)
_NUMBER = re.compile(r'(?<="__id__": )\d+|(?<=")\d+(?=\.npy")')


def save_skops(path: Path, model: Any) -> None:
    """Write a scikit-learn model, always the same bytes for the same model.

    skops calls what it writes by addresses in memory and notes the time; here they are counted.
    """
    numbers: dict[str, str] = {}

    def count(match: re.Match[str]) -> str:
        return numbers.setdefault(match[0], str(len(numbers) + 1))

    with zipfile.ZipFile(BytesIO(skops.io.dumps(model))) as written:
        files = {name: written.read(name) for name in written.namelist()}
    schema = _NUMBER.sub(count, files.pop("schema.json").decode())
    named = {numbers[name.removesuffix(".npy")]: data for name, data in files.items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w") as archive:
        for number in sorted(named, key=int):
            _add(archive, f"{number}.npy", named[number])
        _add(archive, "schema.json", schema.encode())


def run(path: Path, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The outputs of the model in a file, by name; `str` for text. Its inputs are `feeds`."""
    loader = {".skops": "sklearn", ".txt": "lightgbm"}[path.suffix]
    module = importlib.import_module(f"headrace.plugins.loaders.{loader}")
    document = {"file": str(path), "trusted": False, "parameters": {}}
    kind = module.load(document | {"default_max_batch_size": 1})
    given = {"input": [{"name": name} for name in feeds]}
    config = kind.auto_complete_config(pb.ModelConfig(given)).as_dict()
    model = kind()
    model.initialize(
        {
            "model_config": json.dumps(config),
            "model_instance_kind": "CPU",
            "model_instance_device_id": "0",
        }
    )
    request = pb.InferenceRequest(
        inputs=[pb.Tensor(name, _encoded(array)) for name, array in feeds.items()],
        requested_output_names=[output["name"] for output in config["output"]],
        model_name=path.parents[1].name,
    )
    (response,) = model.execute([request])
    return {tensor.name(): tensor.as_numpy() for tensor in response.output_tensors()}


def _encoded(array: np.ndarray) -> np.ndarray:
    if array.dtype.kind not in "OU":
        return array
    result = np.empty(array.shape, object)
    result.ravel()[:] = [str(text).encode() for text in array.ravel().tolist()]
    return result


def _add(archive: zipfile.ZipFile, name: str, data: bytes) -> None:
    info = zipfile.ZipInfo(name, _EPOCH)
    info.compress_type = zipfile.ZIP_DEFLATED
    archive.writestr(info, data)
