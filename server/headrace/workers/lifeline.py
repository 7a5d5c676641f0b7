"""The end of a worker with its server, even while native code holds the interpreter's lock.

No thread of Python can see to that: none runs then. PR_SET_PDEATHSIG would follow the thread that
started the process, not the server. So the kernel watches a pipe that nobody writes to, and of
which the server alone holds the other end.
"""

import fcntl
import os
import select
import signal
import stat


def end_with_server() -> None:
    """SIGKILL for this process and those that it starts, once the server has ended.

    Standard input, which is the pipe, reads as empty from now on. It stays as it is if it is none,
    or if the system cannot signal.
    """
    if not stat.S_ISFIFO(os.fstat(0).st_mode):
        return
    pipe = os.dup(0)  # open from now on
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    try:
        fcntl.fcntl(pipe, fcntl.F_SETOWN, -os.getpgrp())
        fcntl.fcntl(pipe, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(pipe, fcntl.F_SETFL, fcntl.fcntl(pipe, fcntl.F_GETFL) | os.O_ASYNC)
    except OSError:
        return
    if select.select([pipe], [], [], 0)[0]:  # it has ended already
        os._exit(1)
