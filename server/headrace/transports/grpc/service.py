"""ModelInfer of `GRPCInferenceService`, from message bytes to message bytes."""

from collections.abc import Mapping
from types import MappingProxyType

from headrace.api.header_rules import HeaderPattern
from headrace.core.call import Call, InferResponse
from headrace.core.errors import ServerError, Unsupported
from headrace.core.signature import Signature
from headrace.core.tensors import Buffer
from headrace.engine.doors import GRPC_NOT_DECOUPLED, Entrance, Target
from headrace.engine.workbench import Deferred
from headrace.transports.grpc.call import Reply
from headrace.wire.compression import check_size
from headrace.wire.timing import add_timing, exact_timing, wants_timing
from headrace.wire.v2_protobuf import InferMessage, InferReader, InferWriter

_NOTHING: Mapping[str, str] = MappingProxyType({})
BACKEND_METADATA = "headrace-backend"  # which one has answered, of a model that has several


class _InferCall(Call):
    """One ModelInfer; its transport holds it to cancel it."""

    __slots__ = ("account", "named", "reply", "service", "timed", "told")

    door = "GRPC"
    refusal = GRPC_NOT_DECOUPLED

    def __init__(self, service: "InferenceService", reply: Reply, nbytes: int) -> None:
        super().__init__("", "", "", {}, nbytes=nbytes)
        self.service = service
        self.reply = reply
        self.account = reply.account
        self.timed = False
        self.named = True
        self.told = _NOTHING  # parameters made of its metadata

    def charge(self, nbytes: int) -> None:
        """Count what the message becomes; raises `Overloaded`."""
        self.account.grow(nbytes, self.nbytes)
        self.nbytes += nbytes

    def respond(self, response: InferResponse, final: bool) -> None:
        """Encode and send."""
        service, reply = self.service, self.reply
        self.account.leave(self.nbytes)
        if self.timed:
            add_timing(response)
        if not self.named:
            reply.noted = response.model_name, response.model_version, response.id
        reply.answer(service.writer.pieces(response), exact_timing(response.timing))

    def fail(self, error: ServerError) -> None:
        """Send the error."""
        self.account.leave(self.nbytes)
        self.reply.fail(error)

    def header(self, name: str) -> str:
        """What the client sent under a name in lower case, "" for nothing."""
        return self.reply.metadata().get(name, "")

    def remaining(self) -> float:
        """`RpcContext.remaining`."""
        return self.reply.remaining()

    def routed(self, target: Target) -> None:
        """Take what serves the request, now that it is decided."""
        self.reply.noted = target.model, target.name, self.id

    def answered_by(self, backend: str) -> None:
        """Send along which backend answers."""
        self.reply.set_trailing(BACKEND_METADATA, backend)

    def cancel(self) -> None:
        """Nobody waits any more."""
        super().cancel()
        self.account.leave(self.nbytes)


class InferenceService:
    """ModelInfer; the stream is in `headrace.transports.grpc.stream`."""

    def __init__(
        self, engine: Entrance, max_request_bytes: int, pattern: HeaderPattern | None = None
    ) -> None:
        """`pattern` picks what of the metadata models are told."""
        self.writer = InferWriter()
        self.reader = InferReader()
        self.engine = engine
        self.pattern = pattern
        self._limit = max_request_bytes

    def __call__(self, data: Buffer, reply: Reply) -> Call | None:
        """ModelInfer; raises `ServerError`."""
        nbytes = len(data)
        if nbytes > self._limit:
            check_size(data, self._limit)  # which refuses it
        account = reply.account
        account.enter(nbytes)
        try:
            asked = self.reader.read(data)
            found = self.engine.find(asked.model_name, asked.model_version)
            if found.decoupled:
                raise Unsupported(GRPC_NOT_DECOUPLED)
            reply.noted = found.model, found.name, asked.id
            call = _InferCall(self, reply, nbytes)
            if self.pattern is not None:
                call.told = self.pattern.parameters(reply.metadata().items())
            if not found.name:  # in a front end, or by rules, the answer says which version it was
                call.named = False
            if asked.long:
                self._defer(asked, found.signature, call)
                return call
            call.take(asked.request(nbytes))
            if call.parameters:
                call.timed = wants_timing(call)
            call.parameters.update(call.told)
            found.submit(call)
            alike, direct = asked.alike, found.direct
            if alike and direct:
                direct.remember(alike, call.rows)
        except BaseException:
            account.leave(nbytes)
            raise
        return call

    def _defer(self, message: InferMessage, signature: Signature | None, call: _InferCall) -> None:
        """Decode on a thread, then queue the request."""

        def submit(asked: Call) -> None:
            call.take(asked)
            call.timed = wants_timing(call)
            call.parameters.update(call.told)
            # The model may have been replaced meanwhile.
            self.engine.find(message.model_name, message.model_version).submit(call)

        nbytes = call.nbytes
        Deferred(
            self.engine.admission.workbench, nbytes,
            lambda charge: message.request_long(nbytes, signature, charge), submit, call,
            call.charge,
        )  # fmt: skip
