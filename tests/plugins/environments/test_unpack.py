"""Archives: accepted and refused members."""

import io
import tarfile
from pathlib import Path

import pytest

from headrace.plugins.environments.unpack import BadArchive, unpack

MOST = 1000
pytestmark = pytest.mark.skipif(
    not hasattr(tarfile, "data_filter"), reason="archives are unpacked from Python 3.11.4 on"
)


def archive(path: Path, *members: tuple[str, bytes | str]) -> Path:
    """An archive of files, or of links where the content is a target."""
    with tarfile.open(path, "w:gz") as tar:
        for name, content in members:
            info = tarfile.TarInfo(name)
            info.mode = 0o755
            if isinstance(content, str):
                info.type, info.linkname = tarfile.SYMTYPE, content
                tar.addfile(info)
            else:
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))
    return path


def test_files_and_links_within(tmp_path: Path) -> None:
    packed = archive(tmp_path / "a.tar.gz", ("bin/python3", b"x"), ("bin/python", "python3"))
    unpack(packed, tmp_path / "to", MOST)
    assert (tmp_path / "to" / "bin" / "python").read_bytes() == b"x"
    assert (tmp_path / "to" / "bin" / "python").stat().st_mode & 0o111
    # An absolute path stays within.
    unpack(archive(tmp_path / "a.tar.gz", ("/etc/x", b"x")), tmp_path / "to", MOST)
    assert (tmp_path / "to" / "etc" / "x").exists()


@pytest.mark.parametrize(
    ("member", "says"),
    [
        (("../out", b"x"), "leads out"), (("a/../../out", b"x"), "leads out"),
        (("link", "../out"), "leads out"), (("link", "/etc/passwd"), "leads out"),
        (("big", bytes(MOST + 1)), "holds more than"),
    ],
)  # fmt: skip
def test_refused_members(member: tuple[str, bytes | str], says: str, tmp_path: Path) -> None:
    packed = archive(tmp_path / "a.tar.gz", ("good", b"x"), member)
    with pytest.raises(BadArchive, match=says):
        unpack(packed, tmp_path / "to", MOST)
    assert not (tmp_path / "out").exists()


def test_files_that_are_not_archives(tmp_path: Path) -> None:
    good = archive(tmp_path / "a.tar.gz", ("x", bytes(range(256)) * 3)).read_bytes()
    for number, content in enumerate([b"", b"text", good[:60], good[:30] + b"\xff" * 30]):
        path = tmp_path / f"{number}.tar.gz"
        path.write_bytes(content)
        with pytest.raises(BadArchive, match=r"no whole tar archive|cannot be unpacked"):
            unpack(path, tmp_path / "to", MOST)
