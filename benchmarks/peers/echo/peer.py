"""The limit: what uvloop's sockets and one Python call for each request leave to a server."""

from pathlib import Path

from benchmarks.models import MLP
from benchmarks.scorecard.peer import JSON, Peer, Place

_SERVICE = Path(__file__).with_name("service.py")


def _command(place: Place) -> list[str]:
    model = place.models / MLP / "1" / "model.onnx"
    return [str(place.python), str(_SERVICE), str(model), str(place.http_port)]


PEER = Peer("echo", "raw uvloop echo", frozenset({JSON}), frozenset({MLP}), _command)
