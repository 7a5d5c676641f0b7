"""The fixtures of commands run in the tests' own process."""

from tests.cli.conftest import clean_environment, log_of_the_command

__all__ = ["clean_environment", "log_of_the_command"]
