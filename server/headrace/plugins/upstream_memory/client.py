"""gRPC calls to an upstream on this machine, with large tensors in shared memory.

Inputs are copied into a region, one after the other; outputs of known size are views of another
one, which is reused when nothing refers to them any more. Tensors without a region are in the
message.

A region is reused only after a response. After anything else, such as a cancelled call, the
upstream may still write to it, for an unknown time.

A restarted upstream may receive a call before it is known that its regions are gone. It reports an
unknown region by its name, and so has not begun anything: the call is repeated, with its tensors in
the message.

Owned by the event-loop thread.
"""

import logging
import math
import ssl
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from headrace.connections.endpoint import Endpoint
from headrace.connections.grpc_channel import UnaryCall
from headrace.connections.placing import laid_out, needed
from headrace.core.call import RegionSlice
from headrace.core.datatypes import ITEM_SIZES, Datatype
from headrace.core.signature import Signature
from headrace.core.tensors import Buffer
from headrace.placement.upstream.connection import Receiver, RemoteRequest, UpstreamCall
from headrace.placement.upstream.grpc_client import GrpcClient, GrpcMessages
from headrace.plugins.upstream_memory.regions import (
    THRESHOLD,
    RegionLease,
    SharedRegions,
    remove_left_behind,
)
from headrace.protocol.compression import DEFAULT_LEVEL, compress
from headrace.protocol.grpc import End, Reason
from headrace.protocol.v2_protobuf import RemoteAnswer, RemoteInput, shared_request

log = logging.getLogger(__name__)


class FixedSizes(NamedTuple):
    """The bytes of fixed-shape outputs; per row, if the model `batches`."""

    outputs: Mapping[str, int]
    batches: bool

    @classmethod
    def of(cls, signature: Signature) -> "FixedSizes":
        """The fixed sizes of a model's outputs."""
        found = {
            spec.name: math.prod(spec.dims) * ITEM_SIZES[spec.datatype]
            for spec in signature.outputs
            if -1 not in spec.dims and spec.datatype is not Datatype.BYTES
        }
        return cls(found, signature.batches)

    def large(self, request: RemoteRequest) -> dict[str, int]:
        """The outputs of a call worth sharing, with their bytes."""
        rows = 1
        if self.batches:
            if not request.inputs:
                return {}
            rows = request.inputs[0].shape[0]
        sizes = {name: rows * self.outputs.get(name, 0) for name in request.outputs}
        return {name: size for name, size in sizes.items() if size >= THRESHOLD}


def large_inputs(request: RemoteRequest) -> dict[str, int]:
    """The inputs of a call worth sharing, with their bytes."""
    found = {}
    for item in request.inputs:
        if item.datatype is not Datatype.BYTES:
            size = math.prod(item.shape) * ITEM_SIZES[item.datatype]
            if size >= THRESHOLD:
                found[item.name] = size
    return found


def write(inputs: Sequence[RemoteInput], places: Mapping[str, RegionSlice], memory: Buffer) -> None:
    """Copy inputs to their places."""
    for item in inputs:
        place = places.get(item.name)
        if place is None:
            continue
        position = place.offset
        for part in item.parts:
            np.ndarray(part.shape, part.dtype, memory, position)[...] = part
            position += part.nbytes


_REFUSALS = frozenset({3, 5, 12})  # statuses of requests that were not executed
_INTERNAL = 13
_TOO_SMALL = "shared memory size specified with the request"


class SharedCall(UnaryCall):
    """An inference call with tensors in shared memory; implements `connection.Call`."""

    messages: GrpcMessages
    inputs: RegionLease | None
    outputs: RegionLease | None
    owner: "SharedMemoryClient"
    receiver: Receiver
    request: RemoteRequest
    rooms: Mapping[str, RegionSlice]

    def done(self, data: Buffer | None, end: End | None) -> None:
        """Report the outcome to the receiver, or repeat the call without shared memory."""
        try:
            if data is None:
                assert end is not None
                if not self._failed(end):
                    self.receiver.failed(self.messages.failed(end))
                return
            try:
                answer = self._answer(data)
            except Exception as error:  # any error concerns this call alone
                self._retire()
                self.receiver.failed(error)
                return
            self.receiver.answered(answer)
        except Exception:  # from the receiver; the connection has other calls
            log.exception("bug after a call")

    def cancel(self) -> None:
        """Cancel the call without a callback."""
        super().cancel()
        self._retire()

    def _answer(self, data: Buffer) -> RemoteAnswer:
        shared: dict[str, memoryview] = {}
        regions, inputs, outputs = self.owner.regions, self.inputs, self.outputs
        whole: np.ndarray[tuple[int], np.dtype[np.uint8]] | None = None
        if outputs is not None:
            memory = outputs.region.memory
            # The response's arrays refer to this object, which so lives as long as any of them.
            whole = np.ndarray((outputs.region.size,), np.uint8, memory)
            whole.flags.writeable = False
            view = whole.data
            for name, place in self.rooms.items():
                shared[name] = view[place.offset : place.offset + place.byte_size]
        answer = self.messages.shared_answer(data, shared)
        self.inputs = self.outputs = None
        if inputs is not None:
            regions.give_back(inputs)
        if outputs is not None:
            regions.hold(outputs, whole)
        return answer

    def _failed(self, end: End) -> bool:
        """Settle the regions after a failure; True if the call is repeated."""
        regions, leases = self.owner.regions, [x for x in (self.inputs, self.outputs) if x]
        self.inputs = self.outputs = None
        unknown = False
        if leases and end.reason is Reason.STATUS:
            # No model sees the names of regions, so that this cannot be an error of one.
            named = any(f"'{lease.region.name}'" in end.text for lease in leases)
            unknown = end.status in _REFUSALS and named
            if end.status == _INTERNAL and _TOO_SMALL in end.text:
                self.owner.outgrown()
        if unknown:
            regions.forgotten(leases[0].epoch)
        settle = regions.retire
        if unknown or end.reason is Reason.UNSENT or end.reason is Reason.REFUSED:
            settle = regions.give_back
        for lease in leases:
            settle(lease)
        if not unknown:
            return False
        self.renew()
        self.pieces = self.messages.request(self.request)
        self.size = sum(map(len, self.pieces))
        self.channel.start(self)
        return True

    def _retire(self) -> None:
        for lease in (self.inputs, self.outputs):
            if lease is not None:
                self.owner.regions.retire(lease)
        self.inputs = self.outputs = None


class SharedMemoryClient(GrpcClient):
    """Implements `ProtocolClient` with shared memory, except for streams."""

    def __init__(
        self,
        endpoint: Endpoint,
        messages: GrpcMessages,
        context: ssl.SSLContext | None,
        buffer: memoryview,
        signature: Signature,
    ) -> None:
        """`signature` is the model's; see `GrpcClient` for the others."""
        super().__init__(endpoint, messages, context, buffer)
        self.regions = SharedRegions(self.ask, messages.model, endpoint.name)
        self._sizes = FixedSizes.of(signature)
        self._name = endpoint.name
        self.when_lost = self.regions.renew

    def begin(self, request: RemoteRequest, seconds: float, receiver: Receiver) -> UpstreamCall:
        """Start an inference call, with large tensors in shared memory if regions are free."""
        given, wanted = large_inputs(request), self._sizes.large(request)
        inputs = self.regions.take(needed(given)) if given else None
        outputs = self.regions.take(needed(wanted)) if wanted else None
        if inputs is None and outputs is None:
            return super().begin(request, seconds, receiver)
        try:
            call = self._shared_call(request, seconds, given, wanted, inputs, outputs)
        except BaseException:  # for example if the request cannot be encoded
            for lease in (inputs, outputs):
                if lease is not None:
                    self.regions.give_back(lease)
            raise
        call.receiver = receiver
        self.start(call)
        return call

    def _shared_call(
        self,
        request: RemoteRequest,
        seconds: float,
        given: Mapping[str, int],
        wanted: Mapping[str, int],
        inputs: RegionLease | None,
        outputs: RegionLease | None,
    ) -> SharedCall:
        """A call with these large tensors in these regions."""
        places = laid_out(given, inputs.region.name) if inputs else {}
        rooms = laid_out(wanted, outputs.region.name) if outputs else {}
        if inputs is not None:
            write(request.inputs, places, inputs.region.memory)
        messages = self._messages
        options = messages.options
        message = shared_request(
            options.model, options.version, request.inputs, request.outputs, request.parameters,
            request.id, places, rooms,
        )  # fmt: skip
        if messages.packing:
            message = [compress(b"".join(message), messages.packing, DEFAULT_LEVEL)]
        call = self._call(SharedCall, messages.infer_path, request.headers, message, seconds)
        call.messages, call.owner, call.request = messages, self, request
        call.inputs, call.outputs, call.rooms = inputs, outputs, rooms
        return call

    def outgrown(self) -> None:
        """Stop sharing outputs: one was larger than declared."""
        if self._sizes.outputs:
            self._sizes = FixedSizes({}, self._sizes.batches)
            log.warning(
                "model %s: server %s: outputs go over the wire: one was larger than declared",
                self._messages.model, self._name, extra={"model": self._messages.model},
            )  # fmt: skip

    async def close(self) -> None:
        """Close the connection, and remove the regions."""
        await self.regions.withdraw()
        await super().close()
        await self.regions.close()


def sharing_clients() -> type[SharedMemoryClient]:
    """The class of clients, once regions that ended servers have left are removed."""
    if count := remove_left_behind():
        log.info("removed shared memory that ended servers have left: %d regions", count)
    return SharedMemoryClient
