"""A server without cyclic garbage collection, which tells what a collection finds.

As a program it is `headrace`; each connection to the Unix socket `UNCOLLECTED` is answered with the
objects that only the collector can free, by type, since the connection before. With `SITE` on its
module path, the last front end that has started answers at `front_end_socket`.
"""

import gc
import json
import os
import socket
import sys
import threading
from collections import Counter
from pathlib import Path

PROGRAM = (__file__,)
UNCOLLECTED = "PYTHON_UNCOLLECTED"  # of this form, front ends get it, too
SITE = os.pathsep.join(
    map(str, (Path(__file__).parent / "uncollected_site", Path(__file__).parents[2]))
)


def front_end_socket(path: str | Path) -> Path:
    """The socket of a front end of the server with this one."""
    return Path(f"{path}.front-end")


def garbage(path: Path) -> dict[str, int]:
    """Objects left in cycles in the server with this socket, by type."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(60)
        connection.connect(str(path))
        found: dict[str, int] = json.loads(connection.makefile("rb").read())
        return found


def _answer(listener: socket.socket) -> None:
    while True:
        connection, _ = listener.accept()
        with connection:
            gc.collect()
            found = Counter(_described(item) for item in gc.garbage)
            gc.garbage.clear()
            gc.set_debug(0)
            gc.collect()
            gc.freeze()  # what is left lives on, and need not be searched again
            gc.set_debug(gc.DEBUG_SAVEALL)
            connection.sendall(json.dumps(found).encode())


def _described(item: object) -> str:
    kind = type(item)
    name = getattr(item, "__qualname__", "") or str(getattr(item, "f_code", ""))[:120]
    return f"{kind.__module__}.{kind.__qualname__} {name}".strip()


def listen(path: Path) -> None:
    """Collect nothing from now on, and answer at a socket."""
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen()
    threading.Thread(target=_answer, args=(listener,), daemon=True).start()


if __name__ == "__main__":
    from headrace.cli import main  # late: front ends import other modules of it

    listen(Path(os.environ[UNCOLLECTED]))
    main(sys.argv[1:])
