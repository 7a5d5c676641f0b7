"""`headrace triton`: Python files that describe models on Tritons (`headrace.triton.Pool`).

`write` writes the model repository for the pools of a file, `drift` shows differences of their
servers; `serve` and `models check` accept such a file like a model (`take_pools`).
"""

import argparse
import ast
import dataclasses
import json
import runpy
import shlex
import subprocess
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.cli.command import EXIT_FAILURE, Command, option
from headrace.cli.text import fitted_table, printable
from headrace.core.errors import RepositoryError
from headrace.options import SettingsError
from headrace.plugins.triton.pools import Drift, Pool, drift_of
from headrace.settings import OPTIONS

if TYPE_CHECKING:
    from headrace.protocol.pb.model_config_pb2 import ModelConfig

_MODULE = "headrace.triton"
_MOST_LINES = 15  # shown of an error
_RUN = "from headrace.plugins.triton.command import main; main()"


def describes_pool(path: Path) -> bool:
    """True if a file imports `headrace.triton`; it is not executed."""
    if path.suffix != ".py":
        return False
    try:
        tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return False  # reported by the load
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
) -> tuple[list[str], list[str]]:
    """The files that describe no pools of Tritons, and a repository with the models of the others.

    `given` gets the pools' options, which come after those of the command line. The `stack` removes
    the repository. Raises `SettingsError`.
    """
    pools = [file for file in files if describes_pool(Path(file))]
    if not pools:
        return list(files), []
    # Imported late: pools are rare.
    from tempfile import TemporaryDirectory

    directory = Path(stack.enter_context(TemporaryDirectory(prefix="headrace-pools-")))
    by_flag = {f"--{option.name}": option for option in OPTIONS}
    for file in pools:
        for word in write_apart(Path(file), directory):
            flag, _, value = word.partition("=")
            setting = by_flag[flag]
            if getattr(given, setting.field) is None:
                setattr(given, setting.field, [value] if setting.kind is list else value)
    return [file for file in files if file not in pools], [str(directory)]


def pools_of(path: Path) -> dict[str, Pool]:
    """The pools of a file by variable name; raises `ValueError`."""
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
    """The traceback from the file's own lines on, which concern its author."""
    inner = error.__traceback__
    while inner is not None and inner.tb_frame.f_code.co_filename != str(path):
        inner = inner.tb_next
    return "".join(traceback.format_exception(type(error), error, inner)).rstrip()


def write_pools(path: Path, directory: Path) -> list[str]:
    """Write the repository for a file's pools; returns the options that go with it."""
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
    """Call `write_pools` in a separate process: the server runs no code of the file itself.

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


def main() -> None:
    """Main program of that process: its last line of output has the options, and nothing else."""
    try:
        options = write_pools(Path(sys.argv[1]), Path(sys.argv[2]))
    except (ValueError, OSError) as error:
        print(error, file=sys.stderr)
        sys.exit(1)
    print(f"\n{json.dumps(options)}")


def _run(given: argparse.Namespace) -> int:
    try:
        if given.action == "drift":
            return _drift([Path(path) for path in given.paths], given.timeout, given.json)
        options = write_pools(Path(given.file), Path(given.directory))
    except (ValueError, OSError, RepositoryError) as error:
        print(f"headrace triton: {error}", file=sys.stderr)
        return EXIT_FAILURE
    print(shlex.join(["headrace", "serve", "--model-repository", given.directory, *options]))
    return 0


def _drift(paths: Sequence[Path], timeout: float, as_json: bool) -> int:
    # Imported late, so that `--help` and usage errors do not wait for it.
    from headrace.placement.upstream.triton_options import is_managed
    from headrace.repository.reading import parameters

    found: list[Drift] = []
    asked = managed = 0
    for name, config, root, versions in _models(paths):
        if is_managed(parameters(config)):
            managed += 1
        elif config.backend == "triton":
            asked += 1
            found += drift_of(name, config, root, versions, timeout)
    if as_json:
        print(json.dumps([dataclasses.asdict(one) for one in found]))
    elif found:
        head = ("model", "server", "what", "asked for", "there")
        rows = [
            (one.model, one.endpoint, one.field, one.asked, printable(one.reported))
            for one in found
        ]
        print("\n".join(fitted_table(head, rows)))
    else:
        print(f"{asked} model{'s' if asked != 1 else ''} as asked for")
        if managed:
            print(
                f"{managed} in Tritons that the server starts, which has them as they are asked for"
            )
    return EXIT_FAILURE if found else 0


def _models(paths: Sequence[Path]) -> Iterator[tuple[str, "ModelConfig", Path, tuple[int, ...]]]:
    """The name, configuration, directory and versions of all models."""
    from headrace.repository.catalogue import Catalogue
    from headrace.repository.config import read_config
    from headrace.repository.layout import materialised
    from headrace.repository.reading import chosen_versions

    for path in paths:
        if path.is_file():
            for pool in pools_of(path).values():
                for model in pool.models:
                    yield model.name, pool.config(model.name), path.parent, ()
            continue
        for source in map(materialised, Catalogue.of([path]).sources()[0]):
            config = read_config(source.config_path, source.name).config
            yield source.name, config, source.path, chosen_versions(config, source.versions)


TRITON = Command(
    name="triton",
    help="write and check models that run on Triton",
    actions=[
        Command(
            name="write",
            help="write the model repository that a Python file describes",
            description="Write the model repository for the pools (headrace.triton.Pool) of a"
            " Python file, and print the options of `headrace serve` to use with it.",
            options=[
                option("file FILE", "Python file with a pool"),
                option("directory DIR", "directory to write the repository to"),
            ],
            run=_run,
        ),
        Command(
            name="drift",
            help="compare servers with the configuration",
            description="Compare the models of upstream servers with the configuration, and print"
            " the differences. Exits with 1 if there are any.",
            options=[
                option("paths PATH...", "model repositories, or Python files with pools"),
                option("--json", "print JSON"),
                option(
                    "--timeout SECONDS", "seconds to wait for a response (default: 10)",
                    type=float, default=10.0,
                ),
            ],
            run=_run,
        ),
    ],
)  # fmt: skip
