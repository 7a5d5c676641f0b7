"""OCI registries as stores: `oci://REGISTRY/REPOSITORY[:TAG]`.

    artefact   an OCI image manifest of the type `application/vnd.headrace.model.v1`
    layers     one for each file, with its path as `org.opencontainers.image.title`

An artefact is a model in one state, `headrace-manifest.json` among its files, so that signatures
travel with it. Without a tag, the repository's tags are the models; with a tag or a digest, there
is one model, named like the last part of the repository's path. The registry keeps each content
once: a new version adds its own files. Setting the tag is the step that publishes.

Artefacts that others have made, as by `oras push`, have digests, too, and need no manifest. Layers
that are archives (directories of ORAS, tar layers of ModelPack, KitOps and Docker's models) are
unpacked to a tree of the cache, within the limits of all archives.
"""

import io
import json
import logging
import re
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from pathlib import Path
from threading import Event
from typing import IO, Any, NamedTuple

from headrace.core.errors import LoadFailed
from headrace.plugins.stores.archives import most_unpacked, unpack
from headrace.plugins.stores.cache import cache_of, key_of
from headrace.plugins.stores.contents import PartialFile
from headrace.plugins.stores.download import FileDownloads, StoreCounts
from headrace.plugins.stores.held_tree import HeldModel, HeldTree
from headrace.plugins.stores.registry import MANIFEST_TYPE, Registry
from headrace.plugins.stores.remote import (
    ModelState,
    Remote,
    RemoteContents,
    RemoteFile,
    Unreached,
    root_url,
    run_all,
)
from headrace.plugins.stores.remote_store import RemoteStore
from headrace.repository.model_files import MANIFEST, digest_of, parse_manifest
from headrace.repository.store import Download, Store, StoreOptions

log = logging.getLogger(__name__)

ARTEFACT_TYPE = "application/vnd.headrace.model.v1"
TITLE = "org.opencontainers.image.title"
_PATHS = (TITLE, "org.cncf.model.filepath", "org.cnai.model.filepath")  # annotations of layers
_PACKED = "io.deis.oras.content.unpack"  # of a directory that ORAS has made an archive of
_DIRECTORY = "application/vnd.oci.image.layer.v1.tar+gzip"  # its type, without that, in Python
_ARCHIVE = re.compile(
    r"application/vnd\.(?:cncf\.model|cnai\.model|kitops\.modelkit|docker\.ai)\..*\.tar(\+.*)?"
)
_SUFFIXES = {None: ".tar", "+gzip": ".tar.gz"}
_BELOW = "files/"  # of the tree with unpacked files, beside whose manifest they may have their own
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


class PackedLayer(NamedTuple):
    """A layer that is an archive: its digest, its bytes, and the suffix of such files."""

    digest: str
    size: int
    suffix: str


class ArtefactFiles(NamedTuple):
    """The files of an artefact by path, and its archives, which have more, by digest."""

    files: dict[str, RemoteFile]
    archives: list[PackedLayer]


def parse_artefact(text: bytes) -> ArtefactFiles:
    """The files and archives of an artefact; raises `LoadFailed`."""
    files: dict[str, RemoteFile] = {}
    archives: list[PackedLayer] = []
    try:
        document = json.loads(text)
        if "manifests" in document:
            raise LoadFailed("it is an index of several, expected one artefact with files")
        for layer in document["layers"]:
            notes, kind = layer.get("annotations") or {}, str(layer.get("mediaType", ""))
            digest, size = str(layer["digest"]), int(layer["size"])
            suffix = _suffix_of(kind, notes)
            path = next((str(notes[name]) for name in _PATHS if notes.get(name)), "")
            if not (path or suffix):
                continue
            if not re.fullmatch("sha256:[0-9a-f]{64}", digest) or size < 0:
                raise LoadFailed(f"{path or kind} has the digest {digest[:80]}, expected sha256")
            if digest in (one.digest for one in archives) if suffix else path in files:
                raise LoadFailed(f"{path or kind} is there twice")
            if suffix:
                archives.append(PackedLayer(digest, size, suffix))
            else:
                files[path] = RemoteFile(size, digest, digest)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise LoadFailed("it is no artefact: its manifest has no form") from None
    if not (files or archives):
        raise LoadFailed(f"none of its layers is a file: none has a title ({TITLE})")
    return ArtefactFiles(files, sorted(archives))


def _suffix_of(kind: str, notes: Mapping[str, Any]) -> str:
    """The suffix of archives like a layer of this type; "" for a file. Raises `LoadFailed`."""
    title = str(notes.get(TITLE, ""))
    if notes.get(_PACKED) == "true" or (
        kind == _DIRECTORY and title and not title.endswith((".gz", ".tgz"))
    ):
        return ".tar.gz"
    found = None if title else _ARCHIVE.fullmatch(kind)
    if found is None:
        return ""
    if found[1] not in _SUFFIXES:
        raise LoadFailed(f"a layer is of the type {kind[:80]}, expected tar or tar+gzip")
    return _SUFFIXES[found[1]]


def _unwrapped(files: Mapping[str, RemoteFile]) -> Mapping[str, RemoteFile]:
    """The files below the only directory, unless that is a version or takes a file's place."""
    tops = {path.partition("/")[0] for path in files}
    top = min(tops, default="")
    if len(tops) != 1 or top in files or top.isdecimal() or top.partition(".")[0] == "model":
        return files
    return {path.removeprefix(f"{top}/"): file for path, file in files.items()}


class OciRemote(Remote):
    """Models of a repository of a registry."""

    def __init__(self, address: str, options: StoreOptions | None = None) -> None:
        """Connects to nothing; raises `LoadFailed`."""
        self.address = address.rstrip("/")
        self.counts = StoreCounts()
        self._options = options or StoreOptions()
        place = read_address(address)
        self._reference = place.reference
        self._own_name = place.repository.rpartition("/")[2] if place.reference else ""
        self._registry = Registry(place.url, place.repository, self.address)
        self._known: dict[str, tuple[str, ModelState]] = {}  # digest of a tag's manifest, and model
        self._trees: dict[str, HeldTree] = {}  # of models with archives
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
                    artefact = parse_artefact(text)
                    size = sum(file.size for file in artefact.files.values())
                    size += sum(layer.size for layer in artefact.archives)
                except LoadFailed:  # which it says when it is loaded: others can be
                    size = 0
                known = digest, ModelState(digest, size)
            found[name] = known

        run_all(look, names.items(), self._stopped)
        self._known = found
        self._trees = {name: tree for name, tree in self._trees.items() if name in found}
        return {name: state for name, (_, state) in found.items()}

    def contents(self, name: str) -> RemoteContents:
        """Implements `Remote.contents`; unpacks archives that are not in the cache."""
        digest, text = self._registry.manifest(self._tag_of(name))
        try:
            artefact = parse_artefact(text)
            files = _unwrapped(artefact.files | self._unpacked(name, artefact))
        except Unreached:
            raise
        except LoadFailed as error:
            raise LoadFailed(f"{self.address}: {name}: {error}") from error
        return self.contents_of(name, files, digest)

    def read(self, name: str, path: str, file: RemoteFile, start: int, stop: int) -> bytes:
        """Implements `Remote.read`."""
        if file.tag.startswith("sha256:"):
            return self._registry.read(file.tag, start, stop)
        if (tree := self._trees.get(name)) is None:
            raise self.changing(name)
        return tree.read(name, file.tag, start, stop)

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
        for tree in self._trees.values():
            tree.stopped.set()

    def _unpacked(self, name: str, artefact: ArtefactFiles) -> dict[str, RemoteFile]:
        """The files in the archives of a model, whose tags are their paths in its tree."""
        if not artefact.archives:
            return {}
        cache = cache_of(self._options.cache, self._options.cache_bytes)
        tree = self._trees.setdefault(name, HeldTree(self, cache, partial(_below, name)))
        state = " ".join(layer.digest for layer in artefact.archives)
        nbytes = sum(layer.size for layer in artefact.archives)
        fill = partial(self._fill, name, artefact.archives, nbytes)
        found = tree.models(state, nbytes, fill)[name].files
        for path in artefact.files.keys() & found.keys():
            raise LoadFailed(f"{path} is there twice")
        return {path: file._replace(tag=path) for path, file in found.items()}

    def _fill(
        self, name: str, archives: Sequence[PackedLayer], nbytes: int, directory: Path
    ) -> None:
        """Download archives, and unpack them once all are here, so that none is fetched again.

        They are locked in the order of their digests: models that share them do not wait in turns.
        """
        log.info(
            "bringing %s from %s: %d archives with %d bytes", name, self.address, len(archives),
            nbytes, extra={"model": name},
        )  # fmt: skip
        files = FileDownloads(cache_of(self._options.cache).contents, self.counts, self._stopped)
        with ExitStack() as fetched:
            drafts = [fetched.enter_context(self._fetched(files, layer)) for layer in archives]
            try:
                opened = map(_opened, archives, drafts)
                most = most_unpacked(nbytes, self._options)
                unpack(opened, directory / _BELOW, most, self._options.archive_files)
            finally:
                for draft in drafts:
                    draft.give_up()

    def _fetched(
        self, files: FileDownloads, layer: PackedLayer
    ) -> AbstractContextManager[PartialFile]:
        what, download = f"{self.address}: {layer.digest}", Download("", layer.size)
        read = partial(files.part, what, partial(self._registry.read, layer.digest), download)
        return files.large(key_of(what), layer.size, what, read, download)

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


def _opened(layer: PackedLayer, draft: PartialFile) -> tuple[str, IO[bytes]]:
    """An archive for `unpack`, if it has its digest."""
    if draft.digest() != layer.digest:
        raise LoadFailed(f"its layer {layer.digest} has another digest")
    return layer.suffix, draft.opened()


def _below(name: str, root: Path, files: Mapping[str, RemoteFile]) -> Mapping[str, HeldModel]:
    """The model in a tree of unpacked files."""
    own = {path.removeprefix(_BELOW): file for path, file in files.items()}
    return {name: HeldModel(root / _BELOW, own)}


def _descriptor(kind: str, digest: str, size: int) -> dict[str, Any]:
    return {"mediaType": kind, "digest": digest, "size": size}


def oci_store(address: str, options: StoreOptions) -> Store:
    """The store with such an address; raises `LoadFailed`."""
    remote = OciRemote(address, options)
    return RemoteStore(remote, options, remote.counts)
