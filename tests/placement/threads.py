"""A process that cannot start threads."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

_STACK = 1 << 46  # bytes beyond any machine


@contextmanager
def no_threads() -> Iterator[None]:
    """Make starting threads fail, as where the system allows no more."""
    before = threading.stack_size(_STACK)
    try:
        yield
    finally:
        threading.stack_size(before)
