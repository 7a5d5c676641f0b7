"""Counters, metrics, traces and logs; I/O only for reading /proc and for the log.

`statistics` has the counters, which `headrace.engine.metrics` exports; `model_metrics` those that
models define.
"""
