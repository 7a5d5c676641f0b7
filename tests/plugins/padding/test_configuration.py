"""The parameter of padding: what it means, and refusals that name the tensor."""

import json
from typing import Any

import pytest

from headrace.core.datatypes import Datatype
from headrace.plugins.padding.configuration import Misfit, read_dims
from headrace.plugins.padding.decisions import FilledInput, PaddedAxis, PaddedDim
from headrace.protocol.pb.model_config_pb2 import ModelConfig
from headrace.repository.config import parse_config
from tests.models.python_models import tensors

IO = (
    "max_batch_size: 4\n"
    + tensors(
        "input", ("IDS", "INT32", "-1"), ("IMAGE", "FP16", "-1, 3, -1"), ("TEXT", "STRING", "-1"),
        ("FLAG", "BOOL", "-1"), ("MASK", "INT64", "-1"), ("LENGTH", "FP32", "1"),
    )
    + 'input { name: "SHAPED" data_type: TYPE_FP32 dims: -1 reshape { shape: [ 1, -1 ] } }\n'
    + 'input { name: "RAGGED" data_type: TYPE_FP32 dims: -1 allow_ragged_batch: true }\n'
    + 'input { name: "OPTIONAL" data_type: TYPE_FP32 dims: -1 optional: true }\n'
    + tensors("output", ("OUT", "FP32", "5, -1"), ("CLASS", "FP32", "5"))
)  # fmt: skip
GOOD = {"buckets": [2, 8], "inputs": {"IDS": {}}}


def config(told: object, io: str = IO) -> ModelConfig:
    """A configuration with this parameter: text, or what becomes JSON."""
    found = parse_config(io, "m/config.pbtxt").config
    text = told if isinstance(told, str) else json.dumps(told)
    found.parameters["pad_to_buckets"].string_value = text
    return found


def test_dimensions() -> None:
    told = {
        "tokens": {
            "buckets": [32, 64], "mask": "MASK", "lengths": "LENGTH", "outputs": {"OUT": {}},
            "inputs": {
                "IDS": {"value": -1}, "TEXT": {"axis": 0}, "FLAG": {}, "OPTIONAL": {"value": 2},
            },
        },
        "width": {"buckets": [7], "inputs": {"IMAGE": {"axis": 2, "value": 0.5}}},
    }  # fmt: skip
    inputs = {
        "IDS": PaddedAxis(0, -1), "TEXT": PaddedAxis(0, b""), "FLAG": PaddedAxis(0, False),
        "OPTIONAL": PaddedAxis(0, 2.0),
    }  # fmt: skip
    assert read_dims(config(told)) == (
        PaddedDim(
            "tokens", (32, 64), inputs, {"OUT": 1}, FilledInput("MASK", Datatype.INT64),
            FilledInput("LENGTH", Datatype.FP32),
        ),
        PaddedDim("width", (7,), {"IMAGE": PaddedAxis(2, 0.5)}),
    )  # fmt: skip


def test_values_that_are_no_number_of_json() -> None:
    text = '{"t": {"buckets": [1], "inputs": {"IMAGE": {"axis": 0, "value": -Infinity}}}}'
    [dim] = read_dims(config(text))
    assert dim.inputs["IMAGE"].value == float("-inf")


def of_input(name: str, **told: Any) -> dict[str, object]:
    return {"t": GOOD | {"inputs": {name: told}}}


@pytest.mark.parametrize(
    ("told", "problem"),
    [
        ("longest", "must be JSON of dimensions by name, such as"),
        ({}, "must be JSON of dimensions by name, such as"),
        (
            {"t": 5},
            "t: must be an object with ['buckets','inputs','outputs','mask','lengths'], got 5",
        ),
        ({"t": GOOD | {"bucket": []}}, "t: 'bucket' is not one of ['buckets',"),
        (
            {"t": GOOD | {"buckets": []}},
            "t.buckets: must be ascending whole numbers above 0, got []",
        ),
        ({"t": GOOD | {"buckets": [0, 4]}}, "t.buckets: must be ascending"),
        ({"t": GOOD | {"buckets": [8, 8]}}, "t.buckets: must be ascending"),
        ({"t": GOOD | {"buckets": [True]}}, "t.buckets: must be ascending"),
        ({"t": GOOD | {"buckets": [1 << 40]}}, "t.buckets: must be ascending"),
        ({"t": {"buckets": [1]}}, "t.inputs: must be an object, got None"),
        ({"t": GOOD | {"inputs": {}}}, "t.inputs: needs an input that is not optional"),
        (of_input("OPTIONAL"), "t.inputs: needs an input that is not optional"),
        (of_input("NONE"), "t.inputs['NONE']: there is no such input, but ['IDS','IMAGE',"),
        (of_input("IDS", values=1), "t.inputs['IDS']: 'values' is not one of ['axis','value']"),
        (of_input("LENGTH"), "t.inputs['LENGTH']: its dims [1] have no variable size"),
        (of_input("SHAPED"), "t.inputs['SHAPED']: it cannot be combined with reshape"),
        (of_input("RAGGED"), "t.inputs['RAGGED']: it cannot be combined with allow_ragged_batch"),
        (
            of_input("IMAGE"),
            "t.inputs['IMAGE'].axis: must be one of [0, 2], which its dims [-1,3,-1] leave",
        ),
        (
            of_input("IMAGE", axis=1),
            "t.inputs['IMAGE'].axis: must be one of [0, 2], which its dims [-1,3,-1] leave",
        ),
        (
            of_input("IDS", value=1 << 31),
            "t.inputs['IDS'].value: must be a value of INT32, got 2147483648",
        ),
        (of_input("IDS", value=0.5), "t.inputs['IDS'].value: must be a value of INT32, got 0.5"),
        (of_input("IDS", value=True), "t.inputs['IDS'].value: must be a value of INT32, got True"),
        (of_input("IMAGE", axis=0, value=1e9), "t.inputs['IMAGE'].value: must be a value of FP16"),
        (of_input("TEXT", value=0), "t.inputs['TEXT'].value: must be a value of BYTES, got 0"),
        (of_input("FLAG", value=0), "t.inputs['FLAG'].value: must be a value of BOOL, got 0"),
        (
            {"t": GOOD | {"outputs": {"IDS": {}}}},
            "t.outputs['IDS']: there is no such output, but ['OUT','CLASS']",
        ),
        (
            {"t": GOOD | {"outputs": {"CLASS": {}}}},
            "t.outputs['CLASS']: its dims [5] have no variable size",
        ),
        (
            {"t": GOOD | {"outputs": {"OUT": {"axis": 0}}}},
            "t.outputs['OUT'].axis: must be one of [1]",
        ),
        ({"t": GOOD | {"mask": "OUT"}}, "t.mask: must be one of the inputs ['IDS',"),
        ({"t": GOOD | {"mask": "TEXT"}}, "t.mask: 'TEXT' must have numbers, not BYTES"),
        ({"t": GOOD | {"mask": "SHAPED"}}, "t.mask: 'SHAPED' must have dims [-1], and neither"),
        ({"t": GOOD | {"mask": "RAGGED"}}, "t.mask: 'RAGGED' must have dims [-1], and neither"),
        ({"t": GOOD | {"lengths": "MASK"}}, "t.lengths: 'MASK' must have dims [1], and neither"),
        ({"t": GOOD | {"mask": "IDS"}}, "t.inputs['IDS']: it is t.mask"),
        ({"t": GOOD, "u": GOOD}, "u.inputs['IDS']: axis 0 is that of 't', too"),
        (
            {
                "t": GOOD | {"mask": "MASK"},
                "u": {"buckets": [1], "inputs": {"FLAG": {}}, "mask": "MASK"},
            },
            "u.mask: 'MASK' is t.mask, too",
        ),
        (
            {
                "t": {"buckets": [1], "inputs": {"IMAGE": {"axis": 0}}},
                "u": {"buckets": [1], "inputs": {"IMAGE": {"axis": 2, "value": 1}}},
            },
            "u.inputs['IMAGE']: it has two values, 0.0 and 1.0",
        ),
    ],
)
def test_refusals(told: object, problem: str) -> None:
    with pytest.raises(Misfit) as refused:
        read_dims(config(told))
    assert str(refused.value).startswith(problem)


def test_a_model_that_does_not_batch() -> None:
    with pytest.raises(Misfit, match="needs a max_batch_size"):
        read_dims(config({"t": GOOD}, IO.replace("max_batch_size: 4", "max_batch_size: 0")))
