"""Model repositories of models on upstreams."""

import socket
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from random import SystemRandom

import numpy as np

from headrace.core.datatypes import NUMPY, Datatype
from headrace.core.tensors import Array

_LENT = Path("/proc/sys/net/ipv4/ip_local_port_range")
_FIRST_PORT = 10_000


def write_remote(root: Path, name: str, *addresses: str, more: str = "", **parameters: str) -> None:
    """Write a model that servers at `addresses` run: URLs, or host:port for gRPC."""
    urls = [address if "://" in address else f"grpc://{address}" for address in addresses]
    given = {"endpoints": ",".join(urls), **parameters}
    lines = [f'name: "{name}"', 'backend: "triton"', more]
    lines += [
        f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}'
        for key, value in given.items()
    ]
    (root / name).mkdir(parents=True)
    (root / name / "config.pbtxt").write_text("\n".join(lines))


def free_port() -> int:
    """An unused port of 127.0.0.1."""
    return free_ports(1)[0]


def free_ports(count: int) -> list[int]:
    """Unused ports outside of the system's ephemeral range.

    A server restarted on an ephemeral port could find it taken by another process's connection.
    """
    lent = int(_LENT.read_text().split()[0])
    others = range(_FIRST_PORT, lent if lent > 2 * _FIRST_PORT else 1 << 16)
    choice, ports = SystemRandom(), list[int]()
    with ExitStack() as stack:
        while len(ports) < count:
            port = choice.choice(others)
            probe = stack.enter_context(socket.socket())
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            ports.append(port)
    return ports


def values(datatype: Datatype, shape: Iterable[int]) -> Array:
    """Some values of a datatype."""
    full = tuple(shape)
    count = int(np.prod(full))
    if datatype is Datatype.BYTES:
        array = np.empty(count, object)
        array[:] = [b"x" * (n % 5) + b"\x00\xff" * (n % 2) for n in range(count)]
        return array.reshape(full)
    if datatype is Datatype.BOOL:
        flags: Array = (np.arange(count) % 2 == 0).reshape(full)
        return flags
    numbers: Array = np.arange(count).astype(NUMPY[datatype]).reshape(full)
    return numbers
