"""What a model says about the environment that it needs. Reads files; builds and starts nothing.

In this order:

1. `EXECUTION_ENV_PATH` in the configuration's parameters, as in Triton: an environment that is
   there, as a directory or an archive.
2. In the version's directory, a `requirements.txt` or a script block in the Python file itself.
3. A `requirements.txt` in the model's directory.

A model that is nothing but a file has no directory of its own: only its script block counts, not
what happens to lie beside it.
"""

import os
import sys
from dataclasses import dataclass
from pathlib import Path

from headrace.core.errors import InvalidOption, LoadFailed
from headrace.core.model_spec import LoadSpec
from headrace.execution.environments.interpreters import satisfies
from headrace.execution.environments.redaction import redact
from headrace.execution.environments.requirements import (
    Requirements,
    from_dependencies,
    read_requirements,
)
from headrace.execution.environments.script_block import ScriptBlock, read_script_block

PATH_PARAMETER = "EXECUTION_ENV_PATH"
_MODEL_DIRECTORY = "$$TRITON_MODEL_DIRECTORY"
_FILE = "requirements.txt"


@dataclass(frozen=True, slots=True)
class Packages:
    """Packages to install, and which interpreter: a name or path, or a specifier of versions."""

    requirements: Requirements
    python: str = ""
    requires_python: str = ""


@dataclass(frozen=True, slots=True)
class Ready:
    """An environment that somebody else has made: a directory, or an archive of one."""

    path: Path


def demand_of(spec: LoadSpec) -> Packages | Ready | None:
    """What the model asks for; None if it has nothing to say.

    Raises `InvalidOption` or `LoadFailed` for what cannot be followed.
    """
    python = spec.parameters.get("python", "")
    if value := spec.parameters.get(PATH_PARAMETER, ""):
        if python:
            raise InvalidOption(
                "parameters['python']", f"{PATH_PARAMETER} brings an interpreter of its own"
            )
        return Ready(_ready_path(value, spec.root))
    block = _block(spec)
    requirements = _requirements(spec, block)
    if not requirements.wanted and not block.requires_python and (not python or "/" in python):
        return None
    return Packages(requirements, python, block.requires_python)


def _ready_path(value: str, root: Path) -> Path:
    """The path that a parameter means."""
    field = f"parameters['{PATH_PARAMETER}']"
    inside = value.startswith(_MODEL_DIRECTORY)
    path = Path(value.replace(_MODEL_DIRECTORY, str(root.resolve())))
    if not path.is_absolute():
        raise InvalidOption(
            field, f"expected an absolute path or one below {_MODEL_DIRECTORY}, got {value!r}"
        )
    real = path.resolve()
    if inside and not real.is_relative_to(root.resolve()):
        raise InvalidOption(field, f"{value!r} leads out of the model's directory")
    if not real.exists():
        raise InvalidOption(field, f"there is no {value!r}")
    return real


def _block(spec: LoadSpec) -> ScriptBlock:
    """The script block of the model's file, an empty one if it has none."""
    if spec.path.suffix != ".py":
        return ScriptBlock()
    where = f"{spec.path.name}: its script block"
    try:
        block = read_script_block(spec.path.read_bytes().decode("utf-8-sig", "replace"))
        if block is not None:
            satisfies(tuple(sys.version_info[:3]), block.requires_python)
    except ValueError as error:
        raise LoadFailed(f"{where}: {redact(str(error))}") from error
    except OSError as error:
        raise LoadFailed(f"{where}: {error.strerror}") from error
    return block or ScriptBlock()


def _requirements(spec: LoadSpec, block: ScriptBlock) -> Requirements:
    """From the first of the places that say anything, be it that nothing is needed."""
    folder, name = spec.path.parent, spec.path.name
    asked = from_dependencies(block.dependencies, spec.root, f"{name}: dependencies")
    if folder == spec.root:
        return asked
    beside = _read(folder / _FILE, spec.root)
    if asked.wanted and beside is not None and beside.wanted:
        raise LoadFailed(
            f"both {_FILE} and the script block of {name} say what the model needs; keep one"
        )
    if asked.wanted:
        return asked
    return beside or _read(spec.root / _FILE, spec.root) or Requirements()


def _read(path: Path, root: Path) -> Requirements | None:
    """What a file asks for; None if there is none."""
    return read_requirements(path, root) if os.path.lexists(path) else None
