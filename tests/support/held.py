"""Models on threads that run for as long as a test wants.

VALUE   INT64 [-1, 1]   returned as OUTPUT0; a batch with the number of a closed gate waits
TURN    INT64 [-1, 1]   number of earlier batches of this model, and this one

There is one instance, of 8 rows, unless the configuration says otherwise. Waiting needs no
computing, so that a busy machine changes nothing.
"""

from pathlib import Path

from tests.models.python_models import execution, tensors, write_python_model

_MODEL = """
    import json
    import time
    from itertools import count
    from pathlib import Path

    import numpy as np
    import triton_python_backend_utils as pb_utils

    TURNS = count(1)


    class TritonPythonModel:
        def initialize(self, args):
            parameters = json.loads(args["model_config"])["parameters"]
            self.gates = Path(parameters["gates"]["string_value"])

        def execute(self, requests):
            turn = next(TURNS)
            inputs = [pb_utils.get_input_tensor_by_name(r, "VALUE") for r in requests]
            values = [tensor.as_numpy() for tensor in inputs]
            for number in np.unique(np.concatenate(values)).tolist():
                while (self.gates / str(number)).exists():
                    time.sleep(0.002)
                if number >= 1_000_000:
                    (self.gates / f"{number}.passed").touch()
            return [
                pb_utils.InferenceResponse([
                    pb_utils.Tensor("OUTPUT0", value),
                    pb_utils.Tensor("TURN", np.full_like(value, turn)),
                ])
                for value in values
            ]
"""


_SIGNATURE = tensors("input", ("VALUE", "INT64", "1")) + tensors(
    "output", ("OUTPUT0", "INT64", "1"), ("TURN", "INT64", "1")
)


class Gates:
    """The gates of such models, files in `folder`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def close(self, number: int) -> None:
        (self.folder / str(number)).touch()

    def open(self, *numbers: int) -> None:
        """Open these gates, or all of them."""
        for gate in self.folder.iterdir():
            if not gate.suffix and (not numbers or int(gate.name) in numbers):
                gate.unlink()

    def passed(self, number: int) -> bool:
        """True once a batch with this number, of at least a million, has been computed."""
        return (self.folder / f"{number}.passed").exists()


def write_held_model(
    root: Path, name: str, gates: Path, batching: str = "", rows: int = 8, instances: int = 1
) -> None:
    """A model with gates in a folder of its own."""
    write_python_model(
        root, name, _MODEL,
        f"max_batch_size: {rows}\ninstance_group {{ count: {instances} }}\n{batching}\n"
        f'parameters {{ key: "gates" value {{ string_value: "{gates}" }} }}\n'
        + execution("thread") + _SIGNATURE,
    )  # fmt: skip
