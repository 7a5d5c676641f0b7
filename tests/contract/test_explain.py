"""Explanations of a real server: the operation, also of front ends, and the command."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from headrace.client.blocking import Client
from headrace.plugins.access.keys import NewKey, new_key
from tests.contract.conftest import CLIENTS, FRONT_ENDS
from tests.models.ensembles import ensemble, step, write_ensemble
from tests.models.onnx_graphs import identity, write_model
from tests.models.python_models import tensors, write_python_model
from tests.models.sequence_models import write_adder
from tests.support.access_file import known_client
from tests.support.command import run
from tests.support.server_process import ServerProcess, clean_server

SIZES = (1, 2, 4)
ENSEMBLE = ensemble(
    (("x", "FP32", "2"),), (("y", "FP32", "2"),), step("plain", {"INPUT0": "x"}, {"OUTPUT0": "y"})
)
PYTHON = """
    class TritonPythonModel:
        def execute(self, requests):
            for request in requests:
                request.get_response_sender().send(flags=1)
"""
DECLARED = (
    tensors("input", ("X", "FP32", "1"))
    + tensors("output", ("Y", "FP32", "1"))
    + "model_transaction_policy { decoupled: true }"
)


@pytest.fixture(scope="module")
def keys() -> dict[str, NewKey]:
    return {name: new_key() for name in ("all", "watcher", "user")}


@pytest.fixture(scope="module", params=["here", FRONT_ENDS])
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory,
    keys: dict[str, NewKey],
) -> Iterator[ServerProcess]:  # fmt: skip
    root = tmp_path_factory.mktemp("explain")
    write_model(root, "plain", identity(), "max_batch_size: 8")
    write_model(root, "quiet", identity(), "max_batch_size: 4 dynamic_batching { }")
    levels = "max_batch_size: 4 dynamic_batching { priority_levels: 3 default_priority_level: 2 }"
    write_model(root, "levels", identity(), levels)
    write_model(root, "broken", b"no model")
    write_ensemble(root, "graph", ENSEMBLE)
    write_adder(root, "stateful", "direct { }")
    write_python_model(root, "many", PYTHON, DECLARED)
    access = root.parent / "access.toml"
    access.write_text(
        known_client("all", keys["all"])
        + known_client("watcher", keys["watcher"], ["observe"], ["plain"])
        + known_client("user", keys["user"], ["infer"])
    )
    options = [f"--access={access}", "--exit-on-error=false"]
    if request.param == "front ends":
        options.append("--frontends=1")
    with clean_server(root, options=options) as process:
        yield process


def ask(server: ServerProcess, key: NewKey, model: str) -> httpx.Response:
    headers = {"authorization": f"Bearer {key.key}"}
    return httpx.get(f"{server.url}/v2/models/{model}/explain", headers=headers, verify=False)


def explained(server: ServerProcess, key: NewKey, model: str) -> dict[str, Any]:
    answer = ask(server, key, model)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def test_an_explanation(server: ServerProcess, keys: dict[str, NewKey]) -> None:
    headers = {"authorization": f"Bearer {keys['all'].key}"}
    first = explained(server, keys["watcher"], "plain")
    assert first["settings"] == {
        "max_batch_size": 8, "preferred_batch_size": [8], "max_queue_delay_microseconds": 0,
        "instances": 1,
    }  # fmt: skip
    assert (first["logged"]["batches"], first["cost"], first["what_if"]) == (0, None, [])
    assert "no batch has been logged yet" in first["obstacle"]
    with Client(server.url, headers=headers) as client:
        for rows in SIZES * 10:
            client.infer("plain", {"INPUT0": np.zeros((rows, 2), np.float32)})
    found = explained(server, keys["watcher"], "plain/versions/1")
    assert (found["name"], found["version"], found["obstacle"]) == ("plain", "1", "")
    assert found["since_load"]["requests"] == 30
    logged = found["logged"]
    assert (logged["requests"], logged["batches"], logged["closed"]) == (30, 30, {"idle": 30})
    assert logged["rows_per_batch"] == round(10 * sum(SIZES) / 30, 2)
    assert found["logged_ns"] > 0
    for times in (logged["request"], found["since_load"]["request"], *found["last_batches"]):
        names = ("arrive", "queue", "gather", "run", "rest", "answer")
        parts = [times[f"{part}_ns"] for part in names if times[f"{part}_ns"] is not None]
        assert all(part >= 0 for part in parts)
        assert len(parts) == (4 if times is found["since_load"]["request"] else 6)
        assert times["total_ns"] == pytest.approx(sum(parts), abs=len(parts))
    listed = [(each["rows"], each["requests"], each["closed"]) for each in found["last_batches"]]
    assert listed == [(rows, 1, "idle") for rows in reversed(SIZES * 10)][:20]
    cost = found["cost"]
    assert (cost["batches"], cost["sizes"]) == (30, 3)
    assert cost["fixed_ns"] + cost["row_ns"] > 0
    present, *others = found["what_if"]
    assert present["change"] == {}
    assert 0 < present["batches"] <= 30
    assert 0 < present["mean_ns"] <= present["p99_ns"]
    assert [each["change"] for each in others] == [
        {"max_batch_size": 4}, {"max_batch_size": 16}, {"max_queue_delay_microseconds": 500},
        {"max_queue_delay_microseconds": 2000}, {"instances": 2},
    ]  # fmt: skip
    assert all(0 <= each["busy"] <= 1 for each in found["what_if"])


def test_the_time_at_the_doors(tmp_path: Path) -> None:
    write_model(tmp_path, "plain", identity(), "max_batch_size: 8")
    with clean_server(tmp_path) as server:
        asked = f"{server.url}/v2/models/plain/explain"
        for number, make in enumerate(CLIENTS.values()):
            assert httpx.get(asked, verify=False).json()["logged"]["requests"] == number
            with make(server) as client:
                client.infer("plain", {"INPUT0": np.zeros((2, 2), np.float32)})
            newest, *_ = httpx.get(asked, verify=False).json()["last_batches"]
            assert newest["arrive_ns"] > 0 < newest["answer_ns"]


def test_the_command(server: ServerProcess, keys: dict[str, NewKey]) -> None:
    header = f"--header=authorization: Bearer {keys['all'].key}"
    given = (f"--url={server.url}", header)
    ran = run("explain", "quiet", *given)
    assert ran.returncode == 0, ran.stderr
    assert "nothing else is replayed: no batch has been logged yet" in ran.stdout
    with Client(server.url, headers={"authorization": f"Bearer {keys['all'].key}"}) as client:
        for rows in SIZES:
            client.infer("quiet", {"INPUT0": np.zeros((rows, 2), np.float32)})
    text = run("explain", "quiet", "--version=1", *given).stdout
    assert text.startswith("quiet version 1: max_batch_size 4, ")
    assert "3 batches in " in text
    assert "3 logged" in text
    assert "a batch costs " in text
    assert "replayed as it is" in text
    assert "max_batch_size: 8" in text
    document = json.loads(run("explain", "quiet", "--json", *given).stdout)
    assert document["logged"]["batches"] == 3
    ran = run("explain", "quite", *given)
    assert (ran.returncode, ran.stdout) == (1, "")
    assert "Request for unknown model: 'quite' is not found; did you mean 'quiet'?" in ran.stderr


def test_priorities(server: ServerProcess, keys: dict[str, NewKey]) -> None:
    headers = {"authorization": f"Bearer {keys['all'].key}"}
    assert explained(server, keys["all"], "levels")["what_if"] == []
    with Client(server.url, headers=headers) as client:
        for priority in (0, 1, 3, 2, 3):
            given = {"INPUT0": np.zeros((1 + priority % 2, 2), np.float32)}
            client.infer("levels", given, parameters={"priority": priority} if priority else {})
    found = explained(server, keys["all"], "levels")
    expected = [(1, 1), (2, 2), (3, 2)]
    results = [found["logged"], *found["what_if"]]
    for result in results:
        assert [(each["level"], each["requests"]) for each in result["levels"]] == expected
        assert all(0 < each["mean_ns"] <= each["p99_ns"] for each in result["levels"])
    moved = [each["change"] for each in found["what_if"]][-3:]
    assert moved == [{"priority 2": 1}, {"priority 3": 1}, {"priority_levels": 0}]
    text = run(
        "explain",
        "levels",
        f"--url={server.url}",
        f"--header=authorization: {headers['authorization']}",
    ).stdout
    lines = [line.split() for line in text.partition("BY PRIORITY")[2].splitlines()]
    assert [line[:5] for line in lines[1:4]] == [
        ["as", "it", "was", str(level), str(count)] for level, count in expected
    ]
    assert "priority 3: 1" in text
    assert explained(server, keys["all"], "plain")["logged"]["levels"] == []


def test_models_whose_batches_cannot_be_replayed(
    server: ServerProcess, keys: dict[str, NewKey]
) -> None:
    for model, reason in (
        ("stateful", "its requests have a state"), ("graph", "only the counters are known"),
        ("many", "answered one by one"),
    ):  # fmt: skip
        found = explained(server, keys["all"], model)
        assert (found["name"], found["what_if"], found["cost"]) == (model, [], None)
        assert reason in found["obstacle"]


@pytest.mark.parametrize(("key", "model", "status", "error"), [
    ("all", "gone", 404, "Request for unknown model: 'gone' is not found"),
    ("all", "plain/versions/7", 404, "version 7"),
    ("all", "broken", 404, "version 1 is UNAVAILABLE"),
    ("watcher", "quiet", 404, "Request for unknown model: 'quiet' is not found"),
    ("user", "plain", 403, "observe"),
])  # fmt: skip
def test_refusals(
    server: ServerProcess, keys: dict[str, NewKey], key: str, model: str, status: int, error: str
) -> None:
    answer = ask(server, keys[key], model)
    assert (answer.status_code, error in answer.json()["error"]) == (status, True), answer.text


def test_an_unknown_client(server: ServerProcess) -> None:
    assert httpx.get(f"{server.url}/v2/models/plain/explain", verify=False).status_code == 401
