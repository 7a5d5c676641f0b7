"""Public names for plugins; docs/extending.md shows one of each important kind."""

from headrace.core.call import Call, Done, InferResponse, Stage, Submit
from headrace.core.datatypes import Datatype
from headrace.core.errors import InvalidOption, InvalidRequest, LoadFailed, ServerError, Unavailable
from headrace.core.model_spec import LoadSpec, TensorInfo
from headrace.core.ragged import RaggedForm
from headrace.core.signature import Signature
from headrace.core.tensors import Buffer, Tensor
from headrace.doors.door import Door, DoorCall
from headrace.doors.listeners import peer_of
from headrace.engine.admission import ConnectionAccount
from headrace.engine.chain import Compose, StageModel, StagePlugin
from headrace.engine.entrance import Entrance, Target
from headrace.placement.backend import Backend, BackendContext
from headrace.placement.loaded import LoadedModel, ModelTraits
from headrace.protocol.generate import decode_generate
from headrace.protocol.generate import encode_generate as encode_flat
from headrace.repository.store import Lease, Store, StoreOptions

__all__ = [
    "Backend",
    "BackendContext",
    "Call",
    "Compose",
    "ConnectionAccount",
    "Datatype",
    "Done",
    "Door",
    "DoorCall",
    "Entrance",
    "InferResponse",
    "InvalidOption",
    "InvalidRequest",
    "Lease",
    "LoadFailed",
    "LoadSpec",
    "LoadedModel",
    "ModelTraits",
    "RaggedForm",
    "ServerError",
    "Stage",
    "StageModel",
    "StagePlugin",
    "Store",
    "StoreOptions",
    "Submit",
    "Target",
    "Tensor",
    "TensorInfo",
    "Unavailable",
    "decode_flat",
    "encode_flat",
    "peer_of",
]


def decode_flat(signature: Signature | None, model: str, version: str, body: Buffer) -> Call:
    """Decode inputs as flat JSON for a model, whose signature is None while it is being loaded.

    Raises `Unavailable` then, and `InvalidRequest` for a body that does not fit.
    """
    if signature is None:
        raise Unavailable(f"model '{model}' is being loaded; try again later")
    return decode_generate(signature, model, version, body)
