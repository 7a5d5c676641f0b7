"""The fixtures of commands, and their server."""

from tests.cli.conftest import command, headrace, log_of_the_command, server

__all__ = ["command", "headrace", "log_of_the_command", "server"]
