"""The plain request path alone: the least that a Python server with batching has to do.

One class of connection for each door, one call object, one account, one batcher: what is left when
a server has no other features. Beside it the scorecard shows what headrace's features cost a
request that uses none of them.

A call has limits, a deadline, cancellation, timing in its answer, statistics and a histogram of
latencies. Left out is everything else: chunked, large and slow bodies, binary tensors over HTTP,
padding, CONTINUATION, compression and streams over gRPC, threads, patience. It is for load
generators on the loopback interface alone.

Run with `python -m benchmarks.plain MODEL HTTP_PORT GRPC_PORT`.
"""
