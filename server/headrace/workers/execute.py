"""Batches through a model: from a frame's data to requests, from responses to a frame's data."""

import json
import traceback
from collections.abc import Sequence
from time import monotonic_ns
from typing import Any

from headrace.workers import triton_api as pb
from headrace.workers.elements import Array, Buffer, raw, view
from headrace.workers.frames import (
    IN_FILE,
    BatchMeta,
    Block,
    Header,
    Kind,
    frame,
    lay_out,
    offsets,
    pack_result,
    unpack_batch,
)
from headrace.workers.link import Link, Parcel

Outcome = tuple[Kind, bytes, Parcel]

_TEXT, _TRACEBACK = 4096, 65_536  # characters of what is told of an error
_FORMS = 1000  # that a worker names; what has more of them is told request by request


class Form:
    """What batches have in common: their inputs, and the outputs that are wanted."""

    def __init__(self, document: dict[str, Any]) -> None:
        self.batches: bool = document["batches"]
        self.inputs = [Block(n, d, tuple(s)) for n, d, s in document["inputs"]]
        self.outputs: list[str] = document["outputs"]


class Executor:
    """Runs batches of one model."""

    def __init__(self, link: Link, model: Any) -> None:
        self._link = link
        self._model = model
        self._forms: dict[int, Form] = {}
        self._known: dict[tuple[Block, ...], int] = {}  # forms of results

    def add_form(self, document: dict[str, Any]) -> None:
        """Know a form from now on, in place of an earlier one of its number."""
        self._forms[document["number"]] = Form(document)

    def run(self, header: Header, meta: bytes, data: bytes) -> None:
        """Run a batch and send what comes of it."""
        slot = header.slot
        try:
            kind, told, parcel = self._outcome(header, meta, data)
        except Exception as error:  # what the model gave cannot be sent, say
            kind, told, parcel = self._error(slot, error)
        # By now nothing refers to what was in the slot's file, unless the model has kept it.
        self._link.send_parcel(kind, slot, told, parcel)

    def _outcome(self, header: Header, meta: bytes, data: Buffer) -> Outcome:
        began = monotonic_ns()
        if header.flags & IN_FILE:
            data = self._link.mapped(header)
        batch = unpack_batch(meta)
        form = self._forms[batch.form]
        requests = self._requests(batch, form, data, header.data)
        wanted = [request.requested_output_names() for request in requests]
        try:
            responses = self._model.execute(requests)
        except Exception as error:
            return self._error(header.slot, error)
        if wrong := _wrong(responses, len(requests)):
            return self._broken(header.slot, wrong, "")
        times = began, monotonic_ns()
        alike = self._result(header.slot, form, batch.rows, responses, wanted, *times)
        return alike or self._responses(header.slot, responses, wanted, *times)

    def _requests(
        self, batch: BatchMeta, form: Form, data: Buffer, size: int
    ) -> list[pb.InferenceRequest]:
        starts = offsets(batch.sizes, size)
        total = sum(batch.rows)
        arrays: list[Array] = []
        for block, start, nbytes in zip(form.inputs, starts, batch.sizes, strict=True):
            shape = (total, *block.shape) if form.batches else block.shape
            arrays.append(view(block.datatype, shape, data, start, nbytes))
        extras: dict[str, Any] = json.loads(batch.extras) if batch.extras else {}
        requests: list[pb.InferenceRequest] = []
        first = 0
        for index, rows in enumerate(batch.rows):
            last = first + rows
            tensors = [
                pb.received(
                    block.name, block.datatype, array[first:last] if form.batches else array
                )
                for block, array in zip(form.inputs, arrays, strict=True)
            ]
            requests.append(
                pb.InferenceRequest(
                    tensors, batch.ids[index], form.outputs, extras.get(str(index), {})
                )
            )
            first = last
        return requests

    def _result(
        self,
        slot: int,
        form: Form,
        rows: Sequence[int],
        responses: Sequence[pb.InferenceResponse],
        wanted: Sequence[Sequence[str]],
        began: int,
        ended: int,
    ) -> Outcome | None:
        """All responses as one, if they are alike."""
        blocks: list[list[Buffer]] = []
        heads: list[Block] = []
        for response in responses:
            if response.has_error() or response.parameter_values():
                return None
        for name in form.outputs:
            pieces: list[Buffer] = []
            head: Block | None = None
            for response, count, names in zip(responses, rows, wanted, strict=True):
                tensor = pb.get_output_tensor_by_name(response, name)
                if tensor is None or len(names) != len(form.outputs):
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
        meta = pack_result(number, began, ended, sizes)
        return Kind.RESULT, meta, self._link.put(slot, data, total)

    def _form_of(self, heads: tuple[Block, ...]) -> int:
        number = self._known.get(heads)
        if number is None:
            if len(self._known) >= _FORMS:
                return -1
            number = self._known[heads] = len(self._known)
            document = {"number": number, "outputs": heads}
            self._link.send(frame(Kind.FORM, json.dumps(document).encode()))
        return number

    def _responses(
        self,
        slot: int,
        responses: Sequence[pb.InferenceResponse],
        wanted: Sequence[Sequence[str]],
        began: int,
        ended: int,
    ) -> Outcome:
        """Each response by itself."""
        told: list[dict[str, Any]] = []
        blocks: list[list[Buffer]] = []
        for response, names in zip(responses, wanted, strict=True):
            if (error := response.error()) is not None:
                told.append({"error": [error.code(), error.message()]})
                continue
            outputs = []
            for tensor in response.output_tensors():
                if tensor.name() in names:  # what nobody has asked for is left out
                    array, datatype = tensor._array, tensor._datatype
                    outputs.append([tensor.name(), datatype, array.shape])
                    blocks.append([raw(array, datatype)])
            told.append({"outputs": outputs, "parameters": response.parameter_values()})
        sizes, data, total = lay_out(blocks)
        document = {"began": began, "ended": ended, "sizes": sizes, "responses": told}
        meta = json.dumps(document).encode()
        return Kind.RESPONSES, meta, self._link.put(slot, data, total)

    def _error(self, slot: int, error: Exception) -> Outcome:
        # Our own frame is of no interest to whoever wrote the model.
        inner = error.__traceback__.tb_next if error.__traceback__ is not None else None
        text = "".join(traceback.format_exception_only(type(error), error)).strip()
        lines = traceback.format_exception(type(error), error, inner)
        return self._broken(slot, text.replace("\n", " "), "".join(lines))

    def _broken(self, slot: int, text: str, lines: str) -> Outcome:
        meta = json.dumps({"text": text[:_TEXT], "traceback": lines[-_TRACEBACK:]}).encode()
        return Kind.BROKEN, meta, self._link.put(slot, [], 0)


def _wrong(responses: Any, count: int) -> str:
    """What is wrong with what `execute` has given back; "" if nothing."""
    if not isinstance(responses, list):
        found = type(responses).__name__
        return f"Expected a list in the execute return, found type '{found}'."
    if len(responses) != count:
        return (
            "Number of InferenceResponse objects do not match the number of InferenceRequest"
            f" objects. InferenceRequest(s) size is:{count}, and InferenceResponse(s) size"
            f" is:{len(responses)}"
        )
    for response in responses:
        if not isinstance(response, pb.InferenceResponse):
            found = type(response).__name__
            return (
                "Expected an 'InferenceResponse' object in the execute function return list,"
                f" found type '{found}'."
            )
    return ""
