"""ClientError ─┬─ NotReached   nobody answers there, or not in time
├─ Refused      the server answered with an error
└─ BadAnswer    what came is not what the protocol says
"""


class ClientError(Exception):
    """Why a server's answer is not there; its text is for people."""


class NotReached(ClientError):
    """No connection, or no answer within the timeout."""


class Refused(ClientError):
    """The server's error, in its own words; `status` is HTTP's."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


class BadAnswer(ClientError):
    """An answer that makes no sense in the protocol: perhaps there is another server."""
