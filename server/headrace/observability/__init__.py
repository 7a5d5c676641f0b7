"""Counters, metrics, traces and logs; I/O only for reading /proc and for the log."""
