"""The worker process: Python models, run away from the server.

What is here runs in the interpreter and environment of a model, which need not be the server's: it
needs the standard library and numpy, of any version that the model wants, and imports nothing else
of the server.
"""
