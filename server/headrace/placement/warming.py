"""Warm-up: runs a configuration's samples through a newly loaded instance before it serves.

A sample takes the path of any request: through a scheduler of its own to the instance, and its
responses are checked against the signature. It is not counted. Everything runs on the thread that
loads the instance, on a temporary event loop.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from headrace.core.call import Call, InferResponse
from headrace.core.datatypes import FLOATS, NUMPY, Datatype
from headrace.core.errors import LoadFailed, ServerError
from headrace.core.signature import Signature
from headrace.core.tensors import Array, Tensor
from headrace.observability.statistics import VersionStatistics
from headrace.scheduling.batch import Batch, Instance, Outcome
from headrace.scheduling.batcher import Batcher
from headrace.scheduling.clock import LoopClock
from headrace.scheduling.policy import BatchPolicy, SchedulingPolicy

LIMIT_SECS = 600.0  # for all samples of an instance
_DIGITS = 8  # characters of a random text
_LARGEST = 128  # bound of random integers, valid for every datatype


# Makes an input of the request with an index.
MakeInput = Callable[[int], Tensor]


@dataclass(frozen=True, slots=True)
class Sample:
    """`batch_size` requests that run as one batch, `count` times."""

    name: str
    batch_size: int
    count: int
    inputs: Mapping[str, MakeInput]


def zeros(name: str, datatype: Datatype, shape: tuple[int, ...], index: int) -> Tensor:
    """Zeros, false, or empty text."""
    if datatype is Datatype.BYTES:
        texts = np.empty(shape, object)
        texts.fill(b"")
        return Tensor(name, datatype, texts)
    return Tensor(name, datatype, np.zeros(shape, NUMPY[datatype]))


def random(name: str, datatype: Datatype, shape: tuple[int, ...], index: int) -> Tensor:
    """Numbers from 0 to 1, whole numbers below 128, or digits; the same at every load."""
    numbers = np.random.default_rng(index)
    array: Array
    if datatype is Datatype.BYTES:
        array = np.empty(shape, object)
        digits = numbers.integers(10 ** (_DIGITS - 1), 10**_DIGITS, array.size)
        array[...] = np.array([b"%d" % n for n in digits.tolist()], object).reshape(shape)
    elif datatype in FLOATS:
        array = numbers.random(shape, np.float32).astype(NUMPY[datatype])
    else:
        most = 2 if datatype is Datatype.BOOL else _LARGEST
        array = numbers.integers(0, most, shape).astype(NUMPY[datatype])
    return Tensor(name, datatype, array)


def given(name: str, datatype: Datatype, arrays: Sequence[Array], index: int) -> Tensor:
    """One of the arrays of the requests; a single array is for all of them."""
    return Tensor(name, datatype, arrays[index % len(arrays)])


class Here(Instance):
    """An instance on the current thread."""

    load = 0

    def __init__(self, run: Callable[[Batch], Outcome]) -> None:
        self._run = run

    def execute(self, batch: Batch, done: Callable[[Instance, Batch, Outcome], None]) -> None:
        """Run `batch`; see `headrace.scheduling.batch.Instance`."""
        done(self, batch, self._run(batch))

    def serves(self, target: object) -> bool:
        """Implements `Instance.serves`: samples have no targets."""
        return False

    def close(self) -> None:
        """Do nothing: the instance belongs to its loader."""


def warm_up(
    run: Callable[[Batch], Outcome], signature: Signature, version: str, samples: Sequence[Sample]
) -> None:
    """Run all samples in this process; raises `LoadFailed` naming the failing one."""

    async def work() -> None:
        await Warming(signature, version).work(Here(run), samples)

    if samples:
        asyncio.run(work())


class Warming:
    """A scheduler for samples. Owned by the event loop on which it is created."""

    def __init__(self, signature: Signature, version: str) -> None:
        self._signature = signature
        self._version = version
        # The backend's exception, with text that clients must not see.
        self._raised: Exception | None = None
        policy = SchedulingPolicy(BatchPolicy(signature.max_batch_size))
        clock = LoopClock(asyncio.get_running_loop())
        self.batcher = Batcher(signature, version, policy, clock, VersionStatistics(), self._report)

    async def work(self, instance: Instance, samples: Sequence[Sample]) -> None:
        """Run all samples; raises `LoadFailed` naming a sample that fails, or takes too long."""
        self.batcher.add_instance(instance)
        deadline = asyncio.get_running_loop().time() + LIMIT_SECS
        for sample in samples:
            try:
                async with asyncio.timeout_at(deadline):
                    for _ in range(sample.count):
                        await self._run(sample)
            except TimeoutError:
                raise _failed(sample, f"warming up takes longer than {LIMIT_SECS:.0f} s") from None
            except ServerError as error:
                raised = error if self._raised is None else self._raised
                raise _failed(sample, f"{raised}", f"{error}") from error
            except MemoryError as error:
                raise _failed(sample, "there is no memory for its inputs") from error

    async def _run(self, sample: Sample) -> None:
        calls = [
            _SampleCall(self._signature.model, self._version, "", {
                name: make(index) for name, make in sample.inputs.items()
            })
            for index in range(sample.batch_size)
        ]  # fmt: skip
        for call in calls:
            call.rows = self._signature.check(call)
            self.batcher.submit(call)
        await asyncio.gather(*(call.answered for call in calls))

    def _report(self, calls: Sequence[Call], error: Exception) -> None:
        self._raised = error


def _failed(sample: Sample, text: str, public: str = "") -> LoadFailed:
    start = f"failed to run warmup sample '{sample.name}': "
    return LoadFailed(start + text, start + (public or text))


class _SampleCall(Call):
    """A sample's request, which only needs to end successfully."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.answered: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def respond(self, response: InferResponse, final: bool) -> None:
        if final:
            self.finish()

    def finish(self) -> None:
        if not self.answered.done():
            self.answered.set_result(None)

    def fail(self, error: ServerError) -> None:
        if not self.answered.done():
            self.answered.set_exception(error)
