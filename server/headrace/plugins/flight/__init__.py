"""Arrow Flight: the models as tables, for programs that speak Arrow and no V2."""
