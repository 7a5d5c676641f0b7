"""A function's signature and a model's configuration: one completes the other, or both must agree.

Where a configuration declares tensors it may be narrower than the function, never wider.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from headrace.workers.functions.annotations import SignatureError
from headrace.workers.functions.signature import Mode, Port, Signature
from headrace.workers.triton_config import (
    ModelConfig,
    get_input_config_by_name,
    get_output_config_by_name,
    using_decoupled_model_transaction_policy,
)


def complete(signature: Signature, config: ModelConfig) -> None:
    """Fill in what a configuration leaves out; raises `ValueError` where they contradict."""
    known = config.as_dict()
    if signature.max_batch_size and not known.get("max_batch_size"):
        config.set_max_batch_size(signature.max_batch_size)
    for port in signature.inputs:
        config.add_input(_tensor(port, get_input_config_by_name(known, port.name), True))
    for port in signature.results:
        config.add_output(_tensor(port, get_output_config_by_name(known, port.name), False))
    if signature.mode is Mode.STREAM:
        config.set_model_transaction_policy({"decoupled": True})


def check(signature: Signature, config: Mapping[str, Any]) -> None:
    """Hold a complete configuration against a signature; raises `SignatureError`."""
    found = list(_contradictions(signature, config))
    if found:
        raise SignatureError(f"model {signature.name} and its configuration: " + "; ".join(found))


def _tensor(port: Port, known: Mapping[str, Any] | None, is_input: bool) -> dict[str, Any]:
    """How a tensor is declared, where the configuration does not say."""
    dims = (known or {}).get("dims") or port.shape
    tensor: dict[str, Any] = {"name": port.name, "data_type": _type(port), "dims": dims}
    if is_input and port.optional:
        tensor["optional"] = True
    return tensor


def _contradictions(signature: Signature, config: Mapping[str, Any]) -> Iterator[str]:
    size, limit = int(config.get("max_batch_size", 0)), signature.max_batch_size
    if size > limit:
        yield (
            f"max_batch_size is {size}, the model's {limit}"
            + ("" if limit else ", which has it called for each request by itself")
        )
    if limit and not size:
        yield f"max_batch_size is 0, but the model takes rows, up to {limit}"
    decoupled = using_decoupled_model_transaction_policy(config)
    if decoupled != (signature.mode is Mode.STREAM):
        yield (
            "the model yields its responses, so model_transaction_policy must be decoupled"
            if not decoupled
            else "model_transaction_policy is decoupled, but the model does not yield"
        )
    yield from _tensors("input", config.get("input", ()), signature.inputs)
    yield from _tensors("output", config.get("output", ()), signature.results)


def _tensors(
    kind: str, tensors: Sequence[Mapping[str, Any]], ports: Sequence[Port]
) -> Iterator[str]:
    by_name = {port.name: port for port in ports}
    for tensor in tensors:
        port = by_name.get(tensor["name"])
        if port is None:
            yield f"the model has no {kind} '{tensor['name']}', it has {', '.join(by_name)}"
            continue
        dims = list(tensor["reshape"].get("shape", ()) if "reshape" in tensor else tensor["dims"])
        fits = len(dims) == len(port.shape) and all(
            own in (-1, size) for own, size in zip(port.shape, dims, strict=True)
        )
        if tensor["data_type"] != _type(port) or not fits:
            yield (
                f"{kind} '{port.name}' is {tensor['data_type']} {dims}, the model's is"
                f" {_type(port)} {port.shape}"
            )
        elif tensor.get("optional") and not port.optional:
            yield f"{kind} '{port.name}' is optional, but the model needs it"
    named = {tensor["name"] for tensor in tensors}
    missing = [port.name for port in ports if port.name not in named and not port.optional]
    if missing and kind == "input":
        yield f"the model also needs the inputs {', '.join(missing)}"


def _type(port: Port) -> str:
    return "TYPE_STRING" if port.element.datatype == "BYTES" else f"TYPE_{port.element.datatype}"
