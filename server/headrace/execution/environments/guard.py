"""Runs a command, and ends it with all that it has started if the server ends.

A program of its own: `python guard.py COMMAND ...`. Its standard input is a pipe whose other end
the server holds and never writes to. When that ends, however the server has ended, the command's
process group is killed. It exits with the command's status, 128 and the signal's number if it was
killed. A lock that it inherits is held until nothing of the command is left.
"""

import os
import select
import signal
import subprocess
import sys
from contextlib import suppress


def main() -> int:
    """Run the command that the arguments are; its exit status."""
    for number in (signal.SIGINT, signal.SIGTERM):
        # The command gets its own. Not by ignoring them, which the command would take over.
        signal.signal(number, lambda *_: None)
    try:
        child = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL, process_group=0)
    except OSError as error:
        print(f"cannot start {sys.argv[1]}: {error.strerror}")
        return 127
    watch = os.pidfd_open(child.pid)
    poll = select.poll()
    poll.register(0, select.POLLIN | select.POLLHUP)
    poll.register(watch, select.POLLIN)
    poll.poll()
    with suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)  # before its number is free again
    status = child.wait()
    return status if status >= 0 else 128 - status


if __name__ == "__main__":
    sys.exit(main())
