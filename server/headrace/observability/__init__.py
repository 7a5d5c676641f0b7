"""Counters, metrics and logs. Values and registries; only /proc is read, for scrapes."""
