"""What a configuration's parameters say about the servers that run a model."""

import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from headrace.core.errors import InvalidOption, LoadFailed

REMOTE_PARAMETERS = frozenset(
    {
        "endpoints", "remote_model", "remote_version", "forward", "max_in_flight", "timeout_secs",
        "wait_secs", "health_interval_secs", "health_timeout_secs", "tls_root_cert", "tls_cert",
        "tls_key", "authorization_file",
    }
)  # fmt: skip
_GRPC_PORT = 8001
_MOST_IN_FLIGHT = 1024
_LARGEST_FILE = 1 << 20


@dataclass(frozen=True, slots=True)
class Url:
    """One endpoint as it is configured; its host may have several addresses."""

    host: str
    port: int
    secure: bool

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"grpc{'s' if self.secure else ''}://{host}:{self.port}"


@dataclass(frozen=True, slots=True, order=True)
class Endpoint:
    """One address of one endpoint. `target` is what gRPC calls it; `name` is for people."""

    name: str
    target: str
    host: str
    secure: bool


@dataclass(frozen=True, slots=True)
class Credentials:
    """Contents of files: PEM for TLS, empty for the system's, and the value of `authorization`."""

    root: bytes = b""
    certificate: bytes = b""
    key: bytes = b""
    authorization: str = ""


@dataclass(frozen=True, slots=True)
class RemoteOptions:
    """How a model's servers are reached; times are in seconds.

    `version` is empty for whichever the servers choose. `max_in_flight` calls are under way at a
    time, 0 for as many as suits what the servers say of the model. A call may take `timeout`, 0
    for any time. While no server can be reached, requests wait for `wait`.
    """

    urls: Sequence[Url]
    model: str
    version: str
    max_in_flight: int
    timeout: float
    wait: float
    health_interval: float
    health_timeout: float
    credentials: Credentials

    @classmethod
    def of(
        cls, parameters: Mapping[str, str], model: str, version: int, root: Path
    ) -> "RemoteOptions":
        """From the parameters of `model`; raises `InvalidOption`.

        `version` is that of a version directory, 0 if there is none. File names are relative to
        `root`.
        """
        _check_forward(parameters)
        named = parameters.get("remote_version", "")
        if named and version:
            raise _wrong(
                "remote_version",
                "cannot be combined with version directories, each of which stands for the remote"
                " version of its number",
            )
        if named and not (named.isascii() and named.isdecimal() and int(named[:19]) > 0):
            raise _wrong("remote_version", f"expected a whole number from 1 on, got {named!r}")
        return cls(
            tuple(_urls(parameters.get("endpoints", ""))),
            parameters.get("remote_model") or model,
            named or (str(version) if version else ""),
            _count(parameters, "max_in_flight"),
            _seconds(parameters, "timeout_secs", 60.0),
            _seconds(parameters, "wait_secs", 2.0),
            _seconds(parameters, "health_interval_secs", 1.0) or 1.0,
            _seconds(parameters, "health_timeout_secs", 2.0) or 2.0,
            _credentials(parameters, root),
        )

    def resolve(self) -> list[Endpoint]:
        """All addresses of all endpoints, which may take a while; raises `LoadFailed`.

        A name that cannot be resolved is left out as long as another one can.
        """
        found: dict[Endpoint, None] = {}
        problems = []
        for url in self.urls:
            try:
                answers = socket.getaddrinfo(url.host, url.port, type=socket.SOCK_STREAM)
            except OSError as error:
                problems.append(f"{url}: {error.strerror or error}")
                continue
            for family, _, _, _, address in answers:
                found[_endpoint(url, family, str(address[0]))] = None
        if not found:
            raise LoadFailed("; ".join(problems), "no address is known for its endpoints")
        return list(found)


def version_without_directory(parameters: Mapping[str, str]) -> int:
    """The version that a model without a version directory is: the remote one's, or 1."""
    named = parameters.get("remote_version", "")
    return max(int(named[:9]), 1) if named.isascii() and named.isdecimal() else 1


def _endpoint(url: Url, family: int, address: str) -> Endpoint:
    own = f"[{address}]" if family == socket.AF_INET6 else address
    scheme = "ipv6" if family == socket.AF_INET6 else "ipv4"
    name = str(url) if address == url.host else f"{url} ({address})"
    return Endpoint(name, f"{scheme}:{own}:{url.port}", url.host, url.secure)


def _urls(text: str) -> Iterator[Url]:
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts:
        raise _wrong("endpoints", "name at least one server, such as grpc://gpu-1:8001")
    for part in parts:
        try:
            split = urlsplit(part)
            host, port = split.hostname, split.port
        except ValueError as error:
            raise _wrong("endpoints", f"{part!r} is not a URL: {error}") from None
        if split.scheme in ("http", "https"):
            raise _wrong(
                "endpoints",
                f"{part!r}: servers are asked over gRPC only; name their gRPC port, such as"
                f" grpc{'s' if split.scheme == 'https' else ''}://{host}:{_GRPC_PORT}",
            )
        if split.scheme not in ("grpc", "grpcs") or not host or split.path.strip("/"):
            raise _wrong(
                "endpoints", f"expected grpc://HOST:PORT or grpcs://HOST:PORT, got {part!r}"
            )
        if split.username is not None or split.query or split.fragment:
            raise _wrong("endpoints", "expected grpc://HOST:PORT; credentials belong into files")
        yield Url(host, port or _GRPC_PORT, split.scheme == "grpcs")


def _check_forward(parameters: Mapping[str, str]) -> None:
    forward = parameters.get("forward", "batched")
    if forward == "transparent":
        raise _wrong("forward", "'transparent' is not offered by this server, only 'batched'")
    if forward != "batched":
        raise _wrong("forward", f"expected 'batched', got {forward!r}")


def _count(parameters: Mapping[str, str], name: str) -> int:
    text = parameters.get(name, "0")
    if not (text.isascii() and text.isdecimal() and int(text[:9]) <= _MOST_IN_FLIGHT):
        raise _wrong(name, f"expected a whole number from 1 to {_MOST_IN_FLIGHT}, got {text!r}")
    return int(text)


def _seconds(parameters: Mapping[str, str], name: str, default: float) -> float:
    text = parameters.get(name)
    if text is None:
        return default
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds <= 86_400:
        raise _wrong(name, f"expected seconds, at most a day, got {text!r}")
    return seconds


def _credentials(parameters: Mapping[str, str], root: Path) -> Credentials:
    key, certificate = (_file(parameters, name, root) for name in ("tls_key", "tls_cert"))
    if bool(key) != bool(certificate):
        raise _wrong("tls_key" if key else "tls_cert", "tls_cert and tls_key go together")
    token = _file(parameters, "authorization_file", root)
    try:
        authorization = token.decode("ascii").strip()
    except UnicodeDecodeError:
        raise _wrong("authorization_file", "expected text in ASCII") from None
    if not authorization.isprintable():
        raise _wrong("authorization_file", "expected one line, such as: Bearer TOKEN")
    return Credentials(_file(parameters, "tls_root_cert", root), certificate, key, authorization)


def _file(parameters: Mapping[str, str], name: str, root: Path) -> bytes:
    given = parameters.get(name, "")
    if not given:
        return b""
    try:
        with (root / given).open("rb") as file:
            return file.read(_LARGEST_FILE)
    except OSError as error:
        raise _wrong(name, f"{given} cannot be read: {error.strerror}") from None


def _wrong(name: str, text: str) -> InvalidOption:
    return InvalidOption(f"parameters['{name}']", text)
