"""Models of a real registry of MLflow, by version and by alias."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.core.errors import LoadFailed
from headrace.plugins.stores.cache import cache_of
from headrace.plugins.stores.mlflow_registry import MlflowRemote
from headrace.plugins.stores.remote import Unreached
from headrace.plugins.stores.remote_store import RemoteStore
from tests.models.onnx_graphs import constant
from tests.plugins.stores import remotes
from tests.plugins.stores.remotes import following_server, opened_store
from tests.support.mlflow_server import MlflowServer
from tests.support.scrape import until
from tests.support.stores import constant_of

# Its server takes more than ten seconds to start, which is why only these tests have one.
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MlflowServer]:
    with MlflowServer(tmp_path_factory.mktemp("mlflow")) as server:
        yield server


def brought(store: RemoteStore, name: str) -> dict[str, bytes]:
    """The files of the only model."""
    assert store.names() == {name}
    return remotes.brought(store, name)


def test_versions_and_aliases(registry: MlflowServer, tmp_path: Path) -> None:
    registry.register("fraud", {"MLmodel": b"one", "data/model.bin": b"11"}, tmp_path / "1")
    registry.register("fraud", {"MLmodel": b"two", "data/model.bin": b"22"}, tmp_path / "2")
    registry.client.set_registered_model_alias("fraud", "live", "1")
    address = f"mlflow://{registry.host}/models/fraud"
    first = {"1/MLmodel": b"one", "1/data/model.bin": b"11"}
    second = {"2/MLmodel": b"two", "2/data/model.bin": b"22"}
    assert brought(opened_store(f"{address}/1", tmp_path / "cache"), "fraud") == first
    assert brought(opened_store(f"{address}/2", tmp_path / "cache"), "fraud") == second
    live = opened_store(f"{address}/live", tmp_path / "cache")
    assert brought(live, "fraud") == first
    assert live.size("fraud") == 5
    assert live.counts.read_bytes == 5
    before = live.token("fraud")
    registry.client.set_registered_model_alias("fraud", "live", "2")
    assert brought(live, "fraud") == second
    assert live.token("fraud") != before
    again = opened_store(f"{address}/live", tmp_path / "cache")
    assert brought(again, "fraud") == second
    assert again.counts.read_bytes == 0
    assert again.problems("fraud") == []
    with pytest.raises(LoadFailed, match="cannot be written: register a version with MLflow"):
        again.publish("fraud", tmp_path, b"{}")


def test_files_that_come_short_are_refused(registry: MlflowServer, tmp_path: Path) -> None:
    registry.register("cut", {"MLmodel": b"one", "only_here.bin": b"12345"}, tmp_path / "1")
    store = opened_store(f"mlflow://{registry.host}/models/cut/1", tmp_path / "cache")
    assert store.names() == {"cut"}
    registry.file("only_here.bin").write_bytes(b"123")
    with pytest.raises(LoadFailed, match=r"1/only_here\.bin did not come with its 5 bytes"):
        store.materialise("cut", store.token("cut"))
    assert not list((tmp_path / "cache" / "trees").glob("*.json"))


def test_versions_that_are_not_there(registry: MlflowServer, tmp_path: Path) -> None:
    cache = cache_of(str(tmp_path))
    registry.register("known", {"MLmodel": b"one"}, tmp_path / "1")
    for version in ("9", "nobody"):
        with pytest.raises(Unreached, match=f"known/{version} cannot be reached: .*not found"):
            MlflowRemote(f"mlflow://{registry.host}/models/known/{version}", cache).models()
    with pytest.raises(Unreached, match="cannot be reached: "):
        MlflowRemote("mlflow://127.0.0.1:1/models/known/1", cache).models()
    for address in ("mlflow://host/models/m", "mlflow://me:secret@host/models/m/1", "mlflow:m/1"):
        with pytest.raises(LoadFailed, match="expected mlflow://HOST/models/NAME/VERS") as refused:
            MlflowRemote(address, cache)
        assert "secret" not in str(refused.value)


def test_a_server_follows_an_alias(registry: MlflowServer, tmp_path: Path) -> None:
    registry.register("net", {"model.onnx": constant(1)}, tmp_path / "1")
    registry.register("net", {"model.onnx": constant(2)}, tmp_path / "2")
    registry.client.set_registered_model_alias("net", "live", "1")
    address = f"mlflow://{registry.host}/models/net/live"
    with following_server(address, tmp_path / "cache") as server:
        assert constant_of(server, "net") == 1
        registry.client.set_registered_model_alias("net", "live", "2")
        until(lambda: constant_of(server, "net") == 2, "the other version")
