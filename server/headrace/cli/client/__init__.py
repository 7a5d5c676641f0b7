"""A small client of the protocol over HTTP, for the commands that ask a running server.

The standard library carries it. Tensors travel in their binary form.
"""
