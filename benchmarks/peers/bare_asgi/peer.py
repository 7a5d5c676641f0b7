"""The least that a Python web service can be: an ASGI callable on uvicorn, one run per request."""

from pathlib import Path

from benchmarks.models import MLP
from benchmarks.scorecard.peer import JSON, Peer, Place

_SERVICE = Path(__file__).with_name("service.py")


def _command(place: Place) -> list[str]:
    model = place.models / MLP / "1" / "model.onnx"
    return [str(place.python), str(_SERVICE), str(model), str(place.http_port)]


PEER = Peer("bare_asgi", "bare ASGI app", frozenset({JSON}), frozenset({MLP}), _command)
