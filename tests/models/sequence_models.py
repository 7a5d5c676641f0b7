"""Models with sequences: each answers with the sum of a sequence's numbers so far."""

from pathlib import Path

from tests.models.onnx_graphs import running_sum, write_model
from tests.models.python_models import tensors, write_python_model

DIES, REFUSED = 666, 2_000  # numbers that the worker dies of, and that the model refuses
RAISES = 3_000  # one that the model raises for

CONTROLS = """
    control_input {
      name: "START" control { kind: CONTROL_SEQUENCE_START fp32_false_true: [ 0, 1 ] }
    }
    control_input {
      name: "READY" control { kind: CONTROL_SEQUENCE_READY int32_false_true: [ 0, 1 ] }
    }
    control_input {
      name: "END" control { kind: CONTROL_SEQUENCE_END bool_false_true: [ false, true ] }
    }
    control_input { name: "ID" control { kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_%s } }
"""

# It keeps the sums by place in the batch with the strategy `direct`, and by id with `oldest`. Its
# answers also tell the place, and how many requests the batch had.
ADDER = """
    import json
    import os

    import numpy as np
    import triton_python_backend_utils as pb_utils


    def output(name, number):
        return pb_utils.Tensor(name, np.array([[number]], np.int32))


    class TritonPythonModel:
        def initialize(self, args):
            config = json.loads(args["model_config"])
            self.by_place = "oldest" not in config["sequence_batching"]
            self.sums = {}

        def execute(self, requests):
            return [self.answer(n, len(requests), each) for n, each in enumerate(requests)]

        def answer(self, place, rows, request):
            given = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
            if not given["READY"].item():
                assert given["NUMBER"].item() == 0 and not given["ID"].item()
                return pb_utils.InferenceResponse([output("SUM", -1), output("PLACE", -1)])
            number, id = given["NUMBER"].item(), given["ID"].item()
            told = request.correlation_id()
            assert (told.encode() if isinstance(told, str) else told) == id, (told, id)
            flags = bool(given["START"].item()) + 2 * bool(given["END"].item())
            assert request.flags() == flags
            if number == 666:
                os._exit(1)
            if number == 3_000:
                raise ValueError("cannot add this")
            if number == 2_000:
                return pb_utils.InferenceResponse(error=pb_utils.TritonError("not this one"))
            key = place if self.by_place else id
            self.sums[key] = number + (0 if flags & 1 else self.sums[key])
            return pb_utils.InferenceResponse(
                [output("SUM", self.sums[key]), output("PLACE", place + 100 * rows)]
            )
"""


def write_adder(
    root: Path,
    name: str,
    strategy: str,
    *,
    rows: int = 4,
    instances: int = 1,
    idle_us: int = 30_000_000,
    id: str = "UINT64",
    more: str = "",
) -> None:
    """A Python model that adds up the numbers of a sequence; `id` is the type of its ids."""
    declared = tensors("input", ("NUMBER", "INT32", "1"))
    declared += tensors("output", ("SUM", "INT32", "1"), ("PLACE", "INT32", "1"))
    write_python_model(root, name, ADDER, f"""{declared}
        max_batch_size: {rows}
        instance_group {{ count: {instances} kind: KIND_CPU }}
        sequence_batching {{
          max_sequence_idle_microseconds: {idle_us}
          {strategy}
          {CONTROLS % id}
        }}
        {more}
    """)  # fmt: skip


# It counts down from the number of a sequence's start, one response for each time that it is run.
COUNTDOWN = """
    import numpy as np
    import triton_python_backend_utils as pb_utils


    class TritonPythonModel:
        def initialize(self, args):
            self.left = {}

        def execute(self, requests):
            for request in requests:
                given = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
                id = given["ID"].item()
                assert id == request.correlation_id()
                if not given["READY"].item():
                    request.get_response_sender().send(flags=1)
                    continue
                if given["START"].item():
                    assert request.flags() & 1
                    self.left[id] = given["NUMBER"].item()
                left = self.left[id]
                self.left[id] = left - 1
                last = left <= 1
                output = pb_utils.Tensor("LEFT", np.array([[left]], np.int32))
                request.get_response_sender().send(
                    pb_utils.InferenceResponse([output]), flags=int(last)
                )
                if not last:
                    request.set_release_flags(pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)
"""


def write_countdown(root: Path, name: str, strategy: str) -> None:
    """A decoupled model that asks for its requests to be run again."""
    declared = tensors("input", ("NUMBER", "INT32", "1"))
    declared += tensors("output", ("LEFT", "INT32", "1"))
    write_python_model(root, name, COUNTDOWN, f"""{declared}
        max_batch_size: 4
        model_transaction_policy {{ decoupled: true }}
        sequence_batching {{ iterative_sequence: true {strategy} {CONTROLS % "UINT64"} }}
    """)  # fmt: skip


# The start of a sequence has no response, and ends after its cancellation, once a file is there;
# other requests are answered with the number of starts that have not ended.
LINGERING = """
    import json
    import time
    from pathlib import Path
    from threading import Thread

    import numpy as np
    import triton_python_backend_utils as pb_utils


    class TritonPythonModel:
        def initialize(self, args):
            parameters = json.loads(args["model_config"])["parameters"]
            self.folder = Path(parameters["folder"]["string_value"])
            self.open = 0

        def execute(self, requests):
            for request in requests:
                sender = request.get_response_sender()
                if request.flags() & 1:
                    self.open += 1
                    Thread(target=self.linger, args=(sender,)).start()
                    continue
                output = pb_utils.Tensor("LEFT", np.array([[self.open]], np.int32))
                sender.send(pb_utils.InferenceResponse([output]), flags=1)

        def linger(self, sender):
            (self.folder / "begun").touch()
            while not sender.is_cancelled():
                time.sleep(0.002)
            (self.folder / "cancelled").touch()
            while not (self.folder / "end").exists():
                time.sleep(0.002)
            self.open -= 1
            sender.send(flags=1)
"""


def write_lingering(root: Path, name: str, folder: Path) -> None:
    """A decoupled model that goes on with cancelled requests; `folder` is for its files."""
    declared = tensors("input", ("NUMBER", "INT32", "1"))
    declared += tensors("output", ("LEFT", "INT32", "1"))
    write_python_model(root, name, LINGERING, f"""{declared}
        max_batch_size: 1
        model_transaction_policy {{ decoupled: true }}
        sequence_batching {{ oldest {{ max_candidate_sequences: 4 }} {CONTROLS % "UINT64"} }}
        parameters {{ key: "folder" value {{ string_value: "{folder}" }} }}
    """)  # fmt: skip


# The server keeps its sum, and gives it back at the next request.
STATELESS = """
    import numpy as np
    import triton_python_backend_utils as pb_utils


    class TritonPythonModel:
        def execute(self, requests):
            responses = []
            for request in requests:
                given = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
                total = given["NUMBER"] + given["BEFORE"]
                text = given["LOG"].item() + b"%d;" % given["NUMBER"].item()
                responses.append(pb_utils.InferenceResponse([
                    pb_utils.Tensor("SUM", total), pb_utils.Tensor("AFTER", total),
                    pb_utils.Tensor("LOG_OUT", np.array([[text]], object)),
                ]))
            return responses
"""


def write_stateless(root: Path, name: str, strategy: str) -> None:
    """A Python model whose states are kept by the server; clients see the text alone."""
    declared = tensors("input", ("NUMBER", "INT32", "1"))
    declared += tensors("output", ("SUM", "INT32", "1"), ("LOG_OUT", "STRING", "1"))
    write_python_model(root, name, STATELESS, f"""{declared}
        max_batch_size: 4
        sequence_batching {{
          max_sequence_idle_microseconds: 30000000
          {strategy}
          state {{
            input_name: "BEFORE" output_name: "AFTER" data_type: TYPE_INT32 dims: [ 1 ]
            initial_state {{ data_type: TYPE_INT32 dims: [ 1 ] zero_data: true name: "none" }}
          }}
          state {{ input_name: "LOG" output_name: "LOG_OUT" data_type: TYPE_STRING dims: [ 1 ] }}
        }}
    """)  # fmt: skip


def write_running_sum(
    root: Path,
    name: str,
    strategy: str,
    *,
    initial: str = "zero_data: true dims: [ 1 ]",
    outputs: str = '"SUM" "BEGAN"',
    width: int = 1,
    more: str = "",
) -> Path:
    """An ONNX model whose sum so far is kept by the server; `more` are fields of its `state`."""
    dims = {"SUM": width, "STATE_OUT": width, "BEGAN": 1}
    declared = "".join(
        f'output {{ name: "{one}" data_type: TYPE_FP32 dims: [ {dims[one]} ] }}\n'
        for one in outputs.replace('"', "").split()
    ).replace('"BEGAN" data_type: TYPE_FP32 dims: [ 1 ]',
              '"BEGAN" data_type: TYPE_FP32 dims: [ 1 ] reshape { shape: [ ] }')  # fmt: skip
    return write_model(root, name, running_sum(), f"""
        max_batch_size: 4
        input {{ name: "X" data_type: TYPE_FP32 dims: [ {width} ] }}
        {declared}
        instance_group {{ count: 2 kind: KIND_CPU }}
        sequence_batching {{
          max_sequence_idle_microseconds: 30000000
          {strategy}
          control_input {{
            name: "START" control {{ kind: CONTROL_SEQUENCE_START fp32_false_true: [ 0, 1 ] }}
          }}
          state {{
            input_name: "STATE" output_name: "STATE_OUT" data_type: TYPE_FP32 dims: [ {width} ]
            initial_state {{ name: "begin" data_type: TYPE_FP32 {initial} }}
            {more}
          }}
        }}
    """)  # fmt: skip
