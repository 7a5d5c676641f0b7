"""The Hugging Face Hub as a store: `hf://ORG/REPO[@REVISION]`, through `huggingface_hub`.

A repository is one model, named like it. If it has the layout of a model directory, that is the
model; otherwise the file of a known format is, with the files of its weights, and the rest of the
repository is not fetched. One request tells the commit, and size and digest of every file; files
are read at that commit, so that a push in between changes nothing.

Endpoint and token are those that the library finds: `HF_ENDPOINT`, `HF_TOKEN`, or `hf auth login`.
"""

import os
import re
from collections.abc import Mapping
from typing import Any

from headrace.core.errors import LoadFailed
from headrace.plugins.stores.remote import (
    ModelState,
    Remote,
    RemoteContents,
    RemoteFile,
    Unreached,
    client_errors,
    needed,
)
from headrace.plugins.stores.remote_store import RemoteStore
from headrace.repository.layout import MODEL_SUFFIXES
from headrace.repository.model_files import MANIFEST
from headrace.repository.store import Store, StoreOptions

_ADDRESS = re.compile(r"hf://(\w[\w.-]*/(\w[\w.-]*))(?:@([^@?#]+))?/?", re.ASCII)
_TIMEOUT_SECS = 120.0
# Files at the top by which a repository is seen to be a model directory.
_WHOLE = ("config.pbtxt", "model.py", "MLmodel", MANIFEST)
_FOLDERS = ("", "onnx/")  # where exporters put a model's file


def served_files(paths: Mapping[str, object]) -> dict[str, str]:
    """The files of a repository that make a model, by their path in its directory.

    Raises `LoadFailed` if there is no model in it, or more than one.
    """
    plain = [path for path in paths if not any(part.startswith(".") for part in path.split("/"))]
    if any(path in _WHOLE or path.partition("/")[0].isdecimal() for path in plain):
        return {path: path for path in plain}
    for folder in _FOLDERS:
        beside = [path for path in plain if path.rpartition("/")[0] == folder.rstrip("/")]
        found = [path for path in beside if path.endswith(MODEL_SUFFIXES)]
        named = [path for path in found if path.startswith(f"{folder}model.")]
        if len(named or found) > 1:
            raise LoadFailed(f"it has several models: {', '.join(sorted(named or found)[:5])}")
        for path in named or found:
            # ONNX files have the names of those with their weights in them, by custom their own.
            stem = path.rpartition(".")[0]
            weights = [one for one in beside if re.match(rf"{re.escape(stem)}\.\w+[._]data", one)]
            return {one.removeprefix(folder): one for one in (path, *weights)}
    raise LoadFailed(
        f"no file of a known format: expected one of {', '.join(MODEL_SUFFIXES)}, or a model"
        f" directory; found {', '.join(sorted(plain)[:5]) or 'nothing'}"
    )


class HubRemote(Remote):
    """A model of the Hub."""

    publishing = "use hf upload"

    def __init__(self, address: str) -> None:
        """Connects to nothing; raises `LoadFailed`."""
        found = _ADDRESS.fullmatch(address)
        if found is None:
            raise LoadFailed(f"{address}: expected hf://ORG/REPO[@REVISION]")
        with needed("models of the Hub", "huggingface_hub: headrace[huggingface]"):
            import huggingface_hub
        self.address = address.rstrip("/")
        self._repository, self._name, self._revision = found.groups()
        self._endpoint = os.environ.get("HF_ENDPOINT") or None
        self._library: Any = huggingface_hub
        self._api = huggingface_hub.HfApi(endpoint=self._endpoint)
        self._urls: dict[tuple[str, str], str] = {}  # of files, by path and tag

    def models(self) -> Mapping[str, ModelState]:
        """Implements `Remote.models`."""
        try:
            files = self._files()
        except Unreached:
            raise
        except LoadFailed as error:
            raise Unreached(f"{self.address} cannot be used: {error}") from error
        return {self._name: ModelState.of(files)}

    def contents(self, name: str) -> RemoteContents:
        """Implements `Remote.contents`."""
        if name != self._name:
            raise self.not_there(name)
        return self.contents_of(name, self._files())

    def read(self, name: str, path: str, file: RemoteFile, start: int, stop: int) -> bytes:
        """Implements `Remote.read`."""
        url = self._urls.get((path, file.tag))
        if url is None:
            raise self.changing(name)
        utils = self._library.utils
        headers = {**utils.build_hf_headers(), "Range": f"bytes={start}-{stop - 1}"}
        with client_errors(self.address):
            answer = utils.get_session().get(url, headers=headers, timeout=_TIMEOUT_SECS)
            utils.hf_raise_for_status(answer)
            content = bytes(answer.content)
        return content if answer.status_code == 206 else content[start:stop]

    def _files(self) -> dict[str, RemoteFile]:
        """The files of the model as of now, by path; raises `LoadFailed`."""
        with client_errors(self.address):
            info = self._api.model_info(
                self._repository, revision=self._revision, files_metadata=True,
                timeout=_TIMEOUT_SECS,
            )  # fmt: skip
        there = {each.rfilename: each for each in info.siblings or ()}
        files: dict[str, RemoteFile] = {}
        urls: dict[tuple[str, str], str] = {}
        for path, own in served_files(there).items():
            told = there[own]
            digest = f"sha256:{told.lfs.sha256}" if told.lfs else ""
            files[path] = RemoteFile(told.size or 0, digest or str(told.blob_id), digest)
            urls[path, files[path].tag] = self._library.hf_hub_url(
                self._repository, own, revision=info.sha, endpoint=self._endpoint
            )
        self._urls = urls
        return files


def hub_store(address: str, options: StoreOptions) -> Store:
    """The store with such an address; raises `LoadFailed`."""
    return RemoteStore(HubRemote(address), options)
