"""Runs a command, and cleans up after it, however it or the server ends.

A separate program: `python reaper.py REGION DIRECTORY COMMAND ...`. Its standard input is a pipe
from the server, which sends "t" to terminate the command or "k" to kill it; at the end of the pipe
the server has ended, and the command is killed at once. The command's descendants are killed with
it, and shared memory with the name prefix REGION is removed, if not empty. If the server has ended,
DIRECTORY is removed, too. The exit status is the command's, 128 plus the signal number if it was
killed. An inherited lock is held until the command and its descendants are gone.
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
    """Run the command until it ends; returns its exit status."""
    region, directory, *command = sys.argv[1:]
    for number in (signal.SIGINT, signal.SIGTERM):
        # The server decides when the command ends, even if a terminal or a supervisor signals the
        # whole group. Not by ignoring signals, which the command would inherit.
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
        os.killpg(child.pid, signal.SIGKILL)  # before the process id can be reused
    status = child.wait()
    if region:
        _clean(region)
    if server_ended and directory:
        shutil.rmtree(directory, ignore_errors=True)
    return status if status >= 0 else 128 - status


def _wait(pid: int, watch: int) -> bool:
    """Follow the server's orders until the command has ended; True if the server has ended."""
    poll = select.poll()
    poll.register(0, select.POLLIN | select.POLLHUP)
    poll.register(watch, select.POLLIN)
    while True:
        ready = [descriptor for descriptor, _ in poll.poll()]
        if 0 in ready:
            word = os.read(0, 1)
            if word != b"t":
                return not word
            os.kill(pid, signal.SIGTERM)  # not yet waited for, so the process id is still valid
        if watch in ready:
            return False


def _end_with_parent() -> None:
    """Make the kernel kill the command if this process is killed."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _clean(region: str) -> None:
    with suppress(OSError):
        for name in os.listdir(_SHARED_MEMORY):
            if name.startswith(region):
                with suppress(OSError):
                    os.unlink(os.path.join(_SHARED_MEMORY, name))


if __name__ == "__main__":
    sys.exit(main())
