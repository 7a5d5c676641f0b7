"""Who uses the models that other servers have loaded for this one."""

from threading import Lock


class Uses:
    """How many users of this server each model has that it has had others load.

    A version that is replaced has its model unloaded only if that which replaces it has no use for
    the same one.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._counts: dict[object, int] = {}

    def take(self, key: object) -> None:
        """One user more."""
        with self._lock:
            self._counts[key] = self._counts.get(key, 0) + 1

    def give_back(self, key: object) -> bool:
        """One user less; whether that was the last one."""
        with self._lock:
            self._counts[key] -= 1
            last = not self._counts[key]
            if last:
                del self._counts[key]
            return last
