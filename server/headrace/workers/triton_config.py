"""A model's configuration for Triton's Python models: a dictionary, and its completion."""

from collections.abc import Iterable, Mapping
from typing import Any


class Contradicted(ValueError):
    """A configuration contradicts its model.

    `problems` are the configuration's fields, such as `input[0].dims`, with the problem.
    """

    def __init__(self, *problems: tuple[str, str]) -> None:
        super().__init__("; ".join(text for _, text in problems))
        self.problems = problems


class ModelConfig:
    """The configuration passed to `auto_complete_config`."""

    def __init__(self, config: dict[str, Any]) -> None:
        self._config = config

    def as_dict(self) -> dict[str, Any]:
        """The configuration as a dictionary."""
        return self._config

    def set_max_batch_size(self, size: int) -> None:
        """Enable batching.

        Raises `ValueError` if the configuration allows larger batches already.
        """
        known = self._config.get("max_batch_size", 0)
        if known > size:
            text = (
                f"configuration specified max_batch_size {known}, but in the model"
                f" max_batch_size is {size}"
            )
            raise Contradicted(("max_batch_size", text))
        self._config["max_batch_size"] = size

    def set_dynamic_batching(self) -> None:
        """Enable dynamic batching; raises `ValueError` if another scheduler is configured."""
        for scheduler in ("sequence_batching", "ensemble_scheduling"):
            if scheduler in self._config:
                text = (
                    f"configuration specified scheduling_choice as '{scheduler}', but in the model"
                    " it is 'dynamic_batching'"
                )
                raise Contradicted((scheduler, text))
        self._config.setdefault("dynamic_batching", {})

    def add_input(self, tensor: dict[str, Any]) -> None:
        """Declare an input: `name`, `data_type`, `dims`, and `optional`; raises `ValueError`."""
        self._add("input", tensor, {"name", "data_type", "dims", "optional"})

    def add_output(self, tensor: dict[str, Any]) -> None:
        """Declare an output: `name`, `data_type`, `dims`; raises `ValueError`."""
        self._add("output", tensor, {"name", "data_type", "dims"})

    def set_model_transaction_policy(self, policy: dict[str, Any]) -> None:
        """Declare the model as decoupled or not; raises `ValueError`."""
        if unknown := set(policy) - {"decoupled"}:
            raise ValueError(
                f"model transaction policy contains property other than 'decoupled': {unknown}"
            )
        if "decoupled" not in policy:
            raise ValueError("model transaction policy has no property 'decoupled'")
        known = self._config.get("model_transaction_policy", {})
        if known.get("decoupled", policy["decoupled"]) != policy["decoupled"]:
            text = "trying to change decoupled property in auto-complete-config"
            raise Contradicted(("model_transaction_policy.decoupled", text))
        self._config["model_transaction_policy"] = dict(policy)

    def _add(self, kind: str, tensor: dict[str, Any], properties: set[str]) -> None:
        if unknown := set(tensor) - properties:
            raise ValueError(
                f"{kind} '{tensor.get('name', '')}' in auto-complete-config function contains"
                f" property other than {', '.join(sorted(properties))}: {', '.join(unknown)}"
            )
        for wanted in ("name", "data_type", "dims"):
            if wanted not in tensor:
                raise ValueError(
                    f"{kind} in auto-complete-config function has no '{wanted}' property"
                )
        known = self._config.setdefault(kind, [])
        for index, other in enumerate(known):
            if other.get("name") != tensor["name"]:
                continue
            for field in ("data_type", "dims"):
                if other.get(field) not in (None, "TYPE_INVALID", [], tensor[field]):
                    text = (
                        f"unable to load model, configuration expects {field} {other[field]} for"
                        f" {kind} '{tensor['name']}', model provides {tensor[field]}"
                    )
                    raise Contradicted((f"{kind}[{index}].{field}", text))
            other.update(tensor)
            return
        known.append(dict(tensor))


def get_input_config_by_name(config: Mapping[str, Any], name: str) -> dict[str, Any] | None:
    """The entry of an input in a configuration; None if missing."""
    return _by_name(config.get("input", ()), name)


def get_output_config_by_name(config: Mapping[str, Any], name: str) -> dict[str, Any] | None:
    """The entry of an output in a configuration; None if missing."""
    return _by_name(config.get("output", ()), name)


def using_decoupled_model_transaction_policy(config: Mapping[str, Any]) -> bool:
    """True if the configured model is decoupled."""
    return bool(config.get("model_transaction_policy", {}).get("decoupled", False))


def _by_name(tensors: Iterable[dict[str, Any]], name: str) -> dict[str, Any] | None:
    for tensor in tensors:
        if tensor.get("name") == name:
            return tensor
    return None
