"""Measures a running V2 server: throughput, latency and what each request costs it."""
