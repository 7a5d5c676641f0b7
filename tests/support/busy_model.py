"""A model with requests of controlled cost and failure.

VALUE  INT64 [-1, 1]    returned as RESULT; outside of -1000 to 999 the run fails
COST   INT64 [-1, 1]    matrix multiplications, by the largest of the batch
RESULT INT64 [-1, 1]

One instance, on a thread of its own with one computing thread, so that the event loop stays free
while it runs.
"""

import json
from http.client import HTTPConnection
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

NAME = "busy"
POISON = 1_000_000  # a VALUE that makes the run fail
FOREVER = 1 << 40  # a COST that no test outlives
_SIZE = 192
_PROBES = 3
_TABLE = 1000

_CONFIG = """\
name: "{name}"
backend: "onnxruntime"
max_batch_size: {max_batch_size}
input [
  {{ name: "VALUE" data_type: TYPE_INT64 dims: [ 1 ] }},
  {{ name: "COST" data_type: TYPE_INT64 dims: [ 1 ] }}
]
output [ {{ name: "RESULT" data_type: TYPE_INT64 dims: [ 1 ] }} ]
instance_group [ {{ count: 1 kind: KIND_CPU }} ]
parameters [
  {{ key: "execution" value {{ string_value: "thread" }} }},
  {{ key: "intra_op_thread_count" value {{ string_value: "1" }} }}
]
{more}
"""


def write_busy_model(
    repository: Path, name: str = NAME, max_batch_size: int = 8, more: str = ""
) -> None:
    """Write the model to a repository; `more` is added to its configuration."""
    version = repository / name / "1"
    version.mkdir(parents=True)
    onnx.save(_model(), version / "model.onnx")
    config = _CONFIG.format(name=name, max_batch_size=max_batch_size, more=more)
    (repository / name / "config.pbtxt").write_text(config)


def busy_json(value: int, cost: int = 0, request_id: str = "") -> bytes:
    """A request of one row as JSON."""
    document = {
        "id": request_id,
        "inputs": [
            {"name": "VALUE", "datatype": "INT64", "shape": [1, 1], "data": [value]},
            {"name": "COST", "datatype": "INT64", "shape": [1, 1], "data": [cost]},
        ],
    }
    return json.dumps(document).encode()


def cost_of_a_second(address: str) -> int:
    """The COST of a second's work on the server at `address`: host:port of its HTTP door.

    By the fastest of a few runs, since others may be interrupted.
    """
    probe = 200
    body = json.loads(busy_json(0, probe)) | {"parameters": {"headrace_timing": True}}
    connection = HTTPConnection(address)
    runs: list[int] = []
    try:
        for _ in range(_PROBES):
            connection.request("POST", f"/v2/models/{NAME}/infer", json.dumps(body))
            answer = json.loads(connection.getresponse().read())
            runs.append(answer["parameters"]["compute_us"])
    finally:
        connection.close()
    return max(1, round(probe * 1_000_000 / min(runs)))


def _model() -> onnx.ModelProto:
    shift = np.roll(np.eye(_SIZE, dtype=np.float32), 1, axis=0)
    body = helper.make_graph(
        [
            helper.make_node("Identity", ["go"], ["go_on"]),
            helper.make_node("MatMul", ["state", "shift"], ["next_state"]),
        ],
        "work",
        [
            helper.make_tensor_value_info("turn", TensorProto.INT64, []),
            helper.make_tensor_value_info("go", TensorProto.BOOL, []),
            helper.make_tensor_value_info("state", TensorProto.FLOAT, [_SIZE, _SIZE]),
        ],
        [
            helper.make_tensor_value_info("go_on", TensorProto.BOOL, []),
            helper.make_tensor_value_info("next_state", TensorProto.FLOAT, [_SIZE, _SIZE]),
        ],
        [numpy_helper.from_array(shift, "shift")],
    )
    constants = {
        "start": shift, "yes": np.array(True), "zero": np.array(0, np.float32),
        "table": np.zeros(_TABLE, np.int64),
    }  # fmt: skip
    graph = helper.make_graph(
        [
            helper.make_node("ReduceMax", ["COST"], ["turns"], keepdims=0),
            helper.make_node("Gather", ["table", "VALUE"], ["looked_up"]),
            helper.make_node("Loop", ["turns", "yes", "start"], ["end"], body=body),
            helper.make_node("ReduceMax", ["end"], ["top"], keepdims=0),
            helper.make_node("Mul", ["top", "zero"], ["nothing"]),
            helper.make_node("Cast", ["nothing"], ["nothing_whole"], to=TensorProto.INT64),
            helper.make_node("Add", ["VALUE", "looked_up"], ["same"]),
            helper.make_node("Add", ["same", "nothing_whole"], ["RESULT"]),
        ],
        "busy",
        [helper.make_tensor_value_info(n, TensorProto.INT64, [None, 1]) for n in ("VALUE", "COST")],
        [helper.make_tensor_value_info("RESULT", TensorProto.INT64, [None, 1])],
        [numpy_helper.from_array(array, name) for name, array in constants.items()],
    )
    return helper.make_model(
        graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9, producer_name="headrace"
    )
