"""What is written for Python files that describe models on Tritons (`headrace.triton.Pool`)."""

import json
import runpy
import subprocess
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

from headrace.options import SettingsError
from headrace.triton import Pool

_MOST_LINES = 15  # of an error
_RUN = "from headrace.commands.pool_writing import main; main()"


def pools_of(path: Path) -> dict[str, Pool]:
    """The pools of a file by the names that it has them under; raises `ValueError`."""
    sys.path.insert(0, str(path.resolve().parent))
    try:
        found = runpy.run_path(str(path))
    except (Exception, SystemExit) as error:
        raise ValueError(f"{path} cannot be run:\n{_told(error, path)}") from error
    pools = {name: value for name, value in found.items() if isinstance(value, Pool)}
    if not pools:
        raise ValueError(f"{path} has no headrace.triton.Pool")
    return pools


def _told(error: BaseException, path: Path) -> str:
    """The traceback from the file's own lines on, which is all that its author wants to know."""
    inner = error.__traceback__
    while inner is not None and inner.tb_frame.f_code.co_filename != str(path):
        inner = inner.tb_next
    return "".join(traceback.format_exception(type(error), error, inner)).rstrip()


def write_pools(path: Path, directory: Path) -> list[str]:
    """Write the repository of a file's pools; the options that go with it."""
    pools = pools_of(path)
    options = [pool.options() for pool in pools.values() if not pool.endpoints]
    if any(one != options[0] for one in options):
        raise ValueError(f"{path}: the Tritons of a server are the same for all its pools")
    names = [model.name for pool in pools.values() for model in pool.models]
    if twice := {name for name in names if names.count(name) > 1}:
        raise ValueError(f"{path}: in two pools: {', '.join(sorted(twice))}")
    for pool in pools.values():
        pool.write(directory)
    return options[0] if options else []


def write_apart(path: Path, directory: Path) -> list[str]:
    """As `write_pools`, in a process of its own, since the server runs no file's code itself.

    Raises `SettingsError`.
    """
    ran = subprocess.run(
        [sys.executable, "-c", _RUN, str(path), str(directory)],
        capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    if ran.returncode:
        lines = ran.stderr.strip().splitlines()
        raise SettingsError("\n".join(lines[-_MOST_LINES:]) or f"{path} cannot be run")
    print(ran.stderr, end="", file=sys.stderr)
    options: list[str] = json.loads(ran.stdout.splitlines()[-1])
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    """Body of that process: the last line that it prints has the options, and nothing else."""
    path, directory = map(Path, sys.argv[1:] if arguments is None else arguments)
    try:
        options = write_pools(path, directory)
    except (ValueError, OSError) as error:
        print(error, file=sys.stderr)
        sys.exit(1)
    print(f"\n{json.dumps(options)}")
