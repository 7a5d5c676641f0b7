"""Inference requests with headers as parameters: what stands between a door and the engine then."""

from collections.abc import Iterable, Mapping

from headrace.core.errors import InvalidRequest
from headrace.core.requests import Call
from headrace.core.signature import Signature
from headrace.engine.doors import NOTHING_KNOWN, Entrance, Target
from headrace.wire.header_rules import HeaderPattern


def forwarding(
    engine: Entrance, pattern: HeaderPattern, headers: Iterable[tuple[str, str]]
) -> Entrance:
    """The way to the engine for requests with these headers.

    What must not be forwarded has every request refused, with `InvalidRequest`.
    """
    try:
        parameters = pattern.parameters(headers)
    except InvalidRequest as error:
        return _Forwarding(engine, {}, str(error))
    return _Forwarding(engine, parameters, "") if parameters else engine


class _Target:
    """A target whose requests get parameters, in place of those of the same names."""

    direct = None

    __slots__ = ("_parameters", "_target")

    def __init__(self, target: Target, parameters: Mapping[str, str]) -> None:
        self._target = target
        self._parameters = parameters

    @property
    def model(self) -> str:
        return self._target.model

    @property
    def name(self) -> str:
        return self._target.name

    @property
    def decoupled(self) -> bool:
        return self._target.decoupled

    @property
    def signature(self) -> Signature | None:
        return self._target.signature

    def submit(self, call: Call) -> None:
        call.parameters.update(self._parameters)
        self._target.submit(call)


class _Forwarding:
    """An entrance for requests that get parameters, or are refused with a text."""

    __slots__ = ("_engine", "_parameters", "_refusal", "admission")

    known = NOTHING_KNOWN

    def __init__(self, engine: Entrance, parameters: Mapping[str, str], refusal: str) -> None:
        self.admission = engine.admission
        self._engine = engine
        self._parameters = parameters
        self._refusal = refusal

    @property
    def exiting(self) -> bool:
        return self._engine.exiting

    def find(self, name: str, version: str = "") -> Target:
        if self._refusal:
            raise InvalidRequest(self._refusal)
        return _Target(self._engine.find(name, version), self._parameters)
