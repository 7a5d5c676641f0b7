"""The operations of the protocol, each declared once, and their handlers.

`operations` is the table: name, category, HTTP routes, procedure. `handlers` has a function for
each, over messages and the engine, and one over JSON where HTTP's document differs from the
message. `header_rules` restricts operations by headers. The doors serve the operations of the
table; front ends forward its procedures, the Python client finds its paths there, and
`headrace.plugins.openapi` describes them. `operations` imports neither engine nor protobuf.
"""
