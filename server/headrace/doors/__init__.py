"""The doors: each converts requests of its protocol to calls, and responses back.

`http` is HTTP/1.1 with a FastAPI application behind it, `grpc` is gRPC on the server's own HTTP/2.
`server` opens all doors of a server, in whichever process they are.
"""
