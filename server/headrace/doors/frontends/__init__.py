"""Processes that answer clients for the one engine, and the way between them and it."""
