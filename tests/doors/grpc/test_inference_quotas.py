"""Quotas of clients over gRPC, with controlled models."""

import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from headrace.core.quotas import Quota, Quotas
from headrace.doors.grpc.call import Handlers
from headrace.doors.grpc.inference import InferenceService, stream_opener
from headrace.doors.grpc.native.server import NativeServer
from headrace.engine.client_accounts import limit_clients
from headrace.protocol.pb import grpc_service_pb2 as pb
from headrace.protocol.proxies import TrustedProxies
from headrace.protocol.v2_protobuf import first_model
from tests.doors.fakes import FakeEngine, until

INFER = "/inference.GRPCInferenceService/ModelInfer"
STREAM = "/inference.GRPCInferenceService/ModelStreamInfer"


def message(model: str = "plain") -> bytes:
    """An infer request."""
    asked = pb.ModelInferRequest(model_name=model, raw_input_contents=[bytes(16)])
    asked.inputs.add(name="x", datatype="FP32", shape=[1, 4])
    return bytes(asked.SerializeToString())


def renamed(first: str, last: str) -> bytes:
    """An infer request that begins with one model's name and ends with another's."""
    return message(first) + bytes(pb.ModelInferRequest(model_name=last).SerializeToString())


@asynccontextmanager
async def serving(engine: FakeEngine) -> AsyncIterator[Any]:
    """A channel to a server on a free port."""
    listener = socket.create_server(("127.0.0.1", 0))
    listener.setblocking(False)
    direct, sessions = InferenceService(engine, 1 << 20), stream_opener(engine, 1 << 20)
    handlers = Handlers({INFER: direct}, {}, {STREAM: sessions})
    server = NativeServer(handlers, engine.admission, 1 << 20, False)
    await server.start([listener])
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{listener.getsockname()[1]}") as channel:
            yield channel
    finally:
        await server.stop(1)


async def refused(call: Any) -> dict[str, str | bytes]:
    """The trailing metadata of a call that is refused for a quota."""
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await call
    assert raised.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "of its quota 'q'" in (raised.value.details() or "")
    return dict(raised.value.trailing_metadata())


async def test_calls_above_a_quota_are_refused() -> None:
    engine = FakeEngine()
    limit_clients(engine.admission, Quotas((Quota("q", ("*",), ("pl*",), requests=1),)))
    async with serving(engine) as channel:
        infer = channel.unary_unary(INFER)
        first = infer(message())
        await until(lambda: len(engine.plain.work) == 1)
        metadata = await refused(infer(message()))
        assert b"google.rpc.RetryInfo" in metadata["grpc-status-details-bin"]
        await refused(infer(renamed("many", "plain")))  # the last name counts
        engine.plain.last.answer(10, final=True)
        await first
        call = infer(renamed("many", "plain"))
        await until(lambda: len(engine.plain.work) == 2)
        engine.plain.last.answer(10, final=True)
        await call
    assert engine.admission.quota_refused == {("q", "requests"): 2}
    assert (engine.admission.requests, engine.admission.bytes) == (0, 0)


async def test_requests_of_a_stream_above_a_quota_are_refused() -> None:
    engine = FakeEngine()
    limit_clients(engine.admission, Quotas((Quota("q", ("*",), requests_per_sec=0.01, burst=2),)))
    async with serving(engine) as channel:
        stream = channel.stream_stream(STREAM)()
        for _ in range(2):
            await stream.write(message())
        await until(lambda: len(engine.plain.work) == 2)
        await stream.write(message())
        for work in engine.plain.work:
            work.answer(10, final=True)
        answers = [pb.ModelStreamInferResponse.FromString(await stream.read()) for _ in range(3)]
        assert [bool(answer.error_message) for answer in answers] == [False, False, True]
        assert "the limit of 0.01 requests/s of its quota 'q'" in answers[2].error_message
        await stream.done_writing()
    await until(lambda: engine.admission.requests == 0)


async def test_a_trusted_proxy_names_the_clients_of_calls() -> None:
    engine = FakeEngine()
    limit_clients(engine.admission, Quotas((Quota("q", ("*",), requests=1),)))
    engine.admission.proxies = TrustedProxies(["127.0.0.1"])
    async with serving(engine) as channel:
        infer = channel.unary_unary(INFER)
        calls = [
            infer(message(), metadata=[("x-forwarded-for", client)])
            for client in ("192.0.2.1", "192.0.2.2", "2001:db8::1")
        ]
        await until(lambda: len(engine.plain.work) == 3)
        await refused(infer(message(), metadata=[("x-forwarded-for", "2001:db8::2")]))
        await refused(infer(message(), metadata=[("forwarded", "for=192.0.2.1")]))
        for work in engine.plain.work:
            work.answer(10, final=True)
        for call in calls:
            await call


def test_the_name_at_the_start_of_a_message() -> None:
    assert first_model(message("digits")) == "digits"
    assert first_model(renamed("digits", "other")) == "digits"
    assert first_model(message("m" * 200)) == ""  # too long to be worth it
    for data in (b"", b"\x0a", b"\x12\x01x", message()[5:]):
        assert first_model(data) == ""
