"""The operations of the protocol, each once, and what answers them.

`operations` is the table: name, category, HTTP routes, procedure. `handlers` has a function for
each, over messages and the engine, and one over JSON where HTTP's document is not the message's.
`openapi` describes both. The doors serve what the table has; front ends hand on its procedures, and
the command line's client finds its paths there. `operations` imports neither engine nor protobuf.
"""
