"""Arrow Flight: pyarrow's own client against real servers."""

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.core.datatypes import Datatype
from headrace.plugins.access.keys import new_key
from tests.contract import graphs
from tests.contract.conftest import FRONT_ENDS
from tests.models.onnx_graphs import add_sub, write_model
from tests.support.access_file import known_client
from tests.support.held import Gates, write_held_model
from tests.support.scrape import Scraper
from tests.support.server_process import ServerProcess, clean_server
from tests.support.table_models import numbers, write_table_models

pa = pytest.importorskip("pyarrow")
flight = pytest.importorskip("pyarrow.flight")

_DAMAGED = 500  # `tests/protocol/test_arrow_ipc.py` tries many more


@pytest.fixture(scope="module", params=["one process", FRONT_ENDS])
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerProcess]:
    root = tmp_path_factory.mktemp("models")
    write_table_models(root)
    hold = 'max_batch_size: 8 parameters { key: "execution" value { string_value: "thread" } }'
    write_model(root, "spin", graphs.spin(), hold)
    options = ["--door=flight=0", f"--max-request-bytes={4 << 20}"]
    options += ["--frontends=2"] if request.param == "front ends" else []
    with clean_server(root, options=options) as process:
        yield process


@pytest.fixture
def client(server: ServerProcess) -> Iterator[Any]:
    with flight.connect(server.door("flight")) as connected:
        yield connected


def path(*parts: str) -> Any:
    return flight.FlightDescriptor.for_path(*parts)


def exchange(client: Any, model: str, *batches: Any, **options: Any) -> Any:
    """The answer to a table: batches are written by a thread, as answers are read."""
    call = flight.FlightCallOptions(**options)
    writer, reader = client.do_exchange(path(model), call)

    thread = threading.Thread(target=write, args=(writer, batches))
    thread.start()
    try:
        return reader.read_all()
    finally:
        thread.join()
        writer.close()


def write(writer: Any, batches: Sequence[Any]) -> None:
    with suppress(flight.FlightError, pa.ArrowException, OSError):  # which the reader tells, too
        writer.begin(batches[0].schema)
        for batch in batches:
            writer.write_batch(batch)
        writer.done_writing()


def refused(client: Any, model: str, *batches: Any, **options: Any) -> None:
    """Read the answer to a table that is refused, after it has been written.

    Not beside that: the client of pyarrow ends the whole program if its reader meets an error while
    another thread writes.
    """
    writer, reader = client.do_exchange(path(model), flight.FlightCallOptions(**options))
    write(writer, batches)
    reader.read_all()


def test_batches_come_back_in_order(client: Any) -> None:
    batches = [numbers(rows, first) for first, rows in enumerate([1, 900, 8, 0, 3000] * 4)]
    table = exchange(client, "numbers", *batches)
    table.validate(full=True)
    wanted = pa.Table.from_batches(batches)["INPUT0"].combine_chunks().flatten()
    assert table["OUTPUT0"].combine_chunks().flatten() == wanted
    assert [len(chunk) for chunk in table["OUTPUT0"].chunks] == [len(batch) for batch in batches]


def test_put_then_get(client: Any) -> None:
    writer, reader = client.do_put(path("numbers", "1"), numbers(1).schema)
    with writer:
        for first in range(20):
            writer.write_batch(numbers(100, first * 100))
        writer.done_writing()
        ticket = flight.Ticket(reader.read().to_pybytes())
    table = client.do_get(ticket).read_all()
    assert table["OUTPUT0"].combine_chunks().flatten().to_numpy().tolist() == [*range(8000)]
    with pytest.raises(pa.ArrowKeyError, match="can be used once"):
        client.do_get(ticket).read_all()


def test_each_input_has_a_column(client: Any) -> None:
    values = np.arange(32).reshape(2, 16)
    batch = pa.record_batch({"INPUT1": [*values], "INPUT0": [*values]})
    assert exchange(client, "two", batch)["OUTPUT0"].to_pylist() == (values * 2).tolist()


@pytest.mark.parametrize("compression", [None, "lz4", "zstd"])
def test_dictionaries_that_grow_and_compression(client: Any, compression: str | None) -> None:
    columns = [["a", "b"], ["a", "b", "c"], ["a", "a"]]
    batches = [pa.record_batch({"INPUT0": pa.array(c).dictionary_encode()}) for c in columns]
    options = pa.ipc.IpcWriteOptions(compression=compression, emit_dictionary_deltas=True)
    table = exchange(client, "texts", *batches, write_options=options)
    assert table["OUTPUT0"].to_pylist() == [[t.encode()] for c in columns for t in c]


def test_models_describe_themselves(client: Any) -> None:
    listed = {info.descriptor.path[0].decode(): info for info in client.list_flights()}
    assert [*listed] == ["numbers", "spin", "texts", "two"]
    wanted = pa.schema([pa.field("OUTPUT0", pa.list_(pa.float32(), 4), False)])
    for found in (
        listed["numbers"].schema,
        client.get_flight_info(path("numbers")).schema,
        client.get_schema(flight.FlightDescriptor.for_command(b"numbers/1")).schema,
    ):
        assert found == wanted
        inputs = pa.ipc.read_schema(pa.py_buffer(found.metadata[b"inputs"]))
        assert inputs.names == ["INPUT0"]


@pytest.mark.parametrize(
    ("model", "given", "error", "text"),
    [
        ("absent", 1, pa.ArrowKeyError, "unknown model: 'absent'"),
        ("unbatched", 1, pa.ArrowInvalid, "takes no tables"),
        ("numbers", [[1.0, None, 1, 1]], pa.ArrowInvalid, "a null in row 0"),
        ("numbers", [[1.0]], pa.ArrowInvalid, "unexpected shape"),
        ("numbers", 400_000, Exception, "exceeds the maximum .* 4194304"),
    ],
)  # fmt: skip
def test_errors_reach_the_client(
    client: Any, model: str, given: Any, error: type[Exception], text: str
) -> None:
    """`given` is a number of valid rows, or the rows of the only column."""
    batch = numbers(given) if isinstance(given, int) else pa.record_batch({"INPUT0": given})
    with pytest.raises(error, match=text):
        refused(client, model, batch)


def test_answers_before_an_error_arrive(client: Any) -> None:
    bad = pa.record_batch({"INPUT0": pa.array([[0.0] * 3 + [None]], pa.list_(pa.float32(), 4))})
    writer, reader = client.do_exchange(path("numbers"))
    writer.begin(bad.schema)
    for batch in (numbers(2), bad):
        writer.write_batch(batch)
    assert reader.read_chunk().data.num_rows == 2
    with pytest.raises(pa.ArrowInvalid, match="a null"):
        reader.read_chunk()
    writer.cancel() if hasattr(writer, "cancel") else reader.cancel()


def spin(rounds: float) -> Any:
    return pa.record_batch({"ROUNDS": pa.array([[rounds]], pa.list_(pa.float32(), 1))})


def test_a_deadline(client: Any) -> None:
    begun = time.monotonic()
    with pytest.raises(flight.FlightTimedOutError):
        refused(client, "spin", *[spin(1e8)] * 4, timeout=0.2)
    assert time.monotonic() - begun < 30


def test_damaged_messages_never_end_the_server(client: Any, server: ServerProcess) -> None:
    """Messages of valid streams are changed at random."""
    grpc = pytest.importorskip("grpc")
    rng = random.Random(1)
    batch = pa.record_batch({"INPUT0": pa.array(["a", "b"]).dictionary_encode()})
    from headrace.plugins.flight.wire import data_of

    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    from headrace.protocol.arrow_ipc import messages

    descriptor = b"\x0a\x09\x08\x01\x1a\x05texts"
    stream = []
    for head, body in messages(bytes(sink.getvalue())):
        framed = b"\xff\xff\xff\xff" + len(head).to_bytes(4, "little") + bytes(head) + bytes(body)
        stream.append(b"".join(data_of(pa.py_buffer(framed))))
    stream[0] = descriptor + stream[0]
    codes: dict[str, int] = {}
    with grpc.insecure_channel(server.door("flight").removeprefix("grpc://")) as channel:
        call = channel.stream_stream("/arrow.flight.protocol.FlightService/DoExchange")
        for _ in range(_DAMAGED):
            damaged = [bytearray(message) for message in stream]
            for _ in range(rng.randint(1, 3)):
                one = rng.choice(damaged)
                one[rng.randrange(len(one))] = rng.choice([0, 1, 127, 128, 255, rng.randrange(256)])
            if rng.random() < 0.2:
                rng.shuffle(damaged)
            try:
                list(call(iter([bytes(message) for message in damaged]), timeout=30))
                code = "OK"
            except grpc.RpcError as error:
                code = error.code().name
            codes[code] = codes.get(code, 0) + 1
    assert codes.keys() <= {"OK", "INVALID_ARGUMENT", "NOT_FOUND", "RESOURCE_EXHAUSTED"}
    assert exchange(client, "numbers", numbers(1)).num_rows == 1


def test_calls_are_counted_by_door(client: Any, server: ServerProcess) -> None:
    """Each once, by its status, whatever its size, and whether or not it ends the stream."""
    name, labels = "headrace_requests_total", {"door": "flight", "operation": "infer"}

    def counted() -> dict[str, float]:
        with Scraper(server.metrics) as metrics:
            samples = metrics.now().samples(name)
        return {own["status"]: n for own, n in samples if labels.items() <= own.items()}

    before = counted()
    exchange(client, "numbers", numbers(1), numbers(1), numbers(9_000))
    with pytest.raises(pa.ArrowInvalid, match="unexpected shape"):
        refused(client, "numbers", pa.record_batch({"INPUT0": [[1.0]]}))
    after = counted()
    grown = {status: n - before.get(status, 0) for status, n in after.items()}
    assert {status: n for status, n in grown.items() if n} == {"200": 3, "400": 1}


_QUOTAS = """
[[quotas]]
name = "own"
of = ["ann"]
requests_per_sec = 0.001
burst = 2
[[quotas]]
name = "near"
of = ["address"]
requests_per_sec = 0.001
burst = 3
"""


def test_quotas_of_clients_and_of_addresses_behind_a_proxy(tmp_path: Path) -> None:
    write_table_models(tmp_path / "models")
    ann, bob = new_key(), new_key()
    rules = tmp_path / "access.toml"
    rules.write_text(known_client("ann", ann) + known_client("bob", bob) + _QUOTAS)
    options = ["--door=flight=0", f"--access={rules}", "--trusted-proxies=127.0.0.0/8"]
    with (
        ServerProcess(tmp_path / "models", options=options) as process,
        flight.connect(process.door("flight")) as client,
    ):

        def given(key: str, address: str) -> Sequence[tuple[bytes, bytes]]:
            sent = {"authorization": f"Bearer {key}", "x-forwarded-for": address}
            return [(name.encode(), value.encode()) for name, value in sent.items()]

        first = given(ann.key, "192.0.2.1")
        for _ in range(2):
            exchange(client, "numbers", numbers(1), headers=first)
        with pytest.raises(pa.ArrowException, match="of its quota 'own'"):
            refused(client, "numbers", numbers(1), headers=first)
        second = given(bob.key, "192.0.2.1")
        exchange(client, "numbers", numbers(1), headers=second)
        with pytest.raises(pa.ArrowException, match="of its quota 'near'"):
            refused(client, "numbers", numbers(1), headers=second)
        exchange(client, "numbers", numbers(1), headers=given(bob.key, "192.0.2.2"))


def test_a_server_that_ends_answers_what_it_has_taken(
    tmp_path: Path, gates: Gates, number: int
) -> None:
    def held(value: int) -> Any:
        return pa.record_batch({"VALUE": pa.array([[value]], pa.list_(pa.int64(), 1))})

    write_held_model(tmp_path, "held", gates.folder)
    options = ["--door=flight=0", "--allow-in-process-python"]
    with clean_server(tmp_path, options=options) as process, Scraper(process.metrics) as scraper:
        with flight.connect(process.door("flight")) as client:
            writer, reader = client.do_exchange(path("held"))
            writer.begin(held(1).schema)
            writer.write_batch(held(1))
            assert reader.read_chunk().data.num_rows == 1
            writer.write_batch(held(number))
            scraper.until_running("held")
            os.kill(process.pid, signal.SIGTERM)
            process.await_logged("shutting down")
            gates.open(number)
            assert reader.read_chunk().data.num_rows == 1
            with pytest.raises(flight.FlightUnavailableError, match="Server exiting"):
                reader.read_chunk()
        assert process.process is not None
        assert process.process.wait(60) == 0


@pytest.mark.parametrize(
    ("address", "text"), [("x", "expected a port"), ("1.2.3.4:1", "cannot listen on 1.2.3.4:1")]
)
def test_an_address_that_cannot_be_opened(tmp_path: Path, address: str, text: str) -> None:
    write_model(tmp_path, "two", add_sub(Datatype.INT32, 16), "max_batch_size: 8")
    command = [sys.executable, "-m", "headrace", "serve", "--model-repository", str(tmp_path)]
    command += ["--http-port=0", "--grpc-port=0", "--metrics-port=0", f"--door=flight={address}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert text in done.stderr
