"""What the head of an infer request says, and whose it is."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from urllib.parse import unquote

from headrace.core.errors import InvalidRequest
from headrace.engine.doors import Entrance
from headrace.wire.header_rules import HeaderPattern, Key
from headrace.wire.timing import timeout_of


@dataclass(slots=True)
class Head:
    """What the head of an infer request says; `length` is None for a chunked body.

    `version` is "" where the path names none. `json_size` and the encodings are the headers' text.
    `entrance` is where the request goes, `headers` are all that came. `timeout` is as of
    `Call`: microseconds, 0 for none. `told` are parameters for models, made of headers, unless
    there is a `fault` for which the request is refused.
    """

    entrance: Entrance
    path: str
    model: str
    version: str
    length: int | None
    json_size: str | None = None
    content_encoding: str | None = None
    accept_encoding: str | None = None
    headers: Mapping[bytes, str] = field(default_factory=dict)
    timeout: int = 0
    told: Mapping[str, str] = field(default_factory=dict)
    fault: str = ""

    key: tuple[str, str] = field(init=False)  # model and version
    is_plain: bool = field(init=False)  # it says nothing but how long a body of JSON is

    def __post_init__(self) -> None:
        self.key = self.model, self.version
        said = self.json_size, self.content_encoding, self.accept_encoding
        self.is_plain = (
            said == (None, None, None)
            and self.length is not None
            and not (self.timeout or self.told or self.fault)
        )


def told(
    pattern: HeaderPattern | None, headers: Sequence[tuple[bytes, bytes]]
) -> tuple[dict[str, str], str]:
    """What models are told of these headers, and why they must not be, "" if they may."""
    if pattern is None:
        return {}, ""
    try:
        return pattern.parameters((n.decode("latin-1"), _text(v)) for n, v in headers), ""
    except InvalidRequest as error:
        return {}, str(error)


def opens(key: Key, headers: Sequence[tuple[bytes, bytes]]) -> bool:
    """Whether a request with these headers, their names in lower case, may be answered."""
    name = key.header.encode()
    return key.opens([value for given, value in headers if given == name])


def infer_target(path: str) -> tuple[str, str] | None:
    """Model name and version (or "") of an infer path; None for any other path."""
    return model_target(path, "/infer")


def model_target(path: str, suffix: str) -> tuple[str, str] | None:
    """Model name and version (or "") of a model's path with this end; None for any other path."""
    if not path.startswith("/v2/models/") or not path.endswith(suffix):
        return None
    parts = path[len("/v2/models/") : -len(suffix)].split("/")
    if len(parts) == 1 and parts[0]:
        return parts[0], ""
    if len(parts) == 3 and parts[0] and parts[1] == "versions" and parts[2].isdigit():
        return parts[0], parts[2]
    return None


def read_head(
    entrance: Entrance,
    path: str,
    headers: Sequence[tuple[bytes, bytes]],
    told: tuple[Mapping[str, str], str] = ({}, ""),
) -> Head | None:
    """The head of a request for `path` (unquoted), with header names in lower case.

    None if it is no infer request; raises `InvalidRequest`.
    """
    target = infer_target(path)
    return None if target is None else head_of(entrance, path, target, headers, told)


def head_of(
    entrance: Entrance,
    path: str,
    target: tuple[str, str],
    headers: Sequence[tuple[bytes, bytes]],
    told: tuple[Mapping[str, str], str] = ({}, ""),
) -> Head:
    """The head of a request to a model and version; raises `InvalidRequest`."""
    values = {name: value.decode("latin-1") for name, value in headers}
    length: int | None = None
    if b"transfer-encoding" not in values:
        text = values.get(b"content-length", "0").strip(" \t")
        if not (text.isascii() and text.isdigit()) or len(text) > 19:
            raise InvalidRequest(f"Content-Length must be a number of bytes, got {text[:40]!r}")
        length = int(text)
    return Head(
        entrance,
        path,
        *target,
        length,
        values.get(b"inference-header-content-length"),
        values.get(b"content-encoding"),
        values.get(b"accept-encoding"),
        values,
        timeout_of(values),
        *told,
    )


def _text(value: bytes) -> str:
    """A header's value: UTF-8 where it can be."""
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value.decode("latin-1")


def unquoted(raw_path: bytes) -> str:
    """A path as it comes in a request line, with its percent encoding undone."""
    path = raw_path.decode("ascii")
    return unquote(path) if "%" in path else path
