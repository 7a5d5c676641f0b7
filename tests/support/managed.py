"""Model repositories for managed Tritons, and a stand-in for Triton.

The stand-in is this server itself: it accepts Triton's options, and loads and unloads models by
the same calls.
"""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

_MODEL = """
import os
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        def answer(request):
            array = pb_utils.get_input_tensor_by_name(request, "INPUT0").as_numpy()
            seen = os.environ.get("CUDA_VISIBLE_DEVICES", "none").encode()
            return pb_utils.InferenceResponse([
                pb_utils.Tensor("OUTPUT0", array * FACTOR),
                pb_utils.Tensor("SEEN", np.full((len(array), 1), seen, np.object_)),
            ])
        return [answer(request) for request in requests]
"""
_CONFIG = """
backend: "triton"
max_batch_size: 8
parameters { key: "remote_backend" value { string_value: "python" } }
input { name: "INPUT0" data_type: TYPE_FP32 dims: [ -1 ] }
output { name: "OUTPUT0" data_type: TYPE_FP32 dims: [ -1 ] }
output { name: "SEEN" data_type: TYPE_STRING dims: [ 1 ] }
"""
CPU = "instance_group { kind: KIND_CPU count: 2 }"


def write_program(folder: Path) -> Path:
    """A program that accepts Triton's options."""
    program = folder / "tritonserver"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m headrace serve "$@"\n')
    program.chmod(0o755)
    return program


def write_version(root: Path, version: int, factor: int, name: str = "times") -> None:
    """A version of a model that multiplies, moved into place as a whole."""
    (root / name).mkdir(parents=True, exist_ok=True)
    whole = root / name / f".{version}"
    whole.mkdir()
    (whole / "model.py").write_text(f"FACTOR = {factor}\n{_MODEL}")
    whole.rename(root / name / str(version))


def write_managed(root: Path, more: str = CPU, name: str = "times", factor: int = 3) -> None:
    """A model that multiplies, for Triton's Python backend."""
    write_version(root, 1, factor, name)
    (root / name / "config.pbtxt").write_text(_CONFIG + more)


def descendants(pid: int) -> Iterator[tuple[int, str]]:
    """Descendants of a process, with their commands, without ended ones."""
    parents: dict[int, list[int]] = {}
    commands = {}
    for entry in filter(str.isdecimal, os.listdir("/proc")):
        try:
            stat = Path("/proc", entry, "stat").read_text().rpartition(")")[2].split()
            command = Path("/proc", entry, "cmdline").read_bytes().replace(b"\0", b" ")
        except OSError:
            continue
        if stat[0] != "Z":
            parents.setdefault(int(stat[1]), []).append(int(entry))
            commands[int(entry)] = command.decode(errors="replace")
    waiting = [pid]
    while waiting:
        for child in parents.get(waiting.pop(), []):
            yield child, commands[child]
            waiting.append(child)


def servers(pid: int) -> list[int]:
    """Processes of Triton, or of its stand-in, that a server has started."""
    return [
        child
        for child, command in descendants(pid)
        if "--model-control-mode=explicit" in command and "reaper.py" not in command
    ]
