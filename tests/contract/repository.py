"""The model repository of the contract suite."""

from pathlib import Path

from headrace.core.datatypes import Datatype
from tests.contract import graphs
from tests.models.onnx_graphs import add_sub, identity, lookup, write_model
from tests.models.python_models import tensors, write_python_model
from tests.support.held import write_held_model

_HOLD = 'parameters { key: "execution" value { string_value: "thread" } }'
_ONE_INSTANCE = "instance_group { count: 1 }"
_TWO_INSTANCES = "instance_group { count: 2 }"


def write_repository(root: Path) -> None:
    """Write every model of the suite's main server."""
    for datatype in Datatype:
        model = identity(datatype, ["rows", "length"])
        write_model(root, f"identity_{datatype}", model, "max_batch_size: 8")
    write_model(root, "simple", add_sub(Datatype.INT32, 16), _SIMPLE)
    write_model(root, "bare", add_sub(width=3))
    write_model(root, "unbatched", add_sub(width=3), _UNBATCHED)
    one = identity(Datatype.BYTES, ["rows", 1])
    write_model(root, "one_string", one, "max_batch_size: 8")
    write_model(root, "scalar", identity(Datatype.FP64, []))
    write_model(
        root, "matrix", identity(Datatype.FP32, ["rows", "high", "wide"]), "max_batch_size: 4"
    )
    write_model(root, "row_sum", graphs.row_sum(), "max_batch_size: 8")
    write_model(root, "optional_bias", graphs.optional_bias(), _OPTIONAL_BIAS)
    write_model(root, "convert", graphs.convert(), "max_batch_size: 8")
    write_model(root, "flat", identity(Datatype.FP32, ["rows"]), _FLAT)
    write_model(root, "folded", identity(Datatype.FP32, ["rows", 4]), _FOLDED)
    write_model(root, "ranked", identity(Datatype.FP32, ["rows", 4]), _RANKED)
    (root / "ranked" / "names.txt").write_text("zero\none\ntwo\n")
    write_model(root, "spaced out \u00fc+%", graphs.add_constant(1), "max_batch_size: 8")
    write_model(root, "two_unknown", identity(Datatype.FP32, ["high", "wide"]), "max_batch_size: 0")
    write_model(root, "lookup", lookup(), "max_batch_size: 8")
    write_model(root, "decoupled", graphs.add_constant(1), _DECOUPLED)
    _add_scheduled(root, "spin_delay")
    _add_scheduled(root, "spin_priority")
    for policy, config in _POLICIES.items():
        for number in (1, 2, 3, 10):
            graph = graphs.add_constant(number)
            write_model(root, f"versions_{policy}", graph, config, version=number)


def write_busy_repository(root: Path, gates: Path) -> None:
    """Models with controlled duration, one for each scheduling policy.

    They have a server of their own: tests poll its metrics, which get slower with every model. It
    must allow in-process Python models.
    """
    for name in ("spin", "spin_two"):
        _add_scheduled(root, name)
    for name, (rows, instances, batching) in _HELD.items():
        write_held_model(root, name, gates, batching, rows, instances)
    write_model(root, "preferred", graphs.add_constant(1), f"max_batch_size: 8\n{_PREFERRED}")
    write_model(root, "patient", graphs.add_constant(1), f"max_batch_size: 8\n{_PATIENT}")
    write_model(root, "lookup", lookup(), "max_batch_size: 8")
    write_model(root, "row_sum", graphs.row_sum(), "max_batch_size: 8")
    write_model(root, "first_row", graphs.first_row(), "max_batch_size: 8")


def write_failing_repository(root: Path) -> Path:
    """One good model, three that cannot be loaded, and `late`; the file that holds its load."""
    write_model(root, "good", graphs.add_constant(1), "max_batch_size: 8")
    write_model(root, "broken", b"not a model")
    write_model(root, "hollow", b"\x08\x07")  # of format 7, without a graph
    write_model(root, "unheard_of", graphs.add_constant(1), _UNHEARD_OF)
    return write_late_model(root, "late")


# It answers with its process.
_LATE = """
    import os, time
    import numpy as np
    import triton_python_backend_utils as pb_utils


    class TritonPythonModel:
        def initialize(self, args):
            while os.path.exists(os.path.join(args["model_repository"], "wait")):
                time.sleep(0.01)

        def execute(self, requests):
            pid = np.array([[os.getpid()]], np.int64)
            answer = pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", pid)])
            return [answer for _ in requests]
"""


def write_late_model(root: Path, name: str) -> Path:
    """A model in a worker, which starts only while there is no file at the returned path."""
    signature = tensors("input", ("INPUT0", "FP32", "1"))
    signature += tensors("output", ("OUTPUT0", "INT64", "1"))
    write_python_model(root, name, _LATE, f"max_batch_size: 4\n{signature}")
    return root / name / "wait"


def write_small_repository(root: Path) -> None:
    write_model(root, "identity", identity(Datatype.FP32, ["rows", "length"]), "max_batch_size: 8")
    write_model(root, "spin", graphs.spin(), f"max_batch_size: 8\n{_ONE_INSTANCE}\n{_HOLD}")


def _add_scheduled(root: Path, name: str) -> None:
    max_batch_size, instances, batching = _SCHEDULED[name]
    config = f"max_batch_size: {max_batch_size}\n{instances}\n{_HOLD}\n{batching}"
    write_model(root, name, graphs.spin(), config)


_SIMPLE = """
name: "simple"
platform: "onnxruntime_onnx"
max_batch_size: 8
input [
  { name: "INPUT0" data_type: TYPE_INT32 dims: [ 16 ] },
  { name: "INPUT1" data_type: TYPE_INT32 dims: [ 16 ] }
]
output [
  { name: "OUTPUT0" data_type: TYPE_INT32 dims: [ 16 ] },
  { name: "OUTPUT1" data_type: TYPE_INT32 dims: [ 16 ] }
]
metric_tags { key: "team" value: "contract" }
"""

_UNBATCHED = """
max_batch_size: 0
input [ { name: "INPUT0" dims: [ 2, 3 ] }, { name: "INPUT1" dims: [ 2, 3 ] } ]
output [ { name: "OUTPUT0" dims: [ 2, 3 ] }, { name: "OUTPUT1" dims: [ 2, 3 ] } ]
"""

_DECOUPLED = """
max_batch_size: 8
model_transaction_policy { decoupled: true }
"""

_OPTIONAL_BIAS = """
max_batch_size: 0
input [ { name: "INPUT0" }, { name: "BIAS" optional: true } ]
"""

_RANKED = """
max_batch_size: 8
output { name: "OUTPUT0" label_filename: "names.txt" }
"""

# The model has no axis for its one value per row; clients see one.
_FLAT = """
max_batch_size: 8
input { name: "INPUT0" data_type: TYPE_FP32 dims: [ 1 ] reshape { shape: [ ] } }
output { name: "OUTPUT0" data_type: TYPE_FP32 dims: [ 1 ] reshape { shape: [ ] } }
"""

_FOLDED = """
max_batch_size: 8
input { name: "INPUT0" data_type: TYPE_FP32 dims: [ 2, 2 ] reshape { shape: [ 4 ] } }
output { name: "OUTPUT0" data_type: TYPE_FP32 dims: [ 4, 1 ] reshape { shape: [ 4 ] } }
"""

_POLICIES = {
    "default": None,
    "latest": "version_policy { latest { num_versions: 2 } }",
    "all": "version_policy { all { } }",
    "specific": "version_policy { specific { versions: [ 1, 3 ] } }",
}

_UNHEARD_OF = """
max_batch_size: 8
dynamic_batching { default_queue_policy { timeout_action: 7 } }
"""

_PREFERRED = """
dynamic_batching { preferred_batch_size: [ 4 ] max_queue_delay_microseconds: 20000000 }
"""

_PATIENT = "dynamic_batching { max_queue_delay_microseconds: 150000 }"

_LIMITED = "dynamic_batching { default_queue_policy { max_queue_size: 2 } }"
_DELAY = """dynamic_batching { default_queue_policy { timeout_action: DELAY
    default_timeout_microseconds: 60000000 allow_timeout_override: true } }"""
_PRIORITY = """dynamic_batching { priority_levels: 2 default_priority_level: 2
    priority_queue_policy { key: 1 value { max_queue_size: 1 } } }"""

_SCHEDULED = {
    "spin": (8, _ONE_INSTANCE, ""), "spin_two": (1, _TWO_INSTANCES, ""),
    "spin_delay": (1, _ONE_INSTANCE, _DELAY), "spin_priority": (1, _ONE_INSTANCE, _PRIORITY),
}  # fmt: skip

_HELD = {
    "held": (8, 1, ""),
    "held_two": (1, 2, ""),
    "held_ordered": (1, 2, "dynamic_batching { preserve_ordering: true }"),
    "held_limited": (1, 1, _LIMITED),
    "held_reject": (
        1, 1, "dynamic_batching { default_queue_policy { default_timeout_microseconds: 1500000 } }",
    ),
    "held_override": (
        1,
        1,
        """dynamic_batching { default_queue_policy {
             default_timeout_microseconds: 60000000 allow_timeout_override: true } }""",
    ),
    "held_delay": (1, 1, _DELAY),
    "held_priority": (1, 1, _PRIORITY),
    "held_levels": (
        1, 1,
        f"dynamic_batching {{ priority_levels: {2**64 - 1}"
        f" default_priority_level: {2**64 - 2} }}",
    ),
}  # fmt: skip
