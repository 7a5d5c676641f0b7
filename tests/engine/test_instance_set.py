"""The instances of one backend."""

import asyncio
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

from headrace.core.errors import ServerError
from headrace.engine.instance_set import InstanceSet
from headrace.engine.loading import LoadedInstance
from headrace.execution.choice import InstanceKind
from headrace.execution.model_kinds import InWorker
from tests.scheduling.fakes import signature


class Workers:
    """The workers of a version, all of which have been given up."""

    def __init__(self, changed: Callable[[], None]) -> None:
        self.changed = changed

    def add(self, name: str, model: object) -> None:
        """There is one."""

    def __iter__(self) -> Iterator[Any]:
        yield SimpleNamespace(given_up=True, tried_again=0.0)


class Model(InWorker):
    """A model in such workers."""

    workers: Workers

    def worker_set(self, *given: Any) -> Workers:
        self.workers = Workers(given[-1])
        return self.workers


def test_further_requests_are_refused_before_those_that_wait_fail() -> None:
    """A client may have its next request ready when it is told: that would wait for ever."""
    told: list[str] = []

    class Scheduler:
        def fail_waiting(self, error: ServerError) -> bool:
            told.append("failed")
            return True

    model: Any = Model()
    scheduler: Any = Scheduler()
    host: Any = None
    loop = asyncio.new_event_loop()
    found = InstanceSet(signature(), scheduler, host, loop, lambda: told.append("refused"), {})
    found.add(LoadedInstance("m_0", model, InstanceKind.PROCESS))
    model.workers.changed()
    loop.close()
    assert told == ["refused", "failed"]
