"""`headrace.serve`: a server for the models of a script or notebook, in its own process.

`sources` writes functions to files; `server` starts and ends the process.
"""
