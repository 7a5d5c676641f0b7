"""MLflow's model registry as a store: `mlflow://HOST[:PORT]/models/NAME/VERSION`, or `…/ALIAS`.

A version of a registered model is one model, named like it. The registry is asked for the version
that an alias stands for, and where its files are; those are downloaded as a whole by MLflow's own
client, from wherever its server keeps them, to a tree of the cache. MLflow tells no digests; sizes
are compared with its list.

Credentials are those of the client: `MLFLOW_TRACKING_USERNAME`, `MLFLOW_TRACKING_TOKEN` and so on.
"""

import hashlib
import logging
import os
import re
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote

from headrace.core.errors import LoadFailed
from headrace.plugins.stores.cache import StoreCache, cache_of
from headrace.plugins.stores.download import StoreCounts
from headrace.plugins.stores.held_tree import HeldModel, HeldTree
from headrace.plugins.stores.remote import (
    ModelState,
    Remote,
    RemoteContents,
    RemoteFile,
    Unreached,
    client_errors,
    needed,
    root_url,
)
from headrace.plugins.stores.remote_store import RemoteStore
from headrace.repository.store import Store, StoreOptions

log = logging.getLogger(__name__)

_ADDRESS = re.compile(r"mlflow://(https?://)?([^/@]+)/models/([^/?#]+)/([^/?#]+)/?")
# Which the client reads from the environment alone. By default it tries for minutes, while a store
# is asked again after a pause.
_SETTINGS = {
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1", "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
}  # fmt: skip


class RegisteredVersion(NamedTuple):
    """A version of a registered model: a text that changes with it, and where its files are.

    `folder` is its number, and the first part of the paths in `sizes`, bytes of each file.
    """

    state: str
    uri: str
    folder: str
    sizes: Mapping[str, int]


class MlflowRemote(Remote):
    """A model of a registry."""

    publishing = "register a version with MLflow"

    def __init__(self, address: str, cache: StoreCache) -> None:
        """Connects to nothing; raises `LoadFailed`."""
        found = _ADDRESS.fullmatch(address)
        if found is None:
            raise LoadFailed(
                f"{re.sub('//[^/@]*@', '//', address)}: expected mlflow://HOST/models/NAME/VERSION"
                " or …/ALIAS, or mlflow://http://HOST:PORT/models/…"
            )
        for name, value in _SETTINGS.items():
            os.environ.setdefault(name, value)
        with needed("models of a registry of MLflow", "mlflow-skinny: headrace[mlflow]"):
            from mlflow import MlflowClient
            from mlflow.store.artifact import artifact_repository_registry as artifacts
        scheme, host, name, self._version = found.groups("")
        self.address = address.rstrip("/")
        self.counts = StoreCounts()
        self._name = unquote(name)
        self._url = root_url(scheme, host)
        self._client: Any = MlflowClient(self._url)
        self._artifacts: Any = artifacts
        self._listed: tuple[str, RegisteredVersion] | None = None
        self._tree = HeldTree(self, cache, lambda root, files: {self._name: HeldModel(root, files)})

    def models(self) -> Mapping[str, ModelState]:
        """Implements `Remote.models`."""
        found = self._registered()
        return {self._name: ModelState(found.state, sum(found.sizes.values()))}

    def contents(self, name: str) -> RemoteContents:
        """Implements `Remote.contents`; downloads a version that is not in the cache."""
        if name != self._name:
            raise self.not_there(name)
        found = self._registered()
        nbytes = sum(found.sizes.values())
        models = self._tree.models(found.state, nbytes, partial(self._fill, found))
        return self.contents_of(name, models[name].files, found.state)

    def read(self, name: str, path: str, file: RemoteFile, start: int, stop: int) -> bytes:
        """Implements `Remote.read`."""
        return self._tree.read(name, path, start, stop)

    def close(self) -> None:
        """Implements `Remote.close`."""
        self._tree.stopped.set()

    def _registered(self) -> RegisteredVersion:
        """The version as of now; its files are only listed if it is another one than before."""
        with client_errors(self.address):
            if self._version.isdecimal():
                version = self._client.get_model_version(self._name, self._version)
            else:
                version = self._client.get_model_version_by_alias(self._name, self._version)
            told = f"{version.version} {version.source} {version.run_id}"
            if self._listed is None or self._listed[0] != told:
                uri = self._client.get_model_version_download_uri(self._name, version.version)
                folder = str(version.version)
                sizes = {
                    f"{folder}/{path}": size for path, size in self._sizes(self._place(uri), "")
                }
                text = f"{told} {sorted(sizes.items())}"
                state = hashlib.sha256(text.encode()).hexdigest()[:32]
                self._listed = told, RegisteredVersion(state, uri, folder, sizes)
        if not self._listed[1].sizes:
            raise Unreached(f"{self.address} cannot be used: its version has no files")
        return self._listed[1]

    def _place(self, uri: str) -> Any:
        """The client's access to files."""
        return self._artifacts.get_artifact_repository(uri, tracking_uri=self._url)

    def _sizes(self, place: Any, folder: str) -> Iterator[tuple[str, int]]:
        """Path and bytes of each file in a folder and below."""
        for found in place.list_artifacts(folder or None):
            if found.is_dir:
                yield from self._sizes(place, found.path)
            else:
                yield found.path, found.file_size or 0

    def _fill(self, found: RegisteredVersion, directory: Path) -> None:
        """Download all files of a version."""
        nbytes = sum(found.sizes.values())
        log.info("bringing %s: %d files with %d bytes", self.address, len(found.sizes), nbytes)
        target = directory / found.folder
        target.mkdir()
        with client_errors(self.address):
            self._place(found.uri).download_artifacts("", str(target))
        self.counts.read_bytes += nbytes
        for path, size in found.sizes.items():
            here = directory / path
            if not here.is_file() or here.stat().st_size != size:
                raise LoadFailed(f"{self.address}: {path} did not come with its {size} bytes")


def mlflow_store(address: str, options: StoreOptions) -> Store:
    """The store with such an address; raises `LoadFailed`."""
    remote = MlflowRemote(address, cache_of(options.cache, options.cache_bytes))
    return RemoteStore(remote, options, remote.counts)
