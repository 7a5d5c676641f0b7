"""An instance of a model with sequences, between the scheduler and the instance that runs batches.

With the strategy `direct`, a model may keep the state of a sequence by its place in the batch. So
each request is put on the seat of its sequence; seats without a request have a row of zeros that no
client asked for. To the scheduler, such rows do not exist.

The end of a worker is the end of its states. What it had begun, and what was sent to it, must not
be run by its successor, which knows nothing of the sequences.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from headrace.core.call import Call
from headrace.core.errors import SequenceLost, WorkerDied
from headrace.core.tensors import Tensor, TensorArray, concatenated
from headrace.placement.warming import zeros
from headrace.scheduling.batch import (
    Batch,
    Deferral,
    Instance,
    NamedInstance,
    NotStarted,
    Outcome,
)

_MOST_EMPTY = 64  # kept requests of empty slots

Done = Callable[[Instance, Batch, Outcome], None]


class Seats(Protocol):
    """The sequences on an instance, as far as it has to know."""

    def begun(self, batch: Batch) -> None:
        """Note that the requests of a batch are given to the model."""

    def done(self, batch: Batch, ran: bool) -> None:
        """Note that the model is done with the requests of a batch, if it `ran`."""

    def later(self, call: Call) -> None:
        """Note that the model goes on to answer a request after its batch."""

    def places(self, batch: Batch) -> Sequence[int]:
        """The place of each request in a batch of fixed slots; none if they are not fixed."""

    def again(self, call: Call) -> None:
        """Change a request that its model runs again from the first of its sequence to the next."""

    def empty(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        """The inputs of an empty slot, from zeros like those of a request beside it."""


class SlotInstance(NamedInstance):
    """Puts the requests of each batch on the seats of their sequences.

    `lost` is true from the end of its worker until another one has been started.
    """

    def __init__(self, inner: Instance, seats: Seats) -> None:
        self.inner = inner
        self.lost = False
        self._seats = seats
        self._batch: Batch
        self._done: Done
        self._places: Sequence[int] = ()
        self._slots = 0
        self._empty: dict[object, Call] = {}

    @property
    def load(self) -> int:
        """Implements `Instance.load`."""
        return self.inner.load

    @property
    def name(self) -> str:
        """Implements `NamedInstance.name`."""
        assert isinstance(self.inner, NamedInstance), "an instance without a name. This is a bug."
        return self.inner.name

    def serves(self, target: object) -> bool:
        """Implements `Instance.serves`."""
        return self.inner.serves(target)

    def close(self) -> None:
        """Implements `Instance.close`."""
        self.inner.close()

    def execute(self, batch: Batch, done: Done) -> None:
        """Implements `Instance.execute`."""
        self._batch, self._done = batch, done
        self._places = self._seats.places(batch)
        self._seats.begun(batch)
        if self._places:
            # Ascending, so that a full batch needs no arranging; its answers follow this order.
            order = sorted(zip(self._places, batch.calls, strict=True), key=lambda each: each[0])
            batch.calls[:] = [call for _, call in order]
            self._places = [place for place, _ in order]
            self._slots = self._places[-1] + 1  # those behind the last request are left out
            if self._slots > len(self._places):
                batch = self._with_empty(batch)
        self.inner.execute(batch, self._finished)

    def _with_empty(self, batch: Batch) -> Batch:
        """The batch with a request for each empty slot."""
        empty = self._empty_slot(batch.calls[0], batch)
        calls = [empty] * self._slots
        for place, call in zip(self._places, batch.calls, strict=True):
            calls[place] = call
        return Batch(batch.signature, calls, batch.again)

    def _empty_slot(self, beside: Call, batch: Batch) -> Call:
        """A request that has ended: nobody waits for its answer."""
        key = batch.signature.batch_key(beside), batch.outputs
        empty = self._empty.get(key)
        if empty is None:
            inputs = {
                name: zeros(name, tensor.datatype, tensor.array.shape, 0)
                for name, tensor in beside.inputs.items()
            }
            empty = Call(beside.model_name, beside.model_version, "", self._seats.empty(inputs))
            empty.rows = beside.rows
            empty.ended = empty.started = True
            if batch.outputs is not batch.signature.outputs:
                empty.outputs = tuple(spec.name for spec in batch.outputs)
            if len(self._empty) >= _MOST_EMPTY:
                self._empty.clear()
            self._empty[key] = empty
        return empty

    def _finished(self, inner: Instance, given: Batch, outcome: Outcome) -> None:
        batch = self._batch
        error = outcome.error
        if isinstance(error, WorkerDied):
            outcome.error = lost_with(error)
        elif isinstance(error, NotStarted) and self.lost:
            outcome.error = NotStarted(lost_before(batch.signature.model))
        elif given is not batch and error is None:
            outcome.rows = given.rows
            if outcome.parts is not None:
                outcome.parts = [outcome.parts[place] for place in self._places]
            outcome.arrays = [
                _rows(array, self._places) if array.shape[:1] == (self._slots,) else array
                for array in outcome.arrays
            ]
        for call, part in zip(batch.calls, outcome.parts or (), strict=False):
            if part is Deferral.AGAIN:
                self._seats.again(call)
            elif part is Deferral.LATER:
                self._seats.later(call)
        self._seats.done(batch, not isinstance(outcome.error, NotStarted))
        self._done(self, batch, outcome)


def lost_with(error: WorkerDied) -> SequenceLost:
    """The error of a request that a worker was executing when it ended."""
    return SequenceLost(f"{error}: its sequence has to be begun again")


def lost_before(model: str) -> SequenceLost:
    """The error of a request that a worker had not begun when it ended."""
    text = "has ended before it executed the request: its sequence has to be begun again"
    return SequenceLost(f"the worker process of model '{model}' {text}")


def _rows(array: TensorArray, places: Sequence[int]) -> TensorArray:
    """Some rows of an output, in order."""
    if isinstance(array, np.ndarray):
        return array[list(places)]
    return concatenated([array[place : place + 1] for place in places])
