"""Warm-up runs, in process and in workers with all kinds of answers."""

import logging
from functools import partial
from pathlib import Path
from textwrap import indent

import numpy as np
import psutil
import pytest

from headrace.core.datatypes import Datatype
from headrace.core.errors import ExecutionFailed, LoadFailed
from headrace.core.signature import Signature, TensorSpec
from headrace.placement.warming import Sample, given, random, warm_up
from headrace.placement.worker.loaded_worker import LoadedWorker
from headrace.placement.worker.python_backend import PythonBackend
from headrace.protocol.pb.model_config_pb2 import ModelConfig
from headrace.repository import reading
from headrace.scheduling.batch import Batch, Outcome
from tests.placement.worker.specs import spec

X = TensorSpec("X", Datatype.FP32, (2,))
SIGNATURE = Signature("m", 4, (X,), (TensorSpec("Y", Datatype.FP32, (2,)),))


def sample(name: str = "s", batch_size: int = 1, count: int = 1, fill: float = 0) -> Sample:
    """Samples for `SIGNATURE`."""
    make = partial(given, "X", Datatype.FP32, (np.full((1, 2), fill, np.float32),))
    return Sample(name, batch_size, count, {"X": make})


class Model:
    """A model in process that returns its input."""

    def __init__(self) -> None:
        self.rows: list[int] = []

    def run(self, batch: Batch) -> Outcome:
        """Run a batch."""
        given = np.asarray(batch.gather()["X"])
        self.rows.append(batch.rows)
        error: Exception | None = None
        if (given == 7).any():
            error = ValueError("/secret/place: seven")
        if (given == 8).any():
            error = ExecutionFailed("eight")
        wide = (given == 9).any()
        return Outcome([given[:, :1] if wide else given], error, 0, 0, 0)


def test_a_sample_is_a_batch_of_requests() -> None:
    model = Model()
    warm_up(model.run, SIGNATURE, "1", [sample(), sample(batch_size=3, count=2), sample()])
    assert model.rows == [1, 3, 3, 1]
    warm_up(model.run, SIGNATURE, "1", ())


@pytest.mark.parametrize(
    ("fill", "told", "public"),
    [
        (7, "/secret/place: seven", "model 'm' failed to execute the request"),
        (8, "eight", "eight"),
        (9, "model 'm' gave output 'Y' of shape [1,1]", "model 'm' gave output 'Y' of shape [1,1]"),
    ],
)
def test_a_sample_that_fails_is_named(fill: float, told: str, public: str) -> None:
    model = Model()
    with pytest.raises(LoadFailed) as caught:
        warm_up(model.run, SIGNATURE, "1", [sample(), sample("bad", 1, 2, fill), sample()])
    assert str(caught.value).startswith(f"failed to run warmup sample 'bad': {told}")
    assert caught.value.public.startswith(f"failed to run warmup sample 'bad': {public}")
    assert model.rows == [1, 1]


def test_a_sample_that_does_not_fit_into_memory() -> None:
    huge = partial(random, "X", Datatype.FP32, (1 << 40, 1 << 10))
    with pytest.raises(LoadFailed, match="'s': there is no memory for its inputs"):
        warm_up(Model().run, SIGNATURE, "1", [Sample("s", 1, 1, {"X": huge})])


def worker(root: Path, body: str, decoupled: bool = False) -> LoadedWorker:
    """A started worker whose model runs this on `requests` and has `self.seen`."""
    source = (
        "import os, threading, sys\n"
        "import numpy as np\n"
        "import triton_python_backend_utils as pb_utils\n"
        "FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL\n\n"
        "def echo(request):\n"
        "    array = request.inputs()[0].as_numpy()\n"
        "    return pb_utils.InferenceResponse([pb_utils.Tensor('Y', array)])\n\n"
        "class TritonPythonModel:\n"
        "    def initialize(self, args):\n"
        "        self.seen = 0\n\n" + indent(body, "    ")
    )
    loaded = PythonBackend().load_apart(spec(root, source))
    config = ModelConfig(name="m", max_batch_size=4)
    config.input.add(name="X", data_type="TYPE_FP32", dims=[2])
    config.output.add(name="Y", data_type="TYPE_FP32", dims=[2])
    config.model_transaction_policy.decoupled = decoupled
    loaded.begin(config, reading.signature(config), False)
    return loaded


PLAIN = """
def execute(self, requests):
    self.seen += 1
    print("batch", self.seen, "of", len(requests))
    return [echo(request) for request in requests]
"""


def test_a_worker_runs_samples_and_so_does_its_successor(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    model = worker(tmp_path, PLAIN)
    model.warm_up(SIGNATURE, 1, [sample(), sample(batch_size=3)])
    successor = model.again()
    lines = [record.getMessage() for record in caplog.records]
    told = ("batch 1 of 1", "batch 2 of 3")
    assert [line for line in lines if f"worker {model.process.pid}" in line] == [
        f"m worker {model.process.pid}: {text}" for text in told
    ]
    assert [line for line in lines if f"worker {successor.pid}" in line] == [
        f"m worker {successor.pid}: {text}" for text in told
    ]
    successor.kill()
    model.close()
    assert not psutil.pid_exists(successor.pid)


def test_large_tensors(tmp_path: Path) -> None:
    wide = TensorSpec("X", Datatype.FP32, (1 << 20,))
    signature = Signature("m", 4, (wide,), (TensorSpec("Y", Datatype.FP32, (1 << 20,)),))
    told = partial(random, "X", Datatype.FP32, (1, 1 << 20))
    model = worker(tmp_path, PLAIN)
    model.warm_up(signature, 1, [Sample("s", 2, 3, {"X": told})])
    model.close()


@pytest.mark.parametrize("coroutine", ["", "async "])
def test_responses_of_a_decoupled_model_are_taken(tmp_path: Path, coroutine: str) -> None:
    body = f"""
{coroutine}def execute(self, requests):
    for request in requests:
        threading.Thread(target=self.answer, args=(request,)).start()

def answer(self, request):
    sender = request.get_response_sender()
    for _ in range(20):
        sender.send(echo(request))
    sender.send(flags=FINAL)
"""
    signature = Signature("m", 4, SIGNATURE.inputs, SIGNATURE.outputs, decoupled=True)
    model = worker(tmp_path, body, decoupled=True)
    model.warm_up(signature, 1, [sample(batch_size=2, count=2)])
    model.close()
    assert not psutil.pid_exists(model.process.pid)


@pytest.mark.parametrize(
    ("does", "told"),
    [
        ("raise ValueError('no')", "message: ValueError: no"),
        ("return []", "Number of InferenceResponse objects do not match"),
        ("os._exit(3)", "worker process of model 'm' ended with status 3 while it executed"),
        ("os.kill(os.getpid(), 9)", "model 'm' was ended by SIGKILL while it executed"),
        (
            "return [pb_utils.InferenceResponse(error=pb_utils.TritonError('sorry'))"
            " for r in requests]",
            "sorry",
        ),
        (
            "return [pb_utils.InferenceRequest(model_name='other', requested_output_names=['Y'],"
            " inputs=r.inputs()).exec() for r in requests]",
            "services of the server are unavailable while the model is warmed up",
        ),
    ],
)
def test_a_worker_that_fails_is_ended(tmp_path: Path, does: str, told: str) -> None:
    model = worker(tmp_path, f"def execute(self, requests):\n    {does}\n")
    with pytest.raises(LoadFailed, match="failed to run warmup sample 'bad': ") as caught:
        model.warm_up(SIGNATURE, 1, [sample("bad")])
    assert told in str(caught.value)
    assert not psutil.pid_exists(model.process.pid)
    model.close()
