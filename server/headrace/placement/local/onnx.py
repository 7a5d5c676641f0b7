"""ONNX Runtime in this process."""

import ctypes
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
import onnxruntime as ort
from onnxruntime.capi.onnxruntime_pybind11_state import Fail

from headrace.core.bytes_array import BytesArray
from headrace.core.datatypes import NUMPY, Datatype
from headrace.core.errors import InvalidOption, InvalidRequest, LoadFailed
from headrace.core.model_spec import LoadSpec, TensorInfo
from headrace.core.ragged import RaggedForm
from headrace.core.tensors import Array, TensorArray
from headrace.ipc.elements import FEW, join, object_array
from headrace.placement.backend import Backend, BackendContext
from headrace.placement.loaded import LoadedModel, ModelTraits
from headrace.placement.local.gpus import Gpus
from headrace.placement.local.onnx_files import check_locations, read_contents
from headrace.placement.local.onnx_options import (
    Provider,
    cuda_obstacle,
    execution_providers,
    missing_build,
    prepare_gpu,
    reads_parameter,
    run_options,
    session_options,
    shrinking_options,
    why_not_started,
)

log = logging.getLogger(__name__)

# Copies bytes at a device address to host memory.
CopyToHost = Callable[[int, memoryview], None]
# Allocates an array of bytes, or returns None if ordinary memory will do.
Allocate = Callable[[int], Array | None]

_ONNX_BFLOAT16 = 16  # TensorProto.DataType


def _bind_input(binding: ort.IOBinding, name: str, array: Array) -> None:
    if array.dtype == NUMPY[Datatype.BF16]:  # not supported by ONNX Runtime in numpy form
        bits = array.view(np.uint16)
        value = ort.OrtValue.ortvalue_from_numpy_with_onnx_type(bits, _ONNX_BFLOAT16)
        binding.bind_ortvalue_input(name, value)
    else:
        binding.bind_cpu_input(name, array)


_TYPES: dict[str, Datatype] = {
    "tensor(bool)": Datatype.BOOL,
    "tensor(uint8)": Datatype.UINT8,
    "tensor(uint16)": Datatype.UINT16,
    "tensor(uint32)": Datatype.UINT32,
    "tensor(uint64)": Datatype.UINT64,
    "tensor(int8)": Datatype.INT8,
    "tensor(int16)": Datatype.INT16,
    "tensor(int32)": Datatype.INT32,
    "tensor(int64)": Datatype.INT64,
    "tensor(float16)": Datatype.FP16,
    "tensor(float)": Datatype.FP32,
    "tensor(double)": Datatype.FP64,
    "tensor(string)": Datatype.BYTES,
    "tensor(bfloat16)": Datatype.BF16,
}
_SMALL = 1 << 20  # bytes of files of models that share an arena
_SHARED_ARENA = "session.use_env_allocators"
_PIECE = 1 << 14  # texts per step: processing them blocks all other threads
# Maximum BYTES elements of a run. Each becomes an object of some sixty bytes, and ONNX Runtime
# holds the interpreter lock while it converts them: this many for an unnoticeable time.
MAX_TEXTS = 1_000_000


class OnnxModel(LoadedModel):
    """One ONNX Runtime session. Used by one thread at a time."""

    any_thread = True

    def __init__(
        self,
        session: ort.InferenceSession,
        make_options: Callable[[], ort.RunOptions] = ort.RunOptions,
    ) -> None:
        """`make_options` makes the options of runs.

        Raises `LoadFailed` for an unsupported combination of datatypes.
        """
        self._session: ort.InferenceSession | None = session
        # The method behind `run`, without the checks of inputs that were checked before; `run`
        # itself if a version of ONNX Runtime names it differently.
        self._run: Callable[..., list[Any]] | None = getattr(session, "_sess", session).run
        self._make_options = make_options
        self._options = make_options()  # of the current run, or the next one
        self.inputs = [_info(node) for node in session.get_inputs()]
        self.inputs += [_info(node, True) for node in session.get_overridable_initializers()]
        self.outputs = [_info(node) for node in session.get_outputs()]
        types = {info.name: info.datatype for info in (*self.inputs, *self.outputs)}
        self._strings = {name for name, datatype in types.items() if datatype is Datatype.BYTES}
        self._has_bf16 = Datatype.BF16 in types.values()
        self._shrinks = (
            session.get_session_options().enable_cpu_mem_arena
            and session.get_providers() == ["CPUExecutionProvider"]
            and not {None, Datatype.BF16} & {info.datatype for info in self.inputs}
        )
        if self._has_bf16 and any(info.datatype is Datatype.BYTES for info in self.inputs):
            raise LoadFailed(
                "the model has both BF16 tensors and text inputs,"
                " which ONNX Runtime's Python interface cannot run together"
            )

    def infer(
        self, inputs: Mapping[str, TensorArray], outputs: Sequence[str]
    ) -> Sequence[TensorArray]:
        """Run the graph.

        Raises `InvalidRequest` for strings that are not UTF-8, or too many, and whatever the run
        raises.
        """
        session, run = self._session, self._run
        assert session is not None, "infer after close. This is a bug."
        assert run is not None, "infer after close. This is a bug."
        if self._has_bf16:
            return self._infer_values(session, inputs, outputs)
        if not self._strings:
            return run(outputs, inputs, self._options)
        texts = sum(inputs[name].size for name in self._strings if name in inputs)
        if texts > MAX_TEXTS:
            raise InvalidRequest(
                f"BYTES inputs of an ONNX model may have {MAX_TEXTS} elements at once, got {texts}"
            )
        feeds = {
            name: _to_str(name, array) if name in self._strings else array
            for name, array in inputs.items()
        }
        return [
            _to_bytes(array) if name in self._strings else array
            for name, array in zip(outputs, session.run(outputs, feeds, self._options), strict=True)
        ]

    def rest(self) -> None:
        """Shrink ONNX Runtime's CPU arena; any thread may call this."""
        session = self._session
        if session is None or not self._shrinks:
            return
        feeds = {info.name: _least(info) for info in self.inputs if not info.optional}
        with suppress(Fail):  # "Exiting due to terminate flag"
            session.run(None, feeds, shrinking_options())

    def terminate(self) -> bool:
        """End the run under way after the node of the graph that it is at."""
        options, self._options = self._options, self._make_options()
        options.terminate = True
        return True

    def close(self) -> None:
        """Free the session."""
        self._session = self._run = None

    def _infer_values(
        self,
        session: ort.InferenceSession,
        inputs: Mapping[str, TensorArray],
        outputs: Sequence[str],
    ) -> list[TensorArray]:
        """Run through ONNX Runtime's own values: it has no numpy form of bfloat16."""
        feeds = {}
        for name, array in inputs.items():
            if array.dtype == NUMPY[Datatype.BF16]:
                bits = np.ascontiguousarray(array).view(np.uint16)
                feeds[name] = ort.OrtValue.ortvalue_from_numpy_with_onnx_type(bits, _ONNX_BFLOAT16)
            else:
                feeds[name] = ort.OrtValue.ortvalue_from_numpy(np.ascontiguousarray(array))
        results: list[TensorArray] = []
        for value in session.run_with_ort_values(list(outputs), feeds, self._options):
            if value.data_type() == "tensor(bfloat16)":
                raw = ctypes.string_at(value.data_ptr(), value.tensor_size_in_bytes())
                results.append(np.frombuffer(raw, NUMPY[Datatype.BF16]).reshape(value.shape()))
            elif value.data_type() == "tensor(string)":
                results.append(_to_bytes(value.numpy()))
            else:
                results.append(value.numpy())
        return results


class BoundOnnxModel(OnnxModel):
    """A model whose inputs and outputs are bound to a device, if none of them is text.

    Outputs stay on the device until they are copied once, to their final memory; inputs are copied
    to the device when they are bound, without an intermediate copy if they are page-locked. Without
    binding, ONNX Runtime first copies outputs to memory of its own.
    """

    def __init__(
        self,
        session: ort.InferenceSession,
        device: str,
        number: int,
        copy: CopyToHost,
        allocate: Allocate = lambda _: None,
        make_options: Callable[[], ort.RunOptions] = ort.RunOptions,
    ) -> None:
        """`device` is ONNX Runtime's name of the device, `number` its number.

        Raises `LoadFailed` as `OnnxModel`.
        """
        super().__init__(session, make_options)
        self._device = device
        self._number = number
        self._copy = copy
        self._allocate = allocate
        self._datatypes = {info.name: info.datatype for info in self.outputs if info.datatype}
        tensors = all(info.datatype for info in (*self.inputs, *self.outputs))
        self._binds = tensors and not self._strings

    def infer(
        self, inputs: Mapping[str, TensorArray], outputs: Sequence[str]
    ) -> Sequence[TensorArray]:
        """Implements `OnnxModel.infer`."""
        session = self._session
        if session is None or not self._binds:
            return super().infer(inputs, outputs)
        # One binding per run: it keeps bound memory alive.
        binding = session.io_binding()
        for name, array in inputs.items():
            _bind_input(binding, name, np.ascontiguousarray(array))
        for name in outputs:
            binding.bind_output(name, self._device, self._number)
        session.run_with_iobinding(binding, self._options)
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


class OnnxBackend(Backend):
    """Loads `.onnx` files, and directories that hold one with its external data."""

    platform = "onnxruntime_onnx"
    default_filename = "model.onnx"
    filenames: tuple[str, ...] = (default_filename,)
    suffixes: tuple[str, ...] = (".onnx",)
    ragged: RaggedForm | None = RaggedForm.FLAT

    def __init__(self, gpus: Gpus | None = None) -> None:
        """`gpus` are the usable GPUs, by default all of this process."""
        self._gpus = gpus or Gpus()
        self._lock = Lock()
        self._obstacle: str | None = None  # None until determined

    @classmethod
    def of(cls, context: BackendContext) -> "OnnxBackend":
        """Make the backend of a server."""
        return cls(context.gpus)

    def gpu_obstacle(self, count: int) -> str:
        """The reason why ONNX Runtime cannot use the `count` GPUs; "" if it can."""
        missing = missing_build()
        if missing or not count:
            return missing
        with self._lock:
            if self._obstacle is None:
                self._obstacle = cuda_obstacle()
                if self._obstacle:
                    log.warning("ONNX models cannot be on the GPUs: %s", self._obstacle)
            return self._obstacle

    def reads_parameter(self, name: str) -> bool:
        """True if the backend reads this parameter."""
        return reads_parameter(name)

    def load(self, spec: LoadSpec) -> OnnxModel:
        """Load one instance; raises `LoadFailed` or `InvalidOption`."""
        file = _model_file(spec.path)
        try:
            contents = read_contents(file)
        except OSError as error:
            raise LoadFailed(f"{_shown(file, spec)} cannot be read: {error.strerror}") from error
        size = _size([file, *check_locations(contents.locations, file, spec.root)])
        providers = execution_providers(spec)
        options, each_run = session_options(spec), partial(run_options, spec)
        if size <= _SMALL and [p.name for p in providers] == ["CPUExecutionProvider"]:
            _share_arena(options, spec)
        if spec.device is not None:
            prepare_gpu()
        session = _session(file, options, providers, spec)
        try:
            if spec.device is not None and (cuda := self._gpus.cuda()) is not None:
                allocate: Allocate = self._gpus.pinned if spec.pinned_outputs else lambda _: None
                model: OnnxModel = BoundOnnxModel(
                    session, "cuda", spec.device, partial(cuda.to_host, spec.device), allocate,
                    each_run,
                )  # fmt: skip
            else:
                model = OnnxModel(session, each_run)
        except UnicodeDecodeError as error:
            raise LoadFailed(f"{file.name} holds a name that is not UTF-8") from error
        model.traits = ModelTraits(file_bytes=size, loops=contents.loops, pins_inputs=True)
        return model


def _share_arena(options: ort.SessionOptions, spec: LoadSpec) -> None:
    """Let a session use the process' arena, unless its configuration says otherwise.

    One of its own takes 37 KiB from the first run on, as much as all else of a small model.
    """
    if options.enable_cpu_mem_arena and _SHARED_ARENA not in spec.parameters:
        _make_arena()
        options.add_session_config_entry(_SHARED_ARENA, "1")


@cache
def _make_arena() -> None:
    place = ort.OrtMemoryInfo(
        "Cpu", ort.OrtAllocatorType.ORT_ARENA_ALLOCATOR, 0, ort.OrtMemType.DEFAULT
    )
    with suppress(Fail):  # another thread, or the program around this one, has made it
        ort.create_and_register_allocator(place, None)


def _session(
    file: Path, options: ort.SessionOptions, providers: Sequence[Provider], spec: LoadSpec
) -> ort.InferenceSession:
    """Open a model; raises `LoadFailed`, or `InvalidOption` for a provider that cannot start."""
    try:
        session = ort.InferenceSession(
            str(file),
            options,
            providers=[provider.name for provider in providers],
            provider_options=[provider.options for provider in providers],
            enable_fallback=0,
        )
    except Exception as error:  # ONNX Runtime raises many types, with no common base
        if "install TensorRT libraries" in str(error):
            provider = next(p for p in providers if p.name.startswith("Tensorrt"))
            raise InvalidOption(provider.path, why_not_started(provider.name)) from error
        text = f"ONNX Runtime cannot load {_shown(file, spec)}"
        raise LoadFailed(f"{text}: {error}", f"{text}; the server's log says why") from error
    # ONNX Runtime silently omits a provider that cannot start.
    started = session.get_providers()
    for provider in providers:
        if provider.name not in started:
            raise InvalidOption(provider.path, why_not_started(provider.name))
    return session


def _model_file(path: Path) -> Path:
    """The model file, even if the configuration or the default names its directory."""
    if path.is_dir():
        inner = path / OnnxBackend.default_filename
        if not inner.is_file():
            raise LoadFailed(f"{path.name} is a directory without a file {inner.name}")
        return inner
    if not path.is_file():
        raise LoadFailed(f"there is no model file {path.parent.name}/{path.name}")
    return path


def _size(files: Sequence[Path]) -> int:
    """The total bytes of the existing files."""
    total = 0
    for file in files:
        with suppress(OSError):
            total += file.stat().st_size
    return total


def _shown(file: Path, spec: LoadSpec) -> str:
    """The name of a model file in messages: `digits/1/model.onnx`, in any repository."""
    inner = file.relative_to(spec.root)
    return str(inner if len(inner.parts) == 1 else spec.model / inner)


def _info(node: ort.NodeArg, optional: bool = False) -> TensorInfo:
    shape = tuple(d if isinstance(d, int) and d >= 0 else -1 for d in node.shape or ())
    return TensorInfo(node.name, _TYPES.get(node.type), shape, node.type, optional)


def _least(info: TensorInfo) -> Array:
    """An input of the smallest valid shape of a session."""
    assert info.datatype is not None
    empty = "" if info.datatype is Datatype.BYTES else 0
    return np.full([max(size, 1) for size in info.shape], empty, NUMPY[info.datatype])


def _to_str(name: str, array: TensorArray) -> Array:
    """Convert BYTES to text: ONNX Runtime would use Python's `repr` of `bytes`."""
    found = array.pieces() if isinstance(array, BytesArray) else [array.ravel().tolist()]
    try:
        return object_array((list(map(bytes.decode, piece)) for piece in found), array.shape)
    except UnicodeDecodeError as error:
        raise InvalidRequest(
            f"input '{name}' holds an element that is not UTF-8,"
            f" which an ONNX model needs: {error.reason}"
        ) from None


def _to_bytes(array: Array) -> TensorArray:
    texts = array.ravel()
    if texts.size <= FEW:
        return object_array([list(map(str.encode, texts.tolist()))], array.shape)
    pieces = [texts[first : first + _PIECE] for first in range(0, texts.size, _PIECE)]
    data = [join(list(map(str.encode, piece.tolist()))) for piece in pieces]
    return BytesArray(b"".join(data), array.shape)
