"""The fixtures of commands run in the tests' own process."""

from tests.cli.conftest import log_of_the_command

__all__ = ["log_of_the_command"]
