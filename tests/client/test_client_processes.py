"""Clients in further processes: after a fork, and pickled."""

import asyncio
import copy
import pickle
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from headrace import AsyncClient, Client
from headrace.client import (
    AnswerError,
    ClientError,
    ConnectionFailed,
    InputError,
    StatusError,
    TimedOut,
)
from headrace.client.blocking import Model
from tests.client.conftest import TLS, client_tls

ONES = np.ones((1, 16), np.int32)
PAIR = {"INPUT0": ONES, "INPUT1": ONES}

# A process of its own: that of the tests has threads. `ask` is run here, in two children at once,
# in a child of theirs, and here again.
BLOCKING = """
import os, socket, sys
import numpy as np
from headrace import Client
from headrace.client import ConnectionFailed, TimedOut

ones = np.ones((1, 16), np.int32)
client, closed = Client(sys.argv[1]), Client(sys.argv[1])
model, streamed = client.model("simple"), client.stream("teller", {"TEXT": "x", "COUNT": 3})
silent = socket.create_server(("127.0.0.1", 0))
late = Client(f"{sys.argv[1].partition(':')[0]}://127.0.0.1:{silent.getsockname()[1]}", timeout=0.2)

def ask(where):
    for _ in range(3):
        assert (model(INPUT0=ones, INPUT1=ones)["OUTPUT0"] == 2).all()
        assert client.ready("simple")
    try:
        late.live()
    except TimedOut:
        pass
    else:
        raise AssertionError("an answer")
    try:
        closed.live()
    except RuntimeError as error:
        assert "closed" in str(error)
    else:
        raise AssertionError("open")
    os.write(1, f"{where}\\n".encode())  # whole: several processes write

def child(work):
    number = os.fork()
    if not number:
        status = 1
        try:
            work()
            status = 0
        finally:
            sys.stdout.flush()
            os._exit(status)
    return number

def within():
    ask("child")
    try:
        next(streamed)
    except ConnectionFailed as error:
        assert "process that has begun it" in str(error)
    assert os.waitstatus_to_exitcode(os.waitpid(child(lambda: ask("grandchild")), 0)[1]) == 0
    client.close()

closed.close()
next(streamed)
ask("parent")
for number in [child(within), child(within)]:
    assert os.waitstatus_to_exitcode(os.waitpid(number, 0)[1]) == 0
ask("parent")
assert len(list(streamed)) == 2
"""

ASYNCHRONOUS = """
import asyncio, os, sys
import numpy as np
from headrace import AsyncClient

ones = np.ones((1, 16), np.int32)
client = AsyncClient(sys.argv[1])

async def ask(where):
    assert (await client.model("simple")(INPUT0=ones, INPUT1=ones))["OUTPUT0"].all()
    os.write(1, f"{where}\\n".encode())  # whole: several processes write

async def main():
    await ask("parent")
    number = os.fork()
    if not number:
        os._exit(in_child())
    assert os.waitstatus_to_exitcode(os.waitpid(number, 0)[1]) == 0
    await ask("parent")
    await client.aclose()

def in_child():
    asyncio.events._set_running_loop(None)  # as multiprocessing does, from Python 3.12 on
    async def both():
        await ask("child")
        await client.aclose()
    asyncio.run(both())
    return 0

asyncio.run(main())
"""


@pytest.mark.parametrize("scheme", ["http", "grpc"])
def test_forks(urls: Mapping[str, str], scheme: str) -> None:
    for program, expected in (
        (BLOCKING, ["child"] * 2 + ["grandchild"] * 2 + ["parent"] * 2),
        (ASYNCHRONOUS, ["child", "parent", "parent"]),
    ):
        command = [sys.executable, "-W", "ignore", "-c", program, urls[scheme]]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert (ended.returncode, ended.stderr) == (0, "")
        assert sorted(ended.stdout.split()) == expected


@pytest.mark.parametrize("scheme", ["http", "grpc"])
def test_pickles(urls: Mapping[str, str], scheme: str) -> None:
    headers = {"X-Mine": "1"}
    with Client(urls[scheme], headers=headers, token="t", timeout=7) as client:
        assert client.live()
        copies: list[Any] = [pickle.loads(pickle.dumps(client)), copy.deepcopy(client)]
        model: Model = pickle.loads(pickle.dumps(client.model("simple", "1")))
        assert (model.name, model.version) == ("simple", "1")
        assert (model.infer(PAIR)["OUTPUT0"] == 2).all()
    for one in copies:
        assert one.address == client.address
        assert pickle.dumps(one) == pickle.dumps(client)  # all options
        assert one.live()
        one.close()

    async def ask() -> bool:
        async with pickle.loads(pickle.dumps(AsyncClient(urls[scheme]))) as found:
            live: bool = await found.live()
            return live

    assert asyncio.run(ask())


@pytest.mark.parametrize(
    "error",
    [
        InputError("a"), ConnectionFailed("b", sent=False), TimedOut("c"), AnswerError("d"),
        StatusError(404, "e"), StatusError(400, "f", 3),
    ],
    ids=repr,
)  # fmt: skip
def test_errors_are_pickled(error: ClientError) -> None:
    """A pool waits for ever for an error of a process that cannot be read."""
    error.add_note("from an executor")
    for copied in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(copied) is type(error)
        assert (str(copied), vars(copied)) == (str(error), vars(error))


@pytest.mark.parametrize("scheme", ["https", "grpcs"])
def test_files_of_tls_are_pickled(urls: Mapping[str, str], scheme: str) -> None:
    given = Client(urls[scheme], tls_root_cert=str(TLS / "root.pem"))
    with pickle.loads(pickle.dumps(given)) as client:
        assert client.live()


def test_a_context_cannot_be_pickled(urls: Mapping[str, str]) -> None:
    with (
        Client(urls["https"], ssl_context=client_tls()) as client,
        pytest.raises(TypeError, match="a client with an ssl_context cannot be pickled"),
    ):
        pickle.dumps(client)
