"""What one run of a freshly loaded model costs, which also warms it up."""

import logging
from time import perf_counter_ns

import numpy as np

from headrace.core.datatypes import NUMPY, Datatype
from headrace.core.signature import Signature, TensorSpec
from headrace.core.tensors import Array
from headrace.execution.choice import BUDGET_NS
from headrace.execution.runner import LoadedModel

log = logging.getLogger(__name__)

_WARM_RUNS = 3


def measure(model: LoadedModel, signature: Signature) -> float:
    """Nanoseconds of one run at the largest batch, after warm-up, with zeros for input.

    A model that fails on zeros is none that can be measured; it counts as too heavy for the event
    loop.
    """
    cost = float("inf")
    names = [spec.name for spec in signature.outputs]
    for rows in sorted({1, max(signature.max_batch_size, 1)}):
        if rows > 1 and cost > BUDGET_NS:
            break  # too heavy already; a large batch would only take time and memory
        inputs = {spec.name: _zeros(spec, signature, rows) for spec in signature.inputs}
        cost = float("inf")
        for _ in range(_WARM_RUNS):
            begun = perf_counter_ns()
            try:
                model.infer(inputs, names)
            except Exception as error:  # any: the model says nothing about what it takes
                log.debug("model %s cannot be measured with zeros: %s", signature.model, error)
                return float("inf")
            cost = min(cost, perf_counter_ns() - begun)
            if cost > 100 * BUDGET_NS:
                return cost  # as heavy as this, it needs no more runs to be known
    return cost


def _zeros(spec: TensorSpec, signature: Signature, rows: int) -> Array:
    dims = spec.dims if spec.reshape is None else spec.reshape
    shape = [*([rows] if signature.batches else []), *(1 if d == -1 else d for d in dims)]
    if spec.datatype is Datatype.BYTES:
        array = np.empty(shape, object)
        array.fill(b"0")  # text that is a number too, for graphs that cast it
        return array
    return np.zeros(shape, NUMPY[spec.datatype])
