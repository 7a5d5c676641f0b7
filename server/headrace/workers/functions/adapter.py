"""Decorated functions and classes as classes with the methods of Triton's Python models.

Requests become calls, calls responses (`calls.py`). What a function raises goes out as it is: the
server then runs a batch of several again in halves, until the one to blame stands alone.
"""

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any, ClassVar

from headrace.workers import triton_api as pb
from headrace.workers.functions.calls import Arguments, Calls, Request, refusal
from headrace.workers.functions.configuration import check, complete
from headrace.workers.functions.decorator import Declaration
from headrace.workers.functions.values import InvalidInput


class FunctionModel:
    """What all models have in common that are functions or classes.

    `function` is what is called; on which thread or loop, a subclass says.
    """

    declaration: ClassVar[Declaration]

    def __init__(self) -> None:
        self.calls = Calls(self.declaration.signature)
        self.function: Callable[..., Any] = self.declaration.target
        self._object: Any = None

    @classmethod
    def auto_complete_config(cls, config: pb.ModelConfig) -> pb.ModelConfig:
        """Fill in what the annotations say."""
        complete(cls.declaration.signature, config)
        return config

    def initialize(self, args: dict[str, str]) -> None:
        """Load; raises `Contradicted` if the configuration is not the function's."""
        check(self.declaration.signature, json.loads(args["model_config"]))
        if isinstance(self.declaration.target, type):
            self._object = self.declaration.target()
            if hasattr(self._object, "load"):
                self._object.load()
            self.function = self._object.predict

    def finalize(self) -> None:
        """Close."""
        if hasattr(self._object, "close"):
            self._object.close()


class PlainModel(FunctionModel):
    """A function that gives its result."""

    def execute(self, requests: Sequence[Request]) -> list[pb.InferenceResponse]:
        """Answer the requests of a batch; raises what the function raises, or `ResultError`."""
        plan = self.calls.plan(requests)
        try:
            results = [self.function(**arguments) for arguments in plan.calls]
        except InvalidInput as error:
            return _refused(requests, error)
        return self.calls.responses(plan, results)


class AsyncModel(FunctionModel):
    """A coroutine that gives its result; the calls of a batch run at the same time."""

    async def execute(self, requests: Sequence[Request]) -> list[pb.InferenceResponse]:
        """Answer the requests of a batch; raises what the function raises, or `ResultError`."""
        plan = self.calls.plan(requests)
        try:
            results = await _together(self.function, plan.calls)
        except InvalidInput as error:
            return _refused(requests, error)
        return self.calls.responses(plan, results)


def _refused(requests: Sequence[Request], error: InvalidInput) -> list[pb.InferenceResponse]:
    """What to answer when a function has found its input wrong; raises `error` for a batch."""
    if len(requests) > 1:
        raise error  # one of them is to blame, and will be found
    return [refusal(error)]


async def _together(
    function: Callable[..., Awaitable[Any]], calls: Iterable[Arguments]
) -> list[Any]:
    """The results of calls that run at the same time; if one fails, the others are cancelled."""
    tasks = [asyncio.ensure_future(function(**arguments)) for arguments in calls]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
