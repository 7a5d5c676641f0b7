"""A real PostgreSQL (Debian's, or another that is installed) on a free port, in a new directory."""

import os
import pwd
import shutil
import signal
import subprocess
import tempfile
from itertools import count
from pathlib import Path
from typing import Self

import psycopg
import pytest

from tests.support.scrape import until

PASSWORD = "a-password-that-nobody-may-see"
_PLACES = "/usr/lib/postgresql/*/bin"


def programs() -> Path:
    """The directory of the programs; skips the test without them."""
    found = sorted(Path("/").glob(f"{_PLACES[1:]}/initdb"))
    if found:
        return found[-1].parent
    if initdb := shutil.which("initdb"):
        return Path(initdb).parent
    pytest.skip("PostgreSQL is not installed")


class Postgres:
    """The server."""

    def __init__(self, port: int) -> None:
        self._programs = programs()
        self._port = port
        self._databases = count()
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self._folder = Path(tempfile.mkdtemp(prefix="headrace-postgres-"))
        # It refuses to run as root.
        user = "postgres" if os.geteuid() == 0 else None
        if user is not None:
            try:
                account = pwd.getpwnam(user)
            except KeyError:
                pytest.skip("PostgreSQL does not run as root, and there is no user postgres")
            os.chown(self._folder, account.pw_uid, account.pw_gid)
        self._user = user
        secret = self._folder / "password"
        secret.write_text(PASSWORD)
        secret.chmod(0o644)
        subprocess.run(
            [
                self._programs / "initdb", "--no-sync", "--auth=scram-sha-256",
                "--username=somebody", f"--pwfile={secret}", "-E", "UTF8", self._folder / "data",
            ],
            check=True, capture_output=True, user=user, cwd=self._folder,
        )  # fmt: skip
        self.start()
        return self

    def database(self) -> str:
        """The address, with the password, of a new database."""
        name = f"d{next(self._databases)}"
        at = f"postgresql://somebody:{PASSWORD}@127.0.0.1:{self._port}"
        with psycopg.connect(f"{at}/postgres", autocommit=True) as connection:
            connection.execute(f"CREATE DATABASE {name}".encode())
        return f"{at}/{name}"

    def start(self) -> None:
        """Start the server on its directory."""
        self._process = subprocess.Popen(
            [
                self._programs / "postgres", "-D", self._folder / "data", "-p", str(self._port),
                "-c", "listen_addresses=127.0.0.1", "-c", "fsync=off",
                "-c", f"unix_socket_directories={self._folder}",
            ],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, user=self._user,
            cwd=self._folder,
        )  # fmt: skip
        ready: list[str | Path]
        ready = [self._programs / "pg_isready", "-h", "127.0.0.1", "-p", str(self._port), "-q"]
        until(lambda: subprocess.run(ready).returncode == 0, "PostgreSQL to be ready")

    def stop(self) -> None:
        """Stop it at once; its clients lose their connections."""
        assert self._process is not None
        self._process.send_signal(signal.SIGINT)  # a fast shutdown
        self._process.wait(60)

    def __exit__(self, *_: object) -> None:
        self.stop()
        shutil.rmtree(self._folder)
