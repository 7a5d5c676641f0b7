"""The start of Tritons, with a program that ends at once."""

import asyncio
import shutil
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from headrace.core.errors import LoadFailed
from headrace.core.model_spec import LoadSpec
from headrace.placement.upstream.triton_options import TritonOptions
from headrace.plugins.triton.servers import TritonServers
from headrace.protocol.pb.model_config_pb2 import ModelConfig
from tests.support.scrape import until


def problem(servers: TritonServers, root: Path) -> str:
    """Reason why a model cannot be placed."""
    with pytest.raises((LoadFailed, ValueError)) as raised:
        servers.place(LoadSpec("m", root / "1", root, version=1), ModelConfig(name="m"))
    return str(raised.value)


def run(script: Callable[[TritonServers], None], program: str) -> None:
    """Place models by a script, on a thread, while the loop of the servers runs."""

    async def main() -> None:
        servers = TritonServers(TritonOptions(program, "2"))
        servers.attach(asyncio.get_running_loop())
        try:
            await asyncio.wait_for(asyncio.to_thread(script, servers), 20)
        finally:
            await servers.close()

    asyncio.run(main())


@pytest.fixture
def ends() -> str:
    program = shutil.which("false")
    assert program
    return program


@pytest.mark.parametrize("directory", ["missing", "\0"], ids=["OSError", "another error"])
def test_a_failed_start_is_retried(
    directory: str, ends: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def script(servers: TritonServers) -> None:
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / directory))
        first = problem(servers, tmp_path)
        assert first in (
            "Triton cannot be started: No such file or directory",
            "embedded null byte",
            "mkdir: embedded null character in path",  # from Python 3.13 on
        )
        assert problem(servers, tmp_path) == first, "it is tried anew, and fails anew"
        assert not servers.processes
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
        assert problem(servers, tmp_path).startswith("no Triton runs: triton-0 ended with status 1")
        assert [process.label for process in servers.processes] == ["triton-0", "triton-1"]

    run(script, ends)
    assert not list(tmp_path.glob("headrace-triton-*"))


def test_a_load_does_not_wait_for_a_terminating_process(tmp_path: Path) -> None:
    program = tmp_path / "waits"
    program.write_text("#!/bin/sh\nexec sleep 60\n")  # it is never live
    program.chmod(0o755)

    servers = TritonServers(TritonOptions(str(program), exit_secs=0))

    async def main() -> str:
        servers.attach(asyncio.get_running_loop())
        load = asyncio.create_task(asyncio.to_thread(problem, servers, tmp_path))
        started = partial(until, lambda: any(p.starts for p in servers.processes), "a process")
        await asyncio.to_thread(started)
        await servers.close()
        return await asyncio.wait_for(load, 20)

    assert asyncio.run(main()) == "no Triton runs: triton-0 has been told to end"
