"""HTTP/2 as gRPC needs it, both sides, without I/O: bytes and times in, bytes and calls out."""
