"""Python models in the server's own process, for operators who trust them.

A request's tensors are passed to the model directly, read-only, and its response becomes a part of
the batch's outcome, without frames and without gathering. The isolation of a worker is missing
here: a model that hangs, crashes or fills the memory affects the server. A model is loaded on a
loading thread, then used by one thread at a time, like any model.

`sys.modules` is shared by the whole process, and models have files of the same names, such as
`preprocess.py`. So modules beside a model can only be imported while `lent` is active, by the
thread holding it, and are removed from `sys.modules` afterwards; the model itself keeps using them.
Nothing is added to `sys.path`. A module that the server or a library has already imported takes
precedence over a file of the same name. Any thread may load a model; loads are serialised.
"""

import importlib
import inspect
import json
import logging
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from time import monotonic_ns
from types import ModuleType
from typing import Any

import numpy as np

from headrace.core.datatypes import NUMPY, Datatype
from headrace.core.errors import (
    Contradiction,
    ExecutionFailed,
    InvalidOption,
    LoadFailed,
    ServerError,
)
from headrace.core.model_spec import LoadSpec
from headrace.core.signature import Signature, TensorSpec, reshaped
from headrace.core.tensors import Array, TensorArray
from headrace.ipc.elements import bytes_array
from headrace.placement.choice import AutoChoice, InstanceKind
from headrace.placement.loaded import LoadedModel, ModelTraits
from headrace.placement.placement import ModelServices
from headrace.placement.worker.batch_frames import (
    failed_to_process,
    model_error,
    special_of,
    wrong_parameter,
)
from headrace.placement.worker.environment import demanded
from headrace.placement.worker.python_options import (
    CODE_ROWS,
    WORKER_PARAMETERS,
    start_arguments,
    with_completion,
)
from headrace.protocol.documents import to_json
from headrace.protocol.pb.model_config_pb2 import ModelConfig
from headrace.scheduling.batch import Batch, BatchBuffer, Deferral, Outcome, Part
from headrace.workers import model_class
from headrace.workers import triton_api as pb
from headrace.workers.triton_config import Contradicted
from headrace.workers.triton_requests import is_given_back
from headrace.workers.triton_requests import received as received_request

log = logging.getLogger(__name__)

_lending = threading.RLock()  # process-wide, like the import system that it protects


class ModelImports:
    """The modules of one model; `name` is the model's own module."""

    def __init__(self, name: str, paths: Sequence[str]) -> None:
        """`paths` are the directories of the model's files."""
        self.name = name
        self._paths = [str(Path(path).resolve()) for path in paths]
        self._modules: dict[str, ModuleType] = {}

    @contextmanager
    def lent(self) -> Iterator[None]:
        """Let this thread import modules beside the model."""
        with _lending:
            importlib.invalidate_caches()
            finder = _Beside(self._paths)
            hidden = {name: sys.modules[name] for name in self._modules if name in sys.modules}
            sys.modules.update(self._modules)
            sys.meta_path.insert(_place(), finder)
            try:
                yield
            finally:
                sys.meta_path.remove(finder)
                self._take_back()
                sys.modules.update(hidden)

    def forget(self) -> None:
        """Drop the model's modules; `lent` must not be used afterwards."""
        self._modules.clear()
        sys.modules.pop(self.name, None)

    def _take_back(self) -> None:
        for name, module in list(sys.modules.items()):
            if name != self.name and self._is_own(module):
                self._modules[name] = sys.modules.pop(name)

    def _is_own(self, module: ModuleType) -> bool:
        spec = getattr(module, "__spec__", None)
        if spec is None:
            return False
        # A package without __init__.py has no origin, only search locations.
        places = [spec.origin] if spec.origin else list(spec.submodule_search_locations or ())
        return any(Path(place).is_relative_to(path) for place in places[:1] for path in self._paths)


class _Beside:
    """Finds modules in the given directories before `sys.path`, for the creating thread."""

    def __init__(self, paths: Sequence[str]) -> None:
        self._paths = paths
        self._thread = threading.get_ident()

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if path is not None or threading.get_ident() != self._thread:
            return None
        # Keep the search path behind them: a plain directory is a package only as a last resort.
        return PathFinder.find_spec(name, [*self._paths, *sys.path], target)


def _place() -> int:
    """The position for a file finder: after built-in finders, before those for `sys.path`."""
    finders: list[object] = list(sys.meta_path)
    return finders.index(PathFinder) if PathFinder in finders else len(finders)


_TEXT = 4096  # characters of an exception's text for clients


class LoadedInProcess(LoadedModel):
    """A model imported into this process, which `begin` starts.

    `inputs` and `outputs` are empty: they are declared in its configuration. It receives whole
    batches, and no calls of `infer`.
    """

    def __init__(self, spec: LoadSpec, loader: str) -> None:
        """Raises `LoadFailed` or `InvalidOption`."""
        self._spec = spec
        self._model: Any = None
        for name in sorted(WORKER_PARAMETERS - {"stall_secs"}):
            if name in spec.parameters:
                raise InvalidOption(
                    f"parameters['{name}']",
                    f"is for worker processes; with execution '{spec.parameters['execution']}' the"
                    " model runs in the server's own",
                )
        if not spec.path.is_file():
            raise LoadFailed(f"there is no model file {spec.path.parent.name}/{spec.path.name}")
        if demanded(spec) is not None:
            raise LoadFailed(self._only_in_worker("a model with an environment of its own"))
        paths = [str(spec.path.parent), str(spec.root)]
        self._imports = ModelImports(f"{spec.instance}_v{spec.version}_{id(self):x}", paths)
        document = {
            "loader": loader,
            "file": str(spec.path),
            "module": self._imports.name,
            "paths": paths,
            "config": json.loads(spec.config),
            "parameters": dict(spec.parameters),
            "auto_complete": spec.auto_complete,
        }
        sys.modules["triton_python_backend_utils"] = pb
        try:
            with self._imports.lent():
                loading = importlib.import_module(loader)
                self._class = loading.load(document)
                complete = model_class.complete if spec.auto_complete else _nothing
                self._completed = complete(self._class, document["config"])
        except (Exception, SystemExit) as error:
            self._imports.forget()
            raise self._load_failed(error) from error
        self.traits = ModelTraits(
            declared_by_code=True,
            reads_parameters=model_class.reads_parameters(self._class),
            row_limit=CODE_ROWS,
        )
        execute = getattr(self._class, "execute", None)
        if inspect.iscoroutinefunction(execute) or inspect.isasyncgenfunction(execute):
            self._imports.forget()
            raise LoadFailed(self._only_in_worker("a model with `async def execute`"))

    def completed(self, config: ModelConfig, auto_complete: bool = True) -> ModelConfig:
        return with_completion(config, self._completed)

    def kind(
        self, wanted: str, signature: Signature, device: int | None
    ) -> InstanceKind | AutoChoice:
        """The configured kind: the cost of a run cannot be known."""
        return InstanceKind(wanted)

    def begin(
        self,
        config: ModelConfig,
        signature: Signature,
        batches: bool,
        host: ModelServices | None = None,
    ) -> None:
        """Start the model with its complete configuration; raises `LoadFailed`."""
        if config.model_transaction_policy.decoupled:
            raise LoadFailed(self._only_in_worker("a decoupled model"))
        args = start_arguments(self._spec, json.dumps(to_json(config)))
        try:
            with self._imports.lent():
                self._model = model_class.start(self._class, args)
        except (Exception, SystemExit) as error:
            self._imports.forget()
            raise self._load_failed(error) from error

    def batch_function(self, buffer: BatchBuffer | None = None) -> Callable[[Batch], Outcome]:
        """The method `run`: a model with requests gathers nothing."""
        return self.run

    def run(self, batch: Batch) -> Outcome:
        """Run a batch. Never raises: a failure is an outcome, too."""
        started = gathered = ended = monotonic_ns()
        try:
            requests = _requests(batch)
            wanted = [request.requested_output_names() for request in requests]
            gathered = monotonic_ns()
            responses = self._model.execute(requests)
            ended = monotonic_ns()
            if wrong := model_class.wrong_responses(requests, responses):
                failed = self._failed(batch, wrong, "")
                return Outcome((), failed, started, gathered, ended)
            parts = [_part(*each) for each in zip(requests, responses, wanted, strict=True)]
        except (Exception, SystemExit) as error:  # the conversion of its outputs may raise, too
            text = model_class.one_line(error)
            failed = self._failed(batch, text, model_class.its_traceback(error))
            return Outcome((), failed, started, gathered, monotonic_ns())
        return Outcome((), None, started, gathered, ended, parts)

    def close(self) -> None:
        """Finalize the model, and drop it."""
        model, self._model = self._model, None
        if model is not None and hasattr(model, "finalize"):
            try:
                model.finalize()
            except (Exception, SystemExit) as error:
                log.error("%s: finalize: %s", self._spec.instance, model_class.one_line(error),
                          exc_info=error, extra=self._fields())  # fmt: skip
        self._imports.forget()

    def _load_failed(self, error: BaseException) -> LoadFailed:
        if isinstance(error, Contradicted):
            return Contradiction(error.problems)
        text, lines = model_class.one_line(error), model_class.its_traceback(error)
        log.error("%s: %s", self._spec.instance, text, extra=self._fields(lines))
        return LoadFailed(text)

    def _only_in_worker(self, what: str) -> str:
        return (
            f"{what} runs in a worker process only: take parameters['execution'], which is"
            f" '{self._spec.parameters['execution']}', out of its configuration"
        )

    def _failed(self, batch: Batch, text: str, lines: str) -> ExecutionFailed:
        """The error of a batch, which is logged unless it is run again in halves."""
        if len(batch.calls) > 1 and not batch.signature.stateful:
            log.debug("%s; its %d requests are run again in halves", text, len(batch.calls),
                      extra=self._fields())  # fmt: skip
        else:
            log.error("%s: %s", self._spec.instance, text, extra=self._fields(lines))
        return failed_to_process(self._spec.instance, text[:_TEXT])

    def _fields(self, trace: str = "") -> dict[str, object]:
        fields = {"model": self._spec.model, "version": str(self._spec.version)}
        return {**fields, "trace": trace} if trace else {**fields}


def _nothing(found: object, config: object) -> None:
    """The completion of a model that must not complete its configuration."""


def _requests(batch: Batch) -> list[pb.InferenceRequest]:
    """The requests of a batch in the model's form."""
    signature = batch.signature
    declared = [(spec.name, spec.datatype.value, spec) for spec in signature.inputs]
    outputs = [spec.name for spec in batch.outputs]
    requests: list[pb.InferenceRequest] = []
    for call in batch.calls:
        request = call
        inputs = request.inputs
        tensors = [
            pb.received(name, datatype, _given(inputs[name].array, spec, signature))
            for name, datatype, spec in declared
            if name in inputs
        ]
        special = special_of(request)
        requests.append(
            received_request(_no_senders, 0, tensors, request.id, outputs, special, False)
        )
    return requests


def _given(array: TensorArray, spec: TensorSpec, signature: Signature) -> Array:
    """An input in the model's form: read-only, aligned, in its own shape."""
    given: Array = np.asarray(reshaped(array, spec, signature.batches, to_model=True))
    if spec.datatype is Datatype.BF16:
        given = given.view(np.uint16)  # the raw bits, since numpy has no such type
    if not given.flags.aligned:
        given = given.copy()
    given = given.view()  # the array itself may be the caller's
    given.setflags(write=False)
    return given


class _NoSenders:
    """Stand-in for response senders: answers are the return value of `execute` only."""

    def respond(
        self,
        number: int,
        response: pb.InferenceResponse | None,
        final: bool,
        wanted: Sequence[str],
    ) -> None:
        raise pb.TritonModelException(_NO_SENDERS)

    def drop(self, number: int, error: pb.TritonError) -> None:
        """Do nothing: a missing response is an error already."""

    def wait_for_room(self, number: int) -> None:
        raise pb.TritonModelException(_NO_SENDERS)

    async def room(self, number: int) -> None:
        raise pb.TritonModelException(_NO_SENDERS)

    def is_cancelled(self, number: int) -> bool:
        """Always False: cancellation is not supported here."""
        return False


_NO_SENDERS = "response senders are for models in worker processes: give the response back"
_no_senders = _NoSenders()


def _part(
    request: pb.InferenceRequest, response: pb.InferenceResponse | None, wanted: Sequence[str]
) -> Part | ServerError | Deferral:
    """A request's part of the outcome, from its response."""
    if response is None:  # None is for rescheduled requests, or those answered by a sender
        return Deferral.AGAIN if is_given_back(request) else ExecutionFailed(_NO_SENDERS)
    if (error := response.error()) is not None:
        return model_error(error.code(), error.message())
    parameters = response.parameter_values()
    if parameters and (wrong := wrong_parameter(parameters)):
        return wrong
    arrays = {
        tensor.name(): _taken(tensor)
        for tensor in response.output_tensors()
        if tensor.name() in wanted  # outputs that were not requested are left out
    }
    return Part(arrays, parameters)


def _taken(tensor: pb.Tensor) -> Array:
    """An output that stays unchanged until it is sent, whatever the model does with its arrays."""
    array = tensor._array
    if tensor._datatype == "BYTES":
        return bytes_array(array)
    if tensor._datatype == "BF16":
        array = array.view(NUMPY[Datatype.BF16])
    elif array.flags.writeable and (array.base is not None or _holders(tensor) > _ALONE):
        return array.copy()
    return array


def _holders(tensor: pb.Tensor) -> int:
    return sys.getrefcount(tensor._array)


_ALONE = _holders(pb.Tensor("x", np.empty(0))) + 1  # with `_taken`
