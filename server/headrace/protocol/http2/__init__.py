"""HTTP/2 as gRPC needs it, both sides, without I/O: bytes and times in, bytes and calls out.

`asyncio_protocol` alone knows asyncio: the socket glue of both sides.
"""
