"""Rules on request headers: restricted operations, allowed origins, headers forwarded to models.

A restriction makes a group of operations require a header with a certain value. A pattern selects
headers by name; each becomes a parameter of the inference request. For gRPC, headers are the call's
metadata.

Allowed origins are those of web pages whose scripts may change this server. A page cannot read the
answers of another site, but its scripts can send requests there; and a page whose host name is made
to resolve to another address (DNS rebinding) reads the answers, too, since its `Origin` and `Host`
agree. So the origin alone is checked, against names that nobody else can own. Clients other than
browsers send none.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hmac import compare_digest
from ipaddress import ip_address
from typing import TypeAlias

from headrace.api.operations import Category
from headrace.core.errors import InvalidRequest, Restricted

ALL = "*"
_FORM = re.compile(r"([a-z][a-z0-9+.-]*)://(\[[0-9a-f:.]+\]|[a-z0-9._-]+)(?::([0-9]{1,5}))?")
_PORTS = {"http": 80, "https": 443}  # default ports, which an origin omits
_WEB = frozenset(_PORTS)
_SHOWN = 80  # characters of an origin in an error
_OWN_SITE = frozenset({b"same-origin", b"none"})  # a page of this server, or no page at all
_Origin: TypeAlias = tuple[str, str, int | None]  # scheme, host, port
# ASGI's server: the address and port that received the request.
Server: TypeAlias = Sequence[object] | None


class AllowedOrigins:
    """Loopback names, the address that the server listens on, and origins from the settings."""

    def __init__(self, named: Sequence[str] = (), address: str = "", scheme: str = "http") -> None:
        """`named` are `SCHEME://HOST[:PORT]`, or `*` for all; `address` is the configured listening
        address, and `scheme` what is spoken there. Raises `ValueError`.
        """
        self._all = ALL in named
        self._named = {_named(text) for text in named if text != ALL}
        self._address = address.lower()
        self._scheme = scheme

    def check(self, headers: Sequence[tuple[bytes, bytes]], server: Server) -> None:
        """Raise `Restricted` for a browser's request from a page whose origin is not allowed.

        The names of `headers` are in lower case.
        """
        if self._all:
            return
        origins = [value for name, value in headers if name == b"origin"]
        if origins:
            refused = [one for one in origins if not self._allows(one.decode("latin-1"), server)]
        else:
            refused = [
                value
                for name, value in headers
                if name == b"sec-fetch-site" and value not in _OWN_SITE
            ]
        if refused:
            shown = refused[0][:_SHOWN].decode("latin-1")
            raise Restricted(
                f"models and settings are not changed by pages of other sites: '{shown}'"
                " (--http-allowed-origin allows one)"
            )

    def _allows(self, text: str, server: Server) -> bool:
        origin = _parsed(text)
        if origin is None:
            return False
        scheme, host, port = origin
        if scheme in _WEB and (host == "localhost" or _is_loopback(host)):
            return True
        if origin in self._named:
            return True
        if scheme != self._scheme or server is None or port != server[1]:
            return False
        return host in (self._address, _unmapped(str(server[0])))


def _parsed(text: str) -> _Origin | None:
    """Split an origin, its host without brackets; None if it is not one, such as `null`."""
    found = _FORM.fullmatch(text.lower())
    if found is None:
        return None
    scheme, host, port = found.groups()
    return scheme, host.strip("[]"), int(port) if port else _PORTS.get(scheme)


def _named(text: str) -> _Origin:
    origin = _parsed(text)
    if origin is None:
        raise ValueError(f"expected SCHEME://HOST[:PORT] or {ALL}, got {text!r}")
    return origin


def _unmapped(address: str) -> str:
    """Normalise an address as in an origin; IPv4-mapped IPv6 becomes IPv4."""
    return address.removeprefix("::ffff:") if "." in address else address


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


GRPC_PREFIX = "triton-grpc-protocol-"
_CASE_MATTERS = "(?-i)"
_RESERVED = frozenset(
    {
        "sequence_id", "sequence_start", "sequence_end", "priority", "timeout", "headers",
        "binary_data_output",
    }
)  # fmt: skip
_LONGEST = 256  # longest header name matched: patterns may be slow on longer ones
_KNOWN = 1024  # cached names
_HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
# Names valid both as an HTTP header and as gRPC metadata.
_NAME_FOR_BOTH = re.compile(
    r"(?i)(?!grpc-|(?:te|host|connection|content-type)$)[0-9a-z_.-]+(?<!-bin)"
)


@dataclass(frozen=True, slots=True)
class Key:
    """A header and its required value; `header` is in lower case."""

    header: str
    value: str

    def opens(self, given: Sequence[bytes]) -> bool:
        """True if the request's values of the header are exactly the required one.

        Constant time: a nearly correct value takes as long as any other of its length.
        """
        return len(given) == 1 and compare_digest(given[0], self.value.encode())


class HeaderPattern:
    """Selects headers by name, and caches the decision for each name."""

    def __init__(self, text: str) -> None:
        """`text` may match any part of a name, in any case unless it begins with `(?-i)`.

        Raises `ValueError` if it is no regular expression.
        """
        flags = re.IGNORECASE
        if text.startswith(_CASE_MATTERS):
            text = text.removeprefix(_CASE_MATTERS)
            flags = re.NOFLAG
        try:
            self._search = re.compile(text, flags).search
        except (re.error, OverflowError, RecursionError) as error:
            raise ValueError(f"not a regular expression: {error}") from None
        self._picked: dict[str, bool] = {}

    def parameters(self, headers: Iterable[tuple[str, str]]) -> dict[str, str]:
        """The selected headers as parameters; values of the same name are joined by commas.

        Raises `InvalidRequest` if a name is reserved as a parameter.
        """
        picked = self._picked
        found: dict[str, str] = {}
        for name, value in headers:
            matches = picked.get(name)
            if matches is None:
                matches = self._look_at(name)
            if matches:
                if name.lower() in _RESERVED or name.lower().startswith("triton_"):
                    raise InvalidRequest(
                        f"Header '{name}' is reserved for Triton usage and cannot be forwarded."
                    )
                found[name] = f"{found[name]}, {value}" if name in found else value
        return found

    def _look_at(self, name: str) -> bool:
        matches = len(name) <= _LONGEST and self._search(name) is not None
        if len(self._picked) >= _KNOWN:
            self._picked.clear()
        if len(name) <= _LONGEST:
            self._picked[name] = matches
        return matches


@dataclass(frozen=True, slots=True)
class HeaderRules:
    """The header rules of one door from its settings; "" forwards nothing.

    `restricted` are texts `CATEGORIES:HEADER=VALUE` with comma-separated categories, whose header
    names get `prefix`; `restricted_at_both` are rules for all doors, without a prefix. `origins`,
    `address` and `scheme` are for HTTP; see `AllowedOrigins`.
    """

    forward: str = ""
    restricted: Sequence[str] = ()
    origins: Sequence[str] = ()
    address: str = ""
    prefix: str = ""
    restricted_at_both: Sequence[str] = ()
    scheme: str = "http"

    def pattern(self) -> HeaderPattern | None:
        """The pattern of headers to forward, None for none; raises `ValueError`."""
        return HeaderPattern(self.forward) if self.forward else None

    def allowed_origins(self) -> AllowedOrigins:
        """The origins whose pages may change models and settings; raises `ValueError`."""
        return AllowedOrigins(self.origins, self.address, self.scheme)

    def keys(self) -> dict[Category, Key]:
        """The required headers of restricted categories; raises `ValueError`."""
        keys: dict[Category, Key] = {}
        _add_keys(keys, self.restricted_at_both, _NAME_FOR_BOTH)
        _add_keys(keys, self.restricted, _HEADER_NAME, self.prefix)
        return keys


def _add_keys(
    keys: dict[Category, Key], rules: Iterable[str], names: re.Pattern[str], prefix: str = ""
) -> None:
    for rule in rules:
        categories, colon, rest = rule.partition(":")
        header, equals, value = rest.partition("=")
        if not (colon and equals and value) or not _HEADER_NAME.fullmatch(header):
            raise ValueError("expected CATEGORIES:HEADER=VALUE, with commas between categories")
        if not names.fullmatch(header):
            raise ValueError(
                f"{header!r} cannot be the name of a gRPC call's metadata: letters, digits, _, ."
                " and -, not beginning with grpc- nor ending with -bin"
            )
        for name in categories.split(","):
            category = _category(name.strip())
            if category in keys:
                raise ValueError(f"{category} is restricted twice")
            keys[category] = Key(prefix + header.lower(), value)


def _category(name: str) -> Category:
    try:
        return Category(name)
    except ValueError:
        known = ", ".join(Category)
        raise ValueError(f"unknown category {name!r}, expected some of {known}") from None
