"""ModelInfer of `GRPCInferenceService`, from message bytes to message bytes."""

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

BACKEND_METADATA = "headrace-backend"  # which one has answered, of a model that has several


class MessageCall(Call):
    """A call that is asked by a ModelInferRequest, alone or on a stream."""

    door = "GRPC"
    timed = False  # answered with timings among the parameters

    def charge(self, nbytes: int) -> None:
        """Count what the message becomes; raises `Overloaded`."""
        raise NotImplementedError

    def decoded(self, message: InferMessage) -> None:
        """Look at the message once the call is filled with what it asks."""

    def submit(
        self,
        engine: Entrance,
        message: InferMessage,
        target: Target,
        told: Mapping[str, str],
        after: Callable[[], None] | None = None,
    ) -> None:
        """Decode the message, on a thread if that takes long, and submit the call.

        `told` are parameters made of metadata. `after` is called once a thread is done.
        """

        def submit(asked: Call) -> None:
            self.take(asked)
            self.decoded(message)
            if self.parameters:
                self.timed = wants_timing(self)
            self.parameters.update(told)
            found = target
            if message.long:  # the model may have been replaced meanwhile
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
    """One ModelInfer, which its transport derives from: the context, and the reply, too."""

    refusal = GRPC_NOT_DECOUPLED

    account: ConnectionAccount
    noted: Noted | None  # for the call's line of the access log
    service: "InferenceService"
    entered = False  # whether the account has counted it as a request, with `nbytes`
    named = True  # the version that serves it is known before the answer

    # --- for the transport

    def metadata(self) -> Mapping[str, str]:
        raise NotImplementedError

    def set_trailing(self, name: str, value: str) -> None:
        raise NotImplementedError

    def answer(self, message: Message, timing: bytes) -> None:
        """Answer with a message and a good status, and with `timing` as `server-timing`."""
        raise NotImplementedError

    # --- for whoever serves it

    def charge(self, nbytes: int) -> None:
        """Count what the message becomes; raises `Overloaded`."""
        self.account.grow(nbytes, self.nbytes)
        self.nbytes += nbytes

    def leave(self) -> None:
        """Count the request out, if it was counted in."""
        if self.entered:
            self.entered = False
            self.account.leave(self.nbytes)

    def respond(self, response: InferResponse, final: bool) -> None:
        """Encode and send."""
        self.leave()
        if self.timed:
            add_timing(response)
        if not self.named:
            self.noted = response.model_name, response.model_version, response.id
        self.answer(self.service.writer.pieces(response), exact_timing(response.timing))

    def header(self, name: str) -> str:
        """The value of metadata by their name in lower case, "" for none."""
        return self.metadata().get(name, "")

    def routed(self, target: Target) -> None:
        """Take what serves the request, now that it is decided."""
        self.noted = target.model, target.name, self.id

    def answered_by(self, backend: str) -> None:
        """Send along which backend answers."""
        self.set_trailing(BACKEND_METADATA, backend)

    def cancel(self) -> None:
        """Drop the call: nobody waits any more."""
        super().cancel()
        self.leave()


class InferenceService:
    """ModelInfer; the stream is in `headrace.doors.grpc.stream`."""

    def __init__(
        self, engine: Entrance, max_request_bytes: int, pattern: HeaderPattern | None = None
    ) -> None:
        """`pattern` picks what of the metadata models are told."""
        self.writer = InferWriter()
        self.reader = InferReader()
        self.engine = engine
        self.pattern = pattern
        self._limit = max_request_bytes

    def __call__(self, data: Buffer, call: InferCall) -> None:
        """ModelInfer; raises `ServerError`, after which the call is to `leave`."""
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
        # In a front end, or by rules, the answer says which version it was.
        call.named = bool(found.name)
        call.submit(self.engine, asked, found, told)
        alike, direct = asked.alike, found.direct
        if alike and direct:
            direct.remember(alike, call.rows)
