"""The rate limiter: instances run only while the resources that they need are free.

`decisions.py` decides who runs next, over values; `gates.py` asks it for each batch of a version.
"""

from collections.abc import Sequence

from headrace.core.errors import LoadFailed
from headrace.plugins.rate_limiter.decisions import read_limits
from headrace.plugins.rate_limiter.gates import ResourceLimiter


def rate_limiter(resources: Sequence[str]) -> ResourceLimiter:
    """The limiter of an engine with these resources; raises `LoadFailed` for malformed ones."""
    try:
        return ResourceLimiter(read_limits(resources))
    except ValueError as error:
        raise LoadFailed(f"--rate-limit-resource: {error}") from None
