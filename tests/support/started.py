"""External programs started by tests: waiting until they answer, or tell their address."""

import re
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from threading import Thread
from typing import Self
from urllib.request import ProxyHandler, build_opener

_ANSWER_SECS = 10


def until_answers(
    url: str, process: "subprocess.Popen[bytes]", log: Path, seconds: float, told: bytes = b""
) -> None:
    """Wait for a successful answer with `told` in it.

    Fails with the end of the log, if the program ends or `seconds` have passed.
    """
    opener = build_opener(ProxyHandler({}))
    deadline = time.monotonic() + seconds
    while process.poll() is None and time.monotonic() < deadline:
        try:
            with opener.open(url, timeout=_ANSWER_SECS) as answer:
                if told in answer.read():
                    return
        except OSError:  # nobody listens yet, or it is not ready
            pass
        time.sleep(0.05)
    raise AssertionError(log.read_text(errors="replace")[-3000:])


class AnnouncedServer:
    """A server in a process of its own while entered; `url` is the address that it prints."""

    def __init__(self, command: Sequence[str], before: str) -> None:
        """`before` is the text before the address."""
        self.url = ""
        self._command = command
        self._ready = re.compile(rf"{before} (http://127\.0\.0\.1:\d+)")

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(
            self._command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if match := self._ready.search(line):
                self.url = match[1]
                break
        # Its log is read, so that it never waits for a reader.
        self._reader = Thread(target=self._process.stdout.read, daemon=True)
        self._reader.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait(60)
        self._reader.join(60)
        assert self._process.stdout is not None
        self._process.stdout.close()
