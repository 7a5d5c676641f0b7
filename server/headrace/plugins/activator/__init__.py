"""A front for servers that may be scaled to zero: holds connections until a server is ready.

`Opening` decides when a connection's bytes begin a request, `Activator` holds and forwards.
"""
