"""Overrides in load requests: a configuration instead of the repository's, or a whole directory.

Configurations are written by clients that may load models, and must not give them further rights:
they may set how a model is served, but not which code runs, which files are read or written, or
what the model trusts. So some fields may have any value; the others stay as in the repository.

Uploaded files are kept as long as they are in use, in a directory that only the server's user may
access, and the group of models' processes. It is created anew, so that it contains nothing that a
path could escape by, and paths are checked before anything is written. It is removed with the
process, or by a later one.
"""

import os
import tempfile
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Set
from copy import deepcopy
from functools import partial
from pathlib import Path
from threading import RLock, Thread
from weakref import WeakValueDictionary

from google.protobuf.field_mask_pb2 import FieldMask

from headrace.core.errors import InvalidRequest, LoadFailed
from headrace.core.kept_directory import KeptDirectory, remove_tree
from headrace.core.model_spec import ISOLATION_PARAMETERS
from headrace.core.tensors import Buffer
from headrace.core.texts import whole_number
from headrace.protocol.pb.model_config_pb2 import ModelConfig
from headrace.repository.config import ConfigFile, Problem, refuse
from headrace.repository.store import Lease, Store

_PREFIX = "headrace-models-"
MOST_FILES = 1_000
_MOST_LEVELS = 16
_LONGEST_NAME = 255  # bytes, the limit of file systems
_LONGEST_PATH = 1_024


class Uploads(Store):
    """The files of load requests: a store, whose models are in use or about to be loaded.

    Each upload has a token of its own; it is kept by its lease, which the store hands over with the
    first `materialise`. Thread-safe.
    """

    address = ""  # they are in no repository

    def __init__(self, max_bytes: int, group: int | None = None) -> None:
        """At most `max_bytes` of files are kept in total; `group` may read them, too."""
        self._max_bytes = max_bytes
        self._group = group
        self._bytes = 0
        self._count_of = 0
        self._new: dict[tuple[str, Hashable], Lease] = {}  # that nobody has taken yet
        self._kept = WeakValueDictionary[tuple[str, Hashable], Lease]()
        self._root: KeptDirectory | None = None
        self._guard = RLock()  # reentrant: a lease may be collected while this is held

    def put(self, name: str, files: Mapping[tuple[str, ...], Buffer]) -> Hashable:
        """Write the files of a model, by the parts of their paths as `checked_paths` returns them.

        Returns their token. Raises `LoadFailed`, with nothing left behind.
        """
        nbytes = sum(map(len, files.values()))
        self._count(nbytes)
        try:
            path = self._make_directory()
        except OSError as error:
            self._count(-nbytes)
            raise _failed(error) from error
        lease = Lease(path, partial(_remove, path, partial(self._count, -nbytes)))
        try:
            for parts, content in files.items():
                file = path.joinpath(*parts)
                file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                _write(file, content)
            for below in path.rglob("*"):
                self._share(below, 0o750 if below.is_dir() else 0o640)
        except OSError as error:
            raise _failed(error) from error
        with self._guard:
            self._count_of += 1
            key = name, self._count_of
            self._new[key] = self._kept[key] = lease
        return self._count_of

    def names(self) -> Collection[str]:
        """Implements `Store.names`."""
        with self._guard:
            return {name for name, _ in self._kept}

    def token(self, name: str) -> Hashable:
        """Implements `Store.token`: that of the newest upload."""
        with self._guard:
            return next((token for own, token in reversed([*self._kept]) if own == name), 0)

    def materialise(self, name: str, token: Hashable) -> Lease:
        """Implements `Store.materialise`."""
        with self._guard:
            lease = self._new.pop((name, token), None) or self._kept.get((name, token))
        if lease is None:
            raise LoadFailed("the files of its load request are no longer kept")
        return lease

    def close(self) -> None:
        """Remove everything, even if in use."""
        with self._guard:
            root, self._root = self._root, None
            if root is not None:
                root.close()

    def _count(self, nbytes: int) -> None:
        with self._guard:
            if nbytes > 0 and self._bytes + nbytes > self._max_bytes:
                raise LoadFailed(
                    f"{nbytes} bytes of files are too many beside those of other load requests;"
                    f" {self._max_bytes} are kept at most (--max-override-bytes)"
                )
            self._bytes += nbytes

    def _make_directory(self) -> Path:
        with self._guard:
            if self._root is None:
                self._root = KeptDirectory(_PREFIX)
                self._share(self._root.path, 0o710)
            path = Path(tempfile.mkdtemp(dir=self._root.path))
            self._share(path, 0o750)
            return path

    def _share(self, path: Path, mode: int) -> None:
        """Let the group of models' processes read a file or directory, by permissions `mode`."""
        if self._group is not None:
            os.chown(path, -1, self._group)
            path.chmod(mode)


def checked_paths(files: Mapping[str, Buffer]) -> dict[tuple[str, ...], Buffer]:
    """Files by the parts of their paths; raises `InvalidRequest` unless all are in one directory.

    No part may lead outside, and no path may be both a file and a directory.
    """
    if len(files) > MOST_FILES:
        raise InvalidRequest(f"at most {MOST_FILES} files are taken, got {len(files)}")
    found = {_parts(path): content for path, content in files.items()}
    directories = {parts[:n] for parts in found for n in range(1, len(parts))}
    if len(found) < len(files):
        raise InvalidRequest("a file is given twice, with and without a slash before its path")
    for parts in found:
        if parts in directories:
            raise InvalidRequest(f"{_shown('/'.join(parts))} is a file and a directory")
    return found


def _parts(path: str) -> tuple[str, ...]:
    try:
        size = len(path.encode())
    except UnicodeEncodeError:
        raise InvalidRequest(f"{_shown(path)} is not text") from None
    # Triton joins it to the model's directory, so that slashes before it mean nothing.
    parts = tuple(path.lstrip("/").split("/"))
    if any(part in ("", ".", "..") for part in parts):
        problem = "must consist of names, without '.', '..' and empty ones"
    elif any(ord(c) < 32 or ord(c) == 127 or c == "\\" for c in path):
        problem = "must have neither control characters nor backslashes"
    elif size > _LONGEST_PATH or any(len(part.encode()) > _LONGEST_NAME for part in parts):
        problem = f"is too long: {_LONGEST_PATH} bytes at most, {_LONGEST_NAME} for each name"
    elif len(parts) > _MOST_LEVELS:
        problem = f"must have at most {_MOST_LEVELS} names"
    else:
        return parts
    raise InvalidRequest(f"file path {_shown(path)} {problem}")


def _shown(path: str) -> str:
    return repr(path if len(path) <= 80 else f"{path[:80]}…")


def _write(path: Path, content: Buffer) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with open(os.open(path, flags, 0o600), "wb") as file:
        file.write(content)


def _failed(error: OSError) -> LoadFailed:
    return LoadFailed(f"its files cannot be kept: {error.strerror}")


def _remove(path: Path, gone: Callable[[], None]) -> None:
    """Remove on a thread: it may take long, and the last reference may be dropped anywhere."""
    gone()
    try:
        Thread(target=remove_tree, args=(path,), daemon=True).start()
    except RuntimeError:  # the process is ending
        remove_tree(path)


# Settings that control how a model is served.
FREE_FIELDS = (
    "name", "max_batch_size", "input", "output", "instance_group", "version_policy",
    "dynamic_batching", "sequence_batching", "model_transaction_policy", "response_cache",
)  # fmt: skip
FREE_PARAMETERS = frozenset(
    {
        "batching", "split_requests", "max_concurrency", "intra_op_thread_count",
        "inter_op_thread_count", "execution_mode", "enable_mem_arena", "enable_mem_pattern",
        "memory.enable_memory_arena_shrinkage", "cudnn_conv_algo_search", "gpu_mem_limit",
        "arena_extend_strategy", "do_copy_in_default_stream",
    }
)  # fmt: skip
_THREADS = ("intra_op_thread_count", "inter_op_thread_count")
_MOST_INSTANCES = 64
_MOST_THREADS = 64  # of all instances together
_LARGEST = 2**31 - 1
_ALLOWED = "; --load-overrides=code lets a request decide that"


def overridden(base: ConfigFile, whole: ModelConfig, override: ConfigFile) -> ConfigFile:
    """The repository's configuration with the permitted changes of `override`.

    `base` is the file as written, `whole` the completed configuration, as clients see it: sending
    it back is no change. Raises `InvalidConfig` with all changes that are not permitted.
    """
    change = override.config
    labels = {output.label_filename for output in whole.output}
    refuse(override, _problems(whole, change, labels))
    return _merged(base, override)


def of_own_files(override: ConfigFile) -> ConfigFile:
    """The configuration of an uploaded directory; raises `InvalidConfig` like `overridden`."""
    change = override.config
    whole = ModelConfig(
        backend=change.backend,
        platform=change.platform,
        default_model_filename=change.default_model_filename,
    )
    labels = {output.label_filename for output in change.output}
    refuse(override, _problems(whole, change, labels))
    return override


def isolated_as(base: ModelConfig, override: ConfigFile) -> ConfigFile:
    """An override that may contain anything, with the isolation of the repository's configuration.

    Whoever may run code must not choose its user. Raises `InvalidConfig` for another isolation.
    """
    change = override.config
    asked = sorted(ISOLATION_PARAMETERS & set(change.parameters))
    refuse(
        override,
        [
            Problem(f"parameters['{name}']", "a request cannot change how a model is isolated")
            for name in asked
            if change.parameters[name] != base.parameters.get(name)
        ],
    )
    merged = deepcopy(change)
    for name in ISOLATION_PARAMETERS & set(base.parameters):
        merged.parameters[name].CopyFrom(base.parameters[name])
    return ConfigFile(override.name, merged, override.lines)


def _problems(whole: ModelConfig, change: ModelConfig, labels: Set[str]) -> Iterator[Problem]:
    for field, _ in change.ListFields():
        name = field.name
        if name == "parameters":
            yield from _parameter_problems(whole, change)
        elif name == "optimization":
            if _changes_accelerators(whole, change):
                yield _kept("optimization.execution_accelerators")
        elif name not in FREE_FIELDS and _alone(change, name) != _alone(whole, name):
            yield _kept(name)
    for index, output in enumerate(change.output):
        if output.label_filename and output.label_filename not in labels:
            yield _kept(f"output[{index}].label_filename")
    if (count := _instances(change)) > _MOST_INSTANCES:
        yield Problem("instance_group", f"at most {_MOST_INSTANCES} instances, got {count}")
    if (count := _threads(change)) > max(_MOST_THREADS, _threads(whole)):
        named = next((name for name in _THREADS if name in change.parameters), _THREADS[0])
        yield Problem(
            f"parameters['{named}']",
            f"all instances together may have {_MOST_THREADS} threads, got {count}{_ALLOWED}",
        )


def _instances(config: ModelConfig) -> int:
    return sum(max(group.count, 1) * max(len(group.gpus), 1) for group in config.instance_group)


def _threads(config: ModelConfig) -> int:
    """The threads that a configuration asks for; other texts than numbers are refused later."""
    given = [config.parameters[name].string_value for name in _THREADS if name in config.parameters]
    each = sum(whole_number(text, 0, _LARGEST) or 0 for text in given)
    return each * max(_instances(config), 1)


def _parameter_problems(whole: ModelConfig, change: ModelConfig) -> Iterator[Problem]:
    for name in sorted(change.parameters):
        if name in FREE_PARAMETERS:
            continue
        if change.parameters[name] != whole.parameters.get(name):
            yield _kept(f"parameters['{name}']")


def _changes_accelerators(whole: ModelConfig, change: ModelConfig) -> bool:
    given = change.optimization
    if not given.HasField("execution_accelerators"):
        return False
    return given.execution_accelerators != whole.optimization.execution_accelerators


def _alone(config: ModelConfig, name: str) -> bytes:
    """A configuration with only one field, serialised."""
    alone = ModelConfig()
    FieldMask(paths=[name]).MergeMessage(config, alone)
    return alone.SerializeToString(deterministic=True)


def _kept(path: str) -> Problem:
    text = f"a request cannot change this, it stays as the repository has it{_ALLOWED}"
    return Problem(path, text)


def _merged(base: ConfigFile, override: ConfigFile) -> ConfigFile:
    change, merged = override.config, deepcopy(base.config)
    FieldMask(paths=FREE_FIELDS).MergeMessage(change, merged, True, True)
    for name in FREE_PARAMETERS & set(merged.parameters):
        del merged.parameters[name]
    for name in FREE_PARAMETERS & set(change.parameters):
        merged.parameters[name].CopyFrom(change.parameters[name])
    if change.HasField("optimization"):
        kept_ones = base.config.optimization
        merged.optimization.CopyFrom(change.optimization)
        merged.optimization.ClearField("execution_accelerators")
        if kept_ones.HasField("execution_accelerators"):
            merged.optimization.execution_accelerators.CopyFrom(kept_ones.execution_accelerators)
    kept = {p: line for p, line in base.lines.items() if not p.startswith(FREE_FIELDS)}
    return ConfigFile(override.name, merged, {**dict.fromkeys(kept, 0), **override.lines})
