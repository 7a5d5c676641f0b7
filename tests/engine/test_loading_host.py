"""What a model asks the server for while it is warmed up, from the event loop of another thread."""

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from threading import Thread
from typing import Any

from headrace.core.errors import InvalidRequest, NotFound, ServerError
from headrace.core.requests import Call, InferResponse, Sink, Timing
from headrace.engine.loading_host import LoadingHost


class Server:
    """A host that answers on its own event loop, and remembers what it is told."""

    def __init__(self) -> None:
        self.told: list[object] = []
        self.waits: list[bool] = []  # whether anything waits for it

    def submit(self, request: Call, inside: bool, sink: Sink) -> "Server":
        """Two responses and the end; there is no model 'none', and 'never' does not answer."""
        asyncio.get_running_loop()
        if request.model_name == "none":
            raise NotFound("none")
        if request.model_name != "never":
            for number in range(2):
                response = InferResponse("m", str(number), "", [], Timing(0, 0, 1))
                sink.respond(response, False)
            sink.finish()
        return self

    def control(
        self, document: Mapping[str, Any], answer: Callable[[object, ServerError | None], None]
    ) -> None:
        """The model's name, unless it has none."""
        answer(document["model"], None)

    def metric(self, document: Mapping[str, Any]) -> None:
        raise AssertionError("it is kept")

    def cancel(self) -> None:
        self.told.append("cancel")

    def hold(self, held: bool) -> None:
        self.told.append(held)


class Answers(Sink):
    """A sink on the loading thread."""

    def __init__(self) -> None:
        self.got: list[object] = []
        self.ended = asyncio.Event()

    def respond(self, response: InferResponse, final: bool) -> None:
        self.got.append(response.model_version)

    def finish(self) -> None:
        self.ended.set()

    def fail(self, error: ServerError) -> None:
        self.got.append(error)
        self.ended.set()


def beside(work: Callable[[LoadingHost, Server], Coroutine[Any, Any, None]]) -> None:
    """Do that on the event loop of another thread, with a server on this one's."""
    failures: list[BaseException] = []

    async def serve() -> None:
        loop, server, done = asyncio.get_running_loop(), Server(), asyncio.Event()

        def load() -> None:
            try:
                asyncio.run(work(LoadingHost(server, loop, server.waits.append), server))
            except BaseException as error:
                failures.append(error)
            loop.call_soon_threadsafe(done.set)

        thread = Thread(target=load)
        thread.start()
        await done.wait()
        thread.join()

    asyncio.run(serve())
    if failures:
        raise failures[0]


def request(model: str) -> Call:
    """A request."""
    return Call(model, "", "", {})


def test_responses_come_to_the_loading_thread() -> None:
    async def work(host: LoadingHost, server: Server) -> None:
        answers = Answers()
        host.submit(request("m"), True, answers)
        await answers.ended.wait()
        assert answers.got == ["0", "1"]

    beside(work)


def test_a_model_that_is_not_there() -> None:
    async def work(host: LoadingHost, server: Server) -> None:
        answers = Answers()
        ticket = host.submit(request("none"), True, answers)
        await answers.ended.wait()
        [error] = answers.got
        assert isinstance(error, NotFound)
        ticket.cancel()

    beside(work)


def test_holding_and_cancelling() -> None:
    async def work(host: LoadingHost, server: Server) -> None:
        ticket = host.submit(request("never"), True, Answers())
        ticket.hold(True)
        ticket.hold(False)
        ticket.cancel()
        answers = Answers()
        host.submit(request("m"), True, answers)
        await answers.ended.wait()
        assert server.told == [True, False, "cancel"]
        assert server.waits == [True, False] * 2

    beside(work)


def test_other_questions() -> None:
    async def work(host: LoadingHost, server: Server) -> None:
        loop = asyncio.get_running_loop()
        for document in ({"model": "m"}, {}):
            answered: asyncio.Future[tuple[object, ServerError | None]] = loop.create_future()
            host.control(document, lambda *told, to=answered: to.set_result(told))
            value, error = await answered
            if document:
                assert (value, error) == ("m", None)
            else:
                assert isinstance(error, InvalidRequest)
        host.metric({})
        assert server.waits == []  # it was answered at once

    beside(work)


def test_a_load_that_is_over_waits_for_nobody() -> None:
    async def work(host: LoadingHost, server: Server) -> None:
        ticket = host.submit(request("never"), True, Answers())
        answers = Answers()
        host.submit(request("m"), True, answers)
        await answers.ended.wait()
        assert server.waits == [True]
        host.close()
        ticket.cancel()
        host.submit(request("m"), True, answers := Answers())
        await answers.ended.wait()
        assert server.waits == [True, False]

    beside(work)
