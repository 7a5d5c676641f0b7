"""TensorFlow Serving and TorchServe as upstreams: their configuration parameters.

The protocols themselves are imported when a model has such upstreams.
"""

from collections.abc import Mapping

from headrace.core.errors import InvalidOption
from headrace.placement.upstream.options import UpstreamProtocol

_BODIES = ("array", "object", "raw")


def tfserving_protocol() -> UpstreamProtocol:
    """TensorFlow Serving, over gRPC or HTTP."""
    return UpstreamProtocol(
        "tfserving",
        {"grpc": 8500, "grpcs": 8500, "http": 8501, "https": 443},
        grpc="headrace.plugins.dialects.tfserving:TfServingGrpc",
        rest="headrace.plugins.dialects.tfserving:TfServingRest",
        parameters=("signature_name", "remote_label"),
        check=_check_label,
    )


def torchserve_protocol() -> UpstreamProtocol:
    """TorchServe, over HTTP."""
    return UpstreamProtocol(
        "torchserve",
        {"http": 8080, "https": 443},
        rest="headrace.plugins.dialects.torchserve:TorchServeRest",
        parameters=("remote_label", "request_body"),
        check=_check_body,
    )


def _check_label(parameters: Mapping[str, str]) -> None:
    if parameters.get("remote_label") and parameters.get("remote_version"):
        raise InvalidOption("parameters['remote_label']", "cannot be combined with remote_version")


def _check_body(parameters: Mapping[str, str]) -> None:
    body = parameters.get("request_body", "")
    if body and body not in _BODIES:
        expected = f"expected {', '.join(_BODIES)}, got {body!r}"
        raise InvalidOption("parameters['request_body']", expected)
    _check_label(parameters)
