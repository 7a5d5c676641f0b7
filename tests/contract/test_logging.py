"""Log settings over both protocols, and their effects."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace.core.errors import InvalidRequest, ServerError, Unavailable, Unsupported
from headrace.protocol.pb import grpc_service_pb2 as pb
from tests.support.client import error_by_http
from tests.support.grpc_client import GrpcClient
from tests.support.http_socket import HttpSocket, ask
from tests.support.scrape import until
from tests.support.server_process import ServerProcess

DEFAULTS = {
    "log_file": "", "log_info": True, "log_warning": True, "log_error": True,
    "log_verbose_level": 0, "log_format": "default",
}  # fmt: skip


def http_settings(server: ServerProcess, changes: dict[str, Any] | None = None) -> dict[str, Any]:
    if changes is None:
        return ask(server.http, "GET", "/v2/logging").document
    answer = ask(server.http, "POST", "/v2/logging", json.dumps(changes).encode())
    if answer.status != 200:
        raise error_by_http(answer.status, answer.error)
    return answer.document


def grpc_settings(server: ServerProcess, changes: dict[str, Any] | None = None) -> dict[str, Any]:
    request = pb.LogSettingsRequest()
    for name, value in (changes or {}).items():
        kind = {bool: "bool_param", int: "uint32_param", str: "string_param"}[type(value)]
        setattr(request.settings[name], kind, value)
    with GrpcClient(server.grpc) as client:
        response = client.call("LogSettings", request, pb.LogSettingsResponse)
    return {
        name: getattr(value, str(value.WhichOneof("parameter_choice")))
        for name, value in response.settings.items()
    }


SETTINGS = {"http": http_settings, "grpc": grpc_settings}
both = pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)


@both
def test_settings_are_read_and_changed(server: ServerProcess, settings: Any) -> None:
    assert settings(server) == DEFAULTS
    changes = {"log_verbose_level": 1, "log_format": "ISO8601", "log_warning": False}
    try:
        assert settings(server, changes) == DEFAULTS | changes
        assert http_settings(server) == grpc_settings(server) == DEFAULTS | changes
    finally:
        restored = settings(server, {name: DEFAULTS[name] for name in changes})
    assert restored == DEFAULTS


@both
@pytest.mark.parametrize(("change", "error", "text"), [
    ({"log_file": "x"}, Unsupported, "log file location can not be updated through network"),
    ({"log_info": 1}, InvalidRequest, "expect boolean for 'log_info'"),
    ({"log_verbose_level": "1"}, InvalidRequest, "expect int32 for 'log_verbose_level'"),
    ({"log_nothing": True}, InvalidRequest, "unknown log setting 'log_nothing'"),
])  # fmt: skip
def test_invalid_settings(
    server: ServerProcess,
    settings: Any,
    change: dict[str, Any],
    error: type[ServerError],
    text: str,
) -> None:
    with pytest.raises(error, match=text):
        settings(server, change)
    assert settings(server) == DEFAULTS


def test_an_invalid_format_has_its_own_status(server: ServerProcess) -> None:
    with pytest.raises(Unavailable, match="invalid argument for --log_format, got: xml"):
        http_settings(server, {"log_format": "xml"})
    with pytest.raises(InvalidRequest, match="invalid argument for log_format, got: xml"):
        grpc_settings(server, {"log_format": "xml"})


@pytest.fixture(scope="module", params=[0, 1])
def chatty(request: pytest.FixtureRequest, small_repository: Path) -> Iterator[ServerProcess]:
    """A server that logs requests, without and with a front end."""
    options = ("--access-log", f"--frontends={request.param}")
    with ServerProcess(small_repository, options=options) as process:
        yield process


def test_changes_take_effect_at_once(chatty: ServerProcess) -> None:
    with HttpSocket(chatty.http) as connection:

        def change(**settings: object) -> None:
            answer = connection.ask("POST", "/v2/logging", json.dumps(settings).encode())
            assert answer.status == 200

        def look(model: str) -> None:
            connection.ask("GET", f"/v2/models/{model}/ready")

        look("first")
        change(log_info=False)
        look("second")
        change(log_info=True, log_format="json")
        look("third")
        change(log_format="default")
        look("last")
        look("identity")
    until(lambda: "/v2/models/identity/ready" in chatty.log, "the last line")
    lines = [line for line in chatty.log.splitlines() if "/v2/models/" in line]
    assert not [line for line in lines if "second" in line]
    [first] = [line for line in lines if "first" in line]
    [third] = [line for line in lines if "third" in line]
    [last] = [line for line in lines if "last" in line]
    assert "first" in first
    assert "last" in last
    assert json.loads(third)["path"] == "/v2/models/third/ready"
