"""Drawings of an ensemble's graph: as text for Mermaid, and as SVG."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from graphlib import TopologicalSorter
from xml.sax.saxutils import escape

from headrace.plugins.ensembles.graph import EnsembleStep, predecessors, read_steps
from headrace.protocol.pb.model_config_pb2 import ModelConfig

_WIDTH, _HEIGHT = 180, 44  # of a box, in pixels
_ACROSS, _DOWN = 150, 28  # between boxes
_MARGIN = 20
_STYLE = (
    "text { font: 13px sans-serif; text-anchor: middle; dominant-baseline: middle; }"
    " .edge { font-size: 11px; fill: #555; }"
    " rect { fill: #eef3fb; stroke: #4a6fa5; } .end { fill: #fff; stroke: #999; }"
    " path { fill: none; stroke: #777; }"
)


@dataclass(frozen=True, slots=True)
class Box:
    """A step, or with `end` an input or output of the ensemble; `layer` counts from the left."""

    text: str
    layer: int
    end: bool = False


@dataclass(frozen=True, slots=True)
class Drawing:
    """The boxes of a graph by name, and its edges: from, to, tensor."""

    boxes: Mapping[str, Box]
    edges: Sequence[tuple[str, str, str]]


def drawing(config: ModelConfig) -> Drawing:
    """The boxes and edges of an ensemble; raises `ValueError` for a model that is none."""
    steps = read_steps(config)
    if not steps:
        raise ValueError(f"model '{config.name}' is no ensemble: it has no steps")
    boxes = {f"in{n}": Box(one.name, 0, True) for n, one in enumerate(config.input)}
    sources = {one.name: f"in{n}" for n, one in enumerate(config.input)}
    sources |= {t: f"step{step.number}" for step in steps for t in step.outputs.values()}
    layers = _layers(steps)
    edges = []
    for step in steps:
        name = f"step{step.number}"
        version = f" {step.version}" if step.version else ""
        boxes[name] = Box(step.model + version, layers[step.number])
        edges += [(sources[tensor], name, tensor) for tensor in dict.fromkeys(step.inputs.values())]
    last = max(box.layer for box in boxes.values()) + 1
    for number, output in enumerate(config.output):
        boxes[f"out{number}"] = Box(output.name, last, True)
        edges.append((sources[output.name], f"out{number}", output.name))
    return Drawing(boxes, edges)


def _layers(steps: Sequence[EnsembleStep]) -> dict[int, int]:
    """The layer of each step: one behind those whose outputs it needs."""
    before = predecessors(steps)
    found: dict[int, int] = {}
    for number in TopologicalSorter(before).static_order():
        found[number] = 1 + max((found[each] for each in before[number]), default=0)
    return found


def as_mermaid(config: ModelConfig) -> str:
    """The graph as a flowchart of Mermaid; raises `ValueError` for a model that is none."""
    found = drawing(config)
    lines = ["flowchart LR"]
    for name, box in found.boxes.items():
        text = _quoted(box.text)
        lines.append(f"  {name}([{text}])" if box.end else f"  {name}[{text}]")
    for source, target, tensor in found.edges:
        plain = tensor in (found.boxes[source].text, found.boxes[target].text)
        lines.append(f"  {source} -->{'' if plain else f'|{_quoted(tensor)}|'} {target}")
    return "\n".join(lines) + "\n"


def _quoted(text: str) -> str:
    return '"' + text.replace("#", "#35;").replace('"', "#quot;") + '"'


def as_svg(config: ModelConfig) -> str:
    """The graph as a picture; raises `ValueError` for a model that is none."""
    found = drawing(config)
    places: dict[str, tuple[int, int]] = {}
    heights: dict[int, int] = {}
    for name, box in found.boxes.items():
        row = heights.get(box.layer, 0)
        heights[box.layer] = row + 1
        places[name] = (
            _MARGIN + box.layer * (_WIDTH + _ACROSS), _MARGIN + row * (_HEIGHT + _DOWN)
        )  # fmt: skip
    width = _MARGIN + max(x for x, _ in places.values()) + _WIDTH
    height = _MARGIN + max(y for _, y in places.values()) + _HEIGHT
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}"'
        f' width="{width}" height="{height}">',
        f"<title>{escape(config.name)}</title><style>{_STYLE}</style>",
    ]
    for source, target, tensor in found.edges:
        (x, y), (to_x, to_y) = places[source], places[target]
        x, y, to_y = x + _WIDTH, y + _HEIGHT // 2, to_y + _HEIGHT // 2
        bend = (x + to_x) // 2
        lines.append(f'<path d="M{x},{y} C{bend},{y} {bend},{to_y} {to_x},{to_y}"/>')
        if tensor not in (found.boxes[source].text, found.boxes[target].text):
            lines.append(
                f'<text class="edge" x="{bend}" y="{(y + to_y) // 2 - 8}">{escape(tensor)}</text>'
            )
    for name, box in found.boxes.items():
        x, y = places[name]
        kind, round_by = (' class="end"', _HEIGHT // 2) if box.end else ("", 5)
        lines.append(
            f'<rect{kind} x="{x}" y="{y}" width="{_WIDTH}" height="{_HEIGHT}" rx="{round_by}"/>'
        )
        text = escape(box.text)
        lines.append(f'<text x="{x + _WIDTH // 2}" y="{y + _HEIGHT // 2}">{text}</text>')
    return "\n".join([*lines, "</svg>"]) + "\n"


def draw(config: ModelConfig, form: str) -> str:
    """The graph in a form, `mermaid` or `svg`; raises `ValueError` for a model that is none."""
    return as_svg(config) if form == "svg" else as_mermaid(config)
