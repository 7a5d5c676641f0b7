"""What `headrace models` takes."""

import argparse
from pathlib import Path

from headrace.commands.environment_options import add_environment_options, environment_options
from headrace.commands.parser import Commands
from headrace.settings import OPTIONS


def add_models(commands: Commands) -> None:
    """Declare `headrace models` and its actions."""
    models = commands.add_parser("models", help="look at models")
    actions = models.add_subparsers(dest="action", required=True, metavar="ACTION")
    _add_check(actions)


def _add_check(actions: Commands) -> None:
    check = actions.add_parser(
        "check", help="validate repositories without serving them",
        description="Load every model, report what is wrong, and print complete configurations.",
    )  # fmt: skip
    check.add_argument("paths", nargs="+", metavar="PATH", help="repositories, or model files")
    check.add_argument("--quiet", action="store_true", help="print no configurations")
    check.add_argument(
        "--default-max-batch-size", type=int, metavar="N", help="as of 'serve'",
        default=next(o.default for o in OPTIONS if o.field == "default_max_batch_size"),
    )  # fmt: skip
    check.add_argument("--trust-model-code", action="store_true", help="as of 'serve'")
    check.add_argument("--allow-in-process-python", action="store_true", help="as of 'serve'")
    check.add_argument("--json", action="store_true", help="print one JSON document")
    add_environment_options(check)
    check.set_defaults(run=_check)


def _check(options: argparse.Namespace) -> int:
    environments = environment_options(options)
    # Imported late: `--help` and usage errors should not wait for ONNX Runtime.
    from headrace.commands.check import check_models

    return check_models(
        [Path(p) for p in options.paths],
        options.default_max_batch_size,
        options.json,
        options.quiet,
        environments,
        options.trust_model_code,
        options.allow_in_process_python,
    )
