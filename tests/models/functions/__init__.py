"""Functions as models: each file is one, as it is served and as type checkers see it."""
