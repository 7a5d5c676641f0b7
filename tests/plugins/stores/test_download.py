"""Downloads of files in parts."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from threading import Event

import pytest

from headrace.core.errors import LoadFailed
from headrace.plugins.stores import remote as remote_module
from headrace.plugins.stores.contents import PART, CachedContents, CacheDirectory
from headrace.plugins.stores.download import FileDownloads, StoreCounts
from headrace.plugins.stores.remote import Unreached
from headrace.repository.store import Download

CONTENT = bytes(range(256)) * (2 * PART // 256) + b"end"


class Source:
    """A file in memory, whose parts cannot be read the first `failures` times."""

    def __init__(self, failures: int = 0) -> None:
        self.failures = failures
        self.reads: list[int] = []

    def read(self, start: int, stop: int) -> bytes:
        self.reads.append(start)
        if self.reads.count(start) <= self.failures:
            raise Unreached("memory:one cannot be reached: busy")
        return CONTENT[start:stop]


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> StoreCounts:
    monkeypatch.setattr(remote_module, "_FIRST_PAUSE_SECS", 0.001)
    return StoreCounts()


@pytest.fixture
def files(counts: StoreCounts, tmp_path: Path) -> FileDownloads:
    directory = CacheDirectory(tmp_path)
    directory.make()
    return FileDownloads(CachedContents(directory), counts, Event())


Fetch = Callable[[Source], bytes]


@pytest.fixture
def fetch(files: FileDownloads) -> Fetch:
    """Fetches the file with its parts."""

    def whole(source: Source) -> bytes:
        size = len(CONTENT)
        download = Download("m", size)
        read = partial(files.part, "memory:one: a", source.read, download)
        with files.large("key", size, "m: a", read, download) as draft:
            assert download.done == size
            with draft.opened() as file:
                return file.read()

    return whole


def test_a_part_is_tried_several_times(fetch: Fetch, counts: StoreCounts) -> None:
    source = Source(failures=2)
    assert fetch(source) == CONTENT
    assert sorted(source.reads) == sorted([0, PART, 2 * PART] * 3)
    assert counts.read_bytes == len(CONTENT)


def test_a_part_that_keeps_failing_is_an_error(fetch: Fetch) -> None:
    with pytest.raises(Unreached, match="memory:one cannot be reached: busy"):
        fetch(Source(failures=3))


def test_parts_that_are_here_are_not_read_again(fetch: Fetch, counts: StoreCounts) -> None:
    assert fetch(Source()) == CONTENT
    again = Source()
    assert fetch(again) == CONTENT
    assert again.reads == []
    assert counts.read_bytes == len(CONTENT)


def test_a_part_of_another_length_is_refused(files: FileDownloads, counts: StoreCounts) -> None:
    download = Download("m", 3)
    with pytest.raises(LoadFailed, match=r"^memory:one: a: 2 bytes came in place of 3$"):
        files.part("memory:one: a", lambda start, stop: b"ab", download, 0, 3)
    assert files.part("memory:one: a", Source().read, download, 3, 3) == b""
    assert (counts.read_bytes, download.done) == (0, 0)
