"""Drawings of ensembles."""

from xml.etree import ElementTree

import pytest

from headrace.plugins.ensembles.drawing import draw, drawing
from headrace.protocol.pb.model_config_pb2 import ModelConfig
from headrace.repository.config import parse_config
from tests.models.ensembles import ensemble, step

TEXT = ensemble(
    (("x<y", "FP32", "1"),),
    (("sum", "FP32", "1"),),
    step("left", {"A": "x<y"}, {"B": "a"}),
    step("right", {"A": "x<y"}, {"B": "b"}, version=2),
    step("meet", {"A": "a", "B": "b"}, {"C": "sum"}),
)


def config() -> ModelConfig:
    return parse_config(TEXT, "e").config


def test_boxes_are_in_the_order_of_the_steps() -> None:
    layers = {box.text: box.layer for box in drawing(config()).boxes.values()}
    assert layers == {"x<y": 0, "left": 1, "right 2": 1, "meet": 2, "sum": 3}


def test_steps_that_each_need_all_steps_of_the_layer_before() -> None:
    deep = ModelConfig(name="e")
    deep.input.add(name="a0")
    deep.input.add(name="b0")
    for layer in range(40):  # with 2^40 ways from the inputs to the output
        for name in "ab":
            made = deep.ensemble_scheduling.step.add(model_name="m")
            made.input_map.update({"A": f"a{layer}", "B": f"b{layer}"})
            made.output_map["C"] = f"{name}{layer + 1}"
    deep.output.add(name="a40")
    boxes = drawing(deep).boxes
    assert [boxes[f"step{number}"].layer for number in (0, 1, 2, 79)] == [1, 1, 2, 40]
    assert boxes["out0"].layer == 41


def test_mermaid() -> None:
    assert draw(config(), "mermaid").splitlines() == [
        "flowchart LR",
        '  in0(["x<y"])',
        '  step0["left"]',
        '  step1["right 2"]',
        '  step2["meet"]',
        '  out0(["sum"])',
        "  in0 --> step0",
        "  in0 --> step1",
        '  step0 -->|"a"| step2',
        '  step1 -->|"b"| step2',
        "  step2 --> out0",
    ]


def test_svg() -> None:
    root = ElementTree.fromstring(draw(config(), "svg"))
    space = "{http://www.w3.org/2000/svg}"
    assert root.tag == f"{space}svg"
    texts = [found.text for found in root.iter(f"{space}text")]
    assert sorted(filter(None, texts)) == ["a", "b", "left", "meet", "right 2", "sum", "x<y"]
    assert len(list(root.iter(f"{space}path"))) == 5


def test_a_model_without_steps() -> None:
    with pytest.raises(ValueError, match="model 'm' is no ensemble"):
        draw(ModelConfig(name="m"), "svg")
