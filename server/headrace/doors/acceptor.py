"""A listening socket whose connections are accepted here instead of by the event loop.

The loop's own servers close while connections are in the kernel's queue, which resets them, and
uvloop's silently drop clients when no descriptor is left. An `Acceptor` accepts the queued
connections before it closes, and counts and logs failures. Owned by the event loop.

Accepting costs a tenth of making the connection's protocol and transport. So each turn of the loop
accepts more connections than it makes, and makes them by client address in turns: a client that
opens thousands delays its own connections only.

A TLS handshake costs a millisecond of the loop, as soon as its client has said hello, and 50 KB
until it ends. With a client certificate its end costs half a millisecond, and without a seventh of
one; all that are under way may end in one turn. So sockets wait for the whole hello (`_Silent`),
one handshake begins per turn, and a client address has so many under way at most; all of them count
as connections.

Connections of trusted proxies may begin with a header of the PROXY protocol, which is read first.
"""

import asyncio
import errno
import logging
import os
import select
import socket
import ssl
import struct
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Protocol, cast
from weakref import WeakKeyDictionary

from headrace.connections.endpoint import send_more
from headrace.doors.listeners import QUEUE, refuse_connections, user_of
from headrace.ipc.frame_socket import unread
from headrace.protocol.proxies import InvalidProxyHeader, TrustedProxies, missing, read_header

log = logging.getLogger(__name__)

_ACCEPTED = 256  # connections accepted in a turn of the loop
_MADE = 8  # connections made in one, of those that are accepted
_SHAKING = 512  # TLS handshakes of one client address that are under way ...
_VERIFYING = 64  # ... and with client certificates
_ENDED = 64  # silent clients handled in one that have spoken, left or been silent too long
_HANDSHAKE = 22  # type of a TLS record
_RECORD = struct.Struct(">BHH")  # type, version, length
_HELLO_BYTES = 16 << 10
_SHARED_SECS = 0.001  # after a connection of a shared socket: another process takes the next one
_ANNOUNCED_SECS = 5.0  # for a proxy's header
_PAUSE_SECS = 1.0  # pause after a failure that would repeat at once
_LOG_SECS = 10.0  # between log lines about failures
_LOOK_SECS = 0.02  # polling interval of `wait_for`
ANNOUNCE_SECS = 1.0  # for clients to notice the announcement


class Proxied(Protocol):
    """A connection's protocol whose client may be another than its peer."""

    client: tuple[str, int] | None


class Acceptor:
    """Makes a protocol by `make` for each connection; `failed` is called for each failure.

    When descriptors are exhausted, clients are not left hanging: one spare descriptor is kept to
    accept a connection and close it at once.
    """

    def __init__(
        self,
        listener: socket.socket,
        make: Callable[[], asyncio.BaseProtocol],
        failed: Callable[[], object],
        tls: Callable[[], ssl.SSLContext] | None = None,
        handshake_secs: float | None = None,
        room: Callable[[int], bool] = lambda connecting: True,
        proxies: TrustedProxies | None = None,
    ) -> None:
        """`tls` is asked for the context of each connection; Unix sockets are without.

        `handshake_secs` and `room` are for TLS alone. `room` is asked for each connection, with the
        number of those whose handshake is not over. With `proxies` that announce clients, `make`
        must return a `Proxied`.
        """
        self._loop = asyncio.get_running_loop()
        self._listener = listener
        # Inherited from the engine's process, like the same socket in other front ends.
        self._shared = listener.get_inheritable()
        self._make = make
        self._failed = failed
        if listener.family == socket.AF_UNIX:
            tls = None
        self._tls = tls
        self._handshake_secs = handshake_secs if tls else None
        verifies = tls is not None and tls().verify_mode != ssl.CERT_NONE
        self._most_shaking = _VERIFYING if verifies else _SHAKING
        self._spare = -1  # spare descriptor, closed to accept a connection
        self._room = room
        self._silent = _Silent(self._loop, self._wait, handshake_secs or 0)
        # Accepted, and in TLS with a hello; by address, in the order of their turns.
        self._waiting: OrderedDict[str, deque[socket.socket]] = OrderedDict()
        self._waiting_count = 0
        self._beginning = False  # `_begin_some` is scheduled
        self._shaking: Counter[str] = Counter()  # TLS handshakes under way, by address
        # Connections of addresses that have as many of these as they may.
        self._crowded: dict[str, deque[socket.socket]] = {}
        self._connecting: set[asyncio.Task[None]] = set()
        self._proxies = proxies if proxies is not None and proxies.announce else None
        self._announcing: set[asyncio.Task[None]] = set()
        # Clients that proxies have named, by connection.
        self._named: WeakKeyDictionary[socket.socket, tuple[str, int]] = WeakKeyDictionary()
        self._pause: asyncio.TimerHandle | None = None
        self._log_at = 0.0
        self._unlogged = 0
        self.closed = False

    def start(self) -> None:
        """Start accepting."""
        self._pause = None
        self._keep_spare()
        # By its number: uvloop would delay closing the socket to its next turn.
        self._loop.add_reader(self._listener.fileno(), self._accept_some)

    def close(self) -> None:
        """Accept the queued connections, and close the socket."""
        if self.closed:
            return
        self.closed = True
        self._loop.remove_reader(self._listener.fileno())
        if not self._shared:
            refuse_connections(self._listener)
        for _ in range(QUEUE):  # bounded, since a flood would never end
            try:
                if not self._accept():
                    break
            except OSError as error:
                if not self._fail(error):
                    break
        if self._tls is None:
            while self._waiting:
                self._begin(*self._next())
        if self._pause is not None:
            self._pause.cancel()
        self._listener.close()
        if self._spare >= 0:
            os.close(self._spare)

    def _accept_some(self) -> None:
        try:
            for _ in range(1 if self._shared else _ACCEPTED):
                if not self._accept():
                    return
        except OSError as error:  # without a descriptor even if no connection is queued
            self._fail(error)
        else:
            if self._shared:
                self._rest(_SHARED_SECS)

    def _accept(self) -> bool:
        """Accept one connection; returns True if another one may be queued, raises `OSError`."""
        try:
            sock, peer = self._listener.accept()
        except BlockingIOError:
            return False
        except ConnectionAbortedError:  # the client has disconnected
            return True
        sock.setblocking(False)
        if not peer:
            send_more(sock)
        address = peer[0] if peer else user_of(sock)
        if self._proxies is not None and self._proxies.trusts(address):
            task = self._loop.create_task(self._announced(sock, address))
            self._announcing.add(task)
            task.add_done_callback(self._announcing.discard)
            return True
        self._accepted(sock, address)
        return True

    async def _announced(self, sock: socket.socket, address: str) -> None:
        """Read the header of the PROXY protocol, and go on with the client that it names."""
        data = b""
        try:
            async with asyncio.timeout(_ANNOUNCED_SECS):
                while size := missing(data):
                    received = await self._loop.sock_recv(sock, size)
                    if not received:
                        raise InvalidProxyHeader("the connection has ended within its PROXY header")
                    data += received
            header = read_header(data)
        except (InvalidProxyHeader, TimeoutError, OSError) as error:
            log.debug("hung up on the proxy %s: %r", address, error)
            sock.close()
            return
        if header is not None and header.client is not None:
            self._named[sock] = header.client
            address = header.client[0]
        try:
            self._accepted(sock, address)
        except OSError as error:
            self._fail(error)

    def _accepted(self, sock: socket.socket, address: str) -> None:
        """Queue a connection; raises `OSError`."""
        if self._tls is None:
            self._wait(sock, address)
        elif self._room(len(self._silent) + self._waiting_count + len(self._connecting)):
            try:
                self._silent.add(sock, address)
            except OSError:  # no descriptor to watch it with
                sock.close()
                raise
        else:
            sock.close()

    def _wait(self, sock: socket.socket, address: str) -> None:
        """Queue a connection until the turn of its client's address."""
        if (others := self._crowded.get(address)) is not None:
            others.append(sock)
        else:
            self._waiting.setdefault(address, deque()).append(sock)
            self._begin_later()
        self._waiting_count += 1

    def _begin_later(self) -> None:
        if not self._beginning:
            self._beginning = True
            self._loop.call_soon(self._begin_some)

    def _next(self) -> tuple[socket.socket, str]:
        """Take the next connection from those that wait, with its client's address."""
        address, socks = self._waiting.popitem(last=False)
        sock = socks.popleft()
        if socks:
            self._waiting[address] = socks  # behind the others
        self._waiting_count -= 1
        return sock, address

    def _begin_some(self) -> None:
        self._beginning = False
        for _ in range(_MADE if self._tls is None else 1):
            if self._waiting:
                self._begin(*self._next())
        if self._waiting:
            self._begin_later()

    def _begin(self, sock: socket.socket, address: str) -> None:
        if self._tls is not None:
            self._shaking[address] += 1
            if self._shaking[address] == self._most_shaking:
                self._crowded[address] = self._waiting.pop(address, deque())
        task = self._loop.create_task(self._connect(sock, address))
        self._connecting.add(task)
        task.add_done_callback(self._connecting.discard)

    def _shaken(self, address: str) -> None:
        """Count the end of a handshake, which may let another one of its address begin."""
        self._shaking[address] -= 1
        if not self._shaking[address]:
            del self._shaking[address]
        others = self._crowded.pop(address, None)
        if others:
            self._waiting[address] = others
            self._begin_later()

    def _made_for(self, client: tuple[str, int]) -> asyncio.BaseProtocol:
        made = self._make()
        cast(Proxied, made).client = client
        return made

    async def _connect(self, sock: socket.socket, address: str) -> None:
        client = self._named.get(sock)
        make = self._make if client is None else partial(self._made_for, client)
        try:
            await self._loop.connect_accepted_socket(
                make,
                sock,
                ssl=self._tls and self._tls(),
                ssl_handshake_timeout=self._handshake_secs,
            )
        except OSError as error:  # disconnected, or not TLS
            log.debug("a connection was not made: %s", error)
            sock.close()
        finally:
            if self._tls is not None:
                self._shaken(address)

    def _fail(self, error: OSError) -> bool:
        """Handle a connection that cannot be accepted; returns True to go on at once."""
        self._failed()
        self._unlogged += 1
        now = self._loop.time()
        if now >= self._log_at:
            self._log_at = now + _LOG_SECS
            log.error(
                "cannot accept %d connection%s: %s; they are closed or queued", self._unlogged,
                "s" if self._unlogged > 1 else "", error.strerror,
            )  # fmt: skip
            self._unlogged = 0
        if error.errno in (errno.EMFILE, errno.ENFILE) and self._turn_away():
            return True
        self._rest(_PAUSE_SECS)
        return False

    def _rest(self, seconds: float) -> None:
        """Accept nothing for so long."""
        self._loop.remove_reader(self._listener.fileno())
        self._pause = self._loop.call_later(seconds, self.start)

    def _turn_away(self) -> bool:
        """Close the first queued connection; returns False without a descriptor to do so."""
        if self._spare < 0:
            return False
        os.close(self._spare)
        self._spare = -1
        with suppress(OSError):  # disconnected, or the descriptor was taken
            self._listener.accept()[0].close()
        self._keep_spare()
        return self._spare >= 0

    def _keep_spare(self) -> None:
        if self._spare < 0:
            with suppress(OSError):
                self._spare = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)


class _Silent:
    """TLS connections whose clients have not said hello, with one watcher and one timer for all.

    One of each for ten thousand connections takes 14 MiB, and as many callbacks in one turn of the
    loop if their clients leave at once. The kernel is told how many bytes a hello has
    (`SO_RCVLOWAT`): byte by byte, those of a thousand clients would otherwise be as many events
    each (a stall of 135 ms).
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        ready: Callable[[socket.socket, str], None],
        seconds: float,
    ) -> None:
        """`ready` gets sockets with a hello or something else, and addresses of their clients.

        A client that has not said its hello after `seconds` is disconnected.
        """
        self._loop = loop
        self._ready = ready
        self._seconds = seconds
        # By descriptor, in the order of their ends.
        self._waiting: OrderedDict[int, tuple[socket.socket, str, float]] = OrderedDict()
        self._wanted = dict[int, int]()  # bytes of the hello, of those that have begun it
        self._watch: select.epoll | None = None  # while any wait
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, sock: socket.socket, address: str) -> None:
        """Watch a connection."""
        if self._watch is None:
            self._watch = select.epoll()
            self._loop.add_reader(self._watch.fileno(), self._look)
        end = self._loop.time() + self._seconds
        self._waiting[sock.fileno()] = sock, address, end
        self._watch.register(sock.fileno(), select.EPOLLIN)
        if self._timer is None:
            self._timer = self._loop.call_at(end, self._check_time)

    def _look(self) -> None:
        if self._watch is None:
            return
        for descriptor, _ in self._watch.poll(0, _ENDED):
            sock, address, _ = self._waiting[descriptor]
            try:
                data = sock.recv(_HELLO_BYTES, socket.MSG_PEEK)
            except OSError:  # reset
                data = b""
            wanted = _size_of_hello(data)
            # An event before the last size wanted is there says that the client has left.
            if self._wanted.get(descriptor, 1) <= len(data) < wanted:
                self._wanted[descriptor] = wanted
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, wanted)
                continue
            self._forget(descriptor)
            self._watch.unregister(descriptor)
            if len(data) < wanted:
                sock.close()
            else:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)
                self._ready(sock, address)
        self._rest()

    def _forget(self, descriptor: int) -> None:
        del self._waiting[descriptor]
        self._wanted.pop(descriptor, None)

    def _check_time(self) -> None:
        self._timer = None
        now = self._loop.time()
        for _ in range(_ENDED):
            if not self._waiting:
                break
            sock, _, end = next(iter(self._waiting.values()))
            if end > now:
                self._timer = self._loop.call_at(end, self._check_time)
                break
            self._forget(sock.fileno())
            sock.close()
        else:
            self._timer = self._loop.call_later(0, self._check_time)
        self._rest()

    def _rest(self) -> None:
        """Give up the watcher and the timer while no connection waits."""
        if self._waiting:
            return
        if self._watch is not None:
            self._loop.remove_reader(self._watch.fileno())
            self._watch.close()
            self._watch = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def _size_of_hello(data: bytes) -> int:
    """Bytes of the TLS record that data begins with (RFC 8446, 5.1), as far as they tell."""
    if data and data[0] != _HANDSHAKE:
        return len(data)  # not TLS: the handshake's error says so
    if len(data) < _RECORD.size:
        return _RECORD.size
    _, _, length = _RECORD.unpack_from(data)
    return _RECORD.size + min(int(length), _HELLO_BYTES - _RECORD.size)


async def wait_for(condition: Callable[[], bool], seconds: float) -> None:
    """Poll a condition until it holds, for at most `seconds`."""
    loop = asyncio.get_running_loop()
    end = loop.time() + seconds
    while not condition() and loop.time() < end:  # noqa: ASYNC110  # too many ways for an event
        await asyncio.sleep(_LOOK_SECS)


def undelivered(transport: asyncio.WriteTransport) -> int:
    """Bytes that were written but not acknowledged by the peer.

    A slow reader drains the kernel's buffer for a long time before that accepts more from the
    transport's buffer, so that the latter alone would show no progress.
    """
    waiting = transport.get_write_buffer_size()
    sock = transport.get_extra_info("socket")
    if sock is None or sock.fileno() < 0:
        return waiting
    return waiting + unread(sock)
