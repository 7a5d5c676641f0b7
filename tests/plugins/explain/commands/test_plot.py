"""Pictures of trials: valid XML with a curve for each, whatever was measured."""

from collections.abc import Mapping, Sequence
from xml.etree import ElementTree

import pytest

from headrace.plugins.explain.commands.plot import as_svg
from headrace.plugins.explain.searching import ClientLevel

_SVG = "{http://www.w3.org/2000/svg}"


def level(clients: int, per_second: float, p99_ns: int) -> ClientLevel:
    return ClientLevel(clients, 100, per_second, p99_ns, p99_ns, p99_ns)


@pytest.mark.parametrize("curves", [
    {},
    {"as it is": [level(1, 10, 10_000_000)]},
    {"as it is": [level(1, 10, 10), level(2, 20, 900)], "a < b & c": [level(1, 15, 10**12)]},
])  # fmt: skip
def test_curves(curves: Mapping[str, Sequence[ClientLevel]]) -> None:
    drawn = ElementTree.fromstring(as_svg("m <1>", curves, 500))
    assert drawn.findtext(f"{_SVG}title") == "m <1>"
    assert len(drawn.findall(f"{_SVG}polyline")) == len(curves)
    points = drawn.findall(f"{_SVG}circle")
    assert len(points) == sum(map(len, curves.values()))
    assert {*curves} <= {text.text for text in drawn.findall(f"{_SVG}text")}
    width, height = (float(drawn.attrib[name]) for name in ("width", "height"))
    assert all(0 <= float(one.attrib["cx"]) <= width for one in points)
    assert all(0 <= float(one.attrib["cy"]) <= height for one in points)


def test_faster_is_further_right_and_later_higher() -> None:
    drawn = ElementTree.fromstring(
        as_svg("m", {"one": [level(1, 10, 100), level(2, 20, 300)]}, 200)
    )
    first, second = (
        (float(one.attrib["cx"]), float(one.attrib["cy"])) for one in drawn.iter(f"{_SVG}circle")
    )
    assert first[0] < second[0]
    assert first[1] > second[1]
