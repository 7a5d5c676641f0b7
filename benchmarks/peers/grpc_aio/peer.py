"""The usual way to serve gRPC in Python: `grpc.aio` with generated messages, one run per call."""

from pathlib import Path

from benchmarks.models import MLP
from benchmarks.scorecard.peer import GRPC, Peer, Place

_SERVICE = Path(__file__).with_name("service.py")


def _command(place: Place) -> list[str]:
    model = place.models / MLP / "1" / "model.onnx"
    return [str(place.python), str(_SERVICE), str(model), str(place.grpc_port)]


PEER = Peer("grpc_aio", "grpc.aio service", frozenset({GRPC}), frozenset({MLP}), _command)
