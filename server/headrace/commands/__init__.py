"""Commands of `headrace`, each a module with a `Command` that `core/plugins.py` names."""
