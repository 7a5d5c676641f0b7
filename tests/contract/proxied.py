"""The suite's models behind a proxy: a server whose models all run on an upstream.

Clients must see the upstream's answers. `NOT_THROUGH_A_PROXY` lists the exceptions with their
reasons.
"""

import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, TypeVar

from google.protobuf import text_format

from headrace.protocol.pb.model_config_pb2 import ModelConfig
from tests.support.grpc_client import GrpcClient
from tests.support.server_process import ServerProcess
from tests.support.triton_server import Triton

S = TypeVar("S", ServerProcess, Triton)
_Field = Literal[
    "platform", "default_model_filename", "instance_group", "parameters", "model_warmup"
]
# Scheme of a proxy's endpoints.
PROXIES = {"proxy": "grpc", "proxy-http": "http"}
# A real Triton runs the models: alone, and behind a proxy.
TRITONS = {"triton": None, "before-triton": "proxy", "before-triton-http": "proxy-http"}
# Properties of the upstream alone: what is loaded there and where it runs.
_OF_THE_OTHER: tuple[_Field, ...] = (
    "platform", "default_model_filename", "instance_group", "parameters", "model_warmup",
)  # fmt: skip

_PLATFORM = "the platform and backend of a model that other servers run are `triton`"
_LOG = "what a model logs is in the log of the server that runs it"
_PARAMETERS = "a configuration's parameters are those of the backend"

# Tests, or whole files of them.
NOT_THROUGH_A_PROXY: dict[str, str] = {
    "test_loose_models::test_any_number_of_rows_without_batching": _PARAMETERS,
    "test_documents::test_model_metadata": _PLATFORM,
    "test_documents::test_config_is_completed_from_the_model": _PLATFORM,
    "test_documents::test_config_as_written": _PARAMETERS,
    "test_http::test_config_as_json": _PARAMETERS,
    "test_functions::test_metadata_and_configuration_of_a_single_file": _PLATFORM,
    "test_functions::test_a_partial_configuration": (
        "what a configuration leaves out is offered by a function alone"
    ),
    "test_python_models::test_properties_of_a_request": (
        "it sees the remaining timeout, not the original one"
    ),
    "test_python_models::test_a_traceback_is_in_the_log": _LOG,
    "test_odd_models::test_long_texts": _LOG,
    "test_odd_models::test_processes_that_a_model_starts": _LOG,
    "test_pb_utils::test_metrics_of_models": "a model's metrics are on the server that runs it",
}
# Further exceptions for a real Triton.
NOT_TRITON: dict[str, str] = {
    "test_python_models::test_arguments_of_initialize": (
        "the path that its models are started with is its own"
    ),
    "test_python_models::test_parameters_of_a_response": "Triton 2.51 has no such parameters",
    "test_python_models::test_parameters_that_json_has_no_numbers_for": (
        "Triton 2.51 has no such parameters"
    ),
    "test_python_models::test_invalid_responses_of_a_model": (
        "it returns any answer of a model, and hangs if it is None"
    ),
    "test_python_models::test_other_requests_of_a_failed_batch_succeed": (
        "it fails all requests of a batch whose model raises"
    ),
}


def impossible(file: str, test: str, carriers: Iterable[str]) -> str:
    """Reason why a test cannot run with these carriers; empty if it can."""
    for carrier in carriers:
        tables = [NOT_THROUGH_A_PROXY] if carrier in PROXIES or carrier in TRITONS else []
        if carrier in TRITONS:
            tables.append(NOT_TRITON)
        for table in tables:
            if reason := table.get(file) or table.get(f"{file}::{test}"):
                return reason
    return ""


@contextmanager
def behind(
    carrier: str,
    process: S,
    models: Path,
    folder: Path,
    names: Iterable[str] = (),
    options: Sequence[str] = (),
    **parameters: str,
) -> Iterator[S | ServerProcess]:
    """The proxy `carrier` before a server of `models`; for any other name the server itself.

    `folder` is for its models, and `names` are further models of the server.
    """
    way = TRITONS.get(carrier) or carrier
    if way not in PROXIES:
        yield process
        return
    write_proxies(models, folder, process, PROXIES[way], names, **parameters)
    with ServerProcess(folder, options=options) as proxy:
        yield proxy
        assert proxy.stop() == 0
        assert "bug " not in proxy.log, proxy.log
        assert "Traceback" not in proxy.log, proxy.log


def write_proxies(
    models: Path,
    root: Path,
    server: ServerProcess | Triton,
    scheme: str,
    names: Iterable[str] = (),
    **parameters: str,
) -> None:
    """Write a proxy model into `root` for each of `models` and `names`, which `server` runs.

    Only the backend differs in its configuration. Decoupled models are forwarded over gRPC in any
    case.
    """
    endpoints = {"grpc": f"grpc://{server.grpc}", "http": server.url}
    given = {
        "health_interval_secs": "10",  # of each of many models
        **parameters,
    }
    for model in (*filter(Path.is_dir, models.iterdir()), *(models / name for name in names)):
        written = model / "config.pbtxt"
        config = ModelConfig()
        if written.exists():
            text_format.Parse(written.read_text(), config)
        instances = sum(max(group.count, 1) for group in config.instance_group)
        for field in _OF_THE_OTHER:
            config.ClearField(field)
        for tensor in (*config.input, *config.output):
            tensor.ClearField("reshape")
        config.name, config.backend = model.name, "triton"
        with GrpcClient(server.grpc) as client:
            decoupled = client.model_config(model.name).model_transaction_policy.decoupled
        config.parameters["endpoints"].string_value = endpoints["grpc" if decoupled else scheme]
        if instances:  # requests queue here
            config.parameters["max_in_flight"].string_value = str(instances)
        for name, value in given.items():
            config.parameters[name].string_value = value
        folder = root / model.name
        folder.mkdir(parents=True)
        (folder / "config.pbtxt").write_text(text_format.MessageToString(config, as_utf8=True))
        versions = [path.name for path in model.glob("*") if path.name.isdecimal()]
        for version in versions if versions != ["1"] else ():
            (folder / version).mkdir()
        for labels in model.glob("*.txt"):
            shutil.copy(labels, folder)
