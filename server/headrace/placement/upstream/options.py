"""Parameters of a model on other servers: read, checked, and their endpoints resolved."""

import re
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from ipaddress import ip_address
from pathlib import Path
from urllib.parse import quote, urlsplit

from headrace.connections.endpoint import Endpoint
from headrace.core import plugins
from headrace.core.errors import InvalidOption, LoadFailed
from headrace.core.texts import whole_number
from headrace.protocol.compression import ENCODINGS

V2 = "v2"
_PARAMETERS = frozenset(
    {
        "endpoints", "remote_model", "remote_version", "forward", "max_in_flight", "timeout_secs",
        "wait_secs", "health_interval_secs", "health_timeout_secs", "tls_root_cert", "tls_cert",
        "tls_key", "authorization_file", "forward_headers", "forward_priority",
        "host", "http_tensors", "compression", "hedge_after", "hedge_percent",
        "shared_memory", "max_response_bytes", "protocol",
    }
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class UpstreamProtocol:
    """A protocol that servers speak; a plugin of `headrace.protocols` gives one.

    `ports` are those of URLs without one, by scheme. `grpc` is the class that derives from
    `headrace.placement.upstream.grpc_client.GrpcMessages` for it, `rest` that from
    `headrace.placement.upstream.http_client.Rest`, each as `module:name`, "" where there is none.
    `parameters` of models are its own; `check` raises `InvalidOption` for what they cannot be.
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


@cache  # what is installed is looked at once
def protocols() -> Mapping[str, UpstreamProtocol]:
    """Every protocol by its name, V2 first."""
    return plugins.load(plugins.PROTOCOLS, lambda make: make())


def remote_parameters() -> frozenset[str]:
    """The names of all parameters of models on other servers."""
    own = [name for protocol in protocols().values() for name in protocol.parameters]
    return _PARAMETERS.union(own)


def _protocol(parameters: Mapping[str, str]) -> UpstreamProtocol:
    known = protocols()
    name = parameters.get("protocol") or V2
    if name not in known:
        raise _wrong("protocol", f"expected {', '.join(known)}, got {name!r}")
    for parameter in remote_parameters() - _PARAMETERS:
        its = [one.name for one in known.values() if parameter in one.parameters]
        if parameters.get(parameter) and name not in its:
            raise _wrong(parameter, f"is for parameters['protocol'] {' or '.join(its)}")
    if parameters.get("remote_load") == "true" and name != V2:
        raise _wrong("remote_load", f"is for servers of {V2}: {name} has nothing like it")
    known[name].check(parameters)
    return known[name]


def _wrong(name: str, text: str) -> InvalidOption:
    return InvalidOption(f"parameters['{name}']", text)


def _check_sharing(urls: Sequence["Url"], protocol: str) -> None:
    """True if models that are asked so can share memory; raises `InvalidOption`."""
    if protocol != V2:
        raise _wrong("shared_memory", f"is of the protocol {V2}, not {protocol}")
    for url in urls:
        if not url.scheme.startswith("grpc"):
            raise _wrong("shared_memory", f"is for servers that are asked over gRPC, not {url}")


def _check_local(url: "Url", address: str) -> None:
    """True if an address of a server is that of this machine for itself; raises `InvalidOption`."""
    if not ip_address(address.partition("%")[0]).is_loopback:
        raise _wrong(
            "shared_memory",
            f"{url} has the address {address}: expected one of this machine for itself, such as"
            " 127.0.0.1",
        )


_USUAL_PORTS = {"http": 80, "https": 443}  # which the header Host leaves out
_OVER_HTTP = frozenset({"http", "https"})
_FORMS = "grpc://HOST:PORT, grpcs://HOST:PORT, http://HOST:PORT/PATH or https://HOST:PORT/PATH"
_HOST = re.compile(r"[!-~]+")  # names of other scripts have a form in ASCII
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
LARGEST_RESPONSE = 64 << 20  # bytes, unless the model or the server's settings say otherwise
_LARGEST_MESSAGE = (1 << 31) - 1  # of protobuf, in bytes


@dataclass(frozen=True, slots=True)
class Url:
    """One endpoint as it is configured; its host may have several addresses.

    `path` is what stands before the protocol's paths; without a slash at its end. `label` is what
    people know it by, if that is not its URL.
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
    """Contents of files: PEM for TLS, empty for the system's, and the value of `authorization`.

    `metadata` goes along with each call of gRPC.
    """

    root: bytes = b""
    certificate: bytes = b""
    key: bytes = b""
    authorization: str = ""
    metadata: Sequence[tuple[str, str]] = ()


@dataclass(frozen=True, slots=True)
class RemoteOptions:
    """How a model's servers are reached; times are in seconds.

    `version` is empty for whichever the servers choose. `max_in_flight` calls are under way at a
    time, 0 for as many as suits what the servers say of the model. A call may take `timeout`, 0
    for any time. While no server can be reached, requests wait for `wait`. `forward_headers` are
    the names of clients' headers that go on to the servers, in lower case. `read_credentials`
    gives what the files hold now.

    An answer may have `largest_response` bytes, also once it is decompressed.

    `own` has the parameters of the `protocol` alone that are given.

    With `shared_memory`, all of them are on this machine, and take large tensors in shared memory.

    `host` is what the servers are called instead of what their URLs say, if it is not empty. Over
    HTTP, tensors are sent as `tensors` says, or as the server says if it is empty, and bodies with
    `compression`, if that is not empty.
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
    forward_headers: Sequence[str] = ()
    forward_priority: bool = False
    host: str = ""
    tensors: str = ""
    compression: str = ""
    read_credentials: Callable[[], Credentials] | None = field(default=None, compare=False)
    protocol: UpstreamProtocol = field(default_factory=v2_protocol)
    own: Mapping[str, str] = field(default_factory=dict)
    shared_memory: bool = False
    largest_response: int = LARGEST_RESPONSE

    @classmethod
    def of(
        cls, parameters: Mapping[str, str], model: str, version: int, root: Path
    ) -> "RemoteOptions":
        """From the parameters of `model`; raises `InvalidOption`.

        `version` is that of a version directory, 0 if there is none. File names are relative to
        `root`.
        """
        protocol = _protocol(parameters)
        _one_of(parameters, "forward", ("batched", "transparent"))
        named = parameters.get("remote_version", "")
        if named and version:
            raise _wrong(
                "remote_version",
                "cannot be combined with version directories, each of which stands for the remote"
                " version of its number",
            )
        if named:
            _whole(parameters, "remote_version", _LARGEST_VERSION)
        urls = tuple(_urls(parameters.get("endpoints", ""), protocol))
        if shared := _flag(parameters, "shared_memory"):
            _check_sharing(urls, protocol.name)
        return cls(
            urls,
            parameters.get("remote_model") or model,
            named or (str(version) if version else ""),
            _whole(parameters, "max_in_flight", MOST_IN_FLIGHT, expected=_CALLS),
            _seconds(parameters, "timeout_secs", 60.0),
            _seconds(parameters, "wait_secs", 2.0),
            _seconds(parameters, "health_interval_secs", 1.0) or 1.0,
            _seconds(parameters, "health_timeout_secs", 2.0) or 2.0,
            _credentials(parameters, root),
            _header_names(parameters),
            _flag(parameters, "forward_priority"),
            _host(parameters),
            _one_of(parameters, "http_tensors", ("auto", "binary", "json")),
            _one_of(parameters, "compression", ("none", *ENCODINGS)),
            partial(_credentials, dict(parameters), root) if _OF_FILES & set(parameters) else None,
            protocol,
            {n: parameters[n] for n in protocol.parameters if parameters.get(n)},
            shared,
            _whole(
                parameters,
                "max_response_bytes",
                _LARGEST_MESSAGE,
                LARGEST_RESPONSE,
                "a number of bytes from 1 on",
            ),
        )

    def renewed(self) -> "RemoteOptions | None":
        """Options with the credentials that their files hold now; None if nothing has changed.

        Raises `InvalidOption`.
        """
        if self.read_credentials is None:
            return None
        credentials = self.read_credentials()
        return None if credentials == self.credentials else replace(self, credentials=credentials)

    def resolve(self) -> list[Endpoint]:
        """All addresses of all endpoints, which may take a while.

        A name that cannot be resolved is left out as long as another one can. Raises `LoadFailed`,
        and `InvalidOption` for an address that is elsewhere, where memory is to be shared.
        """
        found: dict[Endpoint, None] = {}
        problems = []
        for url in self.urls:
            try:
                answers = socket.getaddrinfo(url.host, url.port, type=socket.SOCK_STREAM)
            except (OSError, UnicodeError) as error:  # the latter for a name that cannot be one
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


def version_without_directory(parameters: Mapping[str, str]) -> int:
    """The version that a model without a version directory is: the remote one's, or 1."""
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
        raise _wrong(
            "endpoints",
            "name at least one server, such as grpc://gpu-1:8001, or give remote_backend for a"
            " Triton that this server starts",
        )
    for part in parts:
        try:
            split = urlsplit(part)
            host, port = split.hostname, split.port
        except ValueError as error:
            raise _wrong("endpoints", f"{part!r} is not a URL: {error}") from None
        path = split.path.rstrip("/")
        if split.scheme not in ports and split.scheme in ("grpc", "grpcs"):
            raise _wrong(
                "endpoints", f"servers of {protocol.name} are asked over http or https only"
            )
        if split.scheme not in ports or not host or (path and split.scheme not in _OVER_HTTP):
            raise _wrong("endpoints", f"expected {_FORMS}, got {part!r}")
        if split.username is not None or split.query or split.fragment:
            raise _wrong("endpoints", f"expected {_FORMS}; credentials belong into files")
        if not _HOST.fullmatch(host):
            raise _wrong("endpoints", f"{part!r} has a host that is none")
        path = quote(path, safe="/%~:@!$&'()*+,;=")
        yield Url(split.scheme, host, port or ports[split.scheme], path)


def _host(parameters: Mapping[str, str]) -> str:
    host = parameters.get("host", "")
    try:
        named = urlsplit(f"//{host}")
        good = not host or (named.netloc == host and named.hostname and "@" not in host)
        good = good and (named.port is None or named.port > 0) and host.isascii()
    except ValueError:
        good = False
    if not good or (host and not _HOST.fullmatch(named.hostname or "")):
        raise _wrong("host", f"expected the name of a host, got {host!r}")
    return host


def _one_of(parameters: Mapping[str, str], name: str, values: Sequence[str]) -> str:
    """A parameter with fixed values; the first is the default, for which "" is returned."""
    value = parameters.get(name) or values[0]
    if value not in values:
        raise _wrong(name, f"expected {', '.join(values[:-1])} or {values[-1]}, got {value!r}")
    return "" if value == values[0] else value


def _whole(
    parameters: Mapping[str, str], name: str, most: int, default: int = 0,
    expected: str = "a whole number from 1 on",
) -> int:  # fmt: skip
    text = parameters.get(name)
    number = default if text is None else whole_number(text, 1, most)
    if number is None:
        raise _wrong(name, f"expected {expected}, got {text!r}")
    return number


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


def _header_names(parameters: Mapping[str, str]) -> tuple[str, ...]:
    given = parameters.get("forward_headers", "").lower().split(",")
    names = tuple(dict.fromkeys(name.strip() for name in given if name.strip()))
    for name in names:
        if not _HEADER_NAME.fullmatch(name):
            raise _wrong("forward_headers", f"{name!r} is not the name of a header")
        if name in _OF_CONNECTIONS or name.startswith("grpc-") or name.endswith("-bin"):
            raise _wrong(
                "forward_headers", f"'{name}' is about a connection or a body, and stays here"
            )
    return names


def _flag(parameters: Mapping[str, str], name: str) -> bool:
    text = parameters.get(name, "false").lower()
    if text not in ("true", "false"):
        raise _wrong(name, f"expected true or false, got {text!r}")
    return text == "true"


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
    except (OSError, ValueError) as error:  # the latter for a name that cannot be one
        why = getattr(error, "strerror", None) or error
        raise _wrong(name, f"{given} cannot be read: {why}") from None


_TLS = ("tls_root_cert", "tls_cert", "tls_key")


def idle_parameters(parameters: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """The names of those that change nothing, and why."""
    endpoints = parameters.get("endpoints", "") + "," + parameters.get("fail_over", "")
    if "s://" not in endpoints:
        for name in _TLS:
            if parameters.get(name):
                yield name, "has no effect without TLS: endpoints are grpcs:// or https:// then"
    if parameters.get("http_tensors") and "http" not in endpoints:
        yield "http_tensors", "has no effect without an endpoint at http:// or https://"
    if parameters.get("forward") == "transparent":
        yield (
            "forward",
            "'transparent' passes no bytes on untouched any more: requests are read here, and go on"
            " one by one, as with batching 'off'",
        )
    hedging = [name for name in ("hedge_after", "hedge_percent") if parameters.get(name)]
    if hedging:  # one warning for both
        yield hedging[0], "has no effect any more: no call is made to a second server as well"
