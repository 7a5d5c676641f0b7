"""Model repositories whose models run on other servers."""

import socket
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from headrace.core.datatypes import NUMPY, Datatype
from headrace.core.tensors import Array


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
    """A port of 127.0.0.1 at which nothing listens."""
    return free_ports(1)[0]


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens at."""
    probes = [socket.socket() for _ in range(count)]
    for probe in probes:
        probe.bind(("127.0.0.1", 0))
    ports = [probe.getsockname()[1] for probe in probes]
    for probe in probes:
        probe.close()
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
