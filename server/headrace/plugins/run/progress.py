"""The progress of a run on standard error: a bar on a terminal with rich, else lines."""

import sys
import time
from typing import TYPE_CHECKING, Optional

if TYPE_CHECKING:
    from rich.progress import Progress

_LINE_SECS = 10.0


class RunProgress:
    """Rows done, rows/s and the time left, as blocks end."""

    def __init__(self, quiet: bool, bar: Optional["Progress"] = None) -> None:
        """Show the progress by `bar`, or by lines unless `quiet`."""
        self._begin = self._told = time.monotonic()
        self._first: tuple[float, float] | None = None  # time and share of the first block
        self._quiet = quiet
        self._bar = bar
        if bar is not None:
            self._task = bar.add_task("", total=None, told="")
            bar.start()

    def begin(self) -> None:
        """Start the clock."""
        self._begin = self._told = time.monotonic()

    def tell(self, rows: int, failed: int, share: float | None) -> None:
        """Show the rows of this process; `share` of all bytes is done, None if unknown."""
        now = time.monotonic()
        if share is not None and self._first is None:
            self._first = now, share
        if self._bar is None and (self._quiet or now - self._told < _LINE_SECS):
            return
        self._told = now
        seconds = max(now - self._begin, 1e-9)
        parts = [f"{rows:,} rows", f"{rows / seconds:,.0f} rows/s"]
        if failed:
            parts.append(f"{failed:,} failed")
        if share is not None and self._first is not None and share > self._first[1]:
            left = (now - self._first[0]) * (1 - share) / (share - self._first[1])
            parts.append(f"{_clock(left)} left")
        if self._bar is not None:
            self._bar.update(
                self._task, completed=share, total=share and 1.0, told=", ".join(parts)
            )
            return
        percent = "" if share is None else f"{share:.0%}, "
        print(f"{percent}{', '.join(parts)}", file=sys.stderr, flush=True)

    def close(self) -> None:
        """Leave the bar as it is."""
        if self._bar is not None:
            self._bar.stop()


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}"
