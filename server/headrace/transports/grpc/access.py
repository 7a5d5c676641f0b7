"""Keys, labels, errors and lines of the access log: for every call, over either transport."""

import logging
from collections.abc import Mapping, Sequence
from time import perf_counter

from headrace.api.header_rules import Key
from headrace.api.operations import OPERATIONS, Operation, by_procedure
from headrace.core.errors import Restricted, ServerError
from headrace.core.texts import bounded
from headrace.observability.statistics import OTHER, STATUS_NAMES
from headrace.wire.protobuf_contents import varint
from headrace.wire.status import retry_after

access = logging.getLogger("headrace.access")


def labels(operations: Sequence[Operation] = OPERATIONS) -> dict[str, str]:
    """The labels of procedures in the metrics, by their paths."""
    return {path: found.counted for path, found in by_procedure(operations).items()}


_COUNTED = labels()


def operation_of(path: str) -> str:
    """The label of a procedure's calls in the metrics."""
    return _COUNTED.get(path, OTHER)


def without_key(key: Key, metadata: Mapping[str, str]) -> Restricted | None:
    """The error of a call without the key, None for one with it."""
    given = metadata.get(key.header)
    if given is not None and key.opens([given.encode("latin-1", "replace")]):
        return None
    return Restricted(f"This protocol is restricted, expecting header '{key.header}'")


def error_text(error: ServerError) -> str:
    """The error's text, cut to what fits into trailers: a client refuses longer ones altogether."""
    return bounded(str(error))


def retry_details(error: ServerError, status: int, text: str) -> bytes:
    """`grpc-status-details-bin`: a `google.rpc.Status` with a `RetryInfo` in it.

    Empty for an error that does not say when to come again.
    """
    seconds = retry_after(error)
    if not seconds:
        return b""
    delay = _field(1, b"\x08" + varint(seconds))  # a google.protobuf.Duration
    info = _field(1, b"type.googleapis.com/google.rpc.RetryInfo") + _field(2, delay)
    return b"\x08" + varint(status) + _field(2, text.encode()) + _field(3, info)


def _field(number: int, data: bytes) -> bytes:
    """A field of a message, with a length."""
    return bytes((number << 3 | 2,)) + varint(len(data)) + data


def log_access(client: str, path: str, status: int, begun: float, notes: dict[str, str]) -> None:
    """Write the line of a call that began at `begun`, by `perf_counter`."""
    name = STATUS_NAMES[status] if 0 <= status < len(STATUS_NAMES) else str(status)
    fields = {
        "client": client,
        "method": "gRPC",
        "path": path,
        "status": name,
        "duration_ms": round((perf_counter() - begun) * 1_000, 3),
    }
    access.info(
        "%(client)s %(method)s %(path)s %(status)s %(duration_ms)s ms",
        fields,
        extra=fields | notes,
    )
