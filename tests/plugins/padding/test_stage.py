"""The stage of padding: charges, cancellation, and calls whose inputs are padded on a thread."""

import asyncio
import json
from typing import Any

import numpy as np
import pytest

from headrace.core.call import Call, InferResponse, Timing
from headrace.core.datatypes import Datatype
from headrace.core.errors import ExecutionFailed, Overloaded, QueueFull, ServerError
from headrace.core.tensors import Tensor
from headrace.engine.admission import Admission
from headrace.engine.padding import PaddingParts
from headrace.observability.statistics import PaddingCounts
from headrace.plugins.padding.stage import BucketPadding
from headrace.repository.config import parse_config
from tests.models.python_models import tensors

LARGE = 1 << 20  # a bucket whose requests are padded on a thread
IO = tensors("input", ("X", "FP32", "-1")) + tensors("output", ("Y", "FP32", "-1"))


class KeptCall(Call):
    """Records its answer."""

    def __init__(self, length: int) -> None:
        array = np.ones((2, length), np.float32)
        super().__init__("m", "", "7", {"X": Tensor("X", Datatype.FP32, array)})
        self.rows = 2
        self.answered: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

    def respond(self, response: InferResponse, final: bool) -> None:
        self.answered.set_result([tensor.array.shape for tensor in response.outputs])

    def fail(self, error: ServerError) -> None:
        self.answered.set_result(error)

    refuse = fail


class World:
    """A stage before a queue that is a list, or refuses."""

    def __init__(self, most_bytes: int = 1 << 30, refusal: ServerError | None = None) -> None:
        config = parse_config(f"max_batch_size: 4\n{IO}", "m/config.pbtxt").config
        told = {"t": {"buckets": [4, LARGE], "inputs": {"X": {}}, "outputs": {"Y": {}}}}
        config.parameters["pad_to_buckets"].string_value = json.dumps(told)
        padding = BucketPadding(config)
        assert list(padding.problems()) == []
        self.account = Admission(0, most_bytes)
        self.expected = 0
        self.refusal = refusal
        self.queued: asyncio.Queue[Call] = asyncio.Queue()
        self.counts = PaddingCounts()
        parts = PaddingParts(self._expect, self.account, self.account.workbench, self.counts)
        self.submit = padding.stage(parts, self._queue)

    def _expect(self, more: int) -> None:
        self.expected += more
        assert self.expected >= 0

    def _queue(self, call: Call) -> None:
        if self.refusal is not None:
            raise self.refusal
        self.queued.put_nowait(call)

    @property
    def settled(self) -> bool:
        """True if nothing is charged or announced."""
        return not (self.account.bytes or self.expected)


def answer(call: Call) -> None:
    """Answer a call with its own inputs."""
    outputs = [Tensor("Y", Datatype.FP32, call.inputs["X"].array)]
    call.pass_response(InferResponse("m", "1", call.id, outputs, Timing(0, 0, 2)), True)


@pytest.mark.parametrize(("length", "bucket"), [(3, 4), (5, LARGE)])
async def test_padded_inputs_are_charged_until_the_answer(length: int, bucket: int) -> None:
    world, call = World(), KeptCall(length)
    world.submit(call)
    assert world.account.bytes == 2 * 4 * bucket
    queued = await world.queued.get()
    assert queued is call
    assert call.inputs["X"].array.shape == (2, bucket)
    assert world.expected == 0
    answer(call)
    assert await call.answered == [(2, length)]
    assert world.settled
    assert world.counts.positions == {("t", "own"): 2 * length, ("t", "added"): (
        2 * (bucket - length)
    )}  # fmt: skip


async def test_a_request_that_fills_its_bucket_is_not_copied() -> None:
    world, call = World(), KeptCall(4)
    array = call.inputs["X"].array
    world.submit(call)
    assert call.inputs["X"].array is array
    assert world.account.bytes == 0


async def test_a_call_that_is_cancelled_while_it_is_padded() -> None:
    world, gone, call = World(), KeptCall(5), KeptCall(5)
    world.submit(gone)
    world.submit(call)
    gone.cancel()
    assert await world.queued.get() is call
    call.cancel()
    assert world.settled
    assert world.queued.empty()


async def test_no_room_for_padded_inputs() -> None:
    world, call = World(most_bytes=1000), KeptCall(5)
    for _ in range(2):  # other messages
        world.account.begin(0)
        world.account.grow(400)
    with pytest.raises(Overloaded):
        world.submit(call)
    assert (world.account.bytes, world.expected) == (800, 0)
    world.account.count(800)  # more than there is room for
    whole = KeptCall(4)
    world.submit(whole)  # needs none
    assert await world.queued.get() is whole


async def test_a_queue_that_refuses() -> None:
    world, here, large = World(refusal=QueueFull("full")), KeptCall(3), KeptCall(5)
    with pytest.raises(QueueFull):
        world.submit(here)
    world.submit(large)
    assert isinstance(await large.answered, QueueFull)
    assert world.settled


async def test_a_model_that_fails() -> None:
    world, call = World(), KeptCall(3)
    world.submit(call)
    call.pass_end(ExecutionFailed("broken"))
    assert isinstance(await call.answered, ExecutionFailed)
    assert world.settled
