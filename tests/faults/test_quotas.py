"""Quotas of a file of access, on a server with and without front ends."""

import asyncio
import json
import os
from pathlib import Path

import grpc
import numpy as np
import psutil
import pytest

from headrace.core.datatypes import Datatype
from headrace.protocol.pb import grpc_service_pb2 as pb
from tests.models.onnx_graphs import identity, write_model
from tests.support.raw_clients import (
    HttpAnswer,
    HttpConnection,
    open_channel,
    open_http2,
    post,
    procedure,
)
from tests.support.server_process import ServerProcess
from tests.support.watching import metrics, until

pytestmark = pytest.mark.slow

_BODY = json.dumps({
    "inputs": [{"name": "INPUT0", "datatype": "FP32", "shape": [1, 4], "data": [1, 2, 3, 4]}]
}).encode()  # fmt: skip
_RULES = """
[roles.scorer]
may = ["*"]
[anonymous]
roles = "scorer"
[[quotas]]
name = "slow"
of = ["role:scorer"]
models = ["x*"]
requests_per_sec = 0.001
burst = %d
"""


async def infer(server: ServerProcess, client: str, model: str = "xs") -> HttpAnswer:
    headers = {"x-forwarded-for": client}
    return await post(server.http, f"/v2/models/{model}/infer", _BODY, headers)


def message() -> bytes:
    asked = pb.ModelInferRequest(model_name="xs")
    asked.inputs.add(name="INPUT0", datatype="FP32", shape=[1, 4])
    asked.raw_input_contents.append(np.arange(4, dtype=np.float32).tobytes())
    return bytes(asked.SerializeToString())


@pytest.mark.parametrize("front_ends", [0, 2])
async def test_a_quota_holds_over_doors_and_front_ends(front_ends: int, tmp_path: Path) -> None:
    for model in ("xs", "other"):
        write_model(
            tmp_path / "models", model, identity(Datatype.FP32, ["rows", 4]), "max_batch_size: 8"
        )
    rules = tmp_path / "access.toml"
    rules.write_text(_RULES % 5)
    options = [f"--access={rules}", "--trusted-proxies=127.0.0.0/8", f"--frontends={front_ends}"]
    with ServerProcess(tmp_path / "models", options=options) as server:
        statuses = [(await infer(server, "192.0.2.1")).status for _ in range(3)]
        async with open_channel(server.grpc) as channel:
            infer_once = procedure(channel, "ModelInfer")
            metadata = (("x-forwarded-for", "192.0.2.1"),)
            for _ in range(2):
                await infer_once(message(), metadata=metadata)
            with pytest.raises(grpc.aio.AioRpcError, match="of its quota 'slow'") as raised:
                await infer_once(message(), metadata=metadata)
            assert raised.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        answers = [await infer(server, "192.0.2.1") for _ in range(12)]
        assert statuses == [200] * 3
        assert {answer.status for answer in answers} == {429}
        assert answers[0].headers["ratelimit-policy"] == '"slow";q=5;qu="requests";w=5000'
        assert 900 < int(answers[-1].headers["retry-after"]) <= 1000
        assert (await infer(server, "192.0.2.1", "other")).status == 200
        assert (await infer(server, "192.0.2.2")).status == 200
        name = 'headrace_quota_refused_total{limit="requests_per_sec",quota="slow"}'
        await until(lambda: metrics(server), lambda found: found.get(name) == 13)
        changed = tmp_path / "changed.toml"
        changed.write_text(_RULES % 6)
        os.replace(changed, rules)
        await until(
            lambda: infer(server, "192.0.2.1"), lambda answer: answer.status == 200
        )  # a changed quota begins anew
        assert server.stop() == 0


@pytest.mark.parametrize("front_ends", [0, 1])
async def test_a_restart_gives_a_burst_once_more(front_ends: int, tmp_path: Path) -> None:
    """A server that starts has full buckets; a front end that starts has those of its server."""
    model = identity(Datatype.FP32, ["rows", 4])
    write_model(tmp_path / "models", "xs", model, "max_batch_size: 8")
    rules = tmp_path / "access.toml"
    rules.write_text(_RULES % 5)
    options = [f"--access={rules}", "--trusted-proxies=127.0.0.0/8", f"--frontends={front_ends}"]

    async def status(server: ServerProcess) -> int:
        try:
            return (await infer(server, "192.0.2.1")).status
        except (OSError, asyncio.IncompleteReadError):  # there is no front end
            return 0

    for _ in range(2):
        with ServerProcess(tmp_path / "models", options=options) as server:
            assert [await status(server) for _ in range(7)] == [200] * 5 + [429] * 2
            for child in psutil.Process(server.pid).children() if front_ends else ():
                child.kill()
                child.wait()
            await until(lambda: status(server), bool)
            assert [await status(server) for _ in range(3)] == [429] * 3
            assert server.stop() == 0


_FEW = """
[roles.scorer]
may = ["*"]
[anonymous]
roles = "scorer"
[[quotas]]
name = "few"
of = ["address"]
connections = 2
"""


async def test_connections_beyond_a_quota_are_told_so(tmp_path: Path) -> None:
    model = identity(Datatype.FP32, ["rows", 4])
    write_model(tmp_path / "models", "xs", model, "max_batch_size: 8")
    rules = tmp_path / "access.toml"
    rules.write_text(_FEW)
    with ServerProcess(tmp_path / "models", options=[f"--access={rules}"]) as server:
        async with (
            await HttpConnection.open(server.http) as first,
            await HttpConnection.open(server.http) as second,
        ):
            for each in (first, second):
                assert (await each.post("/v2/models/xs/infer", _BODY)).status == 200
            async with await HttpConnection.open(server.http) as third:
                answer = await third.receive()
                assert answer.status == 429
                assert b"the limit of 2 connections of its quota 'few'" in answer.body
                assert answer.headers["retry-after"] == "1"
                assert answer.headers["ratelimit-policy"] == '"few";q=2;qu="connections"'
                assert await third.ended()
            async with open_channel(server.grpc) as channel:
                with pytest.raises(grpc.aio.AioRpcError, match="quota 'few'") as raised:
                    await procedure(channel, "ModelInfer")(message())
            assert raised.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            trailers = dict(raised.value.trailing_metadata())
            assert trailers["retry-after"] == "1"
            assert b"google.rpc.RetryInfo" in trailers["grpc-status-details-bin"]
            async with open_http2(server.grpc) as silent:
                await silent.ended()
            refused = 'headrace_quota_refused_total{limit="connections",quota="few"}'
            found = await metrics(server)
            assert (found[refused], found["headrace_refused_connections_total"]) == (3, 3)
            await first.close()
            async with open_channel(server.grpc) as channel:
                infer_once = procedure(channel, "ModelInfer")

                async def status() -> grpc.StatusCode:
                    try:
                        await infer_once(message())
                    except grpc.aio.AioRpcError as error:
                        return error.code()
                    return grpc.StatusCode.OK

                await until(status, lambda found: found is grpc.StatusCode.OK)
        assert server.stop() == 0
