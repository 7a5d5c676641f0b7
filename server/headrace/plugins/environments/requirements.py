"""Requirements of a model: a requirements file, a list, or a script block (PEP 723).

    # /// script
    # requires-python = ">=3.11"
    # dependencies = ["scikit-learn==1.6.*"]
    # ///

Files named by requirements must be within the model's directory, even with links resolved. pip gets
their absolute paths, but keys of environments use their content: an environment is the same
wherever the model is stored.
"""

import hashlib
import re
import shlex
import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import unquote, urlsplit

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

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


_COMMENT = re.compile(r"(^|\s)#.*$")
_URL = re.compile(r"[A-Za-z][\w+.-]*:")
_PATH = re.compile(r"(?P<path>.*?)(?P<extras>\[[^\]]*\])?(?P<rest>\s*(;| --).*)?")
_ARCHIVES = (".whl", ".zip", ".tar.gz", ".tgz", ".tar", ".tar.bz2", ".tar.xz")
_VALUES = {
    "-i": "--index-url", "--index-url": "--index-url", "--extra-index-url": "--extra-index-url",
    "-f": "--find-links", "--find-links": "--find-links", "--no-binary": "--no-binary",
    "--only-binary": "--only-binary", "--trusted-host": "--trusted-host",
    "-r": "-r", "--requirement": "-r", "-c": "-c", "--constraint": "-c",
}  # fmt: skip
_FLAGS = ("--pre", "--prefer-binary", "--require-hashes", "--no-index")
_MOST_FILES = 50  # files that include one another


@dataclass(frozen=True, slots=True)
class Line:
    """One line for pip, and its identity without paths of this machine."""

    text: str
    identity: str


@dataclass(slots=True)
class Requirements:
    """The lines for pip, of all included files in order, and constraints."""

    lines: list[Line] = field(default_factory=list)
    constraints: list[Line] = field(default_factory=list)

    @property
    def wanted(self) -> list[Line]:
        """The lines that name a package."""
        return [line for line in self.lines if not line.text.startswith("-")]

    @property
    def identity(self) -> list[list[str]]:
        """A value that identifies these requirements."""
        return [
            sorted({line.identity for line in lines}) for lines in (self.lines, self.constraints)
        ]


def read_requirements(path: Path, root: Path) -> Requirements:
    """The requirements in a file of the model directory `root`; raises `LoadFailed`."""
    found = Requirements()
    _Reader(root, found).read_file(path, found.lines)
    return found


def from_dependencies(dependencies: Iterable[str], root: Path, where: str) -> Requirements:
    """The requirements in a list, without options; `where` is for errors. Raises `LoadFailed`."""
    found = Requirements()
    reader = _Reader(root, found)
    for text in dependencies:
        if text.lstrip().startswith("-") or "\n" in text:
            raise LoadFailed(f"{where}: {redact(text)!r} is no requirement")
        found.lines.append(reader.requirement(" ".join(text.split()), root, where))
    return found


class _Reader:
    """Reads one set of requirements from its files."""

    def __init__(self, root: Path, found: Requirements) -> None:
        self._root = root.resolve()
        self._found = found
        self._files: set[tuple[Path, bool]] = set()

    def read_file(self, path: Path, into: list[Line]) -> None:
        """Append the lines of a file and of its includes; raises `LoadFailed`."""
        real = path.resolve()
        name = str(real.relative_to(self._root)) if self._inside(real) else path.name
        constrains = into is self._found.constraints
        if (real, constrains) in self._files:
            return
        self._files.add((real, constrains))
        if len(self._files) > _MOST_FILES:
            raise LoadFailed(f"{name}: more than {_MOST_FILES} files of requirements")
        if not self._inside(real):
            raise LoadFailed(f"{name}: it lies outside of the model's directory")
        try:
            text = real.read_text("utf-8-sig")
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "it is not UTF-8"
            raise LoadFailed(f"{name}: it cannot be read: {reason}") from error
        for number, line in _logical_lines(text):
            where = f"{name}:{number}"
            if line.startswith("-"):
                self._option(line, real.parent, where, into)
            else:
                into.append(self.requirement(line, real.parent, where))

    def requirement(self, line: str, folder: Path, where: str) -> Line:
        """Parse a line that names a package; raises `LoadFailed`."""
        if _URL.match(line):
            return self._from_url(line, line.split()[0], where)
        text, *options = re.split(r"\s(?=--)", line, maxsplit=1)
        try:
            found = Requirement(text)
        except InvalidRequirement:
            return self._local(line, folder, where)
        if found.url is not None:
            return self._from_url(line, found.url, where)
        if _is_archive(found.name):
            return self._local(line, folder, where)
        found.name = canonicalize_name(found.name)
        return Line(line, " ".join([str(found), *options]))

    def _from_url(self, line: str, url: str, where: str) -> Line:
        parts = urlsplit(url)
        if not parts.scheme or not (parts.netloc or parts.path.startswith("/")):
            raise LoadFailed(f"{where}: {redact(url)!r} is no URL")
        if "file" not in parts.scheme.split("+"):
            return Line(line, line)
        path = self._archive(Path(unquote(parts.path)), where)
        return Line(line, line.replace(url, _digest(path, self._root, where)))

    def _local(self, line: str, folder: Path, where: str) -> Line:
        match = _PATH.fullmatch(line)
        assert match is not None  # the pattern matches any text
        name = match["path"].strip()
        if not (folder / name).exists() and "/" not in name and not _is_archive(name):
            raise LoadFailed(
                f"{where}: {redact(line)!r} is neither a requirement, such as numpy>=2, nor the"
                " name of a wheel or archive"
            )
        path = self._archive(folder / name, where)
        tail = (match["extras"] or "") + (match["rest"] or "")
        return Line(f"{path}{tail}", _digest(path, self._root, where) + tail)

    def _option(self, line: str, folder: Path, where: str, into: list[Line]) -> None:
        try:
            words = shlex.split(line)
        except ValueError as error:
            raise LoadFailed(f"{where}: {error}") from error
        while words:
            name, given, value = words.pop(0).partition("=")
            if name[:2] in _VALUES and len(name) > 2:  # -rfile
                name, given, value = name[:2], "=", name[2:] + given + value
            if name in _FLAGS and not given:
                into.append(Line(name, name))
                continue
            if name not in _VALUES:
                raise LoadFailed(f"{where}: {_refusal(name)}")
            if not given and not words:
                raise LoadFailed(f"{where}: {name} needs a value")
            self._valued(_VALUES[name], value if given else words.pop(0), folder, where, into)

    def _valued(self, name: str, value: str, folder: Path, where: str, into: list[Line]) -> None:
        if name in ("-r", "-c"):
            if "://" in value:
                raise LoadFailed(f"{where}: {name} of a URL is not followed")
            path = self._within(folder / value, where)
            self.read_file(path, self._found.constraints if name == "-c" else into)
        elif name == "--find-links" and not _URL.match(value):
            path = self._within(folder / value, where)
            into.append(Line(f"{name} {path}", f"{name} {_digest(path, self._root, where)}"))
        elif value.startswith("file:"):
            raise LoadFailed(f"{where}: {name} of a file: give its path")
        else:
            into.append(Line(f"{name} {value}", f"{name} {value}"))

    def _archive(self, path: Path, where: str) -> Path:
        """The path of a file within the model's directory; raises `LoadFailed`.

        Not a directory: pip builds inside it, which would change its content.
        """
        real = self._within(path, where)
        if real.is_dir():
            raise LoadFailed(f"{where}: {real.name!r} is a directory; expected a wheel or archive")
        return real

    def _within(self, path: Path, where: str) -> Path:
        """`path` with links resolved, within the model's directory; raises `LoadFailed`."""
        real = path.resolve()
        if not self._inside(real):
            raise LoadFailed(f"{where}: {path.name!r} lies outside of the model's directory")
        if not real.exists():
            name = str(real.relative_to(self._root))
            raise LoadFailed(f"{where}: there is no file {name!r} in the model's directory")
        return real

    def _inside(self, real: Path) -> bool:
        return real.is_relative_to(self._root)


def _logical_lines(text: str) -> Iterator[tuple[int, str]]:
    """Lines with their numbers, without comments, with continuations joined."""
    parts: list[str] = []
    for number, line in enumerate(text.splitlines(), 1):
        comment = line.lstrip().startswith("#")
        if line.endswith("\\") and not comment:
            parts.append(line[:-1])
            continue
        whole = " ".join(_COMMENT.sub("", "".join([*parts, "" if comment else line])).split())
        parts.clear()
        if whole:
            yield number, whole
    if whole := " ".join("".join(parts).split()):
        yield len(text.splitlines()), whole


def _is_archive(name: str) -> bool:
    return name.lower().endswith(_ARCHIVES)


def _refusal(name: str) -> str:
    if name in ("-e", "--editable"):
        return "an editable requirement would change beneath its environment; name it without -e"
    return f"option {name} is not taken from a model; expected one of" + (
        f" {', '.join([*dict.fromkeys(_VALUES.values()), *_FLAGS])}"
    )


def _digest(path: Path, root: Path, where: str) -> str:
    """The digest of a file, or of all files of a directory; raises `LoadFailed`."""
    total = hashlib.sha256()
    try:
        for file in sorted(path.iterdir()) if path.is_dir() else [path]:
            if not file.resolve().is_relative_to(root):
                raise LoadFailed(f"{where}: {file.name!r} links out of the model's directory")
            if file.is_file():
                total.update(f"{file.name}\0".encode())
                with file.open("rb") as stream:
                    total.update(hashlib.file_digest(stream, "sha256").digest())
    except OSError as error:
        raise LoadFailed(f"{where}: {path.name!r} cannot be read: {error.strerror}") from error
    return f"{path.name} sha256:{total.hexdigest()}"
