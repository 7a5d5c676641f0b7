"""A real MariaDB (Debian's, or another that is installed) on a free port, in a new directory."""

import os
import shutil
import subprocess
import tempfile
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any, Self

import pymysql
import pytest

from tests.support.scrape import until


class MariaDb:
    """The server, which asks nobody who it is."""

    def __init__(self, port: int) -> None:
        """Skips the test if the server is not installed."""
        program = shutil.which("mariadbd")
        if program is None:
            pytest.skip("MariaDB is not installed")
        self._program = program
        self._port = port
        self._databases = count()
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self._folder = Path(tempfile.mkdtemp(prefix="headrace-mariadb-"))
        (self._folder / "data").mkdir()
        self._process = subprocess.Popen(
            [
                self._program, "--no-defaults", "--skip-grant-tables", "--skip-networking=0",
                "--bind-address=127.0.0.1", f"--port={self._port}",
                f"--datadir={self._folder / 'data'}", f"--socket={self._folder / 'socket'}",
                f"--pid-file={self._folder / 'pid'}",
                *(["--user=root"] if os.geteuid() == 0 else []),
            ],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        until(self._answers, "MariaDB to be ready")
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process is not None
        self._process.terminate()
        self._process.wait(60)
        shutil.rmtree(self._folder)

    def database(self, password: str) -> str:
        """The address, with a password, of a new database."""
        name = f"d{next(self._databases)}"
        with self._connected() as connection, connection.cursor() as cursor:
            cursor.execute(f"CREATE DATABASE {name}")
        return f"mysql://somebody:{password}@127.0.0.1:{self._port}/{name}"

    def _connected(self) -> Any:
        return pymysql.connect(host="127.0.0.1", port=self._port, user="somebody")

    def _answers(self) -> bool:
        with suppress(pymysql.err.OperationalError):
            self._connected().close()
            return True
        return False
