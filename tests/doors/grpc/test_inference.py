"""ModelStreamInfer with controlled models and a controlled client."""

import asyncio
from collections.abc import Mapping

import pytest

from headrace.core.errors import ExecutionFailed, Overloaded, ServerError, ServerExiting
from headrace.core.identity import ANYONE, NO_PEER, Identity
from headrace.doors.grpc.call import Message, StreamSession
from headrace.doors.grpc.inference import stream_opener
from headrace.engine.admission import Account
from headrace.engine.entrance import PAUSE_BYTES
from headrace.protocol.pb import grpc_service_pb2 as pb
from tests.doors.fakes import FakeEngine, Work, until
from tests.support.client import Parameter
from tests.support.grpc_client import infer_message, parameter

_GIVE_UP = 1 << 20
_BIG = PAUSE_BYTES // 2


class FakePeer:
    """A client that reads `room` messages, and then stops."""

    def __init__(self, account: Account, takes: int, metadata: Mapping[str, str]) -> None:
        self.account = account
        self.takes = takes
        self.sent: list[pb.ModelStreamInferResponse] = []
        self.finished: list[ServerError | None] = []
        self.held = False
        self._metadata = metadata

    @property
    def congested(self) -> bool:
        return len(self.sent) >= self.takes

    def metadata(self) -> Mapping[str, str]:
        return self._metadata

    def remaining(self) -> float:
        return 0.0

    def set_trailing(self, name: str, value: str) -> None:
        raise AssertionError(name)

    noted: tuple[str, str, str] | None = None
    identity = ANYONE
    peer_facts = NO_PEER

    def identify(self) -> Identity:
        return self.identity

    def send(self, message: Message) -> None:
        assert not self.finished
        self.sent.append(pb.ModelStreamInferResponse.FromString(b"".join(message)))

    def finish(self, error: ServerError | None = None) -> None:
        self.finished.append(error)

    def hold(self, held: bool) -> None:
        self.held = held


class Stream:
    """One stream: its client's actions and messages."""

    def __init__(self, takes: int = 1_000_000, **metadata: str) -> None:
        self.engine = FakeEngine()
        self.peer = FakePeer(self.engine.admission, takes, metadata)
        opened = stream_opener(self.engine, 1 << 20, _GIVE_UP)
        self.session: StreamSession = opened(self.peer)

    def ask(self, model: str, id: str = "", **parameters: Parameter) -> Work:
        """Send a request; the work given to the model."""
        message = infer_message(model, id=id, parameters=parameters)
        self.session.receive(message.SerializeToString())
        return self.engine.models[model].last

    def send(self, message: pb.ModelInferRequest | bytes) -> None:
        """Send a message that may be refused."""
        data = message if isinstance(message, bytes) else message.SerializeToString()
        self.session.receive(data)

    def read(self, more: int) -> None:
        """Let the client read `count` messages more."""
        self.peer.takes += more
        self.session.sent()

    def close(self) -> None:
        """End the stream; nothing may stay counted."""
        self.session.closed()
        assert (self.engine.admission.requests, self.engine.admission.bytes) == (0, 0)

    @property
    def got(self) -> list[str]:
        """Received messages: `id:text`, with `.` behind the final one and `!` before an error."""
        return [told(message) for message in self.peer.sent]


def told(message: pb.ModelStreamInferResponse) -> str:
    """A message in short form."""
    response = message.infer_response
    named = "triton_final_response"
    final = named in response.parameters and parameter(response.parameters[named])
    text = b"".join(response.raw_output_contents).decode()
    text = f"!{message.error_message}" if message.error_message else text[:20]
    return f"{response.id}:{text}{'.' if final else ''}"


@pytest.fixture
def stream() -> Stream:
    return Stream()


def test_many_responses_to_a_request(stream: Stream) -> None:
    work = stream.ask("many", "a")
    work.answer("one")
    work.answer("two")
    assert stream.got == ["a:one", "a:two"]
    assert stream.engine.admission.requests == 1
    work.answer("three", final=True)
    found = [m.infer_response.parameters["triton_final_response"] for m in stream.peer.sent]
    assert [value.WhichOneof("parameter_choice") for value in found] == ["bool_param"] * 3
    assert [value.bool_param for value in found] == [False, False, True]
    assert stream.got[2:] == ["a:three."]
    assert stream.engine.admission.requests == 0
    stream.session.half_close()
    assert stream.peer.finished == [None]
    stream.close()
    assert not work.cancelled


def test_responses_of_several_requests_interleave(stream: Stream) -> None:
    first, second = stream.ask("many", "a"), stream.ask("many", "b")
    for work, text in ((second, "1"), (first, "2"), (second, "3"), (first, "4")):
        work.answer(text)
    assert stream.got == ["b:1", "a:2", "b:3", "a:4"]
    third = stream.ask("many", "c")
    third.answer("5", final=True)
    stream.close()  # the client disconnects
    assert (first.cancelled, second.cancelled, third.cancelled) == (True, True, False)


def test_ordinary_models_keep_the_order_and_decoupled_ones_overtake(stream: Stream) -> None:
    first, many, second = (
        stream.ask("plain", "a"), stream.ask("many", "m"), stream.ask("plain", "b"),
    )  # fmt: skip
    second.answer("late", final=True)
    many.answer("now")
    assert stream.got == ["m:now"]
    first.answer("early", final=True)
    assert stream.got == ["m:now", "a:early.", "b:late."]
    many.answer("then", final=True)
    assert stream.engine.admission.requests == 0


def test_an_end_without_a_response_is_silent(stream: Stream) -> None:
    many, plain = stream.ask("many", "a"), stream.ask("plain", "b")
    many.answer("x")
    many.request.finish()
    stream.ask("many", "none").request.finish()
    assert stream.got == ["a:x"]
    assert stream.engine.admission.requests == 1
    plain.request.finish()
    assert stream.got == ["a:x"]
    assert stream.engine.admission.requests == 0
    stream.session.half_close()
    assert stream.peer.finished == [None]


@pytest.mark.parametrize("version", ["", "3"])
def test_an_end_without_a_response_is_sent_on_request(version: str, stream: Stream) -> None:
    for _ in range(2):  # the second time the request is known by its bytes
        message = infer_message("many", id="a", version=version)
        message.parameters["triton_enable_empty_final_response"].bool_param = True
        stream.send(message)
        work = stream.engine.many.last
        work.answer("x")
        work.request.finish()
        assert stream.got == ["a:x", "a:."]
        expected = pb.ModelStreamInferResponse()
        response = expected.infer_response
        response.id, response.model_name, response.model_version = "a", "many", version
        response.parameters["triton_final_response"].bool_param = True
        assert stream.peer.sent.pop() == expected
        stream.peer.sent.clear()


@pytest.mark.parametrize("value", [True, False])
def test_remembered_messages_request_the_empty_final_response_too(
    value: bool, stream: Stream
) -> None:
    for _ in range(3):
        message = infer_message("many", id="a")
        message.inputs.add(name="x", datatype="INT32", shape=[1, 1])
        message.raw_input_contents.append(bytes(4))
        message.parameters["triton_enable_empty_final_response"].bool_param = value
        stream.send(message)
        assert stream.engine.many.last.request.parameters == {}
        stream.engine.many.last.request.finish()
    assert stream.got == ["a:."] * 3 * value


def test_an_error_after_responses(stream: Stream) -> None:
    work, other = stream.ask("many", "a"), stream.ask("many", "b")
    work.answer("x")
    work.request.fail(ExecutionFailed("why"))
    other.answer("y")
    assert stream.got == ["a:x", "a:!why.", "b:y"]
    response = stream.peer.sent[1].infer_response
    assert (response.model_name, response.model_version) == ("many", "7")
    assert stream.engine.admission.requests == 1
    assert not stream.peer.finished
    work.answer("after its end")
    assert len(stream.got) == 3


def test_errors_before_execution(stream: Stream) -> None:
    work = stream.ask("many", "a")
    stream.send(infer_message("nobody", id="b"))
    stream.send(infer_message("many", id="bad"))
    stream.send(b"\xff")
    work.answer("x")
    assert stream.got[:2] == ["b:!no model 'nobody'", "bad:!as asked"]
    assert stream.got[2].startswith(":!not a valid ModelInferRequest message")
    assert stream.got[3] == "a:x"
    assert stream.engine.admission.requests == 1


def test_a_request_refused_before_its_end_is_answered_in_its_order(stream: Stream) -> None:
    first = stream.ask("plain", "a")
    stream.session.refuse(Overloaded("full"))
    second = stream.ask("plain", "b")
    second.answer("late", final=True)
    assert stream.got == []
    first.answer("early", final=True)
    assert stream.got == ["a:early.", ":!full", "b:late."]
    stream.session.half_close()
    assert stream.peer.finished == [None]
    stream.close()


def test_real_statuses_follow_earlier_responses() -> None:
    stream = Stream(triton_grpc_error="true")
    work, other = stream.ask("many", "a"), stream.ask("many", "b")
    stream.send(infer_message("nobody", id="c"))  # not an error of execution
    work.answer("x")
    error = ExecutionFailed("why")
    work.request.fail(error)
    assert stream.got == ["c:!no model 'nobody'", "a:x"]
    assert stream.peer.finished == [error]
    stream.close()
    assert other.cancelled
    assert not work.cancelled
    stream = Stream(takes=0, triton_grpc_error="true")  # a slow client's status waits
    work = stream.ask("many", "a")
    work.answer("x")
    work.request.fail(ExecutionFailed("why"))
    assert not stream.peer.finished
    stream.read(1)
    assert stream.got == ["a:x"]
    stream.read(1)
    assert len(stream.peer.finished) == 1


def test_requests_take_turns_with_a_slow_client() -> None:
    stream = Stream(takes=0)
    works = [stream.ask("many", name) for name in "abc"]
    for work in works:
        for text in "123":
            work.answer(text)
    stream.read(5)
    assert stream.got == ["a:1", "b:1", "c:1", "a:2", "b:2"]
    stream.read(10)
    assert stream.got[5:] == ["c:2", "a:3", "b:3", "c:3"]


def test_a_model_pauses_while_its_client_does_not_read() -> None:
    stream = Stream(takes=1)
    work, other = stream.ask("many", "a"), stream.ask("many", "b")
    work.answer(_BIG)  # is read
    work.answer(_BIG)
    assert (work.held, other.held) == (False, False)
    work.answer(_BIG)
    assert (work.held, other.held) == (True, False)
    work.answer("under way when it was asked")
    stream.read(2)
    assert (work.held, other.held) == (True, False)  # one message still waits
    stream.read(1)
    assert (work.held, other.held) == (False, False)
    work.answer("again")
    assert work.holds == 1
    stream.close()


def test_a_request_that_has_ended_is_not_asked_to_pause() -> None:
    stream = Stream(takes=0)
    work = stream.ask("many", "a")
    work.answer(_BIG)
    work.answer(4 * _BIG, final=True)
    plain = stream.ask("plain", "b")
    plain.answer(20 * _BIG, final=True)
    assert (work.holds, plain.holds) == (0, 0)
    stream.read(3)
    assert len(stream.got) == 3


def test_many_requests_together_pause_earlier() -> None:
    """The memory of a stream is bounded, however many requests it has."""
    stream = Stream(takes=0)
    works = [stream.ask("many", str(n)) for n in range(300)]
    for work in works:
        work.answer(_BIG)
    held = [work.held for work in works]
    assert not held[0]
    assert held[-1]
    stream.peer.takes = 1_000
    stream.session.sent()
    assert not any(work.held for work in works)


def test_a_model_that_does_not_pause_is_cancelled() -> None:
    stream = Stream(takes=0)
    good, bad = stream.ask("many", "good"), stream.ask("many", "bad-one")
    good.answer("x")
    count = 0
    while not bad.cancelled:
        bad.answer(_BIG)
        count += 1
    assert _GIVE_UP <= count * _BIG <= _GIVE_UP + 2 * _BIG
    assert not good.cancelled
    stream.read(100)
    first, second = stream.got
    assert first == "good:x"
    assert second.startswith("bad-one:!the client does not read the responses, and the model does")
    assert stream.engine.admission.requests == 1
    good.answer("y", final=True)
    assert stream.got[2] == "good:y."
    stream.close()


def test_ordinary_answers_of_any_size_may_wait() -> None:
    stream = Stream(takes=0)
    for name in "abc":
        stream.ask("plain", name).answer(_GIVE_UP, final=True)
    stream.read(3)
    assert [text.partition(":")[0] for text in stream.got] == ["a", "b", "c"]


def test_the_end_waits_for_all_responses() -> None:
    stream = Stream(takes=1)
    work = stream.ask("many", "a")
    stream.session.half_close()
    work.answer("x")
    work.answer("y")
    work.request.finish()
    assert not stream.peer.finished
    stream.read(1)
    assert stream.got == ["a:x", "a:y"]
    assert stream.peer.finished == [None]
    stream = Stream()
    work = stream.ask("many", "a")
    stream.engine.admission.close()  # as when the server ends
    work.answer("x")
    assert not stream.peer.finished
    work.answer("y", final=True)
    [error] = stream.peer.finished
    assert isinstance(error, ServerExiting)


async def test_too_many_requests_at_once_wait_with_the_client(stream: Stream) -> None:
    """Requests of a lost stream are cancelled in turns."""
    held = []
    works = [stream.ask("many") for _ in range(1023)]
    held.append(stream.peer.held)
    works.append(stream.ask("plain"))
    held.append(stream.peer.held)
    for work in works[:600]:
        work.answer("x", final=True)
    held.append(stream.peer.held)
    assert held == [False, True, False]
    stream.session.closed()
    assert stream.engine.admission.requests > 200
    await until(lambda: stream.engine.admission.requests == 0)
    stream.close()


def test_a_model_learned_to_be_decoupled_after_submission(stream: Stream) -> None:
    """A front end learns of it some time after the request was sent."""
    model = stream.engine.plain
    first = stream.ask("plain", "a")
    second = stream.ask("plain", "b")
    stream.engine.models["plain"] = model.__class__("plain", False)
    third = stream.ask("plain", "c")
    third.answer("3", final=True)
    assert stream.got == []
    model.decoupled = True  # which first and second are of
    second.answer("2")
    first.answer("1")
    second.answer("2")
    assert stream.got == ["c:3.", "b:2", "a:1", "b:2"]
    stream.close()
    stream = Stream()
    stream.ask("plain", "a")
    stream.engine.plain.decoupled = True
    stream.engine.models["plain"] = model.__class__("plain", False)
    stream.ask("plain", "b").answer("x", final=True)  # which need not wait for the first one
    assert stream.got == ["b:x."]


# --- decoding on a thread


def long_message(id: str) -> bytes:
    """A request whose typed contents take long to decode."""
    message = pb.ModelInferRequest(model_name="plain", id=id)
    item = message.inputs.add(name="x", datatype="INT32", shape=[1, 100_000])
    item.contents.int_contents.extend([5] * 100_000)
    return message.SerializeToString()


async def given(stream: Stream, count: int) -> None:
    """Wait until the model has `count` requests."""
    async with asyncio.timeout(30):
        while len(stream.engine.plain.work) < count:  # noqa: ASYNC110 - a thread makes it so
            await asyncio.sleep(0)


async def test_requests_behind_a_long_one_wait_for_it(stream: Stream) -> None:
    stream.send(long_message("long"))
    stream.send(infer_message("plain", id="short"))
    stream.send(infer_message("nowhere", id="wrong"))
    stream.send(long_message("last"))
    assert stream.engine.plain.work == []
    assert stream.engine.admission.requests == 4
    await given(stream, 3)
    work = stream.engine.plain.work
    assert [w.request.id for w in work] == ["long", "short", "last"]
    assert set(work[0].request.inputs["x"].array.ravel().tolist()) == {5}
    assert stream.engine.admission.bytes >= 800_000  # their decoded size is charged
    for one in work:
        one.answer("a", True)
    assert [s.infer_response.id for s in stream.peer.sent] == ["long", "short", "wrong", "last"]
    assert (stream.engine.admission.requests, stream.engine.admission.bytes) == (0, 0)


async def test_a_long_request_without_room_for_its_names_holds_up_no_other(stream: Stream) -> None:
    admission, message = stream.engine.admission, pb.ModelInferRequest()
    message.ParseFromString(long_message("long"))
    message.inputs[0].name = "x" * 10_000
    data = message.SerializeToString()
    admission.count(1_000)  # of another client
    admission.most_bytes = len(data) + 5_000
    stream.send(data)
    admission.count(-1_000)
    stream.send(infer_message("plain", id="short"))
    [work] = stream.engine.plain.work
    work.answer("a", True)
    assert [told(message).split(":")[0] for message in stream.peer.sent] == ["long", "short"]
    assert "limit" in stream.peer.sent[0].error_message
    stream.close()


async def test_a_stream_that_ends_while_a_request_is_decoded() -> None:
    stream, other = Stream(), Stream()
    other.engine.admission.workbench = stream.engine.admission.workbench
    stream.send(long_message("long"))
    stream.send(infer_message("plain", id="short"))
    stream.session.closed()
    assert (stream.engine.admission.requests, stream.engine.admission.bytes) == (0, 0)
    other.send(long_message("other"))  # behind it, on the same thread
    await given(other, 1)
    assert stream.engine.plain.work == []


@pytest.mark.parametrize("model", ["plain", "many"])
def test_unread_responses_are_charged(model: str) -> None:
    stream = Stream(takes=0)
    admission, work = stream.engine.admission, stream.ask(model, "a")
    before = admission.bytes
    work.answer(1000, final=True)
    assert before + 1000 < admission.bytes < before + 2000
    stream.read(1)
    assert (admission.requests, admission.bytes) == (0, 0)
    stream.ask(model, "b").answer(1000, final=True)
    assert admission.bytes > 1000
    stream.close()
