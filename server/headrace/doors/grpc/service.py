"""ModelInfer, from message bytes to message bytes."""

from collections.abc import Callable, Mapping

from headrace.api.header_rules import HeaderPattern
from headrace.core.call import Call, InferResponse
from headrace.core.errors import Unsupported
from headrace.core.tensors import Buffer
from headrace.doors.grpc.call import Message, Noted
from headrace.engine.admission import ConnectionAccount
from headrace.engine.doors import GRPC_NOT_DECOUPLED, Entrance, Target
from headrace.engine.workbench import Deferred
from headrace.protocol.compression import check_size
from headrace.protocol.parameters import add_timing, exact_timing, wants_timing
from headrace.protocol.v2_protobuf import InferMessage, InferReader, InferWriter

BACKEND_METADATA = "headrace-backend"  # the backend that has answered, for a model with several


class MessageCall(Call):
    """A call made from a ModelInferRequest, unary or on a stream."""

    door = "GRPC"
    timed = False  # true if timings are requested among the parameters

    def charge(self, nbytes: int) -> None:
        """Charge the decoded message; raises `Overloaded`."""
        raise NotImplementedError

    def decoded(self, message: InferMessage) -> None:
        """Called once the call has been filled from the message."""

    def submit(
        self,
        engine: Entrance,
        message: InferMessage,
        target: Target,
        told: Mapping[str, str],
        after: Callable[[], None] | None = None,
    ) -> None:
        """Decode the message, on a thread if that takes long, and submit the call.

        `told` are parameters made from metadata. `after` is called once a thread has finished.
        """

        def submit(asked: Call) -> None:
            self.take(asked)
            self.decoded(message)
            if self.parameters:
                self.timed = wants_timing(self)
            self.parameters.update(told)
            found = target
            if message.long:  # find the model again: it may have been replaced
                found = engine.find(message.model_name, message.model_version)
                self.routed(found)
            found.submit(self)

        nbytes, signature = self.nbytes, target.signature
        if message.long:
            Deferred(
                engine.admission.workbench, nbytes,
                lambda charge: message.request_long(nbytes, signature, charge), submit, self,
                self.charge, after,
            )  # fmt: skip
        else:
            submit(message.request(nbytes))


class InferCall(MessageCall):
    """One ModelInfer call; each transport derives its context and reply from it."""

    refusal = GRPC_NOT_DECOUPLED

    account: ConnectionAccount
    noted: Noted | None  # for the access log
    service: "InferenceService"
    entered = False  # true once it is charged to the account, with `nbytes`
    named = True  # the serving version is known before the answer

    # --- for the transport

    def metadata(self) -> Mapping[str, str]:
        raise NotImplementedError

    def set_trailing(self, name: str, value: str) -> None:
        raise NotImplementedError

    def answer(self, message: Message, timing: bytes) -> None:
        """Answer with a message, status OK, and `timing` as `server-timing`."""
        raise NotImplementedError

    # --- for the service

    def charge(self, nbytes: int) -> None:
        """Charge the decoded message; raises `Overloaded`."""
        self.account.grow(nbytes, self.nbytes)
        self.nbytes += nbytes

    def leave(self) -> None:
        """Release the request's charge, if any."""
        if self.entered:
            self.entered = False
            self.account.leave(self.nbytes)

    def respond(self, response: InferResponse, final: bool) -> None:
        """Encode and send a response."""
        self.leave()
        if self.timed:
            add_timing(response)
        if not self.named:
            self.noted = response.model_name, response.model_version, response.id
        self.answer(self.service.writer.pieces(response), exact_timing(response.timing))

    def header(self, name: str) -> str:
        """A metadata value by lower-case name; "" if there is none."""
        return self.metadata().get(name, "")

    def routed(self, target: Target) -> None:
        """Note the target that serves the request."""
        self.noted = target.model, target.name, self.id

    def answered_by(self, backend: str) -> None:
        """Report the backend in the metadata."""
        self.set_trailing(BACKEND_METADATA, backend)

    def cancel(self) -> None:
        """Cancel the call: the client no longer waits."""
        super().cancel()
        self.leave()


class InferenceService:
    """ModelInfer; the streaming form is in `headrace.doors.grpc.stream`."""

    def __init__(
        self, engine: Entrance, max_request_bytes: int, pattern: HeaderPattern | None = None
    ) -> None:
        """`pattern` selects metadata that is forwarded to models."""
        self.writer = InferWriter()
        self.reader = InferReader()
        self.engine = engine
        self.pattern = pattern
        self._limit = max_request_bytes

    def __call__(self, data: Buffer, call: InferCall) -> None:
        """Answer ModelInfer; raises `ServerError`, after which the caller must `leave` the call."""
        nbytes = check_size(data, self._limit)
        call.begin()
        call.account.enter(nbytes)
        call.entered, call.nbytes, call.service = True, nbytes, self
        asked = self.reader.read(data)
        found = self.engine.find(asked.model_name, asked.model_version)
        if found.decoupled:
            raise Unsupported(GRPC_NOT_DECOUPLED)
        call.noted = found.model, found.name, asked.id
        told: Mapping[str, str] = {}
        if self.pattern is not None:
            told = self.pattern.parameters(call.metadata().items())
        # In a front end, or with traffic rules, the answer names the version.
        call.named = bool(found.name)
        call.submit(self.engine, asked, found, told)
        alike, direct = asked.alike, found.direct
        if alike and direct:
            direct.remember(alike, call.rows)
