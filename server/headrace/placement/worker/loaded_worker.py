"""Loading of Python models in workers: import, start and warm-up, on loading threads.

A model may call other models while it is started; the event loop of the loading thread handles
these calls. Samples are sent like any batch. What the worker has reported meanwhile, such as the
forms of its results, stays valid as long as it runs: the process object keeps it for its next
owner.
"""

import asyncio
import json
import logging
from collections.abc import Mapping, Sequence
from math import inf
from time import monotonic_ns
from typing import Any

from headrace.core.daemon_thread import NoResources
from headrace.core.errors import LoadFailed, WorkerDied
from headrace.core.model_spec import LoadSpec
from headrace.core.signature import Signature
from headrace.core.texts import whole
from headrace.ipc.elements import Buffer
from headrace.ipc.frames import ANSWERS, MAX_SLOTS, BrokenFrame, FrameKind, Header
from headrace.observability.machine import memory_of
from headrace.observability.statistics import EndKind
from headrace.placement.choice import AutoChoice, InstanceKind
from headrace.placement.loaded import DEFAULT_ROWS, ModelTraits, Servable
from headrace.placement.placement import ModelServices, NoServices, Surroundings
from headrace.placement.warming import Sample, Warming
from headrace.placement.worker.conversation import Conversation, ModelCalls, Slot
from headrace.placement.worker.environment import environment_of
from headrace.placement.worker.isolation import confinement_of
from headrace.placement.worker.python_options import (
    CODE_ROWS,
    RunOptions,
    WorkerOptions,
    WorkerSpec,
    start_arguments,
    with_columns,
    with_completion,
    with_instances,
)
from headrace.placement.worker.worker_process import WorkerProcess
from headrace.placement.worker.worker_set import WorkerSet
from headrace.protocol.documents import to_json
from headrace.protocol.pb.model_config_pb2 import ModelConfig
from headrace.scheduling.batch import Batch, NotStarted, Outcome

_START_SECS = 600.0
_NOT_STARTED = "services of the server are unavailable while the model is started"
_NOT_WARM = "services of the server are unavailable while the model is warmed up"


def ask_worker(
    process: WorkerProcess,
    kind: FrameKind,
    document: Mapping[str, Any],
    seconds: float,
    host: ModelServices | None = None,
) -> dict[str, Any]:
    """Send a worker a request on a loading thread, and wait for its answer.

    `host` provides services to the model meanwhile, on this thread's event loop; None for none.
    Raises `LoadFailed` if the worker fails, or exceeds `seconds`, `NoResources` if the system is
    short of something; the process has ended then.
    """
    try:
        return asyncio.run(_ask(process, kind, document, seconds, host or NoServices(_NOT_STARTED)))
    except BaseException as error:
        process.kill()
        if isinstance(error, OSError):  # as without a free descriptor for the event loop
            raise NoResources(f"cannot ask a worker process: {error.strerror}") from error
        raise


async def _ask(
    process: WorkerProcess,
    kind: FrameKind,
    document: Mapping[str, Any],
    seconds: float,
    host: ModelServices,
) -> dict[str, Any]:
    loop = asyncio.get_running_loop()
    answered: asyncio.Future[dict[str, Any]] = loop.create_future()
    calls = ModelCalls(process, host)

    def take(header: Header[FrameKind], meta: bytes, data: Buffer) -> None:
        if header.kind is FrameKind.CALL:
            calls.begin(json.loads(meta), data, header.data, None)
        elif header.kind is FrameKind.METRIC:
            process.keep(header, meta)
        elif (
            header.kind in (FrameKind.LOADED, FrameKind.STARTED, FrameKind.FAILED)
            and not answered.done()
        ):
            try:
                answered.set_result(process.answer(header.kind, meta))
            except LoadFailed as error:
                answered.set_exception(error)
        else:
            raise BrokenFrame(f"a frame of kind {header.kind.name}")

    def end(how: str) -> None:
        if not answered.done():
            nonsense = process.end_kind is EndKind.NONSENSE
            text = f"the worker {'sent nonsense' if nonsense else how}"
            answered.set_exception(LoadFailed(text))

    process.attach(loop, take, end)
    process.send(kind, json.dumps(document).encode())
    limit = seconds if process.patience is None else min(process.patience, seconds)
    try:
        async with asyncio.timeout(limit):
            return await answered
    except TimeoutError:
        raise LoadFailed("the worker did not answer in time") from None
    finally:
        calls.end()
        process.detach()


def warm_up_worker(
    process: WorkerProcess,
    signature: Signature,
    version: str,
    samples: Sequence[Sample],
    concurrent: bool,
    host: ModelServices | None = None,
) -> None:
    """Run all samples, on a loading thread; `concurrent` as in `Conversation`.

    `host` provides services to the model, on that thread's event loop; None for none.

    Raises `LoadFailed` naming the failing sample; the process has ended then.
    """

    async def work() -> None:
        warming = Warming(signature, version)
        talk = _Talk(process, signature, concurrent, warming, host or NoServices(_NOT_WARM))
        try:
            async with asyncio.timeout(process.patience):
                await warming.work(Slot(talk, 0), samples)
        except TimeoutError:
            raise LoadFailed("the worker did not end its warm-up in time") from None
        finally:
            process.detach()

    if not samples:
        return
    try:
        asyncio.run(work())
    except BaseException:
        process.kill()
        raise
    if process.ended:
        raise LoadFailed("the worker ended while it was warmed up")


class _Talk:
    """Owner of a conversation during load and start; see `conversation.Owner`."""

    def __init__(
        self,
        process: WorkerProcess,
        signature: Signature,
        concurrent: bool,
        warming: Warming,
        host: ModelServices,
    ) -> None:
        self._process = process
        self._signature = signature
        self._loop = asyncio.get_running_loop()
        self.talk = Conversation(
            process, signature, concurrent, warming.batcher.answer, self._report, host
        )
        process.attach(self._loop, self._take, self.talk.end)

    def not_sent(self, slot: Slot, error: Exception) -> None:
        """End the batch of a slot, which could not be sent, later in this turn."""
        if isinstance(error, NotStarted):
            error = WorkerDied(f"the worker process of model '{self._signature.model}' has ended")
        now = monotonic_ns()
        self._loop.call_soon(slot.end, Outcome((), error, slot.sent, now, now))

    def close(self) -> None:
        """Do nothing: the process belongs to its loader."""

    def _take(self, header: Header[FrameKind], meta: bytes, data: Buffer) -> None:
        if header.kind is FrameKind.METRIC:
            self._process.keep(header, meta)
            return
        if header.kind is FrameKind.FORM:
            self._process.keep(header, meta)
        if header.kind in ANSWERS or header.kind is FrameKind.BACK:
            self.talk.finish(header, meta, data)
        else:
            self.talk.take(header.kind, meta, data, header.data)

    def _report(self, batch: Batch, text: str, lines: str) -> None:
        self._process.note(logging.ERROR, text, lines)


_CONCURRENCY = 32  # default of concurrent batches of a coroutine
_LOAD_SECS = 600.0  # for a model to be imported


class LoadedWorker(Servable):
    """A worker with an imported model, which `begin` starts."""

    def __init__(
        self, spec: LoadSpec, loader: str, told: Mapping[str, object] | None = None
    ) -> None:
        """`told` are further arguments of its loader. Raises `LoadFailed` or `InvalidOption`."""
        self._loader = loader
        self._told = dict(told or {})
        self._spec = spec
        self.options = WorkerOptions.of(spec.parameters, spec.limits)
        self._concurrency = whole(
            spec.parameters, "max_concurrency", _CONCURRENCY, 1, MAX_SLOTS,
            f"a whole number from 1 to {MAX_SLOTS}",
        )  # fmt: skip
        self.run_options = RunOptions()
        if not spec.path.is_file():
            raise LoadFailed(f"there is no model file {spec.path.parent.name}/{spec.path.name}")
        # Kept as long as workers may be restarted.
        self._environment = environment_of(spec)
        self._worker_spec = WorkerSpec(
            spec.model,
            str(spec.version),
            spec.instance,
            self._environment.python,
            spec.threads,
            self._environment.prefix,
            self.options.limits,
            (*spec.environments.variables, *self.options.variables),
            confinement_of(spec, self.options, self._environment),
        )
        self.process, self._said = self._loaded(spec.auto_complete, spec.deadline)
        self.traits = ModelTraits(
            declared_by_code=True,
            reads_parameters=bool(self._said["reads_parameters"]),
            row_limit=DEFAULT_ROWS if "default_max_batch_size" in self._told else CODE_ROWS,
            quarantine_deaths=self.options.quarantine_deaths,
        )
        self._config = "{}"
        self._decoupled = False
        self._host: ModelServices | None = None
        self._samples: tuple[Signature, Sequence[Sample]] | None = None

    def completed(self, config: ModelConfig, auto_complete: bool = True) -> ModelConfig:
        said = self._said
        result = with_columns(with_completion(config, said.get("config")), said["columns"])
        return with_instances(result, said["instances"]) if auto_complete else result

    def kind(
        self, wanted: str, signature: Signature, device: int | None
    ) -> InstanceKind | AutoChoice:
        """Always a worker process."""
        return InstanceKind.PROCESS

    def begin(
        self,
        config: ModelConfig,
        signature: Signature,
        batches: bool,
        host: ModelServices | None = None,
    ) -> None:
        """Start the first worker; workers started later use `host`, too."""
        self._host = host
        self._config = json.dumps(to_json(config))
        self._decoupled = config.model_transaction_policy.decoupled
        said = self._start(self.process)
        concurrency = self._concurrency if said["is_async"] else 0
        self.run_options = RunOptions(concurrency, bool(said["asks"]))

    def warm_up(self, signature: Signature, version: int, samples: Sequence[Sample]) -> None:
        """Run samples, also in every worker started later; raises `LoadFailed`."""
        self._samples = signature, samples
        self._warm_up(self.process)

    def again(self) -> WorkerProcess:
        """Start and warm up another worker with the same model; raises `LoadFailed`."""
        process, _ = self._loaded(False)
        self._start(process)
        self._warm_up(process)
        return process

    def memory(self, growth: int | None) -> int:
        """The bytes of its process, and of those that this has started."""
        return memory_of(self.process.pid)

    def placement(self, name: str, version: Surroundings) -> WorkerSet:
        """The set of workers of a version."""
        return WorkerSet(version)

    def close(self) -> None:
        """End the process at once."""
        self.process.kill()

    def _loaded(
        self, complete: bool, deadline: float = inf
    ) -> tuple[WorkerProcess, dict[str, Any]]:
        """Another worker that has imported the model, and its report; raises `LoadFailed`."""
        spec = self._spec
        process = WorkerProcess(self._worker_spec, deadline)
        document = {
            "loader": self._loader,
            "file": str(spec.path),
            "paths": [str(spec.path.parent), str(spec.root)],
            "config": json.loads(spec.config),
            "parameters": dict(spec.parameters),
            "auto_complete": complete,
            **self._told,
        }
        return process, ask_worker(process, FrameKind.LOAD, document, _LOAD_SECS)

    def _start(self, process: WorkerProcess) -> dict[str, Any]:
        args = start_arguments(self._spec, self._config)
        document = {
            "args": args, "decoupled": self._decoupled, "instance": self._spec.instance,
        }  # fmt: skip
        return ask_worker(process, FrameKind.START, document, _START_SECS, self._host)

    def _warm_up(self, process: WorkerProcess) -> None:
        if self._samples is not None:
            signature, samples = self._samples
            version, concurrent = str(self._spec.version), bool(self.run_options.concurrency)
            warm_up_worker(process, signature, version, samples, concurrent, self._host)
