"""Ensembles and the models of their steps: loaded, changed and unloaded together."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from headrace.core.datatypes import Datatype
from headrace.core.errors import InvalidRequest, NotFound
from tests.contract import graphs
from tests.models.ensembles import ensemble, step, write_ensemble
from tests.models.onnx_graphs import add_sub, identity, write_model
from tests.support.client import Client
from tests.support.grpc_client import GrpcClient
from tests.support.http_client import HttpClient
from tests.support.scrape import until
from tests.support.server_process import ServerProcess, clean_server

X, Y = (("x", "FP32", "1"),), (("y", "FP32", "1"),)
ROWS = "max_batch_size: 8"


def chain(*models: str) -> str:
    """An ensemble of such models in a row."""
    names = ["x", *(f"m{n}" for n in range(1, len(models))), "y"]
    steps = [
        step(model, {"INPUT0": names[n]}, {"OUTPUT0": names[n + 1]})
        for n, model in enumerate(models)
    ]
    return ensemble(X, Y, *steps)


# Configurations that cannot be loaded, and why.
BROKEN: dict[str, tuple[str, str]] = {
    "nothing": (ensemble(X, Y), "an ensemble needs at least one step"),
    "unnamed": (
        ensemble(X, Y, step("", {"INPUT0": "x"}, {"OUTPUT0": "y"})),
        r"ensemble_scheduling.step\[0\].model_name: every step must name its model",
    ),
    "unproduced": (
        ensemble(X, Y, step("sum", {"INPUT0": "x", "INPUT1": "z"}, {"OUTPUT0": "y"})),
        r"step\[0\].input_map\['INPUT1'\]: tensor 'z' is produced by no step",
    ),
    "no_output": (
        ensemble(X, (*Y, ("z", "FP32", "1")), step("one", {"INPUT0": "x"}, {"OUTPUT0": "y"})),
        r"output\[1\].name: 'z' is produced by no step",
    ),
    "unused_input": (
        ensemble((*X, ("z", "FP32", "1")), Y, step("one", {"INPUT0": "x"}, {"OUTPUT0": "y"})),
        r"input\[1\].name: 'z' is used by no step",
    ),
    "unused": (
        ensemble(
            X, Y, step("sum", {"INPUT0": "x", "INPUT1": "x"}, {"OUTPUT0": "y", "OUTPUT1": "z"})
        ),
        r"step\[0\].output_map\['OUTPUT1'\]: tensor 'z' is used by no step",
    ),
    "twice": (
        ensemble(
            X, Y, step("one", {"INPUT0": "x"}, {"OUTPUT0": "y"}),
            step("two", {"INPUT0": "x"}, {"OUTPUT0": "y"}),
        ),
        r"step\[1\].output_map\['OUTPUT0'\]: tensor 'y' is produced twice",
    ),
    "overwrites": (
        ensemble(
            X, Y, step("one", {"INPUT0": "x"}, {"OUTPUT0": "x"}),
            step("two", {"INPUT0": "x"}, {"OUTPUT0": "y"}),
        ),
        r"step\[0\].output_map\['OUTPUT0'\]: tensor 'x' is an input of the ensemble",
    ),
    "circle": (
        ensemble(
            X, Y, step("sum", {"INPUT0": "x", "INPUT1": "b"}, {"OUTPUT0": "a"}),
            step("one", {"INPUT0": "a"}, {"OUTPUT0": "b"}),
            step("two", {"INPUT0": "b"}, {"OUTPUT0": "y"}),
        ),
        r"the steps wait for each other: ",
    ),
    "no_such_input": (
        ensemble(X, Y, step("one", {"INPUT9": "x"}, {"OUTPUT0": "y"})),
        r"input_map\['INPUT9'\]: model 'one' has no input 'INPUT9', it has \['INPUT0'\]",
    ),
    "no_such_output": (
        ensemble(X, Y, step("one", {"INPUT0": "x"}, {"OUTPUT9": "y"})),
        r"output_map\['OUTPUT9'\]: model 'one' has no output 'OUTPUT9'",
    ),
    "unmapped": (
        ensemble(X, Y, step("sum", {"INPUT0": "x"}, {"OUTPUT0": "y"})),
        r"model 'sum' needs its input 'INPUT1', which is not mapped",
    ),
    "datatype": (
        ensemble((("x", "INT64", "1"),), Y, step("one", {"INPUT0": "x"}, {"OUTPUT0": "y"})),
        r"input_map\['INPUT0'\]: input 'x' of the ensemble is INT64, and input 'INPUT0' of model"
        r" 'one' \(step 0\) is FP32",
    ),
    "shape": (
        ensemble(
            X, (("y", "FP32", "3"),), step("one", {"INPUT0": "x"}, {"OUTPUT0": "y"}),
        ),
        r"output\[0\]: output 'OUTPUT0' of model 'one' \(step 0\) has the shape \[-1,1\], and"
        r" output 'y' of the ensemble the shape \[-1,3\]",
    ),
    "between": (
        ensemble(
            X, Y, step("one", {"INPUT0": "x"}, {"OUTPUT0": "m"}),
            step("wide", {"INPUT0": "m"}, {"OUTPUT0": "y"}),
        ),
        r"step\[1\].input_map\['INPUT0'\]: output 'OUTPUT0' of model 'one' \(step 0\) has the"
        r" shape \[-1,1\], and input 'INPUT0' of model 'wide' \(step 1\) the shape \[-1,4\]",
    ),
    "rows": (
        ensemble(X, Y, step("one", {"INPUT0": "x"}, {"OUTPUT0": "y"}), rows=9),
        "allows maximum batch size 9, but it contains model 'one' which only allows maximum batch"
        " size 8",
    ),
    "optional": (
        ensemble(X, Y, step("one", {"INPUT0": "x"}, {"OUTPUT0": "y"})).replace(
            'name: "x"', 'name: "x" optional: true'
        ),
        "input 'x' of the ensemble is optional, and input 'INPUT0' of model 'one'",
    ),
    "missing": (chain("one", "absent"), "depends on 'absent' which has no loaded version"),
    "version": (
        ensemble(X, Y, step("one", {"INPUT0": "x"}, {"OUTPUT0": "y"}, version=7)),
        "depends on 'one' whose required version 7 is not loaded",
    ),
    "itself": (
        ensemble(X, Y, step("itself", {"x": "x"}, {"y": "y"})),
        "model 'itself' runs itself: itself -> itself",
    ),
    "round": (
        ensemble(X, Y, step("about", {"x": "x"}, {"y": "y"})),
        "runs itself: (round -> about -> round|about -> round -> about)"
        "|depends on 'about' which has no loaded version",
    ),
    "about": (
        ensemble(X, Y, step("round", {"x": "x"}, {"y": "y"})),
        "runs itself: (round -> about -> round|about -> round -> about)"
        "|depends on 'round' which has no loaded version",
    ),
    "instances": (
        chain("one", "two") + "instance_group { count: 2 }",
        "instance_group should not be specified for an ensemble",
    ),
    "elsewhere": (
        chain("one", "two").replace("ensemble", "onnxruntime_onnx", 1),
        "ensemble_scheduling: needs the platform 'ensemble', got 'onnxruntime_onnx'",
    ),
}  # fmt: skip


def write_parts(root: Path) -> None:
    write_model(root, "one", graphs.add_constant(1), ROWS)
    write_model(root, "two", graphs.add_constant(10), ROWS)
    write_model(root, "sum", add_sub(Datatype.FP32, 1), ROWS)
    write_model(root, "wide", identity(Datatype.FP32, ["rows", 4]), ROWS)


def test_graphs_that_cannot_be_loaded(tmp_path: Path) -> None:
    write_parts(tmp_path)
    write_ensemble(tmp_path, "good", chain("one", "two"))
    for name, (config, _) in BROKEN.items():
        write_ensemble(tmp_path, name, config)
    with clean_server(tmp_path, options=("--exit-on-error=false",)) as server:
        until(lambda: all(f"failed to load {name}:" in server.log for name in BROKEN), "all errors")
        with GrpcClient(server.grpc) as client:
            assert ask(client, "good") == 11
            reasons = {model.name: model.reason for model in client.index().models}
    for name, (_, text) in BROKEN.items():
        assert re.search(text, reasons[name]), (name, reasons[name])


def ask(client: Client, name: str) -> float:
    answer = client.infer(name, {"x": np.zeros((1, 1), np.float32)})
    return float(answer["y"][0, 0])


@pytest.fixture(scope="module")
def explicit(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, ServerProcess]]:
    root = tmp_path_factory.mktemp("explicit")
    write_parts(root)
    write_ensemble(root, "good", chain("one", "two"))
    write_ensemble(root, "above", ensemble(X, Y, step("good", {"x": "x"}, {"y": "y"})))
    with clean_server(root, options=("--model-control-mode=explicit",)) as server:
        yield root, server


Make = Callable[[ServerProcess], Client]
DOORS: dict[str, Make] = {
    "http": lambda server: HttpClient(server.url, binary=False),
    "grpc": lambda server: GrpcClient(server.grpc),
}


@pytest.fixture(params=DOORS)
def client(
    request: pytest.FixtureRequest, explicit: tuple[Path, ServerProcess]
) -> Iterator[Client]:
    """A client of a server with nothing loaded."""
    root, server = explicit
    write_model(root, "one", graphs.add_constant(1), ROWS)
    with DOORS[request.param](server) as client:
        for model in client.index(ready=True).models:
            client.unload(model.name)
        until(lambda: not client.index(ready=True).models, "everything to be unloaded")
        yield client


def ready(client: Client) -> set[str]:
    return {model.name for model in client.index(ready=True).models}


def test_models_of_steps_are_loaded_with_it(client: Client) -> None:
    client.load("above")
    assert ready(client) == {"above", "good", "one", "two"}
    assert ask(client, "above") == 11


def test_models_of_steps_stay_when_it_is_unloaded(client: Client) -> None:
    client.load("good")
    client.unload("good")
    assert ready(client) == {"one", "two"}


def test_unloading_dependents(client: Client) -> None:
    client.load("two")  # for its own sake: it stays
    client.load("above")
    client.unload("above", dependents=True)
    assert ready(client) == {"two"}


def test_dependents_that_another_one_runs_stay(client: Client) -> None:
    client.load("above")
    client.load("good")
    client.unload("above", dependents=True)
    assert ready(client) == {"good", "one", "two"}


def test_an_ensemble_leaves_with_a_model_and_comes_back(client: Client) -> None:
    client.load("above")
    client.unload("one")
    until(lambda: ready(client) == {"two"}, "the ensembles to be unloaded")
    until(
        lambda: "ensemble 'good' depends on 'one' which has no loaded version" in reason(client),
        "the reason",
    )
    with pytest.raises(NotFound):
        ask(client, "above")
    client.load("one")
    until(lambda: ready(client) == {"above", "good", "one", "two"}, "the ensembles to be back")
    assert ask(client, "above") == 11


def reason(client: Client) -> str:
    return next(model.reason for model in client.index().models if model.name == "good")


def test_one_that_a_client_has_unloaded_stays_away(client: Client) -> None:
    client.load("good")
    client.unload("one")
    until(lambda: ready(client) == {"two"}, "the ensemble to be unloaded")
    client.unload("good")
    client.load("one")
    assert ready(client) == {"one", "two"}


def test_a_change_that_fits_serves(client: Client, explicit: tuple[Path, ServerProcess]) -> None:
    client.load("above")
    write_model(explicit[0], "one", graphs.add_constant(5), ROWS)
    client.load("one")
    assert ask(client, "above") == 15


def test_a_changed_ensemble(client: Client, explicit: tuple[Path, ServerProcess]) -> None:
    client.load("above")
    write_ensemble(explicit[0], "good", chain("two", "two"))
    client.load("good")
    assert ask(client, "above") == 20
    client.unload("one")  # which it does not run any more
    assert ready(client) == {"above", "good", "two"}
    write_ensemble(explicit[0], "good", chain("two", "wide"))
    with pytest.raises(InvalidRequest, match=r"the shape \[-1,4\]"):
        client.load("good")
    assert ask(client, "above") == 20
    write_ensemble(explicit[0], "good", chain("one", "two"))


def test_a_model_and_its_ensemble_change_together(tmp_path: Path) -> None:
    write_parts(tmp_path)
    write_ensemble(tmp_path, "good", chain("one"))
    options = ("--model-control-mode=poll", "--repository-poll-secs=1")
    with clean_server(tmp_path, options=options) as server, GrpcClient(server.grpc) as client:
        assert ask(client, "good") == 1
        write_model(tmp_path, "one", add_sub(Datatype.FP32, 1), ROWS)
        server.await_logged("model 'good', which runs it, would not go with it")
        assert ask(client, "good") == 1
        both = {"INPUT0": "x", "INPUT1": "x"}
        write_ensemble(tmp_path, "good", ensemble(X, Y, step("one", both, {"OUTPUT0": "y"})))
        until(lambda: "INPUT1" in str(client.model_config("good")), "both to be changed")
        answer = client.infer("good", {"x": np.ones((1, 1), np.float32)})
        assert answer["y"].tolist() == [[2]]


@pytest.mark.parametrize("change", ["shape", "batching"])
def test_a_change_that_does_not_fit_is_refused(
    client: Client, explicit: tuple[Path, ServerProcess], change: str
) -> None:
    client.load("above")
    if change == "shape":
        write_model(explicit[0], "one", identity(Datatype.FP32, ["rows", 4]), ROWS)
        text = r"model 'good', which runs it, would not go with it: .*the shape \[-1,4\]"
    else:
        write_model(explicit[0], "one", graphs.add_constant(5), "max_batch_size: 4")
        text = "'good' allows maximum batch size 8, but it contains model 'one'"
    with pytest.raises(InvalidRequest, match=text):
        client.load("one")
    assert ask(client, "above") == 11
    assert ready(client) == {"above", "good", "one", "two"}
    client.unload("above")
    client.unload("good")
    client.load("one")


def test_a_model_that_appears_later(tmp_path: Path) -> None:
    write_model(tmp_path, "two", graphs.add_constant(10), ROWS)
    write_ensemble(tmp_path, "good", chain("one", "two"))
    options = (
        "--model-control-mode=poll", "--repository-poll-secs=1", "--exit-on-error=false",
    )  # fmt: skip
    with clean_server(tmp_path, options=options) as server, GrpcClient(server.grpc) as client:
        server.await_logged("depends on 'one' which has no loaded version")
        write_model(tmp_path, "one", graphs.add_constant(1), ROWS)
        until(lambda: ready(client) == {"good", "one", "two"}, "the ensemble to be loaded")
        assert ask(client, "good") == 11


def test_models_loaded_on_request(tmp_path: Path) -> None:
    write_model(tmp_path, "one", graphs.add_constant(1), ROWS)
    write_model(tmp_path, "two", graphs.add_constant(10), ROWS)
    write_ensemble(tmp_path, "good", chain("one", "two"))
    with (
        clean_server(tmp_path, options=("--load-on-request",)) as server,
        GrpcClient(server.grpc) as client,
    ):
        assert ask(client, "good") == 11
