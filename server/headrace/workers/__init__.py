"""The worker process: runs Python models apart from the server.

This code runs in the interpreter and environment of a model, which need not be the server's: it
uses the standard library and numpy, in any version that the model wants, and imports nothing else
of the server.
"""
