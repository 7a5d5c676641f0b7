"""MLServer with a runtime of its own, the way its documentation shows for custom models."""

import json
from pathlib import Path

from benchmarks.models import MLP
from benchmarks.scorecard.peer import GRPC, JSON, Peer, Place

_HERE = Path(__file__).parent


def _command(place: Place) -> list[str]:
    settings = {
        "host": "127.0.0.1",
        "http_port": place.http_port,
        "grpc_port": place.grpc_port,
        "metrics_endpoint": None,
        "parallel_workers": 0,  # on one core a further process only costs
        "debug": False,
    }
    model = {
        "name": MLP,
        "implementation": "service.OnnxRuntime",
        "parameters": {"uri": str(place.models / MLP / "1" / "model.onnx")},
    }
    (place.home / "settings.json").write_text(json.dumps(settings))
    (place.home / "model-settings.json").write_text(json.dumps(model))
    (place.home / "service.py").write_text((_HERE / "service.py").read_text())
    return [str(place.python), "-m", "mlserver.cli.main", "start", str(place.home)]


PEER = Peer(
    "mlserver",
    "MLServer",
    frozenset({JSON, GRPC}),
    frozenset({MLP}),
    _command,
    requirements=_HERE / "requirements.txt",
)
