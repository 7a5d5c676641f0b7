"""Every operation over every transport, for threads and for coroutines."""

import asyncio
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from inspect import isasyncgen, isawaitable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import headrace
from headrace import AsyncClient, Client, ClientError
from headrace.client import ConnectionFailed, InputError, StatusError, TimedOut
from headrace.client.blocking import BlockingModels
from headrace.connections import http_pool
from headrace.core.datatypes import NUMPY, Datatype
from tests.client.conftest import OPTIONS, SCHEMES, TLS, client_tls, running_loop
from tests.support.server_process import ServerProcess, onnx_examples

ONES = np.ones((1, 16), np.int32)
TOLD = {"TEXT": "no. ", "COUNT": 3}
PAIR = {"INPUT0": np.arange(16, dtype=np.int32).reshape(1, 16), "INPUT1": ONES}


class Awaited:
    """An asynchronous client or model behind synchronous methods."""

    def __init__(self, of: Any, loop: asyncio.AbstractEventLoop) -> None:
        self._of, self._loop = of, loop

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **given: self._wait(getattr(self._of, name)(*args, **given))

    def __call__(self, *table: Any, **inputs: Any) -> Any:
        return self._wait(self._of(*table, **inputs))

    def _wait(self, found: Any) -> Any:
        if isawaitable(found):
            return asyncio.run_coroutine_threadsafe(_awaited(found), self._loop).result()
        if isasyncgen(found):
            return iter(self._wait(_all(found)))
        return Awaited(found, self._loop)


async def _awaited(found: Any) -> Any:
    return await found


async def _all(items: AsyncIterator[Any]) -> list[Any]:
    return [item async for item in items]


@pytest.fixture(
    scope="module", params=[*SCHEMES, "async http", "async grpc", "engine", "async engine"]
)
def client(request: pytest.FixtureRequest, repository: Path) -> Iterator[Any]:
    """A client of the server, or an engine with the same models, which has the same interface."""
    kind, _, scheme = request.param.rpartition(" ")
    if scheme == "engine":
        with engine(kind, repository) as found:
            yield found
        return
    url, tls = request.getfixturevalue("urls")[scheme], client_tls()
    if not kind:
        with Client(url, ssl_context=tls) as blocking:
            yield blocking
        return
    with running_loop() as loop:
        waited = Awaited(AsyncClient(url, ssl_context=tls), loop)
        yield waited
        waited.aclose()


@contextmanager
def engine(kind: str, repository: Path) -> Iterator[Any]:
    if not kind:
        with headrace.Engine(repository, **OPTIONS) as blocking:
            yield blocking
        return
    with running_loop() as loop:
        waited = Awaited(headrace.AsyncEngine(repository, **OPTIONS), loop)
        waited.open()
        yield waited
        waited.aclose()


def test_inference(client: Any) -> None:
    parameters = {"mine": "x"}
    found = client.infer("simple", PAIR, id="7", version="1", parameters=parameters)
    assert (found.model, found.version, found.id) == ("simple", "1", "7")
    assert set(found) == {"OUTPUT0", "OUTPUT1"}
    np.testing.assert_array_equal(found["OUTPUT0"], PAIR["INPUT0"] + ONES)
    one = client.infer("simple", PAIR, outputs=["OUTPUT1"])
    np.testing.assert_array_equal(one.array, PAIR["INPUT0"] - ONES)
    with pytest.raises(ClientError, match="not just one output: OUTPUT0, OUTPUT1"):
        found.array  # noqa: B018


def test_numbers_of_numpy(client: Any) -> None:
    parameters = {"whole": np.int64(3), "ratio": np.float32(0.5), "flag": np.bool_(True)}
    found = client.infer("simple", PAIR, version=1, parameters=parameters)
    assert found.version == "1"
    failing = {"fail": np.bool_(True)}
    with pytest.raises(StatusError, match="as asked"):
        list(client.stream("teller", {"TEXT": "x", "COUNT": 1}, parameters=failing, version=1))
    digits = client.model("digits", np.int64(2))
    assert digits(image=[0] * 64).version == "2"
    [best] = digits.infer({"image": [0] * 64}, classes={"probabilities": np.int64(2)}).texts()
    assert len(best) == 2
    assert client.ready("digits", 1)
    assert client.model_metadata("digits", 1)["name"] == "digits"
    assert client.model_config("digits", 1)["name"] == "digits"
    assert client.statistics("digits", 1)["model_stats"][0]["version"] == "1"


def test_texts_that_cannot_be_sent(client: Any) -> None:
    half, text = "\ud800", "is no text in UTF-8"
    for given in ({"id": half}, {"parameters": {"p": half}}, {"version": half}):
        with pytest.raises(InputError, match=text):
            client.infer("simple", PAIR, **given)
    for ask in (client.model_metadata, client.load, partial(client.infer, inputs=PAIR)):
        with pytest.raises(InputError, match=text):
            ask(half)
    with pytest.raises(InputError, match="surrogate"):
        client.load("simple", half)
    with pytest.raises(InputError, match="outputs are a list of names, not one: 'OUTPUT1'"):
        client.infer("simple", PAIR, outputs="OUTPUT1")


def test_an_infinite_timeout_is_none(client: Any) -> None:
    assert client.infer("simple", PAIR, timeout=float("inf"))["OUTPUT0"].shape == (1, 16)


def test_datatypes(client: Any) -> None:
    for datatype in Datatype:
        array = (np.arange(6).reshape(2, 3) % 2).astype(NUMPY[datatype])
        if datatype is Datatype.BYTES:
            array = np.array([[b"", "\u00fc".encode(), b"a\0"]], object)
        found = client.infer(f"identity_{datatype}", {"INPUT0": array}).array
        assert (found.dtype, found.tolist()) == (array.dtype, array.tolist())


def test_large_tensors(client: Any) -> None:
    array = np.random.default_rng(1).random((64, 16384), np.float32)  # 4 MiB
    np.testing.assert_array_equal(client.infer("identity_FP32", {"INPUT0": array}).array, array)
    texts = client.infer("identity_BYTES", {"INPUT0": [["long " * 1000, "\u00fc"]]}).texts()
    assert texts == [["long " * 1000, "\u00fc"]]


def test_calling_a_model(client: Any) -> None:
    digits = client.model("digits")
    assert digits.ready()
    assert list(digits.signature().inputs) == ["image"]
    assert digits(image=np.zeros((8, 8)))["label"].shape == (1, 1)
    assert digits(image=[0] * 128)["label"].shape == (2, 1)
    [best] = digits.infer({"image": [0] * 64}, classes={"probabilities": 2}).texts()
    assert [part.count(":") for part in best] == [2, 2]
    with pytest.raises(InputError, match=r"expected FP32 \[-1,8,8\], got float64 \[9,9\]"):
        digits(image=np.zeros((9, 9)))
    with pytest.raises(InputError, match="needs the input image FP32"):
        digits()
    assert client.model("digits", "1")(image=[0] * 64).version == "1"
    for ask in (digits, digits.infer, partial(client.infer, "digits")):
        text = r"takes values by the names of its inputs, .* got ndarray; .*: image FP32 \[-1,8,8\]"
        with pytest.raises(InputError, match=text):
            ask(np.zeros((8, 8)))


def test_more_rows_than_the_model_takes(client: Any) -> None:
    array = np.arange(46, dtype=np.float32).reshape(23, 2)
    for version in ("", "1"):  # the first is refused before its limit is known
        found = client.infer("narrow", {"INPUT0": array}, version=version, id="7")
        assert (found.id, found.version) == ("7", "1")
        np.testing.assert_array_equal(found.array, array)
        np.testing.assert_array_equal(client.model("narrow", version)(INPUT0=array).array, array)
    with pytest.raises(StatusError, match="batch-size must be <= 4"):
        client.infer("narrow", {"INPUT0": array}, parameters={"sequence_id": 7})
    with pytest.raises(StatusError, match="unexpected shape"):
        client.infer("narrow", {"INPUT0": array[:, :1]})


def test_a_stream(client: Any) -> None:
    found = list(client.stream("teller", TOLD))
    assert [result.texts("OUT") for result in found] == [[[f"no. {number}"]] for number in range(3)]
    assert [result["INDEX"].tolist() for result in found] == [[[0]], [[1]], [[2]]]
    assert list(client.model("teller").stream(TEXT="x", COUNT=0)) == []
    with pytest.raises(StatusError, match="as asked"):
        list(client.stream("teller", {"TEXT": "x", "COUNT": 1}, parameters={"fail": True}))
    many = client.stream("teller", {"TEXT": "x" * 10_000, "COUNT": 300})
    assert sum(1 for _ in many) == 300


def test_a_stream_of_numbers_that_json_has_not(client: Any) -> None:
    given = np.array([[np.nan, np.inf, -np.inf, 1.5]], np.float32)
    [found] = client.stream("identity_FP32", {"INPUT0": given})
    np.testing.assert_array_equal(found.array, given)


def test_flat_json_of_numbers_that_json_has_not(urls: Mapping[str, str], repository: Path) -> None:
    document = {"INPUT0": [np.nan, np.inf, np.float32(1.5)]}
    options = OPTIONS | {"load_model": "identity_FP32"}
    with Client(urls["http"]) as client, headrace.Engine(repository, **options) as embedded:
        [ours], [theirs] = (
            list(one.generate_stream("identity_FP32", document, version=1))
            for one in (embedded, client)
        )
        for one in (embedded, client):
            with pytest.raises(InputError, match="no JSON form"):
                list(one.generate_stream("identity_FP32", {"INPUT0": object()}))
    np.testing.assert_array_equal(ours["OUTPUT0"], [np.nan, np.inf, 1.5])
    assert repr(ours) == repr(theirs)


def test_documents(client: Any) -> None:
    assert client.live()
    assert client.ready()
    assert client.metadata()["name"] == "headrace"
    assert client.model_metadata("digits")["versions"] == ["1", "2"]
    assert client.model_config("digits")["max_batch_size"] > 0
    assert {"name": "simple", "version": "1", "state": "READY"} in client.index(ready=True)
    [version] = client.statistics("simple", "1")["model_stats"]
    assert version["name"] == "simple"


def test_control(client: Any) -> None:
    client.unload("simple_identity")
    assert not client.ready("simple_identity")
    client.load("simple_identity", {"max_batch_size": 3})
    assert client.model_config("simple_identity")["max_batch_size"] == 3
    client.unload("simple_identity", dependents=True)
    client.load("simple_identity")
    client.wait_ready("simple_identity")
    assert client.model_config("simple_identity")["max_batch_size"] != 3


@pytest.mark.parametrize(
    ("model", "inputs", "status"),
    [("nope", PAIR, 404), ("simple", {"INPUT0": ONES}, 400), ("simple", {"other": ONES}, 400)],
)
def test_errors_of_the_server(client: Any, model: str, inputs: Any, status: int) -> None:
    with pytest.raises(StatusError, match=r"nope|INPUT1|other") as raised:
        client.infer(model, inputs)
    assert raised.value.status == status
    assert raised.value.grpc_status in (None, {404: 5, 400: 3}[status])


def test_a_failed_load(client: Any) -> None:
    with pytest.raises(StatusError, match="nowhere"):
        client.load("nowhere")


@pytest.mark.parametrize("scheme", ["http", "grpc"])
def test_a_server_that_does_not_answer(scheme: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"{scheme}://127.0.0.1:{listener.getsockname()[1]}"
        with Client(url, timeout=60) as client:
            with pytest.raises(TimedOut, match=rf"no answer from {url} within 0\.05 s"):
                client.infer("simple", PAIR, timeout=0.05)
            if scheme == "http":
                with pytest.raises(TimedOut, match=r"within 0\.05 s"):
                    list(client.generate_stream("m", {}, timeout=0.05))


def test_connections_that_take_too_long_are_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_pool, "CONNECT_SECS", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"https://127.0.0.1:{listener.getsockname()[1]}"  # it never says anything
        with (
            Client(url, connect_retries=1) as client,
            pytest.raises(ConnectionFailed, match=f"no server at {url}: no connection") as raised,
        ):
            client.live()
        assert not raised.value.sent
        for _ in range(2):
            listener.accept()[0].close()


@pytest.mark.parametrize("scheme", ["http", "grpc"])
def test_waiting_for_a_server_that_does_not_answer(scheme: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"{scheme}://127.0.0.1:{listener.getsockname()[1]}"
        with (
            Client(url, timeout=0) as client,
            pytest.raises(TimedOut, match=rf"{url} is not ready after 0\.2 s: no answer"),
        ):
            client.wait_ready(seconds=0.2)


def test_headers(tmp_path: Path) -> None:
    rule = "metadata:authorization=Bearer secret"
    options = (f"--http-restricted-api={rule}", f"--grpc-restricted-protocol={rule}")
    over_grpc = {"headers": {"triton-grpc-protocol-authorization": "Bearer secret"}}
    with ServerProcess(onnx_examples(tmp_path), options=options) as server:
        known_by: tuple[tuple[str, Any], ...] = (
            (server.url, {"token": "secret"}), (f"grpc://{server.grpc}", over_grpc),
        )  # fmt: skip
        for url, given in known_by:
            with Client(url, **given) as known, Client(url) as unknown:
                assert known.metadata()["name"] == "headrace"
                with pytest.raises(StatusError, match="authorization") as raised:
                    unknown.metadata()
                assert raised.value.status == 403
                with pytest.raises(InputError), Client(url, headers={"x": "a\nb"}) as wrong:
                    wrong.metadata()


@pytest.mark.parametrize("scheme", ["http", "grpc", "unix", "grpc+unix"])
def test_connection_refused(scheme: str, tmp_path: Path) -> None:
    url = f"{scheme}:{tmp_path}/none" if "unix" in scheme else f"{scheme}://127.0.0.1:1"
    with Client(url, connect_retries=1) as client:
        with pytest.raises(ConnectionFailed, match=r"no server at .*: (connection ref|no such f)"):
            client.live()
        with pytest.raises(TimedOut, match=r"not ready after 0\.1 s: no server at"):
            client.wait_ready(seconds=0.1)


def test_an_untrusted_certificate(urls: Mapping[str, str]) -> None:
    for scheme in ("https", "grpcs"):
        with Client(urls[scheme]) as client, pytest.raises(ConnectionFailed, match="certificate"):
            client.live()


@pytest.mark.parametrize(("files", "text"), [
    ({"tls_root_cert": "/nothing"}, "tls_root_cert: /nothing cannot be read: No such file"),
    ({"tls_root_cert": f"{TLS}/server.key"}, "server.key cannot be used: no certificates in the"),
    ({"tls_key": f"{TLS}/client.key"}, "tls_key: a key is of use with its certificate only"),
    ({"tls_cert": f"{TLS}/client.pem", "tls_key": f"{TLS}/server.key"},
     "tls_cert: .*client.pem cannot be used: key values mismatch"),
])  # fmt: skip
def test_bad_files_of_tls(urls: Mapping[str, str], files: dict[str, str], text: str) -> None:
    with (
        Client(urls["https"], **files) as client,  # type: ignore[arg-type]
        pytest.raises(InputError, match=text),
    ):
        client.live()


def test_options_of_tls_that_have_no_use() -> None:
    with pytest.raises(ValueError, match="http://x:80 is without TLS: tls_ files are for"):
        Client("http://x", tls_root_cert="root.pem")
    with pytest.raises(ValueError, match="ssl_context and tls_ files exclude each other"):
        Client("https://x", tls_root_cert="root.pem", ssl_context=client_tls())


def test_tls_where_there_is_none(server: ServerProcess) -> None:
    for url in (f"https://{server.http}", f"grpcs://{server.grpc}"):
        with Client(url) as client:
            text = f"no server at {url}: it does not speak TLS at this port: is this an http://"
            with pytest.raises(ConnectionFailed, match=text):
                client.live()


def test_a_server_that_shuts_down(tmp_path: Path) -> None:
    with (
        ServerProcess(onnx_examples(tmp_path)) as server,
        Client(server.url) as http,
        Client(f"grpc://{server.grpc}") as over_grpc,
    ):
        for client in (http, over_grpc):
            assert client.infer("simple", PAIR)
        server.stop(signal.SIGKILL)
        for client in (http, over_grpc):
            with pytest.raises(ConnectionFailed):
                client.infer("simple", PAIR)


@pytest.mark.parametrize("scheme", ["http", "grpc"])
def test_many_threads(urls: Mapping[str, str], scheme: str) -> None:
    with Client(urls[scheme]) as client, ThreadPoolExecutor(16) as pool:

        def ask(number: int) -> bool:
            array = np.full((1, 16), number, np.int32)
            found = client.infer("simple", {"INPUT0": array, "INPUT1": array}, id=str(number))
            return found.id == str(number) and bool((found["OUTPUT0"] == 2 * number).all())

        assert all(pool.map(ask, range(400)))


def test_a_client_that_is_closed(urls: Mapping[str, str]) -> None:
    client = Client(urls["http"])
    assert client.live()
    client.close()
    client.close()
    with pytest.raises(RuntimeError, match="the client is closed"):
        client.live()
    left = Client(urls["grpc"])
    assert left.live()
    names = [thread.name for thread in threading.enumerate()]
    del left  # which the collector closes
    assert [t.name for t in threading.enumerate()].count("headrace client") < names.count(
        "headrace client"
    )


def test_a_call_that_comes_as_the_client_ends() -> None:
    """The event loop has taken the call, and never comes to it."""
    ending, taken = threading.Event(), threading.Event()

    class Loop(asyncio.SelectorEventLoop):
        def call_soon_threadsafe(  # type: ignore[override]
            self, *given: Any, **options: Any
        ) -> Any:
            handle = super().call_soon_threadsafe(*given, **options)
            if ending.is_set():
                taken.set()
            return handle

        def close(self) -> None:
            ending.set()
            taken.wait()
            super().close()

    client = BlockingModels(AsyncClient("http://127.0.0.1:1"), "ends", Loop)
    closing = threading.Thread(target=client.close)
    closing.start()
    ending.wait()
    with pytest.raises(ConnectionFailed, match="the client was closed during the request"):
        client.live()
    closing.join()


@pytest.mark.parametrize(("scheme", "ask"), [
    ("http", lambda client: client.infer("simple", PAIR)),
    ("http", lambda client: anext(client.generate_stream("simple", {}))),
    ("grpc", lambda client: client.infer("simple", PAIR)),
], ids=["http", "http stream", "grpc"])  # fmt: skip
def test_closing_ends_requests_in_flight(scheme: str, ask: Callable[[AsyncClient], Any]) -> None:
    async def close() -> None:
        loop = asyncio.get_running_loop()
        with socket.create_server(("127.0.0.1", 0)) as listener:
            listener.setblocking(False)
            client = AsyncClient(f"{scheme}://127.0.0.1:{listener.getsockname()[1]}", timeout=0)
            asked = asyncio.ensure_future(ask(client))
            connection, _ = await loop.sock_accept(listener)
            with connection:
                await loop.sock_recv(connection, 1)
                await client.aclose()
                with pytest.raises(ConnectionFailed):
                    await asyncio.wait_for(asked, 30)

    asyncio.run(close())


def test_a_stream_that_is_left_after_its_client(urls: Mapping[str, str]) -> None:
    with Client(urls["grpc"]) as client:
        stream = client.stream("teller", TOLD)
        next(stream)
    stream.close()


def test_a_stream_that_the_collector_closes_on_the_event_loop(urls: Mapping[str, str]) -> None:
    with Client(urls["grpc"]) as client:
        streams = [client.stream("teller", TOLD)]
        next(streams[0])

        async def drop() -> None:
            streams.clear()

        client.begin(lambda _: drop()).result(timeout=30)
        assert client.live()


def test_a_notebook_with_a_running_event_loop(urls: Mapping[str, str]) -> None:
    async def cell() -> bool:
        with Client(urls["http"]) as client:
            return client.live()

    assert asyncio.run(cell())


def test_tasks_share_a_client(urls: Mapping[str, str]) -> None:
    async def ask_all() -> list[str]:
        async with AsyncClient(urls["grpc"]) as client:
            asked = [client.infer("simple", PAIR, id=str(number)) for number in range(50)]
            return [found.id for found in await asyncio.gather(*asked)]

    assert asyncio.run(ask_all()) == [str(number) for number in range(50)]


def test_the_names_of_the_package() -> None:
    program = "import headrace, sys; headrace.ClientError; print(*sys.modules)"
    imported = subprocess.check_output([sys.executable, "-c", program], text=True).split()
    assert not {"asyncio", "numpy", "google.protobuf", "ssl"} & set(imported)
    assert headrace.Client is Client
    assert set(dir(headrace)) >= {*headrace.__all__, "__doc__", "__file__"}
