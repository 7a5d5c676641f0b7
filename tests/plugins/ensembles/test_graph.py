"""The graph of an ensemble: domains, plans, and changes of shape."""

from dataclasses import replace

import numpy as np
import pytest

from headrace.core.datatypes import Datatype
from headrace.core.signature import Signature, TensorSpec
from headrace.core.tensors import Tensor
from headrace.plugins.ensembles.graph import Fit, make_graph, use_problems
from tests.plugins.ensembles.graphs import Steps, described, graph_of

STEPS: Steps = {
    "source": (["x"], ["a"]),
    "left": (["a"], ["b"]),
    "right": (["a"], ["c"]),
    "meet": (["b", "c"], ["y", "z"]),
}


def test_steps_after_a_decoupled_one_are_in_its_domain() -> None:
    graph = graph_of(["x"], ["y", "z"], STEPS, ["source"])
    assert list(graph.domains) == [(), (0,), (0,), (0,)]
    assert graph.plan(()).domain == (0,)
    nested = graph_of(["x"], ["y"], {
        "one": (["x"], ["a"]), "two": (["a"], ["b"]), "three": (["a", "b"], ["y"]),
    }, ["one", "two"])  # fmt: skip
    assert list(nested.domains) == [(), (0,), (0, 1)]


def test_a_plan_has_the_steps_that_its_outputs_need() -> None:
    graph = graph_of(["x"], ["b", "c"], {name: STEPS[name] for name in ("source", "left", "right")})
    assert graph.plan(()).outputs == ("b", "c")
    assert graph.plan(()).consumers == {"x": (0,), "a": (1, 2)}
    assert graph.plan(("c",)).consumers == {"x": (0,), "a": (2,)}
    assert graph.plan(("c",)) is graph.plan(("c",))


def test_a_model_is_asked_for_the_outputs_that_are_needed() -> None:
    graph = graph_of(["x"], ["y", "z"], STEPS)
    assert graph.plan(()).wanted[3] == ()
    assert graph.plan(("z",)).wanted[3] == ("z",)


@pytest.mark.parametrize(("decoupled", "text"), [
    (["left", "right"], "needs tensors of different decoupled models"),
    (["left"], ""),
    (["source"], ""),
])  # fmt: skip
def test_responses_of_different_models_do_not_belong_together(
    decoupled: list[str], text: str
) -> None:
    problems = [said for _, said in use_problems(*described(["x"], ["y", "z"], STEPS, decoupled))]
    assert len(problems) == bool(text)
    assert all(text in said for said in problems)


def test_outputs_of_different_decoupled_models() -> None:
    steps = {"left": (["x"], ["b"]), "right": (["x"], ["c"])}
    [(path, said)] = use_problems(*described(["x"], ["b", "c"], steps, steps))
    assert path == "output"
    assert "come from different decoupled models" in said


@pytest.mark.parametrize(("fit", "shape", "expected"), [
    (Fit(False, True, (3,)), (3,), (1, 3)),
    (Fit(False, True, (-1,)), (3,), (1, 3)),
    (Fit(False, True, (3,)), (2, 3), (2, 3)),  # rows that are declared as a dimension
    (Fit(True, False, (3,)), (1, 3), (3,)),
    (Fit(True, False, (-1, 3)), (1, 3), (1, 3)),
    (Fit(True, False, (3,)), (2, 3), (2, 3)),  # refused by its consumer
])  # fmt: skip
def test_changes_of_shape_at_edges(
    fit: Fit, shape: tuple[int, ...], expected: tuple[int, ...]
) -> None:
    array = np.arange(np.prod(shape)).reshape(shape)
    fitted = fit(array)
    assert fitted.shape == expected
    assert np.shares_memory(np.asarray(fitted), array)


def test_an_output_that_clients_see_with_an_axis_more_than_its_model() -> None:
    config, signature, used = described(["x"], ["y"], {"m": (["x"], ["y"])})
    seen = TensorSpec("y", Datatype.FP32, (1,), reshape=())
    signature = replace(signature, outputs=(seen,))
    each = (TensorSpec("y", Datatype.FP32, ()),)  # a number a row
    used = {name: Signature("m", 4, model.inputs, each) for name, model in used.items()}
    assert list(use_problems(config, signature, used)) == []
    made = Tensor("y", Datatype.FP32, np.ones(1, np.float32))
    assert make_graph(config, signature, used).fitted(-1, "y", made).array.shape == ()
