"""One request of a stream."""

from collections import deque
from typing import TYPE_CHECKING

from headrace.core.call import Call, InferResponse
from headrace.core.errors import ServerError
from headrace.engine.doors import Target
from headrace.transports.grpc.call import Message
from headrace.wire.grpc_messages import stream_message, stream_response
from headrace.wire.timing import add_timing

if TYPE_CHECKING:
    from headrace.transports.grpc.stream import StreamInfer

FINAL_PARAMETER = "triton_final_response"


class Slot(Call):
    """One request of a stream, and what came for it and is not written yet.

    `empty_final` are the model and version as the request has them, if it asked to be told of an
    end without a response.
    """

    __slots__ = (
        "answered", "empty_final", "error", "executing", "found", "messages", "ordered", "paused",
        "ready", "stream", "timed", "waiting",
    )  # fmt: skip

    door = "GRPC"

    def __init__(self, stream: "StreamInfer") -> None:
        super().__init__("", "", "", {})
        self.stream = stream
        self.found: Target | None = None
        self.timed = False
        self.empty_final: tuple[str, str] | None = None
        self.ordered = True
        self.answered = False  # nothing more comes than what waits
        self.executing = False  # counted in by admission, and submitted
        self.ready = False  # has its turn to write
        self.paused = False  # its model was asked to pause
        self.waiting = 0  # bytes of messages
        self.messages: deque[Message] = deque()
        self.error: ServerError | None = None

    def charge(self, nbytes: int) -> None:
        """Count what the message becomes; raises `Overloaded`."""
        self.stream.count_more(self, nbytes)
        self.nbytes += nbytes

    def respond(self, response: InferResponse, final: bool) -> None:
        """Take a response."""
        if self.timed:
            add_timing(response)
        response.parameters[FINAL_PARAMETER] = final
        self._add(stream_response(self.stream.writer.pieces(response)), final)

    def finish(self) -> None:
        """Take the end, with which no response comes."""
        if self.empty_final is not None:
            parameters = {FINAL_PARAMETER: True}
            message = stream_message("", self.id, *self.empty_final, parameters)
            self._add([message], True)
        elif not self.answered:
            self.stream.end(self)
            self.stream.came(self, None)

    def fail(self, error: ServerError) -> None:
        """Take the error that ends the request."""
        found = self.found if self.executing else None
        names = ("", "") if found is None else (found.model, found.name)
        parameters = {} if found is None else {FINAL_PARAMETER: True}
        if not self.answered:
            self.error = error
        self._add([stream_message(str(error), self.id, *names, parameters)], True)

    def refuse(self, error: ServerError) -> None:
        """Take the error that the request was refused with."""
        self.stream.count_out(self)
        self.fail(error)

    def header(self, name: str) -> str:
        """What the client sent under a name in lower case, "" for nothing."""
        return self.stream.metadata().get(name, "")

    def remaining(self) -> float:
        """`RpcContext.remaining`."""
        return self.stream.remaining()

    def routed(self, target: Target) -> None:
        """Take what serves the request, now that it is decided."""
        self.found = target

    def _add(self, message: Message, final: bool) -> None:
        if self.answered:
            return  # an error here has ended it before its model did
        if final:
            self.stream.end(self)
        self.stream.came(self, message)
