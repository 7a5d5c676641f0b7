"""Placement in this process: ONNX Runtime on CPU and GPU.

`instances` has the instances, on the event loop or on threads, `onnx` the sessions with their
options (`onnx_options`) and files (`onnx_files`), and `gpus` the GPUs of this process.
"""

import os

# ONNX Runtime (1.31, also on Linux) stores a device id and events below the home directory and
# sends them to its vendor, unless this is set before it is imported. Set it to 0 to permit that.
if not os.environ.get("ORT_DISABLE_TELEMETRY"):
    os.environ["ORT_DISABLE_TELEMETRY"] = "1"
