"""Unpacks an archived environment, as a separate program: `python unpack.py ARCHIVE TARGET BYTES`.

Separate from the server, since it may take long, and keeps an interpreter busy. Nothing is written
outside of the target, by name or by link, and the unpacked size is limited.
"""

import sys
import tarfile
import zlib
from collections.abc import Iterator
from pathlib import Path

_MOST_MEMBERS = 2_000_000


class BadArchive(Exception):
    """An invalid archive, or one that must not be unpacked."""


def unpack(archive: Path, target: Path, most_bytes: int) -> None:
    """Unpack a tar archive, compressed or not, into a directory; raises `BadArchive`."""
    if not hasattr(tarfile, "data_filter"):
        raise BadArchive("this Python cannot unpack archives safely; expected 3.11.4 or newer")
    try:
        with tarfile.open(archive, "r:*") as tar:
            tar.extractall(target, members=_bounded(tar, most_bytes), filter="data")
    except tarfile.FilterError as error:
        raise BadArchive(f"a member leads out of the archive: {error}") from error
    except (tarfile.TarError, EOFError, zlib.error) as error:
        raise BadArchive(f"it is no whole tar archive: {error}") from error
    except OSError as error:
        raise BadArchive(f"it cannot be unpacked: {error.strerror or error}") from error


def _bounded(tar: tarfile.TarFile, most_bytes: int) -> Iterator[tarfile.TarInfo]:
    """The members, within the limits."""
    total = 0
    for count, member in enumerate(tar, 1):
        total += member.size
        if total > most_bytes:
            raise BadArchive(f"it holds more than {most_bytes >> 20} MiB")
        if count > _MOST_MEMBERS:
            raise BadArchive(f"it holds more than {_MOST_MEMBERS} files")
        yield member


def main() -> int:
    """Unpack according to the arguments; 1 and a line on standard output on failure."""
    archive, target, most_bytes = sys.argv[1:]
    try:
        unpack(Path(archive), Path(target), int(most_bytes))
    except BadArchive as error:
        print(error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
