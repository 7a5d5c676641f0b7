"""Every operation, on every door, for every role: what a client may do, and what it may know."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from headrace.api.messages import request_class
from headrace.api.operations import INFERENCE, OPERATIONS, TRAFFIC, Operation, Route
from headrace.core.identity import CHANGING, Permission
from headrace.plugins.access.keys import NewKey, new_key
from headrace.protocol.pb import grpc_service_pb2 as pb
from tests.contract.conftest import CARRIERS, FIRST_CARRIER
from tests.support.access_file import known_client
from tests.support.grpc_client import SERVICE, infer_message, procedure
from tests.support.http_socket import RawAnswer, ask
from tests.support.scrape import until
from tests.support.server_process import ServerProcess, clean_server

SEEN, HIDDEN, UNKNOWN = "seen", "hidden", "unknown"
ROLES = [each for each in Permission if each is not Permission.OPEN]
_MODEL = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        y = pb_utils.Tensor("Y", np.zeros(1, np.int32))
        return [pb_utils.InferenceResponse([y]) for _ in requests]
"""
_CONFIG = """
backend: "python"
max_batch_size: 0
input { name: "X" data_type: TYPE_INT32 dims: 1 optional: true }
output { name: "Y" data_type: TYPE_INT32 dims: 1 }
"""
_BODY = b'{"inputs":[]}'
_BY_NAME = {each.name: each for each in OPERATIONS}
_ROUTES = [
    pytest.param(each, route, id=f"{each.name}-{route.method}")
    for each in OPERATIONS
    for route in each.routes
]
_PROCEDURES = [
    pytest.param(each, id=each.name)
    for each in OPERATIONS
    if each.service in (INFERENCE, TRAFFIC) and each.name != "ModelStreamInfer"
]
_REFUSED = {401, 403}
_UNPROVED = grpc.StatusCode.UNAUTHENTICATED
_FORBIDDEN = grpc.StatusCode.PERMISSION_DENIED


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    for name in (SEEN, HIDDEN):
        (root / name / "1").mkdir(parents=True)
        (root / name / "config.pbtxt").write_text(_CONFIG)
        (root / name / "1" / "model.py").write_text(_MODEL)
    return root


@pytest.fixture(scope="module")
def keys() -> dict[str, NewKey]:
    """A key for each role: one by permission for one model, and one for everything."""
    return {name: new_key() for name in (*ROLES, "all")}


def _file(keys: dict[str, NewKey]) -> str:
    roles = (known_client(role, keys[role], [role], [SEEN]) for role in ROLES)
    return "".join(roles) + known_client("all", keys["all"])


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory, keys: dict[str, NewKey]) -> Path:
    path = tmp_path_factory.mktemp("access") / "access.toml"
    path.write_text(_file(keys))
    return path


@pytest.fixture(scope="module", params=FIRST_CARRIER)
def served(request: pytest.FixtureRequest, repository: Path, file: Path) -> Iterator[ServerProcess]:
    options = (
        *CARRIERS[request.param], f"--access={file}", "--model-control-mode=explicit",
        "--load-model=*", "--allow-client-shm",
    )  # fmt: skip
    with clean_server(repository, options=options) as process:
        yield process


def _bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"} if key else {}


def _ask(address: str, route: Route, model: str, key: str) -> RawAnswer:
    """A request of a route, about a model if the route can be."""
    parts = {"name": model, "region": "r"}
    form = next(
        form for form in reversed(route.forms)
        if "{version" not in form and ("{name" in form) == any("{name" in f for f in route.forms)
    )  # fmt: skip
    path = form.replace("{name:path}", "{name}").format(**parts)
    body = _BODY if "infer" in path else b"{}" if route.body or "generate" in path else b""
    return ask(address, route.method, path, body, **_bearer(key))


@pytest.mark.parametrize(("operation", "route"), _ROUTES)
def test_routes(
    served: ServerProcess, keys: dict[str, NewKey], operation: Operation, route: Route
) -> None:
    needed = operation.needs(route.changes)
    named = any("{name" in form for form in route.forms)
    nobody = _ask(served.http, route, SEEN, "")
    wrong = _ask(served.http, route, SEEN, keys["all"].key + "x")
    if needed is Permission.OPEN:
        assert {nobody.status, wrong.status} <= {200, 503}
        return
    assert (nobody.status, wrong.status) == (401, 401)
    assert nobody.headers["www-authenticate"].startswith("Bearer")
    for role in ROLES:
        answer = _ask(served.http, route, SEEN, keys[role].key)
        may = role is needed and (named or needed not in CHANGING)
        assert (answer.status == 403) is not may, answer.body
        if not may:
            assert str(needed) in answer.error
    assert _ask(served.http, route, SEEN, keys["all"].key).status not in _REFUSED
    if named:
        hidden, unknown = (_ask(served.http, route, m, keys[needed].key) for m in (HIDDEN, UNKNOWN))
        assert hidden.status == unknown.status == 404
        assert hidden.error.replace(HIDDEN, UNKNOWN) == unknown.error
    _load_again(served, operation, keys)


def _load_again(served: ServerProcess, operation: Operation, keys: dict[str, NewKey]) -> None:
    if operation.name == "RepositoryModelUnload":
        load = _BY_NAME["RepositoryModelLoad"].routes[0]
        assert _ask(served.http, load, SEEN, keys["all"].key).status == 200


def _call(served: ServerProcess, operation: Operation, model: str, key: str) -> Any:
    """The status of a call, None for OK, and its text."""
    kind = request_class(operation)
    message = kind()
    fields = kind.DESCRIPTOR.fields_by_name
    if operation.of_model:
        setattr(message, "model_name" if "model_name" in fields else "name", model)
    metadata = (("authorization", f"Bearer {key}"),) if key else ()
    with grpc.insecure_channel(served.grpc) as channel:
        # Answers are not read: only their statuses count.
        call = procedure(channel, operation.procedure, pb.ServerLiveResponse)
        try:
            call(message, metadata=metadata, timeout=30)
        except grpc.RpcError as error:
            return error.code(), error.details()
    return None, ""


@pytest.mark.parametrize("operation", _PROCEDURES)
def test_procedures(served: ServerProcess, keys: dict[str, NewKey], operation: Operation) -> None:
    needed = operation.permission
    nobody, _ = _call(served, operation, SEEN, "")
    if needed is Permission.OPEN:
        assert nobody is None
        return
    assert nobody is _UNPROVED
    assert _call(served, operation, SEEN, keys["all"].key + "x")[0] is _UNPROVED
    for role in ROLES:
        status, text = _call(served, operation, SEEN, keys[role].key)
        may = role is needed and (operation.of_model or needed not in CHANGING)
        assert (status is _FORBIDDEN) is not may, text
    assert _call(served, operation, SEEN, keys["all"].key)[0] not in (_UNPROVED, _FORBIDDEN)
    if operation.of_model:
        hidden, unknown = (
            _call(served, operation, model, keys[needed].key) for model in (HIDDEN, UNKNOWN)
        )
        assert hidden[0] is unknown[0] is grpc.StatusCode.NOT_FOUND
        assert hidden[1].replace(HIDDEN, UNKNOWN) == unknown[1]
    _load_again(served, operation, keys)


def test_changes_of_settings_over_grpc(served: ServerProcess, keys: dict[str, NewKey]) -> None:
    """Reading and changing are one procedure there."""
    change = pb.LogSettingsRequest()
    change.settings["log_verbose_level"].uint32_param = 0
    with grpc.insecure_channel(served.grpc) as channel:
        call = procedure(channel, f"{SERVICE}/LogSettings", pb.LogSettingsResponse)
        for name, status in (("observe", _FORBIDDEN), ("admin", _FORBIDDEN), ("all", None)):
            metadata = (("authorization", f"Bearer {keys[name].key}"),)
            try:
                call(change, metadata=metadata, timeout=30)
                found = None
            except grpc.RpcError as error:
                found = error.code()
            assert found is status


def test_streams(served: ServerProcess, keys: dict[str, NewKey]) -> None:
    with grpc.insecure_channel(served.grpc) as channel:
        call = procedure(
            channel, f"{SERVICE}/ModelStreamInfer", pb.ModelStreamInferResponse, "stream_stream"
        )

        def run(key: str) -> list[str]:
            metadata = (("authorization", f"Bearer {key}"),)
            asked = [infer_message(model) for model in (SEEN, HIDDEN, UNKNOWN)]
            return [each.error_message for each in call(iter(asked), metadata=metadata, timeout=30)]

        seen, hidden, unknown = run(keys["infer"].key)
        assert not seen
        assert hidden.replace(HIDDEN, UNKNOWN) == unknown
        for key, status in (("", _UNPROVED), (keys["read"].key, _FORBIDDEN)):
            with pytest.raises(grpc.RpcError) as caught:
                run(key)
            assert caught.value.code() is status


def test_lists_are_without_hidden_models(served: ServerProcess, keys: dict[str, NewKey]) -> None:
    def models(role: str, method: str, path: str) -> set[str]:
        answer = ask(served.http, method, path, b"", **_bearer(keys[role].key))
        return {name for name in (SEEN, HIDDEN) if f'"name":"{name}"'.encode() in answer.body}

    for role, every in (("read", {SEEN}), ("all", {SEEN, HIDDEN})):
        assert models(role, "POST", "/v2/repository/index") == every
    for role, every in (("observe", {SEEN}), ("all", {SEEN, HIDDEN})):
        assert models(role, "GET", "/v2/models/stats") == every
        metrics = ask(served.metrics, "GET", "/metrics", b"", **_bearer(keys[role].key))
        for model in (SEEN, HIDDEN):
            assert (f'model="{model}"'.encode() in metrics.body) is (model in every)
    assert ask(served.metrics, "GET", "/metrics").status == 401
    for path in ("/", "/openapi.json"):
        for key, shown in (("", False), (keys["read"].key, True)):
            page = ask(served.http, "GET", path, b"", **_bearer(key)).body.decode()
            assert (f"models/{SEEN}/" in page or f">{SEEN}<" in page) is shown, path
            assert HIDDEN not in page


def test_a_change_of_the_file_takes_effect_on_open_connections(
    served: ServerProcess, keys: dict[str, NewKey], file: Path
) -> None:
    path = f"/v2/models/{SEEN}/infer"
    again = new_key()
    header = _bearer(again.key)

    def status() -> int:
        return ask(served.http, "POST", path, _BODY, **header).status

    assert status() == 401
    try:
        file.write_text(_file(keys | {"infer": again}))
        until(lambda: status() == 200, "the key is known")
        until(  # each front end reads the file at its own time
            lambda: (
                ask(served.http, "POST", path, _BODY, **_bearer(keys["infer"].key)).status == 401
            ),
            "the earlier key is refused",
        )
    finally:
        file.write_text(_file(keys))
    until(lambda: status() == 401, "the key is refused")
    until(
        lambda: _call(served, _BY_NAME["ModelInfer"], SEEN, keys["infer"].key)[0] is None,
        "the earlier key is known again",
    )


@pytest.mark.parametrize("carrier", FIRST_CARRIER)
def test_control_has_an_address_of_its_own(carrier: str, repository: Path) -> None:
    options = (*CARRIERS[carrier], "--control-address=127.0.0.1:0", "--allow-client-shm")
    with clean_server(repository, options=options) as process:
        control = process.door("control").removeprefix("http://")
        for operation in OPERATIONS:
            for route in operation.routes:
                if operation.needs(route.changes) in CHANGING:
                    answer = _ask(process.http, route, SEEN, "")
                    assert (answer.status, "--control-address" in answer.error) == (404, True)
                    answer = _ask(control, route, SEEN, "")
                    assert "--control-address" not in answer.body.decode()
            if operation.service in (INFERENCE, TRAFFIC) and operation.permission in CHANGING:
                status, text = _call(process, operation, SEEN, "")
                assert (status, "--control-address" in text) == (grpc.StatusCode.NOT_FOUND, True)
        infer = _ask(control, _BY_NAME["ModelInfer"].routes[0], SEEN, "")
        assert infer.status == 404
        assert _ask(process.http, _BY_NAME["ModelInfer"].routes[0], SEEN, "").status == 200
        assert ask(control, "GET", f"/v2/models/{SEEN}").status == 200
