"""Whether what an instance executes makes progress, and whether anybody waits for it.

Found by looking now and then at something that changes with progress, so that it costs the way of a
request nothing.
"""

LOOK_SECS = 1.0  # between two looks
ABANDONED_SECS = 5.0  # that an execution nobody waits for may go on where ending it costs nothing


class Pulse:
    """For how long something has given no sign, by looks at what changes with each sign."""

    def __init__(self) -> None:
        self.silent = 0.0
        self._last: object = None

    def look(self, sign: object, elapsed: float) -> float:
        """Seconds of silence, after `elapsed` since the last look; None is no silence.

        A look stands for two intervals at most: if the server itself was stopped, so may all that
        it looks at have been.
        """
        if sign is not None and sign == self._last:
            self.silent += min(elapsed, 2 * LOOK_SECS)
        else:
            self._last = sign
            self.silent = 0.0
        return self.silent
