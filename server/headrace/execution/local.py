"""Instances in this process: on the event-loop thread, or on a thread of their own.

The scheduler's thread is the event-loop thread; an instance on a thread of its own takes batches
from a queue and reports back through the loop, in one wake-up a batch. ONNX Runtime releases the
GIL while it computes.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from queue import SimpleQueue
from threading import Thread
from typing import Literal

from headrace.core.tensors import Array
from headrace.execution.choice import AutoChoice, InstanceKind
from headrace.execution.model_kinds import in_server
from headrace.execution.runner import LoadedModel, run
from headrace.scheduling.batch import Batch, Instance, Outcome, Room

log = logging.getLogger(__name__)

_REST_SECS = 10.0  # without a batch, after which memory that is kept for further ones is given back
Done = Callable[[Instance, Batch, Outcome], None]
# BYTES elements of a batch, and bytes of them, up to which they become objects on the event loop:
# that takes about half a microsecond each, and the hop to a thread a hundred times that.
_MOST_ELEMENTS, _MOST_BYTES = 1000, 1 << 20


class LocalInstance:
    """Runs batches of one loaded model, inline or on its own thread.

    Batches with many BYTES elements run on the thread in any case.

    The scheduler gives it one batch at a time, so the model is never run by two threads at once,
    also not when `auto` moves it from one kind to the other.
    """

    load = 0

    def __init__(
        self,
        name: str,
        model: LoadedModel,
        kind: InstanceKind | AutoChoice,
        loop: asyncio.AbstractEventLoop,
        place: Callable[[int], Array | None] | None = None,
        rest_secs: float = _REST_SECS,
    ) -> None:
        """`place` gives memory that large batches are best put together in, or None.

        `rest_secs` without a batch, memory that is kept for further ones is given back.
        """
        self.name = name
        self._model = model
        self._auto = kind if isinstance(kind, AutoChoice) else None
        self._kind = kind.kind if isinstance(kind, AutoChoice) else kind
        self._loop = loop
        self._room = Room(place)
        if in_server(model):
            self._run_batch: Callable[[Batch], Outcome] = model.run
        else:
            self._run_batch = partial(run, model, room=self._room)
        self._work: SimpleQueue[tuple[Batch, Done] | Literal["rest"] | None] = SimpleQueue()
        self._rest_secs = rest_secs
        self._ran = False  # since the last look whether it runs at all
        self._looking: asyncio.TimerHandle | None = None
        self._thread: Thread | None = None
        self._closed = asyncio.Event()

    @property
    def kind(self) -> InstanceKind:
        """Where the next batch will run."""
        return self._kind

    def execute(self, batch: Batch, done: Done) -> None:
        """Run `batch`; see `headrace.scheduling.batch.Instance`."""
        self._ran = True
        if self._looking is None:
            self._looking = self._loop.call_later(self._rest_secs, self._look)
        texts = batch.signature.texts
        if self._kind is InstanceKind.INLINE and not (texts and _is_heavy(texts, batch)):
            self._report(batch, done, self._run_batch(batch))
            return
        if self._thread is None:
            # A daemon: a model that hangs must not keep the process from exiting.
            self._thread = Thread(target=self._serve, name=self.name, daemon=True)
            self._thread.start()
        self._work.put((batch, done))

    def close(self) -> None:
        """Release the model; on its thread, if it has one, so that nothing waits here."""
        if self._looking is not None:
            self._looking.cancel()
        if self._thread is None:
            self._model.close()
            self._closed.set()
        else:
            self._work.put(None)

    @property
    def released(self) -> bool:
        """Whether the model has been released."""
        return self._closed.is_set()

    async def closed(self) -> None:
        """Wait until the model has been released."""
        await self._closed.wait()

    def _look(self) -> None:
        self._looking = None
        if self._ran:
            self._ran = False
            self._looking = self._loop.call_later(self._rest_secs, self._look)
        elif self._thread is not None:
            self._work.put("rest")
        else:
            self._rest()

    def _rest(self) -> None:
        self._room.clear()
        try:
            self._model.rest()
        except Exception:
            log.exception("bug while %s gave memory back", self.name)

    def _serve(self) -> None:
        while (item := self._work.get()) is not None:
            if item == "rest":
                self._rest()
                continue
            try:
                self._run(*item)
            except RuntimeError:
                return  # the loop is closed: the process is ending and nobody waits
            del item  # its tensors must not stay in memory until the next batch comes
        self._model.close()
        with suppress(RuntimeError):  # as above
            self._loop.call_soon_threadsafe(self._closed.set)

    def _run(self, batch: Batch, done: Done) -> None:
        outcome = self._run_batch(batch)
        self._loop.call_soon_threadsafe(self._report, batch, done, outcome)

    def _report(self, batch: Batch, done: Done, outcome: Outcome) -> None:
        if self._auto is not None:
            self._observe(self._auto, outcome)
        done(self, batch, outcome)

    def _observe(self, auto: AutoChoice, outcome: Outcome) -> None:
        # A run that failed may have ended early: it must not bring a heavy model back inline.
        if outcome.error is not None and self._kind is InstanceKind.THREAD:
            return
        if auto.observe(outcome.computed - outcome.started):
            self._kind = auto.kind
            log.info("instance %s now runs %s by its measured cost", self.name, self._kind)


def _is_heavy(texts: Sequence[str], batch: Batch) -> bool:
    """Whether the BYTES inputs of these names are too much for the event loop."""
    elements = nbytes = 0
    for pending in batch.pendings:
        inputs = pending.request.inputs
        for name in texts:
            if name in inputs:
                array = inputs[name].array
                elements += array.size
                nbytes += array.nbytes
    return elements > _MOST_ELEMENTS or nbytes > _MOST_BYTES
