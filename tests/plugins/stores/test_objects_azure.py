"""Models of Azure's Blob Storage, at its emulator."""

import base64
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from headrace.core.errors import LoadFailed
from headrace.plugins.stores.contents import PART
from headrace.plugins.stores.objects import ObjectRemote
from headrace.plugins.stores.remote import Unreached
from headrace.repository.model_files import MANIFEST, manifest_of
from tests.models.onnx_graphs import constant, write_model
from tests.plugins.stores.remotes import following_server
from tests.support.azurite import ACCOUNT, CONTAINER, KEY, Azurite, use
from tests.support.scrape import until
from tests.support.stores import constant_of


@pytest.fixture(scope="module")
def azurite() -> Iterator[Azurite]:
    with Azurite() as emulator:
        yield emulator


@pytest.fixture
def models(
    azurite: Azurite, models: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., str]:
    """Runs `headrace models` with the emulator in the environment."""
    use(azurite, monkeypatch)
    return models


def test_push_verify_and_pull(models: Callable[..., str], tmp_path: Path) -> None:
    large = bytes(range(256)) * (PART // 200)
    write_model(tmp_path / "source", "a", large, "# a\n")
    address = f"az://{CONTAINER}/pushed"
    assert models("push", str(tmp_path / "source"), address).startswith("pushed a, 2 files with ")
    for form in (address, f"as://{ACCOUNT}/{CONTAINER}/pushed"):
        assert models("list", "--store", form, "--names") == "a\n"
        assert models("verify", form) == "a: as its manifest has it\n"
    models("pull", address, str(tmp_path / "target"))
    assert (tmp_path / "target" / "a" / "1" / "model.onnx").read_bytes() == large


def test_publishing_to_azure_replaces_a_model(models: Callable[..., str], tmp_path: Path) -> None:
    directory = write_model(tmp_path, "m", b"one", "# m\n")
    remote = ObjectRemote(f"az://{CONTAINER}/replaced")
    remote.publish("m", directory, manifest_of(directory))
    first = remote.contents("m")
    (directory / "1" / "model.onnx").rename(directory / "1" / "other.onnx")
    (directory / "config.pbtxt").write_text("# new\n")
    remote.publish("m", directory, manifest_of(directory))
    second = remote.contents("m")
    assert set(second.files) == {"1/other.onnx", "config.pbtxt"}
    assert second.state != first.state
    with pytest.raises(LoadFailed, match="replaced"):
        remote.read("m", "1/model.onnx", first.files["1/model.onnx"], 0, 3)
    with pytest.raises(LoadFailed, match="a file has changed while it was fetched"):
        remote.read("m", "config.pbtxt", first.files["config.pbtxt"], 0, 3)
    assert MANIFEST not in second.files


def test_a_wrong_key_of_azure(models: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = base64.b64encode(b"wrong").decode()
    monkeypatch.setenv("AZURE_STORAGE_KEY", wrong)
    with pytest.raises(Unreached, match=f"az://{CONTAINER}/a cannot be reached: ") as refused:
        ObjectRemote(f"az://{CONTAINER}/a").models()
    assert wrong not in str(refused.value)
    assert KEY not in str(refused.value)


@pytest.mark.slow
def test_a_server_follows_a_container(
    azurite: Azurite, models: Callable[..., str], tmp_path: Path
) -> None:
    address = f"az://{CONTAINER}/followed"
    write_model(tmp_path / "source", "m", constant(1))
    models("push", str(tmp_path / "source"), address)
    with following_server(address, tmp_path / "servers", azurite.environment()) as server:
        assert constant_of(server, "m") == 1
        write_model(tmp_path / "source", "m", constant(2))
        models("push", str(tmp_path / "source"), address)
        until(lambda: constant_of(server, "m") == 2, "the new model")
