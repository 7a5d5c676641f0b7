"""Requests with tensors in shared memory: copies, order and release."""

import asyncio
import gc
import weakref
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest

from headrace.core.call import (
    Call,
    CallOptions,
    InferResponse,
    RegionSlice,
    Shared,
    SharedInput,
    Timing,
)
from headrace.core.datatypes import Datatype
from headrace.core.errors import (
    ExecutionFailed,
    InvalidRequest,
    NotFound,
    Overloaded,
    PayloadTooLarge,
    QueueFull,
    ServerError,
    Unavailable,
)
from headrace.core.tensors import Tensor, raw_bytes
from headrace.engine.admission import Admission
from headrace.engine.shared_memory import AT_ONCE, Regions, share
from tests.protocol.strategies import object_array
from tests.support.shared_memory import SharedFile

LONG = AT_ONCE + 4  # bytes that are copied on another thread
SIZE = 4 * LONG


class KeptCall(Call):
    """Records its answers."""

    def __init__(self) -> None:
        super().__init__("m", "", "7", {})
        self.got: list[Any] = []

    def respond(self, response: InferResponse, final: bool) -> None:
        self.got.append((response.id, final))

    def finish(self) -> None:
        self.got.append("end")

    def fail(self, error: ServerError) -> None:
        self.got.append(error)

    def refuse(self, error: ServerError) -> None:
        self.got.append(("refused", error))


class Work:
    """The model's queue, and its one call."""

    def __init__(self) -> None:
        self.expected = 0
        self.submitted = self.cancelled = 0
        self.held: list[bool] = []
        self.refusal: Exception | None = None

    def expect(self, count: int) -> None:
        self.expected += count

    def submit(self, call: Call) -> None:
        if self.refusal is not None:
            raise self.refusal
        self.submitted += 1
        call.owner = self
        if call.held is not None:
            self.held.append(call.held)

    def cancel(self, call: Call) -> None:
        self.cancelled += 1

    def hold(self, call: Call, held: bool) -> None:
        self.held.append(held)


class Scene:
    """A region and one call that uses it."""

    def __init__(self, file: SharedFile, max_bytes: int = 64 << 20, admitted: int = 0) -> None:
        self.file = file
        self.admission = Admission(0, admitted)
        self.regions = Regions(self.admission, max_bytes, allowed=True)
        self.call = KeptCall()
        self.shared = Shared()
        self.work = Work()

    def floats(self, nbytes: int, offset: int = 0, region: str = "r") -> None:
        """Add an input `x` in the region."""
        place = RegionSlice(region, offset, nbytes)
        inputs = {"x": SharedInput(Datatype.FP32, (nbytes // 4,), place)}
        self.shared = self.shared._replace(inputs=inputs)

    def room(self, nbytes: int, offset: int = 0) -> None:
        """Add an output `y` in the region."""
        self.shared = self.shared._replace(outputs={"y": RegionSlice("r", offset, nbytes)})

    def begin(self) -> KeptCall:
        self.call.options = CallOptions(shared=self.shared)
        share(self.regions, self.work.expect, self.work.submit)(self.call)
        return self.call

    async def until(self, condition: Callable[[], object]) -> None:
        async with asyncio.timeout(20):
            while not condition():  # noqa: ASYNC110 - anything may make it so
                await asyncio.sleep(0)

    @property
    def in_use(self) -> int:
        region = self.regions.take(RegionSlice("r", 0, 0))
        self.regions.release(region)
        return region.users


@asynccontextmanager
async def scene(**options: int) -> AsyncIterator[Scene]:
    """A region of zeros; at the end nothing is in use or counted."""
    with SharedFile(SIZE) as file:
        found = Scene(file, **options)
        await found.regions.register_system("r", file.key, 0, SIZE)
        yield found
        await found.until(lambda: not found.in_use)
        assert (found.admission.requests, found.admission.bytes) == (0, 0)
        assert found.work.expected == 0


def response(*outputs: Tensor, id: str = "7") -> InferResponse:
    return InferResponse("m", "1", id, list(outputs), Timing(1, 2, 3))


def output(nbytes: int, value: float = 1) -> Tensor:
    return Tensor("y", Datatype.FP32, np.full(nbytes // 4, value, np.float32))


@pytest.mark.parametrize("nbytes", [8, LONG])
async def test_an_input(nbytes: int) -> None:
    async with scene() as s:
        s.file.put(np.arange(nbytes // 4, dtype=np.float32).tobytes(), 16)
        s.floats(nbytes, 16)
        call = s.begin()
        await s.until(lambda: s.work.submitted)
        s.file.put(bytes(nbytes), 16)  # too late
        assert s.call.inputs["x"].array.tolist() == list(range(nbytes // 4))
        assert s.admission.bytes == nbytes
        call.pass_response(response(output(8)), True)
        assert s.call.got == [("7", True)]


@pytest.mark.parametrize("count", [2, 100_000])
async def test_an_input_of_strings(count: int) -> None:
    async with scene() as s:
        array = object_array([str(n).encode() * 3 for n in range(count)], [count])
        raw = raw_bytes(array)
        s.file.put(bytes(raw))
        place = RegionSlice("r", 0, len(raw))
        s.shared = Shared({"x": SharedInput(Datatype.BYTES, (count,), place)})
        call = s.begin()
        await s.until(lambda: s.work.submitted)
        assert s.call.inputs["x"].array.tolist() == array.tolist()
        call.pass_end()
        assert s.call.got == ["end"]


@pytest.mark.parametrize("nbytes", [8, LONG])
async def test_invalid_strings(nbytes: int) -> None:
    async with scene() as s:
        s.file.put(b"\xff" * nbytes)
        place = RegionSlice("r", 0, nbytes)
        s.shared = Shared({"x": SharedInput(Datatype.BYTES, (1,), place)})
        await refused(s, InvalidRequest, "incomplete string data")


async def refused(s: Scene, kind: type[ServerError], part: str) -> None:
    """Assert that the call is refused, at once or later."""
    try:
        s.begin()
    except ServerError as refusal:
        s.call.refuse(refusal)
    await s.until(lambda: s.call.got)
    [(how, error)] = s.call.got
    assert how == "refused"
    assert isinstance(error, kind)
    assert part in str(error)
    assert not s.work.submitted


@pytest.mark.parametrize("nbytes", [8, LONG])
async def test_a_truncated_file(nbytes: int) -> None:
    async with scene() as s:
        s.file.resize(nbytes - 1)
        s.floats(nbytes)
        await refused(s, InvalidRequest, "'r' does not have the bytes any more")


@pytest.mark.parametrize("nbytes", [8, LONG])
async def test_a_full_queue(nbytes: int) -> None:
    async with scene() as s:
        s.work.refusal = QueueFull("full")
        s.floats(nbytes)
        await refused(s, QueueFull, "full")


async def test_a_bug_after_the_inputs_were_copied(caplog: pytest.LogCaptureFixture) -> None:
    async with scene() as s:
        s.work.refusal = ZeroDivisionError()
        s.floats(LONG)
        await refused(s, ExecutionFailed, "internal error")
    assert "ZeroDivisionError" in caplog.text


async def test_inputs_for_which_there_is_no_thread() -> None:
    async with scene() as s:
        s.floats(LONG)
        s.regions.threads.shutdown()  # as where no more can be started
        await refused(s, Unavailable, "the server cannot do this now: ")


async def test_an_unknown_region_for_one_of_two_inputs() -> None:
    async with scene() as s:
        s.room(8)
        s.floats(8, region="other")
        await refused(s, NotFound, "Unable to find shared memory region: 'other'")


async def test_more_bytes_than_the_request_or_admission_limit() -> None:
    async with scene(max_bytes=1000) as s:
        s.call.nbytes = 500
        s.floats(504)
        await refused(s, PayloadTooLarge, "request and its shared memory (1004 bytes)")
    async with scene(admitted=1000) as s:
        s.admission.enter(0)
        s.admission.enter(600)
        s.floats(504)
        await refused(s, Overloaded, "limit of 1000 bytes")
        s.admission.leave(600)
        s.admission.leave(0)


@pytest.mark.parametrize("nbytes", [8, LONG])
async def test_an_output(nbytes: int) -> None:
    async with scene() as s:
        s.room(nbytes + 4, 16)
        call = s.begin()
        assert s.work.submitted
        given = response(output(nbytes), Tensor("z", Datatype.FP32, np.zeros(1, np.float32)))
        call.pass_response(given, True)
        await s.until(lambda: s.call.got)
        assert s.file.get(nbytes, 16) == output(nbytes).array.tobytes()
        y, z = given.outputs
        assert (y.name, y.array.shape, y.array.tobytes()) == ("y", (nbytes // 4,), b"")
        assert y.datatype.value == "FP32"
        assert z.array.tolist() == [0]


@pytest.mark.parametrize(("final", "cancelled"), [(True, 0), (False, 1)])
async def test_an_output_larger_than_its_place(final: bool, cancelled: int) -> None:
    async with scene() as s:
        s.room(7)
        call = s.begin()
        call.pass_response(response(output(8)), final)
        [error] = s.call.got
        assert isinstance(error, ExecutionFailed)
        assert str(error) == (
            "shared memory size specified with the request for output 'y' (7 bytes)"
            " should be at least 8 bytes to hold the results"
        )
        assert s.work.cancelled == cancelled


@pytest.mark.parametrize("nbytes", [8, LONG])
async def test_a_file_truncated_during_execution(nbytes: int) -> None:
    async with scene() as s:
        s.room(nbytes)
        call = s.begin()
        s.file.resize(0)
        call.pass_response(response(output(nbytes)), True)
        await s.until(lambda: s.call.got)
        assert isinstance(s.call.got[0], ExecutionFailed)
        assert s.file.path.stat().st_size == 0


async def test_a_region_unregistered_during_execution() -> None:
    async with scene() as s:
        s.room(8)
        call = s.begin()
        s.regions.unregister("r", cuda=False)
        assert set(s.regions.system_status().regions) == {"r"}
        call.pass_response(response(output(8, 5)), True)
        assert s.file.get(8) == output(8, 5).array.tobytes()
        assert not s.regions.system_status().regions
        await s.regions.register_system("r", s.file.key, 0, SIZE)  # the name is free


@pytest.mark.parametrize("last", ["final", "end", "error"])
async def test_responses_keep_their_order(last: str) -> None:
    """Short responses, and those without data, wait for a long one before them."""
    async with scene() as s:
        s.room(SIZE)
        call = s.begin()
        call.pass_response(response(output(LONG, 1), id="1"), False)
        call.pass_response(response(output(LONG, 2), id="2"), False)
        call.pass_response(response(output(8, 3), id="3"), last == "final")
        error = InvalidRequest("no more")
        if last == "end":
            call.pass_end()
        elif last == "error":
            call.pass_end(error)
        assert s.call.got == []
        ends: dict[str, list[Any]] = {"final": [], "end": ["end"], "error": [error]}
        expected = [("1", False), ("2", False), ("3", last == "final"), *ends[last]]
        await s.until(lambda: s.call.got == expected)
        assert s.file.get(12) == output(8, 3).array.tobytes() + output(4, 2).array.tobytes()


async def test_no_response_follows_one_that_did_not_fit() -> None:
    async with scene() as s:
        s.room(LONG)
        call = s.begin()
        call.pass_response(response(output(LONG)), False)
        call.pass_response(response(output(LONG + 4)), False)
        call.pass_response(response(output(8)), True)
        await s.until(lambda: len(s.call.got) == 2)
        assert s.call.got[0] == ("7", False)
        assert isinstance(s.call.got[1], ExecutionFailed)
        call.pass_response(response(output(8)), True)
        assert len(s.call.got) == 2


async def test_cancelled_while_inputs_are_copied() -> None:
    async with scene() as s:
        s.floats(LONG)
        call = s.begin()
        assert s.work.expected == 1
        call.cancel()
        await s.until(lambda: not s.work.expected)
        assert not s.work.submitted
        assert s.call.got == []


async def test_cancelled_while_queued_and_while_outputs_are_copied() -> None:
    async with scene() as s:
        s.room(LONG)
        s.begin().cancel()
        assert s.work.cancelled == 1
        s.call = KeptCall()
        call = s.begin()
        call.pass_response(response(output(LONG)), True)
        call.cancel()
        call.cancel()
        assert s.work.cancelled == 2
        await s.until(lambda: not s.in_use)
        assert s.call.got == []


async def test_held_before_it_is_queued() -> None:
    async with scene() as s:
        s.floats(LONG)
        call = s.begin()
        call.hold(True)
        await s.until(lambda: s.work.submitted)
        call.hold(False)
        assert s.work.held == [True, False]
        call.pass_end()


def test_tensors_are_freed_with_their_call() -> None:
    """No tensor waits for the garbage collector."""

    async def scenario() -> None:
        async with scene() as s:
            s.floats(8)
            call = s.begin()
            gone = weakref.ref(s.call.inputs["x"].array)
            call.pass_response(response(output(8)), True)
            del call
            s.call = KeptCall()
            assert gone() is None

    gc.disable()
    try:
        asyncio.run(scenario())
    finally:
        gc.enable()
