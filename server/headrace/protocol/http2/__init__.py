"""HTTP/2 as gRPC needs it, both sides, sans-I/O: bytes and times in, bytes and callbacks out.

Only `asyncio_protocol` depends on asyncio: the socket layer of both sides.
"""
