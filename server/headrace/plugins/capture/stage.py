"""The stage that copies payloads, and the choice of the calls that have it.

A call is chosen at its begin, and passed to the thread when it is over. Everything on the event
loop is a hash of a short text, and copies of at most `payload_bytes` for each call.
"""

import random
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from hashlib import blake2b
from time import monotonic_ns, time_ns

from headrace.core.call import Call, InferResponse, Stage, Submit
from headrace.core.errors import Cancelled, ServerError
from headrace.core.tensors import Tensor
from headrace.observability.capture import CaptureOptions
from headrace.observability.traces import size_within
from headrace.observability.writing import WritingThread
from headrace.plugins.capture.files import RecordWriter
from headrace.plugins.capture.records import OMITTED, REDACTED, CapturedCall, CapturedTensor
from headrace.protocol.status import STATUS
from headrace.scheduling.sequences import SEQUENCE_END, SEQUENCE_ID, SEQUENCE_START

_CLOSE_SECS = 5.0
_PARAMETER = "parameter:"  # before a pattern of --capture-redact
_WHOLE = 1 << 64
_MOST_RESPONSES = 1_000  # of a call; further ones are left out


class PayloadCapture:
    """A `Capture` that writes on a thread."""

    def __init__(
        self, options: CaptureOptions, thread: WritingThread[CapturedCall], writer: RecordWriter
    ) -> None:
        self.captured = 0
        self._thread = thread
        self._writer = writer
        self._models = options.models
        self._rate = options.rate
        self._below = _WHOLE // options.rate
        self._kind, _, self._name = options.key.partition(":")
        self._redaction = Redaction(options.redact)
        self._payload_bytes = options.payload_bytes

    @property
    def headers(self) -> tuple[str, ...]:
        """Implements `Capture.headers`."""
        return (self._name,) if self._kind == "header" else ()

    @property
    def lost(self) -> Mapping[str, int]:
        """Implements `Capture.lost`."""
        return {"queue": self._thread.dropped, "unwritten": self._writer.unwritten}

    def recorded(self, model: str, version: str, submit: Submit) -> Submit:
        """Implements `Capture.recorded`."""
        if not any(fnmatchcase(model, pattern) for pattern in self._models):
            return submit

        def stage(call: Call) -> None:
            if not call.door:  # of another model
                submit(call)
                return
            parameters = _parameters(call)
            key = self._key(call, parameters)
            digest = b"" if key is None else blake2b(key.encode("utf-8", "replace")).digest()[:8]
            if not self._chosen(digest):
                submit(call)
                return
            found = CapturedCall(
                model, version, call.id, call.door.lower(), time_ns(), digest.hex(),
                self._redaction.of_parameters(parameters), [],
            )  # fmt: skip
            captured = CapturedStage(self, found)
            captured.keep(found.inputs, call.inputs.values())
            call.enter(captured, submit)

        return stage

    def close(self) -> None:
        """Implements `Capture.close`."""
        self._thread.close(_CLOSE_SECS)

    def kept(self, model: str, tensor: Tensor, size: int) -> CapturedTensor:
        """A copy of a tensor, beside `size` bytes of a call's others."""
        name, datatype, array = tensor.name, tensor.datatype, tensor.array
        found = CapturedTensor(name, datatype, tuple(array.shape), OMITTED)
        if self._redaction.hides(model, name):
            found.data = REDACTED
        elif size <= self._payload_bytes:
            found.data = array.copy()  # its memory may be used again
        return found

    def room(self, size: int) -> int:
        """Bytes that a call may have beside `size`."""
        return self._payload_bytes - size

    def take(self, call: CapturedCall) -> None:
        """Pass a call that is over to the thread."""
        self.captured += 1
        self._thread.put(call)

    def _key(self, call: Call, parameters: Mapping[str, object]) -> str | None:
        """The value of the sampling key, "" if a call has none; None without a key."""
        if self._kind == "header":
            return call.header(self._name)
        if self._kind == "parameter":
            return str(parameters.get(self._name, ""))
        return call.id if self._kind == "id" else None

    def _chosen(self, digest: bytes) -> bool:
        if digest:
            return int.from_bytes(digest, "big") < self._below
        return random.random() * self._rate < 1


def _parameters(call: Call) -> Mapping[str, object]:
    """The parameters of a call, with those of a sequence: its answer depends on them, too."""
    options = call.options
    if not options.sequence_id:
        return call.parameters
    told: dict[str, object] = {**call.parameters, SEQUENCE_ID: options.sequence_id}
    if options.sequence_start:
        told[SEQUENCE_START] = True
    if options.sequence_end:
        told[SEQUENCE_END] = True
    return told


class CapturedStage(Stage):
    """Copies the responses to one call."""

    __slots__ = ("_begun", "_call", "_capture")

    def __init__(self, capture: PayloadCapture, call: CapturedCall) -> None:
        self._capture = capture
        self._call = call
        self._begun = monotonic_ns()

    def keep(self, place: list[CapturedTensor], tensors: Iterable[Tensor]) -> None:
        """Copy tensors to `place`."""
        call, capture = self._call, self._capture
        for tensor in tensors:
            size = size_within(tensor.datatype, tensor.array, capture.room(call.nbytes))
            kept = capture.kept(call.model, tensor, call.nbytes + size)
            if not isinstance(kept.data, str):
                call.nbytes += size
            place.append(kept)

    def transform(self, call: Call, response: InferResponse, final: bool, done: object) -> None:
        """Implements `Stage.transform`: the response is as the model gave it."""
        self._call.version = response.model_version or self._call.version
        if len(self._call.responses) < _MOST_RESPONSES:
            outputs: list[CapturedTensor] = []
            self.keep(outputs, response.outputs)
            self._call.responses.append(outputs)

    def ended(self, call: Call, error: ServerError | None) -> None:
        """Implements `Stage.ended`."""
        if error is not None:
            self._call.error, self._call.status = str(error), STATUS[type(error)].http

    def cancelled(self, call: Call) -> None:
        """Implements `Stage.cancelled`."""
        self.ended(call, Cancelled("the client went away"))

    def over(self, call: Call) -> None:
        """Implements `Stage.over`."""
        self._call.duration_ns = monotonic_ns() - self._begun
        self._capture.take(self._call)


class Redaction:
    """Patterns of what is left out: `TENSOR`, `MODEL/TENSOR`, or `parameter:NAME`.

    Names of parameters match in any case: those made from headers are as each client writes them.
    """

    def __init__(self, patterns: Sequence[str]) -> None:
        self._tensors = [one for one in patterns if not one.startswith(_PARAMETER)]
        named = [one.removeprefix(_PARAMETER) for one in patterns if one.startswith(_PARAMETER)]
        self._parameters = [one.lower() for one in named]

    def hides(self, model: str, tensor: str) -> bool:
        """True if a tensor's data are left out; names of tensors may have slashes, too."""
        whole = f"{model}/{tensor}"
        return any(
            fnmatchcase(tensor, pattern) or ("/" in pattern and fnmatchcase(whole, pattern))
            for pattern in self._tensors
        )

    def of_parameters(self, parameters: Mapping[str, object]) -> Mapping[str, object]:
        """A copy of parameters without the values that are left out."""
        return {
            name: f"<{REDACTED}>" if self._matches(name) else value
            for name, value in parameters.items()
        }

    def _matches(self, parameter: str) -> bool:
        return any(fnmatchcase(parameter.lower(), pattern) for pattern in self._parameters)
