"""Which versions get a model's requests now: its rules, held against those that are ready."""

from collections.abc import Mapping
from dataclasses import dataclass

from headrace.core.signature import Signature, TensorSpec
from headrace.scheduling.traffic_rules import TrafficRules


@dataclass(frozen=True, slots=True)
class Arrangement:
    """Who gets what.

    `weights` are those of the versions that get requests, `shadow` is 0 if nothing is copied.
    Requests are read by the signature of `reference`. `reasons` say why a version that the rules
    name gets nothing. `fallback` is whether none of those that should get requests can.
    """

    weights: Mapping[int, float]
    reference: int
    shadow: int
    reasons: Mapping[int, str]
    fallback: bool


def arrange(rules: TrafficRules, ready: Mapping[int, Signature]) -> Arrangement | None:
    """Hold rules against the versions that are ready, of which there must be one, else None."""
    if not ready:
        return None
    reasons: dict[int, str] = {}
    wanted = {number: weight for number, weight in rules.split.items() if weight}
    reasons |= dict.fromkeys((number for number in wanted if number not in ready), "is not ready")
    weights = {number: weight for number, weight in wanted.items() if number in ready}
    fallback = not weights
    shadow = rules.shadow.version if rules.shadow is not None else 0
    if fallback:
        weights = {max((n for n in ready if n != shadow), default=max(ready)): 1.0}
    reference = rules.baseline if rules.baseline in weights else min(weights)
    for number in [*weights, *([shadow] if shadow else [])]:
        why = difference(ready[reference], ready[number]) if number in ready else "is not ready"
        if why or (number == shadow and number in weights):
            reasons[number] = why or "gets requests itself, since no other version is ready"
    return Arrangement(
        {n: weight for n, weight in weights.items() if n == reference or n not in reasons},
        reference,
        0 if shadow in reasons else shadow,
        reasons,
        fallback and bool(wanted),
    )


def difference(reference: Signature, other: Signature) -> str:
    """Why requests for `reference` are none for `other`; "" if they are.

    It may have further outputs, and further inputs that are optional.
    """
    lead = "differs from the baseline: "
    if reference.decoupled != other.decoupled:
        return f"{lead}it is {'' if other.decoupled else 'not '}decoupled"
    if reference.batches != other.batches:
        return f"{lead}it does {'' if other.batches else 'not '}batch"
    inputs = {spec.name: spec for spec in other.inputs}
    outputs = {spec.name: spec for spec in other.outputs}
    for spec in reference.inputs:
        if not _same(spec, inputs.get(spec.name)):
            return f"{lead}its input '{spec.name}' is missing, or of another datatype or shape"
    known = {spec.name: spec.optional for spec in reference.inputs}
    for spec in other.inputs:
        if not spec.optional and known.get(spec.name, True):
            return f"{lead}it needs the input '{spec.name}'"
    for spec in reference.outputs:
        if not _same(spec, outputs.get(spec.name)):
            return f"{lead}its output '{spec.name}' is missing, or of another datatype or shape"
    return ""


def _same(spec: TensorSpec, other: TensorSpec | None) -> bool:
    return other is not None and spec.datatype is other.datatype and spec.dims == other.dims
