"""Payers of ensembles' steps, and of calls that models make: the clients that asked."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.contract.conftest import CARRIERS, FIRST_CARRIER
from tests.models.ensembles import ensemble, step, write_ensemble
from tests.models.python_models import tensors, write_python_model
from tests.support.held import Gates, write_held_model
from tests.support.http_socket import RawAnswer, ask
from tests.support.scrape import Scraper
from tests.support.server_process import ServerProcess, clean_server

_RULES = """
[roles.scorer]
may = ["*"]
[anonymous]
roles = "scorer"
[[quotas]]
of = ["*"]
requests = 100
[[quotas]]
name = "rows"
of = ["*"]
models = ["twice"]
rows_per_sec = 0.01
[[quotas]]
name = "counted"
of = ["*"]
models = ["counted"]
requests_per_sec = 0.01
burst = 3
"""
_TENSORS = tensors("input", ("v", "INT64", "1")) + tensors("output", ("turn", "INT64", "1"))
_FIRST, _SECOND = "192.0.2.1", "192.0.2.2"
FAIR = ensemble(
    (("v", "INT64", "1"),), (("turn", "INT64", "1"),),
    step("fair", {"VALUE": "v"}, {"TURN": "turn"}), rows=1,
)  # fmt: skip
TWICE = ensemble(
    (("v", "INT64", "1"),), (("turn", "INT64", "1"),),
    step("fair", {"VALUE": "v"}, {"TURN": "m"}), step("fair", {"VALUE": "m"}, {"TURN": "turn"}),
    rows=1,
)  # fmt: skip
PAIR = TWICE.replace('"fair"', '"counted"')
# Asks the same model for each request.
CALLER = """
    import asyncio

    import triton_python_backend_utils as pb_utils


    class TritonPythonModel:
        async def execute(self, requests):
            return await asyncio.gather(*map(self.answer, requests))

        async def answer(self, request):
            value = pb_utils.get_input_tensor_by_name(request, "v").as_numpy()
            asked = pb_utils.InferenceRequest(
                model_name="fair", requested_output_names=["TURN"],
                inputs=[pb_utils.Tensor("VALUE", value)],
            )
            answer = await asked.async_exec()
            if answer.has_error():
                return pb_utils.InferenceResponse(error=answer.error())
            turn = pb_utils.get_output_tensor_by_name(answer, "TURN").as_numpy()
            return pb_utils.InferenceResponse([pb_utils.Tensor("turn", turn)])
"""


@pytest.fixture(scope="module", params=FIRST_CARRIER)
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, gates: Gates
) -> Iterator[ServerProcess]:
    root = tmp_path_factory.mktemp("charged")
    (rules := root / "access.toml").write_text(_RULES)
    models = root / "models"
    shares = 'parameters { key: "fair_share" value { string_value: "true" } }'
    write_held_model(models, "fair", gates.folder, shares, rows=1)
    write_python_model(models, "caller", CALLER, f"max_batch_size: 1\n{_TENSORS}")
    write_held_model(models, "counted", gates.folder, rows=1)
    asker = CALLER.replace('"fair"', '"counted"')
    write_python_model(models, "asker", asker, f"max_batch_size: 1\n{_TENSORS}")
    write_ensemble(models, "pair", PAIR)
    write_ensemble(models, "ensemble", FAIR)
    write_ensemble(models, "twice", TWICE)
    options = [f"--access={rules}", "--trusted-proxies=127.0.0.0/8", "--allow-in-process-python"]
    with clean_server(models, options=[*options, *CARRIERS[request.param]]) as process:
        yield process


def infer(server: ServerProcess, client: str, model: str, value: int) -> RawAnswer:
    given = {"name": "v", "datatype": "INT64", "shape": [1, 1], "data": [value]}
    body = json.dumps({"inputs": [given]}).encode()
    return ask(server.http, "POST", f"/v2/models/{model}/infer", body, X_Forwarded_For=client)


def turn(server: ServerProcess, client: str, model: str, value: int) -> int:
    """The place of the request among those that model `fair` has run."""
    [found] = infer(server, client, model, value).document["outputs"][0]["data"]
    assert isinstance(found, int)
    return found


@pytest.mark.parametrize("model", ["ensemble", "caller"])
def test_clients_share_the_queue_of_a_model_that_another_one_runs(
    server: ServerProcess, pool: ThreadPoolExecutor, number: int, gates: Gates, model: str
) -> None:
    with Scraper(server.metrics) as scraper:
        running = pool.submit(turn, server, _FIRST, model, number)
        scraper.until_running("fair")
        many = []
        for count in range(1, 5):
            many.append(pool.submit(turn, server, _FIRST, model, 1))
            scraper.until_queued("fair", count)
        single = pool.submit(turn, server, _SECOND, model, 1)
        scraper.until_queued("fair", 5)
        gates.open(number)
        begun = running.result()
        assert single.result() - begun <= 2
        assert sorted(one.result() - begun for one in [*many, single]) == [1, 2, 3, 4, 5]


def test_rows_are_charged_once(server: ServerProcess) -> None:
    assert infer(server, _FIRST, "twice", 1).status == 200
    refused = infer(server, _FIRST, "twice", 1)
    assert refused.status == 429
    assert "of its quota 'rows' (rows_per_sec)" in refused.error
    # The debt of one row, at 0.01 a second; those of the steps would double or triple it.
    assert int(refused.headers["retry-after"]) <= 100


def test_steps_count_for_the_quota_of_their_model(server: ServerProcess) -> None:
    client = "192.0.2.3"
    assert infer(server, client, "pair", 1).status == 200
    refused = infer(server, client, "pair", 1)  # its second step
    assert refused.status == 429
    assert refused.error.startswith("in ensemble 'pair', this client is at the limit of 0.01")
    assert "of its quota 'counted' (requests_per_sec)" in refused.error
    assert refused.headers["ratelimit-policy"].startswith('"counted";q=3;')
    assert infer(server, client, "ensemble", 1).status == 200
    assert infer(server, "192.0.2.4", "pair", 1).status == 200


def test_calls_of_models_count_for_the_quota_of_their_model(server: ServerProcess) -> None:
    client = "192.0.2.5"
    for _ in range(3):
        assert infer(server, client, "asker", 1).status == 200
    refused = infer(server, client, "asker", 1)
    assert refused.status == 503
    assert "of its quota 'counted' (requests_per_sec)" in refused.error
    assert infer(server, "192.0.2.6", "asker", 1).status == 200
