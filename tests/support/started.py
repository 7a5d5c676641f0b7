"""External programs started by tests: waiting until they answer."""

import subprocess
import time
from pathlib import Path
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
