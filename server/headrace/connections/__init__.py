"""Connections to other servers over asyncio: a pool of HTTP/1.1, and a channel of gRPC.

What is said over them is up to whoever has them: upstreams (`placement.upstream`) and the client.
"""
