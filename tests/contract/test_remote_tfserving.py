"""Models on TensorFlow Serving, or on its stand-in."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from headrace.core.errors import InvalidRequest, RepositoryError
from headrace.engine.loading import load_version
from headrace.engine.opening import LoadOptions, open_model
from headrace.placement.backend import load_backends
from headrace.protocol.pb import tfserving_pb2 as tf
from headrace.repository.layout import read_model_directory
from tests.support.grpc_client import GrpcClient
from tests.support.remote import write_remote
from tests.support.scrape import Scraper
from tests.support.server_process import ServerProcess
from tests.support.tfserving import TfServing

TF = {"protocol": "tfserving"}
OTHER = """
max_batch_size: 4
input { name: "x" data_type: TYPE_FP32 dims: [ 2 ] }
output { name: "y" data_type: TYPE_FP32 dims: [ 2 ] }
"""


@pytest.fixture(scope="module")
def there() -> Iterator[TfServing]:
    with TfServing() as server:
        yield server


@pytest.fixture(scope="module")
def server(there: TfServing, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    root = tmp_path_factory.mktemp("front")
    for name in ("half", "texts"):
        for kind, address in (("grpc", f"grpc://{there.grpc}"), ("http", there.url)):
            given = {"remote_model": name, **TF}
            write_remote(root, f"{name}_{kind}", address, **given)
            write_remote(root, f"{name}_{kind}_label", address, remote_label="canary", **given)
            write_remote(root, f"{name}_{kind}_3", address, remote_version="3", **given)
    with ServerProcess(root) as process:
        yield process
        assert process.stop() == 0
        assert "Traceback" not in process.log


@pytest.mark.parametrize("kind", ["grpc", "http"])
def test_answers(grpc_client: GrpcClient, kind: str) -> None:
    x = np.array([[1, 0.1], [3e30, np.inf]], np.float32)
    np.testing.assert_array_equal(grpc_client.infer(f"half_{kind}", {"x": x})["y"], x * 2)
    texts = np.array(["ä".encode(), b"\xff", b""], object)
    given = {"text": texts, "n": np.array([1, -(2**60), 3])}
    answer = grpc_client.infer(f"texts_{kind}", given)
    assert answer["upper"].tolist() == [text.upper() for text in texts.tolist()]
    assert answer["more"].tolist() == [2, 1 - 2**60, 4]


@pytest.mark.parametrize("kind", ["grpc", "http"])
def test_the_signature_is_the_server_s(grpc_client: GrpcClient, kind: str) -> None:
    found = grpc_client.model_metadata(f"half_{kind}")
    assert [(t.name, t.datatype, list(t.shape)) for t in found.inputs] == [("x", "FP32", [-1, 2])]
    assert [(t.name, t.datatype, list(t.shape)) for t in found.outputs] == [("y", "FP32", [-1, 2])]
    assert grpc_client.model_config(f"half_{kind}").max_batch_size > 0


@pytest.mark.parametrize("kind", ["grpc", "http"])
def test_versions_and_labels(there: TfServing, grpc_client: GrpcClient, kind: str) -> None:
    x = np.ones((1, 2), np.float32)
    assert grpc_client.infer(f"half_{kind}_3", {"x": x}).model_version == "3"
    grpc_client.infer(f"half_{kind}_label", {"x": x})
    if kind == "grpc":
        version, label = there.specs[-2:]
        assert (version.version.value, version.signature_name) == (3, "serving_default")
        assert label.version_label == "canary"
    else:
        assert there.paths[-2:] == [
            "/v1/models/half/versions/3:predict", "/v1/models/half/labels/canary:predict",
        ]  # fmt: skip


@pytest.mark.parametrize("kind", ["grpc", "http"])
def test_requests_are_batched_here(
    server: ServerProcess, grpc_client: GrpcClient, kind: str, pool: ThreadPoolExecutor
) -> None:
    """Also if one of them fails."""

    def ask(number: int) -> bool:
        try:
            x = np.full((1, 2), number, np.float32)
            return bool((grpc_client.infer(f"half_{kind}", {"x": x})["y"] == number * 2).all())
        except InvalidRequest:
            return number < 0

    assert all(pool.map(ask, [*range(63), -1]))
    with Scraper(server.metrics) as scraper:
        assert scraper.now().value("nv_inference_count", model=f"half_{kind}", version="1") >= 63


@pytest.mark.slow
def test_a_version_that_is_not_available(there: TfServing, tmp_path: Path) -> None:
    for kind, address in (("grpc", f"grpc://{there.grpc}"), ("http", there.url)):
        write_remote(tmp_path, f"half_{kind}", address, remote_model="half", **TF)
    there.states[1] = tf.ModelVersionStatus.LOADING
    try:
        with ServerProcess(tmp_path) as process, GrpcClient(process.grpc) as client:
            for kind in ("grpc", "http"):
                while client.model_ready(f"half_{kind}"):
                    pass
            there.states[2] = tf.ModelVersionStatus.AVAILABLE
            for kind in ("grpc", "http"):
                while not client.model_ready(f"half_{kind}"):
                    pass
    finally:
        there.states = {1: tf.ModelVersionStatus.AVAILABLE}


@pytest.mark.parametrize("kind", ["grpc", "http"])
@pytest.mark.parametrize(("name", "more", "given", "text"), [
    ("nope", "", {}, "Servable not found"),
    ("half", "", {"signature_name": "none"}, "no signature 'none', it has 'other', 'serving"),
    ("half", "", {"signature_name": "other"}, "does not tell its inputs: declare them here"),
    ("half", OTHER, {"signature_name": "other"}, r"output 'y' has shape \[2\]"),
    ("half", "sequence_batching { }", {}, "tfserving has no sequences"),
    ("half", 'input { name: "x" data_type: TYPE_INT32 dims: [ 2 ] }', {}, "is FP32, not INT32"),
])  # fmt: skip
def test_models_that_cannot_be_served_are_explained(
    there: TfServing,
    tmp_path: Path,
    kind: str,
    name: str,
    more: str,
    given: dict[str, str],
    text: str,
) -> None:
    address = f"grpc://{there.grpc}" if kind == "grpc" else there.url
    write_remote(tmp_path, name, address, more=more, **TF, **given)
    options = LoadOptions(1)
    with pytest.raises(RepositoryError, match=text):
        load_version(
            open_model(read_model_directory(tmp_path / name), load_backends(), options), 1, options
        )
