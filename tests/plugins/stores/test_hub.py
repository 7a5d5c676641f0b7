"""Models of the Hugging Face Hub, through its library, at a server of its endpoints."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.core.errors import LoadFailed
from headrace.plugins.stores.contents import PART
from headrace.plugins.stores.hub import HubRemote, served_files
from headrace.plugins.stores.remote import Unreached
from tests.models.onnx_graphs import constant
from tests.plugins.stores.remotes import brought, following_server, opened_store
from tests.support.hub import TOKEN, HubServer
from tests.support.scrape import until
from tests.support.stores import constant_of

SERVED = {
    "onnx": (["model.onnx", "README.md", ".gitattributes", "model.safetensors"], ["model.onnx"]),
    "another name": (["net.onnx", "config.json"], ["net.onnx"]),
    "its own name first": (["model.onnx", "other.onnx"], ["model.onnx"]),
    "weights": (["model.onnx", "model.onnx_data", "model.onnx.data", "model_x.data"],
                ["model.onnx", "model.onnx_data", "model.onnx.data"]),
    "skops": (["clf.skops", "config.json", "README.md"], ["clf.skops"]),
    "a directory": (["config.pbtxt", "1/model.onnx", "README.md", ".a/b"],
                    ["config.pbtxt", "1/model.onnx", "README.md"]),
    "versions": (["1/model.onnx", "labels.txt"], ["1/model.onnx", "labels.txt"]),
    "Python": (["model.py", "other.py"], ["model.py", "other.py"]),
    "MLflow": (["MLmodel", "model.pkl"], ["MLmodel", "model.pkl"]),
}  # fmt: skip


@pytest.mark.parametrize("case", SERVED)
def test_served_files(case: str) -> None:
    paths, expected = SERVED[case]
    assert served_files(dict.fromkeys(paths)) == {path: path for path in expected}


def test_a_folder_of_exports() -> None:
    paths = ["config.json", "onnx/model.onnx", "onnx/model.onnx_data", "onnx/model_int8.onnx"]
    assert served_files(dict.fromkeys(paths)) == {
        "model.onnx": "onnx/model.onnx", "model.onnx_data": "onnx/model.onnx_data",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("paths", "message"),
    [
        (["a.onnx", "b.onnx"], r"it has several models: a\.onnx, b\.onnx"),
        (["model.safetensors"], r"expected one of \.onnx, .*found model\.safetensors"),
        ([".gitattributes"], "found nothing"),
    ],
)
def test_repositories_without_one_model(paths: list[str], message: str) -> None:
    with pytest.raises(LoadFailed, match=message):
        served_files(dict.fromkeys(paths))


@pytest.mark.parametrize("address", ["hf://m", "hf://a/b/c", "hf:a/b", "hf://../b", "hf://a/b@"])
def test_invalid_addresses(address: str) -> None:
    with pytest.raises(LoadFailed, match=r"expected hf://ORG/REPO\[@REVISION\]"):
        HubRemote(address)


# --- with a server


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[HubServer]:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    with HubServer() as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        yield server


def test_a_revision_is_read(hub: HubServer, tmp_path: Path) -> None:
    large = bytes(range(256)) * (PART // 200)
    hub.commit("me/net", {"model.onnx": b"old", "README.md": b"# old"}, "v1")
    hub.commit("me/net", {"onnx/model.onnx": b"new", "onnx/model.onnx_data": large})
    store = opened_store("hf://me/net@v1", tmp_path / "cache")
    assert store.names() == {"net"}
    assert brought(store, "net") == {"model.onnx": b"old"}
    store = opened_store("hf://me/net", tmp_path / "cache")
    assert store.names() == {"net"}
    assert store.size("net") == len(large) + 3
    assert brought(store, "net") == {"model.onnx": b"new", "model.onnx_data": large}
    ranges = [where for path, _, where in hub.asked if path.startswith("/lfs/")]
    assert sorted(ranges) == [f"bytes=0-{PART - 1}", f"bytes={PART}-{len(large) - 1}"]
    with pytest.raises(LoadFailed, match="cannot be written: use hf upload"):
        store.publish("net", tmp_path, b"{}")


def test_unchanged_files_of_a_new_commit(hub: HubServer, tmp_path: Path) -> None:
    hub.commit("me/net", {"model.onnx": b"one", "README.md": b"# one"})
    store = opened_store("hf://me/net", tmp_path / "cache")
    store.names()
    token = store.token("net")
    hub.commit("me/net", {"model.onnx": b"one", "README.md": b"# two"})
    store.names()
    assert store.token("net") == token
    hub.commit("me/net", {"model.onnx": b"two", "README.md": b"# two"})
    store.names()
    assert store.token("net") != token
    with pytest.raises(LoadFailed, match="net is being changed"):
        store.materialise("net", token)
    assert brought(store, "net") == {"model.onnx": b"two"}


def test_tokens_go_to_the_hub_alone(
    hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.commit("me/secret", {"model.onnx": bytes(2000)})
    hub.private.add("me/secret")
    with pytest.raises(Unreached, match=r"hf://me/secret cannot be reached: 401") as refused:
        HubRemote("hf://me/secret").models()
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    store = opened_store("hf://me/secret", tmp_path / "cache")
    assert store.names() == {"secret"}
    assert brought(store, "secret") == {"model.onnx": bytes(2000)}
    tokens = {path.split("/")[1]: token for path, token, _ in hub.asked}
    assert tokens == {"api": f"Bearer {TOKEN}", "me": f"Bearer {TOKEN}", "lfs": ""}
    assert TOKEN not in str(refused.value)


def test_a_repository_that_is_not_there(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Unreached, match="hf://me/nothing cannot be reached: 404"):
        HubRemote("hf://me/nothing").models()
    hub.commit("me/other", {"model.safetensors": b"x"})
    with pytest.raises(Unreached, match="hf://me/other cannot be used: no file of a known format"):
        HubRemote("hf://me/other").models()
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:1")
    with pytest.raises(Unreached, match="hf://me/net cannot be reached: "):
        HubRemote("hf://me/net").models()


@pytest.mark.slow
def test_a_server_follows_a_branch(hub: HubServer, tmp_path: Path) -> None:
    hub.commit("me/net", {"model.onnx": constant(1)})
    hub.private.add("me/net")
    environment = {"HF_ENDPOINT": hub.url, "HF_TOKEN": TOKEN, "HF_HOME": str(tmp_path / "hf")}
    with following_server("hf://me/net", tmp_path / "cache", environment) as server:
        assert constant_of(server, "net") == 1
        hub.commit("me/net", {"model.onnx": constant(2)})
        until(lambda: constant_of(server, "net") == 2, "the new commit")
        assert TOKEN not in server.log
