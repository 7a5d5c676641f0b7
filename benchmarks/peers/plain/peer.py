"""The plain request path alone, `benchmarks.plain`: what headrace's features are measured against.

Its modules are no scripts of this folder: they import one another, without all other peers.
"""

from benchmarks.models import MLP
from benchmarks.scorecard.environments import ROOT
from benchmarks.scorecard.peer import GRPC, JSON, Peer, Place


def _command(place: Place) -> list[str]:
    model = place.models / MLP / "1" / "model.onnx"
    return [
        str(place.python), "-m", "benchmarks.plain", str(model),
        str(place.http_port), str(place.grpc_port),
    ]  # fmt: skip


PEER = Peer(
    "plain",
    "plain path alone",
    frozenset({JSON, GRPC}),
    frozenset({MLP}),
    _command,
    environment={"PYTHONPATH": str(ROOT)},
)
