"""Artefacts that compute the rows of all requests in one call, as models under Triton's API.

What an artefact is to its loader is an `Artefact` here. `model_class` makes a class of it that a
worker runs like any other model: it lays the requests' rows behind one another, has the artefact
compute the outputs that somebody asked for, and gives each request its rows.

Used by one thread at a time, as every model in a worker is.
"""

import importlib
import json
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from headrace.workers import triton_api as pb
from headrace.workers.elements import DTYPES, Array

log = logging.getLogger("model")


class RefusedInput(ValueError):
    """What a client has sent cannot be given to the model."""


@dataclass(frozen=True, slots=True)
class Declared:
    """An input or output: `datatype` is the protocol's name; `dims` are one row's, -1 is any."""

    name: str
    datatype: str = "FP32"
    dims: tuple[int, ...] = (1,)
    optional: bool = False

    def empty(self) -> Array:
        """It without any rows."""
        return np.empty((0, *(max(size, 0) for size in self.dims)), DTYPES[self.datatype])

    def entry(self, lead: Sequence[int]) -> dict[str, Any]:
        """It as a configuration has it, with the dimensions that come before a row's."""
        kind = "TYPE_STRING" if self.datatype == "BYTES" else f"TYPE_{self.datatype}"
        entry: dict[str, Any] = {"name": self.name, "data_type": kind, "dims": [*lead, *self.dims]}
        return entry | ({"optional": True} if self.optional else {})


class Artefact(Protocol):
    """A loaded file that computes rows."""

    def complete(self, config: dict[str, Any], lead: Sequence[int]) -> None:
        """Fill in what `input` and `output` leave out; `lead` comes before the dims of a row."""

    def bind(self, inputs: Sequence[Declared], outputs: Sequence[Declared], device: str) -> None:
        """Take notice of the whole signature; raises `ValueError` where it cannot be followed."""

    def run(self, inputs: Mapping[str, Array], wanted: Sequence[str], rows: int) -> dict[str, Any]:
        """The wanted outputs by name, a row for each of `rows`; texts are `str`. May raise."""


def model_class(artefact: Artefact, document: Mapping[str, Any], least_rows: int = 0) -> type[Any]:
    """A class with the methods of Triton's models.

    A configuration that does not say how many rows a batch may have gets the server's default, but
    at least `least_rows`.
    """
    default_rows = document.get("default_max_batch_size", 0)

    class Model:
        """What the worker runs."""

        reads_parameters = False

        @staticmethod
        def auto_complete_config(config: pb.ModelConfig) -> pb.ModelConfig:
            """Fill in what the artefact knows."""
            known = config.as_dict()
            if default_rows and not known.get("max_batch_size"):
                known["max_batch_size"] = max(default_rows, least_rows)
            artefact.complete(known, [] if known.get("max_batch_size") else [-1])
            return config

        def initialize(self, args: Mapping[str, str]) -> None:
            """Hold the artefact against its whole configuration."""
            config = json.loads(args["model_config"])
            self.batches = config.get("max_batch_size", 0) > 0
            inputs, self.outputs = (
                {d.name: d for d in _declared(config[kind], self.batches)}
                for kind in ("input", "output")
            )
            for declared in (*inputs.values(), *self.outputs.values()):
                if declared.datatype not in DTYPES:
                    raise ValueError(f"'{declared.name}' cannot be {declared.datatype} here")
            device = f"cuda:{args['model_instance_device_id']}"
            on_gpu = args["model_instance_kind"] == "GPU"
            artefact.bind([*inputs.values()], [*self.outputs.values()], device if on_gpu else "cpu")

        def execute(self, requests: list[pb.InferenceRequest]) -> list[pb.InferenceResponse]:
            """Answer a batch."""
            groups = [requests] if self.batches else [[request] for request in requests]
            return [answer for group in groups for answer in self._answer(group)]

        def _answer(self, requests: list[pb.InferenceRequest]) -> list[pb.InferenceResponse]:
            wanted = [request.requested_output_names() for request in requests]
            names = list(dict.fromkeys(name for each in wanted for name in each))
            try:
                inputs, rows = gathered(requests)
                total = sum(rows)
                found = artefact.run(inputs, names, total) if total else {}
            except RefusedInput as error:
                if len(requests) > 1:
                    raise  # the server runs the batch again in halves
                code = pb.TritonError.INVALID_ARG
                return [pb.InferenceResponse(error=pb.TritonError(str(error), code))]
            whole = {
                name: fitted(found[name], self.outputs[name], total)
                if total
                else self.outputs[name].empty()
                for name in names
            }
            answers, first = [], 0
            for count, own in zip(rows, wanted, strict=True):
                part = slice(first, first + count)
                answers.append(
                    pb.InferenceResponse([pb.Tensor(name, whole[name][part]) for name in own])
                )
                first += count
            return answers

    return Model


def gathered(requests: Sequence[pb.InferenceRequest]) -> tuple[dict[str, Array], list[int]]:
    """The inputs of several requests behind one another, and how many rows each has.

    BYTES become `str`; raises `RefusedInput` where they are not UTF-8.
    """
    arrays = [{t.name(): t.as_numpy() for t in request.inputs()} for request in requests]
    rows = [len(next(iter(each.values()))) if each else 1 for each in arrays]
    result: dict[str, Array] = {}
    for name in arrays[0]:
        parts = [each[name] for each in arrays]
        array = parts[0] if len(parts) == 1 else np.concatenate(parts)
        result[name] = _texts(name, array) if array.dtype == object else array
    return result, rows


def fitted(found: Any, declared: Declared, rows: int) -> Array:
    """What a model has given for an output, in the type and shape that are declared.

    Raises `ValueError` where that would change its meaning.
    """
    array = np.asarray(found)
    if array.shape[:1] != (rows,):
        raise ValueError(
            f"the model gives output '{declared.name}' the shape {list(array.shape)}"
            f" for {rows} rows"
        )
    text, wants_text = array.dtype.kind in "OSU", declared.datatype == "BYTES"
    if not wants_text:
        dtype = DTYPES[declared.datatype]
        if text or not np.can_cast(array.dtype, dtype, "same_kind"):
            given = "text" if text else str(array.dtype)
            raise ValueError(
                f"the model gives output '{declared.name}' as {given}, its configuration says"
                f" {declared.datatype}"
            )
        array = array.astype(dtype, copy=False)
    shape = (rows, *declared.dims)
    if array.shape != shape and not _agree(array.shape, shape):
        try:
            return array.reshape(shape)
        except ValueError:
            raise ValueError(
                f"the model gives output '{declared.name}' in rows of {list(array.shape[1:])}, its"
                f" configuration says {list(declared.dims)}"
            ) from None
    return array


def fill(config: dict[str, Any], kind: str, defaults: Sequence[Declared], lead: Any) -> None:
    """Declare what `defaults` say, or fill in the types and dims of those that are declared."""
    known = {declared.name: declared.entry(lead) for declared in defaults}
    tensors = config.setdefault(kind, [])
    if not tensors:
        tensors += known.values()
    for tensor in tensors:
        entry = known.get(tensor["name"], {})
        if tensor.get("data_type") in (None, "TYPE_INVALID") and entry:
            tensor["data_type"] = entry["data_type"]
        if not tensor.get("dims") and entry:
            tensor["dims"] = entry["dims"]


def threads() -> int:
    """How many threads a library may use here."""
    text = os.environ.get("OMP_NUM_THREADS", "1").partition(",")[0]
    return int(text) if text.isdecimal() and int(text) else 1


def needed(module: str, package: str) -> Any:
    """A library that the model needs; raises `ImportError` that says how to get it."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ImportError(
            f"this model needs the package {package}, and '{error.name}' is missing in its"
            f" environment: run pip install {package} where the server runs, or name it in a"
            " requirements.txt beside the model's configuration"
        ) from error


def unreadable(name: str, what: str, error: Exception) -> ValueError:
    """What to raise for a file that a library cannot load.

    It is told to clients, so that it says nothing of the library's words but which module or
    attribute is missing; the log has the rest.
    """
    reason = type(error).__name__
    if isinstance(error, (ImportError, AttributeError)):
        reason = str(error).partition("\n")[0][:300]
    return ValueError(f"{name} cannot be loaded as {what}: {reason} (the log has details)")


def _declared(tensors: Sequence[Mapping[str, Any]], batches: bool) -> list[Declared]:
    result = []
    for tensor in tensors:
        shape = tensor["reshape"]["shape"] if "reshape" in tensor else tensor["dims"]
        kind = tensor["data_type"].removeprefix("TYPE_")
        result.append(
            Declared(
                tensor["name"],
                "BYTES" if kind == "STRING" else kind,
                tuple(shape) if batches else tuple(shape[1:]),
                bool(tensor.get("optional", False)),
            )
        )
    return result


def _agree(shape: Sequence[int], declared: Sequence[int]) -> bool:
    return len(shape) == len(declared) and all(
        d in (-1, size) for size, d in zip(shape, declared, strict=True)
    )


def _texts(name: str, array: Array) -> Array:
    texts = np.empty(array.size, object)
    try:
        texts[:] = [element.decode() for element in array.ravel().tolist()]
    except UnicodeDecodeError as error:
        raise RefusedInput(f"input '{name}' holds bytes that are not UTF-8") from error
    return texts.reshape(array.shape)
