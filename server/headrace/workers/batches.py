"""Batches of one model: from a frame's data to requests, from responses to a frame's data."""

import json
from collections.abc import Container, Sequence
from typing import Any

from headrace.workers.elements import Array, Buffer, raw, view
from headrace.workers.encoding import tell_response
from headrace.workers.frames import (
    MAX_SLOTS,
    MAX_TOLD,
    BatchMeta,
    Block,
    Kind,
    frame,
    lay_out,
    offsets,
    pack_result,
)
from headrace.workers.link import TOO_LONG, Link, Parcel
from headrace.workers.triton_api import get_output_tensor_by_name
from headrace.workers.triton_requests import InferenceRequest
from headrace.workers.triton_requests import received as received_request
from headrace.workers.triton_responses import InferenceResponse
from headrace.workers.triton_senders import Exchange
from headrace.workers.triton_tensors import TritonModelException, received

_FORMS = 1000  # that a worker names; what has more of them is told request by request

_KNOWN = 4 * MAX_SLOTS  # forms of batches that are kept
_NOTHING: dict[str, Any] = {}  # special about a request, as mostly

Sent = tuple[Kind, bytes, Parcel]
Times = tuple[int, int]  # when the model began and ended, monotonic nanoseconds


class Form:
    """What batches have in common: their inputs, and the outputs that are wanted."""

    def __init__(self, document: dict[str, Any]) -> None:
        self.batches: bool = document["batches"]
        self.inputs = [Block(n, d, tuple(s)) for n, d, s in document["inputs"]]
        self.outputs: list[str] = document["outputs"]


class Batches:
    """Reads the batches of one model, and lays out what is sent back."""

    def __init__(self, link: Link, decoupled: bool, declared: Container[str]) -> None:
        """`declared` are the names of the model's outputs."""
        self._link = link
        self._decoupled = decoupled
        self._declared = declared
        self._forms: dict[int, Form] = {}
        self._known: dict[tuple[Block, ...], int] = {}  # forms of results

    def add_form(self, document: dict[str, Any]) -> None:
        """Know a form from now on."""
        if len(self._forms) >= _KNOWN:
            # More recent ones than there can be batches that have been sent and not begun stay.
            self._forms = dict(list(self._forms.items())[_KNOWN // 2 :])
        self._forms[document["number"]] = Form(document)

    def form(self, batch: BatchMeta) -> Form:
        """The form of a batch."""
        return self._forms[batch.form]

    def requests(
        self, batch: BatchMeta, data: Buffer, size: int, exchange: Exchange
    ) -> list[InferenceRequest]:
        """The requests of a batch, with views into `data`."""
        form = self._forms[batch.form]
        starts = offsets(batch.sizes, size)
        total = sum(batch.rows)
        arrays: list[Array] = []
        for block, start, nbytes in zip(form.inputs, starts, batch.sizes, strict=True):
            shape = (total, *block.shape) if form.batches else block.shape
            arrays.append(view(block.datatype, shape, data, start, nbytes))
        extras: dict[str, Any] = json.loads(batch.extras) if batch.extras else {}
        requests: list[InferenceRequest] = []
        inputs = [(b.name, b.datatype, a) for b, a in zip(form.inputs, arrays, strict=True)]
        outputs, alone = form.outputs, not form.batches or len(batch.rows) == 1
        first = 0
        for index, (id, rows) in enumerate(zip(batch.ids, batch.rows, strict=True)):
            last = first + rows
            tensors = [
                received(name, datatype, array if alone else array[first:last])
                for name, datatype, array in inputs
            ]
            special = extras.get(str(index), _NOTHING) if extras else _NOTHING
            number = batch.first + index
            requests.append(
                received_request(exchange, number, tensors, id, outputs, special, self._decoupled)
            )
            first = last
        return requests

    def result(
        self,
        slot: int,
        batch: BatchMeta,
        responses: Sequence[InferenceResponse],
        wanted: Sequence[Sequence[str]],
        times: Times,
    ) -> Sent | None:
        """All responses as one, if they are alike."""
        form = self._forms[batch.form]
        if batch.extras and any(len(names) != len(form.outputs) for names in wanted):
            return None  # a request that says nothing special wants all outputs
        blocks: list[list[Buffer]] = []
        heads: list[Block] = []
        for response in responses:
            if response.has_error() or response.parameter_values():
                return None
        for name in form.outputs:
            pieces: list[Buffer] = []
            head: Block | None = None
            for response, count in zip(responses, batch.rows, strict=True):
                tensor = get_output_tensor_by_name(response, name)
                if tensor is None:
                    return None
                array, datatype = tensor._array, tensor._datatype
                shape = array.shape
                if form.batches:
                    if shape[:1] != (count,):
                        return None
                    shape = shape[1:]
                if head is None:
                    head = Block(name, datatype, shape)
                elif head.datatype != datatype or head.shape != shape:
                    return None
                pieces.append(raw(array, datatype))
            assert head is not None
            heads.append(head)
            blocks.append(pieces)
        number = self._form_of(tuple(heads))
        if number < 0:
            return None
        sizes, data, total = lay_out(blocks)
        return Kind.RESULT, pack_result(number, *times, sizes), self._link.put(slot, data, total)

    def _form_of(self, heads: tuple[Block, ...]) -> int:
        number = self._known.get(heads)
        if number is None:
            if len(self._known) >= _FORMS:
                return -1
            number = self._known[heads] = len(self._known)
            document = {"number": number, "outputs": heads}
            self._link.send(frame(Kind.FORM, json.dumps(document).encode()))
        return number

    def responses(
        self,
        slot: int,
        responses: Sequence[InferenceResponse | str],
        wanted: Sequence[Sequence[str]],
        times: Times,
    ) -> Sent:
        """Each response by itself; text is what becomes of a request that has none now."""
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
        return Kind.RESPONSES, meta, self._link.put(slot, data, total)
