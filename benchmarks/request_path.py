"""Functions that a plain infer request runs in the server, in order: `scripts/request_path`.

`headrace serve` runs in this process, on the main thread, and is asked by a client on another. For
each request the client holds up the event loop until all bytes have been sent, so that requests
sent together arrive in one turn of the loop. The profile hooks are on the loop's thread, from then
until the loop has nothing more to do for the requests.

Timers and what else runs in the background are not of the path: each request is repeated, and what
most repetitions did in the same way counts. Nothing here depends on the speed of the machine.
"""

import argparse
import ast
import asyncio
import gc
import io
import os
import re
import signal
import socket
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, redirect_stdout
from dataclasses import dataclass, replace
from difflib import unified_diff
from functools import cache
from itertools import groupby, islice
from math import ceil
from pathlib import Path
from types import FrameType
from typing import TypeVar

from benchmarks.calls import ROOT, SERVER, Call, CallRecorder, ObjectRecorder, walk
from benchmarks.messages import PROTOCOLS, WireProtocol
from benchmarks.models import MLP, MODELS
from benchmarks.report import table
from benchmarks.server import BenchmarkError, split_address
from benchmarks.wire import Answer, Wire
from headrace.cli import main as headrace

PAGE = ROOT / "docs" / "request-path.md"
TOGETHER = 16
# Other interpreters make other calls of the same code: newer ones none for a list comprehension.
INTERPRETER = (3, 11)

# Batches of few rows: the server measures the largest to choose where the model runs.
_MODEL = replace(MODELS[MLP], max_batch_size=2 * TOGETHER)
_DOORS = {"http-json": "HTTP, JSON", "grpc": "gRPC"}
_ADDRESS = re.compile(r"^(HTTP|gRPC) +(?:http://)?([\w.\[\]:-]+:\d+)", re.MULTILINE)
_WARM_UP = 20  # requests on each connection, so that all is remembered that is remembered
_SHOWN = 40  # lines of what has changed
_REPETITIONS = 15
_BETWEEN = 4  # plain requests after one that was slowed down: slow runs would move the model
_TURNS = 3  # of the loop, after which it has done what an answered request leaves
_WAIT_SECS = 60
# The tensors' names and arrays; the budget is for objects besides arrays, bytes and pieces of
# answers.
_ARRAYS = frozenset({"Tensor"})
_INTRODUCTION = """\
# The path of a plain request

<!-- Written by scripts/request_path from real requests: change the code, then run `make path`. -->

The Python functions that run in the server for one infer request over each door, in the order in
which they begin, each above those that it calls, with its file in `server/headrace`, its line, and
the summary of its docstring. The model is a small ONNX network on the event loop; the request has
one row, and others like it have come before on its connection.

`make check` fails where the code and the page differ. `make weight` prints the counts beside their
budgets.
"""
_COUNTS = f"""\
Calls are those of Python functions for each request, libraries' included: alone, and of
{TOGETHER} that arrive in one turn of the event loop, each on its own connection. The rest is of a
request alone: calls of libraries' functions, the server's files, and the objects of its classes,
besides tensors.
"""

Hook = Callable[[FrameType, str, object], None]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Door:
    """Calls of a request alone and of concurrent ones, and the objects made, by class."""

    title: str
    alone: tuple[Call, ...]
    together: tuple[Call, ...]
    objects: tuple[tuple[str, int], ...]

    @property
    def calls(self) -> float:
        """Python calls of a request that comes alone."""
        return per_request(self.alone, 1)

    @property
    def calls_together(self) -> float:
        """Python calls of each of those that come together, rounded up to tenths."""
        return per_request(self.together, TOGETHER)

    @property
    def library_calls(self) -> int:
        """The number of calls of library functions by a lone request."""
        return sum(not call.own for call in walk(self.alone))

    @property
    def files(self) -> int:
        """Files of the server that a request passes that comes alone."""
        return len({call.file for call in walk(self.alone) if call.own})

    @property
    def made(self) -> int:
        """Objects made for a request that comes alone, besides arrays."""
        return sum(count for name, count in self.objects if name not in _ARRAYS)


def per_request(roots: Sequence[Call], requests: int) -> float:
    """Calls for each of so many requests, rounded up to tenths."""
    return ceil(10 * sum(1 for _ in walk(roots)) / requests) / 10


def usual(outcomes: Sequence[T]) -> T:
    """The outcome that most repetitions had; raises `BenchmarkError` if there is none."""
    (outcome, times), *_ = Counter(outcomes).most_common(1)
    if 2 * times <= len(outcomes):
        raise BenchmarkError(f"of {len(outcomes)} requests no more than {times} did the same")
    return outcome


def measure() -> list[Door]:
    """Serve in this process, ask over each door, and end; raises `BenchmarkError`.

    Only on the main thread, which becomes the server's, and once in a process: the server settles
    itself in it.
    """
    for name in [name for name in os.environ if name.startswith("HEADRACE_")]:
        del os.environ[name]
    output = _Output()
    with tempfile.TemporaryDirectory(prefix="headrace-path-") as folder:
        _MODEL.write(Path(folder))
        command = [
            "serve", "--model-repository", folder, "--http-port=0", "--grpc-port=0",
            "--allow-metrics=false", "--log-info=false",
        ]  # fmt: skip
        with ThreadPoolExecutor(1) as client:
            doors = client.submit(_visit, output)
            try:
                with redirect_stdout(output):
                    headrace(command)
            except SystemExit as end:
                if output.loop.cancel():
                    raise BenchmarkError("the server did not start") from None
                if end.code and not doors.exception(_WAIT_SECS):
                    raise BenchmarkError("the server did not end well") from None
                return doors.result(_WAIT_SECS)
            finally:
                output.loop.cancel()  # so that the client does not wait for ever


class _Output(io.StringIO):
    """The server's standard output; `loop` has its event loop once it is ready."""

    def __init__(self) -> None:
        super().__init__()
        self.loop: Future[asyncio.AbstractEventLoop] = Future()

    def write(self, text: str) -> int:
        if text.startswith("ready after"):
            self.loop.set_result(asyncio.get_running_loop())
        return super().write(text)


def _visit(output: _Output) -> list[Door]:
    """Send the client's requests, then end the server, also after an error."""
    loop = output.loop.result()
    try:
        found = _ADDRESS.findall(output.getvalue())
        addresses = {transport.lower(): address for transport, address in found}
        doors = []
        for name, title in _DOORS.items():
            protocol = PROTOCOLS[name]
            doors.append(_Client(loop, protocol, addresses[protocol.transport]).door(title))
        return doors
    finally:
        os.kill(os.getpid(), signal.SIGTERM)


class _Client:
    """Requests of one kind, and what they make the server do."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, protocol: WireProtocol, address: str
    ) -> None:
        self._loop = loop
        self._protocol = protocol
        self._address = address
        self._exchange = protocol.exchanges(address, _MODEL)[0]

    def door(self, title: str) -> Door:
        """Ask alone and together."""
        with ExitStack() as stack:
            one, many = (
                [stack.enter_context(self._connected()) for _ in range(count)]
                for count in (1, TOGETHER)
            )
            for connections in (one, many):
                for _ in range(_WARM_UP):
                    self._send(connections, None)
            alone = [self._calls(one) for _ in range(_REPETITIONS)]
            together = [self._calls(many) for _ in range(_REPETITIONS)]
            objects = [self._objects(one) for _ in range(_REPETITIONS)]
        return Door(title, usual(alone), usual(together), usual(objects))

    @contextmanager
    def _connected(self) -> Iterator["_Connection"]:
        with socket.create_connection(split_address(self._address), _WAIT_SECS) as sock:
            yield _Connection(sock, self._protocol.wire(self._address, 1))

    def _calls(self, connections: Sequence["_Connection"]) -> tuple[Call, ...]:
        recorder = CallRecorder()
        self._send(connections, recorder)
        return recorder.take()

    def _objects(self, connections: Sequence["_Connection"]) -> tuple[tuple[str, int], ...]:
        recorder = ObjectRecorder("headrace")
        self._send(connections, recorder)
        for _ in range(_BETWEEN):
            self._send(connections, None)
        return recorder.take()

    def _send(self, connections: Sequence["_Connection"], hook: Hook | None) -> None:
        """Send a request on each connection, all in one turn of the loop, and await the answers."""
        held, sent = threading.Event(), threading.Event()
        done: Future[None] = Future()

        def hold() -> None:
            gc.collect()
            gc.disable()
            held.set()
            sent.wait(_WAIT_SECS)
            sys.setprofile(hook)

        def release(turns: int) -> None:
            if turns:
                self._loop.call_soon(release, turns - 1)
                return
            sys.setprofile(None)
            gc.enable()
            done.set_result(None)

        self._loop.call_soon_threadsafe(hold)
        held.wait(_WAIT_SECS)
        try:
            for connection in connections:
                connection.send(self._exchange.message)
        finally:
            sent.set()
        for connection in connections:
            answer = connection.receive()
            if fault := answer.error or self._exchange.fault(answer):
                raise BenchmarkError(f"a request was not answered well: {fault}")
        self._loop.call_soon_threadsafe(release, _TURNS)
        done.result(_WAIT_SECS)


class _Connection:
    """A connection on which one request at a time is under way."""

    def __init__(self, sock: socket.socket, wire: Wire) -> None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = sock
        self._wire = wire
        sock.sendall(wire.start())
        while not wire.ready:
            self._read()

    def send(self, message: bytes) -> None:
        """Begin a request."""
        _, data = self._wire.send(message)
        self._socket.sendall(data)

    def receive(self) -> Answer:
        """Wait for its answer."""
        answers: list[Answer] = []
        while not answers:
            answers = self._read()
        return answers[0]

    def _read(self) -> list[Answer]:
        data = self._socket.recv(65_536)
        if not data:
            raise BenchmarkError("the server closed a connection")
        answers, reply = self._wire.receive(data)
        if reply:
            self._socket.sendall(reply)
        return answers


def render(doors: Sequence[Door]) -> str:
    """The whole page."""
    titles = ("door", "calls, alone", f"{TOGETHER} together", "libraries", "files", "objects")
    rows = [
        (
            door.title, f"{door.calls:g}", f"{door.calls_together:g}", f"{door.library_calls}",
            f"{door.files}", f"{door.made}",
        )
        for door in doors
    ]  # fmt: skip
    sections = [_section(door) for door in doors]
    return "\n".join((_INTRODUCTION, _COUNTS, table(titles, rows, left=1), "", *sections))


def _section(door: Door) -> str:
    made = ", ".join(_times(f"`{name}`", n) for name, n in door.objects if name not in _ARRAYS)
    lines = "\n".join(outline(door.alone))
    return f"## {door.title}\n\n{lines}\n\nObjects: {made}.\n"


def outline(roots: Sequence[Call], indent: str = "") -> Iterator[str]:
    """A list item for each call; the same call several times in a row is one.

    Of what a library's function calls, only the server's own functions are there.
    """
    for call, same in groupby(roots):
        yield f"{indent}- {_item(call, sum(1 for _ in same))}"
        yield from outline(call.children if call.own else _own(call), indent + "  ")


def _own(call: Call) -> list[Call]:
    """The nearest of the server's functions below a library's."""
    return [found for child in call.children for found in ([child] if child.own else _own(child))]


def _item(call: Call, times: int) -> str:
    name = _times(f"`{call.name.replace('.<locals>', '')}`", times)
    if not call.own:
        inner = sum(not below.own for below in call.walk()) - 1
        return f"{name} *library* {call.file}" + (f", {inner} more inside" if inner else "")
    summary = _summaries(SERVER / call.file).get(call.line)
    return f"{name} {call.file}:{call.line}" + (f": {summary}" if summary else "")


@cache
def _summaries(path: Path) -> dict[int, str]:
    return summaries(path.read_text(encoding="utf-8"))


def summaries(source: str) -> dict[int, str]:
    """Summaries of docstrings, by the line where a function (its decorators) or class begins."""
    found: dict[int, str] = {}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            line = node.lineno
            if node.decorator_list and not isinstance(node, ast.ClassDef):
                line = node.decorator_list[0].lineno
            if text := ast.get_docstring(node):
                found[line] = " ".join(text.partition("\n\n")[0].split())
    return found


def _times(text: str, number: int) -> str:
    return text if number == 1 else f"{text} ({number} times)"


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the page, or compare it; 1 if it is out of date, or could not be made."""
    parser = argparse.ArgumentParser(
        "scripts/request_path", description="Write docs/request-path.md from real requests."
    )
    parser.add_argument("--check", action="store_true", help="only compare; exit 1 on a difference")
    check = parser.parse_args(arguments).check
    if wrong := other_interpreter():
        print(f"scripts/request_path: {wrong}", file=sys.stderr)
        return 0 if check else 1
    try:
        text = render(measure())
    except BenchmarkError as error:
        print(f"scripts/request_path: {error}", file=sys.stderr)
        return 1
    if not check:
        PAGE.write_text(text, encoding="utf-8")
        return 0
    committed = PAGE.read_text(encoding="utf-8") if PAGE.exists() else ""
    if committed == text:
        return 0
    print("docs/request-path.md is out of date; run `make path`", file=sys.stderr)
    old, new = committed.splitlines(), text.splitlines()
    changes = unified_diff(old, new, "committed", "measured", lineterm="")
    print(*islice(changes, _SHOWN), sep="\n", file=sys.stderr)
    return 1


def other_interpreter() -> str:
    """The reason why the committed page cannot be compared; "" if it can."""
    if sys.version_info[:2] == INTERPRETER:
        return ""
    wanted, this = (".".join(map(str, v)) for v in (INTERPRETER, sys.version_info[:2]))
    return f"calls are counted with Python {wanted}, and this is {this}: nothing was compared"
