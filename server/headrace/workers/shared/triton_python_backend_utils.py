"""Triton's Python API for processes spawned by a model, which import it by name.

They have the worker's path, but no connection: functions that need the server raise there.
"""

import sys
from pathlib import Path
from types import ModuleType

if "headrace" not in sys.modules:
    _package = ModuleType("headrace")
    _package.__path__ = [str(Path(__file__).parents[2])]
    sys.modules["headrace"] = _package

from headrace.workers import triton_api

sys.modules[__name__] = triton_api
