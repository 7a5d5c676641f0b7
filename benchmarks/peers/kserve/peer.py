"""KServe's Python model server, the base of its custom predictors."""

from pathlib import Path

from benchmarks.models import MLP
from benchmarks.scorecard.peer import GRPC, JSON, Peer, Place

_HERE = Path(__file__).parent


def _command(place: Place) -> list[str]:
    return [
        str(place.python), str(_HERE / "service.py"), str(place.models / MLP / "1" / "model.onnx"),
        f"--http_port={place.http_port}", f"--grpc_port={place.grpc_port}", "--workers=1",
        "--enable_latency_logging=false",
    ]  # fmt: skip


PEER = Peer(
    "kserve",
    "KServe",
    frozenset({JSON, GRPC}),
    frozenset({MLP}),
    _command,
    requirements=_HERE / "requirements.txt",
)
