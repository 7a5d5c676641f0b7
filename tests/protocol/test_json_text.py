"""JSON that clients send, where there is no memory to parse it."""

import subprocess
import sys

import pytest

_PARSE = """
import resource
from headrace.core.errors import Overloaded
from headrace.doors.http.app import parse_object
from headrace.protocol.json_text import parse_json

text = b'{"a": [' + b"[1.5,2,3]," * 2_000_000 + b"1]}"
with open("/proc/self/statm") as file:
    used = int(file.read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (32 << 20),) * 2)
for parse in (parse_json, parse_object):
    try:
        parse(text)
    except Overloaded as error:
        print(error, flush=True)
"""


@pytest.mark.slow
def test_a_lack_of_memory_is_none_of_the_clients_faults() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _PARSE], capture_output=True, text=True, check=True
    )
    said = "the server has not enough memory to parse the request; try again later"
    assert done.stdout.splitlines() == [said, said]
