"""gRPC on the server's own event loop: `headrace.wire.http2` on an asyncio protocol."""
