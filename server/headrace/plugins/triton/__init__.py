"""Managed Tritons: servers that this one starts, watches, and has load models."""
