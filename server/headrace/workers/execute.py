"""Executor of a model: runs its batches one after the other.

The return value of `execute` answers the whole batch. A request answered by a sender is finished by
its last response, however much later: the batch considers it as handled.
"""

import inspect
import json
import logging
from collections.abc import Sequence
from threading import get_ident
from time import monotonic_ns
from typing import Any

from headrace.ipc.elements import Buffer
from headrace.ipc.frames import EXECUTE, FrameKind, Header, frame
from headrace.workers.batches import Batches, Sent, Times
from headrace.workers.channel import WorkerChannel
from headrace.workers.model_class import its_traceback, one_line, wrong_responses
from headrace.workers.session import Session
from headrace.workers.triton_requests import (
    InferenceRequest,
    InferenceResponse,
    TritonError,
    is_given_back,
)

log = logging.getLogger("model")

READY_SECS = 5.0  # for a coroutine to report readiness
_TEXT, _TRACEBACK = 4096, 65_536  # characters of an error's text and traceback
LATER, AGAIN = "later", "again"  # the fate of a request without a response


class Executor:
    """Runs the batches of one model; see `coroutines` for coroutine models."""

    is_async = False

    def __init__(
        self,
        link: WorkerChannel,
        model: Any,
        name: str,
        decoupled: bool,
        batches: Batches,
        session: Session,
        stateful: bool = False,
    ) -> None:
        """`name` is the instance's, which errors name, as in Triton.

        No request of a `stateful` model is run twice unless the model says so.
        """
        self._link = link
        self._model = model
        self._name = name
        self._decoupled = decoupled
        self._batches = batches
        self._stateful = stateful
        self.session = session

    def serve(self) -> None:
        """Run batches until the server sends STOP, or has closed the socket."""
        self.session.open = True
        self._serve()
        self.session.open = False

    def _serve(self) -> None:
        thread = get_ident()
        while (received := self.session.next()) is not None:
            header, meta, data = received
            if header.kind is EXECUTE:
                self._run(thread, header, meta, data)
            else:
                self._tell_ready(self._ready())
            del received, data

    # --- batches

    def _run(self, thread: int, header: Header[FrameKind], meta: bytes, data: Buffer) -> None:
        """Run a batch on this `thread`, and send its result."""
        slot, session = header.number, self.session
        try:
            if header.flags:  # the data may be in a file
                data = self._link.data_of(header, data)
            layout, requests = self._batches.requests(header, meta, data, session)
            del data
            began = monotonic_ns()
            session.runner = thread
            try:
                returned = self._model.execute(requests)
            except Exception as error:
                sent = self._raised(slot, requests, error, began)
            else:
                times = began, monotonic_ns()
                sent = self._batches.result(
                    slot, layout, requests, returned, times
                ) or self._returned(slot, requests, returned, times)
                del returned
            finally:
                session.runner, session.inside = 0, False
            if session.cancelled or session.held:
                session.forget_answered(requests)
            del requests
        except Exception as error:  # for example, the model's result cannot be encoded
            sent = self._broken(slot, *error_texts(error))
        # Now only the model itself may still refer to the slot's file.
        kind, told, parcel = sent
        self._link.send_parcel(kind, slot, told, parcel)

    def _returned(
        self,
        slot: int,
        requests: Sequence[InferenceRequest],
        returned: Any,
        times: Times,
    ) -> Sent:
        """The frame for responses of `execute` that are no `result` of the whole batch."""
        if wrong := self._wrong(requests, returned):
            if self._decoupled:
                return self._failed(slot, requests, _failure(self._name, wrong), times[0])
            return self._broken(slot, wrong, "")
        if returned is None:  # response senders answer all of them
            returned = [None] * len(requests)
        told = [
            _fate(request) if response is None else response
            for request, response in zip(requests, returned, strict=True)
        ]
        if None not in returned:
            for request in requests:
                if request._answering is not None:
                    request._answering.closed = True
        wanted = [request.requested_output_names() for request in requests]
        return self._batches.responses(slot, told, wanted, times)

    def _wrong(self, requests: Sequence[InferenceRequest], returned: Any) -> str:
        """The problem with the responses returned by `execute`; "" for none."""
        if self._decoupled:
            if returned is None:
                return ""
            return (
                f"Python model '{self._name}' is using the decoupled mode and the execute function"
                " must return None."
            )
        return "" if returned is None else wrong_responses(requests, returned, deferred=True)

    # --- errors

    def _raised(
        self, slot: int, requests: Sequence[InferenceRequest], error: BaseException, began: int
    ) -> Sent:
        text, lines = error_texts(error)
        if self._decoupled or any(request._answering is not None for request in requests):
            log.error("%s", lines)
            return self._failed(slot, requests, _failure(self._name, text), began)
        return self._broken(slot, text, lines)

    def _failed(
        self, slot: int, requests: Sequence[InferenceRequest], text: str, began: int
    ) -> Sent:
        """Fail requests that have had a response already; others may be run again, alone."""
        several = len(requests) > 1 and not self._stateful
        told: list[InferenceResponse | str] = []
        for request in requests:
            answering = request._answering
            if answering is not None and answering.closed:
                told.append(LATER)  # its end was already sent
                continue
            if answering is not None:
                answering.closed = True
            if several and (answering is None or not answering.sent):
                told.append(AGAIN)
            else:
                told.append(InferenceResponse(error=TritonError(text)))
        wanted: list[Sequence[str]] = [()] * len(told)
        return self._batches.responses(slot, told, wanted, (began, monotonic_ns()))

    def _broken(self, slot: int, text: str, lines: str) -> Sent:
        told = {"name": self._name, "text": text[:_TEXT], "traceback": lines[-_TRACEBACK:]}
        meta = json.dumps(told).encode()
        return FrameKind.BROKEN, meta, self._link.put(slot, [], 0)

    # --- readiness

    def _ready(self) -> object:
        try:
            found = self._model.is_ready()
            if not inspect.isawaitable(found):
                return found
            import asyncio  # a large thing to import for models without coroutines

            return asyncio.run(asyncio.wait_for(found, READY_SECS))
        except Exception:
            log.exception("is_ready")
            return False

    def _tell_ready(self, found: object) -> None:
        if not isinstance(found, bool):
            log.error("is_ready must return a bool, got %s", type(found).__name__)
        self._link.send(frame(FrameKind.ANSWER, json.dumps({"ready": found is True}).encode()))


def _fate(request: InferenceRequest) -> str:
    """The fate of a request for which `execute` has returned nothing."""
    if is_given_back(request):
        if request._answering is not None:
            request._answering.closed = True
        return AGAIN
    request.get_response_sender()  # a sender that the model drops answers with an error
    return LATER


def _failure(name: str, text: str) -> str:
    return f"Failed to process the request(s) for model '{name}', message: {text}"[:_TEXT]


def error_texts(error: BaseException) -> tuple[str, str]:
    """An error as one line, and with its traceback."""
    return one_line(error), its_traceback(error)
