"""An engine with a controlled backend: models whose files hold the number they answer."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np

from headrace.core.call import Call, InferResponse
from headrace.core.datatypes import Datatype
from headrace.core.errors import LoadFailed, ServerError
from headrace.core.model_spec import LoadSpec, TensorInfo
from headrace.core.tensors import Array, Tensor
from headrace.engine.admission import Admission
from headrace.engine.engine import Engine
from headrace.engine.entrance import Target
from headrace.engine.opening import LoadOptions
from headrace.placement.backend import Backend
from headrace.placement.loaded import LoadedModel
from headrace.protocol.pb import grpc_service_pb2 as pb
from headrace.repository.layout import ModelSource, read_model_directory

LOAD_OPTIONS = LoadOptions(cores=1)
CONFIG = 'max_batch_size: 4\nparameters {{ key: "execution" value {{ string_value: "{}" }} }}'
INLINE = CONFIG.format("inline")


class Constant(LoadedModel):
    """A model that answers every row with one number once `go` is set. `seen` are its inputs.

    Its end begins with `closing` and waits for `close_now`.
    """

    inputs: Sequence[TensorInfo] = (TensorInfo("X", Datatype.FP32, (-1, 1)),)
    outputs: Sequence[TensorInfo] = (TensorInfo("Y", Datatype.FP32, (-1, 1)),)

    def __init__(self, number: float, go: Event) -> None:
        self.number = number
        self.go = go
        self.closing = self.closed = False
        self.close_now = Event()
        self.close_now.set()
        self.seen: list[Array] = []

    def infer(self, inputs: Mapping[str, Array], outputs: Sequence[str]) -> Sequence[Array]:
        assert not self.closed
        self.seen.append(inputs["X"])
        assert self.go.wait(30)
        return [np.full_like(inputs["X"], self.number)]

    def close(self) -> None:
        self.closing = True
        assert self.close_now.wait(30)
        self.closed = True


class Constants(Backend):
    """A backend whose files hold a number. `loaded` are its models, in order.

    A load begins with an entry in `begun` and waits for `load_now`.
    """

    platform = "constant"
    default_filename = "model.constant"
    filenames: tuple[str, ...] = ("model.constant",)
    suffixes: tuple[str, ...] = (".constant",)

    def __init__(self) -> None:
        self.loaded: list[Constant] = []
        self.begun: list[str] = []
        self.load_now, self.run_now = Event(), Event()
        self.load_now.set()
        self.run_now.set()

    def reads_parameter(self, name: str) -> bool:
        return True

    def load(self, spec: LoadSpec) -> Constant:
        text = spec.path.read_text()
        self.begun.append(text)
        assert self.load_now.wait(30)
        try:
            model = Constant(float(text), self.run_now)
        except ValueError:
            raise LoadFailed(f"{text!r} is no number") from None
        self.loaded.append(model)
        return model


def entries(engine: Engine) -> list[pb.RepositoryIndexResponse.ModelIndex]:
    """The index of an engine's models."""
    return [entry for model in engine.models() for entry in engine.index(model)]


class FutureCall(Call):
    """A copy of a call that resolves a future."""

    def __init__(self, asked: Call) -> None:
        super().__init__("", "", "", {}, nbytes=asked.nbytes)
        self.take(asked)
        self.future: asyncio.Future[InferResponse] = asyncio.get_running_loop().create_future()

    def respond(self, response: InferResponse, final: bool) -> None:
        self.future.set_result(response)

    def fail(self, error: ServerError) -> None:
        self.future.set_exception(error)


class World:
    """An engine with the repository `root`; `engine` are arguments of `Engine`."""

    def __init__(
        self,
        root: Path,
        options: LoadOptions = LOAD_OPTIONS,
        admission: Admission | None = None,
        **engine: Any,
    ) -> None:
        self.root = root
        self.backend = Constants()
        self.admission = admission or Admission(0, 0)
        self.engine = Engine(
            "server", "0", {"constant": self.backend}, options, self.admission, **engine
        )

    def write(self, name: str, text: str, version: int = 1, config: str = "") -> ModelSource:
        """Change a version's file, and the configuration if given or missing."""
        folder = self.root / name / str(version)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "model.constant").write_text(text)
        if config or not (folder.parent / "config.pbtxt").exists():
            (folder.parent / "config.pbtxt").write_text(config or INLINE)
        return self.source(name)

    def source(self, name: str) -> ModelSource:
        return read_model_directory(self.root / name)


def question(model: str = "m", **more: Any) -> Call:
    """A request for one number."""
    tensor = Tensor("X", Datatype.FP32, np.zeros((1, 1), np.float32))
    return Call(model, "", "", {"X": tensor}, nbytes=4, **more)


def number(response: InferResponse) -> float:
    """The answer of a `Constant`."""
    return float(np.asarray(response.outputs[0].array)[0, 0])


async def ask(target: Target) -> float:
    """The answer of a model or a version."""
    call = FutureCall(question())
    target.submit(call)
    response = await call.future
    await asyncio.sleep(0)  # the counters follow a turn later
    return number(response)


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110 - of threads, too
            await asyncio.sleep(0)
