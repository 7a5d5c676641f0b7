"""tritonclient with required headers and client keep-alive."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http
from tritonclient.utils import InferenceServerException

from tests.support.server_process import ServerProcess, onnx_examples

_HTTP_KEY = {"infer-key": "secret"}
_GRPC_KEY = {"triton-grpc-protocol-infer-key": "secret"}
_ROWS = np.zeros((1, 16), np.int32)


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server that requires a key, and sends PINGs."""
    options = (
        "--http-restricted-api=inference:infer-key=secret",
        "--grpc-restricted-protocol=inference:infer-key=secret",
        "--grpc-keepalive-time=50", "--grpc-keepalive-permit-without-calls=true",
        "--grpc-http2-min-recv-ping-interval-without-data=10",
        "--grpc-infer-response-compression-level=low",
    )  # fmt: skip
    repository: Path = onnx_examples(tmp_path_factory.mktemp("models"))
    with ServerProcess(repository, options=options) as server:
        yield server


def test_over_http(guarded: ServerProcess) -> None:
    inputs = [tritonclient.http.InferInput(n, [1, 16], "INT32") for n in ("INPUT0", "INPUT1")]
    for tensor in inputs:
        tensor.set_data_from_numpy(_ROWS)
    with tritonclient.http.InferenceServerClient(guarded.http) as client:
        assert client.is_server_ready()
        with pytest.raises(InferenceServerException, match="expecting header 'infer-key'") as none:
            client.infer("simple", inputs)
        assert none.value.status() == "403"
        answer = client.infer("simple", inputs, headers=_HTTP_KEY)
        assert answer.as_numpy("OUTPUT0").tolist() == _ROWS.tolist()


def test_over_grpc(guarded: ServerProcess) -> None:
    inputs = [tritonclient.grpc.InferInput(n, [1, 16], "INT32") for n in ("INPUT0", "INPUT1")]
    for tensor in inputs:
        tensor.set_data_from_numpy(_ROWS)
    keep_alive = tritonclient.grpc.KeepAliveOptions(
        keepalive_time_ms=100, keepalive_timeout_ms=10_000,
        keepalive_permit_without_calls=True, http2_max_pings_without_data=0,
    )  # fmt: skip
    with tritonclient.grpc.InferenceServerClient(
        guarded.grpc, keepalive_options=keep_alive
    ) as client:
        with pytest.raises(
            InferenceServerException, match="header 'triton-grpc-protocol-infer-key'"
        ) as none:
            client.infer("simple", inputs)
        assert none.value.status() == "StatusCode.UNAVAILABLE"
        for _ in range(20):
            answer = client.infer("simple", inputs, headers=_GRPC_KEY)
            assert answer.as_numpy("OUTPUT0").tolist() == _ROWS.tolist()
