"""The same sequences on a real Triton and on this server: the same batches, answers and errors.

The model uses Triton's Python backend, and tells all that it is given; clients are tritonclient's.
That backend cannot give a state back, so that of states only the first is compared.
"""

import json
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from queue import Queue
from typing import Any, NamedTuple

import numpy as np
import pytest
import tritonclient.grpc as over_grpc
import tritonclient.http as over_http
from tritonclient.utils import InferenceServerException

from tests.models.python_models import tensors, write_python_model
from tests.support.scrape import until
from tests.support.server_process import clean_server
from tests.support.triton_server import Triton, real_program

pytestmark = pytest.mark.slow

REFUSED = -1  # a number that the model refuses
# An answer tells the number of its batch, its place there, and all requests of the batch, without
# the inputs of empty slots: Triton's are not initialized.
_TELLER = """
    import json

    import numpy as np
    import triton_python_backend_utils as pb_utils


    def told(tensor):
        array = tensor.as_numpy()
        values = array.astype(str if array.dtype == object else array.dtype).ravel()
        return [str(array.dtype), list(array.shape), values.tolist()]


    class TritonPythonModel:
        def initialize(self, args):
            self.batches = 0

        def execute(self, requests):
            self.batches += 1
            batch = [self.given(request) for request in requests]
            return [self.answer(place, batch) for place in range(len(batch))]

        def given(self, request):
            given = {tensor.name(): told(tensor) for tensor in request.inputs()}
            if not request.correlation_id():
                given["NUMBER"] = "none"
            return given | {"id": request.correlation_id(), "flags": request.flags()}

        def answer(self, place, batch):
            number = batch[place]["NUMBER"]
            if number[2] == [-1]:
                return pb_utils.InferenceResponse(error=pb_utils.TritonError("not this one"))
            text = json.dumps([self.batches, place, batch], sort_keys=True).encode()
            text = np.full(number[1] if number != "none" else [1, 1], text, object)
            return pb_utils.InferenceResponse([pb_utils.Tensor("TOLD", text)])
"""
_TENSORS = tensors("input", ("NUMBER", "INT32", "1")) + tensors("output", ("TOLD", "STRING", "1"))
_CONTROLS = {
    "integers": ("int32_false_true: [ 0, 1 ]", "UINT64"),
    "signed": ("int32_false_true: [ 7, 3 ]", "INT64"),
    "numbers": ("fp32_false_true: [ -0.5, 2 ]", "INT32"),
    "booleans": ("bool_false_true: [ false, true ]", "UINT32"),
    "named": ("int32_false_true: [ 0, 1 ]", "STRING"),
}
_STRATEGIES = {"direct": "direct { }", "oldest": "oldest { max_candidate_sequences: 4 }"}
_STATES = """
    state {
      input_name: "ZEROS" output_name: "ZEROS_OUT" data_type: TYPE_INT32 dims: [ 2 ]
      initial_state { name: "zeros" data_type: TYPE_INT32 dims: [ 2 ] zero_data: true }
    }
    state {
      input_name: "FILE" output_name: "FILE_OUT" data_type: TYPE_FP32 dims: [ 2 ]
      initial_state { name: "file" data_type: TYPE_FP32 dims: [ 2 ] data_file: "begin" }
    }
"""
Id = int | str


def write(
    root: Path, name: str, strategy: str, controls: str = "integers", *, rows: int = 4,
    instances: int = 1, idle_us: int = 600_000_000, more: str = "",
) -> Path:  # fmt: skip
    encoding, id = _CONTROLS[controls]
    inputs = {
        kind: f"kind: CONTROL_SEQUENCE_{kind} {encoding}" for kind in ("START", "END", "READY")
    }
    inputs["ID"] = f"kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_{id}"
    told = "".join(
        f'control_input {{ name: "{name}" control {{ {control} }} }}'
        for name, control in inputs.items()
    )
    write_python_model(root, name, _TELLER, f"""{_TENSORS} max_batch_size: {rows}
        instance_group {{ count: {instances} kind: KIND_CPU }}
        sequence_batching {{ max_sequence_idle_microseconds: {idle_us} {strategy} {told} {more} }}
    """)  # fmt: skip
    return root / name


def write_all(root: Path) -> None:
    for strategy, config in _STRATEGIES.items():
        for controls in _CONTROLS:
            write(root, f"{controls}_{strategy}", config, controls)
        single = config.replace("4", "1")
        write(root, f"single_{strategy}", single, rows=1)
        write(root, f"brief_{strategy}", single, rows=1, idle_us=300_000)
        write(root, f"both_{strategy}", config, instances=2)
        folder = write(root, f"stateful_{strategy}", config, more=_STATES)
        (folder / "initial_state").mkdir()
        (folder / "initial_state" / "begin").write_bytes(np.array([1.5, -2], "<f4").tobytes())
    write(root, "plain", "", rows=0)


class Side(NamedTuple):
    """A client of one of the two servers, and the library that it is of."""

    client: Any
    library: Any

    def infer(self, model: str, number: int, id: Id, flags: str = "", **more: Any) -> Any:
        """The answer as JSON, or status and text of the error.

        `flags` has "s" for a start and "e" for an end.
        """
        shape = [more.pop("rows", 1)] + [1] * (model != "plain")
        try:
            answer = self.client.infer(
                model, [self.input("NUMBER", np.full(shape, number, np.int32))], sequence_id=id,
                sequence_start="s" in flags, sequence_end="e" in flags, **more,
            )  # fmt: skip
        except InferenceServerException as error:
            return error.status(), error.message()
        return json.loads(answer.as_numpy("TOLD").item())

    def input(self, name: str, array: Any) -> Any:
        tensor = self.library.InferInput(name, list(array.shape), "INT32")
        tensor.set_data_from_numpy(array)
        return tensor

    def stream(self, model: str, requests: list[tuple[int, Id, str]]) -> dict[str, Any]:
        """The answers of a stream by the number of their request."""
        answers: Queue[Any] = Queue()
        self.client.start_stream(lambda result, error: answers.put((result, error)))
        for number, id, flags in requests:
            self.client.async_stream_infer(
                model, [self.input("NUMBER", np.array([[number]], np.int32))], sequence_id=id,
                sequence_start="s" in flags, sequence_end="e" in flags, request_id=str(number),
            )  # fmt: skip
        found = {}
        try:
            for _ in requests:
                result, error = answers.get(timeout=60)
                assert error is None, error
                found[result.get_response().id] = json.loads(result.as_numpy("TOLD").item())
        finally:
            self.client.stop_stream(cancel_requests=True)
        return found

    def counts(self, model: str) -> Counter[str]:
        """The counts of a model over gRPC."""
        [found] = self.client.get_inference_statistics(model).model_stats
        times = found.inference_stats
        counted = {f"of {b.batch_size}": b.compute_infer.count for b in found.batch_stats}
        counted |= {
            "inferences": found.inference_count, "executions": found.execution_count,
            "success": times.success.count, "queue": times.queue.count,
            "input": times.compute_input.count, "output": times.compute_output.count,
        }  # fmt: skip
        return Counter(counted)


Sides = tuple[Side, Side]  # the real one, and ours


class Pair:
    """Both servers with the same models."""

    def __init__(self, models: Path, stack: ExitStack, log: Path) -> None:
        self._stack = stack
        options = ("--model-control-mode=none",)
        self._servers = (
            stack.enter_context(Triton(real_program(), models, log, options)),
            stack.enter_context(clean_server(models)),
        )

    def sides(self, door: str) -> Sides:
        """Clients over a protocol."""
        library = over_grpc if door == "grpc" else over_http
        real, ours = (
            Side(self._stack.enter_context(library.InferenceServerClient(address)), library)
            for address in (getattr(server, door) for server in self._servers)
        )
        return real, ours


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    root, log = tmp_path_factory.mktemp("models"), tmp_path_factory.mktemp("log") / "triton.log"
    write_all(root)
    with ExitStack() as stack:
        yield Pair(root, stack, log)


@pytest.fixture(scope="module", params=["grpc", "http"])
def sides(pair: Pair, request: pytest.FixtureRequest) -> Sides:
    return pair.sides(request.param)


def ids_of(model: str) -> list[Id]:
    """Ids for a model. Triton 24.10 gives its models texts of 128 characters alone."""
    return [letter * 128 for letter in "abc"] if "named" in model else [5, 2**33 + 9, 2**63 - 1]


# The number, which of the ids, and the flags of each request; some are errors.
_SCRIPT = [
    (1, 0, "s"), (2, 1, "s"), (3, 0, ""), (4, 2, "s"), (5, 2, ""), (6, 2, "e"), (7, 0, "s"),
    (REFUSED, 0, ""), (8, 0, ""), (9, 0, "e"), (10, 0, ""), (11, 1, "e"), (12, 1, "se"),
    (13, 1, "e"), (14, 1, ""),
]  # fmt: skip


def script(side: Side, model: str) -> list[Any]:
    """The answers; those of one sequence if ids are texts, since Triton fails with empty slots."""
    ids = ids_of(model)
    most = 0 if model == "named_direct" else len(ids)
    return [
        side.infer(model, number, ids[which], flags)
        for number, which, flags in _SCRIPT
        if which <= most
    ]


@pytest.mark.parametrize("controls", _CONTROLS)
@pytest.mark.parametrize("strategy", _STRATEGIES)
def test_controls_batches_and_errors(sides: Sides, strategy: str, controls: str) -> None:
    real, ours = sides
    model = f"{controls}_{strategy}"
    expected = script(real, model)
    assert script(ours, model) == expected
    assert any("must specify the START flag" in str(each) for each in expected)
    assert any("not this one" in each for each in expected)


@pytest.mark.parametrize("strategy", _STRATEGIES)
def test_seats_of_two_instances(sides: Sides, strategy: str) -> None:
    real, ours = sides

    def answers(side: Side) -> list[Any]:
        return [
            side.infer(f"both_{strategy}", number, id, flags)
            for flags in ("s", "", "e")
            for number, id in enumerate(range(1, 7))
        ]

    assert answers(ours) == answers(real)


def test_a_model_that_does_not_batch(sides: Sides) -> None:
    real, ours = sides
    for number, flags in enumerate(("s", "", "s", "e", "", "e")):
        expected = real.infer("plain", number, 4, flags)
        assert ours.infer("plain", number, 4, flags) == expected


@pytest.mark.parametrize(("id", "rows"), [(0, 1), ("", 1), (1, 2), (0, 2), (77, 1), ("", 2)])
@pytest.mark.parametrize("flags", ["s", "", "e"])
def test_invalid_requests(sides: Sides, id: Id, rows: int, flags: str) -> None:
    if (id, rows, flags) == (77, 1, "s"):
        flags = ""  # that is no error
    real, ours = sides
    for model in ("integers_direct", "integers_oldest"):
        expected = real.infer(model, 1, id, flags, rows=rows)
        assert isinstance(expected, tuple)
        assert ours.infer(model, 1, id, flags, rows=rows) == expected


def test_the_largest_id(pair: Pair) -> None:
    """Over gRPC it is a signed number."""
    for door, id in (("grpc", -1), ("http", 2**64 - 1)):
        for flags in ("s", "", "e"):
            real, ours = (side.infer("numbers_direct", 1, id, flags) for side in pair.sides(door))
            assert ours == real
            assert ours[2][0]["id"] == 2**64 - 1


@pytest.mark.parametrize("strategy", _STRATEGIES)
def test_timeouts_of_waiting_sequences(sides: Sides, strategy: str) -> None:
    """The timeout of a sequence with a seat has no effect."""
    real, ours = sides

    def answers(side: Side) -> list[Any]:
        model = f"single_{strategy}"
        return [
            side.infer(model, 1, 1, "s"), side.infer(model, 2, 2, "s", timeout=1_000),
            side.infer(model, 3, 2, "", timeout=1_000), side.infer(model, 4, 1, "e", timeout=1),
            side.infer(model, 5, 2, "se"),
        ]  # fmt: skip

    expected = answers(real)
    assert answers(ours) == expected
    assert "timeout of the corresponding sequence has been expired" in expected[1]


@pytest.mark.parametrize("strategy", _STRATEGIES)
def test_idle_sequences(sides: Sides, strategy: str) -> None:
    """The second one has its seat once the first one has been idle for too long."""
    real, ours = sides

    def answers(side: Side) -> list[Any]:
        model = f"brief_{strategy}"
        begun = [side.infer(model, 1, 1, "s"), side.infer(model, 2, 2, "s")]
        return [*begun, side.infer(model, 3, 1, ""), side.infer(model, 4, 1, "e")]

    expected = answers(real)
    assert answers(ours) == expected
    assert "must specify the START flag" in expected[2][1]


@pytest.mark.parametrize("strategy", _STRATEGIES)
def test_initial_states(sides: Sides, strategy: str) -> None:
    real, ours = sides
    for flags in ("s", "e", "se"):
        expected = real.infer(f"stateful_{strategy}", 1, 3, flags)
        assert ours.infer(f"stateful_{strategy}", 1, 3, flags) == expected
        assert expected[2][0]["FILE"] == ["float32", [1, 2], [1.5, -2]]


@pytest.mark.parametrize("strategy", _STRATEGIES)
def test_statistics(pair: Pair, strategy: str) -> None:
    """Without the request that the model refuses: Triton counts its answer as a success."""

    requests = [(1, 1, "s"), (2, 2, "s"), (3, 2, ""), (4, 9, ""), (5, 1, "e"), (6, 2, "se")]

    def counted(side: Side, expected: Counter[str] | None = None) -> Counter[str]:
        model = f"signed_{strategy}"
        before = side.counts(model)
        for number, id, flags in requests:
            side.infer(model, number, id, flags)
        if expected is not None:  # Triton may count what it has answered a moment ago
            with suppress(AssertionError):  # shown below
                until(lambda: side.counts(model) - before == expected, "the counts", 10)
        return side.counts(model) - before

    real, ours = pair.sides("grpc")
    expected = counted(ours)
    assert counted(real, expected) == expected
    assert expected["inferences"] == 5
    assert expected["of 2"] == (3 if strategy == "direct" else 0)


_DELAYED: dict[str, tuple[str, list[tuple[int, Id, str]]]] = {
    "one": ("direct { }", [(1, 1, "s"), (2, 2, "s"), (3, 1, ""), (4, 2, "e")]),
    "two": ("direct { }", [(id, id, "s") for id in (1, 2, 3, 4)]),
    "oldest": (
        "oldest { max_candidate_sequences: 4 }",
        [(1, 1, "s"), (2, 2, "s"), (3, 3, "s"), (4, 4, "se")],
    ),
    "oldest_two": (
        "oldest { max_candidate_sequences: 4 }", [(id, id, "s") for id in range(1, 9)],
    ),
}  # fmt: skip


def delayed(
    tmp_path_factory: pytest.TempPathFactory, requests: int, backlog: int, stack: ExitStack
) -> Path:
    """A folder of models whose first requests wait for one another."""
    patched = stack.enter_context(pytest.MonkeyPatch.context())
    patched.setenv("TRITONSERVER_DELAY_SCHEDULER", str(requests))
    patched.setenv("TRITONSERVER_BACKLOG_DELAY_SCHEDULER", str(backlog))
    return tmp_path_factory.mktemp("delayed")


@pytest.fixture(scope="module")
def delayed_sides(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sides]:
    with ExitStack() as stack:
        root = delayed(tmp_path_factory, 4, 0, stack)
        for name, (strategy, _) in _DELAYED.items():
            write(root, name, strategy, instances=1 + name.endswith("two"))
        for name, scheduler in (
            ("batched", "max_batch_size: 8 dynamic_batching { }"),
            ("plain", ""),
        ):
            config = f"{_TENSORS} instance_group {{ kind: KIND_CPU }} {scheduler}"
            write_python_model(root, name, _TELLER, config)
        yield Pair(root, stack, root.parent / "delayed.log").sides("grpc")


def _places(answers: dict[str, Any]) -> dict[str, Any]:
    """The number and size of the batch, and the place there, by the number of the request."""
    return {name: (batch, place, len(given)) for name, (batch, place, given) in answers.items()}


@pytest.mark.parametrize("model", _DELAYED)
def test_delayed_batches(delayed_sides: Sides, model: str) -> None:
    """Of two instances, any may have the first seat of a number."""
    real, ours = delayed_sides
    expected, found = (side.stream(model, _DELAYED[model][1]) for side in (real, ours))
    assert _places(found) == _places(expected)
    assert found == expected or model.endswith("two")


def test_a_delayed_dynamic_batch(delayed_sides: Sides) -> None:
    real, ours = delayed_sides
    requests: list[tuple[int, Id, str]] = [(number, 0, "") for number in (1, 2, 3, 4)]
    expected = real.stream("batched", requests)
    assert ours.stream("batched", requests) == expected
    assert [place for _, place, _ in expected.values()] == [0, 1, 2, 3]
    # From then on there is no delay; nor is there any without a batcher.
    for model in ("batched", "plain"):
        assert ours.infer(model, 1, 0) == real.infer(model, 1, 0)


def test_a_delayed_backlog(tmp_path_factory: pytest.TempPathFactory) -> None:
    with ExitStack() as stack:
        root = delayed(tmp_path_factory, 2, 2, stack)
        write(root, "direct", "direct { }", rows=1)
        write(root, "oldest", "oldest { max_candidate_sequences: 2 }", rows=2)
        real, ours = Pair(root, stack, root.parent / "backlog.log").sides("grpc")
        both: list[tuple[int, Id, str]] = [(1, 1, "s"), (2, 2, "s"), (3, 2, "e"), (4, 1, "e")]
        assert ours.stream("direct", both) == real.stream("direct", both)
        # With this strategy the backlog has no effect.
        both = [(1, 1, "s"), (2, 2, "s")]
        assert ours.stream("oldest", both) == real.stream("oldest", both)
