"""The digits model for jobs of hosts: images by number, their labels, and executors that die."""

import os
import signal
import threading
from functools import cache

import numpy as np

import headrace
from headrace.core.tensors import Array
from tests.docs.pages import ROOT

REPOSITORY = str(ROOT / "model_repository")


def image_of(number: int) -> Array:
    """An image whose label depends on its number."""
    return np.full((8, 8), number % 16, np.float32)


@cache
def labels(count: int) -> list[int]:
    """The labels of the first images."""
    digits = headrace.Runner(REPOSITORY, "digits", outputs=["label"])
    found: list[int] = digits({"image": [image_of(n) for n in range(count)]})["label"].tolist()
    return found


def die_once(path: str, process: int) -> None:
    """Kill a process, unless the file is there, which is then made."""
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return
    os.kill(process, signal.SIGKILL)


def engines() -> int:
    """The engines of this process."""
    return sum(thread.name.startswith("headrace engine") for thread in threading.enumerate())
