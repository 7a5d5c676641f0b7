"""Triton, the real C++ server, with its Python backend: the only one that comes as a package.

It serves the same MLP, computed by numpy, and identity models.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.models import ALL_MODELS, ECHO_1M, ECHO_16M, MLP, MLP_WIDE, mlp_weights
from benchmarks.scorecard.peer import BINARY, GRPC, JSON, Peer, Place

_HERE = Path(__file__).parent
_ROOT = _HERE.parents[2]
CONFIG = """backend: "python"
max_batch_size: {rows}
input [ {{ name: "input" data_type: TYPE_FP32 dims: [ {width} ] }} ]
output [ {{ name: "output" data_type: TYPE_FP32 dims: [ {answer} ] }} ]
instance_group [ {{ count: 1 kind: KIND_CPU }} ]
{more}"""


def _command(place: Place) -> list[str]:
    # The program beside the interpreter, as `scripts/bench_triton` leaves it.
    program = place.python.parents[2] / "tritonserver"
    return [
        str(program), f"--model-repository={place.models}",
        f"--http-port={place.http_port}", f"--grpc-port={place.grpc_port}",
        "--http-address=127.0.0.1", "--grpc-address=127.0.0.1", "--allow-metrics=false",
        "--http-thread-count=1", "--log-info=false",
    ]  # fmt: skip


def _write_models(names: frozenset[str], repository: Path) -> None:
    for name in sorted(names):
        folder = repository / name / "1"
        folder.mkdir(parents=True, exist_ok=True)
        mlp = name in (MLP, MLP_WIDE)
        source = "mlp.py" if mlp else "identity.py"
        (folder / "model.py").write_text((_HERE / source).read_text())
        shapes: Mapping[str, Any] = {"width": 64, "answer": 10, "more": "dynamic_batching { }\n"}
        if mlp:
            np.savez(folder / "weights.npz", allow_pickle=False, **mlp_weights())
        else:
            (width,) = ALL_MODELS[name].cases()[0].inputs["input"].shape[1:]
            shapes = {"width": width, "answer": width, "more": ""}
        config = CONFIG.format(rows=ALL_MODELS[name].max_batch_size, **shapes)
        (repository / name / "config.pbtxt").write_text(config)


PEER = Peer(
    "triton",
    "Triton, Python backend",
    frozenset({JSON, BINARY, GRPC}),
    frozenset({MLP, MLP_WIDE, ECHO_1M, ECHO_16M}),
    _command,
    requirements=_HERE / "requirements.txt",
    fetch=_ROOT / "scripts" / "bench_triton",
    statistics=True,
    write_models=_write_models,
)
