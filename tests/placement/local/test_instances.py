"""Local instances, inline and on threads."""

import asyncio
import threading
import weakref
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from threading import Event, get_ident

import numpy as np
import pytest

from headrace.core.bytes_array import BytesArray
from headrace.core.call import Call
from headrace.core.datatypes import Datatype
from headrace.core.errors import ExecutionTimeout, Unavailable
from headrace.core.limits import ExecutionLimits
from headrace.core.model_spec import TensorInfo
from headrace.core.signature import Signature, TensorSpec
from headrace.core.tensors import Array, Tensor
from headrace.ipc.elements import join
from headrace.placement.choice import AutoChoice, InstanceKind, sizes_of
from headrace.placement.loaded import LoadedModel
from headrace.placement.local.instances import Footprint, LocalInstance, run_batch
from headrace.scheduling.batch import Batch, Instance, NotStarted, Outcome
from tests.placement.threads import no_threads
from tests.scheduling.fakes import Bench, entered, request, signature

INLINE, THREAD = InstanceKind.INLINE, InstanceKind.THREAD


class Doubling(LoadedModel):
    """y = 2x on the calling thread, after `before`."""

    inputs: Sequence[TensorInfo] = [TensorInfo("x", Datatype.INT64, (-1, -1))]
    outputs: Sequence[TensorInfo] = [TensorInfo("y", Datatype.INT64, (-1, -1))]

    def __init__(self, before: Callable[[], None] = lambda: None) -> None:
        self._before = before
        self.threads: list[int] = []
        self.closed = Event()
        self.closed_by = 0
        self.rests: list[int] = []
        self.rested = Event()

    def infer(self, inputs: Mapping[str, Array], outputs: Sequence[str]) -> Sequence[Array]:
        self.threads.append(get_ident())
        self._before()
        assert outputs == ["y"]
        return [2 * inputs["x"]]

    def rest(self) -> None:
        self.rests.append(get_ident())
        self.rested.set()

    def close(self) -> None:
        self.closed_by = get_ident()
        self.closed.set()


def batch_of(*values: int) -> Batch:
    call = entered(request("r", *values), len(values), None, 0, Bench().batcher)
    return Batch(signature(), [call])


async def execute(instance: LocalInstance, batch: Batch) -> Outcome:
    """Run one batch through `instance`; asserts a report of the same batch on the loop's thread."""
    reported: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
    loop_thread = get_ident()

    def done(by: Instance, ran: Batch, outcome: Outcome) -> None:
        assert get_ident() == loop_thread
        assert by is instance
        assert ran is batch
        reported.set_result(outcome)

    instance.execute(batch, done)
    return await asyncio.wait_for(reported, 60)


def on_loop(
    model: LoadedModel,
    kind: InstanceKind | AutoChoice,
    scenario: Callable[[LocalInstance], Awaitable[None]],
) -> LocalInstance:
    """Run a coroutine function over a new instance of `model`, then close the instance."""

    async def body() -> LocalInstance:
        instance = LocalInstance("double_0", model, kind, asyncio.get_running_loop())
        await scenario(instance)
        instance.close()
        return instance

    return asyncio.run(body())


@pytest.mark.parametrize("kind", [INLINE, THREAD])
def test_a_batch_is_reported_with_outputs_and_times(kind: InstanceKind) -> None:
    model = Doubling()

    async def scenario(instance: LocalInstance) -> None:
        outcome = await execute(instance, batch_of(1, 2))
        assert outcome.error is None
        assert [array.tolist() for array in outcome.arrays] == [[[2], [4]]]
        assert 0 < outcome.started <= outcome.gathered <= outcome.computed
        assert instance.kind is kind

    on_loop(model, kind, scenario)
    assert model.closed.wait(60)


@pytest.mark.parametrize("kind", [INLINE, THREAD])
def test_a_model_releases_memory_once_after_its_batches(kind: InstanceKind) -> None:
    model = Doubling()

    async def work() -> None:
        loop = asyncio.get_running_loop()
        instance = LocalInstance("double_0", model, kind, loop, rest_secs=0.001)
        for count in (1, 2):
            model.rested.clear()
            await execute(instance, batch_of(1))
            assert await asyncio.to_thread(model.rested.wait, 60)
            assert len(model.rests) == count
        assert set(model.rests) == set(model.threads)
        instance.close()
        await instance.closed()

    asyncio.run(work())


def test_a_busy_model_releases_the_memory_of_a_large_batch() -> None:
    model = Doubling()

    async def work() -> None:
        instance = LocalInstance("double_0", model, THREAD, asyncio.get_running_loop(), None, 0.5)
        await execute(instance, batch_of(*range(2 << 20)))
        async with asyncio.timeout(60):
            while not model.rested.is_set():
                await execute(instance, batch_of(1))
        await execute(instance, batch_of(1))
        assert len(model.rests) == 1
        instance.close()
        await instance.closed()

    asyncio.run(work())


def test_inline_runs_and_closes_on_the_loops_thread() -> None:
    model = Doubling()

    async def scenario(instance: LocalInstance) -> None:
        await execute(instance, batch_of(1))

    on_loop(model, INLINE, scenario)
    assert model.threads == [get_ident()]
    assert model.closed_by == get_ident()


def test_inline_reports_before_execute_returns() -> None:
    reports: list[Outcome] = []

    async def scenario(instance: LocalInstance) -> None:
        instance.execute(batch_of(1), lambda by, batch, outcome: reports.append(outcome))
        assert len(reports) == 1

    on_loop(Doubling(), INLINE, scenario)


def test_a_thread_of_its_own_runs_all_batches_and_closes_the_model() -> None:
    model = Doubling()
    names: set[str] = set()

    async def scenario(instance: LocalInstance) -> None:
        await execute(instance, batch_of(1))
        names.update(thread.name for thread in threading.enumerate())
        await execute(instance, batch_of(2))

    on_loop(model, THREAD, scenario)
    assert model.closed.wait(60)
    (thread,) = set(model.threads)
    assert thread != get_ident()
    assert model.closed_by == thread
    assert "double_0" in names


def test_the_loop_goes_on_while_a_thread_computes() -> None:
    release = Event()

    async def body() -> None:
        loop, begun = asyncio.get_running_loop(), asyncio.Event()

        def compute() -> None:
            loop.call_soon_threadsafe(begun.set)
            assert release.wait(60)

        instance = LocalInstance("double_0", Doubling(compute), THREAD, loop)
        running = asyncio.ensure_future(execute(instance, batch_of(1)))
        await asyncio.wait_for(begun.wait(), 60)
        release.set()
        assert (await running).error is None
        instance.close()

    asyncio.run(body())


def test_a_thread_that_never_ran_is_closed_on_the_loop() -> None:
    model = Doubling()

    async def scenario(instance: LocalInstance) -> None:
        pass

    on_loop(model, THREAD, scenario)
    assert model.closed_by == get_ident()


@pytest.mark.parametrize("kind", [INLINE, THREAD])
@pytest.mark.parametrize("error", [ValueError("no"), MemoryError(), RecursionError()])
def test_an_exception_of_the_model_is_an_outcome(kind: InstanceKind, error: Exception) -> None:
    def fail() -> None:
        raise error

    async def scenario(instance: LocalInstance) -> None:
        outcome = await execute(instance, batch_of(1))
        assert outcome.error is error
        assert list(outcome.arrays) == []
        assert outcome.started <= outcome.gathered <= outcome.computed
        assert (await execute(instance, batch_of(2))).error is error  # and it goes on

    on_loop(Doubling(fail), kind, scenario)


def test_inputs_that_cannot_be_gathered_are_an_outcome_too() -> None:
    batch = batch_of(1)
    batch.calls.append(batch_of(2).calls[0])
    inputs = batch.calls[1].inputs
    inputs["x"] = inputs["x"]._replace(array=np.zeros((1, 1, 1), np.int64))
    outcome = run_batch(Doubling().infer, batch)
    assert isinstance(outcome.error, ValueError)
    assert outcome.started == outcome.gathered


def test_moving_between_the_kinds() -> None:
    """With a budget of one nanosecond every run is too long, with an infinite one none is."""
    model = Doubling()

    async def leaves(instance: LocalInstance) -> None:
        assert instance.kind is INLINE
        while instance.kind is INLINE:
            await execute(instance, batch_of(1))
        await execute(instance, batch_of(1))
        assert model.threads[0] == get_ident() != model.threads[-1]

    on_loop(model, AutoChoice(0, budget_ns=1), leaves)
    assert model.closed.wait(60)
    assert model.closed_by == model.threads[-1]

    model = Doubling()

    async def comes_back(instance: LocalInstance) -> None:
        assert instance.kind is THREAD
        while instance.kind is THREAD:
            await execute(instance, batch_of(1))
        await execute(instance, batch_of(1))
        assert model.threads[0] != get_ident() == model.threads[-1]

    on_loop(model, AutoChoice(float("inf"), budget_ns=10**12), comes_back)
    assert model.closed.wait(60)
    assert model.closed_by == model.threads[0]  # the thread that it has had since


class Gram(LoadedModel):
    """Records the widths that it has run on the loop's thread, and on others."""

    inputs: Sequence[TensorInfo] = [TensorInfo("x", Datatype.INT64, (-1, -1))]
    outputs: Sequence[TensorInfo] = [TensorInfo("y", Datatype.INT64, (-1, -1))]

    def __init__(self) -> None:
        self.loop = get_ident()
        self.inline: list[int] = []
        self.elsewhere: list[int] = []

    def infer(self, inputs: Mapping[str, Array], outputs: Sequence[str]) -> Sequence[Array]:
        width = inputs["x"].shape[1]
        (self.inline if get_ident() == self.loop else self.elsewhere).append(width)
        return [inputs["x"]]


def wide(width: int) -> Batch:
    call = entered(request("r", 1, width=width), 1, width, 0, Bench().batcher)
    return Batch(signature(), [call])


def test_a_size_that_was_not_measured_does_not_run_on_the_loop() -> None:
    model = Gram()
    chosen = model.kind("auto", signature(), None)
    assert isinstance(chosen, AutoChoice)
    assert chosen.sizes is not None
    assert not chosen.sizes.light((1, 2_000))
    model.inline.clear()

    async def scenario(instance: LocalInstance) -> None:
        for _ in range(7):
            await execute(instance, wide(1))
            await execute(instance, wide(2_000))
        assert (model.inline, model.elsewhere) == ([1] * 7, [2_000] * 7)
        while 2_000 not in model.inline:  # measured on the thread
            await execute(instance, wide(2_000))
        await execute(instance, wide(1_999))
        assert model.inline[-1] == 1_999
        await execute(instance, wide(2_001))
        assert model.elsewhere[-1] == 2_001

    budget = 10**12  # whatever the machine does, no run is too long
    on_loop(model, AutoChoice(0, budget, sizes_of(signature(), 0, budget)), scenario)


def test_failures_do_not_bring_a_model_back_onto_the_loop() -> None:
    def fail() -> None:
        raise ValueError("too early to tell the cost")

    async def scenario(instance: LocalInstance) -> None:
        for _ in range(50):
            await execute(instance, batch_of(1))
        assert instance.kind is THREAD

    on_loop(Doubling(fail), AutoChoice(float("inf"), budget_ns=10**12), scenario)


def test_an_idle_thread_releases_its_last_batch() -> None:
    async def scenario(instance: LocalInstance) -> None:
        loop, gone = asyncio.get_running_loop(), asyncio.Event()
        batch = batch_of(1)
        weakref.finalize(batch.calls[0], lambda: loop.call_soon_threadsafe(gone.set)).atexit = False
        await execute(instance, batch)
        del batch
        await asyncio.wait_for(gone.wait(), 60)

    on_loop(Doubling(), THREAD, scenario)


def test_a_thread_ends_after_its_loop() -> None:
    release = Event()

    def compute() -> None:
        assert release.wait(60)

    async def body() -> None:
        loop = asyncio.get_running_loop()
        instance = LocalInstance("abandoned_0", Doubling(compute), THREAD, loop)
        instance.execute(batch_of(1), lambda by, batch, outcome: None)

    asyncio.run(body())
    (thread,) = [t for t in threading.enumerate() if t.name == "abandoned_0"]
    release.set()
    thread.join(60)
    assert not thread.is_alive()


class Counting(LoadedModel):
    """Number of BYTES elements, on the calling thread."""

    inputs: Sequence[TensorInfo] = [TensorInfo("x", Datatype.BYTES, (-1, -1))]
    outputs: Sequence[TensorInfo] = [TensorInfo("y", Datatype.INT64, (-1,))]

    def __init__(self) -> None:
        self.threads: list[int] = []

    def infer(self, inputs: Mapping[str, Array], outputs: Sequence[str]) -> Sequence[Array]:
        self.threads.append(get_ident())
        return [np.array([len(row) for row in np.asarray(inputs["x"])])]

    def rest(self) -> None: ...

    def close(self) -> None: ...


@pytest.mark.parametrize(
    ("rows", "element", "inline"),
    [
        ([1, 1], b"a few words", True), ([500, 500], b"", True), ([500, 501], b"", False),
        ([1], bytes(1 << 20), False),
    ],
)  # fmt: skip
def test_many_strings_become_objects_on_a_thread(
    rows: list[int], element: bytes, inline: bool
) -> None:
    model, specs = Counting(), (TensorSpec("x", Datatype.BYTES, (-1,)),)
    texts = Signature("m", 2000, specs, (TensorSpec("y", Datatype.INT64, ()),))

    async def scenario(instance: LocalInstance) -> None:
        calls = []
        for count in rows:
            tensor = Tensor("x", Datatype.BYTES, BytesArray(join([element] * count), (count, 1)))
            asked = Call("m", "", "", {"x": tensor})
            calls.append(entered(asked, count, None, 0, Bench().batcher))
        outcome = await execute(instance, Batch(texts, calls))
        assert [array.tolist() for array in outcome.arrays] == [[1] * sum(rows)]

    on_loop(model, INLINE, scenario)
    assert (model.threads == [get_ident()]) is inline


class Endless(Doubling):
    """y = 2x once released, or an error once ended, if it can be ended."""

    def __init__(self, can_be_ended: bool = True, heeds: bool = True) -> None:
        super().__init__(lambda: None)
        self.go = Event()
        self.ended = False
        self._can_be_ended = can_be_ended
        self.heeds = heeds

    def infer(self, inputs: Mapping[str, Array], outputs: Sequence[str]) -> Sequence[Array]:
        assert self.go.wait(60)
        if self.ended and self.heeds:
            self.ended = False
            raise RuntimeError("terminated")
        return super().infer(inputs, outputs)

    def terminate(self) -> bool:
        if self._can_be_ended:
            self.ended = True
            self.go.set()
        return self._can_be_ended


SOON = 0.01


async def test_a_thread_that_runs_too_long_is_stalled_until_done() -> None:
    model = Endless(can_be_ended=False)
    changes: asyncio.Queue[bool] = asyncio.Queue()
    instance = LocalInstance(
        "double_0", model, THREAD, asyncio.get_running_loop(),
        limits=ExecutionLimits(stall_secs=SOON, execution_secs=SOON),
        changed=lambda: changes.put_nowait(instance.stalled),
    )  # fmt: skip
    running = asyncio.ensure_future(execute(instance, batch_of(1)))
    assert await asyncio.wait_for(changes.get(), 60)
    model.go.set()
    assert (await running).error is None
    assert not await asyncio.wait_for(changes.get(), 60)
    instance.close()


@pytest.mark.parametrize("heeds", [True, False])
async def test_a_run_beyond_its_time_limit_is_terminated(heeds: bool) -> None:
    model, ended = Endless(heeds=heeds), Counter[str]()
    instance = LocalInstance(
        "double_0", model, THREAD, asyncio.get_running_loop(),
        limits=ExecutionLimits(execution_secs=SOON), ended=ended,
    )  # fmt: skip
    outcome = await execute(instance, batch_of(1))
    assert ended == {"limit": 1}
    if heeds:
        assert isinstance(outcome.error, ExecutionTimeout)
        assert str(outcome.error) == (
            "model 'double' has taken longer than 0.01 s for a batch and was ended"
        )
    else:  # it was done before that
        assert outcome.error is None
    model.ended = model.heeds = False  # on a busy machine the next one may last too long, too
    assert (await execute(instance, batch_of(2))).error is None
    instance.close()


async def test_a_run_without_clients_is_terminated() -> None:
    model, ended = Endless(), Counter[str]()
    loop = asyncio.get_running_loop()
    instance = LocalInstance("double_0", model, THREAD, loop, ended=ended)
    batch = batch_of(1)
    running = asyncio.ensure_future(execute(instance, batch))
    await asyncio.sleep(0)  # for it to begin
    instance.leave(SOON)
    batch.calls[0].ended = True
    assert isinstance((await running).error, NotStarted)
    assert ended == {"abandoned": 1}
    instance.close()


def test_a_batch_without_a_thread_is_refused() -> None:
    async def scenario(instance: LocalInstance) -> None:
        with no_threads():
            outcome = await execute(instance, batch_of(1))
        assert isinstance(outcome.error, NotStarted)
        assert isinstance(outcome.error.refusal, Unavailable)
        assert "can't start new thread" in str(outcome.error)
        assert (await execute(instance, batch_of(1))).error is None

    on_loop(Doubling(), THREAD, scenario)


MIB = 1 << 20


def test_memory_is_given_back_once_large_batches_have_stopped() -> None:
    footprint = Footprint(10.0)
    footprint.ran(64 * MIB)
    assert not footprint.look(9.0)
    footprint.ran(4 * MIB)
    assert footprint.look(1.0)
    footprint.ran(4 * MIB)
    assert not footprint.look(100.0)


def test_memory_is_kept_while_batches_of_about_the_size_come() -> None:
    footprint = Footprint(10.0)
    footprint.ran(64 * MIB)
    for _ in range(5):
        assert not footprint.look(9.0)
        footprint.ran(32 * MIB)
    assert not footprint.look(9.0)
    assert footprint.look(1.0)


def test_small_batches_are_not_worth_it() -> None:
    footprint = Footprint(10.0)
    footprint.ran(MIB)
    assert not footprint.look(100.0)


def test_memory_given_back_otherwise_is_forgotten() -> None:
    footprint = Footprint(10.0)
    footprint.ran(64 * MIB)
    footprint.forget()
    assert not footprint.look(100.0)
