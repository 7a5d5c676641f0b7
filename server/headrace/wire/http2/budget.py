"""How much of what costs us and means nothing a peer may send.

Each of the known attacks (CVE-2019-9511 to 9518, CVE-2023-44487, CVE-2024-27316, CVE-2025-8671)
sends many frames that are cheap for it and make the server work. So such frames are paid for from a
budget that comes back with time, and with work that the connection has really brought.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Limits:
    """What one connection may have and do. Sizes in bytes, rates a second.

    `streams` may be open at once. `header_block` bounds a header block as sent, `header_list` the
    decoded one as HPACK counts it. `control` frames mean nothing by themselves: PING, SETTINGS,
    PRIORITY, empty DATA, small WINDOW_UPDATEs; `resets` are streams opened in vain, whoever ended
    them.
    """

    streams: int = 1024
    stream_window: int = 1 << 20
    connection_window: int = 64 << 20
    frame: int = 1 << 20
    header_block: int = 16 << 10
    header_list: int = 16 << 10
    control: int = 2_000
    control_rate: int = 500
    resets: int = 1_000
    resets_rate: int = 200


class Budget:
    """Tokens that come back at `rate` a second up to `size`."""

    __slots__ = ("_at", "_rate", "_size", "_tokens")

    def __init__(self, size: int, rate: int) -> None:
        self._size = size
        self._rate = rate
        self._tokens = float(size)
        self._at = 0.0

    def spend(self, cost: int, now: float, earned: int = 0) -> bool:
        """Take `cost` tokens at the time `now`, in seconds; False if there are not so many.

        `earned` tokens are added first, for work that was done since the last time.
        """
        gained = (now - self._at) * self._rate + earned
        self._at = now
        self._tokens = min(self._tokens + gained, self._size) - cost
        return self._tokens >= 0
