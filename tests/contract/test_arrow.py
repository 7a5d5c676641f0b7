"""Arrow streams as bodies of infer: tables of any size in, tables out, and what is refused."""

import gzip
import random
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from tests.contract.conftest import FRONT_ENDS
from tests.support.server_process import ServerProcess, clean_server
from tests.support.table_models import numbers, write_table_models

pa = pytest.importorskip("pyarrow")

MEDIA = "application/vnd.apache.arrow.stream"
HEAD = {"content-type": MEDIA}
_LIMIT = 4 << 20
_DAMAGED = 500  # `tests/protocol/test_arrow_ipc.py` tries many more


@pytest.fixture(scope="module", params=["one process", FRONT_ENDS])
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerProcess]:
    root = tmp_path_factory.mktemp("models")
    write_table_models(root)
    options = [f"--max-request-bytes={_LIMIT}", f"--max-object-bytes={16 << 20}"]
    options += ["--frontends=2"] if request.param == "front ends" else []
    with clean_server(root, options=options) as process:
        yield process


def stream(*batches: Any, **options: Any) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batches[0].schema, **options) as writer:
        for batch in batches:
            writer.write_batch(batch)
    return bytes(sink.getvalue())


def post(server: ServerProcess, model: str, body: bytes, **headers: str) -> httpx.Response:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    url = f"{server.url}/v2/models/{model}/infer"
    return httpx.post(url, content=body, headers=HEAD | named, timeout=60, verify=False)


def table_in(answer: httpx.Response) -> Any:
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == MEDIA
    table = pa.ipc.open_stream(answer.content).read_all()
    table.validate(full=True)
    return table


def test_a_table_of_more_rows_than_a_batch_comes_back(server: ServerProcess) -> None:
    batches = [numbers(300), numbers(1), numbers(77, 400)]
    table = table_in(post(server, "numbers", stream(*batches)))
    assert table.schema.field("OUTPUT0").type == pa.list_(pa.float32(), 4)
    assert table.schema.metadata[b"model_name"] == b"numbers"
    wanted = pa.Table.from_batches(batches)["INPUT0"].to_pylist()
    assert table["OUTPUT0"].to_pylist() == wanted


def test_each_input_has_a_column(server: ServerProcess) -> None:
    values = np.arange(32, dtype=np.int64).reshape(2, 16)
    batch = pa.record_batch({"INPUT1": [*values], "INPUT0": [*values]})
    table = table_in(post(server, "two", stream(batch)))
    assert table["OUTPUT0"].to_pylist() == (values * 2).tolist()
    assert table["OUTPUT1"].to_pylist() == np.zeros((2, 16)).tolist()


def test_columns_of_numbers_are_the_only_input(server: ServerProcess) -> None:
    batch = pa.record_batch({name: [1.5, 2.5] for name in "abcd"})
    table = table_in(post(server, "numbers", stream(batch)))
    assert table["OUTPUT0"].to_pylist() == [[1.5] * 4, [2.5] * 4]


@pytest.mark.parametrize("compression", [None, "lz4", "zstd"])
def test_texts_dictionaries_and_compression(server: ServerProcess, compression: str) -> None:
    texts = ["ä", "b" * 300, ""] * 40
    batch = pa.record_batch({"INPUT0": pa.array(texts).dictionary_encode()})
    options = pa.ipc.IpcWriteOptions(compression=compression)
    table = table_in(post(server, "texts", stream(batch, batch, options=options)))
    assert table["OUTPUT0"].to_pylist() == [[text.encode()] for text in texts * 2]


def test_the_forms_of_body_and_answer_are_chosen_apart(server: ServerProcess) -> None:
    body = stream(numbers(1))
    found = post(server, "numbers", body, accept="application/json").json()
    assert found["outputs"][0]["data"] == [0, 1, 2, 3]
    given = '{"inputs":[{"name":"INPUT0","datatype":"FP32","shape":[1,4],"data":[4,3,2,1]}]}'
    answer = post(
        server, "numbers", given.encode(), content_type="application/json", accept=f"*/*, {MEDIA}"
    )
    assert table_in(answer)["OUTPUT0"].to_pylist() == [[4, 3, 2, 1]]
    packed = post(server, "numbers", body, accept_encoding="gzip")
    assert packed.headers["content-encoding"] == "gzip"
    assert table_in(packed).num_rows == 1
    assert table_in(post(server, "numbers", gzip.compress(body), content_encoding="gzip"))


def test_an_empty_table(server: ServerProcess) -> None:
    assert table_in(post(server, "numbers", stream(numbers(0)))).num_rows == 0


def edited(body: bytes, old: bytes, new: bytes) -> bytes:
    assert old in body
    return body.replace(old, new, 1)


def nulls(rows: int) -> bytes:
    return stream(pa.record_batch({"INPUT0": pa.Array.from_buffers(pa.null(), rows, [None])}))


def good() -> bytes:
    return stream(numbers(3))


def of_column(values: Any, **options: Any) -> bytes:
    written = pa.ipc.IpcWriteOptions(**options)
    return stream(pa.record_batch({"INPUT0": values}), options=written)


def one_long_text_often() -> bytes:
    indices = pa.array([0] * 30_000, pa.int8())
    return of_column(pa.DictionaryArray.from_arrays(indices, pa.array(["x" * 2000])))


# Made in the test: every process of the tests collects them, and some take memory and time.
REFUSED: list[tuple[str, Callable[[], bytes], int, str]] = [
    ("numbers", bytes, 400, "no record batch"),
    ("numbers", lambda: good()[:100], 400, "is cut off"),
    ("numbers", lambda: good()[:-30], 400, "is cut off"),
    ("numbers", lambda: b'{"inputs": []}', 400, "no Arrow stream"),
    ("numbers", lambda: good() + b"more", 400, "4 bytes follow the Arrow stream's end"),
    ("numbers", lambda: stream(pa.record_batch({"a": [1]})), 400, "the table has the columns"),
    ("numbers", lambda: nulls(2**31 - 1), 400, "cannot have"),
    ("texts", lambda: nulls(1), 400, "cannot have"),
    ("texts", lambda: of_column(["a", None]), 400, "a null in row 1"),
    ("texts", one_long_text_often, 400, "--max-object-bytes"),
    ("texts", lambda: edited(of_column(["abcdefgh"]), b"abc", b"\xffbc"), 400, "Invalid UTF8"),
    ("unbatched", lambda: of_column([1.0]), 400, "takes no tables"),
    ("numbers", lambda: of_column(np.zeros(8 << 20), compression="zstd"), 400,
     "decompressed Arrow stream"),
    ("numbers", lambda: stream(numbers(1), options=pa.ipc.IpcWriteOptions(
        metadata_version=pa.ipc.MetadataVersion.V4)), 400, "expected .* V5, got V4"),
    ("absent", good, 404, "unknown model"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("model", "body", "status", "text"), REFUSED, ids=[text for *_, text in REFUSED]
)
def test_refused_streams(
    server: ServerProcess, model: str, body: Callable[[], bytes], status: int, text: str
) -> None:
    answer = post(server, model, body())
    assert answer.status_code == (413 if "decompressed" in text else status), answer.text
    assert answer.headers["content-type"] == "application/json"
    assert re.search(text, answer.json()["error"])


def test_damaged_streams_never_end_the_server(server: ServerProcess) -> None:
    """Bytes of valid streams are changed at random."""
    rng = random.Random(1)
    texts = pa.array(["a", "bb", "", "d"])
    columns = [texts, texts.dictionary_encode(), texts.cast(pa.string_view())]
    columns += [pa.array([[1], [2]]), numbers(5)["INPUT0"]]
    bodies = [
        (stream(pa.record_batch({"INPUT0": column}), options=options), model)
        for column in columns
        for options in (pa.ipc.IpcWriteOptions(compression=c) for c in (None, "lz4", "zstd"))
        for model in ("texts", "numbers")
    ]
    statuses = dict[int, int]()
    with httpx.Client(base_url=server.url, headers=HEAD, timeout=60, verify=False) as client:
        for _ in range(_DAMAGED):
            body, model = rng.choice(bodies)
            damaged = bytearray(body)
            for _ in range(rng.randint(1, 4)):
                at = rng.randrange(len(damaged))
                damaged[at] = rng.choice([0, 1, 127, 128, 255, rng.randrange(256)])
            answer = client.post(f"/v2/models/{model}/infer", content=bytes(damaged))
            statuses[answer.status_code] = statuses.get(answer.status_code, 0) + 1
    print(statuses)
    assert {*statuses} <= {200, 400, 413}, statuses
    assert server.process is not None
    assert server.process.poll() is None


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_curl(server: ServerProcess, tmp_path: Path) -> None:
    rows = tmp_path / "rows.arrow"
    rows.write_bytes(stream(numbers(100)))
    command = ["curl", "-sf", f"{server.url}/v2/models/numbers/infer", "--data-binary", f"@{rows}"]
    command += ["-H", f"content-type: {MEDIA}"]
    done = subprocess.run(command, capture_output=True, check=True)
    assert pa.ipc.open_stream(done.stdout).read_all().num_rows == 100
