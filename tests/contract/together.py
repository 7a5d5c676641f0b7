"""Requests that run together in one batch."""

import json
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import numpy as np

from headrace.core.tensors import Array
from tests.support.client import Answer, Client

# Three requests run together: the delay is longer than a test may take.
THREE = "dynamic_batching { preferred_batch_size: 3 max_queue_delay_microseconds: 50000000 }\n"
Given = TypeVar("Given")


def together(
    client: Client, model: str, ask: Callable[[Given], Answer], given: Sequence[Given]
) -> list[Answer]:
    """Answers to requests, one for each element of `given`, that ran in one execution."""
    before = client.statistics(model)[0].execution_count
    with ThreadPoolExecutor(len(given)) as threads:
        answers = list(threads.map(ask, given))
    assert client.statistics(model)[0].execution_count - before == 1
    return answers


def check_shapes(answers: Sequence[Answer], given: Sequence[Array], seen: Sequence[object]) -> None:
    """Each answer of a model of `SHAPES` has twice its own X, and what the model saw of all."""
    for x, answer in zip(given, answers, strict=True):
        np.testing.assert_array_equal(answer["Y"], 2 * x)
        told = json.loads(answer["SEEN"][0, 0])
        assert sorted(told, key=str) == sorted(seen, key=str)
