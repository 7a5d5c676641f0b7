"""The blocking client: the asynchronous one on an event loop of its own.

A thread of the client runs that loop, and each method waits for the coroutine of the same name. So
any number of threads share its connections without a lock, a notebook with a running loop can use
it, and there is only one path to a server: a second one would need a second pool, a second HTTP/2
pump and a second set of timeouts. The cost is a thread switch each way: a small request takes 285
µs over HTTP and 210 µs over gRPC (tritonclient: 225 over HTTP). A forked process, which has none of
its parent's threads, starts a loop and a thread of its own.
"""

import asyncio
import os
import ssl
import weakref
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Mapping
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from functools import partial, wraps
from threading import Lock, Thread, current_thread
from typing import Any, Concatenate, Generic, ParamSpec, Protocol, Self, TypeVar

from headrace.client import ConnectionFailed
from headrace.client.address import DEFAULT_URL, Address
from headrace.client.asynchronous import TIMEOUT_SECS, AsyncClient, AsyncModel, AsyncModels

P = ParamSpec("P")
T = TypeVar("T")
A = TypeVar("A")
B = TypeVar("B", covariant=True)
M = TypeVar("M", bound=AsyncModels)
Begun = dict["Future[Any]", Coroutine[Any, Any, Any]]  # calls that are not over


class _Face(Protocol[B]):
    """A blocking object in front of an asynchronous one."""

    @property
    def _asynchronous(self) -> B: ...

    def _run(self, work: Coroutine[Any, Any, T]) -> T: ...

    def _aclose(self, items: AsyncGenerator[Any, None]) -> None: ...


def _blocking(
    method: Callable[Concatenate[A, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[_Face[A], P], T]:
    """A method that waits for a coroutine's result."""

    @wraps(method)
    def run(self: _Face[A], /, *args: P.args, **keywords: P.kwargs) -> T:
        return self._run(method(self._asynchronous, *args, **keywords))

    return run


def _iterating(
    method: Callable[Concatenate[A, P], AsyncGenerator[T, None]],
) -> Callable[Concatenate[_Face[A], P], Generator[T, None, None]]:
    """A generator that waits for each item of an asynchronous generator."""

    @wraps(method)
    def iterate(self: _Face[A], /, *args: P.args, **keywords: P.kwargs) -> Generator[T, None, None]:
        items = method(self._asynchronous, *args, **keywords)
        process = os.getpid()
        try:
            while True:
                if process != os.getpid():
                    raise ConnectionFailed("a stream belongs to the process that has begun it")
                try:
                    item = self._run(_next(items))
                except StopAsyncIteration:
                    return
                yield item
        finally:
            if process == os.getpid():
                self._aclose(items)

    return iterate


async def _next(items: AsyncGenerator[T, None]) -> T:
    return await anext(items)


class BlockingModels(Generic[M]):
    """Models, and what serves them, for any number of threads; see `AsyncModels`."""

    def __init__(
        self,
        asynchronous: M,
        name: str,
        make_loop: Callable[[], asyncio.AbstractEventLoop] = asyncio.new_event_loop,
        end: "Callable[[AsyncModels], Coroutine[Any, Any, None]] | None" = None,
    ) -> None:
        """`name` is that of the thread with the event loop, and `end` runs last on that loop."""
        self._asynchronous = asynchronous
        self._name = name
        self._make_loop = make_loop
        self._last = end or finish
        self._starting = Lock()
        self._inherited: list[asyncio.AbstractEventLoop] = []
        self._start()

    def _start(self) -> None:
        """Start the event loop in this process."""
        self._process = os.getpid()
        self._loop = self._make_loop()
        self._begun: Begun = {}
        self._thread = thread = Thread(
            target=_run_loop, args=(self._loop, self._asynchronous, self._last, self._begun),
            name=self._name, daemon=True,
        )  # fmt: skip
        thread.start()
        # Also for one that is never closed.
        self._end = weakref.finalize(self, _stop, self._loop, thread, self._process)

    def model(self, name: str, version: str | int = "") -> "Model":
        """A handle of a model, to be called with its inputs by name."""
        return Model(self, name, version)

    infer = _blocking(AsyncModels.infer)
    send = _blocking(AsyncModels.send)
    stream = _iterating(AsyncModels.stream)
    generate_stream = _iterating(AsyncModels.generate_stream)
    signature = _blocking(AsyncModels.signature)
    tensors = _blocking(AsyncModels.tensors)
    live = _blocking(AsyncModels.live)
    ready = _blocking(AsyncModels.ready)
    wait_ready = _blocking(AsyncModels.wait_ready)
    metadata = _blocking(AsyncModels.metadata)
    model_metadata = _blocking(AsyncModels.model_metadata)
    model_config = _blocking(AsyncModels.model_config)
    statistics = _blocking(AsyncModels.statistics)
    index = _blocking(AsyncModels.index)
    load = _blocking(AsyncModels.load)
    unload = _blocking(AsyncModels.unload)
    ask = _blocking(AsyncModels.ask)
    document = _blocking(AsyncModels.document)
    documents = _blocking(AsyncModels.documents)
    fetch = _blocking(AsyncModels.fetch)

    def begin(self, work: Callable[[M], Coroutine[Any, Any, T]]) -> "Future[T]":
        """Begin `work` with the asynchronous interface, on its event loop."""
        return self._begin(work(self._asynchronous))

    def close(self) -> None:
        """Close all connections and cancel requests in flight; the client cannot be used again."""
        self._end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _begin(self, work: Coroutine[Any, Any, T]) -> "Future[T]":
        if self._process != os.getpid():
            try:
                self._start_again()
            except BaseException:
                work.close()
                raise
        loop, begun = self._loop, self._begun
        try:
            future = asyncio.run_coroutine_threadsafe(work, loop)
        except RuntimeError:
            work.close()
            raise RuntimeError("the client is closed") from None
        begun[future] = work
        future.add_done_callback(lambda over: begun.pop(over, None))
        if loop.is_closed():  # since then, perhaps without a look at this one
            _abandon(begun)
        return future

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        future = self._begin(work)
        try:
            return future.result()
        except CancelledError:
            raise ConnectionFailed("the client was closed during the request") from None
        except KeyboardInterrupt:
            future.cancel()
            raise

    def _aclose(self, items: AsyncGenerator[Any, None]) -> None:
        """Close a stream, unless the client was closed, and its streams with it."""
        work = items.aclose()
        try:
            future = self._begin(work)
        except RuntimeError:
            return
        # The garbage collector may call this on the event loop, which must not wait for itself.
        if current_thread() is not self._thread:
            with suppress(CancelledError):
                future.result()

    def _start_again(self) -> None:
        """Start another loop in a forked process, unless this was closed before."""
        with self._starting:
            if self._process == os.getpid():
                return
            # Not closed: it would no longer see its own sockets in the parent.
            self._inherited.append(self._loop)
            was_open = self._end.detach() is not None
            self._start()
            if not was_open:
                self._end()


class Client(BlockingModels[AsyncClient]):
    """A client of one server, for any number of threads.

    Methods raise `ClientError`. `timeout` is in seconds, for streams between two responses; None
    means the client's own, 0 no limit. An empty `version` leaves the choice to the server.
    """

    def __init__(
        self, url: str = DEFAULT_URL, *, headers: Mapping[str, str] | None = None, token: str = "",
        timeout: float = TIMEOUT_SECS, ssl_context: ssl.SSLContext | None = None,
        connect_retries: int = 0, tls_root_cert: str = "", tls_cert: str = "", tls_key: str = "",
    ) -> None:  # fmt: skip
        """Create a client; the options are those of `AsyncClient`."""
        asynchronous = AsyncClient(
            url, headers=headers, token=token, timeout=timeout, ssl_context=ssl_context,
            connect_retries=connect_retries, tls_root_cert=tls_root_cert, tls_cert=tls_cert,
            tls_key=tls_key,
        )  # fmt: skip
        super().__init__(asynchronous, "headrace client")

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled as address and options; raises `TypeError` with an `ssl_context`."""
        return partial(type(self), **self._asynchronous.options()), ()

    @property
    def address(self) -> Address:
        """The server's address."""
        return self._asynchronous.address


class Model:
    """A model; created by `BlockingModels.model`. See `AsyncModel`."""

    def __init__(self, client: BlockingModels[Any], name: str, version: str | int = "") -> None:
        self.name = name
        self._client = client
        self._run = client._run
        self._aclose = client._aclose
        self._asynchronous = client._asynchronous.model(name, version)
        self.version = self._asynchronous.version

    def __reduce__(self) -> tuple[Any, ...]:
        return Model, (self._client, self.name, self.version)

    __call__ = _blocking(AsyncModel.__call__)
    infer = _blocking(AsyncModel.infer)
    stream = _iterating(AsyncModel.stream)
    signature = _blocking(AsyncModel.signature)
    ready = _blocking(AsyncModel.ready)


def _run_loop(
    loop: asyncio.AbstractEventLoop,
    client: AsyncModels,
    end: Callable[[AsyncModels], Coroutine[Any, Any, None]],
    begun: Begun,
) -> None:
    """Run a loop until it is stopped, and close everything; no call waits for it any more then."""
    try:
        loop.run_forever()
        loop.run_until_complete(end(client))
        loop.run_until_complete(_cancel_tasks())  # of calls that came during the end
        loop.run_until_complete(loop.shutdown_asyncgens())
    finally:
        loop.close()
        _abandon(begun)


def _abandon(begun: Begun) -> None:
    """Cancel calls whose event loop is closed, and has not come to them."""
    for future, work in tuple(begun.items()):
        future.cancel()
        work.close()


def _stop(loop: asyncio.AbstractEventLoop, thread: Thread, process: int) -> None:
    """Stop a loop, and wait until everything is closed; in that process only."""
    if process != os.getpid():
        return
    loop.call_soon_threadsafe(loop.stop)
    if thread is not current_thread():  # the garbage collector may call this from there
        thread.join()


async def finish(client: AsyncModels) -> None:
    """Cancel what runs on this event loop, which is about to end, and close a client."""
    await _cancel_tasks()
    await client.aclose()


async def _cancel_tasks() -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
