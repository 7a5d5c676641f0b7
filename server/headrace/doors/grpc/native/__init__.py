"""gRPC on the server's own event loop: `headrace.protocol.http2` on an asyncio protocol."""
