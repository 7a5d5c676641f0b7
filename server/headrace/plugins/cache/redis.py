"""Answers on a Redis server, which several servers with the same model share.

Redis being slow or absent only costs answers: what is not found in time is computed, and after a
failure nothing is asked for a while. Owned by the event-loop thread.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from importlib.util import find_spec
from time import monotonic
from typing import Any

from headrace.core.cache_options import RedisOptions
from headrace.core.errors import LoadFailed
from headrace.plugins.cache.answers import check

log = logging.getLogger(__name__)

_PREFIX = "headrace:answer:1:"
_PAUSE_SECS = 1.0  # after a failure
_CONNECTIONS = 16
_MOST_WRITING = 64 << 20  # bytes of answers that wait to be written; others are not


class RedisAnswers:
    """Looks answers up and writes them, by tasks of the event loop. `failures` counts both."""

    def __init__(self, options: RedisOptions) -> None:
        """The server need not be there; raises `LoadFailed` without the library."""
        if find_spec("redis") is None:
            raise LoadFailed("--cache-config redis needs its client: pip install 'headrace[redis]'")
        from redis.asyncio import BlockingConnectionPool, Connection, Redis, SSLConnection
        from redis.asyncio.retry import Retry
        from redis.backoff import NoBackoff

        secs = self._secs = options.timeout_ms / 1000
        pool = BlockingConnectionPool(
            max_connections=_CONNECTIONS, timeout=secs, host=options.host, port=options.port,
            username=options.user or None, password=options.password or None, db=options.db,
            socket_timeout=secs, socket_connect_timeout=secs, retry=Retry(NoBackoff(), 0),
            connection_class=SSLConnection if options.tls else Connection,
        )  # fmt: skip
        self.failures = 0
        self._options = options
        self._client = Redis(connection_pool=pool)
        self._tasks: set[asyncio.Task[None]] = set()
        self._writing = 0  # bytes
        self._paused_until = 0.0
        self._failing = False

    @property
    def usable(self) -> bool:
        """False for a while after a failure."""
        return monotonic() >= self._paused_until

    def get(self, key: bytes, done: Callable[[bytes | None], None]) -> "asyncio.Task[None]":
        """Look for an answer, and call `done` with it, unless the returned task is cancelled."""
        return self._begin(self._get(key, done))

    def put(self, key: bytes, answer: bytes) -> None:
        """Write an answer, if there is not too much to write already."""
        if self.usable and self._writing + len(answer) <= _MOST_WRITING:
            self._writing += len(answer)
            self._begin(self._put(key, answer))

    async def close(self) -> None:
        """Stop writing, and disconnect."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._client.aclose()

    def _begin(self, work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _get(self, key: bytes, done: Callable[[bytes | None], None]) -> None:
        answer: bytes | None = await self._tried(self._client.get(_PREFIX + key.hex()))
        if answer is not None:
            try:
                check(answer)
            except Exception as error:  # others write there, too
                self.failures += 1
                log.error("an answer on Redis is malformed: %r", error)
                answer = None
        done(answer)

    async def _put(self, key: bytes, answer: bytes) -> None:
        try:
            name, ttl = _PREFIX + key.hex(), self._options.ttl_secs or None
            await self._tried(self._client.set(name, answer, ex=ttl))
        finally:
            self._writing -= len(answer)

    async def _tried(self, command: Any) -> Any:
        """The result of a command; None if it failed."""
        from redis.exceptions import RedisError

        try:
            async with asyncio.timeout(self._secs):
                result = await command
        except (RedisError, OSError) as error:
            self.failures += 1
            self._paused_until = monotonic() + _PAUSE_SECS
            if not self._failing:
                self._failing = True
                log.error(
                    "the response cache cannot use Redis at %s:%d, and goes on without it until it"
                    " can: %s", self._options.host, self._options.port, 
                    str(error) or type(error).__name__,
                )  # fmt: skip
            return None
        if self._failing:
            self._failing = False
            log.info("the response cache uses Redis again")
        return result
