"""Models of a web server: the S3 server of the other tests, asked for plain files."""

import json
import re
from pathlib import Path

import httpx
import pytest

from headrace.cli.program import main
from headrace.core.errors import LoadFailed
from headrace.plugins.stores.contents import PART
from headrace.plugins.stores.remote import Unreached
from headrace.plugins.stores.web import IndexedModel, WebRemote, parse_index
from headrace.repository.catalogue import open_store
from headrace.repository.model_files import INDEX, MANIFEST, manifest_of
from headrace.repository.store import StoreOptions
from tests.models.onnx_graphs import identity, write_model
from tests.plugins.stores.remotes import following_server
from tests.support.command import run
from tests.support.object_store import BUCKET, MisbehavingProxy, ObjectStore, held_download
from tests.support.scrape import until


def write_index(directory: Path, expected: int = 0) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["models", "index", str(directory)])
    assert ended.value.code == expected


def test_an_index_names_all_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = write_model(tmp_path, "m", b"one", "# m\n")
    write_index(tmp_path)
    [(name, found)] = parse_index((tmp_path / INDEX).read_bytes()).items()
    assert name == "m"
    assert found.sizes == {"1/model.onnx": 3, "config.pbtxt": 4}
    assert (model / MANIFEST).read_bytes() == manifest_of(model)
    (model / "1" / "model.onnx").write_bytes(b"other")
    write_index(tmp_path, expected=1)
    printed = capsys.readouterr().err
    assert f"{model}: {MANIFEST} does not list every file as it is" in printed


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"models": {"m": {}}}', '{"models": {"m": 1}}'])
def test_invalid_indexes(text: str) -> None:
    with pytest.raises(LoadFailed, match=f"{INDEX} is no index: headrace models index writes one"):
        parse_index(text.encode())


def test_names_that_could_leave_the_site_are_left_out() -> None:
    told = {"manifest": "sha256:0", "sizes": {}}
    models = {name: told for name in ("m", "..", ".m", "a/b", "")}
    found = parse_index(json.dumps({"models": models}).encode())
    assert found == {"m": IndexedModel("sha256:0", {})}


def test_a_model_is_read_in_parts(site: ObjectStore, tmp_path: Path) -> None:
    write_model(tmp_path / "site", "m", bytes(range(256)) * (PART // 200))
    write_index(tmp_path / "site")
    site.put_directory(tmp_path / "site", "parts")
    with MisbehavingProxy(site) as proxy:
        address = f"{proxy.url}/{BUCKET}/parts"
        store = open_store(address, options=StoreOptions(str(tmp_path / "cache")))
        assert store.names() == {"m"}
        lease = store.materialise("m", store.token("m"))
        content = (tmp_path / "site" / "m" / "1" / "model.onnx").read_bytes()
        assert (lease.path / "1" / "model.onnx").read_bytes() == content
        ranges = [where for path, where in proxy.asked if path.endswith("model.onnx")]
        assert sorted(ranges) == [f"bytes=0-{PART - 1}", f"bytes={PART}-{len(content) - 1}"]
        assert store.problems("m") == []
        with pytest.raises(LoadFailed, match="cannot be written: push to the directory"):
            store.publish("m", tmp_path, b"{}")
        site.put(f"parts/m/{MANIFEST}", b'{"files": {}}')
        with pytest.raises(LoadFailed, match="m is being changed"):
            store.problems("m")
        with pytest.raises(LoadFailed, match="other is not there"):
            store.problems("other")


def test_addresses(site: ObjectStore) -> None:
    remote = WebRemote("https://me:secret@host:1/a/b")
    assert remote.address == "https://host:1/a/b"
    for address in ("https:///a", "https://host/a?sig=secret"):
        with pytest.raises(LoadFailed, match=r"expected https://HOST/PATH/, without a query$"):
            WebRemote(address)
    with pytest.raises(Unreached, match=f"there is no {INDEX}, which headrace models index writes"):
        WebRemote(f"{site.url}/{BUCKET}/nothing").models()


@pytest.mark.slow
def test_the_progress_of_a_download_is_shown(site: ObjectStore, tmp_path: Path) -> None:
    with held_download(site, tmp_path) as held:
        [download] = held.downloads()
        assert (download["model"], download["store"]) == ("m", held.address)
        assert PART < download["fetched_bytes"] < 2 * PART < download["bytes"]
        told = {"HEADRACE_URL": held.server.url}
        shown = run("status", environment=told).stdout
        assert re.search(rf"^m +8.00 MiB +16.0 MiB +{held.address}$", shown, re.MULTILINE)
        top = run("top", "--once", "--interval=0.1", environment=told).stdout
        assert "downloading: m, 8.00 MiB of 16.0 MiB, 0 B/s\n" in top
        assert held.let_go() == 200
        assert held.downloads() == []


@pytest.mark.slow
def test_a_server_follows_a_site(site: ObjectStore, tmp_path: Path) -> None:
    source = tmp_path / "site"
    write_model(source, "m", identity())
    write_index(source)
    site.put_directory(source, "followed")
    address = f"{site.url}/{BUCKET}/followed/"
    with following_server(address, tmp_path / "cache") as server:
        write_model(source, "n", identity())
        write_index(source)
        site.put_directory(source / "n", "followed/n")
        site.put(f"followed/{INDEX}", (source / INDEX).read_bytes())
        url = f"{server.url}/v2/models/n/ready"
        until(lambda: httpx.get(url, trust_env=False).status_code == 200, "the new model")
