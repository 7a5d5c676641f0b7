"""Engines in the program's own process: `headrace.Engine` and `headrace.AsyncEngine`.

An engine is asked by the interface of the client (`headrace.client`); `in_process` takes the place
of its HTTP and gRPC transports.
"""
