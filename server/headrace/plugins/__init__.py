"""Extras that not everyone needs, each a folder that could leave, registered like any plugin."""
