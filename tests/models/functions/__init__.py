"""Functions as models: each file is one, as served and as type checkers see it."""
