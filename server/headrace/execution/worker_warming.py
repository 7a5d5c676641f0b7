"""Running a configuration's samples through a worker process that has been started.

They go to it as any batch does, and it does not know the difference. What it tells of itself
meanwhile, such as the forms of its results, holds for as long as it runs: the process keeps it for
whoever talks to it next.
"""

import asyncio
import logging
from collections.abc import Sequence
from time import monotonic_ns

from headrace.core.errors import LoadFailed, WorkerDied
from headrace.core.signature import Signature
from headrace.execution.conversation import Conversation, Slot
from headrace.execution.host import Host, NoHost
from headrace.execution.warming import Sample, Warming
from headrace.execution.worker import WorkerProcess
from headrace.scheduling.batch import Batch, Outcome
from headrace.workers.elements import Buffer
from headrace.workers.frames import Header, Kind

_NOT_NOW = "there is no server to ask while the model is warmed up"


def warm_up_worker(
    process: WorkerProcess,
    signature: Signature,
    version: str,
    samples: Sequence[Sample],
    concurrent: bool,
    host: Host | None = None,
) -> None:
    """Run all samples, on a loading thread; `concurrent` as of `Conversation`.

    `host` is whom the model may ask, from the event loop of that thread; None for nobody.

    Raises `LoadFailed` naming the one that fails; the process has ended then.
    """

    async def work() -> None:
        warming = Warming(signature, version)
        talk = _Talk(process, signature, concurrent, warming, host or NoHost(_NOT_NOW))
        try:
            async with asyncio.timeout(process.patience):
                await warming.work(Slot(talk, 0), samples)
        except TimeoutError:
            raise LoadFailed("the worker did not end its warm-up in time") from None
        finally:
            process.detach()

    if not samples:
        return
    try:
        asyncio.run(work())
    except BaseException:
        process.kill()
        raise
    if process.ended:
        raise LoadFailed("the worker ended while it was warmed up")


class _Talk:
    """The one who talks to a worker meanwhile; see `headrace.execution.conversation.Owner`."""

    def __init__(
        self,
        process: WorkerProcess,
        signature: Signature,
        concurrent: bool,
        warming: Warming,
        host: Host,
    ) -> None:
        self._process = process
        self._signature = signature
        self._loop = asyncio.get_running_loop()
        self._conversation = Conversation(
            process, signature, concurrent, warming.batcher.answer, self._report, host
        )
        process.attach(self._loop, self._take, self._conversation.end)

    @property
    def under_way(self) -> int:
        return len(self._conversation.under_way)

    def send(self, slot: Slot) -> None:
        """Send the batch of a slot."""
        error: Exception | None = None
        if self._process.ended:
            error = WorkerDied(f"the worker process of model '{self._signature.model}' has ended")
        else:
            try:
                self._conversation.send(slot)
            except Exception as raised:  # no memory for its file, say
                error = raised
        if error is not None:
            now = monotonic_ns()
            self._loop.call_soon(slot.end, Outcome((), error, slot.sent, now, now))

    def close(self) -> None:
        """It belongs to whoever has started it."""

    def _take(self, header: Header, meta: bytes, data: Buffer) -> None:
        if header.kind is Kind.METRIC:
            self._process.keep(header, meta)
            return
        if header.kind is Kind.FORM:
            self._process.keep(header, meta)
        ended = self._conversation.take(header, meta, data)
        if ended is not None:
            slot, outcome = ended
            slot.end(outcome)

    def _report(self, batch: Batch, text: str, lines: str) -> None:
        self._process.note(logging.ERROR, text, lines)
