"""Durations of answers under OpenTelemetry's names."""

from headrace.api.answer_metrics import answer_families
from headrace.observability.statistics import Answers


def labels(answers: Answers) -> dict[str, list[dict[str, str]]]:
    return {
        family.name: [dict(own) for own, _ in sources]
        for family, sources in answer_families(answers)
    }


def test_attributes_of_each_door() -> None:
    answers = Answers()
    answers.of("http", "infer", identity="key").answered(200, 1_000)
    answers.of("http", "health").answered(503, 1_000)
    answers.of("grpc", "infer").answered(0, 1_000)
    answers.of("grpc", "model-repository").answered(13, 1_000)
    answers.of("lines", "generate").answered(404, 1_000)
    answers.of("flight", "infer", by_grpc=True).answered(4, 1_000)
    assert labels(answers) == {
        "http_server_request_duration_seconds": [
            {
                "headrace_operation": "health", "headrace_identity": "anonymous",
                "http_request_method": "GET", "http_response_status_code": "503",
                "error_type": "503",
            },
            {
                "headrace_operation": "infer", "headrace_identity": "key",
                "http_request_method": "POST", "http_response_status_code": "200",
                "http_route": "/v2/models/{name}[/versions/{version}]/infer",
            },
        ],
        "rpc_server_call_duration_seconds": [
            {
                "headrace_operation": "infer", "headrace_identity": "anonymous",
                "rpc_system_name": "grpc", "headrace_door": "flight", "rpc_method": "_OTHER",
                "rpc_response_status_code": "DEADLINE_EXCEEDED", "error_type": "DEADLINE_EXCEEDED",
            },
            {
                "headrace_operation": "infer", "headrace_identity": "anonymous",
                "rpc_system_name": "grpc", "headrace_door": "grpc",
                "rpc_method": "inference.GRPCInferenceService/ModelInfer",
                "rpc_response_status_code": "OK",
            },
            {
                "headrace_operation": "model-repository", "headrace_identity": "anonymous",
                "rpc_system_name": "grpc", "headrace_door": "grpc", "rpc_method": "_OTHER",
                "rpc_response_status_code": "INTERNAL", "error_type": "INTERNAL",
            },
            {
                "headrace_operation": "generate", "headrace_identity": "anonymous",
                "rpc_system_name": "lines", "headrace_door": "lines", "rpc_method": "_OTHER",
                "rpc_response_status_code": "404",
            },
        ],
    }  # fmt: skip


def test_operations_without_an_answer_have_no_series() -> None:
    answers = Answers()
    answers.of("http", "infer")
    assert labels(answers)["http_server_request_duration_seconds"] == []
