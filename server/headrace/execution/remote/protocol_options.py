"""Which protocol a model's servers speak, and what is particular to it."""

from collections.abc import Mapping
from dataclasses import dataclass

from headrace.core.errors import InvalidOption

PROTOCOL_PARAMETERS = frozenset({"protocol", "signature_name", "remote_label", "request_body"})
V2, TFSERVING, TORCHSERVE = PROTOCOLS = ("v2", "tfserving", "torchserve")
PORTS: dict[str, dict[str, int]] = {
    V2: {"grpc": 8001, "grpcs": 8001, "http": 8000, "https": 443},
    TFSERVING: {"grpc": 8500, "grpcs": 8500, "http": 8501, "https": 443},
    TORCHSERVE: {"http": 8080, "https": 443},
}
BODIES = ("array", "object", "raw")
_FOR = {
    "signature_name": (TFSERVING,),
    "remote_label": (TFSERVING, TORCHSERVE),
    "request_body": (TORCHSERVE,),
}


@dataclass(frozen=True, slots=True)
class ProtocolOptions:
    """`label` is what a version is called there, `signature` that of TensorFlow's models.

    `body` is what a request to TorchServe is, empty for what suits the model.
    """

    name: str = V2
    signature: str = ""
    label: str = ""
    body: str = ""

    @classmethod
    def of(cls, parameters: Mapping[str, str]) -> "ProtocolOptions":
        """From a model's parameters; raises `InvalidOption`."""
        name = parameters.get("protocol") or V2
        if name not in PROTOCOLS:
            raise _wrong("protocol", f"expected {', '.join(PROTOCOLS)}, got {name!r}")
        for parameter, protocols in _FOR.items():
            if parameters.get(parameter) and name not in protocols:
                raise _wrong(parameter, f"is for parameters['protocol'] {' or '.join(protocols)}")
        if parameters.get("remote_load") == "true" and name != V2:
            raise _wrong("remote_load", f"is for servers of {V2}: {name} has nothing like it")
        body = parameters.get("request_body", "")
        if body and body not in BODIES:
            raise _wrong("request_body", f"expected {', '.join(BODIES)}, got {body!r}")
        label = parameters.get("remote_label", "")
        if label and parameters.get("remote_version"):
            raise _wrong("remote_label", "cannot be combined with remote_version")
        return cls(name, parameters.get("signature_name", ""), label, body)


V2_OPTIONS = ProtocolOptions()


def _wrong(name: str, text: str) -> InvalidOption:
    return InvalidOption(f"parameters['{name}']", text)
