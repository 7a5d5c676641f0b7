"""HTTP/2 as a gRPC server speaks it, without I/O: bytes and times in, bytes and calls out."""
