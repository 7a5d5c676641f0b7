"""Infer requests on the plain route, with controlled models."""

import asyncio
import gc
import weakref
from typing import Any

from headrace.doors.http.infer import InferRoute
from headrace.engine.workbench import LARGE
from tests.doors.fakes import FakeEngine, until

_BODY = b'{"inputs":[{"name":"x","datatype":"INT32","shape":[1,1],"data":[1]}]}'


async def test_a_request_with_a_long_answer_does_not_wait_for_the_collector() -> None:
    engine = FakeEngine()
    body = [{"type": "http.request", "body": _BODY, "more_body": False}]
    sent: list[Any] = []

    async def receive() -> Any:
        if body:
            return body.pop()
        return await asyncio.Event().wait()

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": "/v2/models/plain/infer", "headers": []}
    route = InferRoute(engine, 1_000)
    gc.disable()
    try:
        task = asyncio.create_task(route.handle(scope, receive, send))
        await until(lambda: bool(engine.plain.work))
        work = engine.plain.work.pop()
        request = weakref.ref(work.request.inputs["x"].array)
        work.answer(LARGE + 1, final=True)  # as JSON, on a thread
        del work
        await task
        assert sent[0]["status"] == 200
        await until(lambda: request() is None)
    finally:
        gc.enable()
