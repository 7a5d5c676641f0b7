"""This project's server with the Python models that Triton gets, file by file."""

from dataclasses import replace

from benchmarks.peers.headrace.peer import PEER as HEADRACE
from benchmarks.peers.triton.peer import PEER as TRITON

PEER = replace(
    HEADRACE,
    name="headrace_python",
    title="headrace, Python models",
    models=TRITON.models,
    write_models=TRITON.write_models,
    guest=True,
)
