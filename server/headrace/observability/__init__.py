"""Floor 1: counters, metrics and logs. Values and registries; nothing here does I/O of its own."""
