"""Runs of a session whose outputs stay where they are computed until they are copied once.

Inputs are bound as they lie in the host's memory, and copied to the device when they are bound:
from page-locked memory without a copy in between. Outputs are bound to the device, and copied from
there into memory that is given to whoever wants them. Without binding, ONNX Runtime copies outputs
into memory of its own first.
"""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import onnxruntime as ort

from headrace.core.datatypes import NUMPY, Datatype
from headrace.core.tensors import Array, TensorArray

# Copies bytes of device memory, by their address, into memory of the host.
CopyToHost = Callable[[int, memoryview], None]
# Gives an array of so many bytes, or None where any other memory does.
Allocate = Callable[[int], Array | None]

_ONNX_BFLOAT16 = 16  # TensorProto.DataType


class BoundRun:
    """Runs a session with inputs and outputs of fixed-size datatypes. Used by one thread at a time.

    `device` is a name that ONNX Runtime has for one, `number` is which of them.
    """

    def __init__(
        self,
        session: ort.InferenceSession,
        datatypes: Mapping[str, Datatype],
        device: str,
        number: int,
        copy: CopyToHost,
        allocate: Allocate = lambda _: None,
    ) -> None:
        """`datatypes` are those of the outputs."""
        self._session = session
        self._datatypes = datatypes
        self._device = device
        self._number = number
        self._copy = copy
        self._allocate = allocate

    def infer(
        self,
        inputs: Mapping[str, TensorArray],
        outputs: Sequence[str],
        options: ort.RunOptions,
    ) -> list[Array]:
        """Run the graph; arrays in the order of `outputs`. Raises whatever the run raises."""
        # One for each run: it holds what is bound for as long as it is there.
        binding = self._session.io_binding()
        for name, array in inputs.items():
            _bind_input(binding, name, np.ascontiguousarray(array))
        for name in outputs:
            binding.bind_output(name, self._device, self._number)
        self._session.run_with_iobinding(binding, options)
        binding.synchronize_outputs()
        found = zip(outputs, binding.get_outputs(), strict=True)
        return [self._host_array(self._datatypes[name], value) for name, value in found]

    def _host_array(self, datatype: Datatype, value: ort.OrtValue) -> Array:
        size = value.tensor_size_in_bytes()
        memory = self._allocate(size)
        if memory is None:
            memory = np.empty(size, np.uint8)
        if size:
            self._copy(value.data_ptr(), memory.data)
        return memory.view(NUMPY[datatype]).reshape(value.shape())


def _bind_input(binding: ort.IOBinding, name: str, array: Array) -> None:
    if array.dtype == NUMPY[Datatype.BF16]:  # of which ONNX Runtime has no numpy form
        bits = array.view(np.uint16)
        value = ort.OrtValue.ortvalue_from_numpy_with_onnx_type(bits, _ONNX_BFLOAT16)
        binding.bind_ortvalue_input(name, value)
    else:
        binding.bind_cpu_input(name, array)
