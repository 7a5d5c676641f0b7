"""ModelInfer of `GRPCInferenceService`, from message bytes to message bytes."""

from headrace.core.errors import ExecutionFailed, ServerError, Unsupported
from headrace.core.requests import Call, InferResponse, Sink, Ticket
from headrace.core.signature import Signature
from headrace.core.tensors import Buffer
from headrace.engine.deferred import Deferred
from headrace.engine.doors import GRPC_NOT_DECOUPLED, Entrance, Target
from headrace.engine.forwarding import forwarding
from headrace.transports.grpc.call import Direct, Reply
from headrace.transports.grpc.procedures import INFERENCE
from headrace.transports.grpc.unary import check_size
from headrace.wire.grpc_messages import InferMessage, InferReader, InferWriter
from headrace.wire.header_rules import HeaderPattern
from headrace.wire.timing import add_timing, exact_timing, wants_timing

BACKEND_METADATA = "headrace-backend"  # which one has answered, of a model that has several


class _Answer(Sink):
    """The sink of one ModelInfer, and the ticket that its transport holds."""

    __slots__ = ("account", "named", "nbytes", "reply", "service", "ticket", "timed")

    door = "GRPC"
    refusal = GRPC_NOT_DECOUPLED

    def __init__(self, service: "InferenceService", reply: Reply, nbytes: int) -> None:
        self.service = service
        self.reply = reply
        self.account = reply.account
        self.nbytes = nbytes
        self.timed = False
        self.named = True
        self.ticket: Ticket | None = None

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

    def finish(self) -> None:
        """Send that there is no answer."""
        self.fail(ExecutionFailed("the model has ended the request without a response"))

    def fail(self, error: ServerError) -> None:
        """Send the error."""
        self.account.leave(self.nbytes)
        self.reply.fail(error)

    refuse = fail

    def header(self, name: str) -> str:
        """What the client sent under a name in lower case, "" for nothing."""
        return self.reply.metadata().get(name, "")

    def remaining(self) -> float:
        """`RpcContext.remaining`."""
        return self.reply.remaining()

    def routed(self, request: Call, target: Target) -> None:
        """Take what serves the request, now that it is decided."""
        self.reply.noted = target.model, target.name, request.id

    def answered_by(self, backend: str) -> None:
        """Send along which backend answers."""
        self.reply.set_trailing(BACKEND_METADATA, backend)

    def cancel(self) -> None:
        """Nobody waits any more."""
        if self.ticket is not None:
            self.ticket.cancel()
        self.account.leave(self.nbytes)

    def hold(self, held: bool) -> None:
        """There is one response only."""


class InferenceService:
    """ModelInfer; the stream is in `headrace.transports.grpc.stream`."""

    def __init__(
        self,
        engine: Entrance,
        max_request_bytes: int,
        reader: InferReader | None = None,
        writer: InferWriter | None = None,
    ) -> None:
        self.writer = writer or InferWriter()
        self.reader = reader or InferReader()
        self.engine = engine
        self._limit = max_request_bytes

    def __call__(self, data: Buffer, reply: Reply) -> Ticket | None:
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
            answer = _Answer(self, reply, nbytes)
            if not found.name:  # in a front end, or by rules, the answer says which version it was
                answer.named = False
            if asked.long:
                answer.ticket = self._defer(asked, found.signature, answer)
                return answer
            request = asked.request(nbytes)
            if request.parameters:
                answer.timed = wants_timing(request)
            answer.ticket = found.submit(request, answer)
            alike, direct = asked.alike, found.direct
            if answer.ticket is request and alike and direct:  # it was queued as it is
                direct.remember(alike, request.rows)
        except BaseException:
            account.leave(nbytes)
            raise
        return answer

    def _defer(self, message: InferMessage, signature: Signature | None, answer: _Answer) -> Ticket:
        """Decode on a thread, then queue the request."""

        def submit(request: Call) -> Ticket:
            request.nbytes = answer.nbytes
            answer.timed = wants_timing(request)
            # The model may have been replaced meanwhile.
            return self.engine.find(message.model_name, message.model_version).submit(
                request, answer
            )

        nbytes = answer.nbytes
        return Deferred(
            self.engine.admission.workbench, nbytes,
            lambda charge: message.request_long(nbytes, signature, charge), submit, answer,
            answer.charge,
        )  # fmt: skip


def infer_handlers(
    engine: Entrance, max_request_bytes: int, pattern: HeaderPattern | None = None
) -> dict[str, Direct]:
    """ModelInfer, by full path; `pattern` picks what of the metadata models are told."""
    if pattern is None:
        return {f"/{INFERENCE}/ModelInfer": InferenceService(engine, max_request_bytes)}
    reader, writer = InferReader(), InferWriter()

    def infer(data: Buffer, reply: Reply) -> Ticket | None:
        entrance = forwarding(engine, pattern, reply.metadata().items())
        return InferenceService(entrance, max_request_bytes, reader, writer)(data, reply)

    return {f"/{INFERENCE}/ModelInfer": infer}
