"""Requests that are decoded apart from the event loop, and then submitted as others are."""

import logging
from collections.abc import Callable
from typing import Generic, TypeVar, cast

from headrace.core.errors import ExecutionFailed, ServerError
from headrace.core.requests import Sink, Ticket
from headrace.engine.workbench import Workbench
from headrace.wire.elements import Charge
from headrace.wire.status import INTERNAL_TEXT

log = logging.getLogger(__name__)

T = TypeVar("T")


class Deferred(Generic[T]):
    """A request that is being decoded on the workbench, and afterwards its ticket."""

    def __init__(
        self,
        bench: Workbench,
        nbytes: int,
        decode: Callable[[Charge], T],
        submit: Callable[[T], Ticket],
        sink: Sink,
        charge: Charge,
        after: Callable[[], None] | None = None,
    ) -> None:
        """`submit` gets what `decode` gives; `sink` what either raises. Then `after` is called."""
        self._submit = submit
        self._sink: Sink | None = sink
        self._after = after
        self._held = False
        self._ticket: Ticket = bench.do(nbytes, decode, self._decoded, charge)

    def cancel(self) -> None:
        """`Ticket.cancel`."""
        self._sink = None
        self._ticket.cancel()

    def hold(self, held: bool) -> None:
        """`Ticket.hold`."""
        self._held = held
        self._ticket.hold(held)

    def _decoded(self, result: T | None, problem: Exception | None) -> None:
        sink, self._sink = self._sink, None
        if sink is None:
            return
        try:
            if problem is not None:
                raise problem
            self._ticket = self._submit(cast(T, result))
            if self._held:
                self._ticket.hold(True)
        except ServerError as error:
            sink.refuse(error)
        except Exception as error:
            log.error("bug in a request that was decoded apart", exc_info=error)
            sink.refuse(ExecutionFailed(INTERNAL_TEXT))
        finally:
            del problem
            if self._after is not None:
                self._after()
