"""Commands that need no server in their process: `infer`, `models`, `top` and `completion`.

What asks a running server does so by `headrace.cli.remote`. `models check` is `check`.
"""
