"""A Python model that searches for the secrets of its server."""

import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil
import pytest

from tests.models.python_models import tensors, write_python_model
from tests.support.scrape import Scraper
from tests.support.server_process import ServerProcess

# User `nobody`, able to read what only root may, so that the interpreter can be anywhere.
_NOBODY = (
    "setpriv", "--reuid=65534", "--regid=65534", "--clear-groups",
    "--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search",
)  # fmt: skip
# It reports what it can reach of its server's processes, and how.
PRYING = """
    import ctypes, json, os
    import numpy as np
    import triton_python_backend_utils as pb_utils

    _ATTACH, _DETACH = 16, 17


    def reached(pid):
        libc = ctypes.CDLL(None, use_errno=True)
        for name in ("environ", "mem", "maps", "auxv"):
            try:
                with open(f"/proc/{pid}/{name}", "rb") as file:
                    if name == "mem" or file.read():
                        yield name
            except OSError:
                pass
        try:
            if os.readlink(f"/proc/{pid}/fd/0"):
                yield "fd"
        except OSError:
            pass
        if libc.ptrace(_ATTACH, pid, 0, 0) == 0:
            os.waitpid(pid, 0x40000000)
            libc.ptrace(_DETACH, pid, 0, 0)
            yield "ptrace"


    def family():
        server = os.getppid()
        with open(f"/proc/{server}/task/{server}/children") as file:
            found = map(int, file.read().split())
        return [server, *(pid for pid in found if pid != os.getpid())]


    class TritonPythonModel:
        def execute(self, requests):
            answers = []
            for request in requests:
                found = {str(pid): list(reached(pid)) for pid in family()}
                text = json.dumps(found).encode()
                output = pb_utils.Tensor("OUTPUT", np.array([[text]], object))
                answers.append(pb_utils.InferenceResponse([output]))
            return answers
"""
_ASKED = {"inputs": [{"name": "INPUT", "shape": [1, 1], "datatype": "BYTES", "data": [""]}]}


@contextmanager
def serving(
    *options: str, prefix: Sequence[str] = (), environment: dict[str, str] | None = None
) -> Iterator[ServerProcess]:
    """A server with a prying model, which every user can read."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        config = "max_batch_size: 1\n" + tensors("input", ("INPUT", "STRING", "1"))
        config += tensors("output", ("OUTPUT", "STRING", "1"))
        write_python_model(Path(folder), "prying", PRYING, config)
        settings = {"HEADRACE_ALLOW_DEBUGGING": "false"} | (environment or {})
        with ServerProcess(
            Path(folder), options=options, prefix=prefix, environment=settings
        ) as process:
            yield process
            assert "bug " not in process.log, process.log


def reached(server: ServerProcess) -> dict[str, list[str]]:
    """Secrets in the model's reach, by process id."""
    response = httpx.post(
        f"{server.url}/v2/models/prying/infer", json=_ASKED, timeout=30, verify=False
    )
    assert response.status_code == 200, response.text
    found: dict[str, list[str]] = json.loads(response.json()["outputs"][0]["data"][0])
    return found


def users() -> list[object]:
    """Users of the server: that of the tests, and as root `nobody` as well."""
    no_other = pytest.mark.skipif(
        os.geteuid() != 0 or shutil.which("setpriv") is None,
        reason="to run as another user takes root and setpriv",
    )
    return [pytest.param((), id="this"), pytest.param(_NOBODY, id="nobody", marks=no_other)]


@pytest.mark.slow
@pytest.mark.parametrize("prefix", users())
def test_a_model_cannot_read_its_servers_secrets(prefix: Sequence[str]) -> None:
    secret = {"HEADRACE_HTTP_RESTRICTED_API": "trace:key=SECRET", "DATABASE_PASSWORD": "SECRET"}
    with serving("--frontends=1", prefix=prefix, environment=secret) as server:
        found = reached(server)
        assert found == {str(child.pid): [] for child in _family(server)}
        # What the server itself has to know of its workers is still there.
        with Scraper(server.metrics) as scraper:
            metrics = scraper.now()
        resident = metrics.value("headrace_worker_resident_bytes", model="prying")
        assert resident > 1 << 20
        share = metrics.value("headrace_model_memory_bytes", model="prying")
        assert 1 << 20 < share != resident  # per-page shares, which need a privilege
        assert metrics.value("process_resident_memory_bytes") > 1 << 20
        assert metrics.value("process_open_fds") > 1


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="only root sees the environment of what is private")
def test_a_front_end_has_none_of_the_servers_secrets() -> None:
    secret = {"HEADRACE_HTTP_RESTRICTED_API": "trace:key=SECRET", "DATABASE_PASSWORD": "SECRET"}
    with serving("--frontends=1", environment=secret) as server:
        for child in psutil.Process(server.pid).children():
            assert "SECRET" not in str(child.environ())
            assert "SECRET" not in " ".join(child.cmdline())


@pytest.mark.slow
def test_debugging_can_be_allowed() -> None:
    with serving("--allow-debugging", "--frontends=1") as server:
        for processes in reached(server).values():
            assert {"environ", "mem", "maps", "fd"} <= set(processes)


def _family(server: ServerProcess) -> list[psutil.Process]:
    process = psutil.Process(server.pid)
    front_ends = [c for c in process.children() if "headrace.plugins.frontends" in c.cmdline()]
    assert front_ends
    return [process, *front_ends]
