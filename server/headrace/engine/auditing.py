"""Entries of the audit: the outcome of an operation, and the stage that records inference.

Versions have the stage only if inference is recorded (`--audit-infer`). It stands before all others
and sees how each call ended, whichever door it came through; calls between models have none.
Owned by the event loop.
"""

from hashlib import sha256

from headrace.core.call import Call, InferResponse, Stage, Submit
from headrace.core.errors import Cancelled, ServerError
from headrace.core.model_spec import LoadParameters
from headrace.core.tensors import Buffer
from headrace.observability.audit import Audit, AuditEntry, AuditOutcome
from headrace.observability.statistics import STATUS_NAMES
from headrace.protocol.status import INTERNAL, STATUS

_HTTP = "http"
_DENIED = frozenset({401, 403, 429})  # HTTP's statuses of clients who may not, or not so often


def result(door: str, error: BaseException | None) -> tuple[AuditOutcome, str]:
    """The outcome of an operation at a door, and its status there."""
    if error is None:
        return AuditOutcome.OK, "200" if door == _HTTP else STATUS_NAMES[0]
    if isinstance(error, ServerError):
        found = STATUS[type(error)]
    else:  # a bug, or a task that is cancelled since its client has gone
        found = INTERNAL if isinstance(error, Exception) else STATUS[Cancelled]
    outcome = AuditOutcome.REFUSED if found.http in _DENIED else AuditOutcome.FAILED
    return outcome, str(found.http) if door == _HTTP else STATUS_NAMES[found.grpc]


def digest_of(data: Buffer) -> dict[str, object]:
    """Size and digest, in place of content; slow for large data."""
    return {"bytes": len(data), "sha256": sha256(data).hexdigest()}


def load_detail(parameters: LoadParameters) -> dict[str, object]:
    """Files and configuration of a load request, without content; slow for large files."""
    found: dict[str, object] = {}
    if parameters.config is not None:
        found["config"] = digest_of(parameters.config.encode(errors="surrogatepass"))
    if parameters.files:
        found["files"] = {name: digest_of(data) for name, data in parameters.files.items()}
    return found


class InferAudit:
    """Records one in `every` inference requests of clients."""

    def __init__(self, audit: Audit, every: int) -> None:
        self._audit = audit
        self._every = every
        self._count = 0

    def recorded(self, model: str, version: str, submit: Submit) -> Submit:
        """The stage before `submit` of a version."""

        def stage(call: Call) -> None:
            if call.door:
                self._count += 1
            if not call.door or self._count < self._every:
                submit(call)
                return
            self._count = 0
            call.enter(_Audited(self._audit, model, version), submit)

        return stage


class _Audited(Stage):
    """Records one call, once it has ended."""

    __slots__ = ("_audit", "_error", "_model", "_version")

    def __init__(self, audit: Audit, model: str, version: str) -> None:
        self._audit = audit
        self._model = model
        self._version = version
        self._error: ServerError | None = None

    def passed(self, call: Call, response: InferResponse, final: bool) -> None:
        self._version = response.model_version

    def ended(self, call: Call, error: ServerError | None) -> None:
        self._error = error

    def cancelled(self, call: Call) -> None:
        self._error = Cancelled("")

    def over(self, call: Call) -> None:
        door = call.door.lower()
        outcome, status = result(door, self._error)
        address = "" if (payer := call.payer) is None else payer.origin
        self._audit.record(
            AuditEntry(
                "ModelInfer", outcome, status, call.context.identity, door, address, self._model,
                self._version, call.id,
            )
        )  # fmt: skip
