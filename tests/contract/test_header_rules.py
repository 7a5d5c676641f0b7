"""Headers forwarded to models, and headers required for restricted operations."""

import json
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import grpc
import pytest

from headrace.core.errors import Restricted
from headrace.protocol.pb import POOL
from headrace.protocol.pb import grpc_service_pb2 as pb
from headrace.protocol.status import STATUS
from headrace.settings import Settings
from tests.contract.conftest import CARRIERS, FIRST_CARRIER
from tests.support.grpc_client import OPTIONS, SERVICE, infer_message, procedure
from tests.support.http2_socket import REQUEST, Answer, Http2Socket, prefixed
from tests.support.http_socket import HttpSocket, RawAnswer, ask, request
from tests.support.scrape import until
from tests.support.server_process import ServerProcess, clean_server

_MODEL = """
import json
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        def answer(request):
            told = np.array([request.parameters().encode()], np.object_)
            return pb_utils.InferenceResponse([pb_utils.Tensor("TOLD", told)])
        return [answer(request) for request in requests]
"""
_CONFIG = """
backend: "python"
max_batch_size: 0
input { name: "X" data_type: TYPE_INT32 dims: 1 optional: true }
output { name: "TOLD" data_type: TYPE_STRING dims: 1 }
"""
_CATEGORIES = {
    "health": "health", "metadata,model-config": "meta", "inference": "infer",
    "model-repository": "admin", "shared-memory,trace,logging": "other",
}  # fmt: skip
_INFER = "/v2/models/told/infer"
_BODY = b'{"inputs":[]}'
_KEY = {"X_Infer": "a=secret of infer"}
_GRPC_KEY = ("triton-grpc-protocol-x-infer", "a=secret of infer")


def _rules(option: str) -> list[str]:
    return [f"--{option}={c}:X-{h}=a=secret of {h}" for c, h in _CATEGORIES.items()]


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that answers with the parameters of the request."""
    root = tmp_path_factory.mktemp("told")
    (root / "told" / "1").mkdir(parents=True)
    (root / "told" / "config.pbtxt").write_text(_CONFIG)
    (root / "told" / "1" / "model.py").write_text(_MODEL)
    return root


@pytest.fixture(scope="module", params=FIRST_CARRIER)
def served(request: pytest.FixtureRequest, repository: Path) -> Iterator[ServerProcess]:
    """A server that forwards some headers and requires a key for everything."""
    options = (
        *CARRIERS[request.param], "--http-header-forward-pattern=^x-tell|timeout",
        "--grpc-header-forward-pattern=^x-tell|timeout",
        *_rules("http-restricted-api"), *_rules("grpc-restricted-protocol"),
        "--restricted-api=statistics:X-both=a=secret of both",
    )  # fmt: skip
    with clean_server(repository, options=options) as process:
        yield process


def _told(answer: RawAnswer) -> dict[str, Any]:
    document = answer.document
    text = document["TOLD"] if "TOLD" in document else document["outputs"][0]["data"][0]
    told: dict[str, Any] = json.loads(text)
    return told


# --- forwarding


def test_headers_become_parameters(served: ServerProcess) -> None:
    """Under the client's spelling of their names, also for large requests."""
    with HttpSocket(served.http) as connection:
        for _ in range(2):  # the second time the head is known
            answer = connection.ask("POST", _INFER, _BODY, **_KEY, X_Tell_A="1", X_Other="2")
            assert _told(answer) == {"X-Tell-A": "1"}
        answer = connection.ask("POST", _INFER, _BODY, **_KEY, X_Tell_A="3", x_tell_b='"\xe4\\')
        assert _told(answer) == {"X-Tell-A": "3", "x-tell-b": '"\xe4\\'}
        connection.send(request("POST", _INFER, _BODY, **_KEY, X_Tell_C="4", Connection="close"))
        assert _told(connection.receive()) == {"X-Tell-C": "4"}
    # A header wins over a parameter of the body.
    body = b'{"parameters":{"X-Tell":"body","more":7},"inputs":[]}'
    answer = ask(served.http, "POST", _INFER, body, **_KEY, X_Tell="header")
    assert _told(answer) == {"X-Tell": "header", "more": 7}


@pytest.mark.parametrize("end", ["generate", "generate_stream"])
def test_headers_of_generate(served: ServerProcess, end: str) -> None:
    path = f"/v2/models/told/{end}"
    answer = ask(served.http, "POST", path, b'{"more":"7"}', **_KEY, X_Tell="1")
    document = json.loads(answer.body.removeprefix(b"data: "))
    assert json.loads(document["TOLD"]) == {"X-Tell": "1", "more": "7"}


@pytest.mark.parametrize("end", ["infer", "generate", "generate_stream"])
def test_a_reserved_header_is_refused(served: ServerProcess, end: str) -> None:
    path = f"/v2/models/told/{end}"
    with HttpSocket(served.http) as connection:
        for _ in range(2):
            answer = connection.ask("POST", path, _BODY, **_KEY, timeout="1")
            assert answer.status == 400
            assert answer.error == (
                "Header 'timeout' is reserved for Triton usage and cannot be forwarded."
            )


def _call(channel: grpc.Channel, *metadata: tuple[str, str | bytes]) -> dict[str, Any]:
    call = procedure(channel, f"{SERVICE}/ModelInfer", pb.ModelInferResponse)
    answer = call(infer_message("told", []), timeout=30, metadata=metadata)
    told: dict[str, Any] = json.loads(answer.raw_output_contents[0][4:])
    return told


def test_metadata_become_parameters(served: ServerProcess) -> None:
    given = (_GRPC_KEY, ("x-tell-a", "1"), ("x-other", "2"), ("x-tell-bin", b"3"))
    with grpc.insecure_channel(served.grpc, OPTIONS) as channel:
        for _ in range(2):
            assert _call(channel, *given) == {"x-tell-a": "1"}
        assert _call(channel, _GRPC_KEY) == {}
        with pytest.raises(grpc.RpcError) as caught:
            _call(channel, _GRPC_KEY, ("timeout", "1"))
    error: Any = caught.value
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "Header 'timeout' is reserved for Triton usage" in error.details()


def _stream(channel: grpc.Channel, *metadata: tuple[str, str]) -> list[pb.ModelStreamInferResponse]:
    call = channel.stream_stream(
        f"{SERVICE}/ModelStreamInfer",
        pb.ModelInferRequest.SerializeToString,
        pb.ModelStreamInferResponse.FromString,
    )
    return list(call(iter([infer_message("told", [])] * 2), timeout=30, metadata=metadata))


def test_metadata_of_a_stream_go_with_all_its_requests(served: ServerProcess) -> None:
    with grpc.insecure_channel(served.grpc, OPTIONS) as channel:
        answers = _stream(channel, _GRPC_KEY, ("x-tell", "1"))
        told = [json.loads(a.infer_response.raw_output_contents[0][4:]) for a in answers]
        assert told == [{"x-tell": "1"}] * 2
        refused = _stream(channel, _GRPC_KEY, ("timeout", "1"))
    assert len(refused) == 2
    for answer in refused:
        assert "Header 'timeout' is reserved for Triton usage" in answer.error_message


# --- restrictions


@pytest.mark.parametrize(
    ("header", "method", "path"),
    [
        ("health", "GET", "/v2/health/live"), ("health", "HEAD", "/v2/health/ready"),
        ("meta", "GET", "/v2"), ("meta", "GET", "/v2/models/told/versions/1/config"),
        ("infer", "POST", "/v2/models/told/infer"), ("infer", "POST", "/v2/models/told/generate"),
        ("admin", "POST", "/v2/repository/index"), ("both", "GET", "/v2/models/told/stats"),
    ],
)  # fmt: skip
def test_restricted_routes(served: ServerProcess, header: str, method: str, path: str) -> None:
    text = f"This API is restricted, expecting header 'x-{header}'"
    body = _BODY if method == "POST" else b""
    right = f"a=secret of {header}"
    with HttpSocket(served.http) as connection:
        for wrong in ({}, {"X_" + header: "no"}, {"X_" + header: right + "2"}, {"X_no": right}):
            answer = connection.ask(method, path, body, **wrong)
            assert answer.status == 403
            assert method == "HEAD" or answer.error == text
        assert connection.ask(method, path, body, **{"X_" + header: right}).status != 403


def test_every_spelling_of_a_route_is_restricted(served: ServerProcess) -> None:
    for path in ("/v2/models/told/%69nfer", "/%76%32/models/told/infer", "/v2/models/t%6fld/infer"):
        assert ask(served.http, "POST", path, _BODY).status == 403
    assert ask(served.http, "DELETE", "/v2/models/told").status == 403
    with HttpSocket(served.http) as connection:
        connection.send(
            b"POST /v2/models/told/infer HTTP/1.1\r\nHost: test\r\nTransfer-Encoding: chunked\r\n"
            b"\r\nd\r\n" + _BODY + b"\r\n0\r\n\r\n"
        )
        assert connection.receive().status == 403
        key = b"x-infer: a=secret of infer\r\n"
        connection.send(
            b"POST /v2/models/told/infer HTTP/1.1\r\nHost: test\r\nContent-Length: 13\r\n"
            + key + key + b"\r\n" + _BODY
        )  # fmt: skip
        assert connection.receive().status == 403


def test_protocol_descriptions_are_unrestricted(served: ServerProcess) -> None:
    assert ask(served.http, "GET", "/docs").status == 200
    assert ask(served.http, "GET", "/openapi.json").status == 200
    # Models are listed like metadata: to clients with the key.
    told = "/v2/models/told/infer"
    with HttpSocket(served.http) as connection:
        assert told not in connection.ask("GET", "/openapi.json").document["paths"]
        right = connection.ask("GET", "/openapi.json", b"", **{"X_meta": "a=secret of meta"})
        assert told in right.document["paths"]
        link = b">told</a>"
        assert link not in connection.ask("GET", "/").body
        assert link in connection.ask("GET", "/", b"", **{"X_meta": "a=secret of meta"}).body
    assert ask(served.metrics, "GET", "/metrics").status == 200
    assert ask(served.http, "GET", "/v2/nothing").status == 404


_PROCEDURES = [
    ("triton-grpc-protocol-x-", "health", ["ServerLive", "ServerReady", "ModelReady"]),
    ("triton-grpc-protocol-x-", "meta", ["ServerMetadata", "ModelMetadata", "ModelConfig"]),
    ("triton-grpc-protocol-x-", "infer", ["ModelInfer"]),
    ("triton-grpc-protocol-x-", "admin", ["RepositoryIndex", "RepositoryModelLoad"]),
    ("x-", "both", ["ModelStatistics"]),  # by the rule that holds for HTTP, too
]


@pytest.mark.parametrize(("prefix", "header", "names"), _PROCEDURES)
def test_restricted_procedures(
    served: ServerProcess, prefix: str, header: str, names: Sequence[str]
) -> None:
    key = prefix + header
    with grpc.insecure_channel(served.grpc, OPTIONS) as channel:
        for path in [f"{SERVICE}/{name}" for name in names]:
            call: Any = channel.unary_unary(path)
            for metadata in ((), ((key, "no"),), ((f"y-{header}", f"a=secret of {header}"),)):
                code, text = _outcome(call, metadata)
                assert code is grpc.StatusCode.UNAVAILABLE
                assert text == f"This protocol is restricted, expecting header '{key}'"
            _, text = _outcome(call, ((key, f"a=secret of {header}"),))
            assert "restricted" not in text


def _outcome(call: Any, metadata: Sequence[tuple[str, str]]) -> tuple[grpc.StatusCode, str]:
    future = call.future(b"", timeout=30, metadata=metadata)
    return future.code(), future.details() or ""


def test_restricted_streams_and_open_reflection(served: ServerProcess) -> None:
    with grpc.insecure_channel(served.grpc, OPTIONS) as channel:
        with pytest.raises(grpc.RpcError) as caught:
            _stream(channel)
        watch: Any = channel.unary_stream("/grpc.health.v1.Health/Watch")
        with pytest.raises(grpc.RpcError) as watched:
            list(watch(b"", timeout=30))
        check: Any = channel.unary_unary("/grpc.health.v1.Health/Check")
        assert _outcome(check, ())[0] is grpc.StatusCode.UNAVAILABLE
        key = ("triton-grpc-protocol-x-health", "a=secret of health")
        assert _outcome(check, (key,))[0] is grpc.StatusCode.OK
        watching = watch(b"", timeout=30, metadata=(key,))
        assert next(iter(watching))
        watching.cancel()
    for caught_error, header in ((caught, "infer"), (watched, "health")):
        error: Any = caught_error.value
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        assert f"expecting header 'triton-grpc-protocol-x-{header}'" in error.details()
    with grpc.insecure_channel(served.grpc, OPTIONS) as channel:
        path = "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo"
        info: Any = channel.stream_stream(path)
        [answer] = info(iter([b"\x3a\x01*"]), timeout=30)
    assert POOL.FindServiceByName("inference.GRPCInferenceService").full_name.encode() in answer


def test_statuses_of_a_restricted_operation() -> None:
    assert (STATUS[Restricted].http, STATUS[Restricted].grpc) == (403, 14)


# --- settings


_ADMIN = "model-repository,trace:x=y"


@pytest.mark.parametrize(("given", "warnings"), [
    ({}, []), ({"restricted_api": [_ADMIN]}, []),
    ({"http_restricted_api": [_ADMIN], "grpc_restricted_protocol": [_ADMIN]}, []),
    ({"http_restricted_api": [_ADMIN], "allow_grpc": False}, []),
    ({"grpc_restricted_protocol": [_ADMIN], "allow_http": False}, []),
    ({"http_restricted_api": [_ADMIN], "grpc_restricted_protocol": ["trace,health:x=y"]},
     ["model-repository: restricted over HTTP, but open to all over gRPC;"
     " --restricted-api restricts both", "health: restricted over gRPC, but open to all over HTTP;"
     " --restricted-api restricts both"]),
])  # fmt: skip
def test_restriction_of_one_door(given: dict[str, Any], warnings: list[str]) -> None:
    assert Settings(**given).open_at_one_door == warnings


def test_restricting_one_door_logs_a_warning(repository: Path) -> None:
    with ServerProcess(
        repository, options=["--http-restricted-api=model-repository:a=secret"], wait=False
    ) as process:
        warning = "model-repository: restricted over HTTP, but open to all over gRPC"
        until(lambda: warning in process.log, "the warning")  # a thread writes it
        assert "secret" not in process.log


@pytest.mark.slow
def test_rules_from_the_environment(repository: Path) -> None:
    rules = "health:a=b:c\nmetadata:d=e"
    environment = {"HEADRACE_HTTP_RESTRICTED_API": rules, "HEADRACE_GRPC_RESTRICTED_PROTOCOL": ""}
    with ServerProcess(repository, environment=environment) as process:
        assert ask(process.http, "GET", "/v2/health/live").status == 403
        assert ask(process.http, "GET", "/v2/health/live", a="b:c").status == 200
        assert ask(process.http, "GET", "/v2", d="e").status == 200


@pytest.mark.parametrize("carrier", FIRST_CARRIER)
def test_rules_are_read_again(repository: Path, tmp_path: Path, carrier: str) -> None:
    """SIGHUP changes them for the next request of every connection, which stays open."""
    settings = tmp_path / "settings.toml"
    settings.write_text("")
    message = prefixed(infer_message("told", []).SerializeToString())
    index = "/inference.GRPCInferenceService/RepositoryIndex"
    listed = [(n, index if n == ":path" else v) for n, v in REQUEST]
    options = (*CARRIERS[carrier], f"--config-file={settings}")
    with (
        clean_server(repository, options=options) as server,
        HttpSocket(server.http) as http,
        Http2Socket(server.grpc) as http2,
    ):

        def told(**headers: str) -> RawAnswer:
            return http.ask("POST", _INFER, _BODY, **headers)

        def call(fields: list[tuple[str, str]], *more: tuple[str, str]) -> Answer:
            return http2.call([*fields, *more], message if fields is REQUEST else prefixed(b""))

        def status(answer: Answer) -> str:
            return (answer.headers | answer.trailers)["grpc-status"]

        def read_again(*lines: str) -> None:
            settings.write_text("\n".join(lines))
            server.send(signal.SIGHUP)

        def statuses() -> list[object]:
            found = [told(X_Tell="1"), http.ask("GET", "/v2"), http.ask("GET", "/v2/health/live")]
            calls = [call(REQUEST), call(listed)]
            return [*(answer.status for answer in found), *map(status, calls)]

        def changes(origin: str) -> int:
            return http.ask("POST", "/v2/logging", b"{}", Origin=origin).status

        assert statuses() == [200, 200, 200, "0", "0"]
        assert _told(told(X_Tell="1")) == {}
        assert changes("http://page.example") == 403
        read_again(
            'restricted-api = ["inference,metadata,health:x-key=first"]',
            'grpc-restricted-protocol = ["model-repository:x-key=first"]',
            'http-header-forward-pattern = "^x-tell"',
            'grpc-header-forward-pattern = "^x-tell"',
            'http-allowed-origin = ["http://page.example"]',
        )
        until(lambda: statuses() == [403, 403, 403, "14", "14"], "the new rules")
        assert changes("http://page.example") == 200
        assert "first" not in server.log
        server.await_logged("model-repository: restricted over gRPC, but open to all over HTTP")
        assert _told(told(X_Key="first", X_Tell="1")) == {"X-Tell": "1"}
        assert b'"x-tell": "1"' in call(REQUEST, ("x-key", "first"), ("x-tell", "1")).data
        read_again('restricted-api = ["inference:x-key=second"]')
        until(lambda: statuses() == [403, 200, 200, "14", "0"], "another key")
        assert told(X_Key="first").status == 403
        assert status(call(REQUEST, ("x-key", "first"))) == "14"
        assert _told(told(X_Key="second", X_Tell="1")) == {}
        assert status(call(REQUEST, ("x-key", "second"))) == "0"
        read_again('restricted-api = ["nothing:x-key=third"]')
        server.await_logged("SIGHUP: settings stay as they are")
        assert told(X_Key="second").status == 200
        read_again()
        until(lambda: statuses() == [200, 200, 200, "0", "0"], "no rules")
