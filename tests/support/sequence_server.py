"""A V2 server in this process, with one model that sums the inputs of a sequence.

A stand-in for servers with sequences that records the properties of each request.
"""

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from threading import Event, Lock
from typing import Any, Self

import grpc

from headrace.protocol.pb import grpc_service_pb2 as pb
from headrace.protocol.pb import model_config_pb2 as config_pb

HELD = 1_000  # a number whose request waits until it is let go on
REFUSED = 2_000  # one that the model refuses
Told = tuple[int | str, bool, bool, int]  # id, start, end, the number


class SequenceServer(grpc.GenericRpcHandler):
    """Serves `adder` while entered; `address` is host:port.

    `told` are the recorded properties, in order; `together` is the largest number of concurrent
    requests of one sequence.
    """

    def __init__(self, idle_us: int = 30_000_000, config: bool = True) -> None:
        self.told: list[Told] = []
        self.together = 0
        self.go_on = Event()
        self._config = config
        self._idle_us = idle_us
        self._lock = Lock()
        self._sums: dict[int | str, int] = {}
        self._here: Counter[int | str] = Counter()
        self._threads = ThreadPoolExecutor(32)
        options = [("grpc.so_reuseport", 0)]
        self._server = grpc.server(self._threads, [self], options=options)
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"

    def __enter__(self) -> Self:
        self._server.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Stop at once, and forget all sequences."""
        self.go_on.set()
        self._server.stop(None).wait()
        self._threads.shutdown()

    def service(self, details: Any) -> Any:
        procedure = getattr(self, details.method.rpartition("/")[2], None)
        return None if procedure is None else grpc.unary_unary_rpc_method_handler(procedure)

    def ModelReady(self, message: bytes, context: grpc.ServicerContext) -> bytes:
        return pb.ModelReadyResponse(ready=True).SerializeToString()

    def ModelMetadata(self, message: bytes, context: grpc.ServicerContext) -> bytes:
        metadata = pb.ModelMetadataResponse(name="adder", versions=["1"])
        metadata.inputs.add(name="NUMBER", datatype="INT32", shape=[-1, 1])
        metadata.outputs.add(name="SUM", datatype="INT32", shape=[-1, 1])
        return metadata.SerializeToString()

    def ModelConfig(self, message: bytes, context: grpc.ServicerContext) -> bytes:
        if not self._config:
            context.abort(grpc.StatusCode.UNIMPLEMENTED, "does not tell")
        config = config_pb.ModelConfig(name="adder", max_batch_size=4)
        config.sequence_batching.max_sequence_idle_microseconds = self._idle_us
        config.sequence_batching.oldest.max_candidate_sequences = 4
        config.sequence_batching.control_input.add(name="START").control.add(
            kind=config_pb.ModelSequenceBatching.Control.CONTROL_SEQUENCE_START,
            int32_false_true=[0, 1],
        )
        return pb.ModelConfigResponse(config=config).SerializeToString()

    def ModelInfer(self, message: bytes, context: grpc.ServicerContext) -> bytes:
        request = pb.ModelInferRequest.FromString(message)
        given = request.parameters
        kind = given["sequence_id"].WhichOneof("parameter_choice")
        id = getattr(given["sequence_id"], kind or "int64_param")
        start, end = given["sequence_start"].bool_param, given["sequence_end"].bool_param
        number = int.from_bytes(request.raw_input_contents[0], "little")
        with self._lock:
            self.told.append((id, start, end, number))
            self._here[id] += 1
            self.together = max(self.together, self._here[id])
        if number == HELD:
            self.go_on.wait()
        with self._lock:
            self._here[id] -= 1
            if number == REFUSED:
                context.abort(grpc.StatusCode.INVALID_ARGUMENT, "not this one")
            if not start and id not in self._sums:
                context.abort(grpc.StatusCode.INVALID_ARGUMENT, "there is no such sequence")
            self._sums[id] = total = number + (0 if start else self._sums[id])
            if end:
                del self._sums[id]
        answer = pb.ModelInferResponse(model_name="adder", model_version="1")
        answer.outputs.add(name="SUM", datatype="INT32", shape=[1, 1])
        answer.raw_output_contents.append(total.to_bytes(4, "little"))
        return answer.SerializeToString()
