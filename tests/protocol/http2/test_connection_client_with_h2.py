"""The client connection against an h2 server that does anything the RFC allows."""

import random
from contextlib import suppress

import h2.config
import h2.connection
import h2.events
import h2.exceptions
import h2.settings
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.protocol.http2.protocol import Limits
from tests.protocol.http2.server_peer import GOOD, OK, Client, KeptCall

Code = h2.settings.SettingCodes


class Server:
    """An h2 echo server; bytes are exchanged in drawn pieces."""

    def __init__(self, dice: random.Random, client: Client) -> None:
        self.dice = dice
        self.client = client
        self.h2 = h2.connection.H2Connection(
            h2.config.H2Configuration(client_side=False, header_encoding="utf-8")
        )
        self.h2.local_settings = h2.settings.Settings(
            client=False,
            initial_values={
                Code.INITIAL_WINDOW_SIZE: dice.choice([0, 1, 500, 65_535, 1 << 20]),
                Code.MAX_FRAME_SIZE: dice.choice([16_384, 50_000]),
                Code.HEADER_TABLE_SIZE: dice.choice([0, 60, 4096]),
                Code.MAX_CONCURRENT_STREAMS: dice.choice([1, 3, 100]),
            },
        )
        self.h2.max_inbound_frame_size = self.h2.local_settings.max_frame_size
        self.h2.initiate_connection()
        self.got: dict[int, bytes] = {}
        self.left: dict[int, bytes] = {}

    def turn(self) -> None:
        """Receive the client's bytes and send some."""
        out = self.client.output(self.dice.choice([100, 1 << 20]))
        for start in range(0, len(out), 5000):
            for event in self.h2.receive_data(out[start : start + 5000]):
                self.take(event)
        for number in list(self.left):
            self.answer(number)
        data = self.h2.data_to_send()
        while data:
            size = self.dice.choice([1, 9, 100, 70_000])
            self.client.feed(data[:size])
            data = data[size:]

    def take(self, event: h2.events.Event) -> None:
        """Store request data; start the response at the end of the request."""
        if isinstance(event, h2.events.RequestReceived):
            assert event.stream_id is not None
            self.got[event.stream_id] = b""
        elif isinstance(event, h2.events.DataReceived):
            assert event.stream_id is not None
            assert event.data is not None
            self.got[event.stream_id] += event.data
            assert event.flow_controlled_length is not None
            self.h2.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
            with suppress(h2.exceptions.ProtocolError):  # of a stream that has ended
                self.h2.increment_flow_control_window(20_000, event.stream_id)
        elif isinstance(event, h2.events.StreamEnded):
            assert event.stream_id is not None
            self.h2.send_headers(event.stream_id, GOOD)
            self.left[event.stream_id] = self.got.pop(event.stream_id)

    def answer(self, number: int) -> None:
        """Send a piece of a response, padded or not, or the trailers."""
        data = self.left[number]
        if not data:
            self.h2.send_headers(number, OK, end_stream=True)
            del self.left[number]
            return
        padding = self.dice.choice([None, 0, 7])
        room = min(self.h2.local_flow_control_window(number), self.h2.max_outbound_frame_size)
        size = min(self.dice.choice([1, 1000, 20_000]), room - 10, len(data))
        if size > 0:
            self.h2.send_data(number, data[:size], pad_length=padding)
            self.left[number] = data[size:]

    def open_windows(self) -> None:
        """Open the windows of blocked streams."""
        for number in self.got:
            self.h2.increment_flow_control_window(5000, number)


@settings(max_examples=60)
@given(st.integers(0, 1 << 32))
def test_calls_against_h2(seed: int) -> None:
    dice = random.Random(seed)
    limits = Limits(
        stream_window=dice.choice([600, 70_000, 1 << 20]),
        connection_window=dice.choice([66_000, 1 << 20]),
    )
    client = Client(limits, greet=False)
    server = Server(dice, client)
    wanted = [bytes((n,)) * dice.choice([0, 3, 5000, 40_000]) for n in range(6)]
    calls: list[KeptCall] = []
    for _ in range(3000):
        connection = client.connection
        if connection.settled and len(calls) < len(wanted) and connection.streams.room > 0:
            calls.append(client.call(wanted[len(calls)]))
        server.turn()
        server.open_windows()
        if len(calls) == len(wanted) and all(call.finished for call in calls):
            break
    assert [call.messages for call in calls] == [[data] for data in wanted]
    assert [call.ends for call in calls] == [[None]] * len(wanted)
    assert not client.connection.closing
