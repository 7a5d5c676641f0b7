"""Requests for changes, on their way into the audit: what each asks for, and its outcome.

The doors make an `AuditedRequest` of each request that changes something, tell it who asks and what
for, and end it once. What a request carries becomes names and values of settings, and digests of
everything else. Values are those of changes that were made: the members of a request that failed
may be anything.
"""

import asyncio
from collections.abc import Mapping
from typing import Any

from google.protobuf.message import Message

from headrace.api.operations import Operation
from headrace.core.errors import InvalidRequest
from headrace.core.identity import ANYONE, Identity
from headrace.core.model_spec import LoadParameters
from headrace.engine.auditing import OK_STATUS, load_detail, result
from headrace.observability.audit import Audit, AuditEntry, AuditOutcome
from headrace.protocol.documents import to_json
from headrace.protocol.parameters import load_parameters_of_message

REQUEST_ID = "x-request-id"  # the header with the id of a request other than inference
_SHORT = 64 << 10  # bytes whose digest is computed on the event loop
_LOAD = "RepositoryModelLoad"
_EMPTY: tuple[object, ...] = ("", 0, {}, [])
_HANDLE = "raw_handle"  # of memory, which is content


def is_changing(operation: Operation) -> bool:
    """True if requests of an operation may change something."""
    return not operation.in_door and any(route.changes for route in operation.routes)


def is_change(operation: Operation, message: Message) -> bool:
    """True if a request over gRPC changes something: some operations also read."""
    if not is_changing(operation):
        return False
    both = any(not route.changes for route in operation.routes)
    return not both or bool(getattr(message, "settings", True))


class AuditedRequest:
    """One request that changes something; `end` records it."""

    def __init__(
        self,
        audit: Audit,
        operation: Operation,
        door: str,
        address: str,
        request_id: str,
        identity: Identity = ANYONE,
    ) -> None:
        self.identity = identity
        self._audit = audit
        self._operation = operation
        self._door = door
        self._address = address
        self._request_id = request_id
        self._model = self._version = self._region = ""
        self._detail: Mapping[str, object] = {}

    def names(self, parts: Mapping[str, str]) -> None:
        """Take the model, its version, or the region, as a path has them."""
        if region := parts.get("region", ""):
            self._region = region
        self._model = parts.get("name", "")
        self._version = parts.get("version", "")

    async def asks(self, asked: Any) -> None:
        """Take a decoded message, or body; digests of long ones are computed on a thread."""
        if isinstance(asked, Message):
            asked = self._of_message(asked)
        if isinstance(asked, LoadParameters):
            if asked.nbytes > _SHORT:
                found = await asyncio.to_thread(load_detail, asked)
            else:
                found = load_detail(asked)
        else:
            found = {name: value for name, value in asked.items() if name != _HANDLE}
            self._version = str(found.pop("version", "") or self._version)
        self._detail = found

    def end(self, error: BaseException | None, status: int = OK_STATUS) -> None:
        """Record the request; `status` is that of an answer over HTTP without an error."""
        outcome, shown = result(self._door, error, status)
        detail = self._detail
        if outcome is not AuditOutcome.OK and self._operation.name != _LOAD and detail:
            detail = {"members": sorted(detail)}
        if self._region:
            detail = {"region": self._region, **detail}
        self._audit.record(
            AuditEntry(
                self._operation.name, outcome, shown, self.identity, self._door, self._address,
                self._model, self._version, self._request_id, detail,
            )
        )  # fmt: skip

    def _of_message(self, message: Any) -> LoadParameters | dict[str, Any]:
        if self._operation.name == _LOAD:
            self._model = message.model_name
            try:
                return load_parameters_of_message(message.parameters)
            except InvalidRequest:  # which the handler reports
                return {}
        found = {name: value for name, value in to_json(message).items() if value not in _EMPTY}
        found.update(_values(found.pop("settings", {})))
        of_region = "Memory" in self._operation.name
        name = found.pop("model_name", "") or found.pop("name", "")
        self.names({"region" if of_region else "name": name})
        return found


def _values(settings: Mapping[str, Mapping[str, object]]) -> dict[str, object]:
    """The values of settings, without the names of their types."""
    return {name: next(iter(value.values()), None) for name, value in settings.items()}
