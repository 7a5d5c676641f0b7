"""Formatting of tables, times and sizes for terminals."""

import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.progress import Progress

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_TIMES = ((1e-3, 1e6, "µs"), (1.0, 1e3, "ms"))
_SIZES = ("KiB", "MiB", "GiB", "TiB")


def table(head: Sequence[str], rows: Iterable[Sequence[str]], right: str = "") -> list[str]:
    """Lines with aligned columns of printable cells; the columns named in `right`, separated by
    blanks, are right-aligned.
    """
    lines = [tuple(head), *(tuple(map(printable, row)) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    on_right = [name in right.split() for name in head]
    return [
        "  ".join(
            cell.rjust(width) if flush else cell.ljust(width)
            for cell, width, flush in zip(line, widths, on_right, strict=True)
        ).rstrip()
        for line in lines
    ]


def fitted_table(head: Sequence[str], rows: Iterable[Sequence[str]], right: str = "") -> list[str]:
    """The lines of `table`; on a terminal by rich, if any, in its width."""
    if not (sys.stdout.isatty() and find_spec("rich")):
        return table(head, rows, right)
    from rich.table import Table
    from rich.text import Text

    fitted = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for name in head:
        fitted.add_column(name, justify="right" if name in right.split() else "left")
    for row in rows:
        fitted.add_row(*map(Text, map(printable, row)))
    return _rendered(fitted)


def styled(lines: Iterable[str], styles: Mapping[str, str]) -> Iterable[str]:
    """The lines; on a terminal with rich, the characters in `styles` have that style of it."""
    if not (sys.stdout.isatty() and find_spec("rich")):
        return lines
    from rich.text import Text

    shown = Text("\n".join(lines), no_wrap=True)
    for character, style in styles.items():
        shown.highlight_words([character], style)
    return _rendered(shown)


def _rendered(shown: "RenderableType") -> list[str]:
    from rich.console import Console

    console = Console()
    with console.capture() as captured:
        console.print(shown)
    return captured.get().splitlines()


def progress_bar() -> "Progress | None":
    """A bar on standard error with the text `told` of its task; None without a terminal or rich."""
    if not (sys.stderr.isatty() and find_spec("rich")):
        return None
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

    return Progress(
        BarColumn(), TaskProgressColumn(), TextColumn("{task.fields[told]}"),
        console=Console(stderr=True), transient=True,
    )  # fmt: skip


def printable(text: str) -> str:
    """`text` without characters that move the cursor or change colours."""
    return _CONTROL.sub(lambda found: repr(found[0])[1:-1], text)


def duration(seconds: float | None) -> str:
    """A time with three digits and a unit; `-` for None."""
    if seconds is None:
        return "-"
    for below, factor, unit in _TIMES:
        if seconds < below * 0.9995:
            return f"{_three(seconds * factor)} {unit}"
    if seconds < 120:
        return f"{_three(seconds)} s"
    minutes = int(seconds // 60)
    if minutes < 120:
        return f"{minutes} min"
    return f"{minutes // 60} h" if minutes < 48 * 60 else f"{minutes // 1440} d"


def size(nbytes: float | None) -> str:
    """A size in bytes with a unit; `-` for None."""
    if nbytes is None:
        return "-"
    if nbytes < 1024:
        return f"{nbytes:.0f} B"
    power = 1
    while power < len(_SIZES) and nbytes / 1024**power >= 999.5:
        power += 1
    return f"{_three(nbytes / 1024**power)} {_SIZES[power - 1]}"


def number(value: float | None) -> str:
    """Three digits of small values, all digits of large ones; `-` for None."""
    if value is None:
        return "-"
    return _three(value) if value < 1e6 else f"{value / 1e6:.4g}M"


def _three(value: float) -> str:
    if value == 0:
        return "0"
    decimals = 2 if value < 9.995 else 1 if value < 99.95 else 0
    text = f"{value:.{decimals}f}"
    return text.rstrip("0").rstrip(".") if value == int(value) and decimals else text
