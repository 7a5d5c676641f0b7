"""Manifests: what the files of a model, or of a version, hold when they are complete.

    {"files": {"1/model.onnx": "sha256:9f86d0…", "config.pbtxt": "sha256:60303a…"}}

Such a file, `headrace-manifest.json`, lies in the directory that its paths begin at: a model's or a
version's. Where there is one, the model is loaded only when every file that it names is there and
has its digest. Whatever copies the files, in whatever order and with whatever pauses, a half of
them is never loaded. What it does not name is not checked.
"""

import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path, PurePosixPath

from headrace.core.errors import LoadFailed
from headrace.repository.fingerprint import files_below
from headrace.repository.stamps import Stamp, stamp_of

NAME = "headrace-manifest.json"
_LARGEST = 16 << 20  # bytes of a manifest
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_TOLD = 3  # of the files that are wrong, so that a message stays short


class Digests:
    """What files hold, each read again only when its state has changed. For any thread.

    To be kept for as long as models are loaded.
    """

    def __init__(self) -> None:
        self._known: dict[Path, tuple[Stamp, str]] = {}

    def of(self, path: Path) -> str | None:
        """The digest of a file, None if it is not there or is being written."""
        stamp = stamp_of(path)
        if stamp is None:
            return None
        known = self._known.get(path)
        if known is not None and known[0] == stamp:
            return known[1]
        try:
            with path.open("rb") as file:
                digest = f"sha256:{hashlib.file_digest(file, 'sha256').hexdigest()}"
        except (FileNotFoundError, IsADirectoryError, PermissionError):
            return None
        if stamp_of(path) != stamp:
            return None
        self._known[path] = stamp, digest
        return digest

    def verified(self, directory: Path, versions: Iterable[int]) -> Mapping[str, str]:
        """The digests of all files that a model's manifests name, by path from its directory.

        Files of other versions than those given are left out. Raises `LoadFailed` if one is not
        there or holds something else, or for a manifest that makes no sense.
        """
        chosen = {str(number) for number in versions}
        found: dict[str, str] = {}
        wrong: list[str] = []
        for prefix in ("", *sorted(chosen)):
            for name, digest in read_manifest(directory / prefix).items():
                path = str(PurePosixPath(prefix, name))
                first = PurePosixPath(path).parts[0]
                if first.isdecimal() and first not in chosen:
                    continue
                wrong += self._problem(directory, path, digest)
                found[path] = digest
        if wrong:
            more = f"; and {len(wrong) - _TOLD} more" if len(wrong) > _TOLD else ""
            raise LoadFailed(f"{NAME}: {'; '.join(wrong[:_TOLD])}{more}")
        return found

    def problems(self, directory: Path) -> list[str]:
        """What is wrong with the files that one manifest names; raises as `verified` does."""
        named = read_manifest(directory)
        return [text for n, d in named.items() for text in self._problem(directory, n, d)]

    def _problem(self, directory: Path, name: str, expected: str) -> Iterator[str]:
        try:
            digest = self.of(directory / name)
        except OSError as error:
            yield f"{name} cannot be read: {error.strerror}"
            return
        if digest is None:
            yield f"{name} is not there, or is being written"
        elif digest != expected:
            yield f"{name} does not hold what it is to hold"


def read_manifest(directory: Path) -> Mapping[str, str]:
    """The digests that a directory's manifest gives, by path; none without one.

    Raises `LoadFailed`.
    """
    try:
        with (directory / NAME).open("rb") as file:
            text = file.read(_LARGEST + 1)
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except OSError as error:
        raise LoadFailed(f"{NAME} cannot be read: {error.strerror}") from error
    if len(text) > _LARGEST:
        raise LoadFailed(f"{NAME} is larger than {_LARGEST} bytes")
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        raise LoadFailed(f"{NAME} is no JSON, or not all of it is there") from None
    files = document.get("files") if isinstance(document, dict) else None
    if not isinstance(files, dict):
        raise LoadFailed(f'{NAME}: expected an object with the member "files", an object')
    for name, digest in files.items():
        if not (isinstance(digest, str) and _DIGEST.fullmatch(digest)):
            raise LoadFailed(f"{NAME}: {name!r}: expected sha256: and 64 hexadecimal digits")
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts or not path.parts or not _is_name(name):
            raise LoadFailed(f"{NAME}: {name!r} is no path within its directory")
    return files


def _is_name(text: str) -> bool:
    """Whether it is text, without what no path has."""
    return "\0" not in text and not any("\ud800" <= c <= "\udfff" for c in text)


def write_manifest(directory: Path) -> Mapping[str, str]:
    """Make the manifest of a directory as it is now, in place of any other; what it says.

    Raises `LoadFailed` for a file that cannot be read.
    """
    digests = Digests()
    files: dict[str, str] = {}
    for name in files_below(directory):
        if name != NAME:
            digest = digests.of(directory / name)
            if digest is None:
                raise LoadFailed(f"{directory / name} cannot be read, or is being written")
            files[name] = digest
    written = directory / f".{NAME}.{os.getpid()}"
    try:
        written.write_text(json.dumps({"files": files}, indent=2) + "\n", encoding="utf-8")
        written.replace(directory / NAME)
    finally:
        written.unlink(missing_ok=True)
    return files
