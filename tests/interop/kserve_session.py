"""Typical uses of KServe's own clients, run in an interpreter of its own.

kserve and tritonclient register the same protobuf messages in one global pool, so the two cannot
be imported together. `python kserve_session.py HTTP GRPC` takes the server's addresses, runs
every check, and prints one JSON object with the traceback of each, empty where it passed.
"""

import asyncio
import json
import sys
import traceback
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import grpc.aio
import httpx
import numpy as np
import pytest

COUNTED = np.arange(32, dtype=np.int32).reshape(2, 16)
ONES = np.ones((2, 16), np.int32)


class Session:
    """The module `kserve`, and both of its clients connected to the server."""

    def __init__(self, kserve: Any, http: str, grpc_address: str) -> None:
        from kserve.inference_client import RESTConfig

        self.kserve = kserve
        self.url = f"http://{http}"
        self.rest = kserve.InferenceRESTClient(RESTConfig(protocol="v2", timeout=30))
        self.grpc = kserve.InferenceGRPCClient(grpc_address, timeout=30)

    def request(self, binary: bool, model: str = "simple", **options: Any) -> Any:
        """A request for `simple`; `binary` as raw bytes, otherwise as JSON or typed contents."""
        tensors = []
        for name, array in (("INPUT0", COUNTED), ("INPUT1", ONES)):
            tensor = self.kserve.InferInput(name, list(array.shape), "INT32")
            tensor.set_data_from_numpy(array, binary_data=binary)
            tensors.append(tensor)
        return self.kserve.InferRequest(model, tensors, **options)


async def rest_health(s: Session) -> None:
    assert await s.rest.is_server_live(s.url) is True
    assert await s.rest.is_server_ready(s.url) is True
    assert await s.rest.is_model_ready(s.url, "simple") is True
    assert await s.rest.is_model_ready(s.url, "nobody") is False


async def rest_infer_json(s: Session) -> None:
    answer = await s.rest.infer(s.url, s.request(False, request_id="an-id"), "simple")
    assert answer.id == "an-id"
    assert answer.model_name == "simple"
    check(answer)


async def rest_infer_binary(s: Session) -> None:
    check(await s.rest.infer(s.url, s.request(True), "simple"))


async def rest_infer_binary_answer(s: Session) -> None:
    headers: dict[str, str] = {}
    request = s.request(True, parameters={"binary_data_output": True})
    answer = await s.rest.infer(s.url, request, "simple", response_headers=headers)
    assert headers["content-type"] == "application/octet-stream"
    check(answer)


async def rest_infer_chosen_outputs(s: Session) -> None:
    from kserve.protocol.infer_type import RequestedOutput

    wanted = [RequestedOutput("OUTPUT1"), RequestedOutput("OUTPUT0", {"binary_data": True})]
    answer = await s.rest.infer(s.url, s.request(False, request_outputs=wanted), "simple")
    check(answer)


async def rest_infer_dictionary(s: Session) -> None:
    document = {
        "inputs": [
            {"name": "INPUT0", "shape": [1, 16], "datatype": "INT32", "data": [list(range(16))]},
            {"name": "INPUT1", "shape": [1, 16], "datatype": "INT32", "data": [1] * 16},
        ]
    }
    answer = await s.rest.infer(s.url, document, "simple")
    assert answer.outputs[0].as_numpy().tolist() == [list(range(1, 17))]


async def rest_infer_strings(s: Session) -> None:
    for binary in (False, True):
        tensor = s.kserve.InferInput("INPUT0", [1, 2], "BYTES")
        texts = np.array([["a", "Grüße"]], object)
        tensor.set_data_from_numpy(texts, binary_data=binary)
        request = s.kserve.InferRequest("simple_identity", [tensor])
        answer = await s.rest.infer(s.url, request, "simple_identity")
        assert answer.outputs[0].data == ["a", "Grüße"], answer.outputs[0].data


async def rest_digit(s: Session) -> None:
    image = np.zeros((1, 8, 8), np.float32)
    tensor = s.kserve.InferInput("image", [1, 8, 8], "FP32")
    tensor.set_data_from_numpy(image, binary_data=False)
    answer = await s.rest.infer(s.url, s.kserve.InferRequest("digits", [tensor]), "digits")
    assert {output.name: output.shape for output in answer.outputs}["probabilities"] == [1, 10]


async def rest_errors(s: Session) -> None:
    for request, model, status, text in (
        (s.request(False, "nobody"), "nobody", 404, "unknown model: 'nobody'"),
        ({"inputs": []}, "simple", 400, "expected 2 inputs but got 0 inputs"),
    ):
        with pytest.raises(httpx.HTTPStatusError, match=text) as caught:
            await s.rest.infer(s.url, request, model)
        assert caught.value.response.status_code == status


async def rest_version_1(s: Session) -> None:
    from kserve.inference_client import RESTConfig

    rest = s.kserve.InferenceRESTClient(RESTConfig(protocol="v1", timeout=30))
    try:
        assert await rest.is_model_ready(s.url, "simple") is True
        rows = [{"INPUT0": [1] * 16, "INPUT1": [2] * 16}]
        answer = await rest.infer(s.url, {"instances": rows}, "simple")
        assert answer == {"predictions": [{"OUTPUT0": [3] * 16, "OUTPUT1": [-1] * 16}]}
    finally:
        await rest.close()


async def grpc_health(s: Session) -> None:
    assert await s.grpc.is_server_live() is True
    assert await s.grpc.is_server_ready() is True
    assert await s.grpc.is_model_ready("simple") is True
    assert await s.grpc.is_model_ready("nobody") is False


async def grpc_infer_contents(s: Session) -> None:
    answer = await s.grpc.infer(s.request(False, request_id="an-id"))
    assert answer.id == "an-id"
    check(answer)


async def grpc_infer_raw(s: Session) -> None:
    check(await s.grpc.infer(s.request(True), headers=(("x-tenant", "a"),)))


async def grpc_infer_strings(s: Session) -> None:
    tensor = s.kserve.InferInput("INPUT0", [1, 2], "BYTES", data=["a", "Grüße"])
    answer = await s.grpc.infer(s.kserve.InferRequest("simple_identity", [tensor]))
    assert answer.outputs[0].as_numpy().tolist() == [[b"a", "Grüße".encode()]], answer.outputs[0]


async def grpc_errors(s: Session) -> None:
    with pytest.raises(grpc.aio.AioRpcError, match="unknown model: 'nobody'") as caught:
        await s.grpc.infer(s.request(False, "nobody"))
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND


async def many_at_once(s: Session) -> None:
    calls = [s.rest.infer(s.url, s.request(n % 2 == 0), "simple") for n in range(20)]
    calls += [s.grpc.infer(s.request(n % 2 == 0)) for n in range(20)]
    for answer in await asyncio.gather(*calls):
        check(answer)


def check(answer: Any) -> None:
    """Assert both outputs of the model `simple` for the request."""
    outputs = {output.name: output.as_numpy() for output in answer.outputs}
    assert np.array_equal(outputs["OUTPUT0"], COUNTED + ONES), outputs
    assert np.array_equal(outputs["OUTPUT1"], COUNTED - ONES), outputs


CHECKS: dict[str, Callable[[Session], Awaitable[None]]] = {
    check.__name__: check
    for check in (
        rest_health, rest_infer_json, rest_infer_binary, rest_infer_binary_answer,
        rest_infer_chosen_outputs, rest_infer_dictionary, rest_infer_strings, rest_digit,
        rest_errors, rest_version_1, grpc_health, grpc_infer_contents, grpc_infer_raw,
        grpc_infer_strings, grpc_errors, many_at_once,
    )
}  # fmt: skip


async def main(http: str, grpc_address: str) -> dict[str, str]:
    import kserve

    outcomes: dict[str, str] = {}
    session = Session(kserve, http, grpc_address)
    for name, check in CHECKS.items():
        try:
            await check(session)
            outcomes[name] = ""
        except Exception:  # all of them: the report is what the test is for
            outcomes[name] = traceback.format_exc()
    await session.rest.close()
    await session.grpc.close()
    return outcomes


if __name__ == "__main__":
    print(json.dumps(asyncio.run(main(sys.argv[1], sys.argv[2]))))
