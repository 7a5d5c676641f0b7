"""The OpenAPI document of the HTTP routes, and its page."""

import gzip
import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from tests.contract.routes import CONTROL, ROUTES
from tests.support.http_socket import ask
from tests.support.server_process import ServerProcess
from tests.support.shared_memory import SharedFile


@pytest.fixture(scope="module")
def document(server: ServerProcess) -> dict[str, object]:
    return ask(server.http, "GET", "/openapi.json").document


def test_every_route_is_described(document: dict[str, dict[str, dict[str, object]]]) -> None:
    described = {
        (method, path)
        for path, item in document["paths"].items()
        for method, operation in item.items()
        if operation["tags"] != ["models"]  # type: ignore[index]
    }
    assert described == ROUTES


@pytest.mark.parametrize("name", ["row_sum", "simple", "decoupled"])
def test_a_model_is_described_with_an_example_that_it_takes(
    server: ServerProcess, document: Any, name: str
) -> None:
    kind = "generate_stream" if name == "decoupled" else "infer"
    described = document["paths"][f"/v2/models/{name}/{kind}"]["post"]
    schema = described["requestBody"]["content"]["application/json"]["schema"]
    [example] = schema["examples"]
    validator = pytest.importorskip("jsonschema").Draft202012Validator
    whole = {"components": document["components"]}
    validator(schema | whole).validate(example)
    body = json.dumps(example).encode()
    answer = ask(server.http, "POST", f"/v2/models/{name}/{kind}", body)
    assert answer.status == 200, answer.body
    if kind == "infer":
        given = described["responses"]["200"]["content"]["application/json"]["schema"]
        validator(given | whole).validate(answer.document)
        wrong = example | {"inputs": [example["inputs"][0] | {"name": "of-no-model"}]}
        assert not validator(schema | whole).is_valid(wrong)


def test_every_route_answers_as_described(
    server: ServerProcess, document: dict[str, dict[str, dict[str, object]]]
) -> None:
    for method, path in sorted(ROUTES):
        target = path.format(name="row_sum", version="1", region="r")
        expected = 200
        # Without a body the inference routes have nothing to run.
        if target.endswith(("/infer", "/generate", "/generate_stream", "/register")):
            expected = 400
        elif (method, path) in CONTROL:
            expected = 503
        elif target.endswith("/r/status"):  # there is no such region
            expected = 404
        _check(server, document, method, path, target, b"", expected)


_TWO = json.dumps(
    {"inputs": [{"name": "INPUT0", "datatype": "FP32", "shape": [1, 2], "data": [1, 2]}]}
).encode()
_BIG = b" " * 2_000_000


@pytest.mark.parametrize(
    ("method", "path", "names", "body", "status"),
    [
        ("get", "/v2/models/{name}", {"name": "nope"}, b"", 404),
        ("get", "/v2/models/{name}/config", {"name": "spin_priority"}, b"", 200),
        ("get", "/v2/models/{name}/config", {"name": "nope"}, b"", 404),
        ("get", "/v2/models/{name}/ready", {"name": "nope"}, b"", 503),
        ("get", "/v2/models/{name}/versions/{version}/ready",
         {"name": "simple", "version": "9" * 30}, b"", 400),
        ("get", "/v2/models/{name}/versions/{version}",
         {"name": "simple", "version": "9" * 30}, b"", 400),
        ("get", "/v2/models/{name}/stats", {"name": "nope"}, b"", 400),
        ("get", "/v2/models/{name}/traffic", {"name": "nope"}, b"", 404),
        ("get", "/v2/models/{name}/trace/setting", {"name": "nope"}, b"", 400),
        ("post", "/v2/models/{name}/infer", {"name": "row_sum"}, _TWO, 200),
        ("post", "/v2/models/{name}/infer", {"name": "nope"}, _TWO, 404),
        ("post", "/v2/models/{name}/infer", {"name": "decoupled"}, _TWO, 501),
        ("post", "/v2/models/{name}/generate", {"name": "row_sum"}, b'{"INPUT0": [1]}', 200),
        ("post", "/v2/repository/index", {}, b'{"ready": 1}', 400),
        ("post", "/v2/repository/index", {}, _BIG, 413),
        ("post", "/v2/logging", {}, b'{"log_info": true, "log_format": null}', 200),
        ("post", "/v2/logging", {}, b'{"log_info": 1}', 400),
        ("post", "/v2/logging", {}, b'{"log_file": "x"}', 501),
        ("post", "/v2/logging", {}, b'{"log_format": "x"}', 503),
        ("post", "/v2/logging", {}, _BIG, 413),
        ("post", "/v2/trace/setting", {}, b'{"trace_rate": null}', 200),
        ("post", "/v2/trace/setting", {}, b'{"trace_rate": "x"}', 400),
        ("post", "/v2/trace/setting", {}, b'{"trace_file": "x"}', 501),
        ("post", "/v2/trace/setting", {}, _BIG, 413),
        ("post", "/v2/systemsharedmemory/region/{region}/register", {"region": "r"},
         b'{"key": "/none-of-this-name", "byte_size": 1}', 500),
        ("post", "/v2/systemsharedmemory/region/{region}/register", {"region": "r"}, _BIG, 413),
        ("post", "/v2/models/{name}/traffic", {"name": "simple"}, _BIG, 413),
    ],
)  # fmt: skip
def test_answers_are_as_described(
    server: ServerProcess,
    document: dict[str, dict[str, dict[str, object]]],
    method: str,
    path: str,
    names: dict[str, str],
    body: bytes,
    status: int,
) -> None:
    _check(server, document, method, path, path.format(**names), body, status)


def test_shared_memory_answers_as_described(
    server: ServerProcess, document: dict[str, dict[str, dict[str, object]]]
) -> None:
    with SharedFile(64) as file:
        given = json.dumps({"key": file.key, "byte_size": 64}).encode()
        region = "/v2/systemsharedmemory/region/{region}"
        for method, path, body in (
            ("post", f"{region}/register", given),
            ("get", f"{region}/status", b""),
            ("post", f"{region}/unregister", b""),
        ):
            _check(server, document, method, path, path.format(region="described"), body, 200)


def test_a_server_without_shared_memory(
    narrow: ServerProcess, document: dict[str, dict[str, dict[str, object]]]
) -> None:
    path = "/v2/cudasharedmemory/region/{region}/unregister"
    _check(narrow, document, "post", path, path.format(region="r"), b"", 501)


def _check(
    server: ServerProcess,
    document: Any,
    method: str,
    path: str,
    target: str,
    body: bytes,
    status: int,
) -> None:
    """Send a request, and compare status, type and body with the document."""
    answer = ask(server.http, method.upper(), target, body)
    assert answer.status == status, (target, answer.body)
    described = document["paths"][path][method]["responses"][str(status)]
    if "content" not in described:
        assert answer.body == b""
        return
    schema = described["content"][answer.headers["content-type"]]["schema"]
    validator = pytest.importorskip("jsonschema").Draft202012Validator
    whole = schema | {"components": _strict(document["components"])}
    validator(whole).validate(json.loads(answer.body))


def _strict(components: dict[str, Any]) -> dict[str, Any]:
    """Schemas without additional properties."""
    return {
        "schemas": {
            name: {"additionalProperties": False} | schema
            for name, schema in components["schemas"].items()
        }
    }


def test_operations_are_complete(document: dict[str, dict[str, dict[str, object]]]) -> None:
    operations = [op for item in document["paths"].values() for op in item.values()]
    names = [op["operationId"] for op in operations if isinstance(op, dict)]
    assert len(set(names)) == len(names)
    assert len(names) > len(ROUTES)  # and one for each model
    for operation in operations:
        assert isinstance(operation, dict)
        assert operation["summary"]
        assert operation["tags"]
        assert operation["responses"]


def test_references_lead_somewhere(document: dict[str, object]) -> None:
    for reference in _references(document):
        target: object = document
        for name in reference.removeprefix("#/").split("/"):
            assert isinstance(target, dict)
            target = target[name]


def test_schemas_are_valid_json_schema(
    document: dict[str, dict[str, dict[str, object]]], server: ServerProcess
) -> None:
    validator = pytest.importorskip("jsonschema").Draft202012Validator  # the base of OpenAPI 3.1
    for schema in document["components"]["schemas"].values():
        validator.check_schema(schema)
    good = {"inputs": [{"name": "INPUT0", "datatype": "FP32", "shape": [1, 1], "data": [1]}]}
    answer = ask(server.http, "POST", "/v2/models/row_sum/infer", json.dumps(good).encode())
    flat = {"INPUT0": [1, 2], "id": "a", "parameters": {"timeout": 9000000}, "priority": 1}
    generated = ask(
        server.http, "POST", "/v2/models/row_sum/generate", json.dumps(flat).encode()
    )  # fmt: skip
    for name, value in (
        ("InferRequest", good),
        ("InferResponse", answer.document),
        ("GenerateRequest", flat),
        ("GenerateResponse", generated.document),
        ("Error", {"error": "text"}),
    ):
        whole = {"$ref": f"#/components/schemas/{name}", "components": document["components"]}
        validator(whole).validate(value)


def test_models_come_first(document: Any) -> None:
    tags = [
        operation["tags"][0] for item in document["paths"].values() for operation in item.values()
    ]
    models = tags.count("models")
    assert models > 1
    assert set(tags[:models]) == {"models"}
    assert [tag["name"] for tag in document["tags"]] == list(dict.fromkeys(tags))


def test_documentation_page_comes_from_this_server_alone(server: ServerProcess) -> None:
    page = ask(server.http, "GET", "/docs")
    assert (page.status, page.headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert page.headers["content-security-policy"].startswith("default-src 'self';")
    links = re.findall(r"(?:src|href)=([^ >]+)", page.body.decode())
    paths = [link for link in links if not link.startswith("data:")]
    assert len(paths) == 4
    for path in paths:
        plain = ask(server.http, "GET", f"/{path}")
        assert plain.status == 200, path
        small = ask(server.http, "GET", f"/{path}", b"", **{"Accept-Encoding": "gzip"})
        assert "content-encoding" not in plain.headers
        if small.headers.get("content-encoding") == "gzip":
            assert gzip.decompress(small.body) == plain.body
        assert path == "openapi.json" or re.match(
            "text/(javascript|css)", plain.headers["content-type"]
        )
    assert b"SwaggerUIBundle" in ask(server.http, "GET", "/docs/swagger-ui-bundle.js").body
    for path in ("/docs/nothing.js", "/docs/NOTICE.txt", "/docs/..%2F__init__.py"):
        assert ask(server.http, "GET", path).status == 404


def test_overview_lists_the_models(server: ServerProcess) -> None:
    page = ask(server.http, "GET", "/").body.decode()
    assert (
        "<a href='docs#/models/run_row_sum'>row_sum</a><td>1<td><code>INPUT0 FP32 [-1,-1]" in page
    )
    assert not re.search(r"(src|href)=['\"]?(https?:)?//", page)


def _references(value: object) -> Iterator[str]:
    if isinstance(value, dict):
        for name, member in value.items():
            if name == "$ref":
                yield member
            else:
                yield from _references(member)
    elif isinstance(value, list):
        for member in value:
            yield from _references(member)
