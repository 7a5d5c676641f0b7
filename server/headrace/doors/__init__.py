"""The doors: each turns its protocol into calls, and responses into its protocol.

`http` is HTTP/1.1 on uvicorn's connection with a FastAPI application behind it, `grpc` is gRPC on
HTTP/2 of our own, `frontends` are processes that have doors and nothing else. `server`
opens all doors of a server, wherever they are.
"""
