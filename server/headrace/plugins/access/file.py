"""The server's `Access` by one file, which it follows.

A thread looks at the file, and at those of issuers' keys, by `stat`, which follows links: changes
in place, renames and links to another target are alike. What has changed is read once it has been
stable for a moment; if it is wrong, that is logged, and the rules stay as they are. A file of keys
that is missing then is followed from then on, so that the order of writing does not matter. Rules
are replaced on the event loop, which owns this object.

Whoever keeps identities drops them all when `watch` says so. So one timer, for the first of those
given out since, is enough for identities that expire.
"""

import asyncio
import logging
import os
import time
from collections.abc import Callable, Sequence
from hmac import compare_digest
from math import inf
from pathlib import Path
from threading import Event, Thread
from typing import TYPE_CHECKING, Any

from headrace.core.errors import Unauthenticated
from headrace.core.identity import Access, Identity, PeerFacts
from headrace.core.quotas import Quotas
from headrace.plugins.access.certificates import identity_of
from headrace.plugins.access.document import InvalidAccess
from headrace.plugins.access.keys import digest
from headrace.plugins.access.rules import AccessRules, read_rules

if TYPE_CHECKING:
    from headrace.plugins.access.issuers import KeySource, RemoteKeys
    from headrace.plugins.access.tokens import IssuerRule

log = logging.getLogger(__name__)

_LONGEST = 16_384  # bytes of a header; tokens of issuers with many groups have 8 KiB
_LOOK_SECS = 0.2
_MOST_TOKENS = 4096  # verified ones that are kept
_LONGEST_TIMER = 3600.0  # seconds, so that changes of the clock are seen
_SCHEME = b"bearer"

Seen = tuple[tuple[int, ...] | None, ...]


def open_access(path: str, reread: Callable[[bool], object] | None = None) -> Access:
    """The access that a file describes, which is followed until `close`; raises `InvalidAccess`.

    Call it on the event loop that uses it, when it starts; `reread` is called there whenever the
    file has changed: whether its rules are in force.
    """
    return FileAccess(Path(path), reread)


class FileAccess:
    """Identifies clients by API key, token, certificate or Unix peer, in this order."""

    def __init__(self, path: Path, reread: Callable[[bool], object] | None = None) -> None:
        """Raises `InvalidAccess` for a file that is missing or wrong; `reread` as `open_access`."""
        self._reread = reread or bool
        self.challenge = 'Bearer realm="headrace"'
        self._loop = asyncio.get_running_loop()
        self._watchers: list[Callable[[], object]] = []
        self._remote: dict[KeySource, RemoteKeys] = {}
        self._tokens: dict[bytes, Identity] = {}  # by digest
        self._first_end = inf  # of identities given out, seconds since the epoch
        self._timer: asyncio.TimerHandle | None = None
        self._path = path
        self._rules, files, seen = _read(path, (path,))
        self._open_issuers()
        self._closed = Event()
        Thread(target=self._follow, args=(files, seen), name="access file", daemon=True).start()

    def identify(self, authorization: Sequence[bytes], peer: PeerFacts) -> Identity:
        """The client that sent these values of `authorization`; raises `Unauthenticated`.

        A header that proves nothing is refused, even if the certificate would have been enough.
        """
        identity = self._by_header(authorization) if authorization else self._by_peer(peer)
        if identity.expires <= time.time():
            raise Unauthenticated(f"the {identity.kind} has expired")
        if identity.expires < self._first_end:
            self._first_end = identity.expires
            self._set_timer()
        return identity

    @property
    def quotas(self) -> Quotas | None:
        """Implements `Access.quotas`."""
        return self._rules.quotas

    def watch(self, changed: Callable[[], object]) -> None:
        """Call `changed`, on the event loop, whenever identities may have become invalid."""
        self._watchers.append(changed)

    async def close(self) -> None:
        """Stop following the file and the issuers; their threads end when they next look."""
        self._closed.set()
        for keys in self._remote.values():
            keys.close()
        if self._timer is not None:
            self._timer.cancel()

    def _by_header(self, authorization: Sequence[bytes]) -> Identity:
        if len(authorization) > 1:
            raise Unauthenticated(f"expected one authorization, got {len(authorization)}")
        value = bytes(authorization[0])
        if len(value) > _LONGEST:
            raise Unauthenticated(f"the authorization has more than {_LONGEST} bytes")
        scheme, _, credential = value.partition(b" ")
        credential = credential.strip()
        if scheme.lower() != _SCHEME or not credential:
            raise Unauthenticated("expected 'authorization: Bearer KEY'")
        hashed = digest(credential)
        # Right and wrong keys take one hash and one look-up by it, whose time depends on nothing
        # that a client can choose: it would have to find keys whose hashes begin alike.
        key = self._rules.keys.get(hashed)
        if key is not None and compare_digest(key.digest, hashed):
            return key.identity
        if self._rules.issuers and credential.count(b".") == 2:
            return self._by_token(credential, hashed)
        raise Unauthenticated("the API key is unknown")

    def _by_token(self, token: bytes, hashed: bytes) -> Identity:
        known = self._tokens.get(hashed)
        if known is not None and known.expires > time.time():
            return known
        from headrace.plugins.access.tokens import verify  # loaded with the rules

        identity = verify(token, self._rules.issuers, self._find_key)
        if len(self._tokens) >= _MOST_TOKENS:
            self._tokens.clear()
        self._tokens[hashed] = identity
        return identity

    def _find_key(self, rule: "IssuerRule", name: str, algorithm: str) -> tuple[Any, float]:
        if rule.keys is not None:
            return rule.keys.find(name, algorithm), inf
        remote = self._remote[rule.source]
        return remote.find(name, algorithm), remote.until

    def _by_peer(self, peer: PeerFacts) -> Identity:
        rules = self._rules
        if peer.certificate and (found := identity_of(peer.certificate, rules.certificates)):
            return found
        if (found := rules.peer(peer)) or (found := rules.anonymous):
            return found
        raise Unauthenticated("expected 'authorization: Bearer KEY'")

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        wait = min(max(self._first_end - time.time(), 0), _LONGEST_TIMER)
        self._timer = self._loop.call_later(wait, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        if self._first_end > time.time():
            self._set_timer()
        else:
            self._changed()

    def _changed(self) -> None:
        """Call the watchers, who drop all identities."""
        self._first_end = inf
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for changed in self._watchers:
            changed()

    def _on_keys(self) -> None:
        self._tokens.clear()
        self._changed()

    def _open_issuers(self) -> None:
        """Fetch keys from where the rules say; those of before stay, with their keys."""
        wanted = {rule.source for rule in self._rules.issuers.values() if rule.keys is None}
        for source in self._remote.keys() - wanted:
            self._remote.pop(source).close()
        for source in wanted:
            if (keys := self._remote.get(source)) is not None:
                keys.change(source)
                continue
            from headrace.plugins.access.issuers import RemoteKeys  # loaded with the rules

            self._remote[source] = RemoteKeys(source, lambda: self._on_loop(self._on_keys))

    def _replace(self, rules: AccessRules) -> None:
        if not self._closed.is_set():
            self._rules = rules
            self._open_issuers()
            self._on_keys()
            self._reread(True)
            log.info("%s has changed: its rules are in force", self._path)

    def _on_loop(self, call: Callable[..., object], *arguments: object) -> None:
        try:
            self._loop.call_soon_threadsafe(call, *arguments)
        except RuntimeError:  # the loop is closed: the server has ended
            self._closed.set()

    def _follow(self, files: Sequence[Path], done: Seen) -> None:
        """Read the file when it has changed; on the thread."""
        seen = done
        while not self._closed.wait(_LOOK_SECS):
            before, seen = seen, _look(files)
            if seen == done or seen != before:
                continue
            done = seen
            try:
                rules, files, done = _read(self._path, files)
            except InvalidAccess as error:
                if error.needed is not None and error.needed not in files:
                    # It may be written after the file that names it: follow both, and look again.
                    files, done = (*files, error.needed), ()
                    continue
                log.error("access stays as it was: %s", error)
                self._on_loop(self._reread, False)
            except Exception:  # no bug may end the thread
                log.exception("bug while reading %s; access stays as it was", self._path)
            else:
                self._on_loop(self._replace, rules)


def _read(path: Path, files: Sequence[Path]) -> tuple[AccessRules, Sequence[Path], Seen]:
    """The rules, their files, and how those were seen before they were read.

    `files` are those of before. Raises `InvalidAccess`.
    """
    while True:
        seen, rules = _look(files), read_rules(path)
        if (found := (path, *rules.files)) == tuple(files):
            return rules, files, seen
        files = found


def _look(files: Sequence[Path]) -> Seen:
    """The identity, size and time of each file; None for those that are missing."""
    found: list[tuple[int, ...] | None] = []
    for file in files:
        try:
            stat = os.stat(file)
            found.append((stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns))
        except OSError:
            found.append(None)
    return tuple(found)
