"""A scheduler with counted responses."""

from dataclasses import replace

from headrace.core.call import Call
from headrace.engine.chain import count_responses
from headrace.observability.statistics import Duration, ResponseCounts
from headrace.scheduling.batch import Deferral, Part
from tests.scheduling.fakes import Bench, FakeExecution, ManyCall, request, signature, submitted


class Counted:
    """A scheduler with counted responses, and one request that waits 5 ns in its queue."""

    def __init__(self, bench: Bench | None = None) -> None:
        self.bench = bench or Bench(shape=replace(signature(), decoupled=True))
        self.responses = ResponseCounts()
        self.submit = count_responses(
            self.responses, self.bench.batcher.submit, now=self.bench.clock.now
        )
        self.call = ManyCall()

    def open(self) -> Call:
        """End the batch and leave its request open."""
        instance = self.bench.instances[0]
        submitted(self.submit, request("a", 1), self.call, 1)
        self.bench.clock.settle()
        self.call.execution = FakeExecution()
        self.bench.clock.advance(5)
        self.call.began = 5
        instance.report(parts=[Deferral.LATER])
        return self.call

    def answer(self, after: int, answer: Part | None, final: bool = False) -> None:
        """Answer the open request, `ns` after the last answer."""
        self.bench.clock.advance(after)
        self.bench.batcher.answer(self.call, answer, final)

    def told(self, ordinal: int, name: str) -> tuple[int, int]:
        """Value of a counter."""
        found: Duration = getattr(self.responses.ordinals[ordinal], name)
        return found.count, found.ns
