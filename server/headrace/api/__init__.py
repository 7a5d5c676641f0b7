"""The operations of the protocol, each declared once, and their handlers.

`operations` is the table: name, category, HTTP routes, procedure. `handlers` has a function for
each, over messages and the engine, and one over JSON where HTTP's document differs from the
message. `openapi` describes both. The doors serve the operations of the table; front ends forward
its procedures, and the Python client finds its paths there. `operations` imports neither engine nor
protobuf.
"""
