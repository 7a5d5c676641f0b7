"""Environments of their own for models: what a model asks for, found in a cache or built."""
