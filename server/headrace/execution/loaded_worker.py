"""A Python model under Triton's API in a worker process of its own."""

import json
from collections.abc import Mapping, Sequence
from math import inf
from typing import Any

from headrace.core.errors import InvalidOption, LoadFailed
from headrace.core.model_spec import LoadSpec
from headrace.core.signature import Signature
from headrace.core.tensors import TensorArray
from headrace.core.texts import whole_number
from headrace.execution.environments.resolve import environment_of
from headrace.execution.host import Host
from headrace.execution.model_kinds import InWorker
from headrace.execution.placement import Surroundings
from headrace.execution.python_config import start_arguments, with_completion
from headrace.execution.supervision import WorkerSet
from headrace.execution.warming import Sample
from headrace.execution.worker import WorkerProcess
from headrace.execution.worker_options import WorkerOptions
from headrace.execution.worker_spec import Ways, WorkerSpec
from headrace.execution.worker_start import start_worker
from headrace.execution.worker_warming import warm_up_worker
from headrace.wire.documents import to_json
from headrace.wire.pb.model_config_pb2 import ModelConfig
from headrace.workers.frames import MAX_SLOTS, Kind

_CONCURRENCY = 32  # batches that a coroutine runs at a time
_LOAD_SECS = 600.0  # for a model to be imported


class LoadedWorker(InWorker):
    """A worker with an imported model, which `begin` starts.

    `inputs` and `outputs` are empty: what a model takes and gives is in its configuration.
    """

    def __init__(
        self, spec: LoadSpec, loader: str, told: Mapping[str, object] | None = None
    ) -> None:
        """`told` is what its loader is told besides. Raises `LoadFailed` or `InvalidOption`."""
        self.inputs = self.outputs = ()
        self.file_bytes = 0
        self._loader = loader
        self._told = dict(told or {})
        self._spec = spec
        self.options = WorkerOptions.of(spec.parameters, spec.limits)
        self._concurrency = _count(spec.parameters, "max_concurrency", _CONCURRENCY)
        self.ways = Ways()
        if not spec.path.is_file():
            raise LoadFailed(f"there is no model file {spec.path.parent.name}/{spec.path.name}")
        # Held for as long as workers may be started again.
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
        )
        self.process, self._completed = self._loaded(spec.auto_complete, spec.deadline)
        self._config = "{}"
        self._decoupled = False
        self._host: Host | None = None
        self._samples: tuple[Signature, Sequence[Sample]] | None = None

    @property
    def completes(self) -> bool:
        """Whether the model has completed its configuration itself."""
        return self._completed is not None

    def completed(self, config: ModelConfig) -> ModelConfig:
        """A copy of `config` with what the model says of itself; raises `InvalidConfig`."""
        return with_completion(config, self._completed)

    def begin(self, config: ModelConfig, host: Host | None = None) -> None:
        """Start the model with its whole configuration; raises `LoadFailed`.

        `host` is whom the model may ask meanwhile, also in workers that are started later.
        """
        self._host = host
        self._config = json.dumps(to_json(config))
        self._decoupled = config.model_transaction_policy.decoupled
        said = self._start(self.process)
        concurrency = self._concurrency if said["is_async"] else 0
        self.ways = Ways(concurrency, bool(said["asks"]))

    def warm_up(self, signature: Signature, samples: Sequence[Sample]) -> None:
        """Run samples, also in every worker that is started later; raises `LoadFailed`."""
        self._samples = signature, samples
        self._warm_up(self.process)

    def again(self) -> WorkerProcess:
        """Another worker with the same model, started and warmed up; raises `LoadFailed`."""
        process, _ = self._loaded(False)
        self._start(process)
        self._warm_up(process)
        return process

    @staticmethod
    def placement(version: Surroundings) -> WorkerSet:
        """The workers of such models."""
        return WorkerSet(version)

    def infer(self, inputs: Mapping[str, TensorArray], outputs: object) -> list[TensorArray]:
        """Not here: a worker gets whole batches."""
        raise NotImplementedError

    def close(self) -> None:
        """End the process at once."""
        self.process.kill()

    def _loaded(
        self, complete: bool, deadline: float = inf
    ) -> tuple[WorkerProcess, dict[str, Any] | None]:
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
        answer = process.ask(Kind.LOAD, document, _LOAD_SECS)
        self.reads_parameters = bool(answer["reads_parameters"])
        self.loops = False
        return process, answer.get("config")

    def _start(self, process: WorkerProcess) -> dict[str, Any]:
        args = start_arguments(self._spec, self._config)
        document = {"args": args, "decoupled": self._decoupled}
        return start_worker(process, document, self._host)

    def _warm_up(self, process: WorkerProcess) -> None:
        if self._samples is not None:
            signature, samples = self._samples
            version, concurrent = str(self._spec.version), bool(self.ways.concurrency)
            warm_up_worker(process, signature, version, samples, concurrent, self._host)


def _count(parameters: Mapping[str, str], name: str, default: int) -> int:
    """A number of batches among the configuration's parameters."""
    text = parameters.get(name, str(default))
    number = whole_number(text, 1, MAX_SLOTS)
    if number is None:
        raise InvalidOption(
            f"parameters['{name}']", f"expected a whole number from 1 to {MAX_SLOTS}, got {text!r}"
        )
    return number
