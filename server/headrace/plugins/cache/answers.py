"""Answers that are kept, and the bytes of memory that they may take.

An answer is packed into one `bytes`: the size of its head, the head (a JSON document of version,
rows, parameters, and the tensors with their sizes), and the data of the tensors. So it is the same
in memory and on Redis, takes as much memory as it has bytes, and is nothing that the collector of
cyclic garbage would have to visit, of which there may be millions. Heads repeat, and are parsed
once.
"""

from collections import OrderedDict, defaultdict
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import orjson

from headrace.core.bytes_array import COPIED, BytesArray
from headrace.core.call import Call, InferResponse, Parameter, Timing
from headrace.core.datatypes import NUMPY, Datatype
from headrace.core.tensors import Tensor, new_tensor, raw_bytes
from headrace.plugins.cache.keys import PREFIX

_SIZE = 4  # bytes of a head's size
# Bytes that an answer takes beside its own: two objects, with places in a dictionary and a set.
_EACH = 400


def packed(
    version: str, rows: int, parameters: Mapping[str, Parameter], outputs: Sequence[Tensor]
) -> bytes:
    """The answer to requests of so many rows that get these outputs and parameters."""
    tensors: tuple[tuple[str, Datatype, tuple[int, ...], int], ...] = ()
    raws = []
    for name, datatype, array in outputs:
        small = array.nbytes <= COPIED and not array.dtype.hasobject
        raw: Any = array.tobytes() if small else raw_bytes(array)
        tensors += ((name, datatype, array.shape, len(raw)),)
        raws.append(raw)
    if parameters:
        head = _packed_head(version, rows, tensors, parameters)
    else:
        head = _repeated_head(version, rows, tensors)
    return b"".join((head, *raws))


def _packed_head(
    version: str, rows: int, tensors: object, parameters: Mapping[str, Parameter] | None = None
) -> bytes:
    head = orjson.dumps((version, rows, parameters or {}, tensors))
    return len(head).to_bytes(_SIZE, "big") + head


_repeated_head = lru_cache(1024)(_packed_head)


# A tensor in an answer: its name, datatype and shape, and where its bytes begin and end.
_TensorPlace = tuple[str, Datatype, tuple[int, ...], int, int]
_AnswerHead = tuple[str, int, dict[str, Parameter], list[_TensorPlace]]


@lru_cache(1024)
def _parsed(text: bytes, start: int) -> _AnswerHead:
    version, rows, parameters, tensors = orjson.loads(text)
    places = []
    for name, datatype, shape, size in tensors:
        places.append((name, Datatype(datatype), tuple(shape), start, start + size))
        start += size
    return str(version), int(rows), dict(parameters), places


def _head_of(answer: bytes) -> _AnswerHead:
    """The version, rows, parameters and places of tensors of an answer that was packed."""
    end = _SIZE + int.from_bytes(answer[:_SIZE], "big")
    return _parsed(answer[_SIZE:end], end)


def check(answer: bytes) -> None:
    """Check an answer that came from elsewhere; a malformed one raises any exception."""
    *_, places = _head_of(answer)
    end = 0
    for name, datatype, shape, start, end in places:
        Tensor.from_bytes(name, datatype, shape, answer[start:end])
    if places and end != len(answer):
        raise ValueError(f"{len(answer)} bytes instead of {end}")


class FoundAnswer:
    """An answer as the batch of a single call, for the doors of its calls; a `Computed`.

    Nobody can write to its tensors, which have the memory of the answer.
    """

    def __init__(self, answer: bytes, call: Call, now: int) -> None:
        """Found at `now`, for a call and others like it."""
        self.calls = [call]
        self.version, self.rows, self.parameters, places = _head_of(answer)
        self.tensors: list[Tensor] = []
        for name, datatype, shape, start, end in places:
            array: Any
            if datatype is Datatype.BYTES:
                array = BytesArray(memoryview(answer)[start:end], shape)
            else:
                array = np.ndarray(shape, NUMPY[datatype], answer, start)
            self.tensors.append(new_tensor((name, datatype, array)))
        self.started = now
        self.compute_ns = self.gather_ns = 0
        self.encoded: dict[object, Any] = {}

    def response(self, call: Call) -> InferResponse:
        """Implements `Computed.response`."""
        timing = Timing(self.started - call.arrived, 0, self.rows)
        tensors, parameters = list(self.tensors), dict(self.parameters)
        return InferResponse(call.model_name, self.version, call.id, tensors, timing, parameters)

    def deliver(self, call: Call) -> None:
        """Answer a call."""
        if call.stages is not None or self.parameters:
            call.pass_response(self.response(call), True)
        else:
            call.first = 0
            call.respond_from(self)


class KeptAnswers:
    """The most recently used answers of all versions, within a budget of bytes.

    Invariant: `_keys` has the keys of the answers that are here, by their prefix, that of their
    version.
    """

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.nbytes = 0
        self.evictions = 0  # including answers that are larger than the budget
        self._found: OrderedDict[bytes, bytes] = OrderedDict()
        self._keys: dict[bytes, set[bytes]] = defaultdict(set)

    def __len__(self) -> int:
        return len(self._found)

    def get(self, key: bytes) -> bytes | None:
        """The answer of a key, which is the most recently used one now."""
        found = self._found.get(key)
        if found is not None:
            self._found.move_to_end(key)
        return found

    def put(self, key: bytes, answer: bytes) -> None:
        """Keep an answer; the least recently used make room."""
        nbytes = len(answer) + _EACH
        if nbytes > self.budget:
            self.evictions += bool(self.budget)
            return
        found = self._found
        if key in found:
            self._remove(key)
        found[key] = answer
        self._keys[key[:PREFIX]].add(key)
        self.nbytes += nbytes
        while self.nbytes > self.budget:
            self._remove(next(iter(found)))
            self.evictions += 1

    def drop(self, prefix: bytes, most: int) -> bool:
        """Remove up to so many answers of a version; returns whether there are more."""
        keys = self._keys.get(prefix, set())
        while keys and most:
            self._remove(next(iter(keys)))
            most -= 1
        return bool(keys)

    def _remove(self, key: bytes) -> None:
        self.nbytes -= len(self._found.pop(key)) + _EACH
        keys = self._keys[key[:PREFIX]]
        keys.discard(key)
        if not keys:
            del self._keys[key[:PREFIX]]
