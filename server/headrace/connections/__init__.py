"""Connections to other servers over asyncio: an HTTP/1.1 pool, and a gRPC channel.

Used by upstreams (`placement.upstream`) and by the client.
"""
