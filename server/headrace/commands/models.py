"""What `headrace models` takes."""

import argparse
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.commands.parser import EXIT_USAGE, Commands
from headrace.commands.pool_files import take_pools
from headrace.commands.remote import Action, add_json, add_remote
from headrace.commands.shared_settings import (
    ENVIRONMENTS,
    TRITONS,
    add_settings,
    shared_settings,
)
from headrace.commands.traffic_options import add_traffic
from headrace.options import SettingsError
from headrace.settings import OPTIONS

if TYPE_CHECKING:
    from headrace.client.server import Server

_CONTROL_SECS = 600.0  # models may take long to load, and to finish what they have


def add_models(commands: Commands) -> None:
    """Declare `headrace models` and its actions."""
    models = commands.add_parser(
        "models", help="look at models, load and unload them",
        description="Models on disk (check, manifest) and in a running server (all others).",
    )  # fmt: skip
    actions = models.add_subparsers(dest="action", required=True, metavar="ACTION")
    _add_check(actions)
    _add_manifest(actions)
    _add_list(actions)
    _add_control(actions)
    _add_documents(actions)
    add_traffic(actions)


def _add_list(actions: Commands) -> None:
    parser = actions.add_parser(
        "list", help="what a running server has, and its states",
        description="List the models of a running server: each version with its state, and the"
        " reason where one does not serve.",
    )  # fmt: skip
    parser.add_argument(
        "pattern", nargs="*", metavar="MODEL", help="only these; * and ? stand for any characters"
    )
    parser.add_argument("--ready", action="store_true", help="only what takes requests")
    parser.add_argument(
        "--long", action="store_true", help="also inputs, outputs, and what runs them"
    )
    parser.add_argument("--names", action="store_true", help="print names and nothing else")
    add_json(parser)
    add_remote(parser, _late("list_models"))


def _add_control(actions: Commands) -> None:
    load = actions.add_parser(
        "load", help="load models, or load them again",
        description="Have a running server load models, and wait until they are ready. The server"
        " must allow it (--model-control-mode=explicit).",
    )  # fmt: skip
    load.add_argument("models", nargs="+", metavar="MODEL", help="names in its repositories")
    load.add_argument(
        "--config", metavar="FILE",
        help="a configuration in place of the model's own: config.pbtxt or JSON, also JSON itself",
    )  # fmt: skip
    load.add_argument(
        "--file", action="append", default=[], type=_override, metavar="PATH=LOCAL",
        help="a file in place of the model's directory, such as 1/model.onnx=new.onnx;"
        " may be repeated; the server must allow it (--load-overrides=files)",
    )  # fmt: skip
    unload = actions.add_parser(
        "unload", help="stop serving models",
        description="Have a running server finish what it has accepted for models, and free them.",
    )  # fmt: skip
    unload.add_argument("models", nargs="+", metavar="MODEL")
    unload.add_argument(
        "--dependents", action="store_true", help="also models that were loaded only for them"
    )
    for parser, name in ((load, "load"), (unload, "unload")):
        add_json(parser)
        add_remote(parser, _late(name), _CONTROL_SECS)


def _add_documents(actions: Commands) -> None:
    config = actions.add_parser(
        "config", help="the configuration that a model runs with",
        description="Print a model's configuration as a running server has completed it.",
    )  # fmt: skip
    config.add_argument("model", metavar="MODEL")
    stats = actions.add_parser(
        "stats", help="what models have done since the server started",
        description="Print how many requests models have answered, in which batches, and how long"
        " they took on average: a line a version, or all about one model.",
    )  # fmt: skip
    stats.add_argument("model", nargs="?", metavar="MODEL", help="all about this one")
    for parser, action in ((config, _show_config), (stats, _late("stats"))):
        parser.add_argument(
            "--version", type=version_number, metavar="N", help="a version's number"
        )
        add_json(parser)
        add_remote(parser, action)


def _show_config(options: argparse.Namespace, server: "Server") -> int:
    from headrace.commands.remote_config import show_config

    return show_config(options, server)


def _late(name: str) -> Action:
    """Imported when it runs: `--help` and usage errors should not wait for it."""

    def action(options: argparse.Namespace, server: "Server") -> int:
        from headrace.commands import remote_models

        run: Action = getattr(remote_models, name)
        return run(options, server)

    return action


def version_number(text: str) -> str:
    """A version on a command line; raises `argparse.ArgumentTypeError`."""
    if not (text.isascii() and text.isdigit()):
        raise argparse.ArgumentTypeError(f"expected a number, got {text!r}")
    return text


def _override(text: str) -> tuple[str, str]:
    path, equals, local = text.partition("=")
    if not (path and equals and local):
        raise argparse.ArgumentTypeError(f"expected PATH=LOCAL, got {text!r}")
    return path, local


def _add_check(actions: Commands) -> None:
    check = actions.add_parser(
        "check", help="validate repositories without serving them",
        description="Load every model, report what is wrong, and print complete configurations."
        " Models that other servers run are asked for there; those for Tritons that this server"
        " starts are loaded in such.",
    )  # fmt: skip
    check.add_argument("paths", nargs="+", metavar="PATH", help="repositories, or files")
    check.add_argument("--quiet", action="store_true", help="print no configurations")
    check.add_argument(
        "--default-max-batch-size", type=int, metavar="N", help="as of 'serve'",
        default=next(o.default for o in OPTIONS if o.field == "default_max_batch_size"),
    )  # fmt: skip
    check.add_argument("--trust-model-code", action="store_true", help="as of 'serve'")
    check.add_argument("--allow-in-process-python", action="store_true", help="as of 'serve'")
    check.add_argument("--json", action="store_true", help="print one JSON document")
    add_settings(check, (*ENVIRONMENTS, *TRITONS))
    check.set_defaults(run=_check)


def _add_manifest(actions: Commands) -> None:
    manifest = actions.add_parser(
        "manifest", help="write down what a model's files hold",
        description="Write the digests of all files of a model's directory, or of a version's, into"
        " headrace-manifest.json there. A server loads such a model only when every file has its"
        " digest, so that it never loads one that is copied half.",
    )  # fmt: skip
    manifest.add_argument("paths", nargs="+", metavar="DIR", help="directories of models")
    manifest.add_argument(
        "--check", action="store_true", help="write nothing: compare the files with it"
    )
    add_json(manifest)
    manifest.set_defaults(run=_manifest)


def _manifest(options: argparse.Namespace) -> int:
    from headrace.commands.manifest import write_manifests

    return write_manifests([Path(p) for p in options.paths], options.check, options.json)


def _check(options: argparse.Namespace) -> int:
    with ExitStack() as stack:
        try:
            options.paths, written = take_pools(options, options.paths, stack)
        except SettingsError as error:
            options.parser.exit(EXIT_USAGE, f"headrace models check: {error}\n")
        if written is not None:
            options.paths.append(str(written))
        return _check_within(options)


def _check_within(options: argparse.Namespace) -> int:
    settings = shared_settings(options, (*ENVIRONMENTS, *TRITONS))
    # Imported late: `--help` and usage errors should not wait for ONNX Runtime.
    from headrace.commands.check import check_models

    return check_models(
        [Path(p) for p in options.paths],
        options.default_max_batch_size,
        options.json,
        options.quiet,
        settings.environments,
        settings.tritons,
        options.trust_model_code,
        options.allow_in_process_python,
    )
