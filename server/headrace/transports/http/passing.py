"""Requests over HTTP that go on to another server as they came, and its answers."""

from collections.abc import Mapping

from headrace.core.requests import OpaqueRequest, OpaqueResponse
from headrace.core.tensors import Buffer

# What tells how to read a body, and which bodies the client can read.
_OF_BODIES = (
    (b"content-type", "content-type"),
    (b"content-encoding", "content-encoding"),
    (b"inference-header-content-length", "inference-header-content-length"),
    (b"accept-encoding", "accept-encoding"),
    (b"accept", "accept"),
)
_BACK = frozenset(
    {
        "content-type", "content-encoding", "inference-header-content-length", "retry-after",
        "accept-encoding",
    }
)  # fmt: skip


def opaque_request(
    model: str, version: str, path: str, body: Buffer, nbytes: int, headers: Mapping[bytes, str]
) -> OpaqueRequest:
    """A request whose body nobody here reads; `path` is what follows that of the model."""
    own = [(name, headers[key]) for key, name in _OF_BODIES if key in headers]
    return OpaqueRequest(model, version, "", {}, nbytes=nbytes, body=body, path=path, headers=own)


def answer_lines(response: OpaqueResponse) -> bytes:
    """The header lines of the other server's answer that concern its body."""
    return b"".join(
        [
            b"%b: %b\r\n" % (name.encode("latin-1"), value.encode("latin-1"))
            for name, value in response.headers
            if name in _BACK
        ]
    )
