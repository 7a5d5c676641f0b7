"""Entries of the audit: outcomes, and which inference requests are recorded."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import sha256

import pytest

from headrace.core.call import Call, CallContext, InferResponse, Timing
from headrace.core.errors import (
    Cancelled,
    Forbidden,
    NotFound,
    QuotaExceeded,
    Restricted,
    ServerError,
    Unauthenticated,
    Unavailable,
)
from headrace.core.identity import Identity
from headrace.core.model_spec import LoadParameters
from headrace.engine.auditing import InferAudit, load_detail, result
from headrace.observability.audit import AuditEntry, AuditOutcome

WHO = Identity("web", "key", ())


@dataclass
class KeptEntries:
    """An audit that keeps its entries."""

    infer: int = 0
    found: list[AuditEntry] = field(default_factory=list)
    lost: Mapping[str, int] = field(default_factory=dict)

    def record(self, entry: AuditEntry) -> None:
        self.found.append(entry)

    def close(self) -> None: ...


class AuditedClient(Call):
    """A client's call, which forgets its answer."""

    door = "GRPC"

    def __init__(self) -> None:
        super().__init__("m", "", "an id", {})
        self.context = CallContext(identity=WHO)

    def respond(self, response: InferResponse, final: bool) -> None: ...

    def finish(self) -> None: ...

    def fail(self, error: ServerError) -> None: ...


class InnerCall(AuditedClient):
    door = ""


@pytest.mark.parametrize(("error", "outcome", "http", "grpc"), [
    (None, AuditOutcome.OK, "200", "OK"),
    (Unauthenticated(""), AuditOutcome.REFUSED, "401", "UNAUTHENTICATED"),
    (Forbidden(""), AuditOutcome.REFUSED, "403", "PERMISSION_DENIED"),
    (Restricted(""), AuditOutcome.REFUSED, "403", "UNAVAILABLE"),
    (QuotaExceeded(""), AuditOutcome.REFUSED, "429", "RESOURCE_EXHAUSTED"),
    (NotFound(""), AuditOutcome.FAILED, "404", "NOT_FOUND"),
    (asyncio.CancelledError(), AuditOutcome.FAILED, "499", "CANCELLED"),
    (ValueError(), AuditOutcome.FAILED, "500", "INTERNAL"),
])  # fmt: skip
def test_outcomes(error: BaseException | None, outcome: AuditOutcome, http: str, grpc: str) -> None:
    assert result("http", error) == (outcome, http)
    assert result("grpc", error) == (outcome, grpc)
    assert result("flight", error) == (outcome, grpc)


def test_content_is_told_by_its_digest() -> None:
    parameters = LoadParameters('{"a": 1}', {"1/model.onnx": b"secret", "x": memoryview(b"yz")})
    found = load_detail(parameters)
    assert found == {
        "config": {"bytes": 8, "sha256": sha256(b'{"a": 1}').hexdigest()},
        "files": {
            "1/model.onnx": {"bytes": 6, "sha256": sha256(b"secret").hexdigest()},
            "x": {"bytes": 2, "sha256": sha256(b"yz").hexdigest()},
        },
    }
    assert load_detail(LoadParameters()) == {}


@pytest.mark.parametrize(("every", "recorded"), [(1, 6), (2, 3), (4, 1)])
def test_a_share_of_the_clients_requests_is_recorded(every: int, recorded: int) -> None:
    entries, passed = KeptEntries(), list[Call]()
    submit = InferAudit(entries, every).recorded("m", "3", passed.append)
    for _ in range(6):
        submit(InnerCall())
        submit(AuditedClient())
    for call in passed:
        call.pass_response(InferResponse("m", "4", call.id, [], Timing(1, 2, 1)), True)
    assert len(passed) == 12
    entry = AuditEntry("ModelInfer", AuditOutcome.OK, "OK", WHO, "grpc", "", "m", "4", "an id")
    assert entries.found == [entry] * recorded


def test_requests_that_fail_or_have_no_response() -> None:
    entries, passed = KeptEntries(), list[Call]()
    submit = InferAudit(entries, 1).recorded("m", "3", passed.append)
    for _ in range(3):
        submit(AuditedClient())
    first, second, third = passed
    first.pass_end(Unavailable("x"))
    second.cancel()
    third.pass_end()

    def refuse(call: Call) -> None:
        raise NotFound("x")

    with pytest.raises(NotFound):
        InferAudit(entries, 1).recorded("m", "3", refuse)(AuditedClient())
    found = [(each.outcome, each.status) for each in entries.found]
    ok, failed = AuditOutcome.OK, AuditOutcome.FAILED
    assert found == [
        (failed, "UNAVAILABLE"), (failed, "CANCELLED"), (ok, "OK"), (failed, "NOT_FOUND"),
    ]  # fmt: skip
    assert result("grpc", Cancelled("")) == found[1]
