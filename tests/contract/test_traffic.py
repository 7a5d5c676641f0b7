"""Traffic between versions of a model, over every door."""

import json
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.core.errors import InvalidRequest, NotFound, ServerError, Unavailable
from headrace.protocol.pb import grpc_service_pb2 as pb
from headrace.protocol.pb import traffic_pb2 as pb_traffic
from tests.contract import graphs
from tests.contract.conftest import BEHIND_DOORS, CARRIERS
from tests.models.onnx_graphs import lookup, write_model
from tests.models.python_models import tensors, write_python_model
from tests.models.streaming_models import TELLER, TELLER_CONFIG
from tests.support.client import Client, Input, strings
from tests.support.grpc_client import GrpcClient, infer_message, read_answer
from tests.support.http_socket import ask, events
from tests.support.scrape import Scraper, until
from tests.support.server_process import ServerProcess, clean_server
from tests.support.traffic_client import GrpcTraffic, HttpTraffic, TrafficClient

SPLIT = {"split": {"1": 50, "2": 50}}
CONFIG = (
    "max_batch_size: 8\nversion_policy {{ all {{}} }}\n"
    "parameters {{ key: 'traffic' value {{ string_value: '{}' }} }}"
)
# Requests may expire sooner than by default.
EXPIRING = """
    dynamic_batching {
      default_queue_policy { default_timeout_microseconds: 60000000 allow_timeout_override: true }
    }
"""
X = np.zeros((1, 1), np.float32)
USERS = [f"user-{number}" for number in range(24)]


def write_versions(
    root: Path, name: str, rules: object, graph: Callable[[int], bytes], more: str = ""
) -> None:
    """A model with three versions, and `more` in its configuration."""
    for number in (1, 2, 3):
        config = CONFIG.format(json.dumps(rules)) + more
        write_model(root, name, graph(number), config, version=number)


@pytest.fixture(scope="session", params=BEHIND_DOORS)
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerProcess]:
    """A server of such models, for each carrier."""
    root = tmp_path_factory.mktemp("traffic")
    write_versions(root, "plain", SPLIT, graphs.add_constant)
    sticky = SPLIT | {"sticky": {"header": "X-User"}}
    write_versions(root, "sticky", sticky, graphs.add_constant)
    bad = SPLIT | {"rollback": {"max_error_rate": 0.2, "min_requests": 6, "window_secs": 2}}
    # The second version fails for every input but 0.
    write_versions(root, "bad", bad, lambda number: lookup(1 if number == 2 else 10))
    write_versions(root, "hurried", bad, graphs.add_constant, EXPIRING)
    options = (*CARRIERS[request.param], "--allow-traffic-control")
    with clean_server(root, options=options) as process:
        yield process


@pytest.fixture(params=[HttpTraffic, GrpcTraffic])
def traffic(request: pytest.FixtureRequest, server: ServerProcess) -> Iterator[TrafficClient]:
    """Traffic control; at the end the configured rules are restored."""
    client: TrafficClient = request.param(server)
    yield client
    for model in ("plain", "sticky", "bad", "hurried"):
        client.reset(model)
    client.close()


def count(client: Client, model: str, requests: int = 20, **given: Any) -> dict[str, int]:
    """Number of requests per version, by the answers' versions and values."""
    answers = [client.infer(model, {"INPUT0": X}, **given) for _ in range(requests)]
    assert all(float(a["OUTPUT0"][0, 0]) == float(a.model_version) for a in answers)
    return dict(Counter(answer.model_version for answer in answers))


def test_requests_are_divided_but_for_a_named_version(caller: Client) -> None:
    counts = count(caller, "plain")
    assert 9 <= counts["1"] <= 11
    assert counts["2"] == 20 - counts["1"]
    for version in ("1", "2", "3"):
        assert count(caller, "plain", 8, version=version) == {version: 8}
        assert count(caller, "sticky", 8, version=version) == {version: 8}


def test_rules_of_a_call(caller: Client, traffic: TrafficClient) -> None:
    document = traffic.set("plain", {"split": {"2": 1, "3": 3}, "shadow": {"version": "1"}})
    assert (document.source, document.rules.split["3"], document.rules.baseline) == ("call", 3, "2")
    assert document.rules.shadow.max_pending == 64
    found = {v.version: (v.role, v.weight, v.share, v.state) for v in document.versions}
    assert found == {
        "1": ("shadow", 0, 0, "READY"),
        "2": ("baseline", 1, 0.25, "READY"),
        "3": ("candidate", 3, 0.75, "READY"),
    }
    assert traffic.get("plain") == document
    counts = count(caller, "plain")
    assert set(counts) == {"2", "3"}
    assert counts["3"] > counts["2"]
    assert traffic.set("plain", {}).source == "call"
    assert count(caller, "plain", 4) == {"3": 4}
    assert traffic.reset("plain").source == "config"


def test_promotion_in_one_call(caller: Client, traffic: TrafficClient) -> None:
    document = traffic.promote("plain")
    assert (document.source, document.rules.baseline) == ("promotion", "2")
    assert count(caller, "plain", 6) == {"2": 6}
    assert caller.model_ready("plain", "1")
    document = traffic.roll_back("plain")
    assert document.source == "rollback"
    assert count(caller, "plain", 6) == {"1": 6}
    assert traffic.promote("plain", "3").rules.baseline == "3"
    assert count(caller, "plain", 6) == {"3": 6}


@pytest.mark.parametrize(("act", "kind", "text"), [
    (lambda t: t.get("nope"), NotFound, "'nope' is not found"),
    (lambda t: t.set("plain", {"split": {"1": -1}}), InvalidRequest, r"split\['1'\]: must be"),
    (lambda t: t.promote("plain", "9"), InvalidRequest, "version 9 is not ready"),
    (lambda t: t.roll_back("plain", "3"), InvalidRequest, "version 3 gets no requests"),
])  # fmt: skip
def test_invalid_calls(
    traffic: TrafficClient,
    act: Callable[[TrafficClient], object],
    kind: type[ServerError],
    text: str,
) -> None:
    with pytest.raises(kind, match=text):
        act(traffic)
    assert traffic.get("plain").source == "config"


@pytest.mark.parametrize(("path", "body", "text"), [
    ("traffic", b"{", "failed to parse the request JSON buffer"),
    ("traffic", b'{"splits": {}}', "unknown member 'splits'"),
    ("traffic/promote", b'{"to": "2"}', "unknown member 'to', it may have version, reason"),
    ("traffic/rollback", b'{"version": true}', "'version' must be a string"),
])  # fmt: skip
def test_invalid_bodies(server: ServerProcess, path: str, body: bytes, text: str) -> None:
    answer = ask(server.http, "POST", f"/v2/models/plain/{path}", body)
    assert answer.status == 400
    assert text in answer.error


@pytest.mark.parametrize("client", [HttpTraffic, GrpcTraffic])
def test_traffic_control_is_off_by_default(
    busy_server: ServerProcess, client: Callable[[ServerProcess], TrafficClient]
) -> None:
    traffic = client(busy_server)
    acts: list[Callable[[], object]] = [
        lambda: traffic.set("spin", {}), lambda: traffic.promote("spin", "1"),
    ]  # fmt: skip
    try:
        assert traffic.get("spin").source == "none"
        for act in acts:
            with pytest.raises(Unavailable, match="--allow-traffic-control"):
                act()
    finally:
        traffic.close()


def http_version(server: ServerProcess, end: str, body: object, **headers: str) -> str:
    path = f"/v2/models/sticky/{end}"
    content = json.dumps(body).encode()
    document: dict[str, Any] = ask(server.http, "POST", path, content, **headers).document
    return str(document["model_version"])


def test_a_header_decides_over_every_door(server: ServerProcess) -> None:
    tensor = {"name": "INPUT0", "shape": [1, 1], "datatype": "FP32", "data": [0]}
    message = infer_message("sticky", [Input("INPUT0", X)])
    chosen: dict[str, set[str]] = {}
    with GrpcClient(server.grpc) as client:
        infer = client.procedure("ModelInfer", pb.ModelInferResponse)
        for user in USERS:
            metadata = [("x-user", user)]
            chosen[user] = {
                http_version(server, "infer", {"inputs": [tensor]}, **{"X-User": user}),
                http_version(server, "infer", {"inputs": [tensor]}, **{"x-uSER": user}),
                http_version(server, "generate", {"INPUT0": 0}, **{"X-User": user}),
                infer(message, timeout=60, metadata=metadata).model_version,
                *(
                    read_answer(response.infer_response).model_version
                    for response in client.stream([message, message], metadata)
                ),
            }
    assert all(len(versions) == 1 for versions in chosen.values()), chosen
    assert {version for [version] in chosen.values()} == {"1", "2"}


def test_a_parameter_decides_on_flat_json(server: ServerProcess, traffic: TrafficClient) -> None:
    """A member that no version reads, but the rules."""
    traffic.set("sticky", SPLIT | {"sticky": {"parameter": "user"}})
    chosen = {
        user: {http_version(server, "generate", {"INPUT0": 0, "user": user}) for _ in range(3)}
        for user in USERS
    }
    assert all(len(versions) == 1 for versions in chosen.values()), chosen
    assert {version for [version] in chosen.values()} == {"1", "2"}
    path, body = "/v2/models/sticky/generate", b'{"INPUT0": 0, "usr": "ada"}'
    assert "did you mean 'user'?" in ask(server.http, "POST", path, body).error


def test_a_raw_body_goes_to_a_version(server: ServerProcess, traffic: TrafficClient) -> None:
    traffic.set("sticky", {"split": {"2": 1, "3": 0}, "sticky": {"header": "x-user"}})
    headers = {"Inference-Header-Content-Length": "0", "X-User": "a"}
    answer = ask(server.http, "POST", "/v2/models/sticky/infer", X.tobytes(), **headers)
    assert answer.status == 200, answer.body
    assert b'"model_version":"2"' in answer.body


def test_shadow_requests_are_counted_separately(
    server: ServerProcess, caller: Client, traffic: TrafficClient
) -> None:
    traffic.set("plain", {"split": {"1": 1}, "shadow": {"version": "3"}})
    with Scraper(server.metrics) as metrics:

        def copies(outcome: str) -> float:
            labels = {"model": "plain", "version": "3", "outcome": outcome}
            return metrics.now().value("headrace_shadow_requests_total", **labels)

        before = copies("success")
        assert count(caller, "plain", 5) == {"1": 5}
        until(lambda: copies("success") == before + 5, "five copies")
        assert copies("failure") == 0
        scrape = metrics.now()
        labels = {"model": "plain", "version": "3"}
        assert scrape.value("headrace_shadow_duration_seconds_count", **labels) == before + 5
        assert scrape.value("headrace_traffic_weight", model="plain", version="1") == 1
    [shadow] = [s for s in traffic.get("plain").shadows if s.version == "3"]
    assert shadow.success == before + 5
    assert shadow.p95_ms > 0


def test_a_bad_version_loses_its_requests(
    server: ServerProcess, caller: Client, traffic: TrafficClient
) -> None:
    inputs = {"INPUT0": np.array([[7]])}

    def answered_by() -> str:
        try:
            return caller.infer("bad", inputs).model_version
        except ServerError:
            return "2"

    with Scraper(server.metrics) as metrics:
        labels = {"model": "bad", "version": "2"}

        def rollbacks() -> float:
            return metrics.now().value("headrace_traffic_rollbacks_total", **labels)

        traffic.reset("bad")
        before = rollbacks()
        # Several requests per check: there have to be enough of them within two seconds.
        until(lambda: ([answered_by() for _ in range(6)], rollbacks() > before)[1], "a roll-back")
        assert {answered_by() for _ in range(10)} == {"1"}
        assert metrics.now().value("headrace_traffic_weight", **labels) == 0
    with pytest.raises(ServerError):
        caller.infer("bad", inputs, version="2")  # it is still there
    document = traffic.get("bad")
    assert document.source == "rollback"
    assert "requests failed, more than max_error_rate 0.2 allows" in document.reason
    second = next(v for v in document.versions if v.version == "2")
    assert (second.share, second.rollbacks) == (0, before + 1)
    [reason] = [m.reason for m in caller.index().models if (m.name, m.version) == ("bad", "2")]
    assert reason == second.reason
    assert reason.startswith("rolled back: ")
    server.await_logged("version 2 is rolled back")


def test_expired_requests_do_not_count_against_a_version(
    caller: Client, traffic: TrafficClient
) -> None:
    traffic.reset("hurried")
    for _ in range(30):
        with pytest.raises(Unavailable, match="Request timeout expired"):
            caller.infer("hurried", {"INPUT0": X}, version="2", parameters={"timeout": 1})

    def judged() -> pb_traffic.ModelTrafficResponse.Recent:
        for _ in range(6):  # within the two seconds of the rule
            caller.infer("hurried", {"INPUT0": X}, version="2")
        versions = traffic.get("hurried").versions
        return next(v.recent for v in versions if v.version == "2")

    until(lambda: judged().requests >= 6, "enough requests to judge by")
    document = traffic.get("hurried")
    second = next(v for v in document.versions if v.version == "2")
    assert (document.source, second.share, second.rollbacks) == ("config", 0.5, 0)
    assert second.recent.failures == 0


ASKER = """
    import triton_python_backend_utils as pb_utils


    class TritonPythonModel:
        def execute(self, requests):
            return [self.ask(request) for request in requests]

        def ask(self, request):
            [name] = pb_utils.get_input_tensor_by_name(request, "MODEL").as_numpy().ravel()
            tensor = pb_utils.get_input_tensor_by_name(request, "INPUT0")
            answer = pb_utils.InferenceRequest(
                model_name=name.decode(), requested_output_names=["OUTPUT0"], inputs=[tensor]
            ).exec()
            if answer.has_error():
                return pb_utils.InferenceResponse(error=answer.error())
            return pb_utils.InferenceResponse(
                [pb_utils.get_output_tensor_by_name(answer, "OUTPUT0")]
            )
"""
ASKER_CONFIG = (
    "max_batch_size: 8\n"
    + tensors("input", ("MODEL", "STRING", "1"), ("INPUT0", "FP32", "1"))
    + tensors("output", ("OUTPUT0", "FP32", "1"))
)


def rules(document: object) -> str:
    return (
        "version_policy { all {} }\n"
        f"parameters {{ key: 'traffic' value {{ string_value: '{json.dumps(document)}' }} }}"
    )


@pytest.fixture(scope="session", params=BEHIND_DOORS)
def python_server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerProcess]:
    """A server of Python models with traffic rules."""
    root = tmp_path_factory.mktemp("divided_python")
    write_versions(root, "plain", SPLIT, graphs.add_constant)
    write_python_model(root, "asker", ASKER, ASKER_CONFIG + rules({"split": {"1": 1}}))
    write_python_model(root, "teller", TELLER, TELLER_CONFIG + rules(SPLIT | {"shadow": "3"}))
    for number in ("2", "3"):
        shutil.copytree(root / "teller" / "1", root / "teller" / number)
    with clean_server(root, options=CARRIERS[request.param]) as process:
        yield process


@pytest.mark.slow
def test_calls_of_models_are_divided(python_server: ServerProcess) -> None:
    with GrpcClient(python_server.grpc) as client:
        inputs = {"MODEL": strings([b"plain"], [1, 1]), "INPUT0": X}
        answers = [float(client.infer("asker", inputs)["OUTPUT0"][0, 0]) for _ in range(20)]
        assert {1.0, 2.0} == set(answers)
        # A model that would wait for itself is refused, though it names no version.
        inputs["MODEL"] = strings([b"asker"], [1, 1])
        with pytest.raises(ServerError, match="asks itself while it executes"):
            client.infer("asker", inputs)


@pytest.mark.slow
def test_streams_are_divided(python_server: ServerProcess) -> None:
    inputs = [
        Input("TEXT", strings([b"a"], [1, 1])), Input("COUNT", np.array([[3]], np.int32)),
    ]  # fmt: skip
    messages = [infer_message("teller", inputs, id=str(number)) for number in range(20)]
    found: dict[str, set[str]] = {}
    with GrpcClient(python_server.grpc) as client, Scraper(python_server.metrics) as metrics:
        for response in client.stream(messages):
            assert not response.error_message
            answer = response.infer_response
            found.setdefault(answer.id, set()).add(answer.model_version)
        copies = {"model": "teller", "version": "3", "outcome": "success"}
        until(
            lambda: metrics.now().value("headrace_shadow_requests_total", **copies) == 20,
            "twenty copies",
        )
    assert len(found) == 20
    assert all(len(versions) == 1 for versions in found.values())
    assert {version for [version] in found.values()} == {"1", "2"}


@pytest.mark.slow
def test_generated_streams_are_divided(python_server: ServerProcess) -> None:
    body = json.dumps({"TEXT": "a", "COUNT": 2}).encode()
    path = "/v2/models/teller/generate_stream"
    answered: set[str] = set()
    for _ in range(8):
        documents = events(ask(python_server.http, "POST", path, body))
        [version] = {document["model_version"] for document in documents}
        answered.add(version)
    assert answered == {"1", "2"}
