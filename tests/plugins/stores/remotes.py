"""Stores elsewhere: their models brought to a cache, and servers that follow them."""

import io
import tarfile
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from headrace.plugins.stores.remote_store import RemoteStore
from headrace.repository.catalogue import open_store
from headrace.repository.model_files import MANIFEST, Digests
from headrace.repository.store import Store, StoreOptions
from tests.support.server_process import ServerProcess, clean_server


def opened_store(address: str, cache: Path, **limits: Any) -> RemoteStore:
    """The store with this address, whose models are brought to a cache, with further options."""
    store = open_store(address, options=StoreOptions(str(cache), **limits))
    assert isinstance(store, RemoteStore)
    return store


def files_of(model: Path) -> dict[str, bytes]:
    """The files of a model but its manifest."""
    files = (path for path in model.rglob("*") if path.is_file() and path != model / MANIFEST)
    return {str(path.relative_to(model)): path.read_bytes() for path in files}


def brought(store: Store, name: str) -> dict[str, bytes]:
    """The files of a model but its manifest, whose digests are compared."""
    store.names()
    lease = store.materialise(name, store.token(name))
    assert Digests().problems(lease.path) == []
    assert (lease.path / MANIFEST).read_bytes()
    return files_of(lease.path)


def tarred(*members: tuple[tarfile.TarInfo | str, bytes], mode: str = "w:gz") -> bytes:
    """A tar archive of these members, with gzip by default."""
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode=mode) as archive:  # type: ignore[call-overload]
        for member, content in members:
            info = tarfile.TarInfo(member) if isinstance(member, str) else member
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return made.getvalue()


def special(name: str, kind: bytes, target: str = "") -> tarfile.TarInfo:
    """A member of an archive that is no plain file."""
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, target
    return info


def following_server(
    address: str, cache: Path, environment: Mapping[str, str] | None = None
) -> AbstractContextManager[ServerProcess]:
    """A server that looks for changes of a store every second."""
    options = (
        f"--store-cache={cache}", "--model-control-mode=poll", "--repository-poll-secs=1",
    )  # fmt: skip
    return clean_server(address, options=options, environment=environment)
