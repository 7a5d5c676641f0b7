"""The page of a request's path: counted and formatted calls."""

import inspect
from textwrap import dedent

import pytest

from benchmarks.calls import Call
from benchmarks.request_path import Door, outline, per_request, render, summaries, usual
from benchmarks.server import BenchmarkError
from headrace.core.signature import TensorSpec

PLAIN = Call("plain", "core/signature.py", 0, own=True)
_, LINE = inspect.getsourcelines(TensorSpec)
TOLD = Call("TensorSpec.__init__", "core/signature.py", LINE + 1, own=True)


def library(*children: Call) -> Call:
    return Call("work", "library/work.py", 0, own=False, children=children)


def own(name: str, *children: Call) -> Call:
    return Call(name, "core/tensors.py", 0, own=True, children=children)


def test_calls_for_each_request_are_rounded_up() -> None:
    assert per_request([own("a", PLAIN, PLAIN), own("b")], 1) == 4
    assert per_request([PLAIN] * 32, 16) == 2
    assert per_request([PLAIN] * 33, 16) == 2.1


def test_the_most_frequent_path_counts() -> None:
    assert usual(["a", "b", "a"]) == "a"
    with pytest.raises(BenchmarkError, match="of 4 requests no more than 2 did the same"):
        usual(["a", "b", "a", "b"])


def test_the_counts_of_a_door() -> None:
    alone = (own("a", PLAIN, library(library(PLAIN))), own("b"))
    door = Door("a door", alone, (PLAIN,) * 20, (("Call", 1), ("Piece", 2), ("Tensor", 5)))
    assert (door.calls, door.calls_together, door.library_calls) == (6, 1.3, 2)
    assert (door.files, door.made) == (2, 3)


def test_outlines() -> None:
    """Calls below their callers; repeated ones in one line; of a library, its first call."""
    assert list(outline([own("f.<locals>.g", TOLD, own("h", PLAIN)), PLAIN])) == [
        "- `f.g` core/tensors.py:0",
        f"  - `TensorSpec.__init__` core/signature.py:{LINE + 1}: One declared input or output.",
        "  - `h` core/tensors.py:0",
        "    - `plain` core/signature.py:0",
        "- `plain` core/signature.py:0",
    ]
    assert list(outline([PLAIN, PLAIN, own("other"), PLAIN])) == [
        "- `plain` (2 times) core/signature.py:0",
        "- `other` core/tensors.py:0",
        "- `plain` core/signature.py:0",
    ]
    assert list(outline([library(), library(library(own("back", PLAIN)), library())])) == [
        "- `work` *library* library/work.py", "- `work` *library* library/work.py, 2 more inside",
        "  - `back` core/tensors.py:0", "    - `plain` core/signature.py:0",
    ]  # fmt: skip


def test_summaries_are_found_by_the_first_line_of_a_function() -> None:
    source = '''\
        class A:
            """A class.

            More.
            """

            @property
            def b(self):
                """A property."""

        def c():
            "not told" + "of"

        async def d():
            """A coroutine
            of two lines."""
        '''
    found = summaries(dedent(source))
    assert found == {1: "A class.", 7: "A property.", 14: "A coroutine of two lines."}


def test_the_page() -> None:
    door = Door("Some door", (PLAIN,), (PLAIN,) * 16, (("Call", 2), ("Piece", 1), ("Tensor", 1)))
    page = render([door, door])
    assert page.count("| Some door | 1 | 1 | 0 | 1 | 3 |\n") == 2
    section = (
        "## Some door\n\n- `plain` core/signature.py:0\n\nObjects: `Call` (2 times), `Piece`.\n"
    )
    assert page.endswith(f"\n{section}\n{section}")
