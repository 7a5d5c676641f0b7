"""The server connection against an h2 client that does anything the RFC allows."""

import random
from collections.abc import Iterable

import h2.connection
import h2.events
import h2.settings
from h2.config import H2Configuration
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.protocol.http2.protocol import Limits
from tests.protocol.http2.peer import REQUEST, Received, Server

Code = h2.settings.SettingCodes


class Client:
    """An h2 client of an echo server; bytes are exchanged in drawn pieces."""

    def __init__(self, dice: random.Random, server: Server) -> None:
        self.dice = dice
        self.server = server
        self.h2 = h2.connection.H2Connection(
            H2Configuration(client_side=True, header_encoding="utf-8")
        )
        self.h2.local_settings = h2.settings.Settings(
            client=True,
            initial_values={
                Code.INITIAL_WINDOW_SIZE: dice.choice([0, 1, 50, 65_535, 1 << 20]),
                Code.MAX_FRAME_SIZE: dice.choice([16_384, 50_000]),
                Code.HEADER_TABLE_SIZE: dice.choice([0, 60, 177, 4096]),
            },
        )
        # h2 takes these for acknowledged already, but does not act upon this one.
        self.h2.max_inbound_frame_size = self.h2.local_settings.max_frame_size
        self.h2.initiate_connection()
        self.sent: dict[int, bytes] = {}
        self.left: dict[int, bytes] = {}
        self.received: dict[int, Received] = {}
        self.owed: list[tuple[int, int]] = []
        self.reset: set[int] = set()
        self.settled = False  # h2 applies everything outstanding at the first acknowledgement

    def open(self) -> None:
        number = self.h2.get_next_available_stream_id()
        extra = [(f"x-{n}", "v" * self.size(300)) for n in range(self.size(5))]
        self.h2.max_outbound_frame_size = self.dice.choice([100, 500, 16_384])
        data = bytes((number % 251,)) * self.size(self.dice.choice((0, 10, 100_000)))
        self.sent[number] = data
        self.left[number] = data
        self.received[number] = Received()
        if self.dice.random() < 0.5:
            extra.append(("content-length", str(len(data))))
        self.h2.send_headers(number, [*REQUEST, *extra], end_stream=not data)
        if not data:
            del self.left[number]

    def send_some(self) -> None:
        """Send a piece of a request, padded or not."""
        numbers = [n for n in self.left if self.h2.local_flow_control_window(n) > 300]
        if not numbers:
            return
        number = self.dice.choice(numbers)
        data = self.left[number]
        padding = self.dice.choice([None, None, 0, 7, 200])
        room = min(
            self.h2.local_flow_control_window(number), self.h2.max_outbound_frame_size, 16_384
        ) - (0 if padding is None else padding + 1)
        size = min(self.dice.choice([1, 100, 20_000]), room, len(data))
        if size <= 0:
            return
        ends = size == len(data)
        self.h2.send_data(number, data[:size], end_stream=ends, pad_length=padding)
        self.left[number] = data[size:]
        if ends:
            del self.left[number]

    def cancel(self) -> None:
        numbers = [n for n in self.sent if n not in self.reset and not self.received[n].ended]
        if numbers:
            number = self.dice.choice(numbers)
            self.h2.reset_stream(number)
            self.reset.add(number)
            self.left.pop(number, None)

    def disturb(self) -> None:
        """Send frames without effect, or changes of windows and tables."""
        what = self.size(4)
        if what == 0:
            self.h2.ping(b"12345678")
        elif what == 1:
            self.update(Code.INITIAL_WINDOW_SIZE, self.size(100_000))
        elif what == 2:
            self.update(Code.HEADER_TABLE_SIZE, self.size(300))
        else:
            self.h2.increment_flow_control_window(1 + self.size(1000))

    def update(self, setting: h2.settings.SettingCodes, value: int) -> None:
        while not self.settled:
            self.exchange()
        self.settled = False
        self.h2.update_settings({setting: value})

    def pay(self) -> None:
        """Return the windows of received data."""
        owed, self.owed = self.owed, []
        for number, nbytes in owed:
            if number not in self.reset:
                self.h2.acknowledge_received_data(nbytes, number)

    def exchange(self) -> None:
        """Exchange pending bytes in pieces."""
        data = self.h2.data_to_send()
        largest = self.dice.choice((10, 1000, 50_000))
        while data:
            cut = 1 + self.size(largest)
            self.server.feed(data[:cut])
            data = data[cut:]
        assert not self.server.connection.closing
        data = self.server.output(1 + self.size(100_000))
        while data:
            cut = 1 + self.size(largest)
            self.take(self.h2.receive_data(data[:cut]))
            data = data[cut:]

    def take(self, events: list[h2.events.Event]) -> None:
        for event in events:
            if isinstance(event, h2.events.ResponseReceived):
                self.received[event.stream_id].headers = _text(event.headers)
            elif isinstance(event, h2.events.DataReceived):
                self.received[event.stream_id].data += event.data
                if event.flow_controlled_length:
                    self.owed.append((event.stream_id, event.flow_controlled_length))
            elif isinstance(event, h2.events.TrailersReceived):
                self.received[event.stream_id].trailers = _text(event.headers)
            elif isinstance(event, h2.events.StreamEnded):
                self.received[event.stream_id].ended = True
            elif isinstance(event, h2.events.SettingsAcknowledged):
                self.settled = True
            assert not isinstance(event, h2.events.StreamReset | h2.events.ConnectionTerminated)

    def size(self, limit: int) -> int:
        """An integer from 0 to `limit`."""
        return self.dice.randint(0, limit)


def _text(fields: Iterable[tuple[bytes | str, bytes | str]]) -> list[tuple[str, str]]:
    return [(str(name), str(value)) for name, value in fields]


STEPS = ("open", "send_some", "send_some", "exchange", "disturb", "pay", "cancel")


@settings(max_examples=60)
@given(
    seed=st.integers(),
    steps=st.lists(st.sampled_from(STEPS), min_size=1, max_size=60),
)
def test_any_client(seed: int, steps: list[str]) -> None:
    limits = Limits(stream_window=40_000, connection_window=100_000)
    server = Server(limits, echo=True, greet=False)
    client = Client(random.Random(seed), server)
    for step in steps:
        getattr(client, step)()
    client.open()
    # From here on the client answers without delay.
    client.update(Code.INITIAL_WINDOW_SIZE, 65_535)
    for _ in range(3000):
        client.exchange()
        client.pay()
        for _ in range(20):
            client.send_some()
        if all(client.received[n].ended or n in client.reset for n in client.sent):
            break
    for number, sent in client.sent.items():
        if number in client.reset:
            continue
        received = client.received[number]
        assert received.data == sent
        assert received.headers[0] == (":status", "200")
        assert received.trailers == [("grpc-status", "0")]
    client.exchange()
    assert server.connection.streams.open == {}
    assert server.connection.sender.queued == 0
