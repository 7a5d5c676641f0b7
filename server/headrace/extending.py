"""Public names for plugins; docs/extending.md shows a backend, a stage and a command."""

from headrace.core.call import Call, Done, InferResponse, Stage, Submit
from headrace.core.datatypes import Datatype
from headrace.core.errors import InvalidOption, InvalidRequest, LoadFailed, ServerError, Unavailable
from headrace.core.model_spec import LoadSpec, TensorInfo
from headrace.core.tensors import Tensor
from headrace.engine.chain import Compose, StageModel, StagePlugin
from headrace.placement.backend import Backend, BackendContext
from headrace.placement.local.instances import LoadedModel

__all__ = [
    "Backend",
    "BackendContext",
    "Call",
    "Compose",
    "Datatype",
    "Done",
    "InferResponse",
    "InvalidOption",
    "InvalidRequest",
    "LoadFailed",
    "LoadSpec",
    "LoadedModel",
    "ServerError",
    "Stage",
    "StageModel",
    "StagePlugin",
    "Submit",
    "Tensor",
    "TensorInfo",
    "Unavailable",
]
