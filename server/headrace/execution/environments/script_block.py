"""The block in which a Python file itself says what it needs (PEP 723).

# /// script
# requires-python = ">=3.11"
# dependencies = ["scikit-learn==1.6.*"]
# ///
"""

import tomllib
from collections.abc import Iterator
from dataclasses import dataclass

_BEGIN, _END = "# /// script", "# ///"


@dataclass(frozen=True, slots=True)
class ScriptBlock:
    """What a block asks for; `requires_python` is empty if it does not say."""

    dependencies: tuple[str, ...] = ()
    requires_python: str = ""


def read_script_block(source: str) -> ScriptBlock | None:
    """The block of a Python file; None without one. Raises `ValueError` for one that is wrong."""
    found = list(_blocks(source.splitlines()))
    if not found:
        return None
    if len(found) > 1:
        raise ValueError("there is more than one")
    document = tomllib.loads(found[0])  # its error is a ValueError
    dependencies = document.get("dependencies", [])
    requires = document.get("requires-python", "")
    if not isinstance(dependencies, list) or not all(isinstance(d, str) for d in dependencies):
        raise ValueError("dependencies must be a list of strings")
    if not isinstance(requires, str):
        raise ValueError("requires-python must be a string")
    return ScriptBlock(tuple(dependencies), requires.strip())


def _blocks(lines: list[str]) -> Iterator[str]:
    """The text of each block. One without an end is none, as the specification has it."""
    at = 0
    while at < len(lines):
        at += 1
        if lines[at - 1] != _BEGIN:
            continue
        run = []
        for line in lines[at:]:
            if line != "#" and not line.startswith("# "):
                break
            run.append(line)
        # Of several ends the last one counts.
        if _END in run:
            size = len(run) - 1 - run[::-1].index(_END)
            yield "\n".join(line[2:] for line in run[:size])
            at += size + 1
