"""Settings of `headrace serve` that other commands have as well, from the same places.

They may also stand in the environment, so that all commands find the same.
"""

import argparse
import os
from collections.abc import Collection

from headrace.options import Option, SettingsError
from headrace.settings import OPTIONS, SECTIONS, Settings, from_command_line, from_environment

ENVIRONMENTS = tuple(
    option
    for option in OPTIONS
    if option.field in ("environment_cache", "wheelhouse", "environment_build_timeout_secs")
)
TRITONS = tuple(SECTIONS["Tritons that this server starts"])


def add_settings(parser: argparse._ActionsContainer, options: Collection[Option]) -> None:
    """Have a command take these settings."""
    for option in options:
        names, keywords = option.argument(switch=True)
        parser.add_argument(*names, **keywords)


def shared_settings(given: argparse.Namespace, options: Collection[Option]) -> Settings:
    """These settings from the command line, then the environment; ends with 2 if they are wrong."""
    names = {option.env for option in options}
    try:
        found = from_environment({n: value for n, value in os.environ.items() if n in names})
        found |= from_command_line(given, tuple(options))
    except SettingsError as error:
        given.parser.exit(2, f"headrace {given.command}: {error}\n")
    return Settings(**found)  # type: ignore[arg-type]  # parsed to their types
