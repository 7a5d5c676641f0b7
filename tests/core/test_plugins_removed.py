"""Plugins can be removed: the server runs from a copy of its package without them.

A plugin goes with its module or folder and its lines in `core/plugins.py`. What needs it then is
refused with an error that names it; everything else is as before.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import httpx
import numpy as np
import pytest

from tests.models.ensembles import ensemble, step, write_ensemble
from tests.models.onnx_graphs import identity, write_model
from tests.models.python_models import execution, in_config, tensors, write_python_model
from tests.support.command import FREE_PORTS, run
from tests.support.grpc_client import GrpcClient
from tests.support.http_client import HttpClient
from tests.support.scrape import until
from tests.support.server_process import ServerProcess, clean_server, onnx_examples

REPO = Path(__file__).parents[2]
PACKAGE = REPO / "server" / "headrace"
PLUGINS = sorted(
    path.stem for path in (PACKAGE / "plugins").iterdir() if not path.stem.startswith("_")
)
ROW = np.arange(16, dtype=np.int32).reshape(1, 16)
PYTHON = """
    class TritonPythonModel:
        def execute(self, requests):
            return [None] * len(requests)
"""
FUNCTION = """
    from headrace import Float32, model


    @model
    def doubled(x: Float32["n"]) -> {"y": Float32["n"]}:
        return {"y": 2 * x}
"""
ENSEMBLE = ensemble(
    (("x", "FP32", "1"),), (("y", "FP32", "1"),), step("simple", {"INPUT0": "x"}, {"OUTPUT0": "y"})
)
DECLARED = tensors("input", ("X", "FP32", "1")) + tensors("output", ("Y", "FP32", "1"))


def copy_without(folder: Path, *plugins: str) -> Path:
    """The import path of a copy of the package in `folder` without these plugins."""
    package = folder / "headrace"
    shutil.copytree(PACKAGE, package, copy_function=os.symlink)
    table = package / "core" / "plugins.py"
    lines = table.read_text().splitlines(keepends=True)
    table.unlink()
    for plugin in plugins:
        target = re.compile(rf'"headrace\.plugins\.{plugin}[.:]')
        kept = [line for line in lines if not target.search(line)]
        assert len(kept) < len(lines), plugin
        lines = kept
        path = package / "plugins" / plugin
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.with_suffix(".py").unlink()
    table.write_text("".join(lines))
    return folder


def remote(root: Path, name: str, **parameters: str) -> None:
    """A model on a server that is not there."""
    given = parameters if "remote_backend" in parameters else {
        "endpoints": "grpc://127.0.0.1:1", **parameters,
    }  # fmt: skip
    config = f'backend: "triton"\nmax_batch_size: 8\n{DECLARED}{in_config(given)}'
    (root / name / "1").mkdir(parents=True)
    (root / name / "config.pbtxt").write_text(config)


def with_requirements(root: Path, name: str) -> None:
    write_python_model(root, name, PYTHON, DECLARED)
    (root / name / "requirements.txt").write_text("six\n")


# A model that needs a plugin, and why it is not served.
MODELS: Mapping[str, tuple[Callable[[Path, str], object], str]] = {
    "dialects": (
        lambda root, name: remote(root, name, protocol="tfserving"),
        r"parameters\['protocol'\]: expected v2, got 'tfserving'",
    ),
    "ensembles": (
        lambda root, name: write_ensemble(root, name, ENSEMBLE),
        "'ensemble' is not a platform of this server",
    ),
    "environments": (
        with_requirements,
        "this server was installed without its environments of models",
    ),
    "functions": (
        lambda root, name: write_python_model(root, name, FUNCTION),
        "without its part 'functions'",
    ),
    "in_process": (
        lambda root, name: write_python_model(root, name, PYTHON, DECLARED + execution("thread")),
        "without its part 'in_process'",
    ),
    "loaders": (
        lambda root, name: write_model(
            root, name, b"{}", 'backend: "xgboost"', filename="model.json"
        ),
        "'xgboost' is not a backend of this server",
    ),
    "padding": (
        lambda root, name: write_model(root, name, identity(), in_config({"pad_to_buckets": "{}"})),
        "without its part 'padding'",
    ),
    "sequences": (
        lambda root, name: write_model(
            root, name, identity(), "max_batch_size: 4 sequence_batching { }"
        ),
        "without its part 'sequences'",
    ),
    "traffic": (
        lambda root, name: write_model(root, name, identity(), in_config({"traffic": "{}"})),
        r"parameters\['traffic'\]: this server was installed without its stage 'traffic'",
    ),
    "triton": (
        lambda root, name: remote(root, name, remote_backend="python"),
        "without its part 'triton_servers'",
    ),
    "upstream_memory": (
        lambda root, name: remote(root, name, shared_memory="true"),
        "without its part 'upstream_memory'",
    ),
}
# An option that needs a plugin, and the part that it names.
OPTIONS: Mapping[str, tuple[str, str]] = {
    "access": ("--access=access.toml", "access"),
    "audit": ("--audit-log=audit.log", "audit"),
    "capture": ("--capture=capture.jsonl", "capture"),
    "cache": ("--cache-config=local,size=1", "cache"),
    "following": ("--model-control-mode=poll", "poll"),
    "frontends": ("--frontends=1", "frontends"),
    "grpcio": ("--grpc-transport=grpcio", "grpcio"),
    "on_request": ("--load-on-request", "on_request"),
    "rate_limiter": ("--rate-limit=execution_count", "rate_limiter"),
    "stores": ("--require-signature=keys.pem", "signatures"),
    "traces": ("--trace-config=triton,file=traces.json", "traces"),
}

# Starts a server with each option in turn, and prints the exit statuses.
SERVE_WITH_EACH = """
import json, sys
from headrace.cli import main

statuses = []
for option in sys.argv[2:]:
    try:
        main([*json.loads(sys.argv[1]), option])
    except SystemExit as ended:
        statuses.append(ended.code)
print(json.dumps(statuses))
"""


def refuses_gpu_memory(server: ServerProcess) -> bool:
    url = f"{server.url}/v2/cudasharedmemory/region/r/register"
    document = {"raw_handle": {"b64": "AAAA"}, "device_id": 0, "byte_size": 8}
    answer = httpx.post(url, json=document, verify=False)
    return answer.status_code == 400 and "without its part 'cuda_memory'" in answer.text


def explains_nothing(server: ServerProcess) -> bool:
    answer = httpx.get(f"{server.url}/v2/models/simple/explain", verify=False)
    return answer.status_code == 501 and "without its part 'explain'" in answer.text


# A request that needs a plugin.
REQUESTS: Mapping[str, Callable[[ServerProcess], bool]] = {
    "cuda_memory": refuses_gpu_memory,
    "explain": explains_nothing,
    "kserve_v1": lambda server: (
        httpx.get(f"{server.url}/v1/models", verify=False).status_code == 404
    ),
    "console": lambda server: httpx.get(f"{server.url}/console", verify=False).status_code == 404,
    "openapi": lambda server: httpx.get(f"{server.url}/docs", verify=False).status_code == 404,
}


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, str]:
    """The environment of a copy of the package without any plugin."""
    return {"PYTHONPATH": str(copy_without(tmp_path_factory.mktemp("bare"), *PLUGINS))}


def check_server(models: Path, environment: Mapping[str, str], plugins: Sequence[str]) -> None:
    """Run a server without these plugins, with models and requests that need them."""
    models.mkdir()
    problems = []
    for plugin in MODELS.keys() & plugins:
        write, problem = MODELS[plugin]
        write(models, f"needs_{plugin}")
        problems.append(problem)
    onnx_examples(models)
    options = ("--exit-on-error=false", "--allow-client-shm", "--allow-in-process-python")
    with clean_server(models, options=options, environment=environment) as server:
        # A thread of the server writes its log.
        until(lambda: all(re.search(p, server.log) for p in problems), f"{problems} in the log")
        for client in (HttpClient(server.url, binary=False), GrpcClient(server.grpc)):
            with client:
                assert client.live()
                assert client.ready()
                answer = client.infer("simple", {"INPUT0": ROW, "INPUT1": ROW})
                np.testing.assert_array_equal(answer["OUTPUT0"], 2 * ROW)
        for plugin in REQUESTS.keys() & plugins:
            assert REQUESTS[plugin](server), plugin


def test_a_server_without_plugins(bare: Mapping[str, str], tmp_path: Path) -> None:
    check_server(tmp_path / "models", bare, PLUGINS)


@pytest.mark.slow
@pytest.mark.parametrize("plugin", PLUGINS)
def test_a_server_without_a_plugin(plugin: str, tmp_path: Path) -> None:
    environment = {"PYTHONPATH": str(copy_without(tmp_path / "path", plugin))}
    check_server(tmp_path / "models", environment, [plugin])


def test_options_that_need_a_plugin(bare: Mapping[str, str], tmp_path: Path) -> None:
    given = ["serve", f"--model-repository={tmp_path}", *FREE_PORTS]
    ran = subprocess.run(
        [sys.executable, "-c", SERVE_WITH_EACH, json.dumps(given),
         *(option for option, _ in OPTIONS.values())],
        env={**os.environ, **bare}, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    assert json.loads(ran.stdout.splitlines()[-1]) == [1] * len(OPTIONS)
    for _, part in OPTIONS.values():
        expected = f"headrace serve: this server was installed without its part '{part}'"
        assert ran.stderr.count(expected) == 1, ran.stderr
    assert "Traceback" not in ran.stderr


@pytest.mark.slow
@pytest.mark.parametrize(("plugin", "option", "part"), [(p, *each) for p, each in OPTIONS.items()])
def test_an_option_that_needs_a_plugin(plugin: str, option: str, part: str, tmp_path: Path) -> None:
    environment = {"PYTHONPATH": str(copy_without(tmp_path / "path", plugin))}
    ran = run(
        "serve", f"--model-repository={tmp_path}", *FREE_PORTS, option, environment=environment
    )
    assert ran.returncode == 1
    assert f"headrace serve: this server was installed without its part '{part}'" in ran.stderr
    assert "Traceback" not in ran.stderr


def test_inboxes_are_a_door(tmp_path: Path) -> None:
    (models := tmp_path / "models").mkdir()
    environment = {"PYTHONPATH": str(copy_without(tmp_path / "path", "inboxes"))}
    given = (f"--model-repository={models}", *FREE_PORTS, "--inboxes=f.toml")
    ran = run("serve", *given, environment=environment)
    assert ran.returncode == 1
    assert "--door inboxes=f.toml: no installed package has a door 'inboxes'" in ran.stderr
    assert "Traceback" not in ran.stderr


# The quick cases of the contract suite that need a plugin: those of files, or of tests. Front ends
# are further carriers of many tests.
OWN_CASES: Mapping[str, Sequence[str]] = {
    "access": [
        "test_access", "test_access_file", "test_flight_access", "test_proxy_protocol",
        "test_status",
    ],
    "audit": ["test_audit"],
    "capture": ["test_capture"],
    "cache": ["test_response_cache"],
    "cuda_memory": ["test_shared_memory::test_cuda_without_a_gpu"],
    "dialects": ["test_remote_tfserving"],
    "explain": ["test_explain", "test_tune"],
    "ensembles": [
        "test_ensembles", "test_ensembles_charged", "test_ensembles_loading", "test_padding",
    ],
    "flight": ["test_flight", "test_flight_access"],
    "frontends": ["test_unix_sockets", "test_logging::test_changes_take_effect_at_once[1"],
    "functions": [
        "test_functions", "test_generate::test_misspelt_members_are_refused",
        "test_generate::test_models_that_read_parameters_get_every_member",
    ],
    # Tests hold models on threads of the server's process.
    "in_process": [
        "test_unix_sockets", "test_ensembles",
        "test_deadlines", "test_grpc_stream", "test_in_process", "test_limits", "test_loose_models",
        "test_padding", "test_pings", "test_ragged", "test_scheduling", "test_unchanged_models",
        "test_warmup",
        "test_generate::test_limits", "test_grpc_transport::test_a_deadline",
        "test_grpc_transport::test_a_message_that_decompresses_beyond_the_limit",
        "test_grpc_transport::test_the_server_enforces_the_deadline",
        "test_http::test_too_large_a_body",
        "test_metrics::test_failure_reasons_are_there_from_the_start",
        "test_openapi::test_a_server_without_shared_memory",
        "test_shared_memory::test_shared_memory_is_off_by_default",
        "test_statuses::test_bodies_without_an_end",
        "test_statuses::test_disabled_operations_are_unknown",
        "test_traffic::test_traffic_control_is_off_by_default",
    ],
    "nvml": ["test_gpu"],
    "on_request": ["test_on_request"],
    "kserve_v1": ["test_kserve_v1"],
    "openapi": [
        "test_openapi", "test_http::test_a_404_names_the_nearest_route",
        "test_header_rules::test_protocol_descriptions_are_unrestricted",
    ],
    "padding": ["test_padding"],
    "sequences": ["test_sequences"],
    "rate_limiter": ["test_rate_limiter"],
    "traces": ["test_opentelemetry", "test_remote_forwarding", "test_trace"],
    "traffic": [
        "test_run_once", "test_traffic", "test_browsers::test_allowed_pages_change_something",
        "test_browsers::test_inference_and_reading_are_open_to_every_page",
        "test_statuses::test_errors_have_one_status_in_each_protocol[default-traffic]",
    ],
    "triton": ["test_managed"],
    "upstream_memory": ["test_remote_shared"],
}  # fmt: skip
OTHERS = [plugin for plugin in PLUGINS if plugin != "in_process"]


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    "plugins", [OTHERS, pytest.param(["in_process"], marks=pytest.mark.whole)], ids=len
)
def test_the_contract_suite_without_plugins(plugins: Sequence[str], tmp_path: Path) -> None:
    """All of its quick cases, but those that need the plugins."""
    path = copy_without(tmp_path, *plugins)
    own = [f"tests/contract/{case}" for plugin in plugins for case in OWN_CASES.get(plugin, ())]
    left_out = [
        f"--deselect={case.replace('::', '.py::')}" if "::" in case else f"--ignore={case}.py"
        for case in own
    ]
    carriers = ["-k", "not frontends and not (front and ends)"] if "frontends" in plugins else []
    ran = subprocess.run(
        [
            sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/contract",
            *left_out, *carriers,
        ],
        cwd=REPO, env=os.environ | {"PYTHONPATH": str(path)}, capture_output=True, text=True,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stdout + ran.stderr
