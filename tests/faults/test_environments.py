"""A server that ends, or runs out of time, while it builds an environment."""

import asyncio
import signal
import sys
from pathlib import Path

import psutil
import pytest

from tests.models.environments import parameter, write_telling_model, write_wheelhouse
from tests.support.command import FREE_PORTS, run
from tests.support.server_process import ServerProcess
from tests.support.watching import until

# An interpreter that does not answer uv, which asks with -B, while there is a certain file.
STALLING = """#!/bin/sh
case "$*" in
    *-B*)
        if [ -e {folder}/stall ]; then
            sleep 600 &
            echo $$ $! > {folder}/draft
            mv {folder}/draft {folder}/building
            wait
        fi ;;
esac
exec {python} "$@"
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A repository with a model whose environment takes for ever to build."""
    write_wheelhouse(tmp_path / "wheels")
    python = tmp_path / "python"
    python.write_text(STALLING.format(folder=tmp_path, python=sys.executable))
    python.chmod(0o755)
    model = write_telling_model(tmp_path / "repository", "told", parameter("python", str(python)))
    (model / "requirements.txt").write_text("flavour==1.0")
    (tmp_path / "stall").write_text("")
    return tmp_path


def options(folder: Path) -> list[str]:
    return [f"--environment-cache={folder}/cache", f"--wheelhouse={folder}/wheels"]


def runs(pid: int) -> bool:
    """True if a process runs; unreaped ones count as ended."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.slow
@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 0), (signal.SIGKILL, -9)])
def test_a_build_ends_with_the_server_and_is_repeated(
    number: int, status: int, folder: Path
) -> None:
    async def building() -> bool:
        return (folder / "building").exists()

    async def alive() -> bool:
        pids = map(int, (folder / "building").read_text().split())
        return any(runs(pid) for pid in pids)

    async def scenario() -> None:
        repository, given = folder / "repository", options(folder)
        with ServerProcess(repository, options=given, wait=False) as server:
            await until(building, bool)
            assert server.stop(number) == status
            assert "Traceback" not in server.log
        await until(alive, lambda found: not found)
        (folder / "stall").unlink()
        with ServerProcess(repository, options=given) as server:
            server.await_logged("built the environment of told")

    asyncio.run(scenario())


@pytest.mark.slow
def test_a_build_that_takes_too_long(folder: Path) -> None:
    given = [*options(folder), "--environment-build-timeout-secs=1", *FREE_PORTS]
    done = run("serve", "--model-repository", str(folder / "repository"), *given)
    assert done.returncode == 1
    assert "its environment could not be built: uv venv was ended after 1 s" in done.stderr
    assert list((folder / "cache").iterdir()) == []
