"""Unix sockets of servers: permissions, files of other servers, and removal."""

import os
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.doors.listeners import UnixSocket, port_of, user_of


@pytest.fixture
def strict_umask() -> Iterator[None]:
    before = os.umask(0o077)
    yield
    os.umask(before)


@pytest.mark.usefixtures("strict_umask")
def test_permissions_do_not_depend_on_the_umask(tmp_path: Path) -> None:
    made = UnixSocket(f"{tmp_path}/a", 0o666)
    with made.listener:
        assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o666
        assert port_of([made.listener]) == 0


def test_the_user_of_a_client(tmp_path: Path) -> None:
    made = UnixSocket(f"{tmp_path}/a", 0o600)
    with made.listener, socket.socket(socket.AF_UNIX) as client:
        client.connect(made.path)
        with made.listener.accept()[0] as accepted:
            assert user_of(accepted) == f"unix:{os.geteuid()}"


def test_a_socket_in_use_is_not_replaced(tmp_path: Path) -> None:
    made = UnixSocket(f"{tmp_path}/a", 0o600)
    with made.listener:
        with pytest.raises(OSError, match="in use"):
            UnixSocket(made.path, 0o600)
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(made.path)  # the first one still listens


def test_a_socket_whose_queue_is_full_is_in_use(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as client:
        listener.bind(f"{tmp_path}/a")
        listener.listen(0)
        client.connect(f"{tmp_path}/a")
        with pytest.raises(OSError, match="in use"):
            UnixSocket(f"{tmp_path}/a", 0o600)


def test_a_socket_left_behind_is_replaced(tmp_path: Path) -> None:
    left = UnixSocket(f"{tmp_path}/a", 0o600)
    left.listener.close()
    made = UnixSocket(left.path, 0o600)
    with made.listener, socket.socket(socket.AF_UNIX) as client:
        client.connect(made.path)
        made.remove()
        assert not os.path.lexists(made.path)


def test_only_the_own_file_is_removed(tmp_path: Path) -> None:
    first = UnixSocket(f"{tmp_path}/a", 0o600)
    with first.listener:
        os.unlink(first.path)
        second = UnixSocket(first.path, 0o600)
        first.remove()
        assert os.path.lexists(second.path)
    second.remove()
    second.listener.close()
    third = UnixSocket(first.path, 0o600)  # its number may be that of the second
    second.remove()
    assert os.path.lexists(third.path)
    third.listener.close()


@pytest.mark.parametrize("kind", ["file", "link", "folder"])
def test_other_files_are_refused(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "a"
    if kind == "file":
        path.write_text("precious")
    elif kind == "link":
        path.symlink_to(tmp_path / "elsewhere")
    else:
        path.mkdir()
    with pytest.raises(FileExistsError, match="not a socket"):
        UnixSocket(str(path), 0o600)
    assert os.path.lexists(path)


def test_paths_that_cannot_be_had(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        UnixSocket(f"{tmp_path}/missing/a", 0o600)
    with pytest.raises(OSError, match="too long"):
        UnixSocket(f"{tmp_path}/{'a' * 200}", 0o600)
    assert list(tmp_path.iterdir()) == []
