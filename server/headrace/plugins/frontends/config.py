"""Configuration of a front end, as the engine's process sends it over the link."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from headrace.api.header_rules import HeaderRules
from headrace.core.limits import Shares
from headrace.doors.clients import GrpcConfig, HttpConfig
from headrace.doors.grpc.options import GrpcOptions, TlsFiles
from headrace.engine.entrance import CONTEXT_HEADERS
from headrace.observability.logs import LogSettings
from headrace.protocol.http2.keep_alive import KeepAlive


@dataclass(frozen=True, slots=True)
class FrontendConfig:
    """Configuration of one front end; a door that is None stays closed. Limits: see settings."""

    http: HttpConfig | None
    grpc: GrpcConfig | None
    max_request_bytes: int
    max_admitted_requests: int
    max_admitted_bytes: int
    shares: Shares
    max_response_bytes: int
    max_object_bytes: int
    access_log: bool
    http_rules: HeaderRules
    grpc_rules: HeaderRules
    logs: LogSettings

    def document(self) -> dict[str, Any]:
        """The configuration as a JSON document."""
        return asdict(self)

    @classmethod
    def of(cls, document: dict[str, Any]) -> "FrontendConfig":
        """Parse the result of `document`; raises `TypeError` for any other."""
        values = dict(document)
        values["logs"] = LogSettings(**values["logs"])
        for door in ("http_rules", "grpc_rules"):
            values[door] = HeaderRules(**values[door])
        values["shares"] = Shares(**values["shares"])
        if (http := values["http"]) is not None:
            values["http"] = HttpConfig(**http)
        if (grpc := values["grpc"]) is not None:
            tls = grpc["tls"] and TlsFiles(**grpc["tls"])
            given = grpc["options"]
            options = GrpcOptions(**(given | {"keep_alive": KeepAlive(**given["keep_alive"])}))
            values["grpc"] = GrpcConfig(**(grpc | {"tls": tls, "options": options}))
        return cls(**values)


@dataclass(frozen=True, slots=True)
class WantedHeaders:
    """Headers that requests must carry to the engine, by model.

    `routed` is needed by traffic rules for requests without a version, `forwarded` are sent on to
    the model's upstreams. `traced` selects the headers with the trace context; there, "" stands for
    all other models.
    """

    routed: Mapping[str, str] = field(default_factory=dict)
    traced: Mapping[str, bool] = field(default_factory=dict)
    forwarded: Mapping[str, Sequence[str]] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.routed or self.forwarded) or any(self.traced.values())

    def of(self, model: str, version: str) -> list[str]:
        """The lower-case names of the headers that a request must carry."""
        names = [self.routed[model]] if not version and model in self.routed else []
        if self.traced.get(model, self.traced.get("", False)):
            names += CONTEXT_HEADERS
        return [*names, *self.forwarded.get(model, ())]

    def document(self) -> dict[str, Any]:
        """The headers as a JSON document."""
        return asdict(self)
