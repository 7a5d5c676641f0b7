"""A collector that stores spans received over OTLP/HTTP."""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from tests.support.stub_server import StubRequest, StubResponse, StubServer


@dataclass
class Span:
    """A received span; ids in hexadecimal, "" for none."""

    name: str
    trace: str
    id: str
    parent: str
    state: str
    kind: int
    start: int
    end: int
    failed: bool
    attributes: dict[str, Any]
    events: list[str]
    resource: dict[str, Any]
    children: "list[Span]" = field(default_factory=list)


class OtlpReceiver(StubServer):
    """Listens on a free port of 127.0.0.1 while entered."""

    def __init__(self) -> None:
        super().__init__(self._take)
        self._spans: list[Span] = []
        self._change = threading.Condition()

    @property
    def address(self) -> str:
        """Host, port and path for a server's option."""
        return f"{self.host}/v1/traces"

    def _take(self, request: StubRequest) -> StubResponse:
        assert request.path == "/v1/traces"
        with self._change:
            for resource in ExportTraceServiceRequest.FromString(request.body).resource_spans:
                about = _plain(resource.resource.attributes)
                for scope in resource.scope_spans:
                    self._spans += [_span(span, about) for span in scope.spans]
            self._change.notify_all()
        return 200, {}, b""

    def wait(self, enough: Callable[[list[Span]], bool], seconds: float = 30) -> list[Span]:
        """The spans so far, once there are at least `count`."""
        with self._change:
            came = self._change.wait_for(lambda: enough(self._spans), seconds)
            assert came, f"waited {seconds} s in vain, {len(self._spans)} spans came"
            return list(self._spans)

    def tree(self, root: Callable[[Span], bool], size: int) -> Span:
        """The one span of this kind with its descendants, `count` spans in total."""
        spans = self.wait(lambda spans: len(_below(spans, root)) >= size)
        found = _below(spans, root)
        assert len(found) == size, [span.name for span in found]
        for span in found:
            span.children = [other for other in found if other.parent == span.id]
        return found[0]


def _below(spans: list[Span], root: Callable[[Span], bool]) -> list[Span]:
    found = [span for span in spans if root(span)]
    for span in found:
        found += [other for other in spans if other.parent == span.id]
    return found


def _span(span: Any, resource: dict[str, Any]) -> Span:
    return Span(
        span.name, span.trace_id.hex(), span.span_id.hex(), span.parent_span_id.hex(),
        span.trace_state, span.kind, span.start_time_unix_nano, span.end_time_unix_nano,
        span.status.code == 2, _plain(span.attributes), [event.name for event in span.events],
        resource,
    )  # fmt: skip


def _plain(attributes: Any) -> dict[str, Any]:
    return {a.key: getattr(a.value, a.value.WhichOneof("value")) for a in attributes}
