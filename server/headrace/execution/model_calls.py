"""What a model asks of the server while it runs: other models' answers, and whatever else there is.

Each call has a number, which its replies bear. Owned by the event-loop thread; a call that is not
done with ends with the process.
"""

from collections.abc import Mapping
from typing import Any

from headrace.core.call import Call, InferResponse
from headrace.core.datatypes import BY_NAME
from headrace.core.errors import Cancelled, ExecutionFailed, ServerError
from headrace.core.tensors import Tensor, raw_bytes
from headrace.execution.batch_frames import ERRORS, read_array
from headrace.execution.host import Host
from headrace.execution.worker import WorkerProcess
from headrace.observability.traces import TRACE_PARAMETER
from headrace.scheduling.batch import Batch
from headrace.workers.elements import Buffer
from headrace.workers.frames import Kind, offsets

_MOST_UNSENT = 32  # frames that wait for a worker, from which on other models' responses pause

_NOT_DECOUPLED = (
    "model '{}' is decoupled: it may answer any number of times, so it has to be executed with"
    " decoupled=True"
)


class ModelCall(Call):
    """A call that a model has made."""

    def __init__(self, calls: "ModelCalls", number: int, decoupled: bool, asked: Call) -> None:
        """`decoupled` is whether the model takes any number of responses."""
        super().__init__("", "", "", {})
        self.take(asked)
        self._calls = calls
        self._number = number
        self.refusal = "" if decoupled else _NOT_DECOUPLED.format(asked.model_name)

    def respond(self, response: InferResponse, final: bool) -> None:
        """Pass a response on."""
        blocks: list[list[Buffer]] = []
        outputs = []
        for tensor in response.outputs:
            outputs.append((tensor.name, tensor.datatype, tensor.array.shape))
            blocks.append([raw_bytes(tensor.array)])
        told = {"outputs": outputs, "parameters": response.parameters}
        self._calls.reply(self._number, final, {"response": told}, blocks)

    def finish(self) -> None:
        """Pass the end on."""
        self._calls.reply(self._number, True, {"response": None})

    def fail(self, error: ServerError) -> None:
        """Pass the error on."""
        self._calls.reply(self._number, True, {"response": {"error": _told(error)}})


class ModelCalls:
    """The calls of one worker process."""

    def __init__(self, process: WorkerProcess, host: Host) -> None:
        self.moves = 0  # calls that were begun, and replies
        self._process = process
        self._host = host
        self._calls: dict[int, Call] = {}
        self._within: dict[int, Batch] = {}  # of calls that a batch waits for
        self._held: set[int] = set()  # of whose replies the model has enough for now
        self._paused = False
        process.link.on_empty = self._go_on

    def begin(
        self, document: Mapping[str, Any], data: Buffer, size: int, batch: Batch | None
    ) -> None:
        """Take a call; raises what nonsense raises. `batch` does not end before it is answered."""
        number = int(document["call"])
        self.moves += 1
        if document["op"] != "infer":
            self._control(number, document)
            return
        try:
            asked = _request(document, data, size)
            call = ModelCall(self, number, bool(document["decoupled"]), asked)
            self._host.submit(call, batch is not None)
        except ServerError as error:
            self.reply(number, True, {"response": {"error": _told(error)}})
            return
        self._calls[number] = call
        if batch is not None:
            self._within[number] = batch
        if self._paused:
            call.hold(True)

    def _control(self, number: int, document: Mapping[str, Any]) -> None:
        def answer(value: object, error: ServerError | None) -> None:
            told = {"value": value} if error is None else {"error": _told(error)}
            self.reply(number, True, told)

        self._host.control(document, answer)

    def reply(
        self,
        number: int,
        final: bool,
        told: dict[str, Any],
        blocks: list[list[Buffer]] | None = None,
    ) -> None:
        """Send a reply."""
        self.moves += 1
        if final:
            self._forget(number)
        try:
            document = {"call": number, "final": final, **told}
            self._process.link.send_loose(Kind.REPLY, document, blocks or [])
        except OSError as error:  # no memory for the data
            self._cancel(number)
            failed = {"error": _told(ExecutionFailed(f"the response cannot be passed on: {error}"))}
            self._process.link.send_loose(
                Kind.REPLY, {"call": number, "final": True, "response": failed}, []
            )
        if self._process.link.unsent > _MOST_UNSENT and not self._paused:
            self._paused = True
            self._tell_all()

    def drop(self, number: int) -> None:
        """The model calls it off, and may wait for the reply that says so."""
        self._cancel(number)
        gone = Cancelled("the model that has asked for this has called it off")
        self.reply(number, True, {"response": {"error": _told(gone)}})

    def hold(self, number: int, held: bool) -> None:
        """Have a model pause that answers faster than its answers are taken, or go on."""
        call = self._calls.get(number)
        if call is None:
            return
        (self._held.add if held else self._held.discard)(number)
        if not self._paused:
            call.hold(held)

    def abandon(self, batch: Batch) -> None:
        """Nobody waits for a batch any more: its calls end, so that it can."""
        for number, other in list(self._within.items()):
            if other is batch:
                self._cancel(number)
                gone = Cancelled("nobody waits for the request any more that this was asked for")
                self.reply(number, True, {"response": {"error": _told(gone)}})

    def end(self) -> None:
        """The process has gone."""
        for number in list(self._calls):
            self._cancel(number)

    def _cancel(self, number: int) -> None:
        if (call := self._forget(number)) is not None:
            call.cancel()

    def _forget(self, number: int) -> Call | None:
        self._within.pop(number, None)
        self._held.discard(number)
        return self._calls.pop(number, None)

    def _go_on(self) -> None:
        if self._paused:
            self._paused = False
            self._tell_all()

    def _tell_all(self) -> None:
        for number, call in list(self._calls.items()):
            call.hold(self._paused or number in self._held)


def _request(document: Mapping[str, Any], data: Buffer, size: int) -> Call:
    sizes = document["sizes"]
    inputs: dict[str, Tensor] = {}
    for (name, datatype, shape), start, nbytes in zip(
        document["inputs"], offsets(sizes, size), sizes, strict=True
    ):
        kind = BY_NAME[datatype]
        inputs[str(name)] = Tensor(
            str(name), kind, read_array(kind, tuple(shape), data, start, nbytes)
        )
    flags, version = int(document["flags"]), int(document["version"])
    parameters = dict(document["parameters"])
    if "trace" in document:
        parameters[TRACE_PARAMETER] = str(document["trace"])
    return Call(
        str(document["model"]),
        "" if version < 0 else str(version),
        str(document["id"]),
        inputs,
        tuple(map(str, document["outputs"])),
        parameters,
        timeout=max(int(document["timeout"]), 0),
        sequence_id=document["correlation_id"],
        sequence_start=bool(flags & 1),
        sequence_end=bool(flags & 2),
    )


def _told(error: ServerError) -> tuple[int, str]:
    """The code of `TritonError` for an error, and its text."""
    codes = [code for code, kind in enumerate(ERRORS) if isinstance(error, kind)]
    return (codes or [ERRORS.index(ExecutionFailed)])[0], str(error)
