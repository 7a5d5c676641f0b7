"""The command line: `main` is the program `headrace` (`program`), each command a file of its own.

A command is a `Command` value (`command`) that declares its options as usage shows them; commands
are plugins, found by name in `core/plugins.py`, so that only the one that is asked for is imported.
What asks a running server does so by `client`.
"""

from headrace.cli.program import main

__all__ = ["main"]
