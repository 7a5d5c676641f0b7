"""Which files describe models on Tritons (`headrace.triton.Pool`), and what serves them then."""

import argparse
import ast
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from headrace.settings import OPTIONS

_MODULE = "headrace.triton"


def describes_pool(path: Path) -> bool:
    """Whether a file is for `headrace.triton`, by what it imports; nothing of it is run."""
    if path.suffix != ".py":
        return False
    try:
        tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return False  # to be told by whoever loads it
    for node in tree.body:
        if isinstance(node, ast.ImportFrom):
            names = {alias.name for alias in node.names}
            if node.module == _MODULE or (node.module == "headrace" and "triton" in names):
                return True
        elif isinstance(node, ast.Import) and any(alias.name == _MODULE for alias in node.names):
            return True
    return False


def take_pools(
    given: argparse.Namespace, files: Sequence[str], stack: ExitStack
) -> tuple[list[str], Path | None]:
    """The files that are for no pools, and a repository with the models of those that are.

    `given` gets the options that go with them, behind those of the command line. The `stack`
    removes the repository. Raises `SettingsError`.
    """
    pools = [file for file in files if describes_pool(Path(file))]
    if not pools:
        return list(files), None
    # Imported late: few have any.
    from tempfile import TemporaryDirectory

    from headrace.commands.pool_writing import write_apart

    directory = Path(stack.enter_context(TemporaryDirectory(prefix="headrace-pools-")))
    by_flag = {f"--{option.name}": option for option in OPTIONS}
    for file in pools:
        for word in write_apart(Path(file), directory):
            flag, _, value = word.partition("=")
            option = by_flag[flag]
            if getattr(given, option.field) is None:
                setattr(given, option.field, [value] if option.kind is list else value)
    return [file for file in files if file not in pools], directory
