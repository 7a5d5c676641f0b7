"""`headrace.serve`: a server for the models of a script or notebook, in a process of its own.

`sources` makes files of functions; `server` starts the process, and ends it.
"""
