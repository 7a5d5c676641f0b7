"""The samples of a configuration's `model_warmup`, read and held against its inputs.

Everything that can be known without running the model is told here, with file, line and field.
Files lie in the directory `warmup` of the model, and nowhere else, wherever symlinks lead.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from headrace.core.datatypes import BY_CONFIG_NUMBER, ITEM_SIZES, NUMPY, Datatype
from headrace.core.errors import InvalidRequest
from headrace.core.shapes import brackets
from headrace.core.signature import Shape, Signature, TensorSpec, fits, quoted
from headrace.core.tensors import Array, element_count
from headrace.execution.warming import Sample, SampleInput, Synthetic
from headrace.repository.config import ConfigFile, Problem, refuse
from headrace.wire.bytes_tensor import decode_bytes_tensor
from headrace.wire.pb.model_config_pb2 import ModelConfig, ModelWarmup

DIRECTORY = "warmup"


def read_samples(
    file: ConfigFile, config: ModelConfig, signature: Signature, root: Path
) -> tuple[Sample, ...]:
    """The samples of a complete configuration, of a model whose directory is `root`.

    One with a `batch_size` of 0 is left out. Reads files. Raises `InvalidConfig`.
    """
    samples: list[Sample] = []
    found: list[Problem] = []
    for index, setting in enumerate(config.model_warmup):
        if setting.batch_size:
            reader = _Reader(f"model_warmup[{index}]", setting, signature, root)
            samples.append(reader.sample())
            found += reader.problems
    refuse(file, found)
    return tuple(samples)


class _Wrong(Exception):
    """An input that cannot be: `path` is the field, below that of the input."""

    def __init__(self, path: str, text: str) -> None:
        super().__init__(text)
        self.path = path


class _Reader:
    """Reads one sample; `problems` are what is wrong with it."""

    def __init__(self, path: str, setting: ModelWarmup, signature: Signature, root: Path) -> None:
        self.problems: list[Problem] = []
        self._path = path
        self._setting = setting
        self._signature = signature
        self._root = root

    def sample(self) -> Sample:
        """The sample, as far as it is right."""
        setting, signature = self._setting, self._signature
        most = max(signature.max_batch_size, 1)
        if setting.batch_size > most:
            text = f"must be at most {most}, as max_batch_size has it, got {setting.batch_size}"
            self.problems.append(Problem(f"{self._path}.batch_size", text))
        inputs: dict[str, SampleInput] = {}
        for name in setting.inputs:
            path = f"{self._path}.inputs['{name}']"
            try:
                inputs[name] = self._input(name, signature.input(name))
            except InvalidRequest:
                known = quoted(spec.name for spec in signature.inputs)
                self.problems.append(Problem(path, f"the model has no such input, it has {known}"))
            except _Wrong as wrong:
                self.problems.append(Problem(f"{path}.value{wrong.path}", str(wrong)))
        self.problems += self._missing()
        return Sample(setting.name, setting.batch_size, setting.count or 1, inputs)

    def _missing(self) -> Iterator[Problem]:
        names = self._setting.inputs
        missing = [
            spec.name
            for spec in self._signature.inputs
            if not spec.optional and spec.name not in names
        ]
        if missing:
            yield Problem(f"{self._path}.inputs", f"the model also needs {quoted(missing)}")

    def _input(self, name: str, spec: TensorSpec) -> SampleInput:
        """An input; raises `_Wrong`."""
        told = self._setting.inputs[name]
        datatype = BY_CONFIG_NUMBER.get(told.data_type)
        if datatype is not spec.datatype:
            given = f"got {datatype}" if datatype is not None else "it is missing"
            raise _Wrong(".data_type", f"must be that of the input, {spec.datatype}; {given}")
        dims = tuple(told.dims)
        if min(dims, default=0) < 0:
            text = f"every dimension must be given, got {brackets(dims)}"
            raise _Wrong(".dims", text)
        if not fits(dims, spec.dims):
            expected = f"those of the input are {brackets(spec.dims)}"
            note = ", without that of the batch" if self._signature.batches else ""
            raise _Wrong(".dims", f"{brackets(dims)} do not fit: {expected}{note}")
        shape = (1, *dims) if self._signature.batches else dims
        match told.WhichOneof("input_data_type"):
            case "zero_data":
                return SampleInput(datatype, shape, Synthetic.ZEROS)
            case "random_data":
                return SampleInput(datatype, shape, Synthetic.RANDOM)
            case "input_data_file":
                content = self._content(told.input_data_file, datatype, shape)
                return SampleInput(datatype, shape, content)
            case _:
                raise _Wrong("", "one of zero_data, random_data and input_data_file must be set")

    def _content(self, name: str, datatype: Datatype, shape: Shape) -> tuple[Array, ...]:
        """What is in a file: the data of one request, or of all of them."""
        try:
            raw = _read(self._root / DIRECTORY, name)
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error  # not the path, which clients see
            raise _Wrong(".input_data_file", f"'{name}' cannot be read: {reason}") from error
        requests = self._setting.batch_size
        try:
            if datatype is Datatype.BYTES:
                return _texts(raw, shape, requests)
            return _numbers(raw, datatype, shape, requests)
        except InvalidRequest as error:
            raise _Wrong(".input_data_file", f"'{name}': {error}") from error


def _read(directory: Path, name: str) -> bytes:
    """The content of a file in `directory`; raises `OSError` or `ValueError`."""
    place = directory.resolve()
    path = (place / name).resolve()
    if not path.is_relative_to(place) or path == place:
        raise ValueError(f"it lies outside of the model's directory '{DIRECTORY}'")
    return path.read_bytes()


def _numbers(raw: bytes, datatype: Datatype, shape: Shape, requests: int) -> tuple[Array, ...]:
    size = element_count("", shape) * ITEM_SIZES[datatype]
    if len(raw) not in (size, size * requests):
        each = f" (or {size * requests} for {requests} requests)" if requests > 1 else ""
        raise InvalidRequest(
            f"{datatype} of shape {brackets(shape)} takes {size} bytes{each}, the file has"
            f" {len(raw)}"
        )
    count = len(raw) // size if size else 1
    return tuple(np.frombuffer(raw, NUMPY[datatype]).reshape(count, *shape))


def _texts(raw: bytes, shape: Shape, requests: int) -> tuple[Array, ...]:
    """Elements with their lengths before them, as clients send them."""
    try:
        return (np.asarray(decode_bytes_tensor("", shape, raw).array),)
    except InvalidRequest as error:
        try:
            return tuple(np.asarray(decode_bytes_tensor("", (requests, *shape), raw).array))
        except InvalidRequest:
            text = str(error).replace(" for inference input ''", "")
            raise InvalidRequest(text) from None
