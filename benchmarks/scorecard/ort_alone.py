"""The model without any server: runs of a batch, one after the other, in a process of its own.

Usage: python -m benchmarks.scorecard.ort_alone MODEL ROWS SECONDS; prints requests per second,
where a request is what one run answers.
"""

import sys
import tempfile
from pathlib import Path
from time import perf_counter

import onnxruntime

from benchmarks.models import ALL_MODELS

_SETTLE_SECS = 0.5


def main(name: str, rows: int, seconds: float) -> float:
    """Runs per second, with one thread."""
    model = ALL_MODELS[name].widened(rows)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 3
    with tempfile.TemporaryDirectory(prefix="headrace-ort-") as folder:
        path = Path(folder) / "model.onnx"
        path.write_bytes(model.content())
        session = onnxruntime.InferenceSession(
            str(path), options, providers=["CPUExecutionProvider"]
        )
    inputs = [dict(case.inputs) for case in model.cases()]
    count = -1
    begun = perf_counter() + _SETTLE_SECS
    while (now := perf_counter()) < begun + seconds or count < 1:
        if now >= begun:
            if count < 0:
                begun, count = now, 0
            count += 1
        session.run(None, inputs[count % len(inputs)])
    return count / (perf_counter() - begun)


if __name__ == "__main__":
    print(main(sys.argv[1], int(sys.argv[2]), float(sys.argv[3])))
