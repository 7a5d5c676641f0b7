"""Infer messages without copies: the raw tensors stay where they are, protobuf gets the rest.

The large part of a ModelInferRequest, and the part that differs from one request to the next, is
`raw_input_contents`. So the top-level fields are walked by hand, which is all that is needed to
find these and the id; what remains is parsed by protobuf and, since clients send the same again and
again, remembered by its bytes. A message that is written in an unusual way is left to protobuf
altogether: both ways give the same request, or the same error.

Responses are built the other way around: what outputs of the same names, datatypes and shapes have
in common is serialised once, and the id and the raw tensors are put beside it.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from headrace.core.bytes_array import COPIED
from headrace.core.call import NOBODY, Call, Computed, InferResponse
from headrace.core.datatypes import NUMPY, Datatype
from headrace.core.signature import Signature
from headrace.core.tensors import Array, Buffer, Tensor, new_tensor, raw_bytes
from headrace.core.texts import bounded
from headrace.wire.elements import Charge, charge_objects
from headrace.wire.grpc_contents import MAX_FIELDS, Contents, Outline, outline, read_varint, varint
from headrace.wire.grpc_infer import (
    LONG,
    decode_infer,
    parse_infer,
    set_parameter,
    wants_empty_final,
)  # fmt: skip
from headrace.wire.pb import grpc_service_pb2 as pb

# Tags of fields that hold bytes: the number of the field, and wire type 2.
_ID, _RAW_INPUT = 0x1A, 0x3A
_OTHERS = frozenset({0x0A, 0x12, 0x22, 0x2A, 0x32})  # model name and version, ..., outputs
_STREAM_RESPONSE = b"\x12"
_REMEMBERED = 256  # heads, and sizes of messages
_REMEMBERED_SIZE = 4096  # bytes of a head
_LAYOUTS = 4  # of messages of one size


class Fields:
    """Where in a message its id and its raw tensors are, and the bytes of everything else."""

    __slots__ = ("fixed", "head", "id_start", "id_stop", "raw")

    def __init__(self) -> None:
        self.head = b""
        self.id_start = self.id_stop = 0
        self.raw: list[tuple[int, int]] = []
        # All but the contents of the id and the tensors, in place: (start, stop, bytes).
        self.fixed: list[tuple[int, int, bytes]] = []


def walk(data: Buffer) -> Fields | None:
    """Walk the top-level fields; None without raw tensors, or where others should rather look."""
    size = len(data)
    fields = Fields()
    head: list[bytes] = []
    position = kept = fixed = count = 0
    while position < size:
        count += 1
        if count > MAX_FIELDS:
            return None  # which will be refused
        tag = data[position]
        start = position + 2
        if start > size:
            return None
        length = data[position + 1]
        if length > 127:
            length, start = read_varint(data, position + 1, 4)
            if not start:
                return None
        stop = start + length
        if stop > size:
            return None
        if tag in (_RAW_INPUT, _ID):
            head.append(bytes(data[kept:position]))
            fields.fixed.append((fixed, start, bytes(data[fixed:start])))
            kept = fixed = stop
            if tag == _ID:
                if fields.id_stop:  # the last one counts, but each has to be text
                    return None
                fields.id_start, fields.id_stop = start, stop
            else:
                fields.raw.append((start, stop))
        elif tag not in _OTHERS or length > LONG:
            return None
        position = stop
    if not fields.raw:
        return None
    head.append(bytes(data[kept:size]))
    if fixed < size:
        fields.fixed.append((fixed, size, bytes(data[fixed:size])))
    fields.head = b"".join(head)
    return fields


class _Template:
    """What requests with the same head have in common, which is all but id and tensors' data."""

    __slots__ = ("empty_final", "inputs", "plain", "request")

    def __init__(self, request: Call, empty_final: bool) -> None:
        self.empty_final = empty_final
        self.inputs = [
            (
                tensor.name, tensor.datatype, NUMPY[tensor.datatype], tensor.array.shape,
                tensor.array.nbytes,
            )
            for tensor in request.inputs.values()
        ]  # fmt: skip
        # Whether only data of fixed sizes differ, and nothing is asked besides outputs of a model.
        self.plain = (
            request.classes is None
            and not request.parameters
            and Datatype.BYTES not in {i[1] for i in self.inputs}
        )
        self.request = request.like(inputs={}, parameters=dict(request.parameters))


class InferMessage:
    """A message of which the model, its version and the id are known."""

    __slots__ = (
        "_data", "_fields", "_message", "_outline", "_reader", "_template", "id", "long",
        "model_name", "model_version",
    )  # fmt: skip

    def __init__(
        self,
        reader: "InferReader",
        data: Buffer,
        fields: Fields | None,
        template: _Template | None,
        message: pb.ModelInferRequest | None,
        id: str,
        outline: Outline | None = None,
    ) -> None:
        """`long` is whether it takes long to decode, which `request_long` is for then."""
        self._reader = reader
        self._data = data
        self._outline = outline
        self._fields = fields
        self._template = template
        self._message = message
        self.id = id
        source: Any = template.request if template is not None else message
        self.model_name: str = source.model_name
        self.model_version: str = source.model_version
        self.long = len(data) > LONG and self._is_long()

    def _is_long(self) -> bool:
        if self._outline is not None:
            return True
        if self._template is not None:
            return any(given[1] is Datatype.BYTES for given in self._template.inputs)
        assert self._message is not None
        return any(item.datatype == Datatype.BYTES for item in self._message.inputs)

    @property
    def empty_final(self) -> bool:
        """Whether an end without a response is to be a message of its own; ask after `request`."""
        if self._template is not None:
            return self._template.empty_final
        assert self._message is not None
        return wants_empty_final(self._message)

    @property
    def alike(self) -> object | None:
        """What `InferReader.fill` will say of messages like it; None if it will not read them."""
        template = self._template
        return template if template is not None and template.plain else None

    def request_long(self, nbytes: int, signature: Signature | None, charge: Charge) -> Call:
        """The request, on any thread; inputs are held against `signature` before they are decoded.

        `charge` is called with the bytes that data is about to take, and may raise.
        """
        request = self._request_long(nbytes, signature, charge)
        charge_objects(request.inputs.values(), charge)
        return request

    def _request_long(self, nbytes: int, signature: Signature | None, charge: Charge) -> Call:
        template, view = self._template, memoryview(self._data)
        if template is not None:
            if signature is not None:
                for name, datatype, _, shape, _ in template.inputs:
                    signature.check_tensor(name, datatype, shape)
            return self.request(nbytes)
        assert self._message is not None
        if self._outline is not None:
            raw = [view[start:stop] for start, stop in self._outline.raw]
            contents = Contents(self._data, self._outline.contents, charge)
            return decode_infer(self._message, nbytes, raw, signature, contents)
        assert self._fields is not None
        raw = [view[start:stop] for start, stop in self._fields.raw]
        self._message.id = self.id  # the fields that repeat are without it
        return decode_infer(self._message, nbytes, raw, signature)

    def request(self, nbytes: int) -> Call:
        """The request; raises `InvalidRequest`."""
        fields, template = self._fields, self._template
        if fields is None:
            assert self._message is not None
            return decode_infer(self._message, nbytes)
        if template is None:
            return self._reader.decode(self._message, self._data, fields, self.id, nbytes)
        data = self._data
        inputs: dict[str, Tensor] = {}
        for (name, datatype, dtype, shape, size), (start, stop) in zip(
            template.inputs, fields.raw, strict=False
        ):
            if datatype is not Datatype.BYTES and stop - start == size:
                array: Array = np.ndarray(shape, dtype, data, start)
                inputs[name] = Tensor(name, datatype, array)
            else:  # or for its message
                inputs[name] = Tensor.from_bytes(
                    name, datatype, shape, memoryview(data)[start:stop],
                    template.request.model_name, self.id,
                )  # fmt: skip
        known = template.request
        return Call(
            known.model_name, known.model_version, self.id, inputs, known.outputs,
            dict(known.parameters), known.priority, known.timeout, known.sequence_id,
            known.sequence_start, known.sequence_end, known.classes, nbytes,
        )  # fmt: skip


class InferReader:
    """Reads ModelInferRequest messages; remembers what repeats."""

    def __init__(self) -> None:
        self._templates: dict[bytes, _Template] = {}
        # By size, since messages that are laid out alike have the same.
        self._layouts: dict[int, list[tuple[Fields, _Template]]] = {}

    def read(self, data: Buffer) -> InferMessage:
        """The message in `data`, which must stay as it is; raises `InvalidRequest`."""
        for fields, template in self._layouts.get(len(data), ()):
            for start, stop, content in fields.fixed:
                if data[start:stop] != content:
                    break
            else:
                id = ""
                if fields.id_stop:
                    try:
                        id = str(data[fields.id_start : fields.id_stop], "utf-8")
                    except UnicodeDecodeError:
                        break  # protobuf has its own message for this
                return InferMessage(self, data, fields, template, None, id)
        return self._read_new(data)

    def fill(self, call: Call, data: Buffer) -> object | None:
        """Have `call` ask what a plain message does that is like an earlier one.

        What all that ask alike have in common; None, and a call that is to be left, for any other
        message: it is to be `read`. `data` must stay as it is.
        """
        for fields, template in self._layouts.get(len(data), ()):
            for start, stop, content in fields.fixed:
                if data[start:stop] != content:
                    break
            else:
                if not template.plain:
                    return None
                id = ""
                if fields.id_stop:
                    try:
                        id = str(data[fields.id_start : fields.id_stop], "utf-8")
                    except UnicodeDecodeError:
                        return None
                inputs: dict[str, Tensor] = {}
                for (name, datatype, dtype, shape, size), (start, stop) in zip(
                    template.inputs, fields.raw, strict=True
                ):
                    if stop - start != size:
                        return None
                    array: Array = np.ndarray(shape, dtype, data, start)
                    inputs[name] = new_tensor((name, datatype, array))
                known = template.request
                # `Call.ask`, which would be a call more for each request.
                call.model_name = known.model_name
                call.model_version = known.model_version
                call.id = id
                call.inputs = inputs
                call.outputs = known.outputs
                call.parameters = {}
                call.priority = known.priority
                call.timeout = known.timeout
                call.sequence_id = known.sequence_id
                call.sequence_start = known.sequence_start
                call.sequence_end = known.sequence_end
                call.classes = call.shared = call.raw = call.stages = call.held = None
                call.owner = NOBODY
                call.started = call.ended = False
                return template
        return None

    def decode(
        self,
        message: pb.ModelInferRequest | None,
        data: Buffer,
        fields: Fields,
        id: str,
        nbytes: int,
    ) -> Call:
        """The request of a message whose head is new, and the memory of it."""
        assert message is not None
        view = memoryview(data)
        raw = [view[start:stop] for start, stop in fields.raw]
        message.id = id  # the fields that repeat are without it
        request = decode_infer(message, nbytes, raw)
        plain = request.shared is None and len(raw) == len(message.inputs)
        if plain and len(fields.head) <= _REMEMBERED_SIZE:
            if len(self._templates) >= _REMEMBERED:
                self._templates.clear()
                self._layouts.clear()
            template = _Template(request, wants_empty_final(message))
            self._templates[fields.head] = template
            self._remember_layout(len(data), fields, template)
        return request

    def _read_new(self, data: Buffer) -> InferMessage:
        fields = walk(data)
        if fields is None:
            if len(data) > LONG:
                outlined = outline(data)
                message = parse_infer(outlined.head)
                return InferMessage(self, data, None, None, message, message.id, outlined)
            message = parse_infer(data)
            return InferMessage(self, data, None, None, message, message.id)
        try:
            id = str(data[fields.id_start : fields.id_stop], "utf-8")
        except UnicodeDecodeError:
            id_bytes = bytes(data[fields.id_start : fields.id_stop])
            # Which raises, in its own words.
            message = parse_infer(b"\x1a" + varint(len(id_bytes)) + id_bytes)
            return InferMessage(self, data, None, None, message, message.id)
        template = self._templates.get(fields.head)
        if template is None:
            return InferMessage(self, data, fields, None, parse_infer(fields.head), id)
        if len(template.inputs) != len(fields.raw):
            message = parse_infer(fields.head)
            return InferMessage(self, data, fields, None, message, id)
        self._remember_layout(len(data), fields, template)
        return InferMessage(self, data, fields, template, None, id)

    def _remember_layout(self, size: int, fields: Fields, template: _Template) -> None:
        if len(self._layouts) >= _REMEMBERED:
            self._layouts.clear()
        layouts = self._layouts.setdefault(size, [])
        layouts.insert(0, (fields, template))
        del layouts[_LAYOUTS:]


# --- responses


class InferWriter:
    """Writes ModelInferResponse messages; remembers what repeats."""

    def __init__(self) -> None:
        self._known: dict[object, list[bytes]] = {}

    def pieces(self, response: InferResponse) -> list[Buffer]:
        """The message, in pieces; large tensors are pointed at, not copied.

        Whoever gets the pieces must be done with them before an output's memory is written again.
        """
        outputs = response.outputs
        if len(outputs) == 1:
            [tensor] = outputs
            key: object = (
                response.model_name, response.model_version, tensor.name, tensor.datatype,
                tensor.array.shape,
            )  # fmt: skip
        else:
            key = (
                response.model_name,
                response.model_version,
                tuple((t.name, t.datatype, t.array.shape) for t in outputs),
            )
        heads = self._known.get(key)
        if heads is None:
            if len(self._known) >= _REMEMBERED:
                self._known.clear()
            heads = _heads(response.model_name, response.model_version, outputs)
            self._known[key] = heads
        pieces: list[Buffer] = []
        if response.id:
            id = response.id.encode()
            pieces.append(b"\x1a" + varint(len(id)) + id)
        if response.parameters:
            pieces.append(_parameters(response))
        if not outputs:
            pieces.append(heads[-1])
        for tensor, head in zip(outputs, heads, strict=False):
            if tensor.datatype is Datatype.BYTES:
                data = raw_bytes(tensor.array)
                pieces += (head, b"\x32" + varint(len(data)), data)
            elif tensor.array.nbytes <= COPIED:
                pieces += (head, tensor.array.tobytes())
            else:
                pieces += (head, raw_bytes(tensor.array))
        return pieces


class PlainWriter:
    """Writes plain answers of one model version: all outputs as they are declared, none of text."""

    __slots__ = ("_dtypes", "_heads", "_model", "_version")

    def __init__(self, signature: Signature, model: str, version: str) -> None:
        """`model` and `version` are as answers name them."""
        plain = all(spec.datatype is not Datatype.BYTES for spec in signature.outputs)
        # Of each output; none where answers cannot be plain.
        self._dtypes = [NUMPY[spec.datatype] for spec in signature.outputs] if plain else []
        self._heads: dict[object, dict[int, list[bytes]]] = {}  # by the shapes of the outputs
        self._model, self._version = model, version

    def pieces(self, batch: Computed, call: Call) -> list[Buffer] | None:
        """As `InferWriter.pieces`, of the answer to a call of `batch`; None if it is not plain.

        The bytes of all rows are taken at once, and kept as the `raws` of the batch: what comes
        before each tensor, by the number of rows, and its bytes with those of a row.
        """
        written = batch.raws
        if written is None:
            dtypes, tensors = self._dtypes, batch.tensors
            several = len(batch.calls) > 1
            raws: list[tuple[Buffer, int]] = []
            key: tuple[object, ...] = (several,)
            for (_, _, array), dtype in zip(tensors, dtypes, strict=False):
                size = array.nbytes
                if array.dtype is not dtype or (several and not size):
                    break
                raw = array.tobytes() if size <= COPIED else raw_bytes(array)
                raws.append((raw, size // batch.rows if several else 0))
                key += (array.shape[1:] if several else array.shape,)
            written = False
            if raws and len(raws) == len(tensors) == len(dtypes):
                heads = self._heads.get(key)
                if heads is None:
                    if len(self._heads) >= _REMEMBERED:
                        self._heads.clear()
                    heads = self._heads[key] = {}
                written = heads, raws
            batch.raws = written
        if not written:
            return None
        known, raws = written
        first, rows, id = call.first, call.rows, call.id
        before = known.get(rows)
        if before is None:
            if len(known) >= _REMEMBERED:
                known.clear()
            own = batch.response(call).outputs
            before = known[rows] = _heads(self._model, self._version, own)
        pieces: list[Buffer] = []
        if id:
            encoded = id.encode()
            pieces.append(b"\x1a" + varint(len(encoded)) + encoded)
        for head, (raw, row) in zip(before, raws, strict=True):
            pieces += (head, raw[first * row : (first + rows) * row] if row else raw)
        return pieces


def _heads(model: str, version: str, outputs: Sequence[Tensor]) -> list[bytes]:
    """What comes before each tensor: first all that is common, and the field's own tag."""
    message = pb.ModelInferResponse(model_name=model, model_version=version)
    tags: list[bytes] = []
    for tensor in outputs:
        message.outputs.add(
            name=tensor.name, datatype=tensor.datatype.value, shape=tensor.array.shape
        )
        fixed = tensor.datatype is not Datatype.BYTES
        tags.append(b"\x32" + varint(tensor.array.nbytes) if fixed else b"")
    common = message.SerializeToString()
    return [common + tags[0], *tags[1:]] if tags else [common]


def stream_response(pieces: list[Buffer]) -> list[Buffer]:
    """A ModelStreamInferResponse with a ModelInferResponse that is in pieces."""
    return [_STREAM_RESPONSE + varint(sum(map(len, pieces))), *pieces]


def stream_message(
    text: str, id: str, model: str, version: str, parameters: dict[str, bool]
) -> bytes:
    """A ModelStreamInferResponse without outputs; `text` is an error, if any."""
    message = pb.ModelStreamInferResponse(error_message=bounded(text))
    message.infer_response.id = id
    message.infer_response.model_name = model
    message.infer_response.model_version = version
    for name, value in parameters.items():
        set_parameter(message.infer_response, name, value)
    return message.SerializeToString()


def _parameters(response: InferResponse) -> bytes:
    message = pb.ModelInferResponse()
    for name, value in response.parameters.items():
        set_parameter(message, name, value)
    return message.SerializeToString()
