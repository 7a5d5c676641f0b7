"""Parameters of upstream models: parsing, validation, and resolution of endpoints."""

import re
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cache, partial
from ipaddress import ip_address
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

from headrace.connections.endpoint import Endpoint
from headrace.core.errors import LoadFailed
from headrace.core.plugins import PluginGroup
from headrace.core.texts import flag, invalid, seconds, unexpected, whole, whole_number
from headrace.protocol.compression import ENCODINGS

V2 = "v2"


@dataclass(frozen=True, slots=True)
class UpstreamProtocol:
    """A protocol of upstreams, provided by a plugin of `PROTOCOLS`.

    `ports` are default ports of URLs, by scheme. `grpc` is a subclass of
    `headrace.placement.upstream.grpc_client.GrpcMessages`, `rest` one of
    `headrace.placement.upstream.http_client.Rest`, each as `module:name`, "" if there is none.
    `parameters` are its own model parameters; `check` raises `InvalidOption` for invalid ones.
    """

    name: str
    ports: Mapping[str, int]
    grpc: str = ""
    rest: str = ""
    parameters: Sequence[str] = ()
    check: Callable[[Mapping[str, str]], None] = lambda parameters: None


def v2_protocol() -> UpstreamProtocol:
    """The V2 protocol, over gRPC or HTTP."""
    return UpstreamProtocol(
        V2,
        {"grpc": 8001, "grpcs": 8001, "http": 8000, "https": 443},
        grpc="headrace.placement.upstream.grpc_client:GrpcMessages",
        rest="headrace.placement.upstream.http_client:V2Rest",
    )


PROTOCOLS: PluginGroup[Callable[[], UpstreamProtocol]] = PluginGroup("headrace.protocols")


@cache  # installed packages are scanned once
def protocols() -> Mapping[str, UpstreamProtocol]:
    """Every protocol by name, V2 first."""
    return PROTOCOLS.load(lambda make: make())


def remote_parameters() -> frozenset[str]:
    """The names of all parameters of upstream models."""
    own = [name for protocol in protocols().values() for name in protocol.parameters]
    return _PARAMETERS.union(own)


def _protocol(parameters: Mapping[str, str]) -> UpstreamProtocol:
    known = protocols()
    name = parameters.get("protocol") or V2
    if name not in known:
        raise unexpected(parameters, "protocol", ", ".join(known))
    for parameter in remote_parameters() - _PARAMETERS:
        its = [one.name for one in known.values() if parameter in one.parameters]
        if parameters.get(parameter) and name not in its:
            raise invalid(parameter, f"is for parameters['protocol'] {' or '.join(its)}")
    if parameters.get("remote_load") == "true" and name != V2:
        raise invalid("remote_load", f"is for servers of {V2}: {name} has nothing like it")
    known[name].check(parameters)
    return known[name]


def _check_sharing(urls: Sequence["Url"], protocol: str) -> None:
    """Check that models with these endpoints can share memory; raises `InvalidOption`."""
    if protocol != V2:
        raise invalid("shared_memory", f"is of the protocol {V2}, not {protocol}")
    for url in urls:
        if not url.scheme.startswith("grpc"):
            raise invalid("shared_memory", f"is for servers that are asked over gRPC, not {url}")


def _check_local(url: "Url", address: str) -> None:
    """Check that an endpoint's address is local; raises `InvalidOption`."""
    if not ip_address(address.partition("%")[0]).is_loopback:
        raise invalid(
            "shared_memory",
            f"{url} has the address {address}: expected one of this machine for itself, such as"
            " 127.0.0.1",
        )


_USUAL_PORTS = {"http": 80, "https": 443}  # default ports, which the header Host omits
_OVER_HTTP = frozenset({"http", "https"})
_FORMS = "grpc://HOST:PORT, grpcs://HOST:PORT, http://HOST:PORT/PATH or https://HOST:PORT/PATH"
_HOST = re.compile(r"[!-~]+")  # internationalised names have an ASCII form
_OF_FILES = frozenset({"tls_root_cert", "tls_cert", "tls_key", "authorization_file"})
MOST_IN_FLIGHT = 1024
_CALLS = f"a whole number from 1 to {MOST_IN_FLIGHT}"
_LARGEST_VERSION = (1 << 63) - 1
_HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9a-z-]+")
_OF_CONNECTIONS = frozenset(
    {
        "connection", "content-encoding", "content-length", "content-type", "accept-encoding",
        "expect", "host", "http2-settings", "inference-header-content-length", "keep-alive",
        "proxy-connection", "te", "trailer", "transfer-encoding", "upgrade", "user-agent",
    }
)  # fmt: skip
_LARGEST_FILE = 1 << 20
LARGEST_RESPONSE = 64 << 20  # bytes, by default
_LARGEST_MESSAGE = (1 << 31) - 1  # protobuf's maximum, in bytes


@dataclass(frozen=True, slots=True)
class Url:
    """One configured endpoint; its host may have several addresses.

    `path` is the prefix of the protocol's paths, without a trailing slash. `label` is its name for
    messages, if it is not the URL.
    """

    scheme: str
    host: str
    port: int
    path: str = ""
    label: str = ""

    def __str__(self) -> str:
        return self.label or f"{self.scheme}://{_bracketed(self.host)}:{self.port}{self.path}"

    @property
    def authority(self) -> str:
        """The value of the header Host."""
        host = _bracketed(self.host)
        return host if _USUAL_PORTS.get(self.scheme) == self.port else f"{host}:{self.port}"


@dataclass(frozen=True, slots=True)
class Credentials:
    """Contents of credential files: PEM for TLS, "" for the system's, and `authorization`.

    `metadata` is sent with each gRPC call.
    """

    root: bytes = b""
    certificate: bytes = b""
    key: bytes = b""
    authorization: str = ""
    metadata: Sequence[tuple[str, str]] = ()


def _host(parameters: Mapping[str, str], name: str) -> str:
    host = parameters.get(name, "")
    try:
        named = urlsplit(f"//{host}")
        good = not host or (named.netloc == host and named.hostname and "@" not in host)
        good = good and (named.port is None or named.port > 0) and host.isascii()
    except ValueError:
        good = False
    if not good or (host and not _HOST.fullmatch(named.hostname or "")):
        raise unexpected(parameters, name, "the name of a host")
    return host


def _one_of(parameters: Mapping[str, str], name: str, values: Sequence[str]) -> str:
    """A parameter with fixed values; the first is the default, returned as ""."""
    value = parameters.get(name) or values[0]
    if value not in values:
        raise unexpected(parameters, name, f"{', '.join(values[:-1])} or {values[-1]}")
    return "" if value == values[0] else value


_seconds = partial(seconds, most=86_400, expected="seconds, at most a day")


def _positive_seconds(parameters: Mapping[str, str], name: str, default: float) -> float:
    return _seconds(parameters, name, default) or default


def _header_names(parameters: Mapping[str, str], name: str) -> tuple[str, ...]:
    given = parameters.get(name, "").lower().split(",")
    headers = tuple(dict.fromkeys(header.strip() for header in given if header.strip()))
    for header in headers:
        if not _HEADER_NAME.fullmatch(header):
            raise invalid(name, f"{header!r} is not the name of a header")
        if header in _OF_CONNECTIONS or header.startswith("grpc-") or header.endswith("-bin"):
            raise invalid(name, f"'{header}' is about a connection or a body, and stays here")
    return headers


def _parameter(name: str, parse: Callable[..., Any], *details: Any) -> Any:
    """A field that is parsed from the parameter `name`; `details` are for `parse`."""
    return field(metadata={"parameter": (name, parse, details)})


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteOptions:
    """Options for reaching a model's upstreams; times are in seconds.

    `version` is "" for the upstreams' choice. `max_in_flight` limits calls in flight, 0 derives the
    limit from the upstreams' description. A call may take `timeout`, 0 for no limit. While no
    upstream can be reached, requests wait for `wait`. `forward_headers` are lower-case names of
    client headers to forward. `read_credentials` returns the current content of the files.

    A response may have `largest_response` bytes, also once it is decompressed.

    `own` has the given parameters specific to the `protocol`.

    With `shared_memory`, all upstreams are on this machine and share large tensors.

    `host` replaces the host name of the URLs in requests, unless "". Over HTTP, tensors are sent as
    `tensors` says, or as the upstream supports if "", and bodies with `compression`, unless "".
    """

    urls: Sequence[Url]
    model: str
    version: str
    credentials: Credentials
    read_credentials: Callable[[], Credentials] | None = field(compare=False)
    protocol: UpstreamProtocol
    own: Mapping[str, str]
    max_in_flight: int = _parameter("max_in_flight", whole, 0, 1, MOST_IN_FLIGHT, _CALLS)
    timeout: float = _parameter("timeout_secs", _seconds, 60.0)
    wait: float = _parameter("wait_secs", _seconds, 2.0)
    health_interval: float = _parameter("health_interval_secs", _positive_seconds, 1.0)
    health_timeout: float = _parameter("health_timeout_secs", _positive_seconds, 2.0)
    forward_headers: Sequence[str] = _parameter("forward_headers", _header_names)
    forward_priority: bool = _parameter("forward_priority", flag)
    host: str = _parameter("host", _host)
    tensors: str = _parameter("http_tensors", _one_of, ("auto", "binary", "json"))
    compression: str = _parameter("compression", _one_of, ("none", *ENCODINGS))
    shared_memory: bool = _parameter("shared_memory", flag)
    largest_response: int = _parameter(
        "max_response_bytes", whole, LARGEST_RESPONSE, 1, _LARGEST_MESSAGE,
        "a number of bytes from 1 on",
    )  # fmt: skip

    @classmethod
    def of(
        cls, parameters: Mapping[str, str], model: str, version: int, root: Path
    ) -> "RemoteOptions":
        """Parse the parameters of `model`; raises `InvalidOption`.

        `version` is the version directory's, 0 if there is none. File names are relative to
        `root`.
        """
        protocol = _protocol(parameters)
        named = parameters.get("remote_version", "")
        if named and version:
            raise invalid(
                "remote_version",
                "cannot be combined with version directories, each of which stands for the remote"
                " version of its number",
            )
        if named:
            whole(parameters, "remote_version", 0, 1, _LARGEST_VERSION, "a whole number from 1 on")
        urls = tuple(_urls(parameters.get("endpoints", ""), protocol))
        parsed = {}
        for one in fields(cls):
            if "parameter" in one.metadata:
                name, parse, details = one.metadata["parameter"]
                parsed[one.name] = parse(parameters, name, *details)
        if parsed["shared_memory"]:
            _check_sharing(urls, protocol.name)
        return cls(
            urls=urls,
            model=parameters.get("remote_model") or model,
            version=named or (str(version) if version else ""),
            credentials=_credentials(parameters, root),
            read_credentials=(
                partial(_credentials, dict(parameters), root)
                if _OF_FILES & set(parameters)
                else None
            ),
            protocol=protocol,
            own={n: parameters[n] for n in protocol.parameters if parameters.get(n)},
            **parsed,
        )

    def renewed(self) -> "RemoteOptions | None":
        """Options with the current content of the credential files; None if nothing has changed.

        Raises `InvalidOption`.
        """
        if self.read_credentials is None:
            return None
        credentials = self.read_credentials()
        return None if credentials == self.credentials else replace(self, credentials=credentials)

    def resolve(self) -> list[Endpoint]:
        """All addresses of all endpoints; may block.

        A name that cannot be resolved is left out if another one can. Raises `LoadFailed`, and
        `InvalidOption` for a remote address if memory is to be shared.
        """
        found: dict[Endpoint, None] = {}
        problems = []
        for url in self.urls:
            try:
                answers = socket.getaddrinfo(url.host, url.port, type=socket.SOCK_STREAM)
            except (OSError, UnicodeError) as error:  # the latter for an invalid name
                problems.append(f"{url}: {getattr(error, 'strerror', None) or error}")
                continue
            for *_, address in answers:
                if self.shared_memory:
                    _check_local(url, str(address[0]))
                found[_endpoint(url, str(address[0]), self.host)] = None
        if not found:
            raise LoadFailed(
                f"no address is known for its endpoints: {'; '.join(problems)}",
                "no address is known for its endpoints",
            )
        return list(found)


_PARAMETERS = frozenset(
    {
        "endpoints", "remote_model", "remote_version", "protocol", *_OF_FILES,
        *(one.metadata["parameter"][0] for one in fields(RemoteOptions) if one.metadata),
    }
)  # fmt: skip


def version_without_directory(parameters: Mapping[str, str]) -> int:
    """The version of a model without version directories: the upstream's, or 1."""
    return whole_number(parameters.get("remote_version", ""), 1, _LARGEST_VERSION) or 1


def _endpoint(url: Url, address: str, host: str) -> Endpoint:
    name = str(url) if address == url.host else f"{url} ({address})"
    known_as = urlsplit(f"//{host}").hostname or url.host
    return Endpoint(name, url.scheme, address, url.port, known_as, host or url.authority, url.path)


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _urls(text: str, protocol: UpstreamProtocol) -> Iterator[Url]:
    ports = protocol.ports
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts:
        raise invalid(
            "endpoints",
            "name at least one server, such as grpc://gpu-1:8001, or give remote_backend for a"
            " Triton that this server starts",
        )
    for part in parts:
        try:
            split = urlsplit(part)
            host, port = split.hostname, split.port
        except ValueError as error:
            raise invalid("endpoints", f"{part!r} is not a URL: {error}") from None
        path = split.path.rstrip("/")
        if split.scheme not in ports and split.scheme in ("grpc", "grpcs"):
            raise invalid(
                "endpoints", f"servers of {protocol.name} are asked over http or https only"
            )
        if split.scheme not in ports or not host or (path and split.scheme not in _OVER_HTTP):
            raise invalid("endpoints", f"expected {_FORMS}, got {part!r}")
        if split.username is not None or split.query or split.fragment:
            raise invalid("endpoints", f"expected {_FORMS}; credentials belong into files")
        if not _HOST.fullmatch(host):
            raise invalid("endpoints", f"{part!r} has a host that is none")
        path = quote(path, safe="/%~:@!$&'()*+,;=")
        yield Url(split.scheme, host, port or ports[split.scheme], path)


def _credentials(parameters: Mapping[str, str], root: Path) -> Credentials:
    key, certificate = (_file(parameters, name, root) for name in ("tls_key", "tls_cert"))
    if bool(key) != bool(certificate):
        raise invalid("tls_key" if key else "tls_cert", "tls_cert and tls_key go together")
    token = _file(parameters, "authorization_file", root)
    try:
        authorization = token.decode("ascii").strip()
    except UnicodeDecodeError:
        raise invalid("authorization_file", "expected text in ASCII") from None
    if not authorization.isprintable():
        raise invalid("authorization_file", "expected one line, such as: Bearer TOKEN")
    return Credentials(_file(parameters, "tls_root_cert", root), certificate, key, authorization)


def _file(parameters: Mapping[str, str], name: str, root: Path) -> bytes:
    given = parameters.get(name, "")
    if not given:
        return b""
    try:
        with (root / given).open("rb") as file:
            return file.read(_LARGEST_FILE)
    except (OSError, ValueError) as error:  # the latter for an invalid name
        why = getattr(error, "strerror", None) or error
        raise invalid(name, f"{given} cannot be read: {why}") from None


_TLS = ("tls_root_cert", "tls_cert", "tls_key")


def idle_parameters(parameters: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Parameters without effect, with the reason."""
    endpoints = parameters.get("endpoints", "") + "," + parameters.get("fail_over", "")
    if "s://" not in endpoints:
        for name in _TLS:
            if parameters.get(name):
                yield name, "has no effect without TLS: endpoints are grpcs:// or https:// then"
    if parameters.get("http_tensors") and "http" not in endpoints:
        yield "http_tensors", "has no effect without an endpoint at http:// or https://"
