"""The progress of requests: against a slow reference on random graphs in random orders."""

from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import product
from random import Random
from zlib import crc32

import pytest

from headrace.core.tensors import Tensor
from headrace.plugins.ensembles.graph import Graph, make_graph, use_problems
from headrace.plugins.ensembles.progress import EnsembleProgress, Moves, Start
from tests.plugins.ensembles.graphs import Steps, described, graph_of, text, value

Inputs = Mapping[str, Tensor]


def answer(model: str, inputs: list[str], name: str, ordinal: int | None) -> str:
    """The output of a model of the reference, as a text of its inputs."""
    number = "" if ordinal is None else f"#{ordinal}"
    return f"{model}{number}({','.join(inputs)}).{name}"


def responses(model: str, inputs: list[str]) -> int:
    """The number of a decoupled model's responses."""
    return crc32(f"{model}{inputs}".encode()) % 3


class Reference:
    """The answers of an ensemble, found by following every output back to the request."""

    def __init__(self, steps: Steps, decoupled: list[str], given: Mapping[str, str]) -> None:
        self.steps = steps
        self.decoupled = decoupled
        self.given = given
        self.makers = {name: model for model, (_, made) in steps.items() for name in made}

    def before(self, tensor: str) -> list[str]:
        """The decoupled models that a tensor depends on, in the order of the steps."""
        if tensor in self.given:
            return []
        model = self.makers[tensor]
        found = {one for name in self.steps[model][0] for one in self.before(name)}
        return [one for one in self.steps if one in found or (one == model in self.decoupled)]

    def inputs(self, model: str, ordinals: Mapping[str, int]) -> list[str]:
        return [self.value(name, ordinals) for name in sorted(self.steps[model][0])]

    def value(self, tensor: str, ordinals: Mapping[str, int]) -> str:
        if tensor in self.given:
            return self.given[tensor]
        model = self.makers[tensor]
        return answer(model, self.inputs(model, ordinals), tensor, ordinals.get(model))

    def answers(self, outputs: list[str]) -> Iterator[list[str]]:
        models = max((self.before(name) for name in outputs), key=len)
        for numbers in product(range(3), repeat=len(models)):
            ordinals = dict(zip(models, numbers, strict=True))
            if all(n < responses(m, self.inputs(m, ordinals)) for m, n in ordinals.items()):
                yield [self.value(name, ordinals) for name in outputs]


class Models:
    """The models of a graph, whose calls end in any order."""

    def __init__(self, graph: Graph, random: Random) -> None:
        self.graph = graph
        self.random = random
        self.calls: list[tuple[Start, list[list[Tensor] | None]]] = []
        self.found: list[list[str]] = []
        self.started = Counter[str]()

    def run(self, progress: EnsembleProgress, inputs: Inputs) -> None:
        """Run a request to its end."""
        self._take(progress.begin(inputs))
        while self.calls:
            assert not progress.over or not self.graph.decoupled
            place = self.random.randrange(len(self.calls))
            start, left = self.calls[place]
            outputs = left.pop(0)
            final = not left
            if final:
                self.calls.pop(place)
            self._take(progress.answered(start, outputs, final))
            if progress.over:
                break
        assert progress.over
        assert not self.calls

    def _take(self, moves: Moves) -> None:
        self.found += [[value(tensor) for tensor in one] for one in moves.responses]
        for start in moves.starts:
            step = start.step
            inputs = [value(start.tensors[name]) for name in step.inputs]
            self.started[f"{step.model}({','.join(inputs)})"] += 1
            if step.number in self.graph.decoupled:
                numbers: list[int | None] = list(range(responses(step.model, inputs)))
            else:
                numbers = [None]
            left: list[list[Tensor] | None] = [
                [text(answer(step.model, inputs, name, n), name) for name in step.outputs]
                for n in numbers
            ]
            if not left or (step.number in self.graph.decoupled and self.random.random() < 0.5):
                left.append(None)
            self.calls.append((start, left))
        if self.graph.most:
            running = Counter(start.step.number for start, _ in self.calls)
            assert max(running.values(), default=0) <= self.graph.most


def random_steps(random: Random) -> tuple[Steps, list[str], list[str]]:
    """Steps that use what is there, decoupled ones, and outputs."""
    known, steps = ["x", "w"], {}
    for number in range(random.randint(1, 6)):
        given = random.sample(known, random.randint(1, min(3, len(known))))
        made = [f"t{number}{letter}" for letter in "ab"[: random.randint(1, 2)]]
        steps[f"m{number}"] = given, made
        known += made
    made = known[2:]
    decoupled = [model for model in steps if random.random() < 0.3]
    return steps, decoupled, random.sample(made, random.randint(1, min(3, len(made))))


@pytest.mark.parametrize("seed", range(300))
def test_random_graphs_answer_as_the_reference(seed: int) -> None:
    random = Random(seed)
    while True:
        steps, decoupled, outputs = random_steps(random)
        most = random.choice([0, 0, 1, 2])
        config, signature, used = described(["x", "w"], outputs, steps, decoupled, most)
        if not list(use_problems(config, signature, used)):
            break
    graph = make_graph(config, signature, used)
    models = Models(graph, random)
    given = {"x": "X", "w": "W"}
    models.run(
        EnsembleProgress(graph, ()), {name: text(said, name) for name, said in given.items()}
    )
    expected = list(Reference(steps, decoupled, given).answers(outputs))
    assert sorted(models.found) == sorted(expected)
    assert max(models.started.values()) == 1  # each step once for each set of its tensors


def ends(progress: EnsembleProgress) -> tuple[bool, bool]:
    return progress.over, progress.stuck


def test_responses_keep_the_order_of_the_decoupled_step() -> None:
    graph = graph_of(["x"], ["y"], {"many": (["x"], ["a"]), "after": (["a"], ["y"])}, ["many"])
    progress = EnsembleProgress(graph, ())
    [many] = progress.begin({"x": text("x")}).starts
    first = progress.answered(many, [text("1", "a")], False).starts
    second = progress.answered(many, [text("2", "a")], True).starts
    assert progress.answered(second[0], [text("B", "y")], True).responses == []
    both = progress.answered(first[0], [text("A", "y")], True).responses
    assert [value(tensor) for [tensor] in both] == ["A", "B"]
    assert progress.over


def test_a_response_without_an_output_is_given_without_it() -> None:
    steps: Steps = {"many": (["x"], ["a", "b"])}
    progress = EnsembleProgress(graph_of(["x"], ["a", "b"], steps, steps), ())
    [many] = progress.begin({"x": text("x")}).starts
    [found] = progress.answered(many, [text("1", "a")], False).responses
    assert [tensor.name for tensor in found] == ["a"]
    assert progress.answered(many, [], False).responses == []
    assert ends(progress) == (False, False)
    assert progress.answered(many, None, True).responses == []
    assert ends(progress) == (True, False)


def test_a_request_without_an_output_is_stuck() -> None:
    graph = graph_of(["x"], ["y"], {"one": (["x"], ["a"]), "two": (["a"], ["y"])})
    progress = EnsembleProgress(graph, ())
    [one] = progress.begin({"x": text("x")}).starts
    progress.answered(one, [], True)
    assert ends(progress) == (True, True)


def test_steps_wait_for_calls_of_their_own() -> None:
    steps: Steps = {"many": (["x"], ["a"]), "after": (["a"], ["y"])}
    progress = EnsembleProgress(graph_of(["x"], ["y"], steps, ["many"], most=1), ())
    [many] = progress.begin({"x": text("x")}).starts
    [first] = progress.answered(many, [text("1", "a")], False).starts
    assert progress.answered(many, [text("2", "a")], False).starts == []
    assert progress.throttled
    [second] = progress.answered(first, [text("A", "y")], True).starts
    progress.answered(many, None, True)
    assert ends(progress) == (False, False)
    progress.answered(second, [text("B", "y")], True)
    assert ends(progress) == (True, False)
