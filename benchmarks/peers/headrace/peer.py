"""This project's server."""

from benchmarks.models import ALL_MODELS
from benchmarks.scorecard.peer import BINARY, GRPC, JSON, Peer, Place


def _command(place: Place) -> list[str]:
    return [
        str(place.python), "-m", "headrace", "serve", "--model-repository", str(place.models),
        f"--http-port={place.http_port}", f"--grpc-port={place.grpc_port}",
        "--allow-metrics=false",
    ]  # fmt: skip


PEER = Peer(
    "headrace",
    "headrace",
    frozenset({JSON, BINARY, GRPC}),
    frozenset(ALL_MODELS),
    _command,
    statistics=True,
)
