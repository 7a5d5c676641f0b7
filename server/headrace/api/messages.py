"""Messages of the operations over gRPC: their classes, sizes and checked decoding.

Apart from the handlers, so that a front end, which has no engine, does not import one.
"""

from collections.abc import Sequence
from typing import Any

from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass

from headrace.api.operations import OPERATIONS, Operation, by_procedure
from headrace.core.errors import InvalidRequest
from headrace.core.tensors import Buffer
from headrace.protocol.compression import check_size
from headrace.protocol.pb import POOL
from headrace.protocol.protobuf_contents import check_elements


def request_class(operation: Operation) -> type[Message]:
    """The class of an operation's request messages."""
    return GetMessageClass(POOL.FindMessageTypeByName(f"{operation.package}.{operation.request}"))


def limits(max_request_bytes: int, operations: Sequence[Operation] = OPERATIONS) -> dict[str, int]:
    """The largest message of each procedure in bytes, by full path."""
    return {
        path: operation.max_bytes or max_request_bytes
        for path, operation in by_procedure(operations).items()
    }


def read_message(operation: Operation, data: Buffer, max_request_bytes: int) -> Any:
    """Decode a request's message within the limits of its operation; raises `ServerError`."""
    check_size(data, operation.max_bytes or max_request_bytes, operation.max_bytes > 0)
    kind = request_class(operation)
    check_elements(data, kind.DESCRIPTOR, operation.max_elements)
    try:
        return kind.FromString(data)  # type: ignore[arg-type]  # any buffer will do
    except DecodeError as error:
        raise InvalidRequest(f"not a valid {kind.__name__} message: {error}") from None
