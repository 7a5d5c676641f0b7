"""Quarantine of inputs that worker processes have died of, so that they cannot go on killing.

A request in progress when its worker died has failed; its input may be sent again. A digest of each
such input is kept. One that was present at a death is a suspect: it runs alone from then on, so
that only the guilty one dies again; whatever survives is cleared. One that was present at the
allowed number of deaths is refused for an hour; then it is a suspect again, since deaths may have
had other causes, such as an operator's kill.

A worker with several requests at a time does not run suspects alone. So a death counts for a
suspect only if it was the only suspect present: no group is refused because one of it kills.

A plain data structure without a clock: times are nanoseconds from the caller, which is the
scheduler of the model version, on the event-loop thread. While it is empty, which is the usual
case, it costs nothing. Bounded: the case with the oldest death is dropped first.
"""

from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from weakref import ref

from headrace.core.call import Call
from headrace.core.errors import Quarantined, WorkerDied
from headrace.core.tensors import TensorArray, raw_bytes
from headrace.scheduling.batch import Answer, Batch, Deferral, NotStarted, Outcome

DEATHS = 2  # deaths after which an input is refused, by default
_CASES = 1024
_HOUR_NS = 3_600 * 10**9
_ENDS = 128  # bytes hashed at each end of a tensor for a sketch


@dataclass(slots=True)
class _Case:
    """An input present at deaths, with its sketch and the time of the last one."""

    deaths: int
    last: int
    sketch: int


class Quarantine:
    """The suspected and refused inputs of one model version.

    `cases` is empty while nothing is known; callers may check that first.
    """

    def __init__(self, model: str, deaths: int = DEATHS) -> None:
        """An input present at `deaths` deaths is refused; 0 disables the quarantine."""
        self.refused = 0  # requests so far
        self._model = model
        self._deaths = deaths
        self.cases: OrderedDict[bytes, _Case] = OrderedDict()  # by the time of the last death
        self._sketches: Counter[int] = Counter()  # number of cases with each sketch
        self._death: ref[WorkerDied] | None = None  # the last death
        self._victims: dict[bytes, _Case | None] = {}  # inputs present, with the case of suspects

    def learn_batch(self, batch: Batch, outcome: Outcome, now: int) -> None:
        """Learn from the end of a batch."""
        if isinstance(outcome.error, WorkerDied):
            self._blame(outcome.error, [call for call in batch.calls], now)
        elif not isinstance(outcome.error, NotStarted):
            parts = enumerate(outcome.parts or ())
            later = {
                index for index, part in parts if part is Deferral.LATER
            }  # still being executed
            calls = enumerate(batch.calls)
            self._clear([call for index, call in calls if index not in later])

    def learn_answer(self, call: Call, answer: Answer | None, final: bool, now: int) -> None:
        """Learn from the answer to a single request."""
        if isinstance(answer, WorkerDied):
            self._blame(answer, [call], now)
        elif final:
            self._clear([call])

    def screen(self, calls: Sequence[Call], now: int) -> tuple[list[Call], list[Call], list[Call]]:
        """Sort requests by treatment: run together, run alone, or refuse, which is counted."""
        self._age(now)
        clear: list[Call] = []
        suspects: list[Call] = []
        refused: list[Call] = []
        for call in calls:
            deaths = self._known_deaths(call)
            if not deaths:
                clear.append(call)
            elif deaths < self._deaths:
                suspects.append(call)
            else:
                refused.append(call)
        self.refused += len(refused)
        return clear, suspects, refused

    def error(self) -> Quarantined:
        """The error of a refused request."""
        return Quarantined(
            f"the input is quarantined: {self._deaths} worker processes of model"
            f" '{self._model}' ended while they executed it; it is not run again for now"
        )

    def _blame(self, death: WorkerDied, requests: Sequence[Call], now: int) -> None:
        """Note a worker's death with these requests, and possibly others with the same `death`."""
        if not self._deaths:
            return
        if self._death is None or self._death() is not death:
            self._death = ref(death)
            self._victims.clear()
        for request in requests:
            key = _digest(request)
            if key in self._victims:
                continue  # several requests with the same input at one death
            case = self.cases.get(key)
            if case is None:
                case = self.cases[key] = _Case(1, now, _sketch(request))
                self._sketches[case.sketch] += 1
                self._victims[key] = None
            else:
                self._suspect_again(key, case)
            case.last = now
            self.cases.move_to_end(key)
        while len(self.cases) > _CASES:
            self._drop(next(iter(self.cases)))

    def _suspect_again(self, key: bytes, case: _Case) -> None:
        """Note a suspect at the current death, which counts only if it was the only suspect."""
        suspects = [other for other in self._victims.values() if other is not None]
        self._victims[key] = case
        if not suspects:
            case.deaths += 1
        elif len(suspects) == 1:
            suspects[0].deaths -= 1

    def _clear(self, requests: Sequence[Call]) -> None:
        for request in requests:
            if self._sketches[_sketch(request)] and (key := _digest(request)) in self.cases:
                self._drop(key)

    def _known_deaths(self, request: Call) -> int:
        if not self._sketches[_sketch(request)]:
            return 0
        case = self.cases.get(_digest(request))
        return case.deaths if case is not None else 0

    def _age(self, now: int) -> None:
        """Drop suspects after an hour, and turn refused inputs into suspects."""
        while self.cases:
            key, case = next(iter(self.cases.items()))
            if now - case.last < _HOUR_NS:
                return
            if case.deaths < self._deaths:
                self._drop(key)
            else:
                case.deaths = self._deaths - 1
                case.last = now
                self.cases.move_to_end(key)

    def _drop(self, key: bytes) -> None:
        sketch = self.cases.pop(key).sketch
        self._sketches[sketch] -= 1
        if not self._sketches[sketch]:
            del self._sketches[sketch]


def _sketch(request: Call) -> int:
    """A cheap hash of the ends of tensors: equal for equal inputs, different for most others."""
    inputs = request.inputs
    return hash(
        (
            tuple(sorted(request.parameters.items())),
            *[
                (name, inputs[name].array.shape, _ends(inputs[name].array))
                for name in sorted(inputs)
            ],
        )
    )


def _ends(array: TensorArray) -> bytes:
    """The first and the last few bytes."""
    raw = raw_bytes(array)
    return bytes(raw[:_ENDS]) + bytes(raw[-_ENDS:])


def _digest(request: Call) -> bytes:
    """A hash of everything that may have killed a worker: tensors and parameters."""
    inputs = request.inputs
    result = blake2b(repr(sorted(request.parameters.items())).encode(), digest_size=16)
    for name in sorted(inputs):
        array = inputs[name].array
        result.update(f"{name!r} {inputs[name].datatype.value} {array.shape} ".encode())
        result.update(raw_bytes(array))
    return result.digest()
