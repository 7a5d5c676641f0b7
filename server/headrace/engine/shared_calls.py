"""A request with tensors in shared memory, from its submission to its end.

Its inputs are copied before it is queued, so that a batch never waits for a region, nor fails for
one; its outputs are written when they come, and its response goes on without their data. What is
short is copied on the event loop; what is long, and what is in memory of a GPU, on other threads.
Meanwhile the rest waits: the queueing of the request, or the responses that come after.

Owned by the event-loop thread. Invariants: regions are in use from `begin` to the end, and as long
as a thread copies; after `cancel`, or the end, the sink is not called.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import numpy as np

from headrace.core.datatypes import NUMPY, Datatype
from headrace.core.errors import ExecutionFailed, PayloadTooLarge, ServerError
from headrace.core.requests import (
    InferResponse,
    SharedInput,
    SharedRequest,
    Sink,
    StageSink,
    Stretch,
    Ticket,
)
from headrace.core.tensors import Array, Tensor, elsewhere, raw_bytes
from headrace.engine.regions import Region, Regions
from headrace.wire.bytes_tensor import decode_bytes_tensor
from headrace.wire.compression import too_large
from headrace.wire.status import INTERNAL_TEXT

log = logging.getLogger(__name__)

AT_ONCE = 1 << 20  # bytes that are copied on the event loop, in less than a tenth of a millisecond

_Copy = Callable[[], None]


class Queue(Protocol):
    """Where requests wait that are on their way to a model."""

    def expect(self, count: int) -> None:
        """So many requests more, or less, are about to come."""


class SharedCall(StageSink):
    """The sink of such a request, and its ticket."""

    def __init__(self, request: SharedRequest, sink: Sink, regions: Regions) -> None:
        super().__init__(sink)
        self._request = request
        self._regions = regions
        self._used: list[Region] = []
        self._places: dict[str, tuple[Region, int, int]] = {}  # of outputs: offset, byte_size
        self._nbytes = 0  # that admission has counted
        self._ticket: Ticket | None = None
        self._held = False
        self._copying = False
        self._over = False
        self._waiting: deque[Callable[[], None]] = deque()  # what came while a thread copies

    def placeholders(self) -> dict[str, Tensor]:
        """The inputs that are in shared memory, as tensors without data."""
        return {
            name: Tensor(name, given.datatype, np.empty(given.shape, "V0"))
            for name, given in self._request.shared_inputs.items()
        }

    def begin(self, queue: Queue, submit: Callable[[], Ticket]) -> None:
        """Copy the inputs and `submit` the request, at once or later; raises `ServerError`."""
        try:
            copies = self._prepare()
            if self._at_once(self._nbytes):
                for copy in copies:
                    copy()
                self._submit(submit)
                return
        except BaseException:
            self._end()
            raise
        queue.expect(1)
        self._copy(copies, partial(self._fetched, queue, submit))

    # --- the sink

    def respond(self, response: InferResponse, final: bool) -> None:
        """Write outputs to their places, and hand the response on without them."""
        if self._copying:
            self._waiting.append(partial(self.respond, response, final))
            return
        if self._over:
            return
        try:
            copies, nbytes = self._written(response)
            if self._at_once(nbytes):
                for copy in copies:
                    copy()
                self._hand_on(response, final)
                return
        except ServerError as error:
            self._give_up(error, final)
            return
        self._copy(copies, partial(self._stored, response, final))

    def answered_by(self, backend: str) -> None:
        """Hand on which backend answers."""
        if not self._over:
            self._sink.answered_by(backend)

    def finish(self) -> None:
        """Hand the end on."""
        if self._copying:
            self._waiting.append(self.finish)
        elif not self._over:
            self._end().finish()

    def fail(self, error: ServerError) -> None:
        """Hand the error on that ends the request."""
        if self._copying:
            self._waiting.append(partial(self.fail, error))
        elif not self._over:
            self._end().fail(error)

    # --- the ticket

    def cancel(self) -> None:
        """`Ticket.cancel`."""
        if not self._over:
            self._end()
            if self._ticket is not None:
                self._ticket.cancel()

    def hold(self, held: bool) -> None:
        """`Ticket.hold`."""
        self._held = held
        if self._ticket is not None and not self._over:
            self._ticket.hold(held)

    # --- inputs

    def _prepare(self) -> list[_Copy]:
        """Have the regions, and make room for what is in them; raises `ServerError`."""
        request, regions = self._request, self._regions
        for name, place in request.shared_outputs.items():
            self._places[name] = (self._use(place), place.offset, place.byte_size)
        sources = [(self._use(given.place), n, given) for n, given in request.shared_inputs.items()]
        nbytes = sum(given.place.byte_size for given in request.shared_inputs.values())
        if request.nbytes + nbytes > regions.max_bytes:
            raise PayloadTooLarge(
                too_large(
                    "request and its shared memory", regions.max_bytes, request.nbytes + nbytes
                )
            )
        regions.admission.grow(nbytes)
        self._nbytes = nbytes
        return [partial(self._read, *source) for source in sources]

    def _use(self, place: Stretch) -> Region:
        region = self._regions.take(place)
        self._used.append(region)
        return region

    def _read(self, region: Region, name: str, given: SharedInput) -> None:
        """Copy an input; may be called on another thread."""
        place = given.place
        if given.datatype is Datatype.BYTES:
            raw = np.empty(place.byte_size, np.uint8)
            region.read(raw.data, place.offset)
            tensor = decode_bytes_tensor(name, given.shape, raw.data)
        else:
            array: Array = np.empty(given.shape, NUMPY[given.datatype])
            region.read(array.reshape(-1).view(np.uint8).data, place.offset)
            tensor = Tensor(name, given.datatype, array)
        self._request.inputs[name] = tensor

    def _fetched(
        self, queue: Queue, submit: Callable[[], Ticket], error: ServerError | None
    ) -> None:
        """The inputs are there, or not."""
        try:
            if self._over:
                return
            if error is None:
                self._submit(submit)
        except ServerError as refusal:
            error = refusal
        finally:
            queue.expect(-1)
        if error is not None:
            self._end().refuse(error)

    def _submit(self, submit: Callable[[], Ticket]) -> None:
        self._ticket = submit()
        if self._held:
            self._ticket.hold(True)

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

    def _stored(self, response: InferResponse, final: bool, error: ServerError | None) -> None:
        """The outputs are in their places, or not."""
        if self._over:
            return
        if error is not None:
            self._give_up(error, final)
            return
        self._hand_on(response, final)
        while self._waiting and not self._copying:
            self._waiting.popleft()()

    def _hand_on(self, response: InferResponse, final: bool) -> None:
        sink = self._end() if final else self._sink
        sink.respond(response, final)

    def _give_up(self, error: ServerError, final: bool) -> None:
        """End the request with an error, whatever more its model has for it."""
        sink = self._end()
        if not final and self._ticket is not None:
            self._ticket.cancel()
        sink.fail(error)

    # --- both

    def _at_once(self, nbytes: int) -> bool:
        return nbytes <= AT_ONCE and all(region.device_id is None for region in self._used)

    def _copy(self, copies: Sequence[_Copy], done: Callable[[ServerError | None], None]) -> None:
        """Copy on another thread, then call `done`, with the error if there was one."""
        self._copying = True
        loop = asyncio.get_running_loop()
        future = loop.run_in_executor(self._regions.threads, _run, copies)
        future.add_done_callback(partial(self._copied, done))

    def _copied(
        self, done: Callable[[ServerError | None], None], future: "asyncio.Future[None]"
    ) -> None:
        self._copying = False
        if self._over:
            self._release()
        error = future.exception()
        if error is not None and not isinstance(error, ServerError):
            log.error("bug while copying shared memory", exc_info=error)
            error = ExecutionFailed(INTERNAL_TEXT)
        done(error)

    def _end(self) -> Sink:
        """Do nothing more for the request, but what a thread copies now; its sink."""
        sink = self._sink
        del self._sink  # it mostly holds its ticket: no tensor is to wait for the cycle collector
        self._over = True
        self._waiting.clear()
        if not self._copying:
            self._release()
        return sink

    def _release(self) -> None:
        used, self._used = self._used, []
        for region in used:
            self._regions.release(region)
        nbytes, self._nbytes = self._nbytes, 0
        self._regions.admission.adjust(0, -nbytes)


def _run(copies: Sequence[_Copy]) -> None:
    for copy in copies:
        copy()
