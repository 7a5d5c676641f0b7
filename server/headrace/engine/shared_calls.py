"""A request with tensors in shared memory, from its submission to its end.

Its inputs are copied before it is queued, so that a batch never waits for a region, nor fails for
one; its outputs are written when they come, and its response goes on without their data. What is
short is copied on the event loop; what is long, and what is in memory of a GPU, on other threads.
Meanwhile the rest waits: the queueing of the request, or the responses that come after.

Owned by the event-loop thread. Invariant: regions are in use from `begin` to the end, and as long
as a thread copies.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import numpy as np

from headrace.core.call import (
    Call,
    Done,
    InferResponse,
    Owner,
    Shared,
    SharedInput,
    Stage,
    Stretch,
    Submit,
)
from headrace.core.datatypes import NUMPY, Datatype
from headrace.core.errors import ExecutionFailed, PayloadTooLarge, ServerError
from headrace.core.tensors import Array, Tensor, elsewhere, raw_bytes
from headrace.engine.regions import Region, Regions
from headrace.wire.compression import too_large
from headrace.wire.status import INTERNAL_TEXT

log = logging.getLogger(__name__)

AT_ONCE = 1 << 20  # bytes that are copied on the event loop, in less than a tenth of a millisecond

_Copy = Callable[[], None]


class Queue(Protocol):
    """Where requests wait that are on their way to a model."""

    def expect(self, count: int) -> None:
        """So many requests more, or less, are about to come."""


def share(regions: Regions, queue: Queue, submit: Submit) -> Submit:
    """The stage of calls that may have tensors in shared memory, before `submit`."""

    def stage(call: Call) -> None:
        if call.shared is None:
            submit(call)
        else:
            memory = SharedMemory(call.shared, regions)
            call.enter(memory, partial(memory.begin, queue, submit))

    return stage


def placeholders(shared: Shared) -> dict[str, Tensor]:
    """The inputs that are in shared memory, as tensors without data."""
    return {
        name: Tensor(name, given.datatype, np.empty(given.shape, "V0"))
        for name, given in shared.inputs.items()
    }


class SharedMemory(Stage):
    """The shared memory of one call, and its owner while its inputs are being copied."""

    def __init__(self, shared: Shared, regions: Regions) -> None:
        self._shared = shared
        self._regions = regions
        self._used: list[Region] = []
        self._places: dict[str, tuple[Region, int, int]] = {}  # of outputs: offset, byte_size
        self._nbytes = 0  # that admission has counted
        self._copying = False
        self._over = False

    def begin(self, queue: Queue, submit: Submit, call: Call) -> None:
        """Copy the inputs and `submit` the call, at once or later; raises `ServerError`."""
        copies = self._prepare(call)
        if self._at_once(self._nbytes):
            for copy in copies:
                copy()
            submit(call)
            return
        queue.expect(1)
        call.owner = self
        self._copy(copies, partial(self._fetched, queue, submit, call))

    def transform(
        self, call: Call, response: InferResponse, final: bool, done: Done
    ) -> Owner | None:
        """Write outputs to their places, and have the response go on without them."""
        copies, nbytes = self._written(response)
        if not self._at_once(nbytes):
            self._copy(copies, done)
            return self
        for copy in copies:
            copy()
        return None

    def over(self, call: Call) -> None:
        """Do nothing more, but what a thread copies now."""
        self._over = True
        if not self._copying:
            self._release()

    def cancel(self, call: Call) -> None:
        """`Owner.cancel`: a thread that copies goes on."""

    def hold(self, call: Call, held: bool) -> None:
        """`Owner.hold`."""
        call.held = held

    # --- inputs

    def _prepare(self, call: Call) -> list[_Copy]:
        """Have the regions, and make room for what is in them; raises `ServerError`."""
        shared, regions = self._shared, self._regions
        for name, place in shared.outputs.items():
            self._places[name] = (self._use(place), place.offset, place.byte_size)
        sources = [(self._use(given.place), n, given) for n, given in shared.inputs.items()]
        nbytes = sum(given.place.byte_size for given in shared.inputs.values())
        if call.nbytes + nbytes > regions.max_bytes:
            raise PayloadTooLarge(
                too_large("request and its shared memory", regions.max_bytes, call.nbytes + nbytes)
            )
        regions.admission.grow(nbytes)
        self._nbytes = nbytes
        return [partial(self._read, call.inputs, *source) for source in sources]

    def _use(self, place: Stretch) -> Region:
        region = self._regions.take(place)
        self._used.append(region)
        return region

    def _read(
        self, inputs: dict[str, Tensor], region: Region, name: str, given: SharedInput
    ) -> None:
        """Copy an input; may be called on another thread."""
        place = given.place
        if given.datatype is Datatype.BYTES:
            raw = np.empty(place.byte_size, np.uint8)
            region.read(raw.data, place.offset)
            tensor = Tensor.from_bytes(name, given.datatype, given.shape, raw.data)
        else:
            array: Array = np.empty(given.shape, NUMPY[given.datatype])
            region.read(array.reshape(-1).view(np.uint8).data, place.offset)
            tensor = Tensor(name, given.datatype, array)
        inputs[name] = tensor

    def _fetched(self, queue: Queue, submit: Submit, call: Call, error: Exception | None) -> None:
        """The inputs are there, or not."""
        try:
            if self._over:
                return
            if error is not None:
                raise error
            submit(call)
        except ServerError as refusal:
            call.pass_refusal(refusal)
        finally:
            queue.expect(-1)

    # --- outputs

    def _written(self, response: InferResponse) -> tuple[list[_Copy], int]:
        """Take the outputs that have places out of a response: what copies them, and their bytes.

        Raises `ExecutionFailed` for one that is larger than its place.
        """
        copies: list[_Copy] = []
        total = 0
        outputs: list[Tensor] = []
        for tensor in response.outputs:
            place = self._places.get(tensor.name)
            if place is None:
                outputs.append(tensor)
                continue
            region, offset, room = place
            raw = raw_bytes(tensor.array)
            if len(raw) > room:
                raise ExecutionFailed(
                    f"shared memory size specified with the request for output '{tensor.name}'"
                    f" ({room} bytes) should be at least {len(raw)} bytes to hold the results"
                )
            total += len(raw)
            copies.append(partial(region.write, memoryview(raw), offset))
            outputs.append(elsewhere(tensor.name, tensor.datatype, tensor.array.shape))
        response.outputs = outputs
        return copies, total

    # --- both

    def _at_once(self, nbytes: int) -> bool:
        return nbytes <= AT_ONCE and all(region.device_id is None for region in self._used)

    def _copy(self, copies: Sequence[_Copy], done: Done) -> None:
        """Copy on another thread, then call `done`, with the error if there was one."""
        self._copying = True
        loop = asyncio.get_running_loop()
        future = loop.run_in_executor(self._regions.threads, _run, copies)
        future.add_done_callback(partial(self._copied, done))

    def _copied(self, done: Done, future: "asyncio.Future[None]") -> None:
        self._copying = False
        if self._over:
            self._release()
        error = future.exception()
        if error is not None and not isinstance(error, ServerError):
            log.error("bug while copying shared memory", exc_info=error)
            error = ExecutionFailed(INTERNAL_TEXT)
        done(error)

    def _release(self) -> None:
        used, self._used = self._used, []
        for region in used:
            self._regions.release(region)
        nbytes, self._nbytes = self._nbytes, 0
        self._regions.admission.count(-nbytes)


def _run(copies: Sequence[_Copy]) -> None:
    for copy in copies:
        copy()
