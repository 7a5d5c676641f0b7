"""Our server beside others, in one run: see docs/benchmarks.md."""
