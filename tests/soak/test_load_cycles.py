"""Repeated loads and unloads leave nothing behind.

`MOST` cycles, or as many as fit into the time: `HEADRACE_CYCLES_SECS` seconds by kind of model.
"""

import asyncio
import gc
import os
import threading
from collections.abc import Callable
from pathlib import Path
from textwrap import dedent
from time import monotonic
from typing import NamedTuple

import numpy as np
import psutil
import pytest

from headrace.core.call import Call
from headrace.core.datatypes import Datatype
from headrace.core.tensors import Tensor
from headrace.engine.admission import Admission
from headrace.engine.engine import Engine
from headrace.engine.opening import LoadOptions
from headrace.placement.backend import load_backends
from headrace.repository.layout import ModelSource, read_model_directory
from tests.engine.worlds import FutureCall
from tests.models.onnx_graphs import identity, write_model
from tests.models.python_models import IDENTITY, tensors, write_python_model

SECONDS = float(os.environ.get("HEADRACE_CYCLES_SECS", "10"))
MOST = 10_000
WARM_UP_SECS = 3  # until allocators and caches are full
MEMORY = 16 << 20  # bytes of permitted growth: fragmentation, for any number of cycles
LARGE = 40_000  # elements: enough for an unnamed file
_CONFIG = "max_batch_size: 0\n"


class Held(NamedTuple):
    """Resources of this process."""

    descriptors: int
    unnamed_files: int
    threads: int
    children: int


def held() -> Held:
    """Current resources; mapped files count as well as open ones."""
    process = psutil.Process()
    maps = Path("/proc/self/maps").read_text().count("/memfd:headrace")
    return Held(
        len(os.listdir("/proc/self/fd")), maps, threading.active_count(),
        len(process.children(recursive=True)),
    )  # fmt: skip


def onnx_model(root: Path, execution: str) -> ModelSource:
    config = f'parameters {{ key: "execution" value {{ string_value: "{execution}" }} }}'
    return read_model_directory(write_model(root, "m", identity(dims=(-1,)), _CONFIG + config))


def python_model(root: Path) -> ModelSource:
    config = tensors("input", ("INPUT0", "FP32", "-1")) + tensors(
        "output", ("OUTPUT0", "FP32", "-1")
    )
    write_python_model(root, "m", dedent(IDENTITY), _CONFIG + config)
    return read_model_directory(root / "m")


async def cycle(source: ModelSource) -> None:
    """Load a model, replace it, run something small and something large, and unload it."""
    engine = Engine("", "", load_backends(), LoadOptions(cores=1), Admission(0, 0))
    await engine.load_all([source])
    for size in (3, LARGE):
        for file in (source.path / "1").iterdir():
            file.touch()  # so that there is something to load
        assert await engine.load(source) == ""
        x = np.arange(size, dtype=np.float32)
        request = FutureCall(Call("m", "", "", {"INPUT0": Tensor("INPUT0", Datatype.FP32, x)}))
        engine.find("m").submit(request)
        response = await request.future
        assert np.array_equal(response.outputs[0].array, x)
    await engine.unload_all()


async def more_than(before: Held) -> Held:
    """Resources beyond `before` once stable; other tests' own may be freed meanwhile."""
    deadline = monotonic() + 30
    while any(more := grown(before)) and monotonic() < deadline:  # noqa: ASYNC110 - not of asyncio
        await asyncio.sleep(0.05)
    return more


def grown(before: Held) -> Held:
    """The growth of each resource."""
    return Held(*(max(now - then, 0) for now, then in zip(held(), before, strict=True)))


SOURCES: dict[str, Callable[[Path], ModelSource]] = {
    "inline": lambda root: onnx_model(root, "inline"),
    "thread": lambda root: onnx_model(root, "thread"),
    "process": python_model,
}


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", SOURCES)
def test_unloaded_models_leave_nothing_behind(tmp_path: Path, kind: str) -> None:
    source = SOURCES[kind](tmp_path)

    async def cycles_within(seconds: float) -> int:
        deadline = monotonic() + seconds
        for count in range(MOST):
            if monotonic() > deadline:
                return count
            await cycle(source)
        return MOST

    async def whole() -> int:
        await cycles_within(WARM_UP_SECS)
        gc.collect()
        before, memory = held(), psutil.Process().memory_info().rss
        cycles = await cycles_within(SECONDS)
        assert not any(more := await more_than(before)), f"{more} after {cycles} cycles"
        gc.collect()
        growth = psutil.Process().memory_info().rss - memory
        print(f"{cycles} cycles, {before}, {growth >> 10} KiB more")
        assert growth < MEMORY, f"{growth >> 10} KiB after {cycles} cycles"
        return cycles

    assert asyncio.run(whole()) > 0
