"""Runs a command, and leaves nothing of it behind, however it or the server ends.

A program of its own: `python reaper.py REGION DIRECTORY COMMAND ...`. Its standard input is a pipe
from the server. By that it is told to have the command end ("t") or to kill it ("k"); when the pipe
ends, the server has, and the command is killed at once. With it end the processes that it has
started, and shared memory under names that begin with REGION goes, if that is not empty. If the
server has ended, DIRECTORY goes, too. The exit status is the command's, 128 and the signal's number
if it was killed. A lock that this program inherits is held until nothing of the command is left.
"""

import ctypes
import os
import select
import shutil
import signal
import subprocess
import sys
from contextlib import suppress

_SHARED_MEMORY = "/dev/shm"
_PR_SET_PDEATHSIG = 1


def main() -> int:
    """Run the command until it ends; its exit status."""
    region, directory, *command = sys.argv[1:]
    for number in (signal.SIGINT, signal.SIGTERM):
        # The server decides when the command ends, also where a terminal or a supervisor signals
        # all. Not by ignoring them, which the command would take over.
        signal.signal(number, lambda *_: None)
    try:
        child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, process_group=0, preexec_fn=_end_with_parent
        )
    except OSError as error:
        print(f"cannot start {command[0]}: {error.strerror}", flush=True)
        return 127
    server_ended = _wait(child.pid, os.pidfd_open(child.pid))
    with suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)  # before its number is free again
    status = child.wait()
    if region:
        _clean(region)
    if server_ended and directory:
        shutil.rmtree(directory, ignore_errors=True)
    return status if status >= 0 else 128 - status


def _wait(pid: int, watch: int) -> bool:
    """Obey the server until the command has ended or is to be killed; whether the server ended."""
    poll = select.poll()
    poll.register(0, select.POLLIN | select.POLLHUP)
    poll.register(watch, select.POLLIN)
    while True:
        ready = [descriptor for descriptor, _ in poll.poll()]
        if 0 in ready:
            word = os.read(0, 1)
            if word != b"t":
                return not word
            os.kill(pid, signal.SIGTERM)  # it is not waited for yet, so that the number is its own
        if watch in ready:
            return False


def _end_with_parent() -> None:
    """Ask the kernel to kill the command if this process is killed."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _clean(region: str) -> None:
    with suppress(OSError):
        for name in os.listdir(_SHARED_MEMORY):
            if name.startswith(region):
                with suppress(OSError):
                    os.unlink(os.path.join(_SHARED_MEMORY, name))


if __name__ == "__main__":
    sys.exit(main())
