"""`headrace models push`, `pull`, `promote` and `verify`: models of stores, without a server.

A directory is a store like any other here, and so all copying is one function.
"""

import argparse
import fnmatch
import sys
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.cli.command import EXIT_FAILURE, Command, option, settings_as_options, shared_settings
from headrace.cli.remote import complain, print_json
from headrace.cli.text import duration, fitted_table, size
from headrace.core.errors import LoadFailed
from headrace.core.plugins import OptionalPart
from headrace.options import Option
from headrace.settings import OPTIONS, Settings

if TYPE_CHECKING:
    from headrace.repository.store import Store

SIGN: OptionalPart[Callable[[bytes, Path], bytes]] = OptionalPart("sign")
SIGNATURES: OptionalPart[Callable[[str], Callable[[Path], None]]] = OptionalPart("signatures")

_FIELDS = ("store_cache", "store_archive")
STORE_SETTINGS = tuple(one for one in OPTIONS if one.field.startswith(_FIELDS))
_KEYS = tuple(one for one in OPTIONS if one.field == "require_signature")
_SHARED = (option("--json", "print one JSON document"), *settings_as_options(STORE_SETTINGS))
_MODELS = option("models [MODEL...]", "names of models, or patterns with * and ?; all by default")
_STORE = "such as s3://BUCKET/PREFIX, or a directory"


def list_store(options: argparse.Namespace) -> int:
    """Print the models of a store with their sizes; for `headrace models list --store`."""

    def act(settings: Settings, stack: ExitStack) -> int:
        store = _open(stack, options.store, settings)
        sizes = {name: store.size(name) for name in _chosen(store.names(), options.pattern)}
        if options.json:
            print_json({"models": [{"name": name, "size": n} for name, n in sizes.items()]})
        elif options.names:
            print("\n".join(sizes))
        else:
            rows = [(name, size(float(n)) if n else "-") for name, n in sizes.items()]
            print(*fitted_table(("MODEL", "SIZE"), rows, right="SIZE"), sep="\n")
        return 0

    return _run(options, act)


def _push(options: argparse.Namespace) -> int:
    """Copy models of a directory to a store."""
    return _copy(options, "pushed", options.name or "")


def _pull(options: argparse.Namespace) -> int:
    """Copy models of a store to a directory."""
    return _copy(options, "pulled")


def _promote(options: argparse.Namespace) -> int:
    """Copy models from one store to another."""
    return _copy(options, "promoted")


def _copy(options: argparse.Namespace, done: str, name: str = "") -> int:
    from headrace.repository.model_files import manifest_of, parse_manifest

    def act(settings: Settings, stack: ExitStack) -> int:
        source, target = (
            _open(stack, options.source, settings, name),
            _open(stack, options.target, settings),
        )
        reports = []
        for model in _chosen(source.names(), options.models):
            begun = time.monotonic()
            lease = source.materialise(model, source.token(model))
            manifest = manifest_of(lease.path)
            files = parse_manifest(manifest)
            if not files:
                raise LoadFailed(f"{source.address}: {model} has no files")
            target.publish(model, lease.path, manifest)
            seconds = time.monotonic() - begun
            nbytes = sum((lease.path / path).stat().st_size for path in files)
            reports.append(
                {"name": model, "files": len(files), "bytes": nbytes, "seconds": seconds}
            )
            if not options.json:
                what = f"{len(files)} files with {size(float(nbytes))}"
                print(f"{done} {model}, {what}, in {duration(seconds)}", flush=True)
        if options.json:
            print_json({"models": reports})
        return 0

    return _run(options, act)


def _sign(options: argparse.Namespace) -> int:
    """Write signed manifests into directories."""
    from headrace.repository.model_files import MANIFEST, manifest_of, replace_file

    def act(settings: Settings, stack: ExitStack) -> int:
        sign = SIGN.load()
        for directory in map(Path, options.paths):
            if not directory.is_dir():
                raise LoadFailed(f"{directory} is no directory of a model")
            manifest = sign(manifest_of(directory), Path(options.key))
            replace_file(directory / MANIFEST, manifest)
            print(f"signed {directory}")
        return 0

    return _run(options, act, ())


def _index(options: argparse.Namespace) -> int:
    """Write the index of a directory for a web server."""
    from headrace.repository.model_files import INDEX, write_index

    def act(settings: Settings, stack: ExitStack) -> int:
        names = sorted(_open(stack, options.directory, settings).names())
        write_index(Path(options.directory), names)
        print(f"wrote {Path(options.directory) / INDEX} with {len(names)} models")
        return 0

    return _run(options, act, ())


def _verify(options: argparse.Namespace) -> int:
    """Read all files of models, and compare them with their manifests."""

    def act(settings: Settings, stack: ExitStack) -> int:
        store = _open(stack, options.store, settings)
        key = settings.require_signature
        check = SIGNATURES.load()(key) if key else None
        reports = []
        for model in _chosen(store.names(), options.models):
            try:
                problems = store.problems(model)
                if check is not None and not problems:
                    check(store.materialise(model, store.token(model)).path)
            except LoadFailed as error:
                problems = [str(error)]
            reports.append({"name": model, "problems": problems})
            if not options.json:
                print(f"{model}: {'; '.join(problems) or 'as its manifest has it'}", flush=True)
        if options.json:
            print_json({"models": reports})
        return EXIT_FAILURE if any(report["problems"] for report in reports) else 0

    return _run(options, act, (*STORE_SETTINGS, *_KEYS))


def _run(
    options: argparse.Namespace,
    act: Callable[[Settings, ExitStack], int],
    settings: Sequence[Option] = STORE_SETTINGS,
) -> int:
    try:
        with ExitStack() as stack:
            return act(shared_settings(options, settings), stack)
    except LoadFailed as error:
        complain(options, str(error))
        return EXIT_FAILURE
    except OSError as error:
        complain(options, f"{error.filename or 'files'}: {error.strerror}")
        return EXIT_FAILURE
    finally:
        sys.stdout.flush()


def _open(stack: ExitStack, address: str, settings: Settings, name: str = "") -> "Store":
    # Imported late, so that `--help` and usage errors do not wait for what reads models.
    from headrace.repository.catalogue import open_store

    store = open_store(address, name, settings.stores)
    stack.callback(store.close)
    return store


def _chosen(names: Collection[str], patterns: Sequence[str]) -> list[str]:
    """The names that match any pattern; raises `LoadFailed` if one matches none."""
    for pattern in patterns:
        if not fnmatch.filter(names, pattern):
            raise LoadFailed(f"no model called {pattern}")
    if not names:
        raise LoadFailed("there are no models")
    return sorted(
        name
        for name in names
        if not patterns or any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
    )


def _directory(text: str) -> str:
    return str(Path(text))


STORE_COMMANDS = (
    Command(
        name="push",
        help="copy models of a directory to a store",
        description="Copy models of a repository, or a directory that is a model, to a store. The"
        " manifest of a model is written last: servers load it once all its files are there.",
        options=(
            option("source DIR", "a repository, or a directory of one model", type=_directory),
            option("target STORE", f"a store, {_STORE}"),
            _MODELS,
            option("--name NAME", "name in the store of a directory that is a model"),
            *_SHARED,
        ),
        run=_push,
    ),
    Command(
        name="pull",
        help="copy models of a store to a directory",
        description="Copy models of a store to a directory. Each takes the place of one with its"
        " name in one step.",
        options=(
            option("source STORE", f"a store, {_STORE}"),
            option("target DIR", "a repository, which need not exist yet", type=_directory),
            _MODELS,
            *_SHARED,
        ),
        run=_pull,
    ),
    Command(
        name="promote",
        help="copy models from one store to another",
        description="Copy models from one store to another, as they are: with their manifests, and"
        " so with their signatures.",
        options=(
            option("source FROM", f"a store, {_STORE}"),
            option("target TO", "another store"),
            option("models MODEL...", "names of models, or patterns with * and ?"),
            *_SHARED,
        ),
        run=_promote,
    ),
    Command(
        name="verify",
        help="compare the files of models in a store with their manifests",
        description="Read all files of models in a store, and compare them with their manifests.",
        options=(
            option("store STORE", f"a store, {_STORE}"),
            _MODELS,
            *_SHARED,
            *settings_as_options(_KEYS),
        ),
        run=_verify,
    ),
    Command(
        name="index",
        help="write the index of a directory for a web server",
        description="Write headrace-index.json, by which servers find the models of a directory at"
        " an https:// address, and manifests of models that have none.",
        options=(option("directory DIR", "a repository", type=_directory),),
        run=_index,
    ),
    Command(
        name="sign",
        help="write signed manifests into directories of models",
        description="Write the digests of all files of models, with a signature, to"
        " headrace-manifest.json in their directories, which push and promote pass on.",
        options=(
            option("paths DIR...", "directories of models"),
            option("--key KEYFILE", "private key of Ed25519 in PEM", required=True),
        ),
        run=_sign,
    ),
)
