"""Batches of one model: from a frame's data to requests, and from responses to a frame's data."""

import json
import math
from collections.abc import Container, Iterable, Iterator, Sequence
from itertools import accumulate
from struct import Struct
from typing import Any, NamedTuple

import numpy as np

from headrace.ipc.elements import BITS, DTYPES, SMALL, Buffer, decode_bytes, raw, view
from headrace.ipc.frames import (
    ALIGNMENT,
    FIRST,
    INLINE,
    MAX_SLOTS,
    MAX_TOLD,
    PLACED,
    PLAIN,
    RESULT,
    SHAPES,
    Block,
    BrokenFrame,
    FrameKind,
    Header,
    frame,
    lay_out,
    offsets,
    result_struct,
    unpack_batch,
    unpack_first,
    unpack_layout,
    unpack_places,
)
from headrace.workers.channel import TOO_LONG, Parcel, WorkerChannel
from headrace.workers.triton_requests import (
    InferenceRequest,
    InferenceResponse,
    ResponseReceiver,
    TritonError,
)
from headrace.workers.triton_requests import received as received_request
from headrace.workers.triton_tensors import Tensor, TritonModelException, received

Told = dict[str, Any]
_TEXT = 64 << 10  # characters of a model's error


def tell_tensors(
    tensors: Iterable[Tensor], blocks: list[list[Buffer]]
) -> list[tuple[str, str, tuple[int, ...]]]:
    """Names, datatypes and shapes of tensors; their data is added to `blocks`."""
    told = []
    for tensor in tensors:
        array, datatype = tensor._array, tensor._datatype
        told.append((tensor._name, datatype, array.shape))
        blocks.append([raw(array, datatype)])
    return told


def read_tensors(
    told: Iterable[Sequence[Any]], sizes: Sequence[int], data: Buffer, size: int
) -> list[Tensor]:
    """The tensors in `size` bytes of `data`; malformed data raises any exception."""
    starts = offsets(sizes, size)
    return [
        received(name, datatype, view(datatype, shape, data, start, nbytes))
        for (name, datatype, shape), start, nbytes in zip(told, starts, sizes, strict=True)
    ]


def tell_response(
    response: InferenceResponse,
    wanted: Sequence[str],
    declared: Container[str],
    blocks: list[list[Buffer]],
) -> Told:
    """Encode a response, without outputs that were not requested.

    An undeclared output in place of a missing one is an error: its name is misspelt.
    """
    error = response.error()
    if error is not None:
        return {"error": [error.code(), error.message()[:_TEXT]]}
    given = [tensor._name for tensor in response.output_tensors()]
    unknown = [name for name in given if name not in declared]
    missing = [name for name in wanted if name not in given]
    if unknown and missing:
        text = f"the model gave output '{unknown[0]}', which its configuration does not have"
        return {"error": [TritonError.INTERNAL, f"{text}, and no output '{missing[0]}'"]}
    outputs = [tensor for tensor in response.output_tensors() if tensor._name in wanted]
    return {
        "outputs": tell_tensors(outputs, blocks),
        "parameters": response.parameter_values(),
    }


def read_response(told: Told, sizes: Sequence[int], data: Buffer, size: int) -> InferenceResponse:
    """Decode a response of another model; malformed data raises any exception."""
    if "error" in told:
        code, text = told["error"]
        return InferenceResponse(error=TritonError(text, code))
    tensors = read_tensors(told["outputs"], sizes, data, size)
    response = InferenceResponse(tensors)
    response._parameters = told["parameters"]  # unchecked: other models may return any
    return response


_FORMS = 1000  # forms per worker; batches beyond that are encoded request by request

_KNOWN = 4 * MAX_SLOTS  # cached forms of batches
_LAYOUTS = 1024  # cached layouts
_NOTHING: dict[str, Any] = {}  # the usual extras of a request

Sent = tuple[FrameKind, bytes, Parcel]
Head = tuple[str, str, tuple[int, ...]]  # name, datatype and row shape of an output
Times = tuple[int, int]  # start and end of the execution, monotonic nanoseconds


class BatchForm:
    """The form of batches: their inputs, and the wanted outputs."""

    def __init__(self, document: dict[str, Any]) -> None:
        self.batches: bool = document["batches"]
        self.inputs = [
            Block(n, d, None if s is None else tuple(s)) for n, d, s in document["inputs"]
        ]
        self.outputs: list[str] = document["outputs"]


class InputPlace(NamedTuple):
    """The place of an input in a batch's data; `dtype` is None for BYTES."""

    name: str
    datatype: str
    dtype: np.dtype[Any] | None
    shape: tuple[int, ...]
    start: int
    nbytes: int


class Layout:
    """The places of a batch's inputs in its data, and the rows of each request."""

    def __init__(
        self, form: BatchForm, rows: Sequence[int], sizes: Sequence[int], total: int
    ) -> None:
        """Lay out data of `total` bytes; raises `BrokenFrame`."""
        self.batches, self.outputs, self.rows = form.batches, form.outputs, rows
        lead = (sum(rows),) if form.batches else ()
        self.inputs = [
            _place(block, lead, start, nbytes)
            for block, start, nbytes in zip(form.inputs, offsets(sizes, total), sizes, strict=True)
        ]
        self.apart = [block.shape is None for block in form.inputs]
        self.mixed = any(self.apart)  # requests have row shapes of their own
        self.parts: list[slice | None] = [None] * len(rows)  # slices of the rows; None for all rows
        if form.batches and len(rows) > 1:
            ends = list(accumulate(rows))
            self.parts = list(map(slice, [0, *ends], ends))

    def shapes(self, told: Sequence[Sequence[Sequence[int]]]) -> Iterator[list[tuple[int, ...]]]:
        """The shapes of each input, by request; `told` has the row shapes of those `apart`."""
        following = iter(told)
        for place, apart in zip(self.inputs, self.apart, strict=True):
            if apart:
                given = zip(self.rows, next(following), strict=True)
                yield [(rows, *map(int, shape)) for rows, shape in given]
            elif self.batches:
                yield [(rows, *place.shape[1:]) for rows in self.rows]
            else:
                yield [place.shape for _ in self.rows]


def _place(block: Block, lead: tuple[int, ...], start: int, nbytes: int) -> InputPlace:
    name, datatype, row = block
    dtype = None if datatype == "BYTES" else DTYPES.get(datatype) or BITS[datatype]
    shape = lead if row is None else (*lead, *row)
    if dtype is not None and row is not None and math.prod(shape) * dtype.itemsize != nbytes:
        raise BrokenFrame(f"{nbytes} bytes for {datatype} of shape {list(shape)}")
    return InputPlace(name, datatype, dtype, shape, start, nbytes)


def _apart(layout: Layout, told: Any, data: Buffer) -> list[list[Any]]:
    """For each request its inputs, which follow each other in the data; raises `BrokenFrame`.

    `told` are row shapes, as of `Layout.shapes`.
    """
    arrays: list[list[Any]] = [[] for _ in layout.rows]
    for place, shapes in zip(layout.inputs, layout.shapes(told), strict=True):
        counts = [math.prod(shape) for shape in shapes]
        raw = memoryview(data)[place.start : place.start + place.nbytes]
        if place.dtype is None:
            flat = decode_bytes(raw, (sum(counts),))
        elif sum(counts) * place.dtype.itemsize == place.nbytes:
            flat = np.frombuffer(raw, place.dtype)
        else:
            raise BrokenFrame(f"{place.nbytes} bytes for {place.datatype} of shapes {shapes}")
        for end, count, shape, own in zip(accumulate(counts), counts, shapes, arrays, strict=True):
            own.append(flat[end - count : end].reshape(shape))
    return arrays


class Batches:
    """Decodes the batches of one model, and encodes its responses."""

    def __init__(self, link: WorkerChannel, decoupled: bool, declared: Container[str]) -> None:
        """`declared` are the names of the model's outputs."""
        self._link = link
        self._decoupled = decoupled
        self._declared = declared
        self._forms: dict[int, BatchForm] = {}
        self._layouts: dict[tuple[bytes, int], Layout] = {}  # by the meta behind the first number
        self._known: dict[tuple[Head, ...], tuple[int, Struct]] = {}  # forms of results

    def add_form(self, document: dict[str, Any]) -> None:
        """Store a form."""
        if len(self._forms) >= _KNOWN:
            # More are kept than there can be unstarted batches that refer to them.
            self._forms = dict(list(self._forms.items())[_KNOWN // 2 :])
        self._forms[document["number"]] = BatchForm(document)

    def requests(
        self, header: Header[FrameKind], meta: bytes, data: Buffer, exchange: ResponseReceiver
    ) -> tuple[Layout, list[InferenceRequest]]:
        """The requests of a batch, as views of its data.

        Malformed data raises any exception.
        """
        size = header.data
        places: Sequence[tuple[int, int]] | None = None
        if header.flags & PLACED == PLACED:
            places, data, size, meta = unpack_places(meta)
        ids: Sequence[str] = ()
        extras: dict[str, Any] = _NOTHING
        layout = self._layouts.get((meta[FIRST:], size))
        if layout is not None:  # the usual case: plain requests of a known form
            (number,) = unpack_first(meta)
        else:
            number, repeated, ids, told = unpack_batch(meta)
            layout = self._layout(repeated, size)
            if told:
                extras = json.loads(told)
        arrays = []
        parts = layout.parts
        own: list[list[Any]] | None = None  # the inputs of each request, if it has own arrays
        if places is not None:
            own_shapes = extras.pop(SHAPES) if layout.mixed else ()
            own = self._placed(header.number, layout, own_shapes, places, data)
        elif layout.mixed:
            own = _apart(layout, extras.pop(SHAPES), data)
        if own is not None:
            parts = [None] * len(parts)
        else:
            for _, _, dtype, shape, start, nbytes in layout.inputs:
                if dtype is None:
                    arrays.append(decode_bytes(memoryview(data)[start : start + nbytes], shape))
                else:
                    arrays.append(np.ndarray(shape, dtype, data, start))
        requests: list[InferenceRequest] = []
        for index, part in enumerate(parts):
            if own is not None:
                arrays = own[index]
            tensors: list[Tensor] = []
            for place, array in zip(layout.inputs, arrays, strict=True):
                # `received`, inlined to save a Python call per tensor.
                tensor = Tensor.__new__(Tensor)
                tensor._name, tensor._datatype = place.name, place.datatype
                tensor._array = array if part is None else array[part]
                tensors.append(tensor)
            requests.append(
                received_request(
                    exchange, number + index, tensors, ids[index] if ids else "", layout.outputs,
                    extras.get(str(index), _NOTHING) if extras else _NOTHING, self._decoupled,
                )
            )  # fmt: skip
        return layout, requests

    def _placed(
        self, slot: int, layout: Layout, told: Any, places: Sequence[tuple[int, int]],
        beside: Buffer,
    ) -> list[list[Any]]:  # fmt: skip
        """For each request its inputs, where the server has received them.

        `told` are row shapes, as of `Layout.shapes`.
        """
        blocks = self._link.shared.borrow(slot, [number for number, _ in places])
        blocks[0] = beside
        given = iter(places)
        arrays: list[list[Any]] = [[] for _ in layout.rows]
        for place, shapes in zip(layout.inputs, layout.shapes(told), strict=True):
            for shape, own in zip(shapes, arrays, strict=True):
                number, start = next(given)
                own.append(np.ndarray(shape, place.dtype, blocks[number], start))
        return arrays

    def _layout(self, repeated: bytes, size: int) -> Layout:
        """The layout of a batch with `size` bytes of data; malformed data raises any exception."""
        key = PLAIN + repeated, size
        layout = self._layouts.get(key)
        if layout is None:
            form, rows, sizes = unpack_layout(repeated)
            layout = Layout(self._forms[form], rows, sizes, size)
            if len(self._layouts) >= _LAYOUTS:
                self._layouts.clear()
            self._layouts[key] = layout
        return layout

    def result(
        self,
        slot: int,
        layout: Layout,
        requests: Sequence[InferenceRequest],
        responses: Any,
        times: Times,
    ) -> Sent | None:
        """The result frame for an ordinary model's responses, if they are uniform and successful.

        None otherwise, also for errors and for responses by senders.
        """
        if self._decoupled or type(responses) is not list or len(responses) != len(requests):
            return None
        outputs, rows, batches = layout.outputs, layout.rows, layout.batches
        for request, response in zip(requests, responses, strict=True):
            if (
                not isinstance(response, InferenceResponse)
                or response._error is not None
                or response._parameters
                or request._answering is not None
            ):
                return None
            extras = request._extras
            if extras and len(extras.get("outputs", outputs)) != len(outputs):
                return None
        heads: list[Head] = []
        sizes: list[int] = []
        pieces: list[Buffer] = []
        total = 0
        for name in outputs:
            if pad := -total % ALIGNMENT:
                pieces.append(bytes(pad))
                total += pad
            head: Head | None = None
            begin = total
            for response, count in zip(responses, rows, strict=True):
                for tensor in response._tensors:
                    if tensor._name == name:
                        break
                else:
                    return None
                array, datatype = tensor._array, tensor._datatype
                shape = array.shape
                if batches:
                    if not shape or shape[0] != count:
                        return None
                    shape = shape[1:]
                if head is None:
                    head = name, datatype, shape
                    heads.append(head)
                elif head != (name, datatype, shape):
                    return None
                small = array.nbytes <= SMALL and datatype != "BYTES"
                piece = array.tobytes() if small else raw(array, datatype)
                pieces.append(piece)
                total += len(piece)
            sizes.append(total - begin)
        known = self._known.get(tuple(heads)) or self._learn(tuple(heads))
        if known is None:
            return None
        number, packed = known
        parcel = (b"".join(pieces), total, 0, -1) if total <= INLINE else None
        meta = packed.pack(*times, number, *sizes)
        return RESULT, meta, parcel or self._link.put(slot, pieces, total)

    def _learn(self, heads: tuple[Head, ...]) -> tuple[int, Struct] | None:
        """The number of a new form of results and its meta; None if there are too many."""
        if len(self._known) >= _FORMS:
            return None
        number = len(self._known)
        known = self._known[heads] = number, result_struct(len(heads))
        document = {"number": number, "outputs": heads}
        self._link.send(frame(FrameKind.FORM, json.dumps(document).encode()))
        return known

    def responses(
        self,
        slot: int,
        responses: Sequence[InferenceResponse | str],
        wanted: Sequence[Sequence[str]],
        times: Times,
    ) -> Sent:
        """Encode each response separately; text is the fate of a request without a response."""
        blocks: list[list[Buffer]] = []
        told = [
            {response: True}
            if isinstance(response, str)
            else tell_response(response, names, self._declared, blocks)
            for response, names in zip(responses, wanted, strict=True)
        ]
        sizes, data, total = lay_out(blocks)
        document = {"began": times[0], "ended": times[1], "sizes": sizes, "responses": told}
        meta = json.dumps(document).encode()
        if len(meta) > MAX_TOLD:
            raise TritonModelException(TOO_LONG)
        return FrameKind.RESPONSES, meta, self._link.put(slot, data, total)
