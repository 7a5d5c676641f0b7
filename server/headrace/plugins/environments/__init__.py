"""Python environments of models: requirements, cache and builds."""
