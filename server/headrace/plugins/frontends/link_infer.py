"""Frames between a front end and the engine: kinds and contents.

The parts of requests and responses that clients repeat are in a frame's `meta`, as JSON: built once
per distinct content on one side, parsed once per distinct bytes on the other. The frame's data,
`rest`, starts with the varying numbers and the request's id, and ends with the bytes of the
tensors, one after the other.

Both ends must be of the same version and rely on nothing else of each other: content that is not
valid raises `BrokenFrame`. That of a request or response fails it alone, any other closes the link.
"""

from collections.abc import Callable, Mapping
from enum import IntEnum, IntFlag, unique
from struct import Struct, pack, unpack
from time import monotonic_ns
from types import MappingProxyType
from typing import Any, TypeVar

import numpy as np
import orjson

from headrace.core.bytes_array import BytesArray
from headrace.core.call import (
    NO_OPTIONS,
    Call,
    CallOptions,
    InferResponse,
    Parameter,
    Raw,
    RegionSlice,
    Shared,
    SharedInput,
    Timing,
)
from headrace.core.datatypes import BY_NAME, NUMPY, Datatype
from headrace.core.errors import Allowance, InvalidRequest, QuotaExceeded, ServerError
from headrace.core.tensors import Array, Buffer, Tensor, element_count, elsewhere, raw_bytes
from headrace.core.texts import bounded
from headrace.ipc.frames import BrokenFrame
from headrace.protocol.status import STATUS


@unique
class LinkKind(IntEnum):
    """The kind of a frame. Frames of one exchange have the same number."""

    # To the engine.
    READY = 1  # the doors are open
    INFER = 2  # an infer request; flags name its door
    CANCEL = 3  # cancel a request or a call
    CALL = 4  # an operation other than infer, with one answer
    HELD = 6  # the front end's account and refusal counters
    PAUSE = 7  # pause the responses to a request ...
    GO_ON = 8  # ... or resume them
    UNLOGGED = 9  # log lines that the front end could not write: their number
    BODY = 10  # the next piece of a call's body, flagged if it is the last
    ANSWERS = 11  # counters of answers since the last such frame
    TAKEN = 12  # a file from the engine now belongs to the front end: its size
    AUDIT = 13  # an entry for the audit
    QUOTA_REFUSED = 14  # counters of requests refused for quotas, since the last such frame
    # To the front end.
    SETUP = 16  # configuration: the first frame
    RESPONSE = 17
    FAIL = 18  # the error that ends a request or call
    ANSWER = 19  # the answer to a call
    DRAIN = 20  # accept nothing new, finish, and exit
    FINISH = 21  # a request ends without a further response
    DECOUPLED = 22  # the request's model is decoupled
    LOGS = 23  # new log settings
    HEADERS = 24  # headers that requests must carry
    BACKEND = 25  # the backend that answers a request, for a model with several
    MORE = 26  # the next piece of a call's body is wanted
    READINESS = 27  # the server's readiness: 1 or 0
    ELSEWHERE = 28  # bytes held by other processes against the common limit
    TLS = 29  # read certificate and key again
    RULES = 30  # header rules of the doors
    QUOTAS = 31  # quotas of clients' connections


class Flag(IntFlag):
    """Flags of a frame."""

    # 1 is `headrace.ipc.frames.IN_FILE`.
    FINAL = 2  # the last response to its request, or piece of its body
    REFUSE = 4  # the error refused the request before it was queued
    RAW = 8  # the request is a raw body
    HTTP = 16  # the request came through a door with a single answer, ...
    UNARY = 32  # ... HTTP or a unary call
    GENERATE = 64  # the bytes of a raw request are flat JSON
    UNBEGUN = 128  # no model has begun the request that ends with the error
    ARROW = 128  # of a raw request: its bytes are an Arrow stream


# nbytes, deadline in ns of the monotonic clock or 0, sizes of the id and of the client's address
_REQUEST = Struct("<QQII")
_RESPONSE = Struct("<QQII")  # the timing, size of the id
_unpack_request = _REQUEST.unpack_from
_unpack_response = _RESPONSE.unpack_from
_KNOWN = 512
_KNOWN_SIZE = 4096  # bytes of a meta that is worth remembering
_CLASSES: dict[str, type[ServerError]] = {kind.__name__: kind for kind in STATUS}
_SENT = 6  # options in a request's meta: all but shared memory, which has members of its own
_PLAIN = NO_OPTIONS[:_SENT]
NO_HEADERS: Mapping[str, str] = MappingProxyType({})
# Exceptions raised while parsing an invalid meta.
_NONSENSE = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, InvalidRequest)

Layout = list[tuple[str, Datatype, np.dtype[Any], tuple[int, ...], int]]
C = TypeVar("C", bound=Call)
Value = TypeVar("Value")


class _Metas(dict[Any, bytes]):
    """Encoded metas by content; cleared when there are too many."""

    def keep(self, key: Any, meta: bytes) -> None:
        if len(meta) <= _KNOWN_SIZE:
            if len(self) >= _KNOWN:
                self.clear()
            self[key] = meta


# --- writing


class RequestWriter:
    """Writes requests."""

    def __init__(self) -> None:
        self._known = _Metas()

    def parts(
        self, request: Call, headers: Mapping[str, str] = NO_HEADERS
    ) -> tuple[bytes, list[Buffer]]:
        """Return `meta`, with `headers` of the request, and the pieces of `rest`."""
        id = request.id.encode(errors="replace")
        seconds = request.remaining()
        deadline = monotonic_ns() + int(seconds * 1e9) if seconds else 0
        client = b"" if (payer := request.payer) is None else payer.origin.encode()
        numbers = _REQUEST.pack(request.nbytes, deadline, len(id), len(client))
        pieces: list[Buffer] = [numbers + id + client]
        layout = _add_tensors(pieces, request.inputs.values())
        if headers or request.parameters or request.options[:_SENT] != _PLAIN:
            return _request_meta(request, layout, headers), pieces
        key = (request.model_name, request.model_version, request.outputs, layout)
        meta = self._known.get(key)
        if meta is None:
            meta = _request_meta(request, layout, headers)
            self._known.keep(key, meta)
        return meta, pieces


class ResponseWriter:
    """Writes responses."""

    def __init__(self) -> None:
        self._known = _Metas()

    def parts(self, response: InferResponse) -> tuple[bytes, list[Buffer]]:
        """Return `meta`, and the pieces of `rest`."""
        id = response.id.encode(errors="replace")
        timing = response.timing
        numbers = _RESPONSE.pack(timing.queue_ns, timing.compute_ns, timing.batch_rows, len(id))
        pieces: list[Buffer] = [numbers + id]
        layout = _add_tensors(pieces, response.outputs)
        key = (response.model_name, response.model_version, layout)
        meta = None if response.parameters else self._known.get(key)
        if meta is None:
            parameters = _spelled(response.parameters)
            meta = orjson.dumps([response.model_name, response.model_version, layout, parameters])
            if not response.parameters:
                self._known.keep(key, meta)
        return meta, pieces


def error_parts(error: ServerError, version: str) -> tuple[bytes, bytes]:
    """`meta` and `rest` of an error; `version` is the model version that was to answer, or ""."""
    kind = type(error).__name__
    if isinstance(error, QuotaExceeded) and error.allowance is not None:
        details = orjson.dumps([error.retry_after, error.until, [*error.allowance]])
        return f"{kind} {version} ".encode() + details, bounded(str(error)).encode()
    numbers = (error.retry_after, *(error.spent or ()))
    meta = f"{kind if kind in _CLASSES else ''} {version} {' '.join(map(str, numbers))}"
    return meta.encode(), bounded(str(error)).encode()


def numbers_rest(*numbers: int) -> bytes:
    """`rest` of a frame that consists of numbers."""
    return pack(f"<{len(numbers)}q", *numbers)


def read_numbers(rest: bytes, count: int) -> tuple[int, ...]:
    """The `count` numbers of `numbers_rest`; raises `BrokenFrame`."""
    if len(rest) != 8 * count:
        raise BrokenFrame("numbers that are not there")
    return unpack(f"<{count}q", rest)


def _add_tensors(pieces: list[Buffer], tensors: Any) -> tuple[tuple[Any, ...], ...]:
    """Append the tensors' bytes to `pieces`; returns name, datatype, shape and size of each."""
    layout = []
    for tensor in tensors:
        array = tensor.array
        raw = raw_bytes(array)
        pieces.append(raw)
        layout.append((tensor.name, tensor.datatype, array.shape, len(raw)))
    return tuple(layout)


def _request_meta(request: Call, layout: Any, headers: Mapping[str, str]) -> bytes:
    document = [
        request.model_name, request.model_version, layout, list(request.outputs),
        _spelled(request.parameters), request.options[:_SENT], {**headers},
    ]  # fmt: skip
    if (shared := request.options.shared) is not None:
        document += ({**shared.inputs}, {**shared.outputs})
    return orjson.dumps(document)  # writes dataclasses as objects


def _spelled(parameters: dict[str, Parameter]) -> dict[str, object]:
    """Parameters in JSON form; NaN and infinities are spelled out."""
    return {
        name: [value.hex()] if isinstance(value, float) else value
        for name, value in parameters.items()
    }


# --- reading


class _LinkTemplate:
    """The parsed common part of requests, or responses, with the same meta."""

    __slots__ = ("common", "layout", "parameters")

    def __init__(self, common: tuple[Any, ...], layout: Layout, parameters: Any) -> None:
        self.common = common
        self.layout = layout
        self.parameters: dict[str, Parameter] = parameters


class _Templates(dict[bytes, _LinkTemplate]):
    """Templates by meta; an unknown meta is parsed, and remembered if it is short."""

    def __init__(self, read: Callable[[Any], _LinkTemplate]) -> None:
        self._read = read

    def __missing__(self, meta: bytes) -> _LinkTemplate:
        try:
            template = self._read(orjson.loads(meta))
        except _NONSENSE as error:
            raise BrokenFrame(f"an invalid meta: {error}") from None
        if len(meta) <= _KNOWN_SIZE:
            if len(self) >= _KNOWN:
                self.clear()
            self[meta] = template
        return template


class RequestReader:
    """Reads requests."""

    def __init__(self) -> None:
        self._known = _Templates(_request_template)

    def read(
        self,
        meta: bytes,
        rest: Buffer,
        raw: Raw | None,
        make: Callable[..., C],
    ) -> C:
        """Build the call by `make`, which takes the request's headers and the arguments of `Call`.

        Raises `BrokenFrame`, `InvalidRequest`.
        """
        template = self._known[meta]
        position = _REQUEST.size
        if position > len(rest):
            raise BrokenFrame("the numbers are not there")
        nbytes, _, id_size, client_size = _unpack_request(rest)
        id = ""
        if id_size:
            position += id_size
            id = _text(rest, position - id_size, position)
        position += client_size
        inputs = {t.name: t for t in _tensors(template.layout, rest, position)}
        model, version, outputs, options, headers = template.common
        if raw is not None:
            options = options._replace(raw=raw)
        return make(
            headers, model, version, id, inputs, outputs, dict(template.parameters), options,
            nbytes,
        )  # fmt: skip


def origin_of(rest: Buffer) -> str:
    """The client's address from a request's `rest`; "" if not known."""
    _, _, id_size, size = _unpack_request(rest)
    start = _REQUEST.size + id_size
    return _text(rest, start, start + size)


def deadline_of(rest: Buffer) -> int:
    """The client's deadline from a request's `rest`; 0 if there is none."""
    deadline: int = _unpack_request(rest)[1]
    return deadline


class LinkResponseReader:
    """Reads responses."""

    def __init__(self) -> None:
        self._known = _Templates(_response_template)

    def read(self, meta: bytes, rest: Buffer) -> InferResponse:
        """The response; raises `BrokenFrame`."""
        template = self._known[meta]
        position = _RESPONSE.size
        if position > len(rest):
            raise BrokenFrame("the numbers are not there")
        queue_ns, compute_ns, rows, id_size = _unpack_response(rest)
        id = ""
        if id_size:
            position += id_size
            id = _text(rest, position - id_size, position)
        outputs = _tensors(template.layout, rest, position)
        model, version = template.common
        timing = Timing(queue_ns, compute_ns, rows)
        return InferResponse(model, version, id, outputs, timing, dict(template.parameters))


def read_error(meta: bytes, text: bytes) -> tuple[ServerError | None, str]:
    """The error, or None if it is not a `ServerError`, and the version that was to answer."""
    kind, _, rest = meta.decode(errors="replace").partition(" ")
    version, *numbers = rest.split(" ")
    if kind not in _CLASSES:
        return None, version
    if numbers and numbers[0].startswith("["):
        return _quota_exceeded(text.decode(errors="replace"), numbers[0]), version
    error = _CLASSES[kind](text.decode(errors="replace"))
    try:
        error.retry_after, *spent = map(int, numbers)
        return error.of_request(*spent) if spent else error, version
    except (ValueError, TypeError):
        raise BrokenFrame(f"an error with the numbers {numbers}") from None


def _quota_exceeded(text: str, details: str) -> QuotaExceeded:
    try:
        seconds, until, allowance = orjson.loads(details)
        return QuotaExceeded(text, seconds, Allowance(*allowance), until)
    except (ValueError, TypeError):
        raise BrokenFrame(f"an error with the details {details}") from None


def _request_template(document: Any) -> _LinkTemplate:
    model, version, layout, outputs, parameters, options, headers, *more = document
    common = (
        _is(str, model), _is(str, version), tuple([_is(str, name) for name in outputs]),
        _options(options, _shared(*more) if more else None),
        {_is(str, name): _is(str, value) for name, value in headers.items()} or NO_HEADERS,
    )  # fmt: skip
    return _LinkTemplate(common, _layout(layout), _unspelled(parameters))


def _options(given: Any, shared: Shared | None) -> CallOptions:
    priority, timeout, id, start, end, classes = given
    if type(id) not in (int, str):
        raise TypeError("a sequence's id must be a number or a text")
    if classes is not None:
        classes = {_is(str, name): _is(int, count) for name, count in classes.items()}
    options = CallOptions(
        _is(int, priority), _is(int, timeout), id, _is(bool, start), _is(bool, end), classes, shared
    )
    return NO_OPTIONS if options == NO_OPTIONS else options


def _shared(inputs: Any, outputs: Any) -> Shared:
    return Shared(
        {
            _is(str, name): SharedInput(
                BY_NAME[given["datatype"]],
                tuple([_is(int, d) for d in given["shape"]]),
                _region_slice(given["place"]),
            )
            for name, given in inputs.items()
        },
        {_is(str, name): _region_slice(given) for name, given in outputs.items()},
    )


def _region_slice(given: Any) -> RegionSlice:
    offset, byte_size = _is(int, given["offset"]), _is(int, given["byte_size"])
    if offset < 0 or byte_size < 0:
        raise ValueError("a slice of a region that begins or ends before it")
    return RegionSlice(_is(str, given["region"]), offset, byte_size)


def _response_template(document: Any) -> _LinkTemplate:
    model, version, layout, parameters = document
    common = (_is(str, model), _is(str, version))
    return _LinkTemplate(common, _layout(layout), _unspelled(parameters))


def _is(kind: type[Value], value: Any) -> Value:
    if type(value) is not kind:
        raise TypeError(f"expected {kind.__name__}, got {type(value).__name__}")
    return value


def _layout(document: Any) -> Layout:
    layout: Layout = []
    for name, kind, shape, size in document:
        datatype = BY_NAME[kind]
        dtype = NUMPY[datatype]
        dims = tuple([_is(int, d) for d in shape])
        count = element_count(name, dims)
        if count and size == 0:  # the data is in shared memory; see `elsewhere`
            tensor = elsewhere(_is(str, name), datatype, dims)
            layout.append((tensor.name, tensor.datatype, tensor.array.dtype, dims, 0))
            continue
        if datatype is not Datatype.BYTES and _is(int, size) != count * dtype.itemsize:
            raise ValueError(f"{size} bytes for {kind} of shape {dims}")
        if _is(int, size) < 0:
            raise ValueError("a negative size")
        layout.append((_is(str, name), datatype, dtype, dims, size))
    return layout


def _unspelled(parameters: Any) -> dict[str, Parameter]:
    result: dict[str, Parameter] = {}
    for name, value in parameters.items():
        if type(value) is list:
            [spelling] = value
            result[name] = float.fromhex(spelling)
        elif type(value) in (str, int, bool):
            result[name] = value
        else:
            raise TypeError("a parameter of an unknown type")
    return result


def _text(rest: Buffer, start: int, stop: int) -> str:
    if stop > len(rest):
        raise BrokenFrame("the id is longer than its frame")
    try:
        return str(rest[start:stop], "utf-8")
    except UnicodeDecodeError as error:
        raise BrokenFrame(f"an id that is no text: {error}") from None


def _tensors(layout: Layout, rest: Buffer, position: int) -> list[Tensor]:
    """Tensors as views of `rest`, starting at `position`."""
    tensors = []
    for name, datatype, dtype, shape, size in layout:
        end = position + size
        if end > len(rest):
            raise BrokenFrame("the tensors are longer than their frame")
        if datatype is Datatype.BYTES:
            # The receiver of the elements, in the other process, has checked them.
            texts = BytesArray(memoryview(rest)[position:end], shape)
            tensors.append(Tensor(name, datatype, texts))
        else:
            array: Array = np.ndarray(shape, dtype, rest, position)
            tensors.append(Tensor(name, datatype, array))
        position = end
    if position != len(rest):
        raise BrokenFrame("more bytes than tensors")
    return tensors
