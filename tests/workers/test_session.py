"""A session shared by several threads: each waiting thread gets its own frame."""

import asyncio
import json
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from headrace.ipc.elements import Buffer
from headrace.ipc.frames import (
    BrokenFrame,
    FrameKind,
    FrameReader,
    Header,
    batch_struct,
    frame,
    pack_request,
)
from headrace.workers.channel import WorkerChannel
from headrace.workers.session import Session
from headrace.workers.triton_requests import (
    Answering,
    InferenceRequest,
    InferenceResponse,
    InferenceResponseSender,
    TritonError,
)
from headrace.workers.triton_tensors import Tensor, TritonModelException


class Server:
    """The other end of a session."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self._reader = FrameReader(FrameKind)
        self._frames: list[tuple[Header[FrameKind], bytes, Buffer]] = []

    def send(self, kind: FrameKind, meta: bytes = b"") -> None:
        """Send a frame."""
        self.sock.sendall(frame(kind, meta))

    def receive(self) -> tuple[FrameKind, dict[str, Any]]:
        """The next frame and its JSON."""
        while not self._frames:
            self._frames = self._reader.feed(self.sock.recv(65_536))
        header, meta, _ = self._frames.pop(0)
        return header.kind, json.loads(meta)

    def reply(self, number: int, final: bool = True, **told: object) -> None:
        """Reply to a call."""
        document = {"call": number, "final": final, "sizes": [], **told}
        self.send(FrameKind.REPLY, json.dumps(document).encode())


@contextmanager
def connected() -> Iterator[tuple[Session, Server]]:
    """A session and its server."""
    ours, theirs = socket.socketpair()
    ours.settimeout(30)
    with ours, theirs:
        session = Session(WorkerChannel(theirs), lambda form: None)
        session.open = True
        yield session, Server(ours)


def empty(**told: object) -> dict[str, Any]:
    """A response without outputs."""
    return {"response": {"outputs": [], "parameters": told}}


def request(model: str = "m") -> InferenceRequest:
    inputs = [Tensor("x", np.zeros(2, np.float32))]
    return InferenceRequest(model_name=model, inputs=inputs, requested_output_names=["y"])


def test_waiting_for_a_batch() -> None:
    with connected() as (session, server):
        meta = batch_struct(1, 0).pack(1, 0, 0, 0, 1, 1)
        server.send(FrameKind.EXECUTE, meta)
        session.wait(lambda: session.batches)
        assert session.batches[0][0].kind is FrameKind.EXECUTE


def test_threads_get_their_replies_while_another_waits_for_a_batch() -> None:
    with connected() as (session, server), ThreadPoolExecutor(4) as pool:
        main = pool.submit(session.wait, lambda: session.batches)
        calls = [pool.submit(session.exec, request(str(n)), False) for n in range(3)]
        numbers = {}
        for _ in calls:
            kind, told = server.receive()
            assert kind is FrameKind.CALL
            numbers[told["model"]] = told["call"]
        for name in ("2", "0", "1"):
            server.reply(numbers[name], **empty(name=name))
        found = [json.loads(call.result(30).parameters())["name"] for call in calls]
        assert found == ["0", "1", "2"]
        assert not main.done()
        server.send(FrameKind.EXECUTE, batch_struct(1, 0).pack(1, 0, 0, 0, 1, 1))
        main.result(30)


def test_large_responses_wait_until_earlier_ones_were_received() -> None:
    sent = list[int]()

    def send(session: Session) -> None:
        for number in range(64):
            large = InferenceResponse([Tensor("y", np.zeros(1 << 20, np.uint8))])
            session.respond(1, large, False, ["y"])
            sent.append(number)

    with connected() as (session, server), ThreadPoolExecutor(1) as pool:
        sending = pool.submit(send, session)
        assert not wait([sending], 0.2).done  # the socket itself has room for all of them
        for received in range(64):
            assert len(sent) - received <= 16
            kind, _ = server.receive()
            assert kind is FrameKind.RESPONSE
        sending.result(30)
    assert len(sent) == 64


def test_waiting_threads_learn_of_the_servers_end() -> None:
    with connected() as (session, server), ThreadPoolExecutor(2) as pool:
        call = pool.submit(session.exec, request(), False)
        main = pool.submit(session.wait, lambda: session.batches)
        server.receive()
        server.sock.close()
        main.result(30)
        assert "has given no response" in call.result(30).error().message()


def test_an_event_loop_learns_of_a_broken_frame_that_a_thread_has_read() -> None:
    async def learn(session: Session, server: Server) -> None:
        learned = asyncio.Event()
        session.run_on(asyncio.get_running_loop(), learned.set)
        reading = asyncio.create_task(asyncio.to_thread(session.wait, lambda: False))
        server.sock.sendall(b"\xff" * 100)
        await asyncio.wait_for(learned.wait(), 30)
        with pytest.raises(BrokenFrame):
            await reading

    with connected() as (session, server):
        asyncio.run(learn(session, server))
        assert session.stopped


def test_replies_to_a_coroutine() -> None:
    async def ask(session: Session, server: Server) -> list[InferenceResponse]:
        loop = asyncio.get_running_loop()
        asked = session.async_exec(request(), True)
        _, told = server.receive()
        server.reply(told["call"], final=False, **empty(n=1))
        server.reply(told["call"], response=None)
        loop.add_reader(session.fileno(), session.poll)
        found = [response async for response in await asked]
        loop.remove_reader(session.fileno())
        return found

    with connected() as (session, server):
        first, last = asyncio.run(ask(session, server))
        assert json.loads(first.parameters()) == {"n": 1}
        assert last.output_tensors() == []


def test_unread_responses_are_cancelled() -> None:
    with connected() as (session, server):
        responses = session.exec(request(), True)
        _, told = server.receive()
        del responses
        assert server.receive() == (FrameKind.DROP_CALL, {"call": told["call"], "answers": False})


def test_a_cancelled_call_goes_on_until_the_other_model_ends_it() -> None:
    with connected() as (session, server):
        responses = session.exec(request(), True)
        _, told = server.receive()
        server.reply(told["call"], final=False, **empty(n=1))
        responses.cancel()
        assert server.receive() == (FrameKind.DROP_CALL, {"call": told["call"], "answers": True})
        server.reply(told["call"], response={"error": [TritonError.CANCELLED, "called off"]})
        first, last = responses
        assert json.loads(first.parameters()) == {"n": 1}
        error = last.error()
        assert error is not None
        assert (error.code(), error.message()) == (TritonError.CANCELLED, "called off")
        responses.cancel()  # it has ended
        assert list(responses) == [first, last]


def test_responses_can_be_iterated_again() -> None:
    with connected() as (session, server):
        responses = session.exec(request(), True)
        _, told = server.receive()
        for number in range(3):
            server.reply(told["call"], final=number == 2, **empty(n=number))
        first = next(responses)
        second = next(iter(responses))  # not finished: it goes on
        third = next(responses)
        assert next(responses, None) is None
        assert [json.loads(each.parameters())["n"] for each in (first, second, third)] == [0, 1, 2]
        for _ in range(2):
            assert list(responses) == [first, second, third]
        assert next(responses, None) is None

        async def again() -> list[InferenceResponse]:
            return [response async for response in responses]

        assert asyncio.run(again()) == [first, second, third]


def test_coroutines_call_before_one_of_them_waits_for_its_responses() -> None:
    """A `for` over responses blocks the event loop: all have to call before."""

    async def count(session: Session) -> int:
        return sum(1 for _ in await session.async_exec(request(), True))

    async def count_all(session: Session) -> list[int]:
        return await asyncio.gather(*[count(session) for _ in range(4)])

    with connected() as (session, server), ThreadPoolExecutor(1) as pool:
        counts = pool.submit(asyncio.run, count_all(session))
        calls = [server.receive()[1]["call"] for _ in range(4)]
        for call in calls:
            server.reply(call, False, **empty())
        for call in reversed(calls):
            server.reply(call, **empty())
        assert counts.result(30) == [2, 2, 2, 2]


def test_models_run_only_while_the_model_executes() -> None:
    with connected() as (session, _):
        session.open = False
        with pytest.raises(TritonModelException, match="only while the model executes"):
            session.exec(request(), False)
        with pytest.raises(TritonModelException, match="only while the model executes"):
            session.control({"op": "metric"})
    # They are controlled while it is initialized.
    with connected() as (session, server), ThreadPoolExecutor(1) as pool:
        session.open = False
        call = pool.submit(said, session)
        _, told = server.receive()
        server.reply(told["call"], value=True)
        assert call.result(30) == "True"


def test_a_control_call() -> None:
    with connected() as (session, server), ThreadPoolExecutor(1) as pool:
        for reply, expected in (({"value": True}, "True"), ({"error": [4, "not now"]}, "not now")):
            call = pool.submit(said, session)
            _, told = server.receive()
            server.reply(told["call"], **reply)
            assert call.result(30) == expected


def said(session: Session) -> str:
    try:
        return str(session.control({"op": "ready", "model": "m", "version": ""}))
    except TritonModelException as error:
        return str(error)


def sender_of(session: Session, number: int = 5) -> InferenceResponseSender:
    return InferenceResponseSender(Answering(session, number, ["y"], True))


def test_a_sender_waits_while_nobody_reads() -> None:
    with connected() as (session, server), ThreadPoolExecutor(1) as pool:
        server.send(FrameKind.HOLD, pack_request(5, True))
        sender = sender_of(session)
        sending = pool.submit(sender.send, InferenceResponse([]))
        server.send(FrameKind.HOLD, pack_request(6, False))
        server.send(FrameKind.HOLD, pack_request(5, False))
        sending.result(30)
        kind, told = server.receive()
        assert (kind, told["request"], told["final"]) == (FrameKind.RESPONSE, 5, False)
        sender.send(flags=1)
        assert server.receive()[1] == {"request": 5, "final": True, "sizes": []}


def test_a_sender_waits_on_an_event_loop() -> None:
    async def send(session: Session, server: Server) -> None:
        loop = asyncio.get_running_loop()
        server.send(FrameKind.HOLD, pack_request(5, True))
        sender = sender_of(session)
        sending = asyncio.ensure_future(sender.asend(InferenceResponse([])))
        await asyncio.sleep(0)
        assert not sending.done()
        loop.add_reader(session.fileno(), session.poll)
        server.send(FrameKind.HOLD, pack_request(5, False))
        await sending
        loop.remove_reader(session.fileno())
        await sender.asend(flags=1)

    with connected() as (session, server):
        asyncio.run(send(session, server))
        assert server.receive()[1]["request"] == 5


def test_responses_without_a_client_are_not_sent() -> None:
    with connected() as (session, server):
        sender = sender_of(session)
        assert not sender.is_cancelled()
        server.send(FrameKind.CANCEL, pack_request(5))
        assert sender.is_cancelled()
        sender.send(InferenceResponse([Tensor("y", np.zeros(1))]))
        sender.send(InferenceResponse([Tensor("y", np.zeros(1))]), 1)
        assert server.receive()[1] == {"request": 5, "final": True, "sizes": []}
    # A dropped sender ends its request.
    with connected() as (session, server):
        sender_of(session)
        _, told = server.receive()
        assert told["final"]
        assert "dropped the request" in told["response"]["error"][1]


def test_large_data_have_their_own_file() -> None:
    with connected() as (session, server):
        sender = sender_of(session)
        sender.send(InferenceResponse([Tensor("y", np.zeros(1 << 20, np.uint8))]), 1)
        data, files, _, _ = socket.recv_fds(server.sock, 65_536, 4)
        [(header, meta, _)] = FrameReader(FrameKind).feed(data)
        assert (header.data, len(files)) == (1 << 20, 1)
        assert json.loads(meta)["sizes"] == [1 << 20]
