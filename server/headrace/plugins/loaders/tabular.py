"""Artefacts that compute rows in one call, as models with Triton's API; and predictors of tables.

A loaded file is an `Artefact`. `model_class` makes a class of it that a worker runs like any other
model: it concatenates the requests' rows, computes the requested outputs, and returns each request
its rows. Used by one thread at a time, like every model in a worker.

A predictor of tables takes its features as one matrix, or each column as a separate input. A table
of numbers is a matrix unless the configuration declares columns; with other types of columns, each
is an input.
"""

import importlib
import json
import logging
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from headrace.ipc.elements import DTYPES, Array, datatype_of
from headrace.workers import triton_api as pb

log = logging.getLogger("model")


class RefusedInput(ValueError):
    """An input that cannot be passed to the model."""


@dataclass(frozen=True, slots=True)
class DeclaredTensor:
    """An input or output: `datatype` is the protocol's name; `dims` are a row's, -1 is variable."""

    name: str
    datatype: str = "FP32"
    dims: tuple[int, ...] = (1,)
    optional: bool = False

    def empty(self) -> Array:
        """An array of this type without rows."""
        return np.empty((0, *(max(size, 0) for size in self.dims)), DTYPES[self.datatype])

    def entry(self, lead: Sequence[int]) -> dict[str, Any]:
        """The tensor's entry in a configuration; `lead` are the dimensions before a row's."""
        kind = "TYPE_STRING" if self.datatype == "BYTES" else f"TYPE_{self.datatype}"
        entry: dict[str, Any] = {"name": self.name, "data_type": kind, "dims": [*lead, *self.dims]}
        return entry | ({"optional": True} if self.optional else {})


class Artefact(Protocol):
    """A loaded file that computes rows.

    `columns` are the names of the columns that it was trained with, in order; none if unknown.
    """

    @property
    def columns(self) -> Sequence[str]: ...

    def complete(self, config: dict[str, Any], lead: Sequence[int]) -> None:
        """Complete `input` and `output`; `lead` precedes the dims of a row."""

    def bind(
        self, inputs: Sequence[DeclaredTensor], outputs: Sequence[DeclaredTensor], device: str
    ) -> None:
        """Adapt to the complete signature; raises `ValueError` if that is not possible."""

    def run(self, inputs: Mapping[str, Array], wanted: Sequence[str], rows: int) -> dict[str, Any]:
        """The wanted outputs by name, with `rows` rows; texts are `str`. May raise."""


def model_class(artefact: Artefact, document: Mapping[str, Any], least_rows: int = 0) -> type[Any]:
    """Make a class with the methods of Triton's Python models.

    If the configuration sets no maximum of rows, it is the server's default, but at least
    `least_rows`.
    """
    default_rows = document.get("default_max_batch_size", 0)

    class TabularModel:
        """An artefact with Triton's API."""

        reads_parameters = False
        trained_columns = tuple(artefact.columns)

        @staticmethod
        def auto_complete_config(config: pb.ModelConfig) -> pb.ModelConfig:
            """Complete the configuration from the artefact."""
            known = config.as_dict()
            if default_rows and not known.get("max_batch_size"):
                known["max_batch_size"] = max(default_rows, least_rows)
            artefact.complete(known, [] if known.get("max_batch_size") else [-1])
            return config

        def initialize(self, args: Mapping[str, str]) -> None:
            """Bind the artefact to its complete configuration."""
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

    return TabularModel


def gathered(requests: Sequence[pb.InferenceRequest]) -> tuple[dict[str, Array], list[int]]:
    """Concatenate the inputs of several requests; returns them with the rows of each.

    BYTES become `str`; raises `RefusedInput` if they are not UTF-8.
    """
    arrays = [{t.name(): t.as_numpy() for t in request.inputs()} for request in requests]
    rows = [len(next(iter(each.values()))) if each else 1 for each in arrays]
    result: dict[str, Array] = {}
    for name in arrays[0]:
        parts = [each[name] for each in arrays]
        array = parts[0] if len(parts) == 1 else np.concatenate(parts)
        result[name] = _texts(name, array) if array.dtype == object else array
    return result, rows


def fitted(found: Any, declared: DeclaredTensor, rows: int) -> Array:
    """Convert an output to the declared type and shape.

    Raises `ValueError` if that would change its meaning.
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


def fill(config: dict[str, Any], kind: str, defaults: Sequence[DeclaredTensor], lead: Any) -> None:
    """Declare tensors from `defaults`, or complete the types and dims of declared ones."""
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
    """The number of threads that a library may use."""
    text = os.environ.get("OMP_NUM_THREADS", "1").partition(",")[0]
    return int(text) if text.isdecimal() and int(text) else 1


def needed(module: str, package: str) -> Any:
    """Import a required library; raises `ImportError` with installation advice."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ImportError(
            f"this model needs the package {package}, and '{error.name}' is missing in its"
            f" environment: run pip install {package} where the server runs, or name it in a"
            " requirements.txt beside the model's configuration"
        ) from error


def unreadable(name: str, what: str, error: Exception) -> ValueError:
    """The error for a file that a library cannot load.

    The text reaches clients, so it has nothing of the library's message but the name of a missing
    module or attribute; the log has the rest.
    """
    reason = type(error).__name__
    if isinstance(error, (ImportError, AttributeError)):
        reason = str(error).partition("\n")[0][:300]
    return ValueError(f"{name} cannot be loaded as {what}: {reason} (the log has details)")


def _declared(tensors: Sequence[Mapping[str, Any]], batches: bool) -> list[DeclaredTensor]:
    result = []
    for tensor in tensors:
        shape = tensor["reshape"]["shape"] if "reshape" in tensor else tensor["dims"]
        kind = tensor["data_type"].removeprefix("TYPE_")
        result.append(
            DeclaredTensor(
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


INPUT = "input-0"  # as in KServe's examples
LEAST_ROWS = 4096  # minimum batch size: rows of a table are cheap


@dataclass(frozen=True, slots=True)
class Feature:
    """A feature. `sample` is a value that the model accepts."""

    name: str
    datatype: str = "FP64"
    sample: Any = 0
    dims: tuple[int, ...] = (1,)
    optional: bool = False

    @property
    def declared(self) -> DeclaredTensor:
        """The column as an input."""
        return DeclaredTensor(self.name, self.datatype, self.dims, self.optional)


@dataclass(frozen=True, slots=True)
class Traits:
    """The inputs and outputs of a predictor.

    `columns` are in training order, and empty if their names are unknown. `matrix` is the single
    input for all of them; None if impossible. `by_column` selects which of the two is offered.
    `names` are all possible outputs, `offered` those declared by default, and `outputs` their known
    types. Unless `named`, the library has made up the names of the columns.
    """

    columns: Sequence[Feature]
    matrix: DeclaredTensor | None
    by_column: bool
    names: Sequence[str]
    offered: Sequence[str]
    outputs: Sequence[DeclaredTensor] = ()
    named: bool = True


class Predictor(Protocol):
    """A file, loaded by its library, that predicts rows of a table."""

    traits: Traits

    def from_matrix(self, array: Array) -> Any:
        """The table for a matrix of rows."""

    def from_columns(self, columns: Mapping[str, Array], rows: int) -> Any:
        """The table for columns, of which optional ones may be absent."""

    def run(self, table: Any, names: Sequence[str]) -> Mapping[str, Any]:
        """Outputs by name."""


class Tabular:
    """A predictor as an artefact."""

    def __init__(self, predictor: Predictor) -> None:
        self._predictor = predictor
        self._traits = traits = predictor.traits
        self._columns = {column.name: column for column in traits.columns}
        self._matrix: str | None = None  # name of the matrix input
        self._outputs: dict[str, str] = {}  # the predictor's output names by configured name

    @property
    def columns(self) -> Sequence[str]:
        """The names of the columns, unless the library has made them up."""
        return [*self._columns] if self._traits.named else []

    def complete(self, config: dict[str, Any], lead: Sequence[int]) -> None:
        """Declare a matrix or columns, and the outputs of a sample; raises `ValueError`."""
        traits = self._traits
        given = [tensor["name"] for tensor in config.get("input", ())]
        offer = traits.matrix
        self._matrix = None if traits.by_column or offer is None else offer.name
        if given:
            self._matrix = self._whole(given)
        if self._matrix is None or offer is None:
            fill(config, "input", [column.declared for column in traits.columns], lead)
        else:
            fill(config, "input", [replace(offer, name=self._matrix)], lead)
        outputs = config.get("output", ())
        if outputs and all(
            tensor.get("dims") and tensor.get("data_type") not in (None, "TYPE_INVALID")
            for tensor in outputs
        ):
            return
        self._name_outputs([tensor["name"] for tensor in outputs])
        names = self._outputs or {name: name for name in traits.offered}
        known = {d.name: d for d in traits.outputs} or self._told(names.values())
        found = [
            DeclaredTensor(own, known[name].datatype, known[name].dims)
            for own, name in names.items()
            if name in known
        ]
        fill(config, "output", found, lead)

    def bind(
        self, inputs: Sequence[DeclaredTensor], outputs: Sequence[DeclaredTensor], device: str
    ) -> None:
        """Determine how inputs form a table; raises `ValueError`."""
        if device != "cpu":
            log.warning("this model runs on the CPU; its instance group asks for a GPU")
        matrix = self._traits.matrix
        self._matrix = self._whole([declared.name for declared in inputs])
        if self._matrix is None:
            self._check_columns({declared.name for declared in inputs})
        elif matrix is not None:
            _check_matrix(inputs[0], matrix)
        self._name_outputs([declared.name for declared in outputs])
        sample = self._sample()
        if sample is None:
            return
        try:
            found = self.run(sample, [declared.name for declared in outputs], 1)
        except Exception as error:  # the sample itself may be invalid
            log.warning("a row of zeros cannot be predicted: %s", error)
            return
        for declared in outputs:
            fitted(found[declared.name], declared, 1)

    def run(self, inputs: Mapping[str, Array], wanted: Sequence[str], rows: int) -> dict[str, Any]:
        """The wanted outputs for a table."""
        predictor = self._predictor
        if self._matrix is not None:
            table = predictor.from_matrix(inputs[self._matrix])
        else:
            columns = {
                name: array.reshape(rows) if self._columns[name].dims == (1,) else array
                for name, array in inputs.items()
            }
            table = predictor.from_columns(columns, rows)
        names = dict.fromkeys(self._outputs[name] for name in wanted)
        found = predictor.run(table, list(names))
        return {name: found[self._outputs[name]] for name in wanted}

    def _whole(self, names: Sequence[str]) -> str | None:
        """The matrix input among the declared ones; None if they are columns.

        Raises `ValueError` if they are neither.
        """
        unknown = [name for name in names if name not in self._columns]
        if not unknown and names:
            return None
        if len(names) == 1 and self._traits.matrix is not None:
            return names[0]
        if not self._columns:
            raise ValueError(
                "the model does not know the names of its columns: declare one input for all of"
                f" them, got {', '.join(names)}"
            )
        known = ", ".join(list(self._columns)[:20])
        raise ValueError(f"the model has no column '{unknown[0]}'; it has {known}")

    def _check_columns(self, given: Collection[str]) -> None:
        required = [c.name for c in self._columns.values() if not c.optional]
        missing = [name for name in required if name not in given]
        if missing:
            raise ValueError(
                f"the model also needs the columns {', '.join(missing)}: declare them, as optional"
                " if they may be left out"
            )

    def _name_outputs(self, names: Sequence[str]) -> None:
        """Match declared outputs with the predictor's; raises `ValueError`."""
        known = self._traits.names
        unknown = [name for name in names if name not in known]
        if len(names) == 1 and unknown:
            self._outputs = {names[0]: self._traits.offered[0]}
            return
        if unknown:
            raise ValueError(f"the model has no output '{unknown[0]}'; it has {', '.join(known)}")
        self._outputs = {name: name for name in names}

    def _sample(self) -> dict[str, Array] | None:
        """Inputs of one row; None if the columns are unknown."""
        matrix, offer = self._matrix, self._traits.matrix
        if matrix is None:
            return {c.name: _filled(c.declared, c.sample) for c in self._traits.columns}
        if offer is None or any(d < 0 for d in offer.dims):
            return None
        return {matrix: _filled(offer, "" if offer.datatype == "BYTES" else 0)}

    def _told(self, names: Iterable[str]) -> dict[str, DeclaredTensor]:
        """Types and shapes of outputs, from a sample run; raises `ValueError` if it fails."""
        sample = self._sample()
        if sample is None:
            raise ValueError("the model does not say what it takes: declare input and output")
        known = self._outputs
        self._outputs = {name: name for name in names}
        try:
            found = self.run(sample, list(names), 1)
        except Exception as error:
            raise ValueError(
                "what the model gives cannot be told, because it cannot predict a row of zeros:"
                f" declare its outputs ({type(error).__name__}; the log has details)"
            ) from error
        finally:
            self._outputs = known
        told = {}
        for name, result in found.items():
            if isinstance(result, list):
                continue  # several arrays under one name are not a tensor
            array = np.asarray(result)
            datatype = datatype_of(array.dtype)
            if datatype is not None:
                told[name] = DeclaredTensor(name, datatype, array.shape[1:] or (1,))
        return told


def stacked(
    columns: Sequence[Feature],
    given: Mapping[str, Array],
    rows: int,
    categories: Mapping[str, Mapping[Any, int]],
) -> Array:
    """Columns as a matrix in training order, with the codes of categories.

    Absent values and unknown categories are NaN.
    """
    matrix = np.full((rows, len(columns)), np.nan)
    for index, column in enumerate(columns):
        values: Any = given.get(column.name)
        if values is None:
            continue
        if (known := categories.get(column.name)) is not None:
            values = [known.get(value, np.nan) for value in values.tolist()]
        matrix[:, index] = values
    return matrix


def _check_matrix(declared: DeclaredTensor, offer: DeclaredTensor) -> None:
    if (declared.datatype == "BYTES") != (offer.datatype == "BYTES"):
        raise ValueError(
            f"the model takes {offer.datatype} for '{declared.name}', the configuration says"
            f" {declared.datatype}"
        )
    sizes = [np.prod(dims, dtype=int) for dims in (declared.dims, offer.dims)]
    if min(*declared.dims, *offer.dims, 0) >= 0 and sizes[0] != sizes[1]:
        raise ValueError(
            f"the model takes {sizes[1]} features a row, the configuration says"
            f" dims {list(declared.dims)} for '{declared.name}'"
        )


def _filled(declared: DeclaredTensor, value: Any) -> Array:
    shape = (1, *(max(d, 1) for d in declared.dims))
    return np.full(shape, value, DTYPES[declared.datatype])
