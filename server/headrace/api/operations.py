"""The table of operations: each operation of the protocol, over HTTP and gRPC, declared once.

From it come the HTTP routes and their OpenAPI description, the gRPC procedures of both transports,
the categories of restricted access, the procedures that front ends forward, the client's paths, and
the table in `docs/protocol.md`. A new operation is an entry here and its handler in
`headrace.api.handlers`.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cache
from typing import Any
from urllib.parse import quote

from headrace.core.identity import Permission

Document = dict[str, Any]  # the JSON of a request or an answer

INFERENCE = "inference.GRPCInferenceService"
TRAFFIC = "headrace.v1.TrafficService"
HEALTH = "grpc.health.v1.Health"
REFLECTION = ("grpc.reflection.v1.ServerReflection", "grpc.reflection.v1alpha.ServerReflection")
_OTHER = "other"
_BINARY = "application/octet-stream"
ARROW_STREAM = "application/vnd.apache.arrow.stream"
_SAFE = frozenset({"GET", "HEAD"})
_PARAMETER = re.compile(r"\{(\w+)(?::\w+)?\}")


class Category(StrEnum):
    """The groups of operations that can be restricted, under Triton's names."""

    HEALTH = "health"
    METADATA = "metadata"
    INFERENCE = "inference"
    SHARED_MEMORY = "shared-memory"
    MODEL_CONFIG = "model-config"
    MODEL_REPOSITORY = "model-repository"
    STATISTICS = "statistics"
    TRACE = "trace"
    LOGGING = "logging"


@dataclass(frozen=True, slots=True)
class Route:
    """An HTTP method and path; parts of the path in brackets are optional.

    `errors` are the statuses beside 200, `also` are further paths that the description omits. A
    `body` is a JSON object. With `unready` the answer's status is 503 if its document reports
    something as not ready. Bodies and answers may also have the types in `media`.
    """

    method: str
    path: str
    summary: str
    errors: Sequence[int] = ()
    body: bool = False
    unready: bool = False
    reads: bool = False  # changes nothing, although its method is not GET
    also: Sequence[str] = ()
    media: Sequence[str] = ()

    @property
    def changes(self) -> bool:
        """True if the route changes models or settings."""
        return self.method not in _SAFE and not self.reads

    @property
    def forms(self) -> list[str]:
        """The forms of the path, from the shortest to the one with all parts."""
        return _forms(self.path)

    def match(self, path: str) -> dict[str, str] | None:
        """The parameters in a path, without empty ones; None if the path is another route's."""
        found = _pattern(self.path).fullmatch(path)
        return found and {name: text for name, text in found.groupdict().items() if text}

    def status(self, document: Mapping[str, object]) -> int:
        """The status of an answer with this document."""
        return 503 if self.unready and not document["ready"] else 200

    def filled(self, **parts: str) -> str:
        """The path with these parameter values; empty ones are left out."""
        given = {name: quote(value, safe="") for name, value in parts.items() if value}
        for form in self.forms:
            if set(parameters(form)) == given.keys():
                return _PARAMETER.sub(lambda found: given[found[1]], form)
        raise ValueError(f"{self.path} has not just the parameters {', '.join(given) or 'none'}")


@dataclass(frozen=True, slots=True)
class Operation:
    """An operation, named like its procedure, or by a name of its own if it is HTTP only.

    `permission` is what a role must permit; for a request that changes something, `changing` if the
    operation also reads. `request` and `response` are message names without the package; by default
    those of the procedure. `service` is "" for HTTP-only operations. `in_door` marks operations
    answered by the door itself: inference and streams. `counted` is the label of its requests in
    the metrics.

    Messages and bodies of more than `max_bytes` are refused before they are received, 0: as of
    infer requests (`--max-request-bytes`); those of more than `max_elements` before they are
    decoded: fields over gRPC, values over HTTP. Both are far beyond what clients send.
    """

    name: str
    category: Category | None  # None: unrestricted, describes the protocol and no models
    permission: Permission
    routes: Sequence[Route] = ()
    service: str = INFERENCE
    request: str = ""
    response: str = ""
    in_door: bool = False
    counted: str = ""
    max_bytes: int = 64 << 10
    max_elements: int = 1_000
    changing: Permission | None = None
    procedure: str = field(init=False)  # the full path, "" for none

    def __post_init__(self) -> None:
        made = {
            "request": self.request or f"{self.name}Request",
            "response": self.response or f"{self.name}Response",
            "counted": self.counted or self.category or _OTHER,
            "procedure": f"/{self.service}/{self.name}" if self.service else "",
        }
        for name, value in made.items():
            object.__setattr__(self, name, value)

    @property
    def of_model(self) -> bool:
        """True if a request may be about one model, which it names."""
        return any("{name" in route.path for route in self.routes)

    def needs(self, changes: bool) -> Permission:
        """The permission for a request that changes something, or does not."""
        return (changes and self.changing) or self.permission

    @property
    def package(self) -> str:
        """The package of the messages."""
        return self.service.rpartition(".")[0]

    @property
    def tag(self) -> str:
        """The group of the operation in the OpenAPI document."""
        return "traffic" if self.service == TRAFFIC else (self.category or _OTHER).replace("-", " ")


def parameters(path: str) -> list[str]:
    """The names of the parameters in a path."""
    return _PARAMETER.findall(path)


def _forms(path: str) -> list[str]:
    head, bracket, rest = path.partition("[")
    if not bracket:
        return [path]
    inner, _, tail = rest.rpartition("]")
    return [head + tail, *(head + form + tail for form in _forms(inner))]


@cache
def _pattern(path: str) -> re.Pattern[str]:
    """The pattern of a route's forms; versions are numbers."""
    path = path.replace("[", "(?:").replace("]", ")?")
    values = {"version": "[0-9]+"}
    return re.compile(
        _PARAMETER.sub(lambda found: f"(?P<{found[1]}>{values.get(found[1], '[^/]+')})", path)
    )


_C, _P = Category, Permission
_MODEL = "/v2/models/{name}[/versions/{version}]"
_TRACE = "/v2[/models/{name}]/trace/setting"
_RULES = "/v2/models/{name}/traffic"
_SYSTEM, _CUDA = "/v2/systemsharedmemory", "/v2/cudasharedmemory"
_CHANGED = 400, 404, 413, 503  # statuses of a change of traffic rules


def _control(action: str, summary: str, *errors: int) -> Route:
    """A load or unload route; it also matches invalid names and repositories, which are refused."""
    return Route(
        "POST", f"/v2/repository/models/{{name:path}}/{action}", summary, errors, body=True,
        also=[f"/v2/repository/{{repository}}/models/{{name}}/{action}"],
    )  # fmt: skip


OPERATIONS: tuple[Operation, ...] = (
    Operation("ModelInfer", _C.INFERENCE, _P.INFER,
              [Route("POST", _MODEL + "/infer", "Run the model", media=[_BINARY, ARROW_STREAM])],
              in_door=True, counted="infer", max_bytes=0),
    Operation("ModelStreamInfer", _C.INFERENCE, _P.INFER,
              request="ModelInferRequest", in_door=True, counted="stream_infer", max_bytes=0),
    Operation("Generate", _C.INFERENCE, _P.INFER,
              [Route("POST", _MODEL + "/generate",
                     "Run the model, with inputs and outputs as flat JSON")],
              service="", in_door=True, counted="generate", max_bytes=0),
    Operation("GenerateStream", _C.INFERENCE, _P.INFER,
              [Route("POST", _MODEL + "/generate_stream",
                     "Run the model, and get each response as it comes")],
              service="", in_door=True, counted="generate_stream", max_bytes=0),
    Operation("ServerLive", _C.HEALTH, _P.OPEN,
              [Route("GET", "/v2/health/live", "Server liveness")]),
    Operation("ServerReady", _C.HEALTH, _P.OPEN,
              [Route("GET", "/v2/health/ready", "Server readiness", unready=True)]),
    Operation("ModelReady", _C.HEALTH, _P.READ,
              [Route("GET", _MODEL + "/ready", "Model readiness", [400], unready=True)]),
    Operation("ServerMetadata", _C.METADATA, _P.READ,
              [Route("GET", "/v2", "Server metadata", also=["/v2/"])]),
    # Before the routes with a model's name: a model cannot be called "stats".
    Operation("ModelStatistics", _C.STATISTICS, _P.OBSERVE,
              [Route("GET", "/v2/models[/{name}[/versions/{version}]]/stats",
                     "Statistics of all models", [400])]),
    Operation("ModelExplain", _C.STATISTICS, _P.OBSERVE,
              [Route("GET", _MODEL + "/explain",
                     "How batches are formed, and what other settings would do",
                     [400, 404, 501, 503])],
              service=""),
    Operation("ServerStatus", _C.STATISTICS, _P.OBSERVE,
              [Route("GET", "/v2/status",
                     "Processes, limits, memory, models, and what is degraded")],
              service=""),
    Operation("ModelMetadata", _C.METADATA, _P.READ,
              [Route("GET", _MODEL, "Model metadata", [400, 404, 503])]),
    Operation("ModelConfig", _C.MODEL_CONFIG, _P.READ,
              [Route("GET", _MODEL + "/config", "Model configuration", [400, 404, 503])]),
    Operation("RepositoryIndex", _C.MODEL_REPOSITORY, _P.READ,
              [Route("POST", "/v2/repository/index", "All models and their states", [400, 413],
                     body=True, reads=True, also=["/v2/repository/{repository}/index"])]),
    Operation("RepositoryModelLoad", _C.MODEL_REPOSITORY, _P.CONTROL,
              [_control("load", "Load a model", 400, 403, 404, 413, 503)],
              max_bytes=0, max_elements=5_000),  # 1000 files of four fields
    Operation("RepositoryModelUnload", _C.MODEL_REPOSITORY, _P.CONTROL,
              [_control("unload", "Unload a model", 400, 403, 413, 503)]),
    Operation("SystemSharedMemoryStatus", _C.SHARED_MEMORY, _P.OBSERVE,
              [Route("GET", _SYSTEM + "[/region/{region}]/status",
                     "All regions of system shared memory", [404])]),
    Operation("SystemSharedMemoryRegister", _C.SHARED_MEMORY, _P.CONTROL,
              [Route("POST", _SYSTEM + "/region/{region}/register",
                     "Register system shared memory", [400, 413, 500, 501], body=True)]),
    Operation("SystemSharedMemoryUnregister", _C.SHARED_MEMORY, _P.CONTROL,
              [Route("POST", _SYSTEM + "[/region/{region}]/unregister",
                     "Unregister all system shared memory", [501])]),
    Operation("CudaSharedMemoryStatus", _C.SHARED_MEMORY, _P.OBSERVE,
              [Route("GET", _CUDA + "[/region/{region}]/status",
                     "All regions of CUDA shared memory", [404])]),
    Operation("CudaSharedMemoryRegister", _C.SHARED_MEMORY, _P.CONTROL,
              [Route("POST", _CUDA + "/region/{region}/register",
                     "Register CUDA shared memory", [400, 413, 501], body=True)]),
    Operation("CudaSharedMemoryUnregister", _C.SHARED_MEMORY, _P.CONTROL,
              [Route("POST", _CUDA + "[/region/{region}]/unregister",
                     "Unregister all CUDA shared memory", [501])]),
    Operation("TraceSetting", _C.TRACE, _P.OBSERVE,
              [Route("GET", _TRACE, "Trace settings", [400]),
               Route("POST", _TRACE, "Change trace settings", [400, 413, 501], body=True)],
              changing=_P.ADMIN),
    Operation("LogSettings", _C.LOGGING, _P.OBSERVE,
              [Route("GET", "/v2/logging", "Settings of the log"),
               Route("POST", "/v2/logging", "Change settings of the log", [400, 413, 501, 503],
                     body=True)],
              changing=_P.ADMIN),
    # With POST, so that browsers say which page asks.
    Operation("LogTail", _C.LOGGING, _P.ADMIN,
              [Route("POST", "/v2/logging/tail", "The last records of the log", [501],
                     reads=True)],
              service=""),
    Operation("ModelTraffic", _C.MODEL_REPOSITORY, _P.OBSERVE,
              [Route("GET", _RULES, "Rules that divide requests between versions", [404])],
              service=TRAFFIC),
    Operation("SetModelTraffic", _C.MODEL_REPOSITORY, _P.CONTROL,
              [Route("POST", _RULES, "Replace the rules of traffic", _CHANGED, body=True)],
              service=TRAFFIC, response="ModelTrafficResponse"),
    Operation("ResetModelTraffic", _C.MODEL_REPOSITORY, _P.CONTROL,
              [Route("DELETE", _RULES, "Restore the traffic rules of the configuration",
                     [400, 404, 503])],
              service=TRAFFIC, request="ModelTrafficRequest", response="ModelTrafficResponse"),
    Operation("PromoteModelVersion", _C.MODEL_REPOSITORY, _P.CONTROL,
              [Route("POST", _RULES + "/promote", "Give a version all requests", _CHANGED,
                     body=True)],
              service=TRAFFIC, request="ModelVersionRequest", response="ModelTrafficResponse"),
    Operation("RollBackModelVersion", _C.MODEL_REPOSITORY, _P.CONTROL,
              [Route("POST", _RULES + "/rollback", "Roll back to the baseline", _CHANGED,
                     body=True)],
              service=TRAFFIC, request="ModelVersionRequest", response="ModelTrafficResponse"),
    Operation("Check", _C.HEALTH, _P.OPEN,
              service=HEALTH, request="HealthCheckRequest", response="HealthCheckResponse",
              in_door=True),
    Operation("Watch", _C.HEALTH, _P.OPEN, service=HEALTH, request="HealthCheckRequest",
              response="HealthCheckResponse", in_door=True),
    *(Operation("ServerReflectionInfo", None, _P.OPEN, service=service,
                request="ServerReflectionRequest", response="ServerReflectionResponse",
                in_door=True)
      for service in REFLECTION),
)  # fmt: skip


NAMED = {operation.name: operation for operation in OPERATIONS}
# Of probes of the server, which wait for no other client's requests.
HEALTH_PATHS = tuple(
    route.path
    for operation in OPERATIONS
    if operation.category is Category.HEALTH
    for route in operation.routes
    if "{" not in route.path
)


def by_procedure(operations: Sequence[Operation] = OPERATIONS) -> dict[str, Operation]:
    """The operations available over gRPC, by full path."""
    return {found.procedure: found for found in operations if found.procedure}


def handed_on(operations: Sequence[Operation] = OPERATIONS) -> list[str]:
    """The procedures that front ends forward to the engine's process."""
    return [path for path, found in by_procedure(operations).items() if not found.in_door]
