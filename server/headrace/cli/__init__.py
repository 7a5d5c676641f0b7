"""The command line: `main` is the program `headrace` (`program`), each command a file of its own.

A command is a `Command` value (`command`) that declares its options; commands are plugins, found by
name in `core/plugins.py`, so that only the requested one is imported. Commands for a running server
use `client`.
"""

from headrace.cli.program import main

__all__ = ["main"]
