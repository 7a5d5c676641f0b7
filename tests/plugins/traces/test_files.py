"""Traces in the format of Triton's tools: files, contents and times."""

import json
import logging
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np
import pytest

from headrace.core.datatypes import NUMPY, Datatype
from headrace.core.tensors import Array, Tensor, elsewhere
from headrace.engine.tracing import Item
from headrace.observability.trace_settings import Sampler, TraceConfig, TraceSettings
from headrace.observability.traces import BACKEND_OUTPUT, QUEUE_INPUT, Trace
from headrace.observability.writing import WritingThread
from headrace.plugins.traces import trace_sink
from headrace.plugins.traces.files import TraceFiles, addition, encode_trace, whole_file

TIMES, TENSORS = TraceSettings(timestamps=True), TraceSettings(tensors=True)


def a_trace(settings: TraceSettings = TIMES, number: int = 7, parent: int = 0) -> Trace:
    trace = Trace(number, parent, Sampler(settings), "HTTP", "simple", "abc", 0, 3)
    trace.time("REQUEST_START", 10)
    trace.time("REQUEST_END", 40)
    trace.time("QUEUE_START", 20)
    return trace


def objects(trace: Trace) -> list[dict[str, Any]]:
    parsed: list[dict[str, Any]] = json.loads(whole_file([encode_trace(trace)]))
    return parsed


def test_the_model_first_and_then_times_in_their_order() -> None:
    assert objects(a_trace()) == [
        {"id": 7, "model_name": "simple", "model_version": 3, "request_id": "abc"},
        {"id": 7, "timestamps": [{"name": "REQUEST_START", "ns": 10}]},
        {"id": 7, "timestamps": [{"name": "QUEUE_START", "ns": 20}]},
        {"id": 7, "timestamps": [{"name": "REQUEST_END", "ns": 40}]},
    ]
    # A request of a model has a parent.
    trace = a_trace(number=8, parent=7)
    trace.request_id = ""
    head = {"id": 8, "model_name": "simple", "model_version": 3, "parent_id": 7}
    assert objects(trace)[0] == head
    # An addition replaces the end.
    first, second = encode_trace(a_trace(number=1)), encode_trace(a_trace(number=2))
    file = whole_file([first])[:-1] + addition([second, second])
    assert [o["id"] for o in json.loads(file)] == [1] * 4 + [2] * 8


@pytest.mark.parametrize(
    ("datatype", "values", "text"),
    [
        (Datatype.FP32, [[0.1, 2]], "0.1,2.0"), (Datatype.FP64, [[0.1, np.nan]], "0.1,nan"),
        (Datatype.FP16, [[0.5, 2]], "0.5,2.0"), (Datatype.BF16, [[0.5, 2]], "0.5,2.0"),
        (Datatype.INT64, [[-1, 2**62]], f"-1,{2**62}"), (Datatype.UINT8, [[65, 66]], "65,66"),
        (Datatype.BOOL, [[True, False]], "1,0"),
        (Datatype.BYTES, [[b"a", b'"\xff']], '"a",""\ufffd"'),
    ],
)  # fmt: skip
def test_tensors_are_texts(datatype: Datatype, values: list[Any], text: str) -> None:
    trace = a_trace(TENSORS)
    array: Array = np.array(values, NUMPY[datatype])
    trace.keep(QUEUE_INPUT, [Tensor("INPUT0", datatype, array)])
    trace.keep(BACKEND_OUTPUT, [Tensor("OUTPUT0", datatype, array[:, :0])])
    _, given, made = objects(trace)
    tensor = {"name": "INPUT0", "data": text, "shape": "1,2", "dtype": datatype.value}
    assert given == {"id": 7, "activity": "TENSOR_QUEUE_INPUT", "tensor": tensor}
    assert made["activity"] == "TENSOR_BACKEND_OUTPUT"
    assert (made["tensor"]["data"], made["tensor"]["shape"]) == ("", "1,0")


@pytest.mark.parametrize("datatype", Datatype)
def test_tensors_that_went_into_shared_memory(datatype: Datatype) -> None:
    trace = a_trace()
    trace.keep(BACKEND_OUTPUT, [elsewhere("y", datatype, (1, 3))])
    assert objects(trace)[-1]["tensor"] == {
        "name": "y", "data": "", "shape": "1,3", "dtype": datatype.value
    }  # fmt: skip


@pytest.mark.parametrize("text", ['a"\n', "\ud800", "ü"])
def test_an_id_may_be_any_text(text: str) -> None:
    trace = a_trace()
    trace.request_id = text
    assert objects(trace)[0]["request_id"] == text.encode(errors="replace").decode()


@pytest.mark.parametrize("datatype", [Datatype.FP64, Datatype.BYTES])
def test_large_tensors_are_written_with_pauses(datatype: Datatype) -> None:
    trace = a_trace(TENSORS)
    values = np.arange(300_000).reshape(3, -1)
    array: Array = values.astype(NUMPY[datatype])
    if datatype is Datatype.BYTES:
        array = np.array([b"%d" % value for value in values.flat], object).reshape(3, -1)
    trace.keep(QUEUE_INPUT, [Tensor("x", datatype, array)])
    pauses: list[None] = []
    text = encode_trace(trace, lambda: pauses.append(None))
    assert len(pauses) > 100
    elements = json.loads(whole_file([text]))[1]["tensor"]["data"].split(",")
    assert [int(float(element.strip('"'))) for element in elements] == list(range(300_000))


FOREVER = TraceSettings(timestamps=True)
THREE = TraceSettings(timestamps=True, count=3)
EVERY_TWO = TraceSettings(timestamps=True, log_frequency=2)


def traces(sampler: Sampler, *numbers: int, last: int = 0) -> list[Item]:
    return [
        Trace(n, 0, sampler, "HTTP", "m", "", 0, last=n == last) for n in numbers
    ]  # fmt: skip


def found(folder: Path) -> dict[str, list[int]]:
    """Numbers of the traces in each file, which must be JSON."""
    return {
        path.name: [entry["id"] for entry in json.loads(path.read_text())]
        for path in sorted(folder.iterdir())
    }


def test_the_single_file_is_valid_at_any_time(tmp_path: Path) -> None:
    files, sampler = TraceFiles(tmp_path / "t"), Sampler(FOREVER)
    (tmp_path / "t").write_text("what was there before, and longer than what comes")
    files.write(traces(sampler, 1, 2))
    assert found(tmp_path) == {"t": [1, 2]}
    files.write(traces(sampler, 3))
    assert found(tmp_path) == {"t": [1, 2, 3]}
    files.close()
    assert found(tmp_path) == {"t": [1, 2, 3]}


def test_a_numbered_file_per_log_frequency(tmp_path: Path) -> None:
    files, sampler = TraceFiles(tmp_path / "t"), Sampler(EVERY_TWO)
    files.write(traces(sampler, 1))
    assert found(tmp_path) == {}
    files.write(traces(sampler, 2, 3, 4, 5))
    assert found(tmp_path) == {"t.0": [1, 2], "t.1": [3, 4]}
    files.write([sampler])
    assert found(tmp_path) == {"t.0": [1, 2], "t.1": [3, 4], "t.2": [5]}


def test_a_numbered_file_when_a_count_is_reached(tmp_path: Path) -> None:
    files, sampler = TraceFiles(tmp_path / "t"), Sampler(THREE)
    files.write(traces(sampler, 1, 2))
    assert found(tmp_path) == {}
    files.write(traces(sampler, 3, last=3))
    assert found(tmp_path) == {"t.0": [1, 2, 3]}


def test_the_single_file_below_the_count(tmp_path: Path) -> None:
    files, counted, others = TraceFiles(tmp_path / "t"), Sampler(THREE), Sampler(FOREVER)
    files.write([*traces(counted, 1, 2), *traces(others, 3)])
    assert found(tmp_path) == {"t": [3]}
    files.write([counted])
    assert found(tmp_path) == {"t": [3, 1, 2]}


def test_no_trace_is_lost_at_shutdown(tmp_path: Path) -> None:
    files, counted, often = TraceFiles(tmp_path / "t"), Sampler(THREE), Sampler(EVERY_TWO)
    files.write([*traces(counted, 1), *traces(often, 2)])
    files.close()
    assert found(tmp_path) == {"t": [1], "t.0": [2]}


def test_write_errors_are_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    files, sampler = TraceFiles(tmp_path / "later" / "t"), Sampler(FOREVER)
    with caplog.at_level(logging.ERROR):
        files.write(traces(sampler, 1))
        files.write(traces(sampler, 2))
    [record] = caplog.records
    assert "cannot write traces to" in record.getMessage()
    assert "No such file or directory" in record.getMessage()
    (tmp_path / "later").mkdir()
    files.write(traces(sampler, 3))
    assert found(tmp_path / "later") == {"t": [3]}


@contextmanager
def files_at_most(size: int) -> Iterator[None]:
    """Limit the size of written files, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("room", [0, 20])
def test_a_full_disk_leaves_the_file_as_it_was(tmp_path: Path, room: int) -> None:
    files, sampler = TraceFiles(tmp_path / "t"), Sampler(FOREVER)
    files.write(traces(sampler, 1))
    with files_at_most((tmp_path / "t").stat().st_size + room):
        files.write(traces(sampler, *range(100, 200)))
        assert found(tmp_path) == {"t": [1]}
    files.write(traces(sampler, 2))
    assert found(tmp_path) == {"t": [1, 2]}


def test_a_full_disk_leaves_no_part_of_a_numbered_file(tmp_path: Path) -> None:
    files, sampler = TraceFiles(tmp_path / "t"), Sampler(EVERY_TWO)
    with files_at_most(20):
        files.write(traces(sampler, 1, 2))
    files.write(traces(sampler, 3, 4))
    assert found(tmp_path) == {"t.1": [3, 4]}


def test_traces_for_a_numbered_file_are_written_before_they_are_too_many(tmp_path: Path) -> None:
    files = TraceFiles(tmp_path / "t", held_bytes=500)
    sampler = Sampler(TraceSettings(timestamps=True, log_frequency=2**32 - 1))
    for number in range(100):
        files.write(traces(sampler, number))
    kept = [number for numbers in found(tmp_path).values() for number in numbers]
    assert set(kept) >= set(range(80))
    files.close()
    assert sorted(n for numbers in found(tmp_path).values() for n in numbers) == list(range(100))


def test_timestamps_count_against_the_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of traces with 1 MB each, only some wait for a file that cannot be written at present."""
    written = Event()
    monkeypatch.setattr(TraceFiles, "write", lambda writer, items: written.wait(60))
    sink = trace_sink(TraceConfig(file="unused"))
    assert isinstance(sink, WritingThread)
    trace = a_trace()
    trace.times = [("HTTP_SEND_START", number) for number in range(10_000)]
    for _ in range(1000):
        sink.put(trace)
    assert 400 < sink.dropped < 1000
    written.set()
    sink.close(60)
