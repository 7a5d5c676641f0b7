"""Commands that do not run a server: `infer`, `models`, `top` and `completion`.

Commands for a running server use `headrace.cli.remote`. `models check` is in `check`.
"""
