"""Clients of the attacks, the prober, and the table of outcomes."""

import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from benchmarks.arguments import names_of
from benchmarks.hostile.attacks import ATTACKS
from benchmarks.hostile.probe import Probe
from benchmarks.hostile.run import GROWTH, MIB, QUIET_MS, Seen, as_table
from benchmarks.hostile.wire import DATA, PREFACE, Http2, frame, post

WELL = Seen(
    health=0.004, growth=70 * MIB, charged=20 * MIB, released=0.5, answered=9, asked=9, alive=True
)


@pytest.mark.parametrize(("seen", "missed"), [
    (WELL, []), (Seen(0.101, 0, 0, 0.0, 1, 1, True), ["health"]),
    (Seen(0.0, GROWTH + 1, 0, 0.0, 1, 1, True), ["memory"]),
    (Seen(0.0, GROWTH + 1, 1, None, 1, 1, True), ["release"]),
    (Seen(9.0, 0, 0, None, 1, 1, False), ["the server died", "health", "release"]),
])  # fmt: skip
def test_bounds(seen: Seen, missed: list[str]) -> None:
    assert seen.missed(QUIET_MS) == missed


def test_a_row_for_each_attack_beside_its_bounds() -> None:
    died = Seen(30.0, 10 * MIB, 0, None, 0, 3, False)
    seen = dict(zip(ATTACKS.values(), (WELL, died), strict=False))
    rows = [line.split(" | ") for line in as_table(seen, 250.0).splitlines()[2:]]
    assert [row[1:-1] for row in rows] == [
        ["4", "250", "70", "94", "0.5", "9 of 9"],
        ["30000", "250", "10", "64", "never", "0 of 3"],
    ]
    assert rows[1][-1] == "the server died, health, release |"


def test_names_and_frames() -> None:
    names = names_of(list(ATTACKS))("trickle,watchers")
    assert [ATTACKS[name].name for name in names] == ["trickle", "watchers"]
    assert frame(DATA, 1, 3, b"ab") == b"\0\0\2\0\1\0\0\0\3ab"


def test_a_probe_counts_missing_answers() -> None:
    stop = threading.Event()
    answers = iter([True, False])

    def ask() -> bool:
        for answer in answers:
            return answer
        stop.set()
        raise ConnectionResetError

    probe = Probe(ask, 0.0)
    probe.run(stop)
    assert probe.report() == {"worst": probe.worst, "good": 1, "bad": 2}


def test_a_refusal_is_not_an_answer() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
    assert post(address, "/", b"") == b""


def test_messages_wait_for_the_servers_windows() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        with Http2(address) as client:
            server, _ = listener.accept()
            stream = client.open()
            sender = threading.Thread(target=client.send, args=(stream, bytes(100_000)))
            sender.start()
            with server, server.makefile("rb") as received:
                assert received.read(len(PREFACE)) == PREFACE
                taken = 0
                while taken < 100_000:
                    head = received.read(9)
                    payload = received.read(int.from_bytes(head[:3], "big"))
                    if head[3] == DATA:
                        taken += len(payload)
                        more = len(payload).to_bytes(4, "big")
                        server.sendall(frame(8, 0, 0, more) + frame(8, 0, stream, more))
                sender.join(30)
                assert not sender.is_alive()
                assert head[4] == 1  # the end of the stream
    assert client.wait(stream, 0)  # the connection is over


@pytest.mark.slow
def test_an_attack_on_a_real_server() -> None:
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "scripts/bench", "--hostile", "push-promise", "--busy"], cwd=root,
        capture_output=True, text=True, check=False, env={**os.environ, "PYTHONPATH": str(root)},
    )  # fmt: skip
    assert done.returncode in (0, 1), done.stderr
    assert "| a PUSH_PROMISE of 1 MiB |" in done.stdout
