"""The stages that a call passes before the queue of its version; see `VersionChain.compose`.

A stage is a function of a call: it passes the call to the next one, keeps it, or ends it by
raising. Plugins add further stages (`StagePlugin`). Owned by the event-loop thread.
"""

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from time import monotonic_ns

from headrace.core.call import NO_OPTIONS, Call, Done, InferResponse, Stage, Submit, Timing
from headrace.core.errors import ExecutionFailed, InvalidRequest, Overloaded, QueueFull, ServerError
from headrace.core.limits import Payer, uncharged
from headrace.core.plugins import PluginGroup
from headrace.core.signature import Signature
from headrace.core.tensors import Tensor, brackets, concatenated
from headrace.engine.shared_memory import Expect, placeholders
from headrace.engine.workbench import Job, Workbench
from headrace.observability.statistics import FIRST_RESPONSE_BOUNDS, Histogram, ResponseCounts
from headrace.protocol.classification import classify_outputs
from headrace.protocol.status import INTERNAL_TEXT
from headrace.scheduling.batcher import Batcher

log = logging.getLogger(__name__)

Compose = Callable[[Submit], Submit]  # makes a stage from the next one

# Output bytes classified on the event loop; each element may become a text.
_CLASSIFIED_HERE = 16 << 10
_ANY = 1 << 60  # parts of a table, whose size other limits bound
_PARTS_AT_ONCE = 8  # parts of a divided call in flight
_ALONE_NS = 1_000_000  # of parts that run one after the other in one turn of the event loop
_JOINED_HERE = 1 << 20  # bytes concatenated on the event loop


@dataclass(frozen=True, slots=True)
class StageModel:
    """A version for which stages are composed; `parameters` are its configuration's."""

    name: str
    version: int
    parameters: Mapping[str, str]
    signature: Signature


class StagePlugin:
    """Base of a plugin's stage, which every call passes before its version's queue.

    Created once, without arguments, when the server starts. `parameters` are the names of the
    configuration parameters that it reads.
    """

    parameters: Collection[str] = ()

    def check(self, parameters: Mapping[str, str]) -> None:
        """Check a model's parameters when it is opened; raises `InvalidOption`."""

    def compose(self, model: StageModel) -> Compose | None:
        """The stage of one version, which receives checked calls; None if the model has none.

        Called on a loading thread; the returned function is called on the event-loop thread, again
        whenever the version's chain changes. Raises `InvalidOption` for a parameter.
        """
        raise NotImplementedError


MakeStage = Callable[[], StagePlugin]
STAGES: PluginGroup[MakeStage] = PluginGroup("headrace.stages")


def load_stages() -> dict[str, StagePlugin]:
    """The stages of all plugins by name."""
    return STAGES.load(make_stage)


def make_stage(plugin: MakeStage) -> StagePlugin:
    """The stage made by a plugin; raises `TypeError` if it makes something else."""
    made: object = plugin()
    if not isinstance(made, StagePlugin):
        raise TypeError(f"expected a {StagePlugin.__module__}.StagePlugin, got {made!r}")
    return made


def check(signature: Signature, submit: Submit, special: Submit) -> Submit:
    """The stage that checks calls and sets their rows, before `submit`.

    Calls that ask for more than a model's outputs go to `special`.
    """
    tables = replace(signature, parts=_ANY)

    def stage(call: Call) -> None:
        options = call.options
        if options.shared is not None:
            call.inputs |= placeholders(options.shared)
        try:
            call.rows = (tables if options.table else signature).check(call)
        except InvalidRequest as error:
            id = call.id or "<id_unknown>"
            raise InvalidRequest(f"[request id: {id}] {error}") from None
        if (payer := call.payer) is not None:
            payer.take_rows(call.rows)
        if options.classes is None:
            submit(call)
        else:
            special(call)

    return stage


def tell_servers(headers: Sequence[str], submit: Submit) -> Submit:
    """The stage for upstream models: forwards client headers and the deadline.

    Headers with these lower-case names, and the client's deadline, become part of its context.
    """

    def stage(call: Call) -> None:
        given = {name: value for name in headers if (value := call.header(name))}
        seconds = call.remaining()
        if given or seconds:
            deadline = monotonic_ns() + int(seconds * 1e9) if seconds else 0
            call.context = call.context._replace(forwarded=given, deadline=deadline)
        submit(call)

    return stage


def classify(
    labels: Mapping[str, Sequence[str]], batches: bool, bench: Workbench, submit: Submit
) -> Submit:
    """The stage of calls with `classes`, before `submit`."""

    def stage(call: Call) -> None:
        if classes := call.options.classes:
            call.enter(_Classifying(classes, labels, batches, bench), submit)
        else:
            submit(call)

    return stage


class _Classifying(Stage):
    """Replaces outputs by their highest classes, on the workbench if that is slow."""

    __slots__ = ("_batches", "_bench", "_classes", "_labels")

    def __init__(
        self,
        classes: Mapping[str, int],
        labels: Mapping[str, Sequence[str]],
        batches: bool,
        bench: Workbench,
    ) -> None:
        self._classes = classes
        self._labels = labels
        self._batches = batches
        self._bench = bench

    def transform(
        self, call: Call, response: InferResponse, final: bool, done: Done
    ) -> Job[None] | None:
        size = sum(t.array.nbytes for t in response.outputs if t.name in self._classes)
        if size > _CLASSIFIED_HERE:
            return self._bench.do(
                size, lambda charge: self._classify(response),
                lambda _, problem: done(problem), uncharged, call.payer,
            )  # fmt: skip
        self._classify(response)
        return None

    def _classify(self, response: InferResponse) -> None:
        classify_outputs(response, self._classes, self._labels, self._batches)


def count_responses(
    responses: ResponseCounts,
    submit: Submit,
    bounds: Sequence[float] = FIRST_RESPONSE_BOUNDS,
    now: Callable[[], int] = monotonic_ns,
) -> Submit:
    """The stage that counts responses of a decoupled model, before the queue.

    `bounds` are histogram bounds of the time to the first response, in milliseconds. `now` is the
    scheduler's clock, in nanoseconds.
    """
    bounds_ns = [ms * 1e6 for ms in bounds]
    if responses.first is None or responses.first.bounds != bounds_ns:
        responses.first = Histogram(bounds_ns)
    return lambda call: call.enter(_Counted(responses, now), submit)


class _Counted(Stage):
    """The counters of one call to a decoupled model.

    A response lasts from the previous one, or from the start of the execution, until it has been
    passed on.
    """

    __slots__ = ("_came", "_ended", "_now", "_ordinal", "_responses")

    def __init__(self, responses: ResponseCounts, now: Callable[[], int]) -> None:
        self._responses = responses
        self._now = now
        self._ordinal = 0  # ordinal of the next response
        self._came = 0  # arrival of the response being passed on
        self._ended = 0  # time when the last one had been passed on

    def transform(self, call: Call, response: InferResponse, final: bool, done: Done) -> None:
        self._came = self._now()

    def passed(self, call: Call, response: InferResponse, final: bool) -> None:
        came, ended = self._came, self._now()
        began = self._ended
        if not self._ordinal:
            began = call.arrived + response.timing.queue_ns
            if self._responses.first is not None:
                self._responses.first.observe(ended - call.arrived)
        counters = self._responses.of(self._ordinal)
        counters.compute_infer.add(max(came - began, 0))
        counters.compute_output.add(ended - came)
        counters.success.add(max(ended - began, 0))
        self._ordinal += 1
        self._ended = ended

    def ended(self, call: Call, error: ServerError | None) -> None:
        if error is None:
            self._responses.of(self._ordinal).empty_response.add(self._elapsed(call))
        elif call.started and (call.execution is not None or isinstance(error, ExecutionFailed)):
            # A call that was never executed has no response, and a whole run fails only if the
            # execution does not support single requests.
            self._responses.of(self._ordinal).fail.add(self._elapsed(call))

    def cancelled(self, call: Call) -> None:
        if call.started:
            self._responses.of(self._ordinal).cancel.add(self._elapsed(call))

    def _elapsed(self, call: Call) -> int:
        return self._now() - (self._ended or call.began)


CheckAnswer = Callable[[str, int], None]  # raises for a model's answer of too many bytes


def divide(
    most: int, submit: Submit, expect: Expect, bench: Workbench, check_answer: CheckAnswer,
    batcher: Batcher | None = None,
) -> Submit:  # fmt: skip
    """The stage that divides calls with more than `most` rows.

    `batcher`, if any, is the one that `submit` belongs to: it may run parts at once.
    """

    def stage(call: Call) -> None:
        if call.rows <= most:
            submit(call)
        else:
            DividedCall(call, most, submit, expect, bench, check_answer, batcher).begin()

    return stage


class DividedCall:
    """A call with more rows than a batch may have, and the owner of its parts.

    The parts are ordinary calls to the model, a few at a time: the next one is queued when one is
    answered, so that a large call neither fills the queue nor keeps the event loop busy. A part
    that the queue refuses waits for those before it; without any before it the call fails. The
    first part that fails also fails the call, and the others are cancelled.

    Invariant: parts that are queued or run are in `_parts`; after `cancel`, or the end, the call is
    not answered.
    """

    def __init__(
        self,
        call: Call,
        part_rows: int,
        submit: Submit,
        expect: Expect,
        bench: Workbench,
        check_answer: CheckAnswer,
        batcher: Batcher | None,
    ) -> None:
        """`submit` queues a part; each has at most `part_rows` rows. `batcher` as of `divide`.

        `check_answer` is called with the size of all answers so far.
        """
        self.whole = call
        rows = self._rows = call.rows
        self._bounds = [
            (start, min(start + part_rows, rows)) for start in range(0, rows, part_rows)
        ]
        self._submit = submit
        self._expect = expect
        self._bench = bench
        self._check_answer = check_answer
        self._batcher = batcher
        self._part_ns = _ALONE_NS  # of a part that has run alone
        self._going = False  # parts may be answered while others are about to be begun
        self._nbytes = 0
        self._begun = call.arrived = call.began = monotonic_ns()  # no scheduler sets them
        self._next = 0
        self._parts: dict[int, Call] = {}
        self._answers: list[InferResponse | None] = [None] * len(self._bounds)
        self._job: Job[InferResponse] | None = None
        self._over = False

    def begin(self) -> None:
        """Queue the first parts; raises `ServerError`."""
        self._expect(1)
        try:
            # No call is answered before it has been submitted: the first part always waits.
            alone = self._batcher is not None and self._batcher.free is not False
            self._go_on(1 if alone else _PARTS_AT_ONCE)
        except BaseException:
            self._end()
            raise
        self.whole.owner = self

    def cancel(self, call: Call) -> None:
        """Implements `Owner.cancel`."""
        if not self._over:
            self._end()

    def hold(self, call: Call, held: bool) -> None:
        """Implements `Owner.hold`: does nothing, since there is one response only."""

    # --- from parts

    def answered(self, number: int, response: InferResponse) -> None:
        """Store the answer of a part."""
        if self._parts.pop(number, None) is None:
            return
        self.whole.started = True  # from now on an error cannot mean that nothing was begun
        self._answers[number] = response
        self._nbytes += response.nbytes
        try:
            self._check_answer(response.model_name, self._nbytes)
            if not self._going:
                self._go_on()
        except Exception as error:  # nobody else would answer the call
            self._fail(error)

    def failed(self, number: int, error: ServerError) -> None:
        """Fail the call with the error of a part."""
        part = self._parts.pop(number, None)
        if part is not None:
            self.whole.started |= part.started
            self._fail(error)

    # --- scheduling of parts

    def _go_on(self, most: int = _PARTS_AT_ONCE) -> None:
        """Run or queue as many parts as allowed; raises `ServerError` if none can be queued."""
        self._going = True
        try:
            while self._next < len(self._bounds) and len(self._parts) < most and not self._over:
                if self._next and not self._parts and self._batcher is not None:
                    ran = self._run_alone(self._batcher)
                    if ran:
                        continue
                    if ran is None:
                        self._batcher.soon(self._resume)
                        return
                if not self._queue(self._begun_part()):
                    return
        finally:
            self._going = False
        if not self._parts and not self._over:
            self._join()

    def _resume(self) -> None:
        """Go on after others had their turn of the event loop."""
        if not self._over:
            try:
                self._go_on()
            except Exception as error:
                self._fail(error)

    def _run_alone(self, batcher: Batcher) -> bool | None:
        """Run some parts at once; False or None as `Batcher.free`."""
        if not (free := batcher.free):
            return free
        count = max(min(_ALONE_NS // self._part_ns, _PARTS_AT_ONCE, self._left), 1)
        parts = [self._begun_part() for _ in range(count)]
        begun = monotonic_ns()
        if batcher.run_alone(parts):
            self._part_ns = max((monotonic_ns() - begun) // count, 1)
            return True
        for part in parts:
            del self._parts[part.place]
        self._next -= count
        return False

    @property
    def _left(self) -> int:
        return len(self._bounds) - self._next

    def _begun_part(self) -> "_Part":
        """The next part, which is under way from now on."""
        number = self._next
        part = self._parts[number] = self._part(number, *self._bounds[number])
        self._next += 1
        return part

    def _queue(self, part: "_Part") -> bool:
        """Queue a part; False if that is refused, and others are under way.

        Raises `ServerError` without such others, and for other refusals.
        """
        try:
            self._submit(part)
        except BaseException as error:
            del self._parts[part.place]
            self._next -= 1
            if not self._parts or not isinstance(error, QueueFull | Overloaded):
                raise
            return False
        return True

    def _part(self, number: int, start: int, stop: int) -> "_Part":
        whole = self.whole
        options = whole.options
        if options is not NO_OPTIONS:
            passed = (monotonic_ns() - self._begun) // 1_000
            options = options._replace(
                timeout=max(options.timeout - passed, 1) if options.timeout else 0,
                sequence_start=options.sequence_start and not start,
                sequence_end=options.sequence_end and stop == self._rows,
                classes=None, shared=None,
            )  # fmt: skip
        inputs = {
            name: Tensor(name, tensor.datatype, tensor.array[start:stop])
            for name, tensor in whole.inputs.items()
        }
        part = _Part(
            whole.model_name, whole.model_version, whole.id, inputs, whole.outputs,
            dict(whole.parameters), options, whole.nbytes * (stop - start) // self._rows,
        )  # fmt: skip
        part.context = whole.context
        part.divided, part.place, part.rows = self, number, stop - start
        part.committed = number > 0
        return part

    def _join(self) -> None:
        answers = [answer for answer in self._answers if answer is not None]
        self._answers.clear()
        size = sum(tensor.array.nbytes for answer in answers for tensor in answer.outputs)
        if size > _JOINED_HERE:
            self._job = self._bench.do(
                size, lambda charge: joined(answers), self._joined, uncharged, self.whole.payer
            )
            return
        try:
            whole = joined(answers)
        except ServerError as error:
            self._fail(error)
        else:
            self._joined(whole, None)

    def _joined(self, whole: InferResponse | None, problem: Exception | None) -> None:
        self._job = None
        if whole is not None:
            self._end()
            self.whole.pass_response(whole, True)
        elif problem is not None:
            self._fail(problem)

    def _fail(self, error: Exception) -> None:
        if not isinstance(error, ServerError):
            log.error("bug in a request that is divided", exc_info=error)
            error = ExecutionFailed(INTERNAL_TEXT)
        if not self._over:
            self._end()
        self.whole.pass_end(error)

    def _end(self) -> None:
        self._over = True
        if self._job is not None:
            self._job.cancel()
        parts, self._parts = self._parts, {}
        for part in parts.values():
            self.whole.started |= part.started
            part.cancel()
        self._expect(-1)


class _Part(Call):
    """A part, at its `place`. Client information is that of the whole call."""

    __slots__ = ("committed", "divided", "place")

    divided: DividedCall
    place: int
    committed: bool

    @property
    def payer(self) -> Payer | None:
        return self.divided.whole.payer

    def header(self, name: str) -> str:
        return self.divided.whole.header(name)

    def remaining(self) -> float:
        return self.divided.whole.remaining()

    def answered_by(self, backend: str) -> None:
        self.divided.whole.pass_backend(backend)

    def respond(self, response: InferResponse, final: bool) -> None:
        self.divided.answered(self.place, response)

    def fail(self, error: ServerError) -> None:
        self.divided.failed(self.place, error)


def joined(answers: Sequence[InferResponse]) -> InferResponse:
    """Join the answers to the parts of a request, in order.

    Its queue time is that of the first part; its execution time is the sum. Raises
    `ExecutionFailed` if the outputs do not match.
    """
    first = answers[0]
    names = [tensor.name for tensor in first.outputs]
    if any([tensor.name for tensor in answer.outputs] != names for answer in answers):
        raise ExecutionFailed(
            f"model '{first.model_name}' gave different outputs for the batches of one request"
        )
    outputs = [_whole(first.model_name, [a.outputs[i] for a in answers]) for i in range(len(names))]
    timing = Timing(
        first.timing.queue_ns,
        sum(answer.timing.compute_ns for answer in answers),
        max(answer.timing.batch_rows for answer in answers),
    )
    parameters = {name: value for answer in answers for name, value in answer.parameters.items()}
    return InferResponse(
        first.model_name, first.model_version, first.id, outputs, timing, parameters
    )


def _whole(model: str, parts: Sequence[Tensor]) -> Tensor:
    """Concatenate the rows of tensors of one name."""
    first = parts[0]
    shapes = {part.array.shape[1:] for part in parts}
    if len(shapes) > 1:
        raise ExecutionFailed(
            f"model '{model}' gave output '{first.name}' in rows of different shapes for the"
            f" batches of one request: {' and '.join(sorted(map(brackets, shapes)))}"
        )
    return Tensor(first.name, first.datatype, concatenated([part.array for part in parts]))
