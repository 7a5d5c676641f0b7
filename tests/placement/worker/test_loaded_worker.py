"""Workers that end while they start."""

from pathlib import Path

import pytest

from headrace.core.errors import LoadFailed
from headrace.ipc.frames import FrameKind
from headrace.placement.worker.loaded_worker import ask_worker
from headrace.placement.worker.python_options import WorkerSpec
from headrace.placement.worker.worker_process import WorkerProcess


def test_a_worker_that_is_killed_before_it_reads_anything(tmp_path: Path) -> None:
    program, told = tmp_path / "python", tmp_path / "told"
    program.write_text(f"#!/bin/sh\nwhile [ ! -e {told} ]; do sleep 0.01; done\nkill -9 $$\n")
    program.chmod(0o755)
    process = WorkerProcess(WorkerSpec("m", "1", "m_0", str(program)))
    process.link.sock.sendall(b"something that nobody reads")
    told.touch()
    with pytest.raises(LoadFailed, match=r"^the worker was ended by SIGKILL$"):
        ask_worker(process, FrameKind.LOAD, {}, 30)
