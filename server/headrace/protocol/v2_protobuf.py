"""V2 inference messages in protobuf, both directions, for the server and for clients of upstreams.

The large and varying part of a ModelInferRequest is `raw_input_contents`. So the top-level fields
are walked by hand, which suffices to find these and the id; protobuf parses the remaining head,
which is cached by its bytes, since clients repeat it. Messages with an unusual encoding are left to
protobuf altogether: both paths yield the same request, or the same error. Responses of upstreams
are decoded likewise, as views into the received bytes.

Encoding works the other way around: the common part of messages with the same names, datatypes and
shapes is serialised once, and the id and the raw tensors are added as separate buffers.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias, TypeVar

import numpy as np
from google.protobuf.message import DecodeError

from headrace.core.bytes_array import COPIED, BytesArray, wrong_strings
from headrace.core.call import (
    MAX_PARAMETERS,
    MAX_TENSORS,
    MAX_TEXT,
    NO_CONTEXT,
    NOBODY,
    Call,
    Computed,
    InferResponse,
    Parameter,
    RegionSlice,
    Shared,
    SharedInput,
)
from headrace.core.datatypes import BY_NAME, ITEM_SIZES, NUMPY, Datatype
from headrace.core.errors import InvalidRequest
from headrace.core.limits import Charge, uncharged
from headrace.core.signature import Signature, quoted
from headrace.core.tensors import (
    Array,
    Buffer,
    Tensor,
    TensorArray,
    byte_size_mismatch,
    concatenated,
    element_count,
    new_tensor,
    raw_bytes,
)
from headrace.core.texts import bounded
from headrace.protocol.classification import check_class_count
from headrace.protocol.elements import charge_objects, tensor_from_values
from headrace.protocol.parameters import (
    ALL_OUTPUTS,
    PARAMETERS,
    REGION,
    call_options,
    check_text,
    shared_input,
    shared_output,
    split_parameters,
    too_long,
    too_many_parameters,
)
from headrace.protocol.pb import grpc_service_pb2 as pb
from headrace.protocol.protobuf_contents import (
    CONTENTS,
    Contents,
    Outline,
    Span,
    check_fields,
    contents_field,
    outline,
    read_varint,
    tensor_from_contents,
    varint,
)
from headrace.protocol.status import BEGUN_PARAMETER

LONG = 64 << 10  # bytes of a message above which a scan before parsing pays
_USUAL_FIELDS = 1024  # of a message that is worth remembering
EMPTY_FINAL_RESPONSE = "triton_enable_empty_final_response"
_TRANSPORT = frozenset({EMPTY_FINAL_RESPONSE, "binary_data_output", ALL_OUTPUTS})
_OF_SHARED = frozenset({*PARAMETERS, "classification"})
_NOTHING: dict[str, Any] = {}


def parse_infer(data: Buffer, counted: bool = False) -> pb.ModelInferRequest:
    """Parse the message in `data`, whose fields are `counted`; raises `InvalidRequest`."""
    if len(data) > LONG and not counted:
        check_fields(data)
    try:
        return pb.ModelInferRequest.FromString(data)  # type: ignore[arg-type]  # any buffer will do
    except DecodeError as error:
        raise InvalidRequest(f"not a valid ModelInferRequest message: {error}") from None


def decode_infer(
    message: pb.ModelInferRequest,
    nbytes: int,
    raw: Sequence[Buffer] | None = None,
    signature: Signature | None = None,
    contents: Contents | None = None,
) -> Call:
    """Convert a message of `nbytes` bytes to a request; raises `InvalidRequest`.

    `raw` are its raw contents if the message was parsed without them, `contents` the typed contents
    of each input likewise. Large inputs that do not fit `signature`, if given, are refused before
    their data is decoded; the complete check is the caller's.
    """
    check_text("the id of a request", message.id)
    parameters = {name: _value(name, value) for name, value in message.parameters.items()}
    reserved, custom = split_parameters(parameters, _TRANSPORT)
    if type(parameters.get(EMPTY_FINAL_RESPONSE, False)) is not bool:
        raise InvalidRequest(
            f"invalid value type for '{EMPTY_FINAL_RESPONSE}' parameter, expected bool_param"
        )
    if len(message.inputs) > MAX_TENSORS:
        raise InvalidRequest(f"a request may have {MAX_TENSORS} inputs, got {len(message.inputs)}")
    tensors: dict[str, Tensor] = {}
    shared: dict[str, SharedInput] = {}
    if raw is None:
        raw = message.raw_input_contents
    for number, item in enumerate(message.inputs):
        name = item.name
        if name in tensors or name in shared:
            raise InvalidRequest(f"input '{name}' already exists in request")
        datatype = BY_NAME.get(item.datatype)
        if datatype is None:
            raise InvalidRequest(
                f"input '{name}' has the unknown datatype '{item.datatype}',"
                f" expected one of {quoted(BY_NAME)}"
            )
        if len(item.parameters) > MAX_PARAMETERS:
            raise too_many_parameters(f"input '{name}'", len(item.parameters))
        filled = item.HasField("contents") if contents is None else bool(contents.spans[number])
        if REGION in item.parameters:
            if filled:
                raise InvalidRequest(
                    "unexpected 'content' provided when using shared memory for input tensor"
                    f" '{name}' for model '{message.model_name}'"
                )
            shared[name] = shared_input(
                name, datatype, item.shape, _values(item.parameters), message.model_name,
                message.id,
            )  # fmt: skip
            continue
        if not raw:
            if contents is None:
                tensors[name] = _from_contents(item, datatype, message.model_name, message.id)
                continue
            if signature is not None:
                signature.check_tensor(name, datatype, item.shape)
            tensors[name] = tensor_from_contents(
                name, datatype, list(item.shape), contents.data, contents.spans[number],
                message.model_name, message.id, contents.charge,
            )  # fmt: skip
            continue
        if filled:
            raise InvalidRequest(
                f"contents field must not be specified when using raw_input_contents for '{name}'"
                f" for model '{message.model_name}'"
            )
        index = len(tensors)  # inputs in shared memory have no entry
        if index >= len(raw):
            raise InvalidRequest(
                f"unable to find data for input tensor '{name}' for model '{message.model_name}'"
                " in request. Expected an entry in raw_input_contents for each input that is not in"
                f" shared memory, of {len(message.inputs)} inputs, got {len(raw)}"
            )
        if datatype is Datatype.BYTES and signature is not None and len(raw[index]) > LONG:
            signature.check_tensor(name, datatype, item.shape)
        tensors[name] = Tensor.from_bytes(
            name, datatype, list(item.shape), raw[index], message.model_name, message.id
        )
    outputs, classes, places = _outputs(message)
    if parameters.get(ALL_OUTPUTS) is True:
        outputs = ()
    options = call_options(reserved, classes, Shared(shared, places) if shared or places else None)
    return Call(
        message.model_name, message.model_version, message.id, tensors, outputs, custom, options,
        nbytes,
    )  # fmt: skip


def wants_empty_final(message: pb.ModelInferRequest) -> bool:
    """True if the client wants an empty final response; call after `decode_infer`."""
    return EMPTY_FINAL_RESPONSE in message.parameters and bool(
        message.parameters[EMPTY_FINAL_RESPONSE].bool_param
    )


def set_parameter(
    message: pb.ModelInferRequest | pb.ModelInferResponse, name: str, value: Parameter
) -> None:
    """Set a parameter of a message in the field of its type."""
    parameter = message.parameters[name]
    if isinstance(value, bool):  # before int, since bool is a subclass
        parameter.bool_param = value
    elif isinstance(value, int):
        if value >> 63 > 0:  # possible in JSON
            parameter.uint64_param = value
        else:
            parameter.int64_param = value
    elif isinstance(value, float):
        parameter.double_param = value
    else:
        parameter.string_param = value


def parameter_values(parameters: Mapping[str, pb.InferParameter]) -> dict[str, Parameter]:
    """Parameters of a message as Python values; those without a value are left out."""
    found: dict[str, Parameter] = {}
    for name, parameter in parameters.items():
        if choice := parameter.WhichOneof("parameter_choice"):
            found[name] = getattr(parameter, choice)
    return found


def _value(name: str, parameter: pb.InferParameter) -> Any:
    choice = parameter.WhichOneof("parameter_choice")
    if choice is None or (choice == "uint64_param" and name != "priority"):
        raise InvalidRequest(
            f"invalid value type for '{name}' parameter,"
            " expected int64_param, bool_param, string_param or double_param"
        )
    value = getattr(parameter, choice)
    if name == "sequence_id" and type(value) is int and value < 0:
        value += 1 << 64  # an unsigned 64-bit number travels as a signed one
    return value


def _from_contents(
    item: pb.ModelInferRequest.InferInputTensor, datatype: Datatype, model: str, request_id: str
) -> Tensor:
    name = item.name
    expected = contents_field(name, datatype, model)
    filled = [field.name for field, _ in item.contents.ListFields()]
    if any(field != expected for field in filled):
        raise InvalidRequest(
            f"unexpected explicit tensor data for input tensor '{name}' for model '{model}' of type"
            f" '{datatype}', expected {expected}, got {' and '.join(filled)}"
        )
    values: Sequence[Any] = getattr(item.contents, expected)
    shape = list(item.shape)
    if len(values) != (count := element_count(name, shape)):
        if datatype is Datatype.BYTES:
            text = f"expected {count} string elements {{}}, got {len(values)}"
            raise wrong_strings(text, name, model, request_id)
        got = len(values) * ITEM_SIZES[datatype]
        raise byte_size_mismatch(name, datatype, shape, got, model, request_id)
    return tensor_from_values(name, datatype, shape, values)


def _outputs(
    message: pb.ModelInferRequest,
) -> tuple[tuple[str, ...], dict[str, int], dict[str, RegionSlice]]:
    """Return the wanted outputs, class counts, and places of outputs in shared memory."""
    classes: dict[str, int] = {}
    shared: dict[str, RegionSlice] = {}
    if len(message.outputs) > MAX_TENSORS:
        raise InvalidRequest(
            f"a request may name {MAX_TENSORS} outputs, got {len(message.outputs)}"
        )
    names: dict[str, None] = {}
    for item in message.outputs:
        if item.name in names:
            raise InvalidRequest(f"output '{item.name}' already exists in request")
        if REGION in item.parameters:
            shared[item.name] = shared_output(item.name, _values(item.parameters))
        elif "classification" in item.parameters:
            count = _value("classification", item.parameters["classification"])
            classes[item.name] = check_class_count(item.name, count)
        if len(item.parameters) > MAX_PARAMETERS:
            raise too_many_parameters(f"output '{item.name}'", len(item.parameters))
        names[item.name] = None
    return tuple(names), classes, shared


def _values(parameters: Mapping[str, pb.InferParameter]) -> dict[str, Any]:
    """The parameters of a tensor that concern shared memory."""
    return {n: _value(n, given) for n, given in parameters.items() if n in _OF_SHARED}


# Tags of bytes fields: the field's number, and wire type 2. Requests and responses share those for
# the id, but not for raw tensors.
_ID, RAW_INPUT, _RAW_OUTPUT = 0x1A, 0x3A, 0x32
_MODEL_NAME = 0x0A
_LONG_VARINT = 0x80  # first byte from which on a varint has further ones
_OTHERS = frozenset({_MODEL_NAME, 0x12, 0x22, 0x2A, 0x32})  # model name and version, ..., outputs
_RAW_INPUT_TAG = bytes((RAW_INPUT,))
_STREAM_RESPONSE = 0x12  # infer_response of a ModelStreamInferResponse
_REMEMBERED = 256  # cached heads, and message sizes
_REMEMBERED_SIZE = 4096  # bytes of a cached head
_LAYOUTS = 4  # cached layouts per message size
_LONGEST = 1 << 31  # bytes, more than any field can have

K = TypeVar("K")
V = TypeVar("V")


class _Memory(dict[K, V]):
    """A small cache, which is cleared when it is full."""

    def keep(self, key: K, value: V) -> V:
        if len(self) >= _REMEMBERED:
            self.clear()
        self[key] = value
        return value


class Fields:
    """Layout of a message: the positions of its id and raw tensors, and all other bytes.

    `fixed` is everything else with its positions, as (start, stop, bytes); set by `lay_out`.
    """

    __slots__ = ("fixed", "head", "id_start", "id_stop", "raw")

    def __init__(self) -> None:
        self.head = b""
        self.id_start = self.id_stop = 0
        self.raw: list[Span] = []
        self.fixed: list[tuple[int, int, bytes]] = []

    def lay_out(self, data: Buffer) -> None:
        """Extract the fixed part of the message."""
        spans = self.raw
        if self.id_stop:
            spans = sorted([*spans, (self.id_start, self.id_stop)])
        stops, starts = [0, *(stop for _, stop in spans)], [*(at for at, _ in spans), len(data)]
        self.fixed = [
            (stop, start, bytes(data[stop:start]))
            for stop, start in zip(stops, starts, strict=True)
            if stop < start
        ]


def walk(data: Buffer, raw: int = RAW_INPUT, longest: int = LONG) -> Fields | None:
    """Walk the top-level fields of a message whose raw tensors have the tag `raw`.

    None if a field is longer than `longest`, there are unusually many, or the encoding is unusual.
    """
    size = len(data)
    fields = Fields()
    head: list[Buffer] = []
    position = kept = count = 0
    while position < size:
        count += 1
        if count > _USUAL_FIELDS:
            return None
        tag = data[position]
        start = position + 2
        if start > size:
            return None
        length = data[position + 1]
        if length > 127:
            length, start = read_varint(data, position + 1, 5)
            if not start:
                return None
        stop = start + length
        if stop > size:
            return None
        if tag in (raw, _ID):
            if kept < position:
                head.append(data[kept:position])
            kept = stop
            if tag == raw:
                fields.raw.append((start, stop))
            elif fields.id_stop:  # the last id counts, but each has to be valid text
                return None
            else:
                fields.id_start, fields.id_stop = start, stop
        elif tag not in _OTHERS or length > longest:
            return None
        position = stop
    if kept < size:
        head.append(data[kept:])
    fields.head = b"".join(head)
    return fields


class _Template:
    """The common part of requests with the same head: all but the id and the tensors' data."""

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
        # True if only data of fixed-size datatypes varies, and nothing but model outputs is
        # requested.
        self.plain = (
            request.options.classes is None
            and not request.parameters
            and Datatype.BYTES not in {i[1] for i in self.inputs}
        )
        self.request = request.like(inputs={}, parameters=dict(request.parameters))


class InferMessage:
    """A message whose model, version and id are known.

    It either matches an earlier one, whose `template` is set, or protobuf has parsed everything
    except the tensors' data.
    """

    __slots__ = (
        "_contents", "_data", "_fields", "_message", "_raw", "_reader", "_template", "id", "long",
        "model_name", "model_version", "parsed",
    )  # fmt: skip

    def __init__(
        self,
        reader: "InferReader",
        data: Buffer,
        id: str,
        fields: Fields | None = None,
        template: _Template | None = None,
        message: pb.ModelInferRequest | None = None,
        outline: Outline | None = None,
    ) -> None:
        """`long` marks messages that are slow to decode; these need `request_long`.

        `parsed` bytes of it have been copied meanwhile: names, shapes, parameters.
        """
        self._reader = reader
        self._data = data
        self._fields = fields
        self._template = template
        self._message = message
        found: Fields | Outline | None = fields or outline
        self._raw = None if found is None else found.raw
        self._contents = None if outline is None else outline.contents
        self.parsed = 0 if message is None or found is None else len(found.head)
        self.id = id
        source: Any = template.request if template is not None else message
        self.model_name: str = source.model_name
        self.model_version: str = source.model_version
        self.long = len(data) > LONG and (self._contents is not None or self._has_texts())

    def _has_texts(self) -> bool:
        if self._template is not None:
            return any(given[1] is Datatype.BYTES for given in self._template.inputs)
        assert self._message is not None
        return any(item.datatype == Datatype.BYTES for item in self._message.inputs)

    @property
    def empty_final(self) -> bool:
        """True if the client wants an empty final response; valid after `request`."""
        if self._template is not None:
            return self._template.empty_final
        assert self._message is not None
        return wants_empty_final(self._message)

    @property
    def alike(self) -> object | None:
        """The template that `InferReader.fill` returns for such messages, if it handles them."""
        template = self._template
        return template if template is not None and template.plain else None

    def request_long(
        self, nbytes: int, signature: Signature | None, charge: Charge, most_objects: int
    ) -> Call:
        """Decode the request, on any thread; inputs are checked against `signature` first.

        `charge` is called with the decoded size of data, and may raise; `most_objects` as in
        `charge_objects`.
        """
        template = self._template
        if template is None:
            request = self._decode(nbytes, signature, charge)
        else:
            if signature is not None:
                for name, datatype, _, shape, _ in template.inputs:
                    signature.check_tensor(name, datatype, shape)
            request = self._repeat(template, nbytes)
        charge_objects(request.inputs.values(), charge, most_objects)
        return request

    def request(self, nbytes: int) -> Call:
        """Decode the request; raises `InvalidRequest`."""
        if self._template is not None:
            return self._repeat(self._template, nbytes)
        request = self._decode(nbytes)
        if self._fields is not None:
            assert self._message is not None
            self._reader.remember(self._message, request, self._fields, self._data)
        return request

    def _decode(
        self, nbytes: int, signature: Signature | None = None, charge: Charge = uncharged
    ) -> Call:
        assert self._message is not None
        self._message.id = self.id  # the cached fields are without it
        view, raw, contents = memoryview(self._data), None, None
        if self._raw is not None:
            raw = [view[start:stop] for start, stop in self._raw]
        if self._contents is not None:
            contents = Contents(self._data, self._contents, charge)
        return decode_infer(self._message, nbytes, raw, signature, contents)

    def _repeat(self, template: _Template, nbytes: int) -> Call:
        """Build the request of a message that matches an earlier one; see `InferReader.fill`."""
        assert self._raw is not None
        known, data = template.request, self._data
        inputs: dict[str, Tensor] = {}
        for (name, datatype, dtype, shape, size), (start, stop) in zip(
            template.inputs, self._raw, strict=False
        ):
            if datatype is not Datatype.BYTES and stop - start == size:
                array: Array = np.ndarray(shape, dtype, data, start)
                inputs[name] = Tensor(name, datatype, array)
            else:  # also for its message
                raw = memoryview(data)[start:stop]
                inputs[name] = Tensor.from_bytes(
                    name, datatype, shape, raw, known.model_name, self.id
                )
        return Call(
            known.model_name, known.model_version, self.id, inputs, known.outputs,
            dict(known.parameters), known.options, nbytes,
        )  # fmt: skip


def first_model(data: Buffer) -> str:
    """The model's name if a ModelInferRequest begins with it, as nearly all do; else "".

    A later field may replace it, so that the message has to be read before the name is relied upon.
    """
    size = data[1] if len(data) > 1 and data[0] == _MODEL_NAME else 0
    if size >= _LONG_VARINT:
        return ""
    return str(data[2 : 2 + size], "utf-8", "replace")


class InferReader:
    """Decodes ModelInferRequest messages; caches the parts that repeat."""

    def __init__(self) -> None:
        self._templates: _Memory[bytes, _Template] = _Memory()
        # By size, since messages with the same layout have the same size.
        self._layouts: _Memory[int, list[tuple[Fields, _Template]]] = _Memory()

    def read(self, data: Buffer) -> InferMessage:
        """Parse the message in `data`, which must not change later; raises `InvalidRequest`."""
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
                        break  # protobuf has its own error text for this
                return InferMessage(self, data, id, fields, template)
        return self._read_new(data)

    def like(self, size: int, first: Buffer) -> tuple[tuple[str, str], int] | None:
        """Model and version of a message of `size` bytes, and the position of its first tensor.

        It is taken for an earlier message with the same `first` bytes, which have to reach up to
        the tensor; None if there is none.
        """
        for fields, template in self._layouts.get(size, ()):
            begin = fields.raw[0][0]
            if len(first) < begin:
                continue
            for start, stop, content in fields.fixed:
                if start < begin and first[start:stop] != content:
                    break
            else:
                return (template.request.model_name, template.request.model_version), begin
        return None

    def fill(self, call: Call, data: Buffer) -> object | None:
        """Fill `call` from a plain message that matches an earlier one.

        Returns the template shared by all such messages. None means any other message: `call` must
        be discarded and the message `read`. `data` must not change afterwards.
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
                # Inlined `Call.ask`, to save a Python call per request.
                call.model_name = known.model_name
                call.model_version = known.model_version
                call.id = id
                call.inputs = inputs
                call.outputs = known.outputs
                call.parameters = {}
                call.options = known.options
                call.stages = call.held = None
                call.context = NO_CONTEXT
                call.owner = NOBODY
                call.started = call.ended = False
                return template
        return None

    def remember(
        self, message: pb.ModelInferRequest, request: Call, fields: Fields, data: Buffer
    ) -> None:
        """Cache the head of a request's message, and its layout."""
        plain = request.options.shared is None and len(fields.raw) == len(message.inputs)
        if plain and len(fields.head) <= _REMEMBERED_SIZE:
            template = _Template(request, wants_empty_final(message))
            self._templates.keep(fields.head, template)
            self._remember_layout(data, fields, template)

    def _read_new(self, data: Buffer) -> InferMessage:
        fields = walk(data)
        if fields is None or not fields.raw:
            outlined = outline(data) if len(data) > LONG else None
            message = parse_infer(data) if outlined is None else parse_infer(outlined.head, True)
            return InferMessage(self, data, message.id, message=message, outline=outlined)
        if (size := fields.id_stop - fields.id_start) > MAX_TEXT:
            raise too_long("the id of a request", size)
        try:
            id = str(data[fields.id_start : fields.id_stop], "utf-8")
        except UnicodeDecodeError:
            id_bytes = bytes(data[fields.id_start : fields.id_stop])
            parse_infer(b"\x1a" + varint(len(id_bytes)) + id_bytes)  # raises protobuf's own error
            raise
        template = self._templates.get(fields.head)
        if template is None or len(template.inputs) != len(fields.raw):
            return InferMessage(self, data, id, fields, message=parse_infer(fields.head))
        self._remember_layout(data, fields, template)
        return InferMessage(self, data, id, fields, template)

    def _remember_layout(self, data: Buffer, fields: Fields, template: _Template) -> None:
        fields.lay_out(data)
        layouts = self._layouts.get(len(data)) or self._layouts.keep(len(data), [])
        layouts.insert(0, (fields, template))
        del layouts[_LAYOUTS:]


# --- responses


class InferWriter:
    """Encodes ModelInferResponse messages; caches the parts that repeat."""

    def __init__(self) -> None:
        self._known: _Memory[object, list[bytes]] = _Memory()

    def pieces(self, response: InferResponse) -> list[Buffer]:
        """Return the message in pieces; large tensors are views, not copies.

        The pieces must have been consumed before an output's memory is written again.
        """
        outputs = response.outputs
        key = (
            response.model_name,
            response.model_version,
            *[(tensor.name, tensor.datatype, tensor.array.shape) for tensor in outputs],
        )
        heads = self._known.get(key)
        if heads is None:
            heads = _heads(response.model_name, response.model_version, outputs)
            self._known.keep(key, heads)
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
    """Encodes plain answers of one model version: all outputs as declared, no BYTES."""

    __slots__ = ("_dtypes", "_heads", "_model", "_version")

    def __init__(self, signature: Signature, model: str, version: str) -> None:
        """`model` and `version` are as in answers."""
        plain = all(spec.datatype is not Datatype.BYTES for spec in signature.outputs)
        # Per output; empty if answers cannot be plain.
        self._dtypes = [NUMPY[spec.datatype] for spec in signature.outputs] if plain else []
        # By the outputs' shapes; then by the rows of a call, with its outputs if it names any.
        self._heads: _Memory[object, _Memory[Any, Any]] = _Memory()
        self._model, self._version = model, version

    def pieces(self, batch: Computed, call: Call) -> list[Buffer] | None:
        """`InferWriter.pieces` for a call of `batch`; None if its answer is not plain.

        The bytes of all rows are taken at once, and kept in the batch: the bytes before each
        tensor, by rows, and its data with the size of a row.
        """
        written: Any = batch.encoded.get(self)
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
                    heads = self._heads.keep(key, _Memory())
                written = heads, raws
            batch.encoded[self] = written
        if not written:
            return None
        known, raws = written
        first, rows, id = call.first, call.rows, call.id
        if call.outputs:
            before, raws = self._named(batch, call, known, raws)
        elif (before := known.get(rows)) is None:
            own = batch.response(call).outputs
            before = known.keep(rows, _heads(self._model, self._version, own))
        pieces: list[Buffer] = []
        if id:
            encoded = id.encode()
            pieces.append(b"\x1a" + varint(len(encoded)) + encoded)
        for head, (raw, row) in zip(before, raws, strict=True):
            pieces += (head, raw[first * row : (first + rows) * row] if row else raw)
        return pieces

    def _named(
        self, batch: Computed, call: Call, known: _Memory[Any, Any], raws: list[tuple[Buffer, int]]
    ) -> tuple[list[bytes], list[tuple[Buffer, int]]]:
        """The bytes before each tensor that `call` has named, and the data of these.

        The batch has the outputs that any of its calls wants, and this one may have named fewer.
        """
        key = call.rows, call.outputs
        if (found := known.get(key)) is None:
            own = batch.response(call).outputs
            names = {tensor.name for tensor in own}
            which = [n for n, tensor in enumerate(batch.tensors) if tensor.name in names]
            found = known.keep(key, (which, _heads(self._model, self._version, own)))
        which, before = found
        return before, [raws[n] for n in which]


def _heads(model: str, version: str, outputs: Sequence[Tensor]) -> list[bytes]:
    """The bytes before each tensor: first the common head, and the tag of the raw field."""
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
    """A ModelStreamInferResponse around the pieces of a ModelInferResponse."""
    return [bytes((_STREAM_RESPONSE,)) + varint(sum(map(len, pieces))), *pieces]


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


class RemoteInput(NamedTuple):
    """One input of a call: `parts` are concatenated along axis 0 of `shape`."""

    name: str
    datatype: Datatype
    shape: tuple[int, ...]
    parts: Sequence[TensorArray]

    def array(self) -> Array:
        """The concatenated rows."""
        parts = self.parts
        whole = parts[0] if len(parts) == 1 else concatenated([part.ravel() for part in parts])
        return np.asarray(whole).reshape(self.shape)


class RemoteAnswer(NamedTuple):
    """A decoded response: outputs by name, parameters, the request's id, and the model."""

    outputs: Mapping[str, TensorArray]
    parameters: dict[str, Parameter]
    id: str = ""
    model: str = ""
    version: str = ""


class RemoteMessages:
    """Encodes requests for one model version of an upstream."""

    def __init__(self, model: str, version: str) -> None:
        self._model = model
        self._version = version
        # The bytes up to the first input's data, and before the other inputs' data: nothing if its
        # size does not follow from the shape.
        self._heads: _Memory[object, tuple[bytes, Sequence[bytes]]] = _Memory()

    def request(
        self,
        inputs: Sequence[RemoteInput],
        outputs: Sequence[str],
        parameters: Mapping[str, Parameter],
        id: str = "",
        classes: Mapping[str, int] = _NOTHING,
    ) -> list[Buffer]:
        """Return a ModelInferRequest; outputs are requested as raw bytes. Its tensors are views.

        For outputs in `classes`, only the highest classes are requested.
        """
        key = (tuple(outputs), *classes.items(), *[(i.name, i.datatype, i.shape) for i in inputs])
        known = self._heads.get(key)
        start, prefixes = known or self._remember(key, inputs, outputs, classes)
        pieces: list[Buffer] = [start]
        if id or parameters:
            own = pb.ModelInferRequest(id=id)
            write_parameters(own, parameters)
            pieces.append(own.SerializeToString())
        for item, prefix in zip(inputs, prefixes, strict=True):
            if prefix:
                pieces.append(prefix)
                pieces += [raw_bytes(part) for part in item.parts]
            else:
                data = [raw_bytes(part) for part in item.parts]
                pieces += (_RAW_INPUT_TAG + varint(sum(map(len, data))), *data)
        return pieces

    def _remember(
        self,
        key: object,
        inputs: Sequence[RemoteInput],
        outputs: Sequence[str],
        classes: Mapping[str, int],
    ) -> tuple[bytes, Sequence[bytes]]:
        message = pb.ModelInferRequest(model_name=self._model, model_version=self._version)
        prefixes = []
        for item in inputs:
            message.inputs.add(name=item.name, datatype=item.datatype.value, shape=item.shape)
            prefix = b""
            if item.datatype is not Datatype.BYTES:
                prefix = _RAW_INPUT_TAG + varint(math.prod(item.shape) * ITEM_SIZES[item.datatype])
            prefixes.append(prefix)
        for name in outputs:
            wanted = message.outputs.add(name=name)
            if name in classes:
                wanted.parameters["classification"].int64_param = classes[name]
        return self._heads.keep(key, (message.SerializeToString(), prefixes))


def write_parameters(message: pb.ModelInferRequest, parameters: Mapping[str, Parameter]) -> None:
    """Set the parameters of a request in its message."""
    for name, value in parameters.items():
        if name == "sequence_id" and isinstance(value, int) and value >> 63 > 0:
            value -= 1 << 64  # an unsigned 64-bit number travels as a signed one
        set_parameter(message, name, value)


class _Known(NamedTuple):
    """The outputs of responses with one head: name, datatype, shape and size in bytes of each.

    The size is -1 if it does not follow from the shape. `inline` means that data is in the head
    itself instead of the raw contents.
    """

    outputs: Sequence[tuple[str, Datatype, tuple[int, ...], int]]
    parameters: dict[str, Parameter]
    inline: Mapping[str, TensorArray] | None
    model: str
    version: str


class AnswerReader:
    """Decodes ModelInferResponse messages; a known head is not parsed again."""

    def __init__(self) -> None:
        self._known: _Memory[bytes, _Known] = _Memory()

    def read(self, data: Buffer, shared: Mapping[str, memoryview] | None = None) -> RemoteAnswer:
        """Decode `data`; the tensors are views into it. Raises `InvalidRequest`.

        An output in `shared` is a view of that memory, unless the response has its data.
        """
        fields = walk(data, _RAW_OUTPUT, _LONGEST)
        if fields is None:  # an unusual encoding, or no such message
            data = _rewritten(data)
            fields = walk(data, _RAW_OUTPUT, _LONGEST)
            if fields is None:
                raise InvalidRequest("not a ModelInferResponse: it has too many fields")
        head, raw = fields.head, fields.raw
        id = str(data[fields.id_start : fields.id_stop], "utf-8", "replace")
        known = self._known.get(head)
        if known is None:
            known = _read_head(head, bool(raw))
            if len(head) <= _REMEMBERED_SIZE:
                self._known.keep(head, known)
        outputs: dict[str, TensorArray] = {}
        if known.inline is not None:
            if raw:
                raise InvalidRequest("outputs have both typed and raw contents")
            outputs.update(known.inline)
        elif len(raw) != len(known.outputs):
            raise InvalidRequest(f"{len(known.outputs)} outputs, but {len(raw)} raw contents")
        else:
            for (name, datatype, shape, nbytes), (start, stop) in zip(
                known.outputs, raw, strict=True
            ):
                if stop - start == nbytes:
                    outputs[name] = np.ndarray(shape, NUMPY[datatype], data, start)
                elif shared and name in shared and start == stop and nbytes > 0:
                    raw_output = shared[name][:nbytes]
                    outputs[name] = Tensor.from_bytes(name, datatype, shape, raw_output).array
                else:
                    raw_output = memoryview(data)[start:stop]  # an invalid range has its own error
                    outputs[name] = Tensor.from_bytes(name, datatype, shape, raw_output).array
        return RemoteAnswer(outputs, dict(known.parameters), id, known.model, known.version)


class StreamError(NamedTuple):
    """An error in a stream; `begun` is the server's word on whether its model has begun it."""

    text: str
    begun: bool | None


def streamed_answer(data: Buffer) -> Buffer | StreamError:
    """The response in a ModelStreamInferResponse, or its error; raises `InvalidRequest`."""
    if len(data) > 1 and data[0] == _STREAM_RESPONSE:
        length, start = read_varint(data, 1)
        if start and start + length == len(data):  # the usual case: nothing else is in it
            return data[start:]
    try:
        message = pb.ModelStreamInferResponse.FromString(bytes(data))
    except DecodeError as error:
        raise InvalidRequest(f"not a ModelStreamInferResponse: {error}") from None
    if not message.error_message:
        return message.infer_response.SerializeToString()
    parameters = message.infer_response.parameters
    told = parameters[BEGUN_PARAMETER].bool_param if BEGUN_PARAMETER in parameters else None
    return StreamError(message.error_message, told)


def _read_head(head: bytes, raw: bool) -> _Known:
    """Parse a response without its raw contents; raises `InvalidRequest`."""
    message = _parsed(head)
    outputs = []
    for item in message.outputs:
        datatype = BY_NAME.get(item.datatype)
        if datatype is None:
            raise InvalidRequest(f"output '{item.name}' has the unknown datatype {item.datatype!r}")
        shape = tuple(item.shape)
        count = element_count(item.name, shape)
        size = -1 if datatype is Datatype.BYTES else count * ITEM_SIZES[datatype]
        outputs.append((item.name, datatype, shape, size))
    inline: dict[str, TensorArray] | None = None
    if outputs and not raw:
        inline = {}
        for item, (name, datatype, shape, _) in zip(message.outputs, outputs, strict=True):
            field = CONTENTS.get(datatype)  # some datatypes have raw contents only
            values = [] if field is None else list(getattr(item.contents, field))
            if len(values) != element_count(name, shape):
                raise InvalidRequest(f"output '{name}' has {len(values)} values")
            array = tensor_from_values(name, datatype, list(shape), values).array
            if not isinstance(array, BytesArray):
                array.flags.writeable = False  # it may be shared
            inline[name] = array
    return _Known(
        outputs, parameter_values(message.parameters), inline, message.model_name,
        message.model_version,
    )  # fmt: skip


def _rewritten(data: Buffer) -> bytes:
    """Re-encode a response by protobuf; raises `InvalidRequest`."""
    message = _parsed(data)
    message.DiscardUnknownFields()
    return message.SerializeToString()


def _parsed(data: Buffer) -> pb.ModelInferResponse:
    try:
        return pb.ModelInferResponse.FromString(data)  # type: ignore[arg-type]  # any buffer will do
    except DecodeError as error:
        raise InvalidRequest(f"not a ModelInferResponse: {error}") from None


_REGION, _OFFSET, _SIZE = PARAMETERS
_Tensor: TypeAlias = (
    pb.ModelInferRequest.InferInputTensor | pb.ModelInferRequest.InferRequestedOutputTensor
)


def shared_request(
    model: str,
    version: str,
    inputs: Sequence[RemoteInput],
    outputs: Sequence[str],
    parameters: Mapping[str, Parameter],
    id: str,
    places: Mapping[str, RegionSlice],
    rooms: Mapping[str, RegionSlice],
) -> list[Buffer]:
    """A ModelInferRequest with inputs at `places` and outputs to be written to `rooms`.

    All other tensors are in the message, as views.
    """
    message = pb.ModelInferRequest(model_name=model, model_version=version, id=id)
    pieces: list[Buffer] = []
    for item in inputs:
        tensor = message.inputs.add(name=item.name, datatype=item.datatype.value, shape=item.shape)
        place = places.get(item.name)
        if place is not None:
            _point(tensor, place)
            continue
        data = [raw_bytes(part) for part in item.parts]
        pieces += (_RAW_INPUT_TAG + varint(sum(map(len, data))), *data)
    for name in outputs:
        wanted = message.outputs.add(name=name)
        if name in rooms:
            _point(wanted, rooms[name])
    write_parameters(message, parameters)
    return [message.SerializeToString(), *pieces]


def register_request(name: str, key: str, size: int) -> bytes:
    """A message that makes a server open a whole region."""
    message = pb.SystemSharedMemoryRegisterRequest(name=name, key=key, offset=0, byte_size=size)
    return message.SerializeToString()


def unregister_request(name: str) -> bytes:
    """A message that makes a server close a region."""
    return pb.SystemSharedMemoryUnregisterRequest(name=name).SerializeToString()


def registered(data: Buffer) -> Mapping[str, str]:
    """The keys of a server's registered regions by name; raises `DecodeError`."""
    message = pb.SystemSharedMemoryStatusResponse.FromString(bytes(data))
    return {name: region.key for name, region in message.regions.items()}


def _point(tensor: _Tensor, place: RegionSlice) -> None:
    tensor.parameters[_REGION].string_param = place.region
    tensor.parameters[_SIZE].int64_param = place.byte_size
    if place.offset:
        tensor.parameters[_OFFSET].int64_param = place.offset
