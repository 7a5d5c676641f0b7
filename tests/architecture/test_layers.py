"""The layers of the server: a module imports from layers below its own, and from its own package.

Inside a package, too, imports go one way: there is no cycle. Reads every import statement, also
those in functions and those for the type checker only.
"""

import ast
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

SERVER = Path(__file__).parents[2] / "server"
ROOT = "headrace"

# The modules that put everything together: one part, though each is a file of its own.
COMPOSITION = {
    "app", "build", "cli", "doors.server", "extending", "options", "runner", "serving", "settings",
    "testing", "triton", "__main__",
}  # fmt: skip
# Modules that declare commands, which nothing imports by a statement.
COMMANDS = {"command", "commands"}
LAYERS = {
    "ipc": 0,
    "workers": 1,
    "core": 1,
    "observability": 2,
    "protocol": 3,
    "scheduling": 3,
    "connections": 4,
    "placement": 5,
    "repository": 6,
    "engine": 7,
    "plugins.frontends": 11,  # first: the others are below the doors
    "plugins.flight": 10,
    "plugins.beam": 13,  # uses runners
    "plugins.grpcio": 10,
    "plugins.console": 10,
    "plugins.openapi": 10,
    "plugins.kserve_v1": 10,
    "plugins.inboxes": 10,
    "plugins": 8,
    "api": 8,
    "doors.listeners": 7,
    "doors.tls": 7,
    "doors.acceptor": 8,
    "doors.memory": 8,
    "doors.door": 9,
    "doors.http": 9,
    "doors.grpc": 9,
    "client": 9,
    "doors.clients": 10,
    "composition": 12,
    "commands": 13,
}
# Which parts may import what, of the libraries that shape what imports them.
LIBRARIES = {
    "fastapi": {
        "doors.http",
        "doors.grpc",
        "plugins.console",
        "plugins.openapi",
        "plugins.kserve_v1",
        "composition",
    },
    "starlette": {"doors.http", "doors.grpc", "doors.clients", "plugins.frontends", "composition"},
    "uvicorn": set(),
    "grpc": {"plugins.grpcio"},
    "onnxruntime": {"placement"},
}
# The root imports nothing but this, and only for users of its names.
OFFERED = (
    "headrace.plugins.functions", "headrace.client", "headrace.runner", "headrace.serving",
)  # fmt: skip
NOWHERE = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle"}
VAGUE_NAMES = {"utils", "util", "helpers", "helper", "manager", "managers"}

MODULES = sorted((SERVER / ROOT).rglob("*.py"))


def module_name(path: Path, server: Path = SERVER) -> str:
    """The dotted name of a file; a package is named like its directory."""
    parts = path.relative_to(server).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


NAMES = {module_name(path) for path in MODULES}


def part_of(module: str) -> str | None:
    """The entry of `LAYERS` that a module belongs to; None outside of the layers."""
    inner = module.removeprefix(ROOT).removeprefix(".")
    if inner.startswith(("plugins.", "cli.commands")) and COMMANDS & set(inner.split(".")):
        return "commands"
    if inner in COMPOSITION or inner.partition(".")[0] in COMPOSITION:
        return "composition"
    found = [part for part in LAYERS if inner == part or inner.startswith(part + ".")]
    return found[0] if found else None


@cache
def imports(path: Path, server: Path) -> list[tuple[int, str]]:
    """Line and full name of every imported module; submodules in place of names."""
    found: list[tuple[int, str]] = []
    package = module_name(path, server).split(".")
    if path.name != "__init__.py":
        package.pop()
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            origin = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:
                submodule = f"{origin}.{alias.name}"
                # The root's names for models are not for the server itself.
                offered = origin == ROOT and alias.name != "__version__"
                found.append((node.lineno, submodule if submodule in NAMES or offered else origin))
    return found


def complaints(path: Path, server: Path = SERVER) -> Iterator[str]:
    """Errors in the imports of one module, each with its line."""
    own = part_of(module_name(path, server))
    parts = module_name(path, server).split(".")[1:]
    for line, name in imports(path, server):
        where = f"{path.relative_to(server)}:{line}: {name}"
        library = name.partition(".")[0]
        if library in NOWHERE:
            yield f"{where} is not used anywhere in the server"
        elif library in LIBRARIES and own not in LIBRARIES[library]:
            yield f"{where} is only for {', '.join(sorted(LIBRARIES[library]))}"
        if library != ROOT or name == ROOT:  # the root itself holds the version
            continue
        if own is None and path.parent.name == ROOT and name.startswith(OFFERED):
            continue
        part = part_of(name)
        plugin = name.split(".")[1:3]
        if plugin[0] == "plugins" and parts[:2] not in (plugin, ["triton"]):
            yield f"{where} is a plugin, which is found by its name"
        elif part is None:
            yield f"{where} is not in a layer"
        elif own is None:
            yield f"{where}: what lies around the layers imports nothing"
        elif part != own and LAYERS[part] >= LAYERS[own]:
            yield f"{where} is in layer {LAYERS[part]}, the importer in {LAYERS[own]}"


def test_imports_go_strictly_downwards() -> None:
    assert [complaint for path in MODULES for complaint in complaints(path)] == []


def test_a_worker_needs_the_standard_library_and_numpy_alone() -> None:
    allowed = sys.stdlib_module_names | {"numpy"}
    for path in MODULES:
        if path.parent.name in ("ipc", "workers", "functions"):
            own = ("headrace.ipc", "headrace.workers", "headrace.plugins.functions")
            for line, name in imports(path, SERVER):
                assert name.partition(".")[0] in allowed or name.startswith(own), (path, line)


def cycle(imported: Mapping[str, set[str]]) -> Sequence[str]:
    """A circle of imports, its first module again at the end; empty without one."""
    try:
        TopologicalSorter(imported).prepare()
    except CycleError as error:
        found: Sequence[str] = error.args[1]
        return found
    return ()


def test_there_is_no_import_cycle() -> None:
    names = {path: module_name(path) for path in MODULES}
    imported = {
        # The root imports nothing until one of its names is used.
        name: {other for _, other in imports(path, SERVER) if other in NAMES} - {name, ROOT}
        for path, name in names.items()
    }
    assert sum(map(len, imported.values())) > len(imported)
    assert not cycle(imported)


def test_a_cycle_is_found() -> None:
    assert not cycle({"a": {"b", "c"}, "b": {"c"}, "c": set()})
    assert set(cycle({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}})) == {"a", "b", "c"}


def test_every_module_has_a_layer() -> None:
    assert {name for name in NAMES if part_of(name) is None} == {ROOT, f"{ROOT}.doors"}


def test_the_package_is_light() -> None:
    program = "import headrace, sys; print(*sys.modules, sep='\\n')"
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, check=True, text=True
    )
    loaded = ran.stdout.split()
    assert [name for name in loaded if name.startswith("headrace")] == ["headrace"]
    assert "numpy" not in loaded


def test_names_say_what_is_inside() -> None:
    """Except Triton's name, by which its models import it."""
    vague = [name for name in NAMES if VAGUE_NAMES & set(name.replace("_", ".").split("."))]
    assert [name.rpartition(".")[2] for name in vague] == ["triton_python_backend_utils"]


@pytest.mark.parametrize(("importer", "statement", "says"), [
    ("protocol/x.py", "import headrace.engine", "is in layer 7, the importer in 3"),
    ("protocol/x.py", "from headrace import engine", "is in layer 7"),
    ("protocol/x.py", "from headrace.scheduling.batch import Batch", "is in layer 3, the importer"),
    ("protocol/x.py", "from ..placement import choice", "is in layer 5"),
    ("protocol/x.py", "def f():\n    from headrace.app import main", "is in layer 12"),
    ("doors/http/x.py", "import headrace.doors.grpc.server", "is in layer 9"),
    ("doors/__init__.py", "import headrace.core", "around the layers imports nothing"),
    ("__init__.py", "from headrace.core import errors", "around the layers imports nothing"),
    ("protocol/x.py", "from headrace import model", "headrace.model is not in a layer"),
    ("protocol/x.py", "import headrace.misc", "is not in a layer"),
    ("engine/x.py", "import fastapi.routing", "is only for"),
    ("doors/http/x.py", "from grpc import aio", "is only for"),
    ("scheduling/x.py", "import onnxruntime as ort", "is only for placement"),
    ("app.py", "import onnxruntime", "is only for placement"),
    ("workers/x.py", "import pickle", "is not used anywhere"),
    ("protocol/x.py",
     "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import headrace.engine",
     "x.py:3: headrace.engine is in layer 7"),
    ("protocol/x.py", "from headrace.protocol.y import z", ""),
    ("protocol/__init__.py", "from .x import y", ""),
    ("protocol/x.py", "from headrace import __version__", ""),
    ("__init__.py", "from headrace.plugins import functions", ""),
    ("app.py", "import fastapi", ""),
    ("doors/http/x.py", "import uvicorn", "is only for"),
    ("app.py", "import headrace.plugins.x.y", "is a plugin"),
    ("plugins/y/x.py", "import headrace.plugins.x.y", "is a plugin"),
    ("plugins/x/y.py", "import headrace.plugins.x.command", "is in layer 13"),
    ("plugins/x/command.py", "from headrace.cli.command import Command", ""),
    ("plugins/x/y.py", "from headrace.cli.command import Command", "is in layer 12"),
    ("cli.py", "from headrace.settings import Settings", ""),
    ("doors/grpc/x.py", "import grpc", "is only for"),
    ("plugins/grpcio/x.py", "import grpc", ""),
    ("engine/x.py", "from headrace.repository import reading", ""),
    ("placement/local/x.py", "import onnxruntime", ""),
])  # fmt: skip
def test_errors_are_found(importer: str, statement: str, says: str, tmp_path: Path) -> None:
    path = tmp_path / ROOT / importer
    path.parent.mkdir(parents=True)
    path.write_text(statement)
    found = list(complaints(path, tmp_path))
    assert [says in complaint for complaint in found] == ([True] if says else [])
