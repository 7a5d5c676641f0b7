"""Fast path for plain V2 JSON: inputs and answers of numbers, each decoded or encoded in one step.

A plain body has an optional id and, at its end, all inputs of the model, each with its name,
datatype, shape and a flat list of numbers, like nearly every request over HTTP. A plain answer has
all outputs, as finite numbers or booleans. For anything else, and for every error, `PlainJson`
returns None, and `decode_infer` with `Signature.check`, or `ResponseForm.encode`, start over: rules
and error texts are theirs. Nothing is accepted here that they refuse, and the resulting values and
bytes are the same.

Clients repeat all of a body but the id and the numbers. So the text before the numbers of a single
input is recognised by its bytes after it was parsed once, and only the list of numbers is parsed.

Sans-I/O; not thread-safe.
"""

import math
from collections.abc import Callable, Sequence
from struct import Struct
from struct import error as StructError
from typing import Any

import numpy as np
import orjson

from headrace.core.call import MAX_TENSORS, MAX_TEXT, SHORT_TEXT
from headrace.core.datatypes import NUMPY, Datatype
from headrace.core.errors import InvalidRequest
from headrace.core.signature import Shape, Signature, TensorSpec
from headrace.core.tensors import MAX_RANK, Buffer, Tensor, new_tensor
from headrace.protocol.elements import FLAT
from headrace.protocol.json_text import LONG
from headrace.protocol.v2_json import model_text, tensor_text

_REMEMBERED = 256  # cached input shapes, output shapes and leading texts
_REMEMBERED_SIZE = 1024  # bytes of a leading text
_ID, _DATA, _END, _NESTED = b'{"id":', b'"data":', b"]}]}", b"]"
_NO_NUMBERS = frozenset({Datatype.BYTES, Datatype.FP16, Datatype.BF16})
_INT = frozenset({int})

# An input of one shape: name, packer of its numbers, dtype, shape, rows.
_Form = tuple[str, Datatype, Callable[..., bytes], np.dtype[Any], Shape, int]


class _Heads(dict[int, bytes]):
    """The text before the numbers of an output, by the number of rows."""

    def __init__(self, before: bytes, spec: TensorSpec, shape: Shape) -> None:
        """`shape` begins with -1 for the number of rows."""
        self._before, self._spec, self._shape = before, spec, shape

    def __missing__(self, rows: int) -> bytes:
        shape = (rows, *self._shape[1:]) if self._shape[:1] == (-1,) else self._shape
        text = self._before + tensor_text(self._spec.name, self._spec.datatype, shape)
        if len(self) >= _REMEMBERED:
            self.clear()
        self[rows] = text + b'"data":['
        return self[rows]


# Per output: the text before its numbers, and the numbers of each row; those of a single call are
# one text.
Rows = list[tuple[_Heads, list[bytes]]]


class PlainJson:
    """Decodes plain bodies for one model version, and encodes plain answers."""

    __slots__ = ("_count", "_forms", "_heads", "_outputs", "_signature")

    def __init__(self, signature: Signature, model: str, version: str) -> None:
        """`model` and `version` are as in answers."""
        self._signature = signature
        # 0 if the inputs cannot be plain.
        plain = all(spec.datatype.value in FLAT for spec in signature.inputs)
        self._count = len(signature.inputs) if plain and len(signature.inputs) <= MAX_TENSORS else 0
        self._forms: dict[tuple[object, ...], _Form] = {}  # by name, datatype and shape
        self._heads: dict[bytes, _Form] = {}  # by the text before the numbers, without the id
        # Per output: its dtype, the text before its numbers by shape, and the constant start of
        # that text.
        self._outputs: list[tuple[np.dtype[Any], dict[Shape, _Heads], bytes, TensorSpec]] = []
        before = model_text(model, version) + b'"outputs":['
        if all(spec.datatype not in _NO_NUMBERS for spec in signature.outputs):
            for spec in signature.outputs:
                self._outputs.append((NUMPY[spec.datatype], {}, before, spec))
                before = b"]},"

    def decode(self, body: Buffer) -> tuple[str, dict[str, Tensor], int] | None:
        """Return id, arrays by input name, and the number of rows, at most `max_batch_size`."""
        if len(body) > LONG or not self._count:
            return None
        if type(body) is not bytes:
            body = bytes(body)
        head, _, rest = body.partition(_DATA)
        if rest[-4:] != _END or rest[-5:-4] == _NESTED:
            return None  # before any work is duplicated
        request_id = ""
        form = self._heads.get(head)
        if form is None and head.startswith(_ID):
            start = head.find(b'"', 6) + 1
            end = head.find(b'"', start)
            try:
                request_id = head[start:end].decode()
            except UnicodeDecodeError:
                return None
            if "\\" in request_id or not request_id.isprintable() or end - start > MAX_TEXT:
                return self._decode_document(body, head, request_id)
            head = head[:start] + head[end:]
            form = self._heads.get(head)
        # A `u` or `l` is of `true` or `false`, which `struct` takes for numbers.
        if form is None or b"u" in rest or b"l" in rest:
            return self._decode_document(body, head, request_id)
        name, datatype, pack, dtype, shape, rows = form
        try:
            # `struct` refuses other counts, and fractions for integer datatypes.
            array = np.ndarray(shape, dtype, pack(*orjson.loads(rest[:-3])))
        except (StructError, ValueError, OverflowError):
            return None
        return request_id, {name: new_tensor((name, datatype, array))}, rows

    def write(self, tensors: Sequence[Tensor], calls: int) -> Rows | None:
        """Format the output data of `calls` requests, from which `encode` builds the answers.

        None unless `tensors` are all outputs as declared, and fast to write.
        """
        outputs = self._outputs
        if len(tensors) != len(outputs) or not outputs:
            return None
        written: Rows = []
        for (dtype, known, before, spec), (name, _, array) in zip(outputs, tensors, strict=True):
            if array.dtype is not dtype or name != spec.name or array.nbytes > LONG * calls:
                return None
            flat = array.ravel()
            if calls == 1:
                text = orjson.dumps(flat, None, orjson.OPT_SERIALIZE_NUMPY)
                texts = [text[1:-1]]
            elif flat.size:
                text = orjson.dumps(
                    flat.reshape((len(array), -1)), None, orjson.OPT_SERIALIZE_NUMPY
                )
                texts = text[2:-2].split(b"],[")
            else:
                return None
            if b"n" in text:  # null, for NaN or an infinity
                return None
            shape = array.shape
            key = shape if calls == 1 else (-1, *shape[1:])
            heads = known.get(key)
            if heads is None:
                if len(known) >= _REMEMBERED:
                    known.clear()
                heads = known[key] = _Heads(before, spec, key)
            written.append((heads, texts))
        return written

    def encode(self, request_id: str, written: Rows, first: int, rows: int) -> bytes:
        """The body of the answer with `rows` rows starting at `first`."""
        pieces = [b'{"id":', orjson.dumps(request_id), b","] if request_id else [b"{"]
        for heads, texts in written:
            data = texts[first] if rows == 1 else b",".join(texts[first : first + rows])
            pieces += (heads[rows], data)
        pieces.append(b"]}]}")
        return b"".join(pieces)

    def encode_each(self, written: Rows, before: bytes, between: bytes) -> list[bytes]:
        """The bodies of the answers to calls of one row each, without ids.

        Each has `before`, its size and `between` in front.
        """
        bodies = [b"{"] * len(written[0][1])
        for heads, texts in written:
            head = heads[1]
            bodies = [body + head + text for body, text in zip(bodies, texts, strict=True)]
        return [b"%b%d%b%b]}]}" % (before, len(body) + 4, between, body) for body in bodies]

    def _decode_document(
        self, body: bytes, head: bytes, head_id: str
    ) -> tuple[str, dict[str, Tensor], int] | None:
        """`decode` by a parser; remembers `head`, which is without `head_id`."""
        if b'"parameters"' in head or b'"outputs"' in head:
            return None
        if body.rfind(b"true") >= 0 or body.rfind(b"false") >= 0:
            return None  # `struct` accepts them as numbers
        arrays: dict[str, Tensor] = {}
        rows = 0
        try:
            document = orjson.loads(body)
            inputs = document["inputs"]
            request_id = document["id"] if len(document) > 1 else ""
            if len(document) > 2 or type(request_id) is not str or len(inputs) != self._count:
                return None
            if len(request_id) > SHORT_TEXT:
                return None
            for item in inputs:
                if len(item) != 4:
                    return None
                key = (item["name"], item["datatype"], *item["shape"])
                form = self._forms.get(key) or self._learn(key, item["shape"])
                if form is None or (rows and form[5] != rows):
                    return None
                name, datatype, pack, dtype, _, rows = form
                # Refuses a shape of floats that equal the integers of a known shape.
                array = np.ndarray(item["shape"], dtype, pack(*item["data"]))
                arrays[name] = new_tensor((name, datatype, array))
        except (KeyError, TypeError, StructError, ValueError, OverflowError):
            return None
        if len(arrays) != self._count or not rows:
            return None
        if self._count == 1 and form is not None:
            self._learn_head(head, head_id, document, form)
        return request_id, arrays, rows

    def _learn(self, key: tuple[Any, ...], shape: object) -> _Form | None:
        """The cached form of inputs with this name, datatype and shape; None if not plain."""
        name, text, *dims = key
        known = FLAT.get(text)
        if known is None or type(shape) is not list or not 0 < len(dims) <= MAX_RANK:
            return None
        if not set(map(type, dims)) <= _INT or min(dims) < 1:
            return None
        datatype, code, dtype = known
        signature = self._signature
        rows = dims[0] if signature.batches else 1
        count = math.prod(dims)
        if (signature.batches and rows > signature.max_batch_size) or count > LONG:
            return None
        try:
            signature.check_tensor(name, datatype, dims)
        except InvalidRequest:
            return None
        form = (name, datatype, Struct(f"<{count}{code}").pack, dtype, tuple(dims), rows)
        if len(self._forms) >= _REMEMBERED:
            self._forms.clear()
        self._forms[key] = form
        return form

    def _learn_head(self, head: bytes, head_id: str, document: Any, form: _Form) -> None:
        """Remember the text before the numbers of a document, if all else is in that text."""
        if len(head) > _REMEMBERED_SIZE:
            return
        # Parse the head with another id and no numbers: the result must be everything else. If the
        # document had a second id, it would be unchanged.
        expected: dict[str, Any] = {"inputs": [{**document["inputs"][0], "data": []}]}
        text = head
        if head.startswith(_ID):
            start = head.find(b'"', 6) + 1
            text = b"%b%b?%b" % (head[:start], head_id.encode(), head[start:])
            if document.get("id") != head_id:
                return
            expected["id"] = head_id + "?"
        try:
            found = orjson.loads(text + b'"data":[]}]}')
        except orjson.JSONDecodeError:
            return
        if found == expected:
            if len(self._heads) >= _REMEMBERED:
                self._heads.clear()
            self._heads[head] = form
