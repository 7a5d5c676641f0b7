"""Two plots as SVG, without a plotting library: bars of throughput, lines of latency."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil, floor, log10
from pathlib import Path
from xml.sax.saxutils import escape

from benchmarks.peers import PEERS
from benchmarks.scorecard.peer import GRPC, JSON
from benchmarks.scorecard.report import LATENCY_PLOT, THROUGHPUT_PLOT, title_of
from benchmarks.scorecard.run import Outcome
from benchmarks.scorecard.sample import Metric, summary
from benchmarks.scorecard.workloads import GROUPS

# Told apart also by people who do not see all colours; the first is ours.
COLOURS = (
    "#d55e00", "#0072b2", "#009e73", "#cc79a7", "#7f7f7f",
    "#56b4e9", "#b8860b", "#5b3a9e", "#222222", "#8c564b",
    "#e377c2", "#a6d854", "#bbbbbb",
)  # fmt: skip
_WIDTH = 760
_STYLE = (
    "<style>text{font:12px sans-serif;fill:#333}.title{font-weight:bold;font-size:14px}"
    ".grid{stroke:#ddd}</style>"
)
_FRAME = "#fff"


@dataclass(frozen=True, slots=True)
class Bars:
    """Horizontal bars: a value for each name."""

    title: str
    values: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Lines:
    """Lines through points (x, y), both axes logarithmic."""

    title: str
    x_title: str
    lines: Mapping[str, Sequence[tuple[float, float]]]


def write_plots(outcome: Outcome, folder: Path) -> None:
    """Draw what was measured into a folder."""
    bars = [
        Bars(f"MLP, {title}, 16 concurrent: requests/s", _throughput(outcome, workload))
        for title, workload in (("HTTP JSON", "json-16"), ("gRPC", "grpc-16"))
    ]
    (folder / THROUGHPUT_PLOT).write_text(bar_chart(bars), encoding="utf-8")
    lines = [
        Lines(f"MLP, {title}, open loop: p99 in ms", "requests sent per second", found)
        for title, protocol in (("HTTP JSON", JSON), ("gRPC", GRPC))
        if (found := _latencies(outcome, protocol))
    ]
    (folder / LATENCY_PLOT).write_text(line_chart(lines), encoding="utf-8")


def _throughput(outcome: Outcome, workload: str) -> dict[str, float]:
    found: dict[str, float] = {}
    for peer in PEERS:
        samples = outcome.samples.get((workload, peer))
        rate = summary(samples).figures.get(Metric.THROUGHPUT) if samples else None
        if rate:
            found[peer] = rate
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def _latencies(outcome: Outcome, protocol: str) -> dict[str, list[tuple[float, float]]]:
    found: dict[str, list[tuple[float, float]]] = {}
    for workload in GROUPS["open"].workloads:
        if workload.protocol == protocol:
            for peer in PEERS:
                samples = outcome.samples.get((workload.name, peer))
                p99 = summary(samples).figures.get(Metric.P99) if samples else None
                if p99:
                    found.setdefault(peer, []).append((workload.rate, p99 * 1e3))
    return found


def colour_of(name: str) -> str:
    """The same colour in every plot."""
    names = list(PEERS)
    return COLOURS[names.index(name) % len(COLOURS)] if name in names else "#999"


def _label(name: str) -> str:
    return title_of(name) if name in PEERS else name


def bar_chart(charts: Sequence[Bars]) -> str:
    """The charts below one another."""
    parts: list[str] = []
    top, left, bar, room = 10.0, 170, 20, 90
    for chart in charts:
        top += 20
        parts.append(_text(10, top, chart.title, "title"))
        top += 10
        largest = max(chart.values.values(), default=1.0)
        for name, value in chart.values.items():
            length = value / largest * (_WIDTH - left - room)
            parts.append(_text(left - 8, top + 14, _label(name), anchor="end"))
            parts.append(
                f'<rect x="{left}" y="{top:.1f}" width="{length:.1f}" height="{bar - 4}"'
                f' fill="{colour_of(name)}"/>'
            )
            parts.append(_text(left + length + 6, top + 14, f"{value:,.0f}".replace(",", " ")))
            top += bar
        top += 10
    return _svg(top, parts)


def line_chart(charts: Sequence[Lines]) -> str:
    """The charts below one another, each with its legend."""
    parts: list[str] = []
    top, height = 10.0, 300.0
    for chart in charts:
        parts += _plot(chart, top, height)
        top += height + 80
    return _svg(top, parts)


def _plot(chart: Lines, top: float, height: float) -> Iterable[str]:
    left, right = 60.0, _WIDTH - 190.0
    upper, lower = top + 30, top + 30 + height
    points = [point for line in chart.lines.values() for point in line]
    x_axis = _Axis.around([x for x, _ in points], left, right)
    y_axis = _Axis.around([y for _, y in points], lower, upper)
    yield _text(10, top + 18, chart.title, "title")
    for value in y_axis.ticks():
        y = y_axis.place(value)
        yield f'<path class="grid" d="M{left:.1f} {y:.1f}H{right:.1f}"/>'
        yield _text(left - 6, y + 4, f"{value:g}", anchor="end")
    for value in x_axis.ticks():
        x = x_axis.place(value)
        yield f'<path class="grid" d="M{x:.1f} {upper:.1f}V{lower:.1f}"/>'
        yield _text(x, lower + 16, f"{value:g}", anchor="middle")
    yield _text((left + right) / 2, lower + 34, chart.x_title, anchor="middle")
    for number, (name, line) in enumerate(chart.lines.items()):
        colour = colour_of(name)
        path = "L".join(f"{x_axis.place(x):.1f} {y_axis.place(y):.1f}" for x, y in line)
        yield f'<path d="M{path}" fill="none" stroke="{colour}" stroke-width="2"/>'
        for x, y in line:
            place = f'cx="{x_axis.place(x):.1f}" cy="{y_axis.place(y):.1f}"'
            yield f'<circle {place} r="3" fill="{colour}"/>'
        yield _text(right + 32, upper + 16 + 20 * number, _label(name))
        yield (
            f'<rect x="{right + 14:.1f}" y="{upper + 8 + 20 * number:.1f}" width="12" height="4"'
            f' fill="{colour}"/>'
        )


@dataclass(frozen=True, slots=True)
class _Axis:
    """A logarithmic axis from `low` to `high` (powers of ten), drawn from `begin` to `end`."""

    low: int
    high: int
    begin: float
    end: float

    @classmethod
    def around(cls, values: Sequence[float], begin: float, end: float) -> "_Axis":
        """An axis that has room for all of the positive values."""
        low = floor(log10(min(values, default=1.0)))
        high = ceil(log10(max(values, default=10.0)))
        return cls(low, max(high, low + 1), begin, end)

    def ticks(self) -> list[float]:
        """The powers of ten."""
        return [10.0**exponent for exponent in range(self.low, self.high + 1)]

    def place(self, value: float) -> float:
        """The position of a value."""
        share = (log10(value) - self.low) / (self.high - self.low)
        return self.begin + share * (self.end - self.begin)


def _text(x: float, y: float, text: str, style: str = "", anchor: str = "start") -> str:
    style = f' class="{style}"' if style else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{style}>{escape(text)}</text>'


def _svg(height: float, parts: Iterable[str]) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height:.0f}"'
        f' width="{_WIDTH}" height="{height:.0f}">\n{_STYLE}\n'
        f'<rect width="100%" height="100%" fill="{_FRAME}"/>\n' + "\n".join(parts) + "\n</svg>\n"
    )
