"""An engine whose models answer when, and as often as, the test says."""

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np

from headrace.core.call import Call, InferResponse, Timing
from headrace.core.datatypes import Datatype
from headrace.core.errors import InvalidRequest, NotFound
from headrace.core.identity import Access
from headrace.core.signature import Signature, TensorSpec
from headrace.core.tensors import Tensor
from headrace.engine.admission import Admission
from headrace.engine.entrance import NOTHING_KNOWN

SIGNATURE = Signature(
    "any",
    8,
    (TensorSpec("x", Datatype.INT32, (-1,)),),
    (TensorSpec("y", Datatype.UINT8, (-1,)),),
)


async def until(condition: Callable[[], bool]) -> None:
    """Run the event loop until a condition holds."""
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110 - anything may make it so
            await asyncio.sleep(0)


class Work:
    """One request given to a model, and its door's calls since."""

    def __init__(self, model: "Model", request: Call) -> None:
        self.model = model
        self.request = request
        self.cancelled = False
        self.held = False
        self.holds = 0  # how often it was asked to pause
        request.owner = self

    def cancel(self, call: Call) -> None:
        self.cancelled = True

    def hold(self, call: Call, held: bool) -> None:
        assert held != self.held
        self.held = held
        self.holds += held

    def answer(self, text: str | int, final: bool = False) -> None:
        """Respond with a text, or with `nbytes` bytes."""
        assert not self.cancelled, "an answer to what was cancelled"
        raw = text.encode() if isinstance(text, str) else bytes(text)
        output = Tensor("y", Datatype.UINT8, np.frombuffer(raw, np.uint8))
        names = self.model.model, self.model.name, self.request.id
        self.request.pass_response(InferResponse(*names, [output], Timing(1, 2, 3)), final)


class Model:
    """A model; it refuses requests with the id `bad`."""

    signature: Signature | None = SIGNATURE
    direct = None

    def __init__(self, model: str, decoupled: bool) -> None:
        self.model = model
        self.name = "7"
        self.decoupled = decoupled
        self.work: list[Work] = []

    def submit(self, call: Call) -> None:
        if call.id == "bad":
            raise InvalidRequest("as asked")
        self.work.append(Work(self, call))

    @property
    def last(self) -> Work:
        """The last request."""
        return self.work[-1]


class FakeEngine:
    """An engine with the models `plain`, of one answer, and `many`, of any number."""

    access: Access | None = None

    def __init__(self) -> None:
        self.admission = Admission(2000, 0)
        self.models = {"plain": Model("plain", False), "many": Model("many", True)}

    @property
    def exiting(self) -> bool:
        return self.admission.exiting

    @property
    def plain(self) -> Model:
        return self.models["plain"]

    @property
    def many(self) -> Model:
        return self.models["many"]

    known = NOTHING_KNOWN

    def find(self, name: str, version: str = "") -> Model:
        if name not in self.models:
            raise NotFound(f"no model {name!r}")
        return self.models[name]


class Transport(asyncio.Transport):
    """Records writes; like uvloop's, it must not be written to once closed."""

    def __init__(self) -> None:
        super().__init__()
        self.written: list[Any] = []
        self.closed = False
        self.reading = True

    def write(self, data: Any) -> None:
        if self.closed:
            raise RuntimeError("the handler is closed")
        self.written.append(data)

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None: ...

    def get_write_buffer_size(self) -> int:
        return 0

    def is_closing(self) -> bool:
        return self.closed

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        self.reading = True

    def abort(self) -> None:
        self.closed = True

    def close(self) -> None:
        self.closed = True
