"""Plots of trials: requests per second and the 99th percentile by settings, as SVG and as text."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from xml.sax.saxutils import escape

from headrace.cli.text import duration, number
from headrace.plugins.explain.searching import ClientLevel

_WIDTH, _HEIGHT, _MARGIN, _LINE = 640, 400, 60, 18
_COLOURS = (
    "#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#17becf", "#8c564b", "#e377c2",
)  # fmt: skip
_HIGHEST = 3  # times the target: latencies beyond are at the edge
_ROWS, _LEAST_COLUMNS = 12, 24  # of the area between the axes of a text
BEST, TARGET = "*", ":"
_STYLE = "text { font: 13px sans-serif } .end { text-anchor: end } polyline { fill: none }"


def as_svg(title: str, curves: Mapping[str, Sequence[ClientLevel]], target_ns: int) -> str:
    """Curves by their names: a point for each number of clients, and a line at the target."""
    most, highest = _ranges(curves.values(), target_ns)

    def place(per_second: float, p99_ns: int) -> str:
        x = _MARGIN + per_second / most * _WIDTH
        return f"{x:.0f},{_MARGIN + (1 - min(p99_ns / highest, 1)) * _HEIGHT:.0f}"

    bottom, right = _MARGIN + _HEIGHT, _MARGIN + _WIDTH
    limit = place(0, target_ns).partition(",")[2]
    height = bottom + _LINE * (len(curves) + 3)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {right + _MARGIN} {height}"'
        f' width="{right + _MARGIN}" height="{height}">',
        f"<title>{escape(title)}</title><style>{_STYLE}</style>",
        f'<text x="{_MARGIN}" y="{_MARGIN // 2}">{escape(title)}: p99 by requests/s</text>',
        f'<path d="M{_MARGIN},{_MARGIN} V{bottom} H{right}" fill="none" stroke="#333"/>',
        f'<path d="M{_MARGIN},{limit} H{right}" stroke="#999" stroke-dasharray="6"/>',
        f'<text class="end" x="{_MARGIN - 4}" y="{limit}">{duration(target_ns / 1e9)}</text>',
        f'<text class="end" x="{right}" y="{bottom + _LINE}">{number(most)} requests/s</text>',
    ]
    for index, (name, curve) in enumerate(curves.items()):
        colour = _COLOURS[index % len(_COLOURS)]
        points = [place(level.per_second, level.p99_ns) for level in curve]
        lines.append(f'<polyline points="{" ".join(points)}" stroke="{colour}"/>')
        for point, level in zip(points, curve, strict=True):
            x, _, y = point.partition(",")
            load = f"{level.clients or 'no'} clients"
            if level.rate:
                load = f"{number(level.rate)} requests/s"
            lines.append(
                f'<circle cx="{x}" cy="{y}" r="4" fill="{colour}"><title>{load}</title></circle>'
            )
        y_of_name = bottom + _LINE * (index + 2)
        lines.append(f'<text x="{_MARGIN}" y="{y_of_name}" fill="{colour}">{escape(name)}</text>')
    return "\n".join([*lines, "</svg>"]) + "\n"


def as_text(
    curves: Sequence[tuple[str, Sequence[ClientLevel]]],
    best: ClientLevel,
    target_ns: int,
    columns: int,
) -> Iterator[str]:
    """Lines with a letter of a curve for each of its levels, requests/s upwards, p99 to the right.

    The best level is marked by `BEST`, the target by a column of `TARGET` unless it is far away.
    """
    most, highest = _ranges((levels for _, levels in curves), target_ns)
    latest = max(level.p99_ns for _, levels in curves for level in levels)
    highest = min(highest, _HIGHEST * max(latest, 1))
    left, target, right = number(most), duration(target_ns / 1e9), duration(highest / 1e9)
    width = max(columns - len(left) - 2, _LEAST_COLUMNS)

    def column(p99_ns: int) -> int:
        return round(min(p99_ns / highest, 1) * (width - 1))

    area = [[" "] * width for _ in range(_ROWS)]
    for row in area if target_ns <= highest else ():
        row[column(target_ns)] = TARGET
    points = ((mark, level) for mark, levels in curves for level in levels)
    for mark, level in chain(points, [(BEST, best)]):
        area[round((1 - level.per_second / most) * (_ROWS - 1))][column(level.p99_ns)] = mark
    yield f"requests/s over p99; {BEST} is the best, {TARGET} the target of {target}"
    for tick, row in zip((left, *[""] * (_ROWS - 2), "0"), area, strict=True):
        yield f"{tick:>{len(left)}} |{''.join(row)}".rstrip()
    yield f"{'':{len(left)}} +{'-' * width}"
    yield f"{'':{len(left)}}  0{right:>{width - 1}}"


def _ranges(curves: Iterable[Sequence[ClientLevel]], target_ns: int) -> tuple[float, int]:
    """The most requests per second, and the highest latency that is drawn in its place."""
    levels = [level for curve in curves for level in curve]
    most = max((level.per_second for level in levels), default=0.0)
    highest = min(max([target_ns, *(level.p99_ns for level in levels)]), _HIGHEST * target_ns)
    return most or 1.0, highest
