"""The choice of calls, and the copies of their payloads."""

from collections.abc import Callable, Sequence
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np
import pytest

from headrace.core.call import NO_CONTEXT, Call, CallOptions, InferResponse, Timing
from headrace.core.datatypes import Datatype
from headrace.core.errors import InvalidRequest, ServerError
from headrace.core.tensors import Tensor
from headrace.observability.capture import CaptureOptions
from headrace.observability.writing import WritingThread
from headrace.plugins.capture.files import JsonLines
from headrace.plugins.capture.opening import open_capture
from headrace.plugins.capture.records import OMITTED, REDACTED, CapturedCall
from headrace.plugins.capture.stage import PayloadCapture, Redaction


class Taken:
    """A writer that records, and whose calls are read after `close`."""

    unwritten = 0

    def __init__(self) -> None:
        self.calls: list[CapturedCall] = []

    def write(self, items: Sequence[CapturedCall]) -> None:
        self.calls += items

    def close(self) -> None: ...


class Door(Call):
    """A call with headers, which takes its responses."""

    door = "HTTP"

    def __init__(self, id: str = "", headers: dict[str, str] | None = None, **parameters: Any):
        array = np.arange(4, dtype=np.int32)
        super().__init__("m", "", id, {"X": Tensor("X", Datatype.INT32, array)}, (), parameters)
        self.context = NO_CONTEXT
        self.headers = headers or {}

    def header(self, name: str) -> str:
        return self.headers.get(name, "")

    def respond(self, response: InferResponse, final: bool) -> None: ...

    def finish(self) -> None: ...

    def fail(self, error: ServerError) -> None: ...


class World:
    """A capture with one model, and the calls that reached it."""

    def __init__(self, **options: Any) -> None:
        self.writer = Taken()
        thread = WritingThread(self.writer, "payloads", lambda call: call.nbytes)
        self.capture = PayloadCapture(CaptureOptions("f", **options), thread, self.writer)
        self.submit = self.capture.recorded("m", "3", lambda call: None)

    def run(self, call: Call, values: Sequence[float] = (1.0,)) -> None:
        self.submit(call)
        array = np.array(values, np.float32)
        output = Tensor("Y", Datatype.FP32, array)
        call.pass_response(InferResponse("m", "4", "", [output], Timing(1, 2, 1), {}), True)

    def calls(self) -> list[CapturedCall]:
        self.capture.close()
        return self.writer.calls


def test_payloads_are_copied() -> None:
    world, door = World(), Door("an id", user=7)
    world.run(door)
    np.asarray(door.inputs["X"].array)[:] = 0
    [call] = world.calls()
    assert (call.model, call.version, call.id, call.door) == ("m", "4", "an id", "http")
    assert call.inputs[0].data.tolist() == [0, 1, 2, 3]
    assert call.responses[0][0].data.tolist() == [1.0]
    assert call.parameters == {"user": 7}
    assert (call.nbytes, call.status, call.error) == (20, 200, "")
    assert call.duration_ns > 0
    assert world.capture.captured == 1
    assert world.capture.lost == {"queue": 0, "unwritten": 0}


def test_requests_of_sequences_tell_them_and_are_chosen_by_them() -> None:
    world = World(rate=2, key="parameter:sequence_id")
    for id in range(1, 33):
        for end in (False, True):
            door = Door(user=7)
            door.options = CallOptions(sequence_id=id, sequence_start=not end, sequence_end=end)
            world.run(door)
    found = [call.parameters for call in world.calls()]
    ids = [one["sequence_id"] for one in found[::2]]
    assert 4 < len(ids) < 28
    assert found == [
        {"user": 7, "sequence_id": id, flag: True}
        for id in ids for flag in ("sequence_start", "sequence_end")
    ]  # fmt: skip


def test_failures_disconnects_and_several_responses() -> None:
    world = World()
    world.submit(failed := Door())
    failed.pass_end(InvalidRequest("no such input"))
    world.submit(left := Door())
    left.cancel()
    world.submit(several := Door())
    for final in (False, True):
        several.pass_response(InferResponse("m", "4", "", [], Timing(1, 2, 1), {}), final)
    calls = world.calls()
    assert [call.status for call in calls] == [400, 499, 200]
    assert [call.error for call in calls[:2]] == ["no such input", "the client went away"]
    assert calls[2].responses == [[], []]


def test_models_that_match_no_pattern_have_no_stage() -> None:
    world = World(models=("fraud-*", "other"))

    def submit(call: Call) -> None: ...

    assert world.capture.recorded("m", "3", submit) is submit
    assert world.capture.recorded("fraud-1", "3", submit) is not submit


def test_calls_of_models_are_not_captured() -> None:
    class Inner(Door):
        door = ""

    world = World()
    world.submit(Inner())
    assert world.calls() == []


@pytest.mark.parametrize(("key", "make"), [
    ("id", lambda value: Door(value)),
    ("header:x-user", lambda value: Door(headers={"x-user": value})),
    ("parameter:user", lambda value: Door(user=value)),
])  # fmt: skip
def test_a_key_chooses_all_or_none_with_its_value(key: str, make: Callable[[str], Door]) -> None:
    world = World(key=key, rate=4)
    for value in range(400):
        for _ in range(2):
            world.run(make(f"user {value}"))
    calls = world.calls()
    keys = [call.key for call in calls]
    assert {keys.count(key) for key in keys} == {2}
    assert 60 <= len(set(keys)) <= 140
    assert world.capture.headers == (("x-user",) if key.startswith("header") else ())
    other = World(key=key, rate=4)  # the choice is the same in every process
    for value in range(400):
        other.run(make(f"user {value}"))
    assert {call.key for call in other.calls()} == set(keys)


@pytest.mark.parametrize(("rate", "least", "most"), [(10**9, 0, 9), (2, 300, 700), (1, 999, 999)])
def test_a_share_is_chosen_by_chance(rate: int, least: int, most: int) -> None:
    world = World(rate=rate)
    for _ in range(999):
        world.run(Door())
    assert least <= len(world.calls()) <= most


def test_large_payloads_are_left_out() -> None:
    world = World(payload_bytes=23)
    world.run(Door(), [1.0, 2.0])
    world.run(Door(), [1.0])
    first, second = world.calls()
    assert first.responses[0][0].data == OMITTED
    assert first.responses[0][0].shape == (2,)
    assert (first.nbytes, second.nbytes) == (16, 20)


def test_redaction() -> None:
    world = World(redact=("Y", "other/X", "parameter:pass*"))
    world.run(Door(password="x", user="y"))
    [call] = world.calls()
    assert call.responses[0][0].data == REDACTED
    assert call.inputs[0].data.tolist() == [0, 1, 2, 3]
    assert call.parameters == {"password": "<redacted>", "user": "y"}
    assert call.nbytes == 16
    found = Redaction(["m/*", "NAME"])
    assert found.hides("m", "X")
    assert found.hides("n", "NAME")
    assert not found.hides("n", "X")
    # Exporters name tensors like paths.
    found = Redaction(["dense_1/*", "m/embedding/lookup"])
    assert found.hides("m", "dense_1/BiasAdd:0")
    assert found.hides("m", "embedding/lookup")
    assert not found.hides("n", "embedding/lookup")
    assert not found.hides("m", "dense_2/BiasAdd:0")


def test_parameters_are_redacted_in_any_case() -> None:
    """A header for models is a parameter whose name is as the client writes it."""
    world = World(redact=("parameter:X-Tenant-*",))
    given: dict[str, Any] = {"x-tenant-key": "s3cret", "X-TENANT-ID": "s3cret", "user": "y"}
    world.run(Door(**given))
    [call] = world.calls()
    hidden = "<redacted>"
    assert call.parameters == {"x-tenant-key": hidden, "X-TENANT-ID": hidden, "user": "y"}


def test_long_parameters_count_against_the_queue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of calls with 8 MB each, only some wait for a file that cannot be written at present."""
    written = Event()
    monkeypatch.setattr(JsonLines, "write", lambda writer, items: written.wait(60))
    capture = open_capture(CaptureOptions(f"{tmp_path}/c.jsonl"))
    submit = capture.recorded("m", "3", lambda call: None)
    long: dict[str, Any] = {str(number): "x" * 8192 for number in range(1000)}
    for _ in range(40):
        call = Door(**long)
        submit(call)
        call.pass_response(InferResponse("m", "3", "", [], Timing(1, 2, 1), {}), True)
    assert capture.captured == 40
    assert capture.lost["queue"] >= 20
    written.set()
    capture.close()
