"""Python models that try to reach their server, other models, and the rest of the machine.

Each attempt is made at each level of isolation that stops it, in a server with real workers.
"""

import json
import os
import signal
import tempfile
from base64 import b64encode
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.models.python_models import in_config, tensors, write_python_model
from tests.support.isolation import needs_landlock, needs_root, readable_interpreter
from tests.support.scrape import until
from tests.support.server_process import ServerProcess

pytestmark = pytest.mark.slow

# It executes Python code, and answers with the value of `told`, or the exception.
_OBEDIENT = """
    import numpy as np
    import triton_python_backend_utils as pb_utils


    class TritonPythonModel:
        def execute(self, requests):
            return [self.answer(request) for request in requests]

        def answer(self, request):
            [code] = request.inputs()[0].as_numpy().ravel().tolist()
            names = {}
            try:
                exec(code.decode(), names)
                told = str(names["told"])
            except BaseException as error:
                told = type(error).__name__
            output = pb_utils.Tensor("OUTPUT", np.array([[told.encode()]], object))
            return pb_utils.InferenceResponse([output])
"""
_ONE, _OTHER = "64123:64123", "64124:64124"
_SPACE = 4 << 20
_PROCESSES = 40
_USERS = (f"--worker-user={_ONE}", f"--worker-user={_OTHER}")
_SANDBOX = ("--worker-sandbox=required",)
USER = pytest.param(_USERS, id="user", marks=needs_root)
SANDBOX = pytest.param(_SANDBOX, id="sandbox", marks=needs_landlock)
BOTH = pytest.param((*_USERS, *_SANDBOX), id="both", marks=(needs_root, needs_landlock))


class Attempts:
    """A server with a hostile model, `hostile`, and another one, `victim`."""

    def __init__(
        self, folder: Path, options: tuple[str, ...], parameters: Mapping[str, str] | None = None
    ) -> None:
        """`folder` is empty; `parameters` are the hostile model's."""
        folder.chmod(0o755)
        self.models, self.temporary = folder / "models", folder / "tmp"
        self.key = folder / "server.key"
        self.key.write_text("SECRET")
        self.key.chmod(0o600)
        for path in (self.models, self.temporary, folder / "interpreter"):
            path.mkdir()
        config = "max_batch_size: 1\n" + tensors("input", ("INPUT", "STRING", "1"))
        config += tensors("output", ("OUTPUT", "STRING", "1"))
        self.separate = options[: len(_USERS)] == _USERS
        for name in ("hostile", "victim"):
            given = parameters or {}
            if name == "victim":
                given = {"worker_user": _OTHER} if self.separate else {}
            write_python_model(self.models, name, _OBEDIENT, config + in_config(given))
        if self.separate:
            for path in (self.models / "victim", *(self.models / "victim").rglob("*")):
                os.chown(path, -1, int(_OTHER.partition(":")[2]))
                path.chmod(0o750 if path.is_dir() else 0o640)
        self._options = *options, f"--scratch-bytes={_SPACE}", f"--worker-processes={_PROCESSES}"
        self._prefix = readable_interpreter(folder / "interpreter") if self.separate else ()
        self.server = self.another()

    def another(self) -> ServerProcess:
        """A server that is not started, with the same models."""
        return ServerProcess(
            self.models, options=self._options, prefix=self._prefix,
            environment={"TMPDIR": str(self.temporary)},
        )  # fmt: skip

    def ask(self, code: str, model: str = "hostile") -> httpx.Response:
        """The response of a model that executes `code`."""
        given = {"name": "INPUT", "shape": [1, 1], "datatype": "BYTES", "data": [code]}
        url = f"{self.server.url}/v2/models/{model}/infer"
        return httpx.post(url, json={"inputs": [given]}, timeout=60, verify=False)

    def told(self, code: str, model: str = "hostile") -> str:
        """The value of `told` after `code`, or the name of the exception's type."""
        response = self.ask(code, model)
        assert response.status_code == 200, response.text
        return str(response.json()["outputs"][0]["data"][0])

    def worker(self, model: str) -> psutil.Process:
        """The process of a model."""
        return psutil.Process(int(self.told("import os; told = os.getpid()", model)))


@contextmanager
def _attempting(
    options: tuple[str, ...], parameters: Mapping[str, str] | None = None
) -> Iterator[Attempts]:
    # Not below pytest's directory, which is its user's alone.
    with tempfile.TemporaryDirectory(prefix="headrace-test-") as folder:
        attempts = Attempts(Path(folder), options, parameters)
        with attempts.server:
            yield attempts
            assert attempts.server.stop() == 0
            assert "bug " not in attempts.server.log, attempts.server.log
        assert not list(attempts.temporary.iterdir())


@pytest.fixture(scope="module", params=[USER, SANDBOX, BOTH])
def attempts(request: pytest.FixtureRequest) -> Iterator[Attempts]:
    """A server at each level."""
    with _attempting(request.param) as found:
        yield found


def test_a_model_cannot_read_the_servers_files(attempts: Attempts) -> None:
    assert attempts.told(f"told = open({str(attempts.key)!r}).read()") == "PermissionError"
    assert attempts.told("told = open('/etc/shadow').read()") == "PermissionError"


def test_a_model_cannot_change_files_outside_of_its_directory(attempts: Attempts) -> None:
    own = str(attempts.models / "hostile" / "1" / "model.py")
    assert attempts.told(f"told = open({own!r}).read()[:5]") != "PermissionError"
    for path in (own, str(attempts.models / "new"), str(attempts.temporary / "new")):
        assert attempts.told(f"told = open({path!r}, 'a')") == "PermissionError"
    assert attempts.told(f"import os; told = os.truncate({own!r}, 0)") == "PermissionError"
    assert attempts.told("told = open('/dev/null', 'w').write('x')") == "1"
    assert attempts.told("told = open('new', 'w').write('x')") == "1"


def test_a_model_cannot_read_another_ones_files(attempts: Attempts) -> None:
    file = str(attempts.models / "victim" / "config.pbtxt")
    assert attempts.told(f"told = open({file!r}).read()") == "PermissionError"
    assert "INPUT" in attempts.told(f"told = open({file!r}).read()", "victim")
    scratch = attempts.told("import tempfile; told = tempfile.gettempdir()", "victim")
    assert scratch != attempts.told("import tempfile; told = tempfile.gettempdir()")
    assert attempts.told(f"import os; told = os.listdir({scratch!r})") == "PermissionError"


def test_a_model_cannot_signal_or_read_other_processes(attempts: Attempts) -> None:
    victim = attempts.worker("victim").pid
    for pid in (attempts.server.pid, victim):
        assert attempts.told(f"import os; told = os.kill({pid}, 0)") == "PermissionError"
        for name in ("environ", "mem", "maps"):
            code = f"told = open('/proc/{pid}/{name}', 'rb').read(1)"
            assert attempts.told(code) == "PermissionError"
    assert attempts.told("import os; told = os.kill(os.getpid(), 0)") == "None"


def test_a_model_of_another_user_cannot_limit_the_server(attempts: Attempts) -> None:
    if not attempts.separate:
        pytest.skip("a sandbox alone does not prevent this, as docs/security.md says")
    pid = attempts.server.pid
    for code in (
        f"import resource; told = resource.prlimit({pid}, resource.RLIMIT_CPU, (1, 1))",
        f"import os; told = os.setpriority(os.PRIO_PROCESS, {pid}, 19)",
        f"import os; told = os.sched_setaffinity({pid}, [0])",
    ):
        assert attempts.told(code) == "PermissionError"


def test_a_model_has_no_privileges(attempts: Attempts) -> None:
    status = attempts.told("told = open('/proc/self/status').read()")
    fields = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
    assert fields["NoNewPrivs"] == "1"
    for kind in ("CapEff", "CapPrm", "CapInh", "CapAmb"):
        assert int(fields[kind], 16) == 0
    # Nor has a program that it executes, even as root.
    command = "subprocess.run(['grep', 'CapEff', '/proc/self/status'], capture_output=True)"
    assert attempts.told(f"import subprocess; told = int({command}.stdout.split()[1], 16)") == "0"


def test_a_model_that_fills_the_disk_is_ended(attempts: Attempts) -> None:
    before = attempts.worker("hostile").pid
    code = f"open('big', 'wb').write(bytes({2 * _SPACE})); import time; time.sleep(600); told = 1"
    response = attempts.ask(code)
    assert response.status_code == 500
    assert f"has more than {_SPACE} bytes in its scratch directory" in response.text
    until(lambda: len(list(attempts.temporary.iterdir())) == 2, "the scratch directory's end")
    assert attempts.worker("hostile").pid != before
    assert attempts.told("import os; told = os.listdir('.')") == "[]"


def test_a_model_cannot_write_more_to_a_file_than_its_limit(attempts: Attempts) -> None:
    code = "import resource; told = resource.getrlimit(resource.RLIMIT_FSIZE)[0]"
    assert int(attempts.told(code)) == 1 << 30


_FORKS = """
import os, signal
pids = []
try:
    for _ in range(1_000):
        pid = os.fork()
        if not pid:
            signal.pause()
        pids.append(pid)
except BlockingIOError:
    pass
for pid in pids:
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
told = len(pids)
"""


@pytest.mark.parametrize("options", [USER])
def test_a_model_that_forks_reaches_the_limit_of_its_user(options: tuple[str, ...]) -> None:
    with _attempting(options) as attempts:
        assert 0 < int(attempts.told(_FORKS)) < _PROCESSES
        assert attempts.told("told = 'alive'") == "alive"
        assert attempts.told("told = 'alive'", "victim") == "alive"


@pytest.mark.parametrize("options", [SANDBOX, BOTH])
def test_isolated_workers_end_with_a_killed_server(options: tuple[str, ...]) -> None:
    with tempfile.TemporaryDirectory(prefix="headrace-test-") as folder:
        attempts = Attempts(Path(folder), options)
        with attempts.server as server:
            workers = [attempts.worker(model) for model in ("hostile", "victim")]
            server.stop(signal.SIGKILL)
            gone, alive = psutil.wait_procs(workers, timeout=30)
            assert (len(gone), alive) == (2, [])
            left = list(attempts.temporary.iterdir())
        assert len(left) == 2
        with attempts.another() as server:
            assert not any(path.exists() for path in left)
            assert server.stop() == 0


@pytest.mark.parametrize("options", [USER])
def test_a_model_names_its_user_only_within_the_settings(options: tuple[str, ...]) -> None:
    options = (*options, "--exit-on-error=false")
    with _attempting(options, {"worker_user": "64125:64125"}) as attempts:
        assert attempts.ask("told = 1").status_code == 404
        assert f"--worker-user allows {_ONE}, {_OTHER}" in attempts.server.log
        assert attempts.told("told = 1", "victim") == "1"


@pytest.mark.parametrize("options", [BOTH])
def test_a_client_that_may_upload_code_does_not_choose_its_user(options: tuple[str, ...]) -> None:
    options = (*options, "--model-control-mode=explicit", "--load-overrides=code")
    with _attempting((*options, "--load-model=*")) as attempts:
        source = (attempts.models / "hostile" / "1" / "model.py").read_bytes()
        config: dict[str, Any] = {
            "backend": "python", "max_batch_size": 1,
            "input": [{"name": "INPUT", "data_type": "TYPE_STRING", "dims": [1]}],
            "output": [{"name": "OUTPUT", "data_type": "TYPE_STRING", "dims": [1]}],
        }  # fmt: skip
        given = {"file:1/model.py": b64encode(source).decode()}
        url = f"{attempts.server.url}/v2/repository/models/new/load"

        def load() -> httpx.Response:
            parameters = {"config": json.dumps(config), **given}
            return httpx.post(url, json={"parameters": parameters}, timeout=60, verify=False)

        assert load().status_code == 200
        assert attempts.told("import os; told = os.getuid()", "new") == _ONE.partition(":")[0]
        assert attempts.told("told = open('/etc/shadow')", "new") == "PermissionError"
        config["parameters"] = {"worker_user": {"string_value": _OTHER}}
        refused = load()
        assert refused.status_code == 400
        assert "a request cannot change how a model is isolated" in refused.text
