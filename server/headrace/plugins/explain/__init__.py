"""Explanations of models: batches, their cost, and other settings, by an operation and commands.

`replay` has the pure part, and `explaining` makes the document of the operation. `searching` has
the choice of the settings that `headrace tune` measures, and `config_text` writes the best ones.
"""
