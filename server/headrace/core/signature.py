"""A model's declared inputs and outputs, and the check of a request against them.

A signature is built once, at load, and checked for every request; whatever can be computed ahead of
requests is. A request that could fail the batch it joins is refused here, before admission.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from headrace.core.call import Call
from headrace.core.datatypes import Datatype
from headrace.core.errors import InvalidRequest
from headrace.core.ragged import Ragged
from headrace.core.tensors import Tensor, TensorArray, brackets

Shape = tuple[int, ...]
_KNOWN = 1024  # distinct request layouts that a signature caches


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One declared input or output.

    `dims` is as on the wire, without the batch dimension; -1 is variable. `reshape` is the shape
    that the model sees, where the configuration relabels it. `columns` are the names of a row's
    elements, in order, if the model knows them.
    """

    name: str
    datatype: Datatype
    dims: Shape
    optional: bool = False
    reshape: Shape | None = None
    columns: tuple[str, ...] = ()

    @property
    def model_dims(self) -> Shape:
        """The shape of a row as the model sees it."""
        return self.dims if self.reshape is None else self.reshape


@dataclass(frozen=True, slots=True)
class Signature:
    """The inputs and outputs of a model.

    `max_batch_size` 0 means that the model does not batch: axis 0 has no special meaning. A
    `decoupled` model may send any number of responses. `parameters` are the names of the request
    parameters that it reads, None if it may read any. A request may have the rows of `parts`
    batches; more than one means that requests are divided. `limit` names what sets the batch size,
    for messages. Unless `strict_outputs`, outputs may have other datatypes and row shapes than
    declared, and with `any_rows` another number of rows than the inputs. Requests to a `stateful`
    model change its state, so that none is run twice. `ragged` inputs may have different shapes in
    one batch.
    """

    model: str
    max_batch_size: int
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    decoupled: bool = False
    parameters: frozenset[str] | None = field(default=None, compare=False)
    parts: int = 1
    limit: str = "the max_batch_size of its configuration"
    strict_outputs: bool = True
    any_rows: bool = False
    stateful: bool = False
    ragged: Ragged | None = None
    texts: tuple[str, ...] = field(init=False, repr=False, compare=False)  # inputs of BYTES
    _inputs: dict[str, TensorSpec] = field(init=False, repr=False, compare=False)
    _outputs: dict[str, TensorSpec] = field(init=False, repr=False, compare=False)
    _required: int = field(init=False, repr=False, compare=False)
    names: list[str] = field(init=False, repr=False, compare=False)  # of the outputs
    batches: bool = field(init=False, repr=False, compare=False)  # axis 0 of tensors counts rows
    # True if all requests may share batches: no optional inputs, fixed shapes only.
    uniform: bool = field(init=False, repr=False, compare=False)
    _known: dict[object, int] = field(init=False, repr=False, compare=False, default_factory=dict)
    _differing: set[str] = field(init=False, repr=False, compare=False, default_factory=set)

    def __post_init__(self) -> None:
        required = [spec for spec in self.inputs if not spec.optional]
        free = frozenset() if self.ragged is None else self.ragged.inputs
        fixed = all(-1 not in s.dims or s.name in free for s in self.inputs)
        uniform = len(required) == len(self.inputs) and fixed
        texts = tuple(spec.name for spec in self.inputs if spec.datatype is Datatype.BYTES)
        object.__setattr__(self, "texts", texts)
        object.__setattr__(self, "names", [spec.name for spec in self.outputs])
        object.__setattr__(self, "batches", self.max_batch_size > 0)
        object.__setattr__(self, "_inputs", {spec.name: spec for spec in self.inputs})
        object.__setattr__(self, "_outputs", {spec.name: spec for spec in self.outputs})
        object.__setattr__(self, "_required", len(required))
        object.__setattr__(self, "uniform", uniform)

    def wire_shape(self, spec: TensorSpec) -> Shape:
        """The shape that clients see: with a leading -1 if the model batches."""
        return (-1, *spec.dims) if self.batches else spec.dims

    def input(self, name: str) -> TensorSpec:
        """The declared input of this name; raises `InvalidRequest`."""
        spec = self._inputs.get(name)
        if spec is None:
            raise InvalidRequest(
                f"unexpected inference input '{name}' for model '{self.model}',"
                f" which has the inputs {quoted(self._inputs)}"
            )
        return spec

    def check_tensor(self, name: str, datatype: Datatype, shape: Sequence[int]) -> None:
        """Check the declared metadata of an input, before its data is decoded.

        For data that is expensive to decode; `check` does not rely on it. Raises `InvalidRequest`.
        """
        spec = self.input(name)
        if datatype is not spec.datatype:
            raise InvalidRequest(self._wrong_datatype(spec, datatype))
        row = shape[1:] if self.batches else shape
        if not fits(tuple(row), spec.dims) or (self.batches and not shape):
            raise InvalidRequest(self._wrong_shape(spec, shape))
        if self.batches and shape[0] > self.max_batch_size * self.parts:
            raise InvalidRequest(self._too_many_rows(shape[0]))

    def check(self, request: Call) -> int:
        """Return the number of rows in `request` (1 if the model does not batch).

        Raises `InvalidRequest` for the first mismatch: an unknown output, a missing or unknown
        input, a datatype, a shape, differing or too many rows.
        """
        # Names, datatypes and shapes repeat; a layout that has passed once passes again.
        inputs = request.inputs
        key = (request.outputs, *[(n, t.datatype, t.array.shape) for n, t in inputs.items()])
        rows = self._known.get(key)
        if rows is None:
            rows = self._check(request)
            if len(self._known) < _KNOWN:
                self._known[key] = rows
        return rows

    def _check(self, request: Call) -> int:
        for name in request.outputs:
            if name not in self._outputs:
                raise InvalidRequest(
                    f"unexpected inference output '{name}' for model '{self.model}',"
                    f" which has the outputs {quoted(self._outputs)}"
                )
        inputs = request.inputs
        if not self._required <= len(inputs) <= len(self._inputs):
            raise InvalidRequest(self._wrong_count(inputs))
        rows = -1
        for name, tensor in inputs.items():
            spec = self.input(name)
            if tensor.datatype is not spec.datatype:
                raise InvalidRequest(self._wrong_datatype(spec, tensor.datatype))
            shape = tensor.array.shape
            if not self.batches:
                if shape != spec.dims and not fits(shape, spec.dims):
                    raise InvalidRequest(self._wrong_shape(spec, shape))
                continue
            if not shape:
                raise InvalidRequest(
                    f"input '{name}' has no shape but model requires batch dimension"
                    f" for '{self.model}'"
                )
            if shape[1:] != spec.dims and not fits(shape[1:], spec.dims):
                raise InvalidRequest(self._wrong_shape(spec, shape))
            if shape[0] != rows and rows != -1:
                raise InvalidRequest(
                    f"input '{name}' batch size does not match other inputs for '{self.model}':"
                    f" got {shape[0]} rows after {rows}"
                )
            rows = shape[0]
        if self._required < len(self._inputs):
            for spec in self.inputs:
                if not spec.optional and spec.name not in inputs:
                    raise InvalidRequest(self._wrong_count(inputs))
        if not self.batches:
            return 1
        if rows == -1:
            return 1  # every input is optional and none was given
        if rows > self.max_batch_size * self.parts:
            raise InvalidRequest(self._too_many_rows(rows))
        return rows

    def differs(self, output: str) -> bool:
        """Note an output that differs from its declaration; True the first time."""
        if output in self._differing:
            return False
        self._differing.add(output)
        return True

    def batch_key(self, request: Call) -> object:
        """Key that requests of one batch share: the inputs present, with their row shapes."""
        if self.uniform:
            return None
        inputs = request.inputs
        shapes = [
            inputs[spec.name].array.shape[1:] if spec.name in inputs else None
            for spec in self.inputs
        ]
        if self.ragged is not None:
            for place, spec in enumerate(self.inputs):
                if spec.name in self.ragged.inputs and shapes[place] is not None:
                    shapes[place] = ()
        return tuple(shapes)

    def _wrong_count(self, inputs: dict[str, Tensor]) -> str:
        total = len(self._inputs)
        expected = (
            f"{total} inputs"
            if self._required == total
            else f"number of inputs between {self._required} and {total}"
        )
        missing = [s.name for s in self.inputs if not s.optional and s.name not in inputs]
        unknown = [name for name in inputs if name not in self._inputs]
        text = (
            f"expected {expected} but got {len(inputs)} inputs for model '{self.model}'."
            f" Got input(s) {quoted(inputs)}"
        )
        if missing:
            text += (
                f", but missing required input(s) {quoted(missing)}."
                " Please provide all required input(s)."
            )
        elif unknown:
            text += f", of which {quoted(unknown)} are not inputs of the model."
        return text

    def _wrong_datatype(self, spec: TensorSpec, datatype: Datatype) -> str:
        return (
            f"inference input '{spec.name}' data-type is '{datatype}',"
            f" but model '{self.model}' expects '{spec.datatype}'"
        )

    def _too_many_rows(self, rows: int) -> str:
        why = f"its limit is {self.limit}"
        if self.parts > 1:
            why = f"a request may take {self.parts} batches, whose size is {self.limit}"
        return (
            f"inference request batch-size must be <= {self.max_batch_size * self.parts}"
            f" for '{self.model}', got {rows} ({why})"
        )

    def _wrong_shape(self, spec: TensorSpec, shape: Sequence[int]) -> str:
        note = ""
        if self.batches:
            note = (
                " NOTE: Setting a non-zero max_batch_size in the model config requires a batch"
                " dimension to be prepended to each input shape."
            )
        return (
            f"unexpected shape for input '{spec.name}' for model '{self.model}'."
            f" Expected {brackets(self.wire_shape(spec))}, got {brackets(shape)}.{note}"
        )


def fits(shape: Shape, dims: Shape) -> bool:
    """True if `shape` matches `dims`, in which -1 matches any size."""
    return len(shape) == len(dims) and all(
        d in (-1, size) for size, d in zip(shape, dims, strict=True)
    )


def relabel(shape: Shape, source: Shape, target: Shape) -> Shape:
    """Rewrite `shape`, which fits `source`, as `target`.

    Each -1 of `target` takes the next size that `source` leaves open.
    """
    sizes = iter([size for size, d in zip(shape, source, strict=True) if d == -1])
    return tuple(next(sizes) if d == -1 else d for d in target)


def reshaped(array: TensorArray, spec: TensorSpec, batches: bool, to_model: bool) -> TensorArray:
    """Convert the row shape of `array` between the client's and the model's form."""
    if spec.reshape is None:
        return array
    source, target = (spec.dims, spec.reshape) if to_model else (spec.reshape, spec.dims)
    lead = array.shape[:1] if batches else ()
    return array.reshape(lead + relabel(array.shape[len(lead) :], source, target))


def quoted(names: Iterable[str]) -> str:
    """Names in the form used by messages: `['A','B']`."""
    return "[" + ",".join(f"'{name}'" for name in names) + "]"


def difference(reference: Signature, other: Signature) -> str:
    """The first reason why requests for `reference` do not fit `other`; "" if they do.

    `other` may have further outputs and further optional inputs.
    """
    lead = "differs from the baseline: "
    if reference.decoupled != other.decoupled:
        return f"{lead}it is {'' if other.decoupled else 'not '}decoupled"
    if reference.batches != other.batches:
        return f"{lead}it does {'' if other.batches else 'not '}batch"
    inputs = {spec.name: spec for spec in other.inputs}
    outputs = {spec.name: spec for spec in other.outputs}
    for spec in reference.inputs:
        if not _alike(spec, inputs.get(spec.name)):
            return f"{lead}its input '{spec.name}' is missing, or of another datatype or shape"
    known = {spec.name: spec.optional for spec in reference.inputs}
    for spec in other.inputs:
        if not spec.optional and known.get(spec.name, True):
            return f"{lead}it needs the input '{spec.name}'"
    for spec in reference.outputs:
        if not _alike(spec, outputs.get(spec.name)):
            return f"{lead}its output '{spec.name}' is missing, or of another datatype or shape"
    return ""


def _alike(spec: TensorSpec, other: TensorSpec | None) -> bool:
    return other is not None and spec.datatype is other.datatype and spec.dims == other.dims
