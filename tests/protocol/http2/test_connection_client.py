"""Client connections: frames sent, and outcomes of calls."""

import gzip
from struct import pack

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.protocol.grpc import End, Reason
from headrace.protocol.http2.protocol import (
    ACK,
    CONTINUATION,
    DATA,
    DEFAULT_WINDOW,
    END_HEADERS,
    END_STREAM,
    GOAWAY,
    HEADERS,
    MAX_WINDOW,
    PING,
    PREFACE,
    PUSH_PROMISE,
    RST_STREAM,
    SETTINGS,
    WINDOW_UPDATE,
    ErrorCode,
    Limits,
    Setting,
)
from tests.protocol.http2.peer import Server, build, rst, settings, window_update
from tests.protocol.http2.server_peer import (
    GOOD,
    HEAD,
    OK,
    SENT_FIELDS,
    Client,
    KeptCall,
    message_of,
)

FIELDS = [(name.decode(), value.decode()) for name, value in SENT_FIELDS]


def goaway(last: int, code: ErrorCode = ErrorCode.NO_ERROR, text: bytes = b"") -> bytes:
    return build(GOAWAY, 0, 0, pack(">II", last, code) + text)


@pytest.fixture
def client() -> Client:
    return Client()


@pytest.fixture
def call(client: Client) -> KeptCall:
    return client.call()


# --- successful calls


def test_a_call(client: Client) -> None:
    for number, expected in ((1, b"first"), (3, b"second"), (5, b"third")):
        call = client.call(b"question")
        head, data = client.sent()
        assert (head.kind, head.flags, head.stream) == (HEADERS, END_HEADERS, number)
        assert client.headers_of(head) == FIELDS
        assert (data.kind, data.flags, data.stream) == (DATA, END_STREAM, number)
        assert data.payload == message_of(b"question")
        client.feed(client.response(number, expected))
        assert call.messages == [expected]
        assert call.ends == [None]
        assert not client.connection.streams.open
    assert head.payload == HEAD


def test_client_preface() -> None:
    client = Client(greet=False)
    assert client.output().startswith(PREFACE)
    client.feed(settings((Setting.MAX_CONCURRENT_STREAMS, 2)))
    assert [(f.kind, f.flags) for f in client.sent()] == [(SETTINGS, ACK)]
    assert client.connection.streams.room == 2


@given(st.data())
def test_any_split_of_received_bytes_means_the_same(data: st.DataObject) -> None:
    client = Client(Limits(stream_window=2000, connection_window=70_000))
    calls = [client.call() for _ in range(3)]
    large = bytes(range(256)) * 20
    stream = b"".join(
        [
            client.headers(1, GOOD), client.headers(3, GOOD),
            build(DATA, 0, 3, message_of(b"three")),
            build(DATA, 0, 1, message_of(large)[:1500]),
            build(PING, 0, 0, b"12345678"),
            build(DATA, 0, 1, message_of(large)[1500:]),
            client.headers(3, OK, True),
            client.headers(1, OK, True),
            client.headers(5, [*GOOD, ("grpc-status", "5"), ("grpc-message", "no%20%C3%A4")], True),
        ]
    )  # fmt: skip
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=20)))
    for start, stop in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        client.feed(stream[start:stop])
    assert calls[0].messages == [large]
    assert calls[1].messages == [b"three"]
    assert [call.ends for call in calls[:2]] == [[None], [None]]
    assert calls[2].end == End(Reason.STATUS, 5, "no ä")
    assert not client.connection.closing


@given(
    st.lists(st.integers(0, 30_000), min_size=1, max_size=4),
    st.integers(500, 50_000),
    st.integers(100, 30_000),
)
def test_against_our_own_server(sizes: list[int], window: int, piece: int) -> None:
    limits = Limits(stream_window=window, connection_window=max(window, 70_000))
    server, client = Server(limits, echo=True, greet=False), Client(limits, greet=False)
    calls: list[KeptCall] = []
    for _ in range(1000):
        if client.connection.settled and not calls:
            calls += [client.call(bytes(size)) for size in sizes]
        out = client.output()
        for start in range(0, len(out), piece):
            server.feed(out[start : start + piece])
        out = server.output()
        for start in range(0, len(out), piece):
            client.feed(out[start : start + piece])
        if calls and all(call.finished for call in calls):
            break
    assert [call.messages for call in calls] == [[bytes(size)] for size in sizes]
    assert [call.ends for call in calls] == [[None]] * len(sizes)
    assert not server.connection.closing
    assert not client.connection.closing


def test_a_stream_of_messages_both_ways(client: Client) -> None:
    call = client.stream()
    sender = client.connection.sender
    for message in (b"a", b"bc"):
        sender.data(call, [message_of(message)], 5 + len(message))
    kinds = [(f.kind, f.ends) for f in client.sent()]
    assert kinds == [(HEADERS, False), (DATA, False)]
    client.feed(client.headers(1, GOOD), build(DATA, 0, 1, message_of(b"x") + message_of(b"yz")))
    assert call.messages == [b"x", b"yz"]
    sender.finish(call)
    assert [(f.kind, f.ends) for f in client.sent()] == [(DATA, True)]
    client.feed(client.headers(1, OK, True))
    assert call.ends == [None]


def test_a_paused_receiver_keeps_the_window_closed() -> None:
    client = Client(Limits(stream_window=1000, connection_window=100_000))
    call = client.stream()
    client.sent()
    call.keeps_window = True
    client.feed(client.headers(1, GOOD), build(DATA, 0, 1, message_of(bytes(900))))
    assert client.sent() == []
    client.connection.release(call)
    assert [(f.kind, f.stream, f.word) for f in client.sent()] == [(WINDOW_UPDATE, 1, 905)]


def test_large_messages_wait_for_windows(client: Client) -> None:
    message = bytes(range(256)) * 400
    client.call(message)
    got = b"".join(f.payload for f in client.sent() if f.kind == DATA)
    assert len(got) == DEFAULT_WINDOW
    client.feed(window_update(0, 1 << 20), window_update(1, 1 << 20))
    frames = client.sent()
    got += b"".join(f.payload for f in frames if f.kind == DATA)
    assert got == message_of(message)
    assert frames[-1].ends


def test_compressed_answers(client: Client, call: KeptCall) -> None:
    head = [*GOOD, ("grpc-encoding", "gzip")]
    data = build(DATA, 0, 1, message_of(gzip.compress(b"x" * 1000), 1))
    client.feed(client.headers(1, head), data, client.headers(1, OK, True))
    assert call.messages == [b"x" * 1000]


@pytest.mark.parametrize("encoding", ["gzip", "identity", "zstd"])
def test_a_message_that_cannot_be_decompressed(
    encoding: str, client: Client, call: KeptCall
) -> None:
    head = [*GOOD, ("grpc-encoding", encoding)]
    client.feed(client.headers(1, head), build(DATA, 0, 1, message_of(b"nonsense", 1)))
    if encoding == "identity":  # it declares no compression
        assert call.messages == [b"nonsense"]
    else:
        assert call.end.reason is Reason.BROKEN
        assert [f.kind for f in client.sent() if f.stream == 1][-1] == RST_STREAM


def test_a_decompression_bomb_is_refused(client: Client, call: KeptCall) -> None:
    bomb = gzip.compress(bytes(64 << 20))
    message = message_of(bomb, 1)
    client.feed(client.headers(1, [*GOOD, ("grpc-encoding", "gzip")]))
    for start in range(0, len(message), 16_000):
        client.feed(build(DATA, 0, 1, message[start : start + 16_000]))
    assert call.end.reason is Reason.GROWN
    assert "grows to more than" in call.end.text


# --- failing calls


@pytest.mark.parametrize(
    ("fields", "reason", "status", "text"),
    [
        ([*GOOD, ("grpc-status", "14"), ("grpc-message", "a%25b")], Reason.STATUS, 14, "a%b"),
        ([*GOOD, ("grpc-status", "x")], Reason.STATUS, 2, ""),
        (GOOD, Reason.BROKEN, 2, "the answer ends without a status"),
        ([(":status", "404")], Reason.STATUS, 12, "the answer has the HTTP status 404"),
        ([(":status", "500")], Reason.BROKEN, 2, "the answer has the HTTP status 500"),
        (
            [(":status", "503"), ("content-type", "text/html")],
            Reason.STATUS, 14, "HTTP status 503",
        ),
        ([(":status", "503"), ("grpc-status", "5")], Reason.STATUS, 5, ""),
        (
            [(":status", "200"), ("content-type", "text/html")],
            Reason.BROKEN, 2, "not gRPC: its content-type",
        ),
    ],
)  # fmt: skip
def test_trailers_only_responses(
    fields: list[tuple[str, str]],
    reason: Reason,
    status: int,
    text: str,
    client: Client,
    call: KeptCall,
) -> None:
    client.feed(client.headers(1, fields, True))
    assert call.end.reason is reason
    assert call.end.status == status
    assert text in call.end.text


def test_a_web_page_instead_of_a_grpc_response(client: Client, call: KeptCall) -> None:
    client.sent()
    client.feed(client.headers(1, [(":status", "502")]), build(DATA, END_STREAM, 1, b"<html>"))
    assert call.end[:2] == (Reason.STATUS, 14)
    assert [f.kind for f in client.sent()] == [RST_STREAM]
    assert not client.connection.closing


@pytest.mark.parametrize(("frames", "trailers", "reason", "text"), [
    ([build(DATA, 0, 1, message_of(b"abc")[:-1])], OK, Reason.BROKEN, "ends within a message"),
    ([build(DATA, 0, 1, b"\x00\x00")], OK, Reason.BROKEN, "ends within a message"),
    ([build(DATA, 0, 1, b"\x00\xff\xff\xff\xff")], None, Reason.TOO_LARGE,
     "a message of 4294967295 bytes"),
    ([build(DATA, END_STREAM, 1, message_of(b"abc"))], None, Reason.BROKEN,
     "the answer ends without a status"),
])  # fmt: skip
def test_malformed_messages(
    frames: list[bytes],
    trailers: list[tuple[str, str]] | None,
    reason: Reason,
    text: str,
    client: Client,
    call: KeptCall,
) -> None:
    client.feed(client.headers(1, GOOD), *frames)
    if trailers:
        client.feed(client.headers(1, trailers, True))
    assert call.end.reason is reason
    assert text in call.end.text


def test_misplaced_headers(client: Client, call: KeptCall) -> None:
    client.feed(build(DATA, 0, 1, message_of(b"abc")))
    assert "before any head" in call.end.text
    client = Client()
    call = client.call()
    client.feed(client.headers(1, GOOD), client.headers(1, GOOD))  # which has no effect
    assert call.end.reason is Reason.LOST


@pytest.mark.parametrize(("code", "now", "reason"), [
    (ErrorCode.REFUSED_STREAM, 0.0, Reason.REFUSED), (ErrorCode.INTERNAL_ERROR, 0.0, Reason.LOST),
    (ErrorCode.CANCEL, 0.0, Reason.LOST), (ErrorCode.CANCEL, 1.0, Reason.LATE),
    (77, 0.0, Reason.LOST),
])  # fmt: skip
def test_streams_that_are_reset(code: int, now: float, reason: Reason, client: Client) -> None:
    call = client.call(deadline=1.0)
    client.now = now
    client.feed(rst(1, code))
    assert call.end.reason is reason
    assert not client.connection.streams.open


def test_an_answer_for_which_there_is_no_memory(
    monkeypatch: pytest.MonkeyPatch, client: Client
) -> None:
    """The call fails, and no other of the connection."""

    class NoMemory:
        def block(self, nbytes: int) -> memoryview:
            raise MemoryError("full")

    calls = [client.call() for _ in range(2)]
    monkeypatch.setattr("headrace.protocol.grpc.BLOCKS", NoMemory())
    message = message_of(bytes(1000))
    client.feed(client.headers(1, GOOD), build(DATA, 0, 1, message[:500]))
    assert calls[0].end == End(Reason.LOST, 13, "there is no memory for the answer: full")
    client.feed(build(DATA, 0, 1, message[500:]), client.response(3, b"small"))
    assert (calls[1].messages, calls[1].ends) == ([b"small"], [None])
    assert not client.connection.closing


def test_a_server_that_answers_before_all_was_sent(client: Client) -> None:
    call = client.call(bytes(100_000))
    client.sent()
    client.feed(client.headers(1, [*GOOD, ("grpc-status", "8")], True))
    assert call.end.status == 8
    assert [(f.kind, f.stream) for f in client.sent()] == [(RST_STREAM, 1)]
    assert not client.connection.sender.queued


def test_a_call_that_is_cancelled(client: Client) -> None:
    call, other = client.call(), client.call()
    client.sent()
    call.cancel()
    call.cancel()
    assert [(f.kind, f.stream, f.word) for f in client.sent()] == [(RST_STREAM, 1, 8)]
    client.feed(client.response(1, b"too late"), client.response(3, b"in time"))
    assert not call.messages
    assert not call.ends
    assert other.messages == [b"in time"]


def test_responses_to_a_thousand_cancelled_calls_are_ignored(client: Client) -> None:
    calls = [client.call() for _ in range(1000)]
    for call in calls:
        call.cancel()
    client.sent()
    client.feed(*[client.response(call.number, b"x") for call in calls])
    assert not client.connection.closing


# --- end of connections


@pytest.mark.parametrize("hang_up", [False, True])
def test_an_unwritten_call_was_not_sent(hang_up: bool, client: Client) -> None:
    sent = client.call()
    client.sent()
    kept, large = client.call(b"for another server"), client.call(b"x" * 100_000)
    if hang_up:
        client.feed(build(PUSH_PROMISE, END_HEADERS, 1, bytes(4)))
        assert [frame.kind for frame in client.sent()] == [GOAWAY]
    else:
        client.connection.lost()
    assert sent.end.reason is Reason.LOST
    assert kept.end.reason is large.end.reason is Reason.UNSENT


def test_goaway_of_the_server(client: Client) -> None:
    first, second, third = (client.call() for _ in range(3))
    client.sent()
    client.feed(goaway(MAX_WINDOW))
    assert client.connection.streams.room == 0
    assert not any(call.ends for call in (first, second, third))
    client.feed(goaway(3, text=b"max_age"))
    assert third.end == End(Reason.UNSENT, 14, "NO_ERROR: max_age")
    assert not client.connection.closing
    client.feed(client.response(1, b"1"), client.response(3, b"2"))
    assert (first.messages, second.messages) == ([b"1"], [b"2"])
    assert client.connection.closing


def test_max_concurrent_streams(client: Client) -> None:
    client.feed(settings((Setting.MAX_CONCURRENT_STREAMS, 1)))
    client.call()
    assert client.connection.streams.room == 0
    client.feed(client.response(1, b""))
    assert client.connection.streams.room == 1
    client = Client()
    client.connection.streams.last = MAX_WINDOW - 4  # stream numbers are exhausted
    client.call()
    assert client.connection.streams.room == 0
    client.feed(client.response(MAX_WINDOW - 2, b""))
    assert client.connection.closing


@pytest.mark.parametrize(("frames", "code"), [
    (build(PUSH_PROMISE, END_HEADERS, 1, bytes(4)), ErrorCode.PROTOCOL_ERROR),
    (build(DATA, 0, 3, b"x"), ErrorCode.PROTOCOL_ERROR),
    (build(DATA, 0, 2, b"x"), ErrorCode.PROTOCOL_ERROR),
    (build(HEADERS, END_HEADERS, 3, b"\x88"), ErrorCode.PROTOCOL_ERROR),
    (build(HEADERS, END_HEADERS, 2, b"\x88"), ErrorCode.PROTOCOL_ERROR),
    (build(HEADERS, END_HEADERS, 1, b"\xff\xff\xff"), ErrorCode.COMPRESSION_ERROR),
    (build(CONTINUATION, END_HEADERS, 1, b"\x88"), ErrorCode.PROTOCOL_ERROR),
    (build(GOAWAY, 0, 0, bytes(4)), ErrorCode.FRAME_SIZE_ERROR),
    (build(GOAWAY, 0, 0, bytes(20_000)), ErrorCode.ENHANCE_YOUR_CALM),
    (build(GOAWAY, 0, 1, bytes(8)), ErrorCode.PROTOCOL_ERROR),
    (window_update(0, MAX_WINDOW), ErrorCode.FLOW_CONTROL_ERROR),
    (settings((Setting.INITIAL_WINDOW_SIZE, 1 << 31)), ErrorCode.FLOW_CONTROL_ERROR),
    (settings() * 1000, ErrorCode.ENHANCE_YOUR_CALM),
    (build(PING, 0, 0, bytes(8)) * 3000, ErrorCode.ENHANCE_YOUR_CALM),
    (build(DATA, 0, 1, b"") * 3000, ErrorCode.ENHANCE_YOUR_CALM),
    (rst(3), ErrorCode.PROTOCOL_ERROR),
    (build(HEADERS, 0, 1, b"") + build(CONTINUATION, 0, 1, b"") * 100, ErrorCode.ENHANCE_YOUR_CALM),
    (build(HEADERS, 0, 1, b"") + build(DATA, 0, 1, b"x"), ErrorCode.PROTOCOL_ERROR),
    (build(DATA, 0, 1, b"x" * 2_000_000), ErrorCode.FRAME_SIZE_ERROR),
])  # fmt: skip
def test_servers_that_break_the_protocol(
    frames: bytes, code: ErrorCode, client: Client, call: KeptCall
) -> None:
    client.sent()
    client.feed(frames)
    assert client.goaway() is code
    assert call.ends
    assert not client.connection.streams.open


def test_a_server_that_exceeds_the_window() -> None:
    client = Client(Limits(stream_window=100, connection_window=70_000))
    call, other = client.call(), client.call()
    client.feed(client.headers(1, GOOD), build(DATA, 0, 1, bytes(101)))
    assert call.end.reason is Reason.LOST
    client.feed(client.response(3, b"x"))
    assert other.messages == [b"x"]


def test_headers_that_are_too_large(client: Client) -> None:
    client.call()
    client.sent()
    client.feed(client.headers(1, [*GOOD, *[(f"x-{n}", "y" * 1000) for n in range(30)]]))
    assert client.goaway() is ErrorCode.ENHANCE_YOUR_CALM


def test_a_smaller_table_is_emptied_first(client: Client) -> None:
    client.call()
    for frame in client.sent():
        if frame.kind == HEADERS:
            assert client.headers_of(frame) == FIELDS
    for size in (100, 0, 4096, 60_000):
        client.feed(settings((Setting.HEADER_TABLE_SIZE, size)))
        client.sent()
        client.decoder.max_allowed_table_size = max(size, 4096)
        for _ in range(3):
            client.call()
            [head] = [frame for frame in client.sent() if frame.kind == HEADERS]
            assert client.headers_of(head) == FIELDS
            assert client.decoder.header_table.maxsize <= max(size, 0)


def test_a_retried_call_is_sent_on_its_new_connection_alone() -> None:
    left, taken = Client(), Client()
    other, moved = left.call(b"small"), left.call(b"x" * 30_000)
    left.feed(goaway(1))  # while the socket is full
    assert moved.end.reason is Reason.UNSENT
    moved.renew()
    moved.begin(taken.connection)
    taken.connection.sender.request(moved, HEAD, [b"y" * 30_000], 30_000)
    assert all(len(frame.payload) < 1000 for frame in left.sent())
    data = b"".join(frame.payload for frame in taken.sent() if frame.kind == DATA)
    assert data == message_of(b"y" * 30_000)
    left.feed(left.response(1, b"answer"))
    assert other.messages == [b"answer"]
    assert left.connection.sender.queued == taken.connection.sender.queued == 0


@pytest.mark.parametrize("at", [20, 500, 1013])
def test_a_half_received_message_of_a_cancelled_call(at: int, client: Client) -> None:
    call, other = client.stream(), client.stream()
    frame = build(DATA, 0, 1, message_of(b"z" * 1000))
    client.feed(client.headers(1, GOOD), frame[:at])
    call.cancel()
    client.feed(frame[at:], client.response(3, b"good"))
    assert call.messages == []
    assert other.messages == [b"good"]
