"""The fixtures of commands, and their server."""

from tests.cli.conftest import clean_environment, command, headrace, log_of_the_command, server

__all__ = ["clean_environment", "command", "headrace", "log_of_the_command", "server"]
