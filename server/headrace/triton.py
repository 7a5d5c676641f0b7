"""Models on Triton servers, described in Python: `Pool` writes the repository and detects drift."""

from headrace.plugins.triton.pools import Drift, Group, Model, Pool

__all__ = ["Drift", "Group", "Model", "Pool"]
