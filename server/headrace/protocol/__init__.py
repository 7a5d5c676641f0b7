"""Codecs: bytes of each protocol to values and back, without I/O, blocking or a clock.

`v2_json` and `v2_protobuf` convert inference requests and responses, for servers and clients alike;
`plain_json` is the fast path of the former, `generate` is flat JSON. `elements`, `json_text` and
`protobuf_contents` convert many numbers at once. Below them, `grpc` and `http1` frame messages, and
`http2` is a whole connection. `status` maps errors to statuses. `pb` has the protobuf messages.
"""
