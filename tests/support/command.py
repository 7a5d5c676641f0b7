"""Runs of the `headrace` command, and models for it."""

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import onnx
from onnx import TensorProto, helper

from tests.support.template import can_fork, run_forked

# Options of a server that bind every door to a free port.
FREE_PORTS = ("--http-port=0", "--grpc-port=0", "--metrics-port=0")


def write_model(path: Path) -> None:
    """OUTPUT0 = INPUT0."""
    tensors = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, ["rows", 2])
        for name in ("INPUT0", "OUTPUT0")
    ]
    node = helper.make_node("Identity", ["INPUT0"], ["OUTPUT0"])
    graph = helper.make_graph([node], "same", tensors[:1], tensors[1:])
    opset = helper.make_opsetid("", 17)
    path.parent.mkdir(parents=True, exist_ok=True)
    onnx.save(helper.make_model(graph, opset_imports=[opset], ir_version=8), path)


def run(
    *words: str, environment: Mapping[str, str] | None = None
) -> "subprocess.CompletedProcess[str]":
    """Run the command in a process of its own, until it ends."""
    if can_fork(environment):
        done = run_forked(words, environment)
        return subprocess.CompletedProcess(
            done.args, done.returncode, done.stdout.decode(), done.stderr.decode()
        )
    return subprocess.run(
        [sys.executable, "-m", "headrace", *words],
        capture_output=True, text=True, timeout=120, env={**os.environ, **(environment or {})},
    )  # fmt: skip


def write_bad_repository(root: Path) -> Path:
    """A repository with a valid model, a file that is not a model, and an invalid configuration."""
    for name in ("same", "misconfigured"):
        write_model(root / name / "1" / "model.onnx")
    (root / "misconfigured" / "config.pbtxt").write_text("max_batch_size: 8\nmax_bach_size: 8\n")
    (root / "no_model" / "1").mkdir(parents=True)
    (root / "no_model" / "1" / "model.onnx").write_bytes(b"nothing")
    return root
