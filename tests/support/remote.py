"""Model repositories whose models run on other servers."""

from collections.abc import Iterable
from pathlib import Path

import numpy as np

from headrace.core.datatypes import NUMPY, Datatype
from headrace.core.tensors import Array


def write_remote(root: Path, name: str, *addresses: str, more: str = "", **parameters: str) -> None:
    """Write a model that servers at `addresses`, as host:port, run."""
    given = {"endpoints": ",".join(f"grpc://{a}" for a in addresses), **parameters}
    lines = [f'name: "{name}"', 'backend: "triton"', more]
    lines += [
        f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}'
        for key, value in given.items()
    ]
    (root / name).mkdir(parents=True)
    (root / name / "config.pbtxt").write_text("\n".join(lines))


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
