"""Requirements of a model: a requirements file, or a script block (PEP 723).

    # /// script
    # requires-python = ">=3.11"
    # dependencies = ["scikit-learn==1.6.*"]
    # ///

uv reads and checks them. What is read here are the files that they name: these must be within the
model's directory, even with links resolved, and identify an environment by their content, wherever
the model is stored.
"""

import hashlib
import os
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from headrace.core.errors import LoadFailed

_USER = re.compile(r"(://)[^/\s]*@")
_QUERY = re.compile(r"(\w://[^\s?#]*\?)[^\s#'\")>]+")


def redact(text: str) -> str:
    """`text` without credentials and queries of URLs."""
    return _QUERY.sub(r"\1***", _USER.sub(r"\1***@", text))


# Of several ends in a run of comments the last one counts. Without an end there is no block.
_BLOCK = re.compile(r"(?m)^# /// script\n((?:#(?:| .*)\n)*)# ///$")


@dataclass(frozen=True, slots=True)
class ScriptBlock:
    """The content of a script block; `requires_python` is "" if not set."""

    dependencies: tuple[str, ...] = ()
    requires_python: str = ""


def read_script_block(source: str) -> ScriptBlock | None:
    """Parse the script block of a Python file; None without one. Raises `ValueError`."""
    found = _BLOCK.findall("\n".join(source.splitlines()))
    if not found:
        return None
    if len(found) > 1:
        raise ValueError("there is more than one")
    document = tomllib.loads(re.sub("(?m)^# ?", "", found[0]))  # raises a ValueError
    dependencies = document.get("dependencies", [])
    requires = document.get("requires-python", "")
    if not isinstance(dependencies, list) or not all(isinstance(d, str) for d in dependencies):
        raise ValueError("dependencies must be a list of strings")
    if not isinstance(requires, str):
        raise ValueError("requires-python must be a string")
    return ScriptBlock(tuple(dependencies), requires.strip())


@dataclass(frozen=True, slots=True)
class Requirements:
    """Packages for uv to install, from a file or, without one, a script block.

    `wanted` are the lines that name a package, by paths relative to `folder` if it is a file.
    `identity` is the same wherever the model is stored.
    """

    folder: Path
    file: Path | None = None
    wanted: tuple[str, ...] = ()
    identity: Mapping[str, object] = field(default_factory=dict)


def read_requirements(path: Path, root: Path) -> Requirements:
    """The requirements in a file of the model directory `root`; raises `LoadFailed`."""
    real = path.resolve()
    reader = _Reader(root, real.parent)
    reader.file("-r", real.name, real.parent, path.name)
    return Requirements(real.parent, real, tuple(reader.wanted), reader.identity)


def from_dependencies(dependencies: Iterable[str], root: Path) -> Requirements:
    """The requirements in a script block, for the model directory `root`; raises `LoadFailed`."""
    folder = root.resolve()
    reader = _Reader(root, folder)
    wanted = tuple(" ".join(text.split()) for text in dependencies)
    for line in wanted:
        where = f"the script block's {redact(line)!r}"
        if line.startswith("-"):
            raise LoadFailed(f"{where} is no requirement")
        reader.requirement(line, where)
    return Requirements(folder, None, wanted, reader.identity | {"": wanted})


# What uv ignores: a comment, to the end of the line whatever it is, and the end of other lines.
_IGNORED = re.compile(r"(?m)(?:^|(?<=\s))#.*$|\\\n")
_HASHES = re.compile(r" --hash[ =]\S+")
# A package's location, by `@` or without, or its name; then extras and a marker.
_PACKAGE = re.compile(
    r"(?:[\w.-]+\s*(?:\[[^\]]*\]\s*)?(@)\s*)?([^;]+?)\s*(?:\[[^\]]*\])?\s*(?:;.*)?"
)
_REMOTE = re.compile(r"(git\+(ssh|git|https?)|https?)://|\$\{(PIP|UV)_")
_NOT_IN_PATHS = frozenset(":$%\"'")  # uv decodes URLs, replaces variables, and removes quotes
# Options that include a file, and whether its packages are wanted.
_INCLUDES = {"-r": True, "--requirement": True, "-c": False, "--constraint": False}
_LINKS = ("-f", "--find-links")
_INDEXES = ("-i", "--index-url", "--extra-index-url")
_VALUED = (*_INCLUDES, *_LINKS, *_INDEXES, "--no-binary", "--only-binary")
_FLAGS = ("--no-index", "--prefer-binary", "--require-hashes")


class _Reader:
    """Finds the packages and files that one set of requirements names."""

    def __init__(self, root: Path, folder: Path) -> None:
        self.wanted: list[str] = []
        self.identity: dict[str, object] = {}
        self._root = root.resolve()
        self._folder = folder

    def file(self, option: str, value: str, folder: Path, where: str) -> None:
        """Read a file that an option includes; raises `LoadFailed`."""
        path = self._path(value, folder, where)
        name = os.path.relpath(path, self._folder)
        if f"{option} {name}" in self.identity:
            return
        try:
            text = path.read_text("utf-8-sig")
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "it is not UTF-8"
            raise LoadFailed(f"{name}: it cannot be read: {reason}") from error
        found = (" ".join(line.split()) for line in _IGNORED.sub("", text).splitlines())
        self.identity[f"{option} {name}"] = lines = list(filter(None, found))
        for line in lines:
            where = f"{name}: {redact(line)!r}"
            if line.startswith("-"):
                self._options(line.split(), path.parent, where)
                continue
            self.requirement(line, where)
            if _INCLUDES[option]:
                self.wanted.append(line)

    def _options(self, words: list[str], folder: Path, where: str) -> None:
        """Check a line of options; raises `LoadFailed`."""
        while words:
            name, _, value = words.pop(0).partition("=")
            if name in _VALUED and not value and words:
                value = words.pop(0)
            if name in _INCLUDES:
                self.file(name, value, folder, where)
            elif name in _LINKS and not _REMOTE.match(value):
                self._content(self._path(value, folder, where), where)
            elif name in _INDEXES and not _REMOTE.match(value):
                raise LoadFailed(f"{where}: expected a URL")
            elif name not in (*_VALUED, *_FLAGS):
                raise LoadFailed(f"{where}: option {name} is not taken from a model")

    def requirement(self, line: str, where: str) -> None:
        """Check a line that names a package; raises `LoadFailed`."""
        text = _HASHES.sub("", line)
        if " -" in text:
            raise LoadFailed(f"{where}: options stand on lines of their own")
        match = _PACKAGE.fullmatch(text)
        if match is None or _REMOTE.match(match[2]):
            return
        by_path = match[1] or "/" in match[2] or match[2].startswith(".")
        if by_path or (self._folder / match[2]).is_file():
            path = self._path(match[2], self._folder, where)
            if path.is_dir():  # building it would change it
                raise LoadFailed(f"{where} is a directory; expected a wheel or archive")
            self._content(path, where)

    def _path(self, value: str, folder: Path, where: str) -> Path:
        """A path within the model's directory, links followed; raises `LoadFailed`."""
        path = folder / value
        # For uv, `..` behind a link leads back, or up from the link's target, by the kind of line.
        clear = Path(os.path.normpath(path)).resolve() == path.resolve()
        if _NOT_IN_PATHS.intersection(value) or not clear or not self._holds(path):
            raise LoadFailed(f"{where} leads to no file in the model's directory")
        return path

    def _holds(self, path: Path) -> bool:
        real = path.resolve()
        return real.is_relative_to(self._root) and real.exists()

    def _content(self, path: Path, where: str) -> None:
        """Identify a file, or all files of a directory; raises `LoadFailed`."""
        try:
            for file in path.iterdir() if path.is_dir() else [path]:
                if not self._holds(file):
                    raise LoadFailed(f"{where}: {file.name!r} links out of the model's directory")
                if file.is_file():
                    with file.open("rb") as stream:
                        digest = hashlib.file_digest(stream, "sha256").hexdigest()
                    self.identity[os.path.relpath(file, self._folder)] = digest
        except OSError as error:
            raise LoadFailed(f"{where}: {path.name} cannot be read: {error.strerror}") from error
