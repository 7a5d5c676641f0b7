"""Plots of trials: valid XML or lines of text with each of their levels, whatever was measured."""

from collections.abc import Mapping, Sequence
from xml.etree import ElementTree

import pytest

from headrace.plugins.explain.commands.plot import as_svg, as_text
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


def test_points_tell_their_load() -> None:
    levels = [level(4, 10, 100), level(0, 10, 100), level(0, 10, 100)._replace(rate=12.5)]
    drawn = ElementTree.fromstring(as_svg("m", {"one": levels}, 200))
    told = [one.findtext(f"{_SVG}title") for one in drawn.iter(f"{_SVG}circle")]
    assert told == ["4 clients", "no clients", "12.5 requests/s"]


def test_a_text_has_the_letters_of_all_levels() -> None:
    first = [level(1, 10, 100), level(2, 20, 300)]
    second = [level(1, 5, 200), level(2, 20, 90)]
    text = "\n".join(as_text([("a", first), ("b", second)], second[1], 200, 60))
    title, top, *rows, axis, scale = text.splitlines()
    assert title.endswith("* is the best, : the target of 0.20 µs")
    assert (top[:4], rows[-1][:4], axis.strip("-"), scale.split()) == (
        "20 |", " 0 |", "   +", ["0", "0.30", "µs"],
    )  # fmt: skip
    assert top.index("*") < top.index(":") < top.index("a")  # b's other one hides nothing
    assert [line.index("b") for line in rows if "b" in line] == [top.index(":")]
    assert sum(line.count("a") for line in (top, *rows)) == 2
    assert max(map(len, (top, *rows, axis, scale))) == 60


@pytest.mark.parametrize("levels", [
    [level(1, 0, 0)], [level(0, 10, 10**12)], [level(1, 10, 10), level(2, 1e7, 10**10)],
])  # fmt: skip
def test_a_text_of_any_levels(levels: Sequence[ClientLevel]) -> None:
    for width in (1, 40):
        lines = [*as_text([("a", levels)], levels[0], 500, width)]
        assert sum("*" in line for line in lines[1:]) == 1


def test_a_text_leaves_out_a_target_far_away() -> None:
    levels = [level(1, 10, 100), level(2, 20, 200)]
    title, *rows = as_text([("a", levels)], levels[0], 601, 40)
    assert ": the target of 0.60 µs" in title
    assert not any(":" in row for row in rows)
    assert ":" in "".join([*as_text([("a", levels)], levels[0], 600, 40)][1:])
