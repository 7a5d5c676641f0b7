"""Optional features of the server itself, each a folder or module found by its name.

No module imports a plugin by a statement: `core/plugins.py` lists them, in the groups that other
packages can add to as well, and as parts of the server. Each can be removed with its lines there.
"""
