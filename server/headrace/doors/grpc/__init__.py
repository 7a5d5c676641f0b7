"""The gRPC door: handlers from bytes to bytes, and the transports that carry them."""
