"""Completion of a configuration from a function's signature, and the check of both.

The configuration may be narrower than the function, never wider. Completion keeps its values; the
check comes last.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from headrace.plugins.functions.signature import CallMode, FunctionSignature, Port
from headrace.workers.triton_config import (
    Contradicted,
    ModelConfig,
    get_input_config_by_name,
    get_output_config_by_name,
    using_decoupled_model_transaction_policy,
)


def complete(signature: FunctionSignature, config: ModelConfig) -> None:
    """Complete a configuration."""
    known = config.as_dict()
    if signature.max_batch_size and not known.get("max_batch_size"):
        config.set_max_batch_size(signature.max_batch_size)
    for port in signature.inputs:
        config.add_input(_tensor(port, get_input_config_by_name(known, port.name), True))
    for port in signature.results:
        config.add_output(_tensor(port, get_output_config_by_name(known, port.name), False))
    if signature.mode is CallMode.STREAM and "model_transaction_policy" not in known:
        config.set_model_transaction_policy({"decoupled": True})


def check(signature: FunctionSignature, config: Mapping[str, Any]) -> None:
    """Check a complete configuration against a signature; raises `Contradicted`."""
    if found := list(_contradictions(signature, config)):
        raise Contradicted(*found)


def _tensor(port: Port, known: Mapping[str, Any] | None, is_input: bool) -> dict[str, Any]:
    """The declaration of a tensor, completed from the signature."""
    known = known or {}
    data_type = known.get("data_type")
    tensor: dict[str, Any] = {
        "name": port.name,
        "data_type": config_type(port) if data_type in (None, "TYPE_INVALID") else data_type,
        "dims": known.get("dims") or port.shape,
    }
    if is_input and port.optional:
        tensor["optional"] = True
    return tensor


def _contradictions(
    signature: FunctionSignature, config: Mapping[str, Any]
) -> Iterator[tuple[str, str]]:
    """Fields with the contradiction of each."""
    size, limit = int(config.get("max_batch_size", 0)), signature.max_batch_size
    if size > limit:
        called = "" if limit else ", which has it called for each request by itself"
        yield "max_batch_size", f"it is {size} here, and {limit} in the model{called}"
    if limit and not size:
        yield "max_batch_size", f"it is 0, but the model takes rows, up to {limit}"
    decoupled = using_decoupled_model_transaction_policy(config)
    if decoupled != (signature.mode is CallMode.STREAM):
        text = (
            "must be true, since the model yields its responses"
            if not decoupled
            else "must be false, since the model does not yield"
        )
        yield "model_transaction_policy.decoupled", text
    yield from _tensors("input", config.get("input", ()), signature.inputs)
    yield from _tensors("output", config.get("output", ()), signature.results)


def _tensors(
    kind: str, tensors: Sequence[Mapping[str, Any]], ports: Sequence[Port]
) -> Iterator[tuple[str, str]]:
    by_name = {port.name: port for port in ports}
    for index, tensor in enumerate(tensors):
        at = f"{kind}[{index}]"
        port = by_name.get(tensor["name"])
        if port is None:
            text = f"the model has no {kind} '{tensor['name']}', it has {', '.join(by_name)}"
            yield f"{at}.name", text
            continue
        relabelled = "reshape" in tensor
        dims = list(tensor["reshape"].get("shape", ()) if relabelled else tensor["dims"])
        fits = len(dims) == len(port.shape) and all(
            own in (-1, size) for own, size in zip(port.shape, dims, strict=True)
        )
        if (data_type := tensor["data_type"]) != config_type(port):
            text = f"'{port.name}' is {data_type} here, and {config_type(port)} in the model"
            yield f"{at}.data_type", text
        if not fits:
            text = f"'{port.name}' has {dims} here, and {port.shape} in the model"
            yield f"{at}.{'reshape' if relabelled else 'dims'}", text
        if tensor.get("optional") and not port.optional:
            yield f"{at}.optional", f"the model needs '{port.name}'"
    named = {tensor["name"] for tensor in tensors}
    missing = [port.name for port in ports if port.name not in named and not port.optional]
    if missing and kind == "input":
        yield "input", f"the model also needs the inputs {', '.join(missing)}"


def config_type(port: Port) -> str:
    """The datatype of a tensor as a configuration names it."""
    return "TYPE_STRING" if port.element.datatype == "BYTES" else f"TYPE_{port.element.datatype}"
