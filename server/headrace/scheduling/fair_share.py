"""Waiting requests of one priority level in the order of weighted fair shares between clients.

Start-time fair queueing, by rows: every client has a virtual time, which each of its rows that run
moves by 1 / weight. The next request is that of the client whose time is least; one that had none
waiting begins at the time of the last request taken, so that silence earns nothing. Requests that
have ended while they waited move nothing. A plain data structure without a clock, in place of a
`deque`.
"""

import heapq
from collections import deque
from collections.abc import Iterable, Iterator

from headrace.core.call import Call

_ROW = 1 << 20  # virtual time of a row of weight 1: a whole number, so that sums are exact
_SWEEP = 64  # silent clients below which sweeping never pays


class _Client:
    """The waiting requests of a client, and its virtual time: the start of the first of them."""

    __slots__ = ("calls", "number", "row", "start")

    def __init__(self, number: int, start: int) -> None:
        """`number` decides between equal times."""
        self.calls: deque[Call] = deque()
        self.number = number
        self.start = start
        self.row = _ROW  # the time of a row, by the client's weight

    def cost(self, call: Call) -> int:
        """The virtual time that a request takes."""
        return 0 if call.ended else max(call.rows, 1) * self.row


class FairQueue:
    """Requests in the order of their clients' shares; iteration follows the order of `popleft`."""

    def __init__(self) -> None:
        self._clients: dict[str, _Client] = {}
        self._turns: list[tuple[int, int, _Client]] = []  # a heap of those with requests
        self._time = 0  # virtual start of the last request taken
        self._count = self._numbers = 0

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, position: int) -> Call:
        """The first request, the only one with a position."""
        assert not position, "only the first request can be looked at. This is a bug."
        return self._turns[0][2].calls[0]

    def __iter__(self) -> Iterator[Call]:
        turns = [(start, number, 0, client) for start, number, client in self._turns]
        while turns:
            start, number, place, client = turns[0]
            call = client.calls[place]
            place += 1
            if place < len(client.calls):
                heapq.heapreplace(turns, (start + client.cost(call), number, place, client))
            else:
                heapq.heappop(turns)
            yield call

    def append(self, call: Call) -> None:
        """Add a request behind those of its client."""
        name, weight = share_of(call)
        client = self._clients.get(name)
        if client is None:
            if len(self._clients) > 2 * len(self._turns) + _SWEEP:
                self._sweep()
            self._numbers += 1
            client = self._clients[name] = _Client(self._numbers, self._time)
        client.row = max(round(_ROW / weight), 1)
        if not client.calls:
            client.start = max(client.start, self._time)
            heapq.heappush(self._turns, (client.start, client.number, client))
        client.calls.append(call)
        self._count += 1

    def popleft(self) -> Call:
        """Take the first request."""
        start, number, client = self._turns[0]
        call = client.calls.popleft()
        self._count -= 1
        if cost := client.cost(call):
            self._time = max(self._time, start)
            client.start = start + cost
        if client.calls:
            heapq.heapreplace(self._turns, (client.start, number, client))
        else:
            heapq.heappop(self._turns)
        return call

    def extendleft(self, calls: Iterable[Call]) -> None:
        """Put requests back that have just been taken, the last one taken first."""
        for call in calls:
            client = self._clients[share_of(call)[0]]
            client.calls.appendleft(call)
            client.start -= client.cost(call)
            self._count += 1
        self._order()

    def remove(self, call: Call) -> None:
        """Remove a request from wherever it is."""
        self._clients[share_of(call)[0]].calls.remove(call)
        self._count -= 1
        self._order()

    def drop_ended(self) -> None:
        """Remove the requests that have ended."""
        for client in self._clients.values():
            client.calls = deque(call for call in client.calls if not call.ended)
        self._count = sum(len(client.calls) for client in self._clients.values())
        self._order()

    def _order(self) -> None:
        waiting = [client for client in self._clients.values() if client.calls]
        self._turns = [(client.start, client.number, client) for client in waiting]
        heapq.heapify(self._turns)

    def _sweep(self) -> None:
        """Forget the clients that would begin anew."""
        items = self._clients.items()
        self._clients = {
            name: client for name, client in items if client.calls or client.start > self._time
        }


def share_of(call: Call) -> tuple[str, float]:
    """The client that a request counts for, with its weight."""
    identity, payer = call.context.identity, call.payer
    if payer is None:
        return identity.client(""), 1.0
    return identity.client(payer.origin), payer.weight
