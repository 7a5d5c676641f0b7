"""The audit log: JSON lines to a file, which is replaced when it has grown, or to standard output.

Entries become lines at once, and a thread writes them, as for the log of the server: recording
never blocks, and what cannot be written is counted, and told by a line when writing is possible
again. Clients whose requests are refused could push everything else out of the files by their
number: refusals beyond a budget are counted, and the next line has their number.
"""

import logging
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from functools import partial
from hashlib import sha256
from time import monotonic

from headrace.observability.audit import AuditEntry, AuditOptions, AuditOutcome
from headrace.observability.logs import (
    OUTPUT,
    LogWriter,
    json_line,
    shortened,
    standard,
    write_all,
)
from headrace.observability.rotating_file import RotatingFile

log = logging.getLogger(__name__)

STANDARD_OUTPUT = "-"
# Refusals: so many at once, and each second.
_BURST, _RATE = 200, 20
_MOST_DETAIL = 8 << 10  # bytes of JSON; longer details become a digest


class AuditLog:
    """An `Audit` that writes lines; owned by the event loop, but for the lines."""

    def __init__(
        self,
        send: Callable[[bytes], object],
        name: str = "",
        infer: int = 0,
        now: Callable[[], float] = monotonic,
    ) -> None:
        """`send` as of `LogWriter`; `name` is that of the file in errors."""
        self.infer = infer
        self._name = name
        self._writer = LogWriter(send, _note, self._tell)
        self._now = now
        self._left, self._at = float(_BURST), now()
        self._refusals = 0  # left out since the last line
        self._left_out = 0

    @property
    def lost(self) -> Mapping[str, int]:
        """Implements `Audit.lost`: entries that could not be written, and refusals left out."""
        return {"unwritten": self._writer.dropped, "refusals": self._left_out}

    def record(self, entry: AuditEntry) -> None:
        """Implements `Audit.record`."""
        if entry.outcome is AuditOutcome.REFUSED and not self._may_write_refusal():
            self._refusals += 1
            self._left_out += 1
            return
        found = fields_of(entry)
        if self._refusals:
            found["omitted_refusals"] = self._refusals
            self._refusals = 0
        self._writer.put(_line(found))

    def close(self) -> None:
        """Implements `Audit.close`."""
        if self._refusals:
            self._writer.put(_line({"time": _time(), "omitted_refusals": self._refusals}))
            self._refusals = 0
        self._writer.flush()

    def _may_write_refusal(self) -> bool:
        now = self._now()
        self._left = min(self._left + (now - self._at) * _RATE, _BURST)
        self._at = now
        if self._left < 1:
            return False
        self._left -= 1
        return True

    def _tell(self, error: OSError) -> None:
        log.error(
            "cannot write the audit log %s: %s; entries are left out until it can be written",
            self._name, error.strerror,
        )  # fmt: skip


def audit_log(options: AuditOptions) -> AuditLog:
    """The audit log with these options; raises `OSError` if its file cannot be opened."""
    if options.file == STANDARD_OUTPUT:
        return AuditLog(partial(write_all, standard(OUTPUT)), "standard output", options.infer)
    file = RotatingFile(options.file, options.max_bytes, options.files, "the audit log")
    return AuditLog(file.write, options.file, options.infer)


def fields_of(entry: AuditEntry) -> dict[str, object]:
    """The members of an entry's line; empty ones are left out, but who asked is always there."""
    identity = entry.identity
    found: dict[str, object] = {
        "time": _time(),
        "operation": entry.operation,
        "outcome": entry.outcome.value,
        "status": entry.status,
        "identity": shortened(identity.name),
        "kind": identity.kind,
        "roles": [role.name for role in identity.roles],
        "door": entry.door,
        "address": entry.address,
        "model": shortened(entry.model),
        "version": shortened(entry.version),
        "request_id": shortened(entry.request_id),
        "detail": _bounded(entry.detail),
    }
    return {name: value for name, value in found.items() if value}


def _bounded(detail: Mapping[str, object]) -> Mapping[str, object]:
    if not detail:
        return detail
    text = json_line(detail).encode()
    if len(text) <= _MOST_DETAIL:
        return detail
    return {"bytes": len(text), "sha256": sha256(text).hexdigest()}


def _note(count: int) -> bytes:
    return _line({"time": _time(), "lost": count})


def _time() -> str:
    return datetime.now(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")


def _line(fields: Mapping[str, object]) -> bytes:
    return f"{json_line(fields)}\n".encode(errors="backslashreplace")
