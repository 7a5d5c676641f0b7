"""Models of a real OCI registry: artefacts, credentials, and what is refused."""

import base64
import hashlib
import io
import json
import os
import re
import signal
import tarfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from headrace.core.errors import LoadFailed
from headrace.plugins.stores.contents import PART
from headrace.plugins.stores.oci import (
    ARTEFACT_TYPE,
    TITLE,
    ArtefactFiles,
    ArtefactPlace,
    OciRemote,
    PackedLayer,
    parse_artefact,
    read_address,
)
from headrace.plugins.stores.registry import (
    MANIFEST_TYPE,
    Registry,
    RegistryLogin,
    find_credentials,
)
from headrace.plugins.stores.remote import ModelState, RemoteFile, Unreached
from headrace.repository.catalogue import open_store
from headrace.repository.model_files import (
    MANIFEST,
    Digests,
    digest_of,
    manifest_of,
    write_manifest,
)
from headrace.repository.store import StoreOptions
from tests.models.onnx_graphs import constant, write_model
from tests.plugins.stores.remotes import (
    brought,
    files_of,
    following_server,
    opened_store,
    special,
    tarred,
)
from tests.support.registry import SECRET, USER, RegistryProcess, TokenServer, passwords
from tests.support.scrape import Scraper, until
from tests.support.server_process import ServerProcess
from tests.support.stores import constant_of
from tests.support.stub_server import StubRequest, StubResponse, StubServer

DIGEST = f"sha256:{'0' * 64}"
ADDRESSES = {
    "oci://ghcr.io/me/fraud:v1": ArtefactPlace("https://ghcr.io", "me/fraud", "v1"),
    "oci://ghcr.io/me/models/": ArtefactPlace("https://ghcr.io", "me/models", ""),
    f"oci://host:5000/m@{DIGEST}": ArtefactPlace("https://host:5000", "m", DIGEST),
    "oci://localhost:5000/m:1": ArtefactPlace("http://localhost:5000", "m", "1"),
    "oci://http://host:5000/a/b": ArtefactPlace("http://host:5000", "a/b", ""),
    "oci://docker.io/me/m:1": ArtefactPlace("https://registry-1.docker.io", "me/m", "1"),
}


@pytest.mark.parametrize("address", ADDRESSES)
def test_addresses(address: str) -> None:
    assert read_address(address) == ADDRESSES[address]


@pytest.mark.parametrize(
    "address",
    ["oci://host", "oci://host/", "oci://host/Upper", "oci://host/m:", "oci://host/m@sha256:1",
     "oci://host/../m", "oci://me:secret@host/m"],
)  # fmt: skip
def test_invalid_addresses(address: str) -> None:
    with pytest.raises(LoadFailed, match=r"expected oci://REGISTRY/REPOSITORY\[:TAG\]") as refused:
        read_address(address)
    assert "secret" not in str(refused.value)


def layer(title: str, digest: str = DIGEST, **notes: str) -> dict[str, Any]:
    return {"digest": digest, "size": 3, "annotations": {TITLE: title, **notes}}


def test_layers_without_a_title_are_no_files() -> None:
    text = json.dumps({"layers": [layer("1/model.onnx"), {"digest": DIGEST, "size": 9}]})
    found = parse_artefact(text.encode())
    assert found == ArtefactFiles({"1/model.onnx": RemoteFile(3, DIGEST, DIGEST)}, [])


FILEPATH = "org.cncf.model.filepath"
IMAGE_LAYER = "application/vnd.oci.image.layer.v1.tar"
UNPACKED = {"io.deis.oras.content.unpack": "true"}


# Type and annotations of a layer; its path, or the suffix of the archive that it is.
LAYERS = [
    (f"{IMAGE_LAYER}+gzip", {TITLE: "m", **UNPACKED}, "", ".tar.gz"),  # a directory of ORAS
    ("application/vnd.acme", {TITLE: "m", **UNPACKED}, "", ".tar.gz"),
    (f"{IMAGE_LAYER}+gzip", {TITLE: "m"}, "", ".tar.gz"),  # one of its library for Python
    (f"{IMAGE_LAYER}+gzip", {TITLE: "m.tar.gz"}, "m.tar.gz", ""),
    (IMAGE_LAYER, {TITLE: "m.onnx"}, "m.onnx", ""),  # its type for any file
    ("application/vnd.docker.ai.safetensors", {FILEPATH: "a.safetensors"}, "a.safetensors", ""),
    ("application/vnd.docker.ai.dir.tar", {FILEPATH: "tokens"}, "", ".tar"),
    ("application/vnd.docker.ai.vllm.config.tar", {}, "", ".tar"),
    ("application/vnd.cncf.model.weight.v1.raw", {FILEPATH: "1/model.onnx"}, "1/model.onnx", ""),
    ("application/vnd.cncf.model.weight.config.v1.tar", {FILEPATH: "a"}, "", ".tar"),
    ("application/vnd.cnai.model.weight.v1.tar+gzip", {}, "", ".tar.gz"),
    ("application/vnd.kitops.modelkit.model.v1.tar+gzip", {}, "", ".tar.gz"),
]


@pytest.mark.parametrize(("kind", "notes", "path", "suffix"), LAYERS)
def test_layers_of_other_tools(kind: str, notes: dict[str, str], path: str, suffix: str) -> None:
    described = {"mediaType": kind, "digest": DIGEST, "size": 3, "annotations": notes}
    found = parse_artefact(json.dumps({"layers": [described]}).encode())
    assert list(found.files) == [path] * bool(path)
    assert found.archives == [PackedLayer(DIGEST, 3, suffix)] * bool(suffix)


ZSTD = {"mediaType": "application/vnd.cncf.model.weight.v1.tar+zstd", "digest": DIGEST, "size": 3}


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ("[]", "its manifest has no form"),
        ('{"layers": [1]}', "its manifest has no form"),
        ('{"manifests": []}', "it is an index of several, expected one artefact"),
        ('{"layers": []}', "none of its layers is a file"),
        (json.dumps({"layers": [layer("a", "sha512:00")]}), "a has the digest sha512:00, expected"),
        (json.dumps({"layers": [layer("a"), layer("a")]}), "a is there twice"),
        (json.dumps({"layers": [layer("a", **UNPACKED)] * 2}), "a is there twice"),
        (json.dumps({"layers": [ZSTD]}), r"a layer is of the type .*zstd, expected tar or tar\+gz"),
    ],
)
def test_invalid_artefacts(document: str, message: str) -> None:
    with pytest.raises(LoadFailed, match=message):
        parse_artefact(document.encode())


# --- credentials


def write_docker_config(folder: Path, **content: Any) -> dict[str, str]:
    """Variables with which these settings are found."""
    (folder / "config.json").write_text(json.dumps(content))
    return {"DOCKER_CONFIG": str(folder)}


def entry(user: str = USER, secret: str = SECRET) -> dict[str, str]:
    return {"auth": base64.b64encode(f"{user}:{secret}".encode()).decode()}


def test_credentials_of_files(tmp_path: Path) -> None:
    hub = "https://index.docker.io/v1/"
    found = write_docker_config(tmp_path, auths={"host:1": entry(), hub: entry("hub")})
    assert find_credentials("host:1", found) == RegistryLogin(USER, SECRET)
    assert find_credentials("registry-1.docker.io", found) == RegistryLogin("hub", SECRET)
    assert find_credentials("host:2", found) is None
    assert find_credentials("host:1", {"HOME": "/nowhere"}) is None
    (tmp_path / "containers").mkdir()
    own = {"auths": {"host:2": {"identitytoken": "t"}}}
    (tmp_path / "containers" / "auth.json").write_text(json.dumps(own))
    podman = found | {"XDG_RUNTIME_DIR": str(tmp_path)}
    assert find_credentials("host:2", podman) == RegistryLogin("", "t")
    only = {"REGISTRY_AUTH_FILE": str(tmp_path / "containers" / "auth.json"), "HOME": "/nowhere"}
    assert find_credentials("host:2", only) == RegistryLogin("", "t")


def test_credentials_of_programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "docker-credential-vault"
    program.write_text(
        '#!/bin/sh\nread host\necho "{\\"Username\\": \\"<token>\\", \\"Secret\\": \\"$host\\"}"\n'
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    own = write_docker_config(tmp_path, credHelpers={"host": "vault"})
    assert find_credentials("host", own) == RegistryLogin("", "host")
    all_of_them = write_docker_config(tmp_path, credsStore="vault", auths={"https://host": {}})
    assert find_credentials("host", all_of_them) == RegistryLogin("", "https://host")
    assert find_credentials("other", all_of_them) is None
    missing = write_docker_config(tmp_path, credHelpers={"host": "nowhere"})
    with pytest.raises(
        LoadFailed, match="docker-credential-nowhere has told no credentials for ho"
    ):
        find_credentials("host", missing)


@pytest.mark.parametrize("content", ["{", "[]", '{"auths": {"host": {"auth": "?"}}}'])
def test_invalid_files_of_credentials(content: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(LoadFailed, match=r"config\.json: (it is no file|expected credentials)"):
        find_credentials("host", {"DOCKER_CONFIG": str(tmp_path)})


# --- with a real registry


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RegistryProcess]:
    with RegistryProcess(tmp_path_factory.mktemp("registry")) as registry:
        yield registry


def test_models_are_tags(
    registry: RegistryProcess, tmp_path: Path, models: Callable[..., str]
) -> None:
    large = bytes(range(256)) * (PART // 200)
    source = tmp_path / "source"
    write_model(source, "a", large, "# a\n")
    write_model(source, "b", b"", "# b\n")
    stage, live = f"oci://{registry.host}/stage", f"oci://{registry.host}/deep/live"
    assert models("push", str(source), stage).splitlines()[0].startswith("pushed a, 2 files with ")
    assert models("list", "--store", stage, "--names") == "a\nb\n"
    assert models("verify", stage) == "a: as its manifest has it\nb: as its manifest has it\n"
    models("promote", stage, live, "a")
    models("pull", live, str(tmp_path / "target"))
    assert (tmp_path / "target" / "a" / "1" / "model.onnx").read_bytes() == large
    assert models("verify", str(tmp_path / "target")) == "a: as its manifest has it\n"
    remote = OciRemote(live)
    contents = remote.contents("a")
    assert remote.models() == {"a": ModelState(contents.state, contents.size + len(
        (tmp_path / "target" / "a" / MANIFEST).read_bytes()
    ))}  # fmt: skip
    stored = registry.blob_file(contents.files["1/model.onnx"].digest)
    content = bytearray(stored.read_bytes())
    content[PART] ^= 1
    stored.write_bytes(content)
    try:
        assert models("verify", live, expected=1) == (
            "a: 1/model.onnx does not hold what it is to hold\n"
        )
        other = StoreOptions(str(tmp_path / "other"))
        store = open_store(live, options=other)
        assert store.names() == {"a"}
        with pytest.raises(LoadFailed, match=r"a: 1/model\.onnx does not hold what its manifest"):
            store.materialise("a", store.token("a"))
    finally:
        content[PART] ^= 1
        stored.write_bytes(content)


def test_a_tag_is_one_model(
    registry: RegistryProcess, tmp_path: Path, models: Callable[..., str]
) -> None:
    directory = write_model(tmp_path, "fraud", b"one")
    address = f"oci://{registry.host}/me/fraud"
    models("push", str(directory), f"{address}:v1")
    (directory / "2").mkdir()
    (directory / "2" / "model.onnx").write_bytes(b"two")
    models("push", str(directory), f"{address}:v2")
    first, second = OciRemote(f"{address}:v1"), OciRemote(f"{address}:v2")
    assert set(first.models()) == set(second.models()) == {"fraud"}
    assert set(first.contents("fraud").files) == {"1/model.onnx"}
    assert set(second.contents("fraud").files) == {"1/model.onnx", "2/model.onnx"}
    assert set(OciRemote(address).models()) == {"v1", "v2"}
    digest = first.contents("fraud").state
    pinned = OciRemote(f"{address}@{digest}")
    assert pinned.contents("fraud").state == digest
    with pytest.raises(LoadFailed, match="cannot be written: its digest names what is there"):
        pinned.publish("fraud", directory, manifest_of(directory))
    refused = models("push", str(directory), f"{address}:v3", "--name", "other", expected=1)
    assert "fraud:v3 is the model fraud, not other: leave out the tag, or name the" in refused
    assert set(OciRemote(address).models()) == {"v1", "v2"}
    with pytest.raises(LoadFailed, match="'a b' cannot be a tag"):
        OciRemote(address).publish("a b", directory, manifest_of(directory))
    with pytest.raises(LoadFailed, match="manifests/v9 is not there"):
        OciRemote(address).contents("v9")


def test_artefacts_of_other_tools(registry: RegistryProcess, tmp_path: Path) -> None:
    """Files with titles alone, as `oras push` makes them, and what is no artefact beside them."""
    directory = write_model(tmp_path, "m", b"one")
    address = f"oci://{registry.host}/others"
    remote = OciRemote(address)
    remote.publish("m", directory, manifest_of(directory))
    made = remote.contents("m").files["1/model.onnx"]
    url = f"http://{registry.host}/v2/others/manifests/m"
    document = httpx.get(url, headers={"Accept": MANIFEST_TYPE}, trust_env=False).json()
    assert document["artifactType"] == ARTEFACT_TYPE
    assert [one["annotations"][TITLE] for one in document["layers"]] == [
        "1/model.onnx", MANIFEST,
    ]  # fmt: skip
    document["layers"] = [one for one in document["layers"] if one["digest"] == made.digest]
    registry.put_manifest("others", "plain", document, MANIFEST_TYPE)
    document["layers"][0].pop("annotations")
    registry.put_manifest("others", "image", document, MANIFEST_TYPE)
    registry.put_manifest("others", f"sha256-{'0' * 64}.sig", document, MANIFEST_TYPE)
    store = open_store(address, options=StoreOptions(str(tmp_path / "cache")))
    assert store.names() == {"m", "plain", "image"}
    lease = store.materialise("plain", store.token("plain"))
    assert (lease.path / "1" / "model.onnx").read_bytes() == b"one"
    assert store.problems("plain") == []
    with pytest.raises(LoadFailed, match="image: none of its layers is a file: none has a title"):
        store.materialise("image", store.token("image"))


def put_artefact(
    registry: RegistryProcess, repository: str, tag: str, *layers: tuple[dict[str, str], bytes],
    kinds: Sequence[str] = (),
) -> None:  # fmt: skip
    """Write an artefact of layers with these annotations, contents and types, by default ORAS'."""
    there = Registry(f"http://{registry.host}", repository, "")

    def put(content: bytes, kind: str) -> dict[str, Any]:
        there.push(digest_of(content), len(content), io.BytesIO(content))
        return {"mediaType": kind, "digest": digest_of(content), "size": len(content)}

    config = put(b"{}", "application/vnd.oci.empty.v1+json")
    described = [
        put(content, kind) | {"annotations": notes}
        for (notes, content), kind in zip(layers, kinds or [IMAGE_LAYER] * len(layers), strict=True)
    ]
    document = {
        "schemaVersion": 2, "mediaType": MANIFEST_TYPE, "config": config, "layers": described,
    }  # fmt: skip
    registry.put_manifest(repository, tag, document, MANIFEST_TYPE)


FILES = {"1/model.onnx": b"one", "config.pbtxt": b"# m\n"}
VERSION = (
    {TITLE: "1", **UNPACKED},
    tarred((special("1", tarfile.DIRTYPE), b""), ("1/model.onnx", b"one")),
)
CONFIG = {TITLE: "config.pbtxt"}, FILES["config.pbtxt"]


def test_packed_directories(registry: RegistryProcess, tmp_path: Path) -> None:
    """Directories as `oras push` packs them: `m/`, `./1 ./config.pbtxt`, and files below `m`."""
    whole = {TITLE: "m", **UNPACKED}, tarred(*((f"m/{path}", FILES[path]) for path in FILES))
    put_artefact(registry, "packed", "whole", whole)
    put_artefact(registry, "packed", "beside", CONFIG, VERSION)
    below = [({TITLE: f"m/{path}"}, content) for path, content in FILES.items()]
    put_artefact(registry, "packed", "below", *below)
    store = opened_store(f"oci://{registry.host}/packed", tmp_path)
    for name in ("whole", "beside", "below"):
        assert brought(store, name) == FILES
        assert store.problems(name) == []
    contents = store.remote.contents("whole")
    file = contents.files["1/model.onnx"]
    assert store.remote.read("whole", "1/model.onnx", file, 1, 3) == b"ne"
    assert not list((tmp_path / "partial").iterdir())


def test_a_model_of_docker(registry: RegistryProcess, tmp_path: Path) -> None:
    weights = {FILEPATH: "model.safetensors"}, b"weights"
    packed = tarred(("config.json", b"{}"), ("tokens/a.txt", b"a"), mode="w")
    kinds = "application/vnd.docker.ai.safetensors", "application/vnd.docker.ai.vllm.config.tar"
    put_artefact(registry, "docker", "m", weights, ({}, packed), kinds=kinds)
    assert brought(opened_store(f"oci://{registry.host}/docker", tmp_path), "m") == {
        "model.safetensors": b"weights", "config.json": b"{}", "tokens/a.txt": b"a",
    }  # fmt: skip


def test_a_packed_directory_is_fetched_once(registry: RegistryProcess, tmp_path: Path) -> None:
    put_artefact(registry, "once", "m", CONFIG, VERSION)
    store = opened_store(f"oci://{registry.host}/once", tmp_path)
    assert brought(store, "m") == FILES
    assert store.counts.read_bytes == len(CONFIG[1]) + len(VERSION[1])
    put_artefact(registry, "once", "m", (CONFIG[0], b"# new\n"), VERSION)
    again = opened_store(f"oci://{registry.host}/once", tmp_path)
    assert brought(again, "m") == FILES | {"config.pbtxt": b"# new\n"}
    assert again.counts.read_bytes == len(b"# new\n")


def test_a_manifest_in_a_packed_directory(registry: RegistryProcess, tmp_path: Path) -> None:
    directory = write_model(tmp_path, "m", b"one", "# m\n")
    write_manifest(directory)
    files = files_of(directory) | {MANIFEST: (directory / MANIFEST).read_bytes()}
    packed = tarred(*((f"m/{path}", content) for path, content in files.items()))
    put_artefact(registry, "manifest", "m", ({TITLE: "m", **UNPACKED}, packed))
    store = opened_store(f"oci://{registry.host}/manifest", tmp_path / "cache")
    assert brought(store, "m") == FILES
    lease = store.materialise("m", store.token("m"))
    assert (lease.path / MANIFEST).read_bytes() == files[MANIFEST]


OTHER = {TITLE: "2", **UNPACKED}, tarred(("2/model.onnx", bytes(600)))
LARGE = {TITLE: "3", **UNPACKED}, tarred(("3/model.onnx", bytes(600)))
LINK = {TITLE: "4", **UNPACKED}, tarred((special("4/model.onnx", tarfile.SYMTYPE, "/etc"), b""))
NO_ARCHIVE = {TITLE: "5", **UNPACKED}, b"no archive"
REFUSED = [
    ([OTHER, LARGE], {"archive_bytes": 1000, "archive_ratio": 1}, "it unpacks to more than 1000 b"),
    ([OTHER, LARGE], {"archive_files": 1}, "it has more than 1 files (--store-archive-files)"),
    ([VERSION, LINK], {}, "'4/model.onnx' is no file"),
    ([NO_ARCHIVE], {}, "it cannot be unpacked: "),
    ([VERSION, ({TITLE: "1/model.onnx"}, b"one")], {}, "1/model.onnx is there twice"),
]  # fmt: skip


@pytest.mark.parametrize(("layers", "limits", "message"), REFUSED)
def test_refused_archives(
    layers: list[tuple[dict[str, str], bytes]], limits: dict[str, int], message: str,
    registry: RegistryProcess, tmp_path: Path,
) -> None:  # fmt: skip
    """Only their own model cannot be loaded, and they are not fetched again."""
    put_artefact(registry, "refused", "bad", *layers)
    put_artefact(registry, "refused", "good", CONFIG)
    store = opened_store(f"oci://{registry.host}/refused", tmp_path, **limits)
    with pytest.raises(LoadFailed, match=re.escape(f"refused: bad: {message}")):
        brought(store, "bad")
    read = store.counts.read_bytes
    with pytest.raises(LoadFailed, match=re.escape(message)):
        brought(store, "bad")
    assert store.counts.read_bytes == read
    assert brought(store, "good") == {"config.pbtxt": CONFIG[1]}


def test_a_damaged_archive_is_not_unpacked(registry: RegistryProcess, tmp_path: Path) -> None:
    packed = tarred(("1/model.onnx", b"to be damaged"))
    put_artefact(registry, "damaged", "m", ({TITLE: "1", **UNPACKED}, packed))
    registry.blob_file(digest_of(packed)).write_bytes(bytes(len(packed)))
    store = opened_store(f"oci://{registry.host}/damaged", tmp_path)
    with pytest.raises(LoadFailed, match=f"m: its layer {digest_of(packed)} has another digest"):
        brought(store, "m")


def test_a_registry_out_of_reach(registry: RegistryProcess) -> None:
    with pytest.raises(Unreached, match="cannot be reached: there is no such repository"):
        OciRemote(f"oci://{registry.host}/nothing").models()
    with pytest.raises(Unreached, match=r"cannot be reached: .*refused"):
        OciRemote("oci://127.0.0.1:1/m:1").models()


def test_a_registry_with_passwords(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = write_model(tmp_path, "m", b"one")
    with RegistryProcess(tmp_path, passwords(tmp_path)) as registry:
        address = f"oci://{registry.host}/m:1"
        monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
        with pytest.raises(Unreached, match="it wants credentials, and there are none"):
            OciRemote(address).publish("m", directory, manifest_of(directory))
        write_docker_config(tmp_path, auths={registry.host: entry(secret="wrong")})
        with pytest.raises(Unreached, match=r"cannot be reached: (UNAUTHORIZED|it answers 401)"):
            OciRemote(address).models()
        write_docker_config(tmp_path, auths={registry.host: entry()})
        OciRemote(address).publish("m", directory, manifest_of(directory))
        assert set(OciRemote(address).models()) == {"m"}


@pytest.mark.parametrize("kind", ["password", "refresh_token"])
def test_a_registry_with_tokens(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = write_model(tmp_path, "m", b"one")
    with TokenServer(tmp_path) as tokens, RegistryProcess(tmp_path, tokens.auth) as registry:
        address = f"oci://{registry.host}/m:1"
        monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
        own = entry() if kind == "password" else {"identitytoken": SECRET}
        write_docker_config(tmp_path, auths={registry.host: own})
        OciRemote(address).publish("m", directory, manifest_of(directory))
        assert set(tokens.asked) == {
            (kind, "repository:m:pull"), (kind, "repository:m:pull,push")
        }  # fmt: skip
        tokens.asked.clear()
        remote = OciRemote(address)
        assert set(remote.models()) == {"m"}
        assert set(remote.contents("m").files) == {"1/model.onnx"}
        assert tokens.asked == [(kind, "repository:m:pull")]
        write_docker_config(tmp_path, auths={registry.host: entry(secret="wrong")})
        with pytest.raises(Unreached, match="its token server answers 401") as refused:
            OciRemote(address).models()
        assert "wrong" not in str(refused.value)


def test_credentials_stay_with_the_registry(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blobs of large registries are elsewhere, where a signed address lets in."""
    content = b"one"
    digest = f"sha256:{hashlib.sha256(content).hexdigest()}"
    manifest = json.dumps({"layers": [layer("1/model.onnx", digest)]}).encode()
    asked: list[tuple[str, str]] = []

    def respond(request: StubRequest) -> StubResponse:
        path, headers = request.path, request.headers
        kind = "blob" if path.startswith("/elsewhere/") else path.split("/")[-2]
        asked.append((kind, headers.get("Authorization", "")))
        if kind != "blob" and "Authorization" not in headers:
            return 401, {"WWW-Authenticate": 'Basic realm="here"'}, b""
        if kind == "blobs":
            elsewhere = server.url.replace("127.0.0.1", "localhost")
            return 307, {"Location": f"{elsewhere}/elsewhere/{digest}?sig=1"}, b""
        return 200, {}, content if kind == "blob" else manifest

    with StubServer(respond) as server:
        monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
        write_docker_config(tmp_path, auths={server.host: entry()})
        remote = OciRemote(f"oci://{server.host}/m:1")
        [(path, file)] = remote.contents("m").files.items()
        assert remote.read("m", path, file, 0, 3) == content
    basic = f"Basic {entry()['auth']}"
    assert asked == [
        ("manifests", ""), ("manifests", basic), ("blobs", basic), ("blob", ""),
    ]  # fmt: skip


@pytest.mark.slow
def test_a_server_follows_a_tag(
    registry: RegistryProcess, tmp_path: Path, models: Callable[..., str]
) -> None:
    address = f"oci://{registry.host}/followed/m:live"
    models("push", str(write_model(tmp_path, "m", constant(1))), address)
    with following_server(address, tmp_path / "cache") as server:
        assert constant_of(server, "m") == 1
        models("push", str(write_model(tmp_path / "new", "m", constant(2))), address)
        until(lambda: constant_of(server, "m") == 2, "the new artefact")


@pytest.mark.slow
@pytest.mark.whole
@pytest.mark.timeout(900)
def test_two_gigabytes_survive_a_killed_server(
    registry: RegistryProcess, tmp_path: Path, models: Callable[..., str]
) -> None:
    """The next server fetches only the parts that the killed one has not written."""
    nbytes = 2 << 30
    parts = nbytes // PART
    directory = write_model(tmp_path / "source", "m", constant(1))
    weights = directory / "1" / "weights.bin"
    with weights.open("wb") as file:
        file.truncate(nbytes)
        for number in range(parts):  # so that no part can take another's place
            os.pwrite(file.fileno(), b"%d" % number, number * PART)
    address = f"oci://{registry.host}/large/m:1"
    models("push", str(directory), address)
    cache = tmp_path / "servers"
    given = (f"--store-cache={cache}",)

    def written() -> int:
        return sum(path.read_bytes().count(1) for path in (cache / "partial").glob("*.parts"))

    with ServerProcess(address, options=given, wait=False) as server:
        until(lambda: written() > parts // 4, "a part of the download", seconds=300)
        registry.send(signal.SIGSTOP)  # so that the server is killed in the middle
        os.kill(server.pid, signal.SIGKILL)
        server.stop()
    here = written()
    assert parts // 4 < here < parts
    registry.send(signal.SIGCONT)
    with (
        ServerProcess(address, options=given, wait=False) as server,
        Scraper(server.metrics) as scraper,
    ):
        url = f"{server.url}/v2/models/m/ready"
        until(lambda: httpx.get(url, trust_env=False).status_code == 200, "the model", seconds=600)
        assert f"m: 1/weights.bin is continued, {here * PART} bytes are here" in server.log
        read = scraper.now().value("headrace_store_read_bytes_total")
        assert read == (parts - here) * PART, "small files were first"
        assert constant_of(server, "m") == 1
        assert server.stop() == 0
    store = open_store(address, options=StoreOptions(str(cache)))
    assert store.names() == {"m"}
    lease = store.materialise("m", store.token("m"))
    brought = lease.path
    assert (brought / "1" / "weights.bin").stat().st_size == nbytes
    assert Digests().problems(brought) == []
    assert manifest_of(brought) == manifest_of(directory)
