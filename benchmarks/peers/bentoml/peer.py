"""BentoML with one worker."""

from pathlib import Path

from benchmarks.models import MLP
from benchmarks.scorecard.peer import JSON, Peer, Place

_HERE = Path(__file__).parent


def _command(place: Place) -> list[str]:
    (place.home / "service.py").write_text((_HERE / "service.py").read_text())
    (place.home / "model.txt").write_text(str(place.models / MLP / "1" / "model.onnx"))
    return [
        str(place.python), "-m", "bentoml", "serve", "service:Mlp",
        "--working-dir", str(place.home), "--host=127.0.0.1", f"--port={place.http_port}",
    ]  # fmt: skip


PEER = Peer(
    "bentoml",
    "BentoML",
    frozenset({JSON}),
    frozenset({MLP}),
    _command,
    requirements=_HERE / "requirements.txt",
    environment={"BENTOML_DO_NOT_TRACK": "True"},
)
