"""Python models as Triton's users write them, unchanged."""

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.models.python_models import execution, tensors, write_python_model
from tests.support.server_process import ServerProcess, clean_server

CONFIG = tensors("input", ("COMMAND", "STRING", "1")) + tensors("output", ("TOLD", "STRING", "1"))
RELATIVE = """
    from . import file2
    from .folder.file3 import text
    from .file2 import other
    import model
    import numpy as np
    import triton_python_backend_utils as pb_utils


    class TritonPythonModel:
        def execute(self, requests):
            told = f"{file2.TEXT} {text()} {other() is file2.TEXT}"
            array = np.array([told.encode()], object)
            return [pb_utils.InferenceResponse([pb_utils.Tensor("TOLD", array)]) for _ in requests]
"""
ARGUMENTS = """
    import argparse, json, sys
    import numpy as np
    import triton_python_backend_utils as pb_utils

    parser = argparse.ArgumentParser()
    parser.add_argument("--answer", type=int, default=42)
    OPTIONS = parser.parse_args()


    class TritonPythonModel:
        def execute(self, requests):
            told = json.dumps([OPTIONS.answer, sys.argv])
            array = np.array([told.encode()], object)
            return [pb_utils.InferenceResponse([pb_utils.Tensor("TOLD", array)]) for _ in requests]
"""

# It fetches its response sender when `execute` has returned.
LATER = """
    import threading
    import triton_python_backend_utils as pb_utils


    class TritonPythonModel:
        def execute(self, requests):
            for request in requests:
                if request.request_id() != "drop":
                    threading.Thread(target=self.answer, args=(request,)).start()

        def answer(self, request):
            command = pb_utils.get_input_tensor_by_name(request, "COMMAND").as_numpy()
            response = pb_utils.InferenceResponse([pb_utils.Tensor("TOLD", command)])
            flags = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
            request.get_response_sender().send(response, flags=flags)
"""


ENVIRONMENT = """
    import json, os
    import numpy as np
    import triton_python_backend_utils as pb_utils


    class TritonPythonModel:
        def execute(self, requests):
            names = ("SHOP_REGION", "SHOP_ZONE", "SHOP_TOKEN", "OTHER", "HEADRACE_LOAD_WAIT_SECS")
            told = json.dumps([os.environ.get(name) for name in names])
            array = np.array([told.encode()], object)
            return [pb_utils.InferenceResponse([pb_utils.Tensor("TOLD", array)]) for _ in requests]
"""
GIVEN = {
    "SHOP_REGION": "north", "SHOP_ZONE": "7", "SHOP_TOKEN": "sesame", "OTHER": "kept",
    "HEADRACE_LOAD_WAIT_SECS": "30",
}  # fmt: skip


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    root = tmp_path_factory.mktemp("models")
    for kind in ("process", "inline"):
        source = RELATIVE if kind == "process" else RELATIVE.replace("import model\n", "\n")
        write_python_model(root, f"relative_{kind}", source, CONFIG + execution(kind))
        write_beside(root / f"relative_{kind}" / "1", kind)
    write_python_model(root, "arguments", ARGUMENTS, CONFIG)
    write_python_model(root, "later", LATER, CONFIG)
    write_python_model(root, "environment", ENVIRONMENT, CONFIG)
    options = ["--allow-in-process-python", "--worker-env=SHOP_[RZ]*", "--worker-env=HEADRACE*"]
    with clean_server(root, options=options, environment=GIVEN) as process:
        yield process


def write_beside(folder: Path, text: str) -> None:
    (folder / "file2.py").write_text(f"TEXT = {text!r}\ndef other(): return TEXT\n")
    (folder / "folder").mkdir()
    (folder / "folder" / "__init__.py").write_text("")
    (folder / "folder" / "file3.py").write_text("from ..file2 import TEXT\ndef text(): return TEXT")


def ask(server: ServerProcess, model: str, text: str = "", id: str = "") -> httpx.Response:
    command = {"name": "COMMAND", "shape": [1], "datatype": "BYTES", "data": [text]}
    body = {"inputs": [command], "id": id}
    return httpx.post(f"{server.url}/v2/models/{model}/infer", json=body, timeout=60, verify=False)


def told(server: ServerProcess, model: str, text: str = "") -> str:
    response = ask(server, model, text)
    assert response.status_code == 200, response.text
    return str(response.json()["outputs"][0]["data"][0])


@pytest.mark.parametrize("kind", ["process", "inline"])
def test_a_versions_folder_is_a_package(server: ServerProcess, kind: str) -> None:
    assert told(server, f"relative_{kind}") == f"{kind} {kind} True"


def test_a_model_reads_no_arguments_of_the_servers(server: ServerProcess) -> None:
    assert told(server, "arguments") == '[42, [""]]'


def test_a_model_sees_the_variables_that_are_named(server: ServerProcess) -> None:
    """The server's own are excluded, whatever is named."""
    assert told(server, "environment") == '["north", "7", null, null, null]'


def test_responses_come_after_execute_has_returned_none(server: ServerProcess) -> None:
    assert told(server, "later", "a") == "a"
    dropped = ask(server, "later", id="drop")
    assert dropped.status_code == 500
    assert "execute returned no response to it" in dropped.json()["error"]
