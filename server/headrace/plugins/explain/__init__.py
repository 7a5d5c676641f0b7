"""Explanations of models: batches, their cost, and other settings, by an operation and a command.

`replay` has the pure part, `explaining` makes the document of the operation, and `command` shows it
as tables.
"""
