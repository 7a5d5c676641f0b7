"""Web servers as stores: `https://HOST/PATH/`, a directory of models with an index.

    {"models": {"fraud": {"manifest": "sha256:…", "sizes": {"1/model.onnx": 217}}}}

The index, `headrace-index.json`, is written last, by `headrace models index`: a model is what the
manifest of that digest lists. Any server of files will do; one that sends tags is only asked if the
index has changed, and one that does not answer with parts of files cannot offer large ones.
"""

import json
from collections.abc import Mapping
from typing import NamedTuple
from urllib.parse import urlsplit

from headrace.core.errors import LoadFailed
from headrace.plugins.stores.archives import SUFFIXES, archive_store
from headrace.plugins.stores.objects import library, library_errors, opened_site
from headrace.plugins.stores.remote import (
    ModelState,
    Remote,
    RemoteContents,
    RemoteFile,
    unreached,
)
from headrace.plugins.stores.remote_store import RemoteStore
from headrace.repository.model_files import INDEX, MANIFEST, digest_of, parse_manifest
from headrace.repository.store import Store, StoreOptions


class IndexedModel(NamedTuple):
    """A model in an index: the digest of its manifest, and bytes by path."""

    manifest: str
    sizes: Mapping[str, int]


def parse_index(text: bytes) -> dict[str, IndexedModel]:
    """The models of an index; raises `LoadFailed`."""
    try:
        models = json.loads(text)["models"]
        return {
            str(name): IndexedModel(
                str(told["manifest"]), {str(path): int(n) for path, n in told["sizes"].items()}
            )
            for name, told in models.items()
            if name and not name.startswith(".") and "/" not in name
        }
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise LoadFailed(f"{INDEX} is no index: headrace models index writes one") from None


class WebRemote(Remote):
    """Models of a web server."""

    publishing = "push to the directory that is served, and write its index (headrace models index)"

    def __init__(self, address: str) -> None:
        """Connects to nothing; raises `LoadFailed`."""
        self.address, self._store = opened_site(address)
        self._library = library()
        self._read: tuple[str, dict[str, IndexedModel]] | None = None  # with the tag of the index

    def models(self) -> Mapping[str, ModelState]:
        """Implements `Remote.models`."""
        return {
            name: ModelState(told.manifest, sum(told.sizes.values()))
            for name, told in self._index().items()
        }

    def contents(self, name: str) -> RemoteContents:
        """Implements `Remote.contents`."""
        told = self._index().get(name)
        if told is None:
            raise self.not_there(name)
        with library_errors(self.address):
            manifest = bytes(self._library.get(self._store, f"{name}/{MANIFEST}").bytes())
        digests = parse_manifest(manifest)
        if digest_of(manifest) != told.manifest or digests.keys() != told.sizes.keys():
            raise self.changing(name)
        files = {path: RemoteFile(told.sizes[path], own, own) for path, own in digests.items()}
        return RemoteContents(told.manifest, files, manifest)

    def read(self, name: str, path: str, file: RemoteFile, start: int, stop: int) -> bytes:
        """Implements `Remote.read`."""
        with library_errors(self.address):
            key = f"{name}/{path}"
            given = {} if stop - start == file.size else {"range": (start, stop)}
            return bytes(self._library.get(self._store, key, options=given).bytes())

    def _index(self) -> dict[str, IndexedModel]:
        """The index as of now, which is not sent if it has its tag still."""
        known = self._read
        given = {"if_none_match": known[0]} if known is not None and known[0] else {}
        with library_errors(self.address):
            try:
                found = self._library.get(self._store, INDEX, options=given)
                text, tag = bytes(found.bytes()), found.meta["e_tag"] or ""
            except self._library.exceptions.NotModifiedError:
                assert known is not None, "an answer without a question. This is a bug."
                return known[1]
            except FileNotFoundError as error:
                why = f"there is no {INDEX}, which headrace models index writes"
                raise unreached(self.address, why) from error
        self._read = tag, parse_index(text)
        return self._read[1]


def web_store(address: str, options: StoreOptions) -> Store:
    """The store with such an address, also of an archive; raises `LoadFailed`."""
    if urlsplit(address).path.endswith(SUFFIXES):
        return archive_store(address, options)
    return RemoteStore(WebRemote(address), options)
