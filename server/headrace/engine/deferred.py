"""Requests that are decoded apart from the event loop, and then submitted as others are."""

import logging
from collections.abc import Callable
from typing import Generic, TypeVar, cast

from headrace.core.call import Call
from headrace.core.errors import ExecutionFailed, ServerError
from headrace.engine.workbench import Workbench
from headrace.wire.elements import Charge
from headrace.wire.status import INTERNAL_TEXT

log = logging.getLogger(__name__)

T = TypeVar("T")


class Deferred(Generic[T]):
    """What decodes a call on the workbench, and is its owner until then."""

    def __init__(
        self,
        bench: Workbench,
        nbytes: int,
        decode: Callable[[Charge], T],
        submit: Callable[[T], None],
        call: Call,
        charge: Charge,
        after: Callable[[], None] | None = None,
    ) -> None:
        """`submit` gets what `decode` gives; `call` is refused with what either raises.

        Then `after` is called.
        """
        self._submit = submit
        self._call: Call | None = call
        self._after = after
        call.owner = self
        self._job = bench.do(nbytes, decode, self._decoded, charge)

    def cancel(self, call: Call) -> None:
        """`Owner.cancel`."""
        self._call = None
        self._job.cancel()

    def hold(self, call: Call, held: bool) -> None:
        """`Owner.hold`."""
        call.held = held

    def _decoded(self, result: T | None, problem: Exception | None) -> None:
        call, self._call = self._call, None
        if call is None:
            return
        try:
            if problem is not None:
                raise problem
            self._submit(cast(T, result))
        except ServerError as error:
            call.pass_refusal(error)
        except Exception as error:
            log.error("bug in a request that was decoded apart", exc_info=error)
            call.pass_refusal(ExecutionFailed(INTERNAL_TEXT))
        finally:
            del problem
            if self._after is not None:
                self._after()
