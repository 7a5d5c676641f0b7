"""Public keys of issuers of tokens: a set of JSON web keys from a file, or from a URL.

`RemoteKeys` has a thread for each URL, which fetches the keys when it starts, at intervals, and
when a token names an unknown key, though no sooner than some seconds after the last time. While the
issuer cannot be reached, the last keys stay, until they are older than `max_age_secs`; attempts are
made at growing intervals. The loop only reads what the thread has left: `find` and `until` never
block.
"""

import json
import logging
import re
import ssl
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from http.client import HTTPException, HTTPMessage
from threading import Event, Thread
from typing import IO, Any
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import HTTPRedirectHandler, HTTPSHandler, ProxyHandler, Request, build_opener

import jwt

log = logging.getLogger(__name__)

# The algorithms of tokens, with the type of their keys and, of elliptic curves, the curve. None has
# a secret that is shared with the issuer: whoever reads the server's file could sign tokens.
ALGORITHMS = {
    "RS256": ("RSA", ""), "RS384": ("RSA", ""), "RS512": ("RSA", ""),
    "PS256": ("RSA", ""), "PS384": ("RSA", ""), "PS512": ("RSA", ""),
    "ES256": ("EC", "P-256"), "ES384": ("EC", "P-384"), "ES512": ("EC", "P-521"),
    "EdDSA": ("OKP", "Ed25519"),
}  # fmt: skip
_LEAST_RSA_BITS = 2048
_MOST_KEYS = 100
_MOST_BYTES = 1 << 20  # of a document
_MOST_SECS = 30.0  # for a document
_TIMEOUT_SECS = 10.0  # without a byte
_SOON_SECS = 10.0  # least time between two attempts because of unknown keys
_LOOPBACK = re.compile(r"localhost|127(\.\d{1,3}){3}|::1")


class InvalidKeys(ValueError):
    """A document is no set of keys that can be used, or cannot be fetched."""


class KeySet:
    """The keys of an issuer that fit its algorithms."""

    def __init__(self, document: Any, algorithms: Sequence[str]) -> None:
        """`document` is a JSON web key set; raises `InvalidKeys`."""
        if not isinstance(document, dict) or not isinstance(document.get("keys"), list):
            raise InvalidKeys("it is no JSON web key set: expected an object with 'keys'")
        self.document = document
        self._keys: dict[tuple[str, str], jwt.PyJWK] = {}
        for key in document["keys"][:_MOST_KEYS]:
            if isinstance(key, dict) and key.get("use", "sig") == "sig":
                for algorithm in algorithms:
                    self._add(key, algorithm)
        if not self._keys:
            raise InvalidKeys(f"it has no key for {', '.join(algorithms)}")

    def _add(self, key: dict[str, Any], algorithm: str) -> None:
        """Keep a key for an algorithm, if it is for that."""
        kind, curve = ALGORITHMS[algorithm]
        if key.get("alg", algorithm) != algorithm or key.get("kty") != kind:
            return
        if curve and key.get("crv") != curve:
            return
        if "d" in key:
            raise InvalidKeys("it has a private key: whoever reads it can sign tokens")
        try:
            made = jwt.PyJWK(key, algorithm)
        except (jwt.PyJWTError, ValueError, TypeError, KeyError):
            # Without the library's text, which has the key.
            raise InvalidKeys(f"it has a broken key of the type {kind}") from None
        if kind == "RSA" and made.key.key_size < _LEAST_RSA_BITS:
            return
        self._keys.setdefault((str(key.get("kid", "")), algorithm), made)

    def find(self, name: str, algorithm: str) -> jwt.PyJWK | None:
        """The key of this name; of tokens that name none, the only key for the algorithm."""
        if name:
            return self._keys.get((name, algorithm))
        fitting = [key for (_, of), key in self._keys.items() if of == algorithm]
        return fitting[0] if len(fitting) == 1 else None


def read_keys(text: bytes | str, algorithms: Sequence[str]) -> KeySet:
    """The keys in a document; raises `InvalidKeys`."""
    return KeySet(_json(text), algorithms)


def _json(text: bytes | str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise InvalidKeys("it is no JSON") from None


@dataclass(frozen=True, slots=True)
class KeySource:
    """The place that an issuer's keys are fetched from; `url` "" finds it by OIDC discovery.

    `roots` is a PEM file of root certificates, "" for those of the system. Sources that differ in
    times alone have the same keys, and are equal.
    """

    issuer: str
    algorithms: tuple[str, ...]
    url: str = ""
    roots: str = ""
    refresh_secs: int = field(default=300, compare=False)
    max_age_secs: int = field(default=86_400, compare=False)


def problem_of(url: str) -> str:
    """The reason against fetching keys from a URL; "" without one."""
    try:
        parts = urlsplit(url)
        host, user = parts.hostname or "", parts.username
    except ValueError:
        return "is no URL"
    if parts.scheme not in ("http", "https") or not host:
        return "must be an https:// URL"
    if user is not None:
        return "must have no password"
    if parts.scheme == "http" and not _LOOPBACK.fullmatch(host):
        return "must be an https:// URL: who can change what is fetched can make tokens"
    return ""


class _NoRedirects(HTTPRedirectHandler):
    """Refuses redirects, which could lead from https to elsewhere."""

    def redirect_request(
        self, req: Request, fp: IO[bytes], code: int, msg: str, headers: HTTPMessage, newurl: str
    ) -> None:
        """Follow none: the status becomes an error."""


def fetch_keys(source: KeySource) -> KeySet:
    """Fetch the keys of an issuer, which may take `_MOST_SECS` twice; raises `InvalidKeys`."""
    url = source.url
    if not url:
        # Of the standard, so that an issuer's path stays: `ISSUER/.well-known/...`.
        found = _fetch(source.issuer.rstrip("/") + "/.well-known/openid-configuration", source)
        if not isinstance(found, dict) or found.get("issuer") != source.issuer:
            raise InvalidKeys("its configuration is that of another issuer")
        place = found.get("jwks_uri")
        if not isinstance(place, str) or problem_of(place):
            raise InvalidKeys("its 'jwks_uri' must be an https:// URL")
        url = place
    return KeySet(_fetch(url, source), source.algorithms)


def _fetch(url: str, source: KeySource) -> Any:
    deadline = time.monotonic() + _MOST_SECS
    try:
        context = ssl.create_default_context(cafile=source.roots or None)
        # Without TLS no proxy may answer in place of this machine.
        proxies = [] if url.startswith("https:") else [ProxyHandler({})]
        opener = build_opener(HTTPSHandler(context=context), _NoRedirects, *proxies)
        request = Request(url, headers={"accept": "application/json"})
        with opener.open(request, timeout=_TIMEOUT_SECS) as answer:
            text = b""
            while part := answer.read1(1 << 16):
                text += part
                if len(text) > _MOST_BYTES or time.monotonic() > deadline:
                    raise InvalidKeys("its answer is too long, or too slow")
    except HTTPError as error:
        error.close()
        raise InvalidKeys(f"it has answered {error.code}") from None
    except (OSError, HTTPException, ValueError) as error:
        if isinstance(error, InvalidKeys):
            raise
        reason = getattr(error, "reason", error)
        raise InvalidKeys(f"it cannot be reached: {reason}") from None
    return _json(text)


class RemoteKeys:
    """The keys of an issuer, fetched by a thread until `close`."""

    def __init__(
        self, source: KeySource, changed: Callable[[], object], soon_secs: float = _SOON_SECS
    ) -> None:
        """`changed` is called on the thread when there are other keys than before.

        Unknown keys lead to an attempt at most every `soon_secs`.
        """
        self.source = source
        self._changed = changed
        self._soon_secs = soon_secs
        self._keys: KeySet | None = None
        self._until = 0.0
        self._tried = time.monotonic()
        self._failures = 0  # since the last success: their intervals are not shortened
        self._wanted = Event()
        self._closed = False
        Thread(target=self._run, name=f"keys of {source.issuer}", daemon=True).start()

    @property
    def until(self) -> float:
        """The time until which the keys count, in seconds since the epoch."""
        return self._until

    def find(self, name: str, algorithm: str) -> jwt.PyJWK | None:
        """The key of this name, None if there is none, or no keys that count.

        If there is none, the keys will soon be fetched again.
        """
        keys = self._keys if time.time() < self._until else None
        found = keys.find(name, algorithm) if keys else None
        soon = time.monotonic() - self._tried >= self._soon_secs
        if not found and soon and not self._failures:
            self._wanted.set()
        return found

    def change(self, source: KeySource) -> None:
        """Go on with an equal source, by its times, and fetch the keys now."""
        self._until += source.max_age_secs - self.source.max_age_secs
        self.source = source
        self._wanted.set()

    def close(self) -> None:
        """End the thread, after a fetch that is under way."""
        self._closed = True
        self._wanted.set()

    def _run(self) -> None:
        while not self._closed:
            self._wanted.clear()
            self._failures = 0 if self._try() else self._failures + 1
            self._tried = time.monotonic()
            wait = self.source.refresh_secs
            if self._failures:
                wait = min(1 << min(self._failures - 1, 30), wait)
            self._wanted.wait(wait)

    def _try(self) -> bool:
        """Fetch the keys; False if that has failed, of which ever fewer attempts are warned of."""
        failures = self._failures
        try:
            keys = fetch_keys(self.source)
        except InvalidKeys as error:
            # The first, the second, the fourth, and so on.
            level = logging.DEBUG if failures & (failures + 1) else logging.WARNING
            log.log(
                level, "keys of issuer %s: %s; failed attempts: %d; its last keys count for %d s",
                self.source.issuer, error, failures + 1, max(self._until - time.time(), 0),
            )  # fmt: skip
            return False
        except Exception:  # no bug may end the thread: keys would never be fetched again
            log.exception("bug while fetching the keys of issuer %s", self.source.issuer)
            return False
        before, self._keys = self._keys, keys
        self._until = time.time() + self.source.max_age_secs
        if failures:
            log.info("keys of issuer %s: fetched again", self.source.issuer)
        if before is None or before.document != keys.document:
            log.info("keys of issuer %s: new ones", self.source.issuer)
            self._changed()
        return True
