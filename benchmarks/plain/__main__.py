"""Serves one model on both doors, in one process and on one event loop, until it is ended.

Usage: python -m benchmarks.plain MODEL HTTP_PORT GRPC_PORT, with MODEL as NAME/VERSION/model.onnx
"""

import asyncio
import gc
import sys
from pathlib import Path

import uvloop

from benchmarks.plain.batching import Account, Version
from benchmarks.plain.grpc_door import GrpcConnection, GrpcServer
from benchmarks.plain.http_door import HttpConnection, HttpServer


async def serve(model: Path, http_port: int, grpc_port: int) -> None:
    """Listen on the loopback interface."""
    loop = asyncio.get_running_loop()
    versions = [Version(model.parents[1].name, str(model), loop)]
    account = Account()
    http, grpc = HttpServer(versions, account), GrpcServer(versions, account)
    listeners = [
        await loop.create_server(lambda: HttpConnection(http), "127.0.0.1", http_port),
        await loop.create_server(lambda: GrpcConnection(grpc), "127.0.0.1", grpc_port),
    ]
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 10, 10)
    await asyncio.gather(*(listener.serve_forever() for listener in listeners))


if __name__ == "__main__":
    uvloop.run(serve(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])))
