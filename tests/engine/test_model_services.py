"""Calls of a model to the server during warm-up, from another thread's event loop."""

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from threading import Thread
from typing import Any

from headrace.core.call import Call, InferResponse, Timing
from headrace.core.errors import InvalidRequest, NotFound, ServerError
from headrace.engine.model_services import LoadingServices


class Server:
    """A host that answers on its own event loop and records its calls."""

    def __init__(self) -> None:
        self.told: list[object] = []
        self.waits: list[bool] = []  # true while a call waits for it

    def submit(self, call: Call, inside: bool) -> None:
        """Two responses and the end; model 'none' does not exist, and 'never' does not answer."""
        asyncio.get_running_loop()
        if call.model_name == "none":
            raise NotFound("none")
        call.owner = self
        if call.model_name != "never":
            for number in range(2):
                response = InferResponse("m", str(number), "", [], Timing(0, 0, 1))
                call.respond(response, False)
            call.finish()

    def control(
        self, document: Mapping[str, Any], answer: Callable[[object, ServerError | None], None]
    ) -> None:
        """The model's name, unless it has none."""
        answer(document["model"], None)

    def metric(self, document: Mapping[str, Any]) -> None:
        raise AssertionError("it is kept")

    def cancel(self, call: Call) -> None:
        self.told.append("cancel")

    def hold(self, call: Call, held: bool) -> None:
        self.told.append(held)


class Answers(Call):
    """A call of the loading thread."""

    def __init__(self, model: str) -> None:
        super().__init__(model, "", "", {})
        self.got: list[object] = []
        self.done = asyncio.Event()

    def respond(self, response: InferResponse, final: bool) -> None:
        self.got.append(response.model_version)

    def finish(self) -> None:
        self.done.set()

    def fail(self, error: ServerError) -> None:
        self.got.append(error)
        self.done.set()


def beside(
    work: Callable[[LoadingServices, Server], Coroutine[Any, Any, None]],
) -> Callable[[], None]:
    """Run a test on another thread's event loop, with a server on this one's."""
    failures: list[BaseException] = []

    async def serve() -> None:
        loop, server, done = asyncio.get_running_loop(), Server(), asyncio.Event()

        def load() -> None:
            try:
                asyncio.run(work(LoadingServices(server, loop, server.waits.append), server))
            except BaseException as error:
                failures.append(error)
            loop.call_soon_threadsafe(done.set)

        thread = Thread(target=load)
        thread.start()
        await done.wait()
        thread.join()

    def test() -> None:
        asyncio.run(serve())
        if failures:
            raise failures[0]

    return test


@beside
async def test_responses_arrive_on_the_loading_thread(
    host: LoadingServices, server: Server
) -> None:
    host.submit(answers := Answers("m"), True)
    await answers.done.wait()
    assert answers.got == ["0", "1"]


@beside
async def test_a_missing_model(host: LoadingServices, server: Server) -> None:
    host.submit(answers := Answers("none"), True)
    await answers.done.wait()
    [error] = answers.got
    assert isinstance(error, NotFound)
    answers.cancel()


@beside
async def test_holding_and_cancelling(host: LoadingServices, server: Server) -> None:
    host.submit(ticket := Answers("never"), True)
    ticket.hold(True)
    ticket.hold(False)
    ticket.cancel()
    host.submit(answers := Answers("m"), True)
    await answers.done.wait()
    assert server.told == [True, False, "cancel"]
    assert server.waits == [True, False] * 2


@beside
async def test_other_calls(host: LoadingServices, server: Server) -> None:
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


@beside
async def test_a_finished_load_waits_for_no_call(host: LoadingServices, server: Server) -> None:
    host.submit(ticket := Answers("never"), True)
    host.submit(answers := Answers("m"), True)
    await answers.done.wait()
    assert server.waits == [True]
    host.close()
    ticket.cancel()
    host.submit(answers := Answers("m"), True)
    await answers.done.wait()
    assert server.waits == [True, False]
