"""Object stores: addresses and credentials, and a real S3 server with a real server before it."""

import os
import signal
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from headrace.core.errors import LoadFailed
from headrace.plugins.stores.contents import PART
from headrace.plugins.stores.objects import (
    ObjectPlace,
    ObjectRemote,
    aws_profile,
    azure_options,
    read_address,
    reason_of,
    s3_options,
)
from headrace.plugins.stores.remote import ModelState, Unreached
from headrace.repository.catalogue import STORES, open_store
from headrace.repository.model_files import MANIFEST, manifest_of, write_manifest
from headrace.repository.store import StoreOptions
from tests.models.onnx_graphs import constant, identity, write_model
from tests.support.command import run
from tests.support.http_client import HttpClient
from tests.support.object_store import BUCKET, SECRET, MisbehavingProxy, ObjectStore
from tests.support.scrape import Scraper, until
from tests.support.server_process import ServerProcess, clean_server
from tests.support.stores import constant_of

ADDRESSES = {
    "s3://bucket": ObjectPlace("s3", "", "bucket", ""),
    "s3://bucket/a/b/": ObjectPlace("s3", "", "bucket", "a/b"),
    "s3://https://host:9000/bucket/a": ObjectPlace("s3", "https://host:9000", "bucket", "a"),
    "s3://http://host:9000/bucket": ObjectPlace("s3", "http://host:9000", "bucket", ""),
    "s3://host:9000/bucket/a": ObjectPlace("s3", "http://host:9000", "bucket", "a"),
    "gs://bucket/a": ObjectPlace("gs", "", "bucket", "a"),
    "az://container/a": ObjectPlace("az", "", "container", "a"),
    "as://account/container/a": ObjectPlace("az", "account", "container", "a"),
    "as://account.blob.core.windows.net/container": ObjectPlace("az", "account", "container", ""),
}


@pytest.mark.parametrize("address", ADDRESSES)
def test_addresses(address: str) -> None:
    assert read_address(address) == ADDRESSES[address]
    assert address.partition(":")[0] in STORES.own()


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("s3://", "s3://BUCKET/PREFIX, or s3://https://HOST:PORT/BUCKET/PREFIX"),
        ("gs://", "gs://BUCKET/PREFIX"),
        ("as://account", "as://ACCOUNT/CONTAINER/PREFIX"),
    ],
)
def test_invalid_addresses(address: str, expected: str) -> None:
    with pytest.raises(LoadFailed, match=rf"^{address}: expected {expected}$"):
        open_store(address)


def test_profiles_of_aws(tmp_path: Path) -> None:
    (tmp_path / ".aws").mkdir()
    (tmp_path / ".aws" / "config").write_text(
        "[default]\nregion = eu-west-1\n[profile other]\nrole_arn = arn:x\n"
    )
    (tmp_path / ".aws" / "credentials").write_text(
        "[default]\naws_access_key_id = id\naws_secret_access_key = secret\n"
        "aws_session_token = token\n"
    )
    home = {"HOME": str(tmp_path)}
    keys = {"access_key_id": "id", "secret_access_key": "secret", "session_token": "token"}
    assert s3_options("", home) == {"region": "eu-west-1", **keys}
    assert s3_options("", home | {"AWS_ACCESS_KEY_ID": "x", "AWS_REGION": "r"}) == {}
    assert aws_profile(home | {"AWS_PROFILE": "other"}) == {"role_arn": "arn:x"}
    with pytest.raises(LoadFailed, match="AWS_PROFILE: there is no profile missing in"):
        aws_profile(home | {"AWS_PROFILE": "missing"})
    assert aws_profile({"HOME": "/nowhere"}) == {}
    (tmp_path / ".aws" / "config").write_text("no sections\n")
    with pytest.raises(LoadFailed, match="config: it is no file of profiles"):
        aws_profile(home)


def test_endpoints() -> None:
    named = {"AWS_ENDPOINT_URL": "http://a:1", "HOME": "/nowhere", "AWS_SKIP_SIGNATURE": "true"}
    over_http = {"client_options": {"allow_http": True}, "region": "us-east-1"}
    assert s3_options("", named) == {"endpoint": "http://a:1"} | over_http
    named["AWS_ENDPOINT_URL_S3"] = "https://b:2"
    assert s3_options("", named) == {"endpoint": "https://b:2", "region": "us-east-1"}
    assert s3_options("http://c:3", named) == {"endpoint": "http://c:3"} | over_http
    named = {"AZURE_STORAGE_ACCOUNT": "me", "AZURE_STORAGE_KEY": "key"}
    assert azure_options("", named) == {"account_name": "me", "account_key": "key"}
    assert azure_options("you", named) == {"account_name": "you", "account_key": "key"}


@pytest.mark.parametrize("address", ["gs://bucket/a", "az://container", "as://account/container/a"])
def test_other_stores_can_be_made(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT", "account")
    assert open_store(address).address == address


def test_reasons_have_no_query() -> None:
    text = (
        "Generic error: GET https://a.net/b?sig=secret&x=1 in 2ms - refused\n\nDebug source:\nsig"
    )
    assert reason_of(OSError(text)) == "Generic error: GET https://a.net/b in 2ms - refused"
    xml = "404: <Error><Code>NoSuchBucket</Code>\n<Message>It is not there</Message></Error>"
    assert reason_of(OSError(xml)) == "NoSuchBucket: It is not there"


# --- with a real store


@pytest.fixture
def here(objects: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> ObjectStore:
    """The store, with its address and credentials in the environment of this process."""
    for name, value in objects.environment().items():
        monkeypatch.setenv(name, value)
    return objects


def model(root: Path, name: str = "m", content: bytes = b"one") -> Path:
    return write_model(root, name, content, f'backend: "onnxruntime"\n# {name}\n')


def test_publishing_replaces_a_model(here: ObjectStore, tmp_path: Path) -> None:
    directory = model(tmp_path)
    remote = ObjectRemote(f"s3://{BUCKET}/published")
    assert remote.models() == {}
    with pytest.raises(LoadFailed, match="published: m is not there"):
        remote.contents("m")
    remote.publish("m", directory, manifest_of(directory))
    first = remote.contents("m")
    assert set(first.files) == {"1/model.onnx", "config.pbtxt"}
    assert remote.models()["m"].state == first.state
    (directory / "1" / "model.onnx").rename(directory / "1" / "other.onnx")
    (directory / "2").mkdir()
    (directory / "2" / "model.onnx").write_bytes(b"two")
    remote.publish("m", directory, manifest_of(directory))
    second = remote.contents("m")
    assert set(second.files) == {"1/other.onnx", "2/model.onnx", "config.pbtxt"}
    assert second.state != first.state
    assert second.files["2/model.onnx"].digest != ""
    with pytest.raises(LoadFailed, match="published: NoSuchKey: "):
        remote.read("m", "1/model.onnx", first.files["1/model.onnx"], 0, 3)
    (directory / "2" / "model.onnx").write_bytes(b"new")
    remote.publish("m", directory, manifest_of(directory))
    with pytest.raises(LoadFailed, match="published: a file has changed while it was fetched"):
        remote.read("m", "2/model.onnx", second.files["2/model.onnx"], 0, 3)
    store = open_store(f"s3://{BUCKET}/published", options=StoreOptions(str(tmp_path / "c")))
    assert store.problems("m") == []


@pytest.fixture
def google(objects: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> str:
    """The address of a store of Google, whose XML interface the S3 server has, too."""
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", objects.url.removeprefix("http://"))
    return f"gs://{BUCKET}"


def test_a_store_of_google(google: str, objects: ObjectStore, tmp_path: Path) -> None:
    large = bytes(range(256)) * (PART // 200)
    directory = model(tmp_path, content=large)
    write_manifest(directory)
    objects.put_directory(directory, "google/m")
    store = open_store(f"{google}/google", options=StoreOptions(str(tmp_path / "c")))
    assert store.names() == {"m"}
    lease = store.materialise("m", store.token("m"))
    assert (lease.path / "1" / "model.onnx").read_bytes() == large
    assert store.problems("m") == []


def test_publishing_to_google(google: str, models: Callable[..., str], tmp_path: Path) -> None:
    """By uploads as a whole and in parts, and deletions."""
    large = bytes(range(256)) * (PART // 200)
    directory = model(tmp_path / "source", content=large)
    stage, live = f"{google}/google-stage", f"{google}/google-live"
    assert models("push", str(directory.parent), stage).startswith("pushed m, 2 files with ")
    models("promote", stage, live, "m")
    assert models("list", "--store", live, "--names") == "m\n"
    assert models("verify", live) == "m: as its manifest has it\n"
    remote = ObjectRemote(live)
    first = remote.contents("m")
    (directory / "1" / "model.onnx").rename(directory / "1" / "other.onnx")
    (directory / "config.pbtxt").write_text("# new\n")
    models("push", str(directory.parent), live)
    second = remote.contents("m")
    assert set(second.files) == {"1/other.onnx", "config.pbtxt"}
    assert second.state != first.state
    with pytest.raises(LoadFailed, match="google-live: NoSuchKey: "):
        remote.read("m", "1/model.onnx", first.files["1/model.onnx"], 0, 3)
    with pytest.raises(LoadFailed, match="google-live: a file has changed while it was fetched"):
        remote.read("m", "config.pbtxt", first.files["config.pbtxt"], 0, 3)
    models("pull", live, str(tmp_path / "target"))
    assert (tmp_path / "target" / "m" / "1" / "other.onnx").read_bytes() == large


def test_objects_of_no_model_are_left_out(here: ObjectStore) -> None:
    for key in ("README.md", ".hidden/a", "m/1/model.onnx", "m/1/", "m/2"):
        here.put(f"odd/{key}", b"" if key.endswith("/") else b"x")
    remote = ObjectRemote(f"s3://{BUCKET}/odd")
    assert set(remote.models()) == {"m"}
    contents = remote.contents("m")
    assert set(contents.files) == {"1/model.onnx", "2"}
    assert remote.models()["m"] == ModelState(contents.state, contents.size)


@pytest.mark.parametrize("file", ["config.pbtxt", "1/model.onnx", MANIFEST])
def test_a_prefix_may_be_a_model(here: ObjectStore, file: str) -> None:
    prefix = f"alone-{file.partition('.')[0].replace('/', '-')}/my_model"
    here.put(f"{prefix}/{file}", b'{"files": {}}')
    here.put(f"{prefix}/labels/a.txt", b"a")
    remote = ObjectRemote(f"s3://{BUCKET}/{prefix}")
    assert set(remote.models()) == {"my_model"}
    contents = remote.contents("my_model")
    assert remote.models()["my_model"].state == contents.state


def test_a_bucket_that_is_not_there(here: ObjectStore, tmp_path: Path) -> None:
    with pytest.raises(Unreached, match=r"^s3://no-bucket cannot be reached: NoSuchBucket: "):
        ObjectRemote("s3://no-bucket").models()
    remote = ObjectRemote("s3://no-bucket")
    with pytest.raises(Unreached, match="NoSuchBucket"):
        remote.publish("m", model(tmp_path), manifest_of(tmp_path / "m"))


# --- with a real server


def states(server: ServerProcess) -> Mapping[tuple[str, str], tuple[str, str]]:
    """State and reason of each version."""
    found = httpx.post(f"{server.url}/v2/repository/index", trust_env=False).json()
    return {
        (e["name"], e.get("version", "")): (e.get("state", ""), e.get("reason", "")) for e in found
    }


def options(cache: Path, *more: str) -> Sequence[str]:
    return [f"--store-cache={cache}", *more]


def test_polling_a_store_beside_a_directory(objects: ObjectStore, tmp_path: Path) -> None:
    write_model(tmp_path / "local", "here", identity())
    objects.put("live/there/1/model.onnx", constant(1))
    given = options(
        tmp_path / "cache", "--model-control-mode=poll", "--repository-poll-secs=1",
        f"--model-repository=s3://{BUCKET}/live",
    )  # fmt: skip

    def break_down(path: str, status: int, *_: Any) -> tuple[int, bytes]:
        return 403, b"<Error><Code>AccessDenied</Code><Message>No</Message></Error>"

    with (
        MisbehavingProxy(objects) as proxy,
        ServerProcess(
            tmp_path / "local", options=given, environment=objects.environment(proxy.url)
        ) as server,
        Scraper(server.metrics) as scraper,
    ):
        assert set(states(server)) == {("here", "1"), ("there", "1")}
        assert scraper.now().value("headrace_store_up", store=f"s3://{BUCKET}/live") == 1
        assert constant_of(server, "there") == 1
        objects.put("live/there/1/model.onnx", constant(2))
        until(lambda: constant_of(server, "there") == 2, "the new version 1")
        normal, proxy.change = proxy.change, break_down
        until(lambda: scraper.now().value("headrace_store_up") == 0, "the outage")
        state, reason = states(server)["there", "1"]
        assert state == "READY"
        assert reason == f"s3://{BUCKET}/live cannot be reached: AccessDenied: No"
        assert states(server)["here", "1"] == ("READY", "")
        assert constant_of(server, "there") == 2
        objects.put("live/there/2/model.onnx", constant(3))
        proxy.change = normal
        until(lambda: ("there", "2") in states(server), "the end of the outage")
        until(lambda: constant_of(server, "there") == 3, "version 2")
        objects.delete("live/there/1/model.onnx")
        objects.delete("live/there/2/model.onnx")
        until(lambda: states(server)["there", "2"][0] == "UNAVAILABLE", "the end of the model")
        assert server.stop() == 0
        assert f"s3://{BUCKET}/live can be reached again" in server.log
        assert SECRET not in server.log + server.output
        assert "Traceback" not in server.log


@pytest.mark.slow
def test_wrong_bytes_are_never_served(objects: ObjectStore, tmp_path: Path) -> None:
    source = tmp_path / "local"
    write_model(source, "m", constant(1))
    environment = objects.environment()
    pushed = run("models", "push", str(source), f"s3://{BUCKET}/wrong", environment=environment)
    assert pushed.returncode == 0, pushed.stderr
    verified = run("models", "verify", f"s3://{BUCKET}/wrong", environment=environment)
    assert (verified.returncode, verified.stdout) == (0, "m: as its manifest has it\n")

    def change(path: str, status: int, headers: Any, body: bytes) -> tuple[int, bytes]:
        if path.endswith("model.onnx"):
            return status, body.replace(b"X", b"Z")
        return status, body

    given = options(tmp_path / "cache", "--model-control-mode=explicit")
    with MisbehavingProxy(objects) as proxy:
        environment = objects.environment(proxy.url)
        address = f"s3://{BUCKET}/wrong"
        with clean_server(address, options=given, environment=environment) as server:
            client = HttpClient(server.url, binary=False)
            assert states(server) == {("m", ""): ("", "")}
            proxy.change = change
            refused = httpx.post(f"{server.url}/v2/repository/models/m/load", trust_env=False)
            assert refused.status_code == 400
            assert "1/model.onnx does not hold what its manifest tells" in refused.text
            proxy.change = lambda path, status, headers, body: (status, body)
            client.load("m")
            assert constant_of(server, "m") == 1
            client.close()


def test_loading_on_request(here: ObjectStore, tmp_path: Path) -> None:

    for number in range(3):
        directory = write_model(tmp_path, f"m{number}", constant(number))
        remote = ObjectRemote(f"s3://{BUCKET}/cold")
        remote.publish(directory.name, directory, manifest_of(directory))
    given = options(tmp_path / "cache", "--load-on-request", f"--model-memory-budget={1 << 30}")
    address = f"s3://{here.url}/{BUCKET}/cold"  # Triton's form
    environment = here.environment() | {"AWS_ENDPOINT_URL": ""}
    with clean_server(address, options=given, environment=environment) as server:
        assert list((tmp_path / "cache").glob("trees/*")) == []
        assert [constant_of(server, f"m{number}") for number in range(3)] == [0, 1, 2]
        assert len(list((tmp_path / "cache").glob("trees/*.json"))) == 3


def test_push_pull_promote_and_list(
    here: ObjectStore, tmp_path: Path, models: Callable[..., str]
) -> None:
    source = tmp_path / "source"
    write_model(source, "a", constant(1), version=3)
    write_model(source, "b", identity())
    stage, live = f"s3://{BUCKET}/stage", f"s3://{BUCKET}/production"
    assert models("push", str(source), stage).splitlines()[0].startswith("pushed a, 1 files with ")
    assert models("promote", stage, live, "a").startswith("promoted a, 1 files with ")
    assert models("list", "--store", live, "--names") == "a\n"
    assert models("list", "--store", stage).splitlines()[0].split() == ["MODEL", "SIZE"]
    assert models("verify", live) == "a: as its manifest has it\n"
    models("pull", live, str(tmp_path / "target"))
    target = tmp_path / "target" / "a"
    assert (target / "3" / "model.onnx").read_bytes() == constant(1)
    assert models("verify", str(tmp_path / "target")) == "a: as its manifest has it\n"
    models("push", str(source / "b"), live, "--name", "c")
    assert models("list", "--store", live, "--names") == "a\nc\n"
    here.put("production/a/3/model.onnx", b"other")
    assert models("verify", live, expected=1) == (
        "a: 3/model.onnx does not hold what it is to hold\nc: as its manifest has it\n"
    )
    pulled = models("pull", live, str(tmp_path / "target"), "nobody", expected=1)
    assert pulled == "headrace models pull: no model called nobody\n"


@pytest.mark.slow
def test_a_download_survives_a_killed_server(objects: ObjectStore, tmp_path: Path) -> None:
    """The next server fetches only what the killed one has not written."""
    part, parts = 8 << 20, 24
    weights = np.random.default_rng(0).bytes(part * parts)
    objects.put("large/m/1/model.onnx", identity())
    objects.put("large/m/1/weights.bin", weights)
    given = options(tmp_path / "cache")
    with MisbehavingProxy(objects) as proxy:
        environment = objects.environment(proxy.url)

        def hold(path: str, status: int, headers: Any, body: bytes) -> tuple[int, bytes]:
            if sum(bool(where) and "weights" in asked for asked, where in proxy.asked) > parts // 2:
                proxy.let_go.clear()
            return status, body

        proxy.change = hold
        with ServerProcess(
            f"s3://{BUCKET}/large", options=given, environment=environment, wait=False
        ) as server:
            until(lambda: not proxy.let_go.is_set(), "half of the download")
            os.kill(server.pid, signal.SIGKILL)
            server.stop()
        written = next((tmp_path / "cache" / "partial").glob("*.parts")).read_bytes().count(1)
        assert 0 < written < parts
        proxy.change = lambda path, status, headers, body: (status, body)
        proxy.asked.clear()
        proxy.let_go.set()
        with clean_server(f"s3://{BUCKET}/large", options=given, environment=environment) as server:
            assert states(server)["m", "1"] == ("READY", "")
            assert f"m: 1/weights.bin is continued, {written * part} bytes are here" in server.log
        ranges = [where for asked, where in proxy.asked if "weights" in asked and where]
        assert len(ranges) == parts - written
        tree = next((tmp_path / "cache" / "trees").glob("*.json")).with_suffix("")
        assert (tree / "1" / "weights.bin").read_bytes() == weights
