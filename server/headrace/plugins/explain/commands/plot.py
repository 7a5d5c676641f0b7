"""A picture of trials: requests per second and the 99th percentile by settings, as SVG."""

from collections.abc import Mapping, Sequence
from xml.sax.saxutils import escape

from headrace.cli.text import duration, number
from headrace.plugins.explain.searching import ClientLevel

_WIDTH, _HEIGHT, _MARGIN, _LINE = 640, 400, 60, 18
_COLOURS = (
    "#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#17becf", "#8c564b", "#e377c2",
)  # fmt: skip
_HIGHEST = 3  # times the target: latencies beyond are at the edge
_STYLE = "text { font: 13px sans-serif } .end { text-anchor: end } polyline { fill: none }"


def as_svg(title: str, curves: Mapping[str, Sequence[ClientLevel]], target_ns: int) -> str:
    """Curves by their names: a point for each number of clients, and a line at the target."""
    levels = [level for curve in curves.values() for level in curve]
    most = max((level.per_second for level in levels), default=1.0)
    highest = min(max([target_ns, *(level.p99_ns for level in levels)]), _HIGHEST * target_ns)

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
            lines.append(
                f'<circle cx="{x}" cy="{y}" r="4" fill="{colour}"><title>'
                f"{level.clients or 'no'} clients</title></circle>"
            )
        y_of_name = bottom + _LINE * (index + 2)
        lines.append(f'<text x="{_MARGIN}" y="{y_of_name}" fill="{colour}">{escape(name)}</text>')
    return "\n".join([*lines, "</svg>"]) + "\n"
