"""The audit log: JSON lines to a file, which is replaced when it has grown, or to standard output.

Entries become lines at once, and a thread writes them, as for the log of the server: recording
never blocks, and what cannot be written is counted, and told by a line when writing is possible
again. Clients whose requests are refused could push everything else out of the files by their
number: refusals beyond a budget are counted, and the next line has their number.
"""

import logging
import os
import stat
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

log = logging.getLogger(__name__)

STANDARD_OUTPUT = "-"
# Refusals: so many at once, and each second.
_BURST, _RATE = 200, 20
_MOST_DETAIL = 8 << 10  # bytes of JSON; longer details become a digest


class RotatingFile:
    """A file at whose end lines are written; belongs to the writing thread.

    A file that was moved away or removed is created anew, so that other programs may rotate it,
    too. Devices and pipes are neither.
    """

    def __init__(self, path: str, max_bytes: int, files: int) -> None:
        """Raises `OSError` if the file cannot be opened. `max_bytes` 0 means no limit."""
        self._path = path
        self._max_bytes = max_bytes
        self._files = files
        self._descriptor = -1
        self._stuck = False  # the last rotation failed
        self._open()

    def write(self, lines: bytes) -> None:
        """Write whole lines, all or none; raises `OSError`."""
        self._follow()
        size = os.fstat(self._descriptor).st_size if self._is_regular else 0
        if size and self._max_bytes and size + len(lines) > self._max_bytes:
            size = self._rotate(size)
        try:
            write_all(self._descriptor, lines)
        except OSError:
            if self._is_regular:
                os.ftruncate(self._descriptor, size)  # no half line
            raise

    def _open(self) -> None:
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        found = os.open(self._path, flags, 0o600)
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor = found
        self._is_regular = stat.S_ISREG(os.fstat(found).st_mode)

    def _follow(self) -> None:
        """Open the file anew if the path has another one, or none."""
        if not self._is_regular:
            return
        try:
            same = os.path.samestat(os.stat(self._path), os.fstat(self._descriptor))
        except FileNotFoundError:
            same = False
        if not same:
            self._open()

    def _rotate(self, size: int) -> int:
        """Start a new file; returns its size. If that fails, the old one grows beyond its limit:
        entries are worth more than the limit.
        """
        try:
            for number in range(self._files, 0, -1):
                older = f"{self._path}.{number - 1}" if number > 1 else self._path
                if os.path.exists(older):
                    os.replace(older, f"{self._path}.{number}")
            if not self._files:
                os.unlink(self._path)
            self._open()
        except OSError as error:
            if not self._stuck:
                log.error("cannot rotate the audit log %s: %s", self._path, error.strerror)
            self._stuck = True
            return size
        self._stuck = False
        return os.fstat(self._descriptor).st_size


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
    file = RotatingFile(options.file, options.max_bytes, options.files)
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
