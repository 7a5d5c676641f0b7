"""Placement in this process: ONNX Runtime on CPU and GPU, and Python models that are trusted.

`instances` has the instances on the event-loop thread and on threads of their own, `onnx` the
sessions with their options (`onnx_options`) and files (`onnx_files`), `gpus` the GPUs of this
process, `in_process` the Python models.
"""

import os

# ONNX Runtime (1.31, also on Linux) keeps a device id and events below the home directory and sends
# them to its maker, unless this is set before it is imported. Whoever wants that sets it to 0.
if not os.environ.get("ORT_DISABLE_TELEMETRY"):
    os.environ["ORT_DISABLE_TELEMETRY"] = "1"
