"""The gRPC door: handlers from bytes to bytes, and the transports that carry them.

`inference` has the handlers of inference, `services` all others; `native` is the server's own
transport, `headrace.plugins.grpcio` the other one. Handlers see a `call` of either.
"""
