"""Ray Serve with one replica."""

from pathlib import Path

from benchmarks.models import MLP
from benchmarks.scorecard.peer import JSON, Peer, Place

_HERE = Path(__file__).parent


def _command(place: Place) -> list[str]:
    model = place.models / MLP / "1" / "model.onnx"
    return [str(place.python), str(_HERE / "service.py"), str(model), str(place.http_port)]


PEER = Peer(
    "ray_serve",
    "Ray Serve",
    frozenset({JSON}),
    frozenset({MLP}),
    _command,
    requirements=_HERE / "requirements.txt",
    environment={"RAY_USAGE_STATS_ENABLED": "0"},
)
