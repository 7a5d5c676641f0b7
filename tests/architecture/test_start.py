"""A process imports only what it uses: commands, front ends, servers and workers."""

import json
import re
import subprocess
import sys
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

import httpx
import numpy as np

from headrace.cli.command import COMMANDS
from tests.support.grpc_client import GrpcClient
from tests.support.server_process import ServerProcess, onnx_examples

LIBRARIES = {
    "fastapi", "google.protobuf", "grpc", "numpy", "onnxruntime", "prometheus_client", "pydantic",
}  # fmt: skip
# Slow parts of the standard library.
SLOW = {"asyncio", "email", "http.client", "multiprocessing", "ssl", "tempfile", "tomllib"}

# What answers everything over HTTP but inference and probes.
FRAMEWORK = {"fastapi", "pydantic", "pydantic_core", "starlette.routing"}

# For models other than ONNX, and for front ends.
OTHERS = {
    f"headrace.{name}"
    for name in (
        "plugins.environments", "plugins.dialects", "plugins.triton", "plugins.in_process",
        "placement.worker.loaded_worker", "placement.worker.worker_instance",
        "placement.worker.worker_process", "placement.worker.worker_set",
        "placement.upstream.model", "placement.upstream.options", "placement.upstream.grpc_client",
        "placement.upstream.http_client", "protocol.http1", "plugins.frontends",
    )
}  # fmt: skip
FRONT_END = "headrace.plugins.frontends"
# Unused by front ends.
PARTS = {
    f"headrace.{part}"
    for part in ("placement", "plugins.loaders", "plugins.traffic", "repository", "scheduling")
}
# Ends at the missing repository. A private process looks for `prctl`.
SERVING = """
import sys
from headrace.cli import main

def hear(event, given):
    if event == "ctypes.dlsym" and "prctl" in given:
        print("numpy is there" if "numpy" in sys.modules else "without numpy")

sys.addaudithook(hear)
main(["serve", "--allow-debugging=false", "--model-repository=/nowhere/at/all"])
"""
_IMPORT = re.compile(r"^import time: .*\| +(\S+)$", re.MULTILINE)


def imported_by(program: str) -> list[str]:
    """Modules imported by a program in a process of its own."""
    listing = f"{program}\nimport sys\nprint(*sys.modules, sep='\\n')"
    ran = subprocess.run([sys.executable, "-c", listing], capture_output=True, check=True)
    return ran.stdout.decode().splitlines()


def among(modules: Iterable[str], unused: Iterable[str]) -> list[str]:
    """Members of `modules` that are in the `unused` modules and packages."""
    found = tuple(unused)
    return [m for m in modules if m in found or m.startswith(tuple(f"{name}." for name in found))]


def test_excluded_modules_exist() -> None:
    assert [name for name in (*OTHERS, *PARTS) if find_spec(name) is None] == []


def test_a_server_is_private_before_numeric_libraries_start_threads() -> None:
    ran = subprocess.run([sys.executable, "-c", SERVING], capture_output=True, text=True)
    assert "/nowhere/at/all" in ran.stderr
    assert ran.stdout.splitlines()[0] == "without numpy"


def test_imports_of_small_processes() -> None:
    """Commands, those with JSON output, front ends, and workers without coroutines."""
    front_end = LIBRARIES - {"google.protobuf", "numpy"} | PARTS | FRAMEWORK
    commands = [plugin.target.partition(":")[0] for plugin in COMMANDS.own().values()]
    worker = LIBRARIES - {"numpy"} | SLOW | {"dataclasses", "subprocess"}
    for program, unused in (
        ("import headrace.cli", LIBRARIES | SLOW),
        (f"import {', '.join(commands)}", LIBRARIES),
        (
            f"import {FRONT_END}.__main__, {FRONT_END}.process",
            front_end | {"headrace.engine.engine"},
        ),
        ("import headrace.workers.main, headrace.plugins.functions", worker),
    ):
        assert among(imported_by(program), unused) == [], program


def test_a_server_imports_only_used_modules_before_it_is_ready(tmp_path: Path) -> None:
    told = {"PYTHONPROFILEIMPORTTIME": "1"}
    with ServerProcess(onnx_examples(tmp_path), environment=told) as server:
        at_start = _IMPORT.findall(server.log)
        # `import_module`, as of plugins, is not reported itself, but its imports are.
        assert "headrace.placement.local.onnx_options" in at_start
        assert among(at_start, {*OTHERS, *FRAMEWORK, "grpc", "prometheus_client"}) == []
        row = np.ones((1, 16), np.int32)
        tensors = [
            {"name": name, "shape": [1, 16], "datatype": "INT32", "data": row.tolist()}
            for name in ("INPUT0", "INPUT1")
        ]
        content = json.dumps({"inputs": tensors}).encode()
        with httpx.Client(base_url=server.url, verify=False) as http:
            for path in ("health/live", "health/ready", "models/simple/ready"):
                assert http.get(f"/v2/{path}").status_code == 200
            for model, status in (("simple", 200), ("nope", 404)):
                path = f"/v2/models/{model}/infer"
                assert http.post(path, content=content).status_code == status
                assert http.post(path, content=iter([content])).status_code == status  # chunked
        with GrpcClient(server.grpc) as grpc:
            grpc.infer("simple", {"INPUT0": row, "INPUT1": row})
            assert grpc.ready()
        assert _IMPORT.findall(server.log)[len(at_start) :] == []


def test_the_web_framework_comes_with_the_first_request_that_needs_it(tmp_path: Path) -> None:
    told = {"PYTHONPROFILEIMPORTTIME": "1"}
    asked = (
        ("GET", "/docs", b"<html"), ("POST", "/v2/repository/index", b'"name":"simple"'),
        ("GET", "/openapi.json", b'"openapi":'), ("GET", "/v2", b'"name":"headrace"'),
    )  # fmt: skip
    with ServerProcess(onnx_examples(tmp_path), environment=told) as server:

        def answered(method: str, path: str, part: bytes) -> bool:
            answer = httpx.request(method, server.url + path, timeout=60, verify=False)
            return answer.status_code == 200 and part in answer.content

        metrics = httpx.get(f"http://{server.metrics}/metrics", verify=False)
        assert "headrace_ready 1" in metrics.text
        assert among(_IMPORT.findall(server.log), FRAMEWORK) == []
        with ThreadPoolExecutor(len(asked)) as pool:
            assert all(pool.map(lambda one: answered(*one), asked))
        assert set(among(_IMPORT.findall(server.log), FRAMEWORK)) > {"fastapi", "pydantic"}
