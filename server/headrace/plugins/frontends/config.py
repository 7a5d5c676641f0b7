"""Configuration of a front end, as the engine's process sends it over the link."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import orjson

from headrace.api.header_rules import HeaderRules
from headrace.core.identity import Identity, Role
from headrace.core.limits import Shares
from headrace.doors.clients import DoorsConfig, GrpcConfig, HttpConfig
from headrace.doors.grpc.options import GrpcOptions
from headrace.doors.tls import TlsFiles
from headrace.observability.logs import LogSettings
from headrace.observability.statistics import LATENCY_BOUNDS
from headrace.protocol.http2.keep_alive import KeepAlive

IDENTITY_FIELD = ":identity"  # beside a request's headers on the link: `told_of` the client


def told_of(identity: Identity) -> str:
    """A client as JSON: its kind, its name, and the names of its roles."""
    roles = [role.name for role in identity.roles]
    return orjson.dumps([identity.kind, identity.name, *roles]).decode()


def identity_told(text: str) -> Identity:
    """The client of `told_of`, whose roles permit nothing: it has passed the gate already."""
    kind, name, *roles = orjson.loads(text)
    return Identity(name, kind, [Role(role, frozenset(), ()) for role in roles])


@dataclass(frozen=True, slots=True)
class FrontendConfig:
    """Configuration of one front end: its doors, the limits of the account, and the log."""

    doors: DoorsConfig
    max_requests: int
    max_bytes: int
    shares: Shares
    max_response_bytes: int
    max_object_bytes: int
    logs: LogSettings
    buckets: Sequence[int] = LATENCY_BOUNDS  # of durations, in nanoseconds
    native_histograms: bool = False
    quotas: Sequence[Mapping[str, Any]] | None = None  # of connections, as `quotas_document`

    def document(self) -> dict[str, Any]:
        """The configuration as a JSON document."""
        return asdict(self)

    @classmethod
    def of(cls, document: Mapping[str, Any]) -> "FrontendConfig":
        """Parse the result of `document`; raises `TypeError` for any other."""
        doors = dict(document["doors"])
        for rules in ("http_rules", "grpc_rules"):
            doors[rules] = HeaderRules(**doors[rules])
        if (http := doors["http"]) is not None:
            doors["http"] = HttpConfig(**(http | {"tls": _tls(http)}))
        if (grpc := doors["grpc"]) is not None:
            given = grpc["options"]
            options = GrpcOptions(**(given | {"keep_alive": KeepAlive(**given["keep_alive"])}))
            doors["grpc"] = GrpcConfig(**(grpc | {"tls": _tls(grpc), "options": options}))
        read = {"shares": Shares(**document["shares"]), "logs": LogSettings(**document["logs"])}
        return cls(**{**document, "doors": DoorsConfig(**doors), **read})


def _tls(door: Mapping[str, Any]) -> TlsFiles | None:
    return None if door["tls"] is None else TlsFiles(**door["tls"])


@dataclass(frozen=True, slots=True)
class LinkHeaders:
    """Headers that requests must carry to the engine, by model.

    `routed` is needed by traffic rules for requests without a version, `forwarded` are sent on to
    the model's upstreams, `traced` with the trace context, or choose what is traced; there, ""
    stands for all other models.
    """

    routed: Mapping[str, str] = field(default_factory=dict)
    traced: Mapping[str, Sequence[str]] = field(default_factory=dict)
    forwarded: Mapping[str, Sequence[str]] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.routed or self.forwarded) or any(self.traced.values())

    def of(self, model: str, version: str) -> list[str]:
        """The lower-case names of the headers that a request must carry."""
        names = [self.routed[model]] if not version and model in self.routed else []
        names += self.traced.get(model, self.traced.get("", ()))
        return [*names, *self.forwarded.get(model, ())]

    def document(self) -> dict[str, Any]:
        """The headers as a JSON document."""
        return asdict(self)
