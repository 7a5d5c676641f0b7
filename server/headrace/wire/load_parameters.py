"""The parameters of requests to load and unload models, as JSON and as messages of gRPC."""

from binascii import Error, a2b_base64
from collections.abc import Mapping
from typing import Any

from headrace.core.errors import InvalidRequest
from headrace.core.load_parameters import LoadParameters
from headrace.core.tensors import Buffer
from headrace.wire.pb import grpc_service_pb2 as pb

_CONFIG = "config"
_FILE = "file:"
_DEPENDENTS = "unload_dependents"
_MESSAGES = Mapping[str, pb.ModelRepositoryParameter]


def load_parameters_of_json(document: Mapping[str, Any]) -> LoadParameters:
    """The parameters in the body of a load request; raises `InvalidRequest`."""
    config: str | None = None
    files: dict[str, Buffer] = {}
    for name, value in _parameters(document).items():
        if name != _CONFIG and not name.startswith(_FILE):
            raise _unknown(name)
        if type(value) is not str:
            raise InvalidRequest(
                f"invalid value for load parameter '{name[:80]}', expected a string"
            )
        if name == _CONFIG:
            config = value
            continue
        try:
            files[name.removeprefix(_FILE)] = a2b_base64(value, strict_mode=True)
        except (Error, ValueError) as error:
            raise InvalidRequest(
                f"invalid value for load parameter '{name[:80]}', expected base64: {error}"
            ) from None
    return LoadParameters(config, files)


def load_parameters_of_message(parameters: _MESSAGES) -> LoadParameters:
    """The parameters of a `RepositoryModelLoad`; raises `InvalidRequest`."""
    config: str | None = None
    files: dict[str, Buffer] = {}
    for name, value in parameters.items():
        if name == _CONFIG:
            config = _value(name, value, "string_param")
        elif name.startswith(_FILE):
            files[name.removeprefix(_FILE)] = _value(name, value, "bytes_param")
        else:
            raise _unknown(name)
    return LoadParameters(config, files)


def unload_dependents_of_json(document: Mapping[str, Any]) -> bool:
    """Whether an unload request is meant for dependents, too; raises `InvalidRequest`."""
    value = _parameters(document).get(_DEPENDENTS, False)
    if type(value) is not bool:
        raise InvalidRequest(f"Invalid value for '{_DEPENDENTS}': expected a boolean")
    return value


def unload_dependents_of_message(parameters: _MESSAGES) -> bool:
    """The same of a `RepositoryModelUnload`; raises `InvalidRequest`."""
    if _DEPENDENTS not in parameters:
        return False
    return bool(_value(_DEPENDENTS, parameters[_DEPENDENTS], "bool_param"))


def _parameters(document: Mapping[str, Any]) -> dict[str, Any]:
    found = document.get("parameters")
    if found is None:
        return {}
    if type(found) is not dict:
        raise InvalidRequest("Invalid value for 'parameters': expected an object")
    return found


def _value(name: str, value: pb.ModelRepositoryParameter, expected: str) -> Any:
    if value.WhichOneof("parameter_choice") != expected:
        raise InvalidRequest(
            f"invalid value type for '{name[:80]}' parameter, expected {expected}."
        )
    return getattr(value, expected)


def _unknown(name: str) -> InvalidRequest:
    return InvalidRequest(
        f"unrecognized load parameter '{name[:80]}'; expected 'config' or 'file:PATH'"
    )
