"""Requests for operations, on their way into the audit: what each asks for, and its outcome.

The doors answer each request in the context of an `AuditedRequest`, which records those that change
something, and those that are refused for their model. What a request carries becomes names and
values of settings, and digests of everything else. Values are those of changes that were made: the
members of a request that failed may be anything.
"""

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Self

from google.protobuf.message import Message

from headrace.api.gate import AUTHORIZATION, Gate, Refused, Values
from headrace.api.operations import Operation
from headrace.core.errors import InvalidRequest, ServerError, Unauthenticated
from headrace.core.identity import NOBODY, Identity, PeerFacts
from headrace.core.model_spec import LoadParameters
from headrace.engine.auditing import load_detail, result
from headrace.observability.audit import AuditEntry, AuditOutcome, Record
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


class AuditedRequest:
    """A request, recorded at the end of its context if it changes something or is refused."""

    def __init__(
        self,
        record: Record,
        operation: Operation,
        door: str,
        address: str,
        request_id: str,
        identity: Identity,
        changes: bool = True,
    ) -> None:
        self._identity = identity
        self._changes = changes
        self._refused = False
        self._record = record
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

    def refuse(self, names: Mapping[str, str]) -> None:
        """Note that the client may not request this of the model that is named."""
        self._refused = True
        self.names(names)

    async def asks(self, asked: Any, changes: bool = True) -> None:
        """Take a decoded message, or body; digests of long ones are computed on a thread.

        A request that turns out not to change anything will not be recorded.
        """
        self._changes = changes
        if not changes:
            return
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

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _: object, error: BaseException | None, frames: object) -> None:
        if not (self._changes or self._refused):
            return
        outcome, shown = result(self._door, error)
        if self._refused:
            outcome = AuditOutcome.REFUSED
        detail = self._detail
        if outcome is not AuditOutcome.OK and self._operation.name != _LOAD and detail:
            detail = {"members": sorted(detail)}
        if self._region:
            detail = {"region": self._region, **detail}
        self._record(
            AuditEntry(
                self._operation.name, outcome, shown, self._identity, self._door, self._address,
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


def recording(record: Record, door: str, gate: Gate) -> Refused:
    """A function for `Gate.refused` that records the requests which that gate of a door refuses."""

    def refused(
        operation: Operation, error: ServerError, values: Values, peer: PeerFacts, model: str
    ) -> None:
        identity = NOBODY
        if gate.access is not None:
            with suppress(Unauthenticated):
                identity = gate.access.identify(values(AUTHORIZATION), peer)
        _, status = result(door, error)
        ids = values(REQUEST_ID)
        record(
            AuditEntry(
                operation.name, AuditOutcome.REFUSED, status, identity, door, peer.address, model,
                request_id=ids[0].decode("latin-1") if ids else "",
            )
        )  # fmt: skip

    return refused
