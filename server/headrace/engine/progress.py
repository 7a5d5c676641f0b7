"""How long clients are waited for, and what they may leave lying meanwhile: one rule for all doors.

Who sends a message, or has answers to read, makes progress as `headrace.core.limits` has it, or
is given up; so is who leaves more unread than its connection's share. A connection without requests
goes after a while. Whoever is given up is counted.
"""

from headrace.core.limits import PRESSED_SECS, Patience
from headrace.engine.admission import ConnectionAccount


class Progress:
    """What is waited for on one connection; times are in seconds of the loop's clock."""

    __slots__ = ("_account", "_reading")

    def __init__(self, account: ConnectionAccount, read_secs: float) -> None:
        self._account = account
        self._reading = Patience(read_secs)

    def sends(self, patience: Patience, subject: object, nbytes: int, now: float) -> bool:
        """Whether to wait for the rest of a message, `subject`, of which `nbytes` have come."""
        if patience.look(subject, nbytes, now, self._account.server.pressed):
            return True
        self._account.server.give_up("unsent")
        return False

    def reads(self, waiting: int, kept: int, moved: int, now: float) -> bool:
        """Whether to wait for a client that has `waiting` bytes to read, and has read `moved`.

        `kept` bytes of the client's wait for this side.
        """
        if not waiting:
            self._reading.look(None, 0, now)  # what waits next begins anew
        elif not self._reading.look(self, moved, now, self._account.server.pressed):
            return self._given_up()
        return self.within(waiting, kept)

    def within(self, waiting: int, kept: int = 0) -> bool:
        """Charge what waits; whether that is within the connection's share."""
        return self._account.owe(waiting, kept) or self._given_up()

    def idles(self, since: float, now: float, most: float) -> bool:
        """Whether a connection without requests `since` then has been so for too long."""
        idle = now - since
        return idle > most or (idle > PRESSED_SECS and self._account.server.pressed)

    def _given_up(self) -> bool:
        self._account.server.give_up("unread")
        return False
