"""Where `headrace top` is shown: a terminal by rich or without it, or a stream of text.

A screen is a context manager; `show` shows a view, `key` waits for a key or the end of a time.
"""

import select
import shutil
import sys
import termios
import time
import tty
from types import TracebackType
from typing import Any, Protocol, Self

from headrace.commands.top_table import View, plain_lines, rich_lines

_ABOVE = 6  # lines that are not versions
_CLEAR = "\x1b[H\x1b[J"
_HIDE, _UNHIDE = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"  # the cursor, on another page


class Screen(Protocol):
    """See the module."""

    def __enter__(self) -> Self: ...
    def __exit__(self, kind: Any, error: Any, trace: Any) -> None: ...
    def show(self, view: View) -> None: ...
    def key(self, seconds: float) -> str: ...


def choose_screen(live: bool) -> Screen:
    """A terminal if `live`, which standard output must be; by rich if it is there."""
    if not live:
        return TextScreen()
    try:
        return RichScreen()
    except ImportError:
        return PlainScreen()


class TextScreen:
    """Table after table, for a file or a pipe."""

    def __init__(self) -> None:
        self._shown = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        return None

    def show(self, view: View) -> None:
        """Print all of it."""
        width = shutil.get_terminal_size((100, 0)).columns
        print("\n" * self._shown + "\n".join(plain_lines(view, width)), flush=True)
        self._shown = True

    def key(self, seconds: float) -> str:
        """Nobody presses one."""
        time.sleep(seconds)
        return ""


class PlainScreen:
    """A terminal that is written anew each time; keys are read if standard input is one, too."""

    def __init__(self) -> None:
        self._state: list[Any] | None = None

    def __enter__(self) -> Self:
        if sys.stdin.isatty():
            self._state = termios.tcgetattr(sys.stdin)
            tty.setcbreak(sys.stdin)  # keys without Return, and not on the screen
        self.begin()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.end()
        if self._state is not None:
            termios.tcsetattr(sys.stdin, termios.TCSADRAIN, self._state)

    def begin(self) -> None:
        """Take the terminal."""
        print(_HIDE, end="", flush=True)

    def end(self) -> None:
        """Give it back as it was."""
        print(_UNHIDE, end="", flush=True)

    def show(self, view: View) -> None:
        """Write it over what was there."""
        size = shutil.get_terminal_size()
        lines = plain_lines(view, size.columns, max(size.lines - _ABOVE, 1))
        print(_CLEAR + "\n".join(line[: size.columns] for line in lines), end="", flush=True)

    def key(self, seconds: float) -> str:
        """The key that is pressed within that time; empty for none."""
        if self._state is None:
            time.sleep(seconds)
            return ""
        pressed, _, _ = select.select([sys.stdin], [], [], seconds)
        return sys.stdin.read(1) if pressed else ""


class RichScreen(PlainScreen):
    """A terminal by rich, with colours; raises `ImportError` if that is not installed."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.live import Live

        super().__init__()
        self._console = Console()
        self._live = Live(console=self._console, screen=True, auto_refresh=False)

    def begin(self) -> None:
        """Take the terminal."""
        self._live.start()

    def end(self) -> None:
        """Give it back as it was."""
        self._live.stop()

    def show(self, view: View) -> None:
        """Show it in place of what was there."""
        size = self._console.size
        self._live.update(rich_lines(view, size.width, max(size.height - _ABOVE, 1)), refresh=True)
