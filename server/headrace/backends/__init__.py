"""What computes. A backend turns a model's files into something that runs."""

import os

# ONNX Runtime (1.31, also on Linux) keeps a device id and events below the home directory and sends
# them to its maker, unless this is set before it is imported. Whoever wants that sets it to 0.
if not os.environ.get("ORT_DISABLE_TELEMETRY"):
    os.environ["ORT_DISABLE_TELEMETRY"] = "1"
