"""Models on Tritons, described in Python: `Pool` writes the repository, and looks for drift."""

from headrace.plugins.triton.pools import Drift, Group, Model, Pool

__all__ = ["Drift", "Group", "Model", "Pool"]
