"""The stage of padding: calls with padded inputs go on, and their responses come back cut.

Padded inputs are charged to the server's account until the call is answered: a short request may
become many times as large. Large ones are padded on the workbench. Owned by the event-loop thread.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

from headrace.core.call import Call, Done, InferResponse, Stage, Submit
from headrace.core.limits import Charge
from headrace.core.signature import Signature
from headrace.core.tensors import Tensor
from headrace.engine.padding import PaddingParts
from headrace.engine.workbench import Expected
from headrace.plugins.padding.configuration import Misfit, read_dims
from headrace.plugins.padding.decisions import (
    PaddedDim,
    PaddedSize,
    added_bytes,
    cut,
    decide,
    padded,
)
from headrace.protocol.pb.model_config_pb2 import ModelConfig
from headrace.repository.config import Problem
from headrace.repository.validation import BUCKETS

_HERE = 256 << 10  # bytes of padded inputs that are written on the event loop


class BucketPadding:
    """The padding of one version; a `headrace.engine.padding.Padding`."""

    def __init__(self, config: ModelConfig) -> None:
        self._problem = ""
        self._dims: tuple[PaddedDim, ...] = ()
        try:
            self._dims = read_dims(config)
        except Misfit as misfit:
            self._problem = str(misfit)

    def problems(self) -> Iterator[Problem]:
        """Implements `Padding.problems`."""
        if self._problem:
            yield Problem(f"parameters['{BUCKETS}']", self._problem)

    def shown(self, given: Signature) -> Signature:
        """Implements `Padding.shown`."""
        filled = {one.name for dim in self._dims for one in (dim.mask, dim.lengths) if one}
        inputs = [replace(s, optional=s.optional or s.name in filled) for s in given.inputs]
        return replace(given, inputs=tuple(inputs))

    def stage(self, parts: PaddingParts, submit: Submit) -> Submit:
        """Implements `Padding.stage`."""
        dims = self._dims

        def stage(call: Call) -> None:
            shapes = {name: tensor.array.shape for name, tensor in call.inputs.items()}
            of_call = _PaddedCall(parts, decide(dims, shapes))
            call.enter(of_call, partial(of_call.begin, submit))

        return stage


class _PaddedCall(Stage):
    """The padding of one call, for which `_charged` bytes are charged."""

    __slots__ = ("_charged", "_parts", "_sizes")

    def __init__(self, parts: PaddingParts, sizes: Sequence[PaddedSize]) -> None:
        self._parts = parts
        self._sizes = sizes
        self._charged = 0

    def begin(self, submit: Submit, call: Call) -> None:
        """Pad the inputs and `submit` the call, at once or later; raises `ServerError`."""
        parts, sizes, rows = self._parts, self._sizes, call.rows
        nbytes = added_bytes(sizes, call.inputs, rows)
        if nbytes:  # otherwise the request is as large as it was admitted
            parts.account.grow(nbytes)
            self._charged = nbytes
        for dim, length, bucket in sizes:
            parts.counts.add(dim.name, rows, length, bucket)
        if nbytes <= _HERE:
            call.inputs = padded(sizes, call.inputs, rows)
            submit(call)
            return
        inputs = call.inputs

        def work(charge: Charge) -> dict[str, Tensor]:
            return padded(sizes, inputs, rows)

        Expected(parts.bench, nbytes, work, partial(_go_on, submit, call), call, parts.expect)

    def transform(self, call: Call, response: InferResponse, final: bool, done: Done) -> None:
        """Cut the outputs that follow padded dimensions."""
        response.outputs = cut(self._sizes, call.model_name, response.outputs)

    def over(self, call: Call) -> None:
        """Release what was charged."""
        charged, self._charged = self._charged, 0
        self._parts.account.count(-charged)


def _go_on(submit: Submit, call: Call, inputs: dict[str, Tensor]) -> None:
    call.inputs = inputs
    submit(call)
