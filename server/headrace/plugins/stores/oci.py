"""OCI registries as stores: `oci://REGISTRY/REPOSITORY[:TAG]`.

    artefact   an OCI image manifest of the type `application/vnd.headrace.model.v1`
    layers     one for each file, with its path as `org.opencontainers.image.title`

An artefact is a model in one state, `headrace-manifest.json` among its files, so that signatures
travel with it. Without a tag, the repository's tags are the models; with a tag or a digest, there
is one model, named like the last part of the repository's path. The registry keeps each content
once: a new version adds its own files. Setting the tag is the step that publishes.

Artefacts that others have made, as by `oras push`, have digests, too, and need no manifest.
"""

import io
import json
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from threading import Event
from typing import Any, NamedTuple

from headrace.core.errors import LoadFailed
from headrace.plugins.stores.registry import MANIFEST_TYPE, Registry
from headrace.plugins.stores.remote import (
    ModelState,
    Remote,
    RemoteContents,
    RemoteFile,
    root_url,
    run_all,
)
from headrace.plugins.stores.remote_store import RemoteStore
from headrace.repository.model_files import MANIFEST, digest_of, parse_manifest
from headrace.repository.store import Store, StoreOptions

ARTEFACT_TYPE = "application/vnd.headrace.model.v1"
TITLE = "org.opencontainers.image.title"
_PACKED = "io.deis.oras.content.unpack"  # of a directory that ORAS has made an archive of
_ADDRESS = re.compile(
    r"oci://(https?://)?([^/@]+)/([a-z0-9]+(?:[._/-]+[a-z0-9]+)*)"
    r"(?::(\w[\w.-]{0,127})|@(sha256:[0-9a-f]{64}))?/?",
    re.ASCII,
)
_TAG = re.compile(r"\w[\w.-]{0,127}", re.ASCII)
_NOT_MODELS = re.compile(
    r"sha256-[0-9a-f]{64}.*"
)  # signatures and the like, beside what they are of
_NOTHING = b"{}"


class ArtefactPlace(NamedTuple):
    """The parts of an address: the registry's URL, the repository, and a tag or digest or ""."""

    url: str
    repository: str
    reference: str


def read_address(address: str) -> ArtefactPlace:
    """The parts of an address; raises `LoadFailed`."""
    found = _ADDRESS.fullmatch(address)
    if found is None:
        raise LoadFailed(
            f"{re.sub('//[^/@]*@', '//', address)}: expected oci://REGISTRY/REPOSITORY[:TAG], with"
            " credentials by docker login, or oci://http://HOST:PORT/REPOSITORY"
        )
    scheme, host, repository, tag, digest = found.groups("")
    host = "registry-1.docker.io" if host == "docker.io" else host
    return ArtefactPlace(root_url(scheme, host), repository, tag or digest)


def parse_artefact(text: bytes) -> dict[str, RemoteFile]:
    """The files of an artefact; raises `LoadFailed`."""
    files: dict[str, RemoteFile] = {}
    try:
        document = json.loads(text)
        if "manifests" in document:
            raise LoadFailed("it is an index of several, expected one artefact with files")
        for layer in document["layers"]:
            notes, digest, size = layer.get("annotations", {}), str(layer["digest"]), layer["size"]
            if not (title := str(notes.get(TITLE, ""))):
                continue
            if notes.get(_PACKED) == "true":
                raise LoadFailed(f"{title} is a packed directory: push its files instead")
            if not re.fullmatch("sha256:[0-9a-f]{64}", digest) or int(size) < 0:
                raise LoadFailed(f"{title} has the digest {digest[:80]}, expected sha256")
            if title in files:
                raise LoadFailed(f"{title} is there twice")
            files[title] = RemoteFile(int(size), digest, digest)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise LoadFailed("it is no artefact: its manifest has no form") from None
    if not files:
        raise LoadFailed(f"none of its layers is a file: none has a title ({TITLE})")
    return files


class OciRemote(Remote):
    """Models of a repository of a registry."""

    def __init__(self, address: str) -> None:
        """Connects to nothing; raises `LoadFailed`."""
        self.address = address.rstrip("/")
        place = read_address(address)
        self._reference = place.reference
        self._own_name = place.repository.rpartition("/")[2] if place.reference else ""
        self._registry = Registry(place.url, place.repository, self.address)
        self._known: dict[str, tuple[str, ModelState]] = {}  # digest of a tag's manifest, and model
        self._stopped = Event()

    def models(self) -> Mapping[str, ModelState]:
        """Implements `Remote.models`; asks for the artefacts that have another digest."""
        tags = self._registry.tags() if not self._reference else [self._reference]
        names = {self._own_name or tag: tag for tag in tags if not _NOT_MODELS.fullmatch(tag)}
        found: dict[str, tuple[str, ModelState]] = {}

        def look(name: str, tag: str) -> None:
            digest = self._registry.digest(tag)
            known = self._known.get(name)
            if known is None or known[0] != digest:
                digest, text = self._registry.manifest(tag)
                try:
                    size = sum(file.size for file in parse_artefact(text).values())
                except LoadFailed:  # which it says when it is loaded: others can be
                    size = 0
                known = digest, ModelState(digest, size)
            found[name] = known

        run_all(look, names.items(), self._stopped)
        self._known = found
        return {name: state for name, (_, state) in found.items()}

    def contents(self, name: str) -> RemoteContents:
        """Implements `Remote.contents`."""
        digest, text = self._registry.manifest(self._tag_of(name))
        try:
            files = parse_artefact(text)
        except LoadFailed as error:
            raise LoadFailed(f"{self.address}: {name}: {error}") from error
        if MANIFEST not in files:
            return RemoteContents.by_digests(digest, files)
        return replace(self.with_manifest(name, files), state=digest)

    def read(self, name: str, path: str, file: RemoteFile, start: int, stop: int) -> bytes:
        """Implements `Remote.read`."""
        return self._registry.read(file.tag, start, stop)

    def publish(self, name: str, directory: Path, manifest: bytes) -> None:
        """Implements `Remote.publish`: the tag is last."""
        tag = self._tag_of(name)
        if tag.startswith("sha256:"):
            raise LoadFailed(f"{self.address} cannot be written: its digest names what is there")
        digests = {MANIFEST: digest_of(manifest), **parse_manifest(manifest)}
        sizes = {path: (directory / path).stat().st_size for path in digests if path != MANIFEST}
        sizes[MANIFEST] = len(manifest)

        def push(digest: str, path: str) -> None:
            with (
                io.BytesIO(manifest) if path == MANIFEST else (directory / path).open("rb") as file
            ):
                self._registry.push(digest, sizes[path], file)

        self._registry.push(digest_of(_NOTHING), len(_NOTHING), io.BytesIO(_NOTHING))
        once = {digest: path for path, digest in digests.items()}
        run_all(push, once.items(), self._stopped)
        layers = [
            _descriptor("application/octet-stream", digests[path], sizes[path]) | {
                "annotations": {TITLE: path}
            }
            for path in sorted(digests)
        ]  # fmt: skip
        nothing = _descriptor(
            "application/vnd.oci.empty.v1+json", digest_of(_NOTHING), len(_NOTHING)
        )
        artefact = {
            "schemaVersion": 2, "mediaType": MANIFEST_TYPE, "artifactType": ARTEFACT_TYPE,
            "config": nothing, "layers": layers,
        }  # fmt: skip
        self._registry.tag(tag, json.dumps(artefact, indent=1).encode())

    def close(self) -> None:
        """Implements `Remote.close`."""
        self._stopped.set()

    def _tag_of(self, name: str) -> str:
        """The tag or digest of a model; raises `LoadFailed`."""
        if self._reference and name != self._own_name:
            raise LoadFailed(
                f"{self.address} is the model {self._own_name}, not {name}: leave out the tag, or"
                " name the repository like the model"
            )
        if not self._reference and not _TAG.fullmatch(name):
            raise LoadFailed(f"{self.address}: {name!r} cannot be a tag")
        return self._reference or name


def _descriptor(kind: str, digest: str, size: int) -> dict[str, Any]:
    return {"mediaType": kind, "digest": digest, "size": size}


def oci_store(address: str, options: StoreOptions) -> Store:
    """The store with such an address; raises `LoadFailed`."""
    return RemoteStore(OciRemote(address), options)
