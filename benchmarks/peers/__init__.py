"""The servers of the scorecard, each in a folder of its own: how it starts, what it needs, and
where it is not a server of V2 models by itself, its service.

Files named `service.py`, and the models of Triton, run in the peer's environment; nothing here
imports them.
"""

from collections.abc import Mapping

from benchmarks.peers.bare_asgi.peer import PEER as BARE_ASGI
from benchmarks.peers.bentoml.peer import PEER as BENTOML
from benchmarks.peers.echo.peer import PEER as ECHO
from benchmarks.peers.fastapi.peer import PEER as FASTAPI
from benchmarks.peers.grpc_aio.peer import PEER as GRPC_AIO
from benchmarks.peers.headrace.peer import PEER as HEADRACE
from benchmarks.peers.headrace_python.peer import PEER as HEADRACE_PYTHON
from benchmarks.peers.kserve.peer import PEER as KSERVE
from benchmarks.peers.litserve.peer import PEER as LITSERVE
from benchmarks.peers.mlserver.peer import PEER as MLSERVER
from benchmarks.peers.plain.peer import PEER as PLAIN
from benchmarks.peers.ray_serve.peer import PEER as RAY_SERVE
from benchmarks.peers.triton.peer import PEER as TRITON
from benchmarks.scorecard.peer import Peer

PEERS: Mapping[str, Peer] = {
    peer.name: peer
    for peer in (
        HEADRACE, HEADRACE_PYTHON, TRITON, BARE_ASGI, GRPC_AIO, FASTAPI,
        MLSERVER, KSERVE, LITSERVE, BENTOML, RAY_SERVE, PLAIN, ECHO,
    )
}  # fmt: skip
